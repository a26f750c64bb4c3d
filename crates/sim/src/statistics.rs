//! Counters of a running world.

use std::collections::BTreeMap;

use crate::link::DropReason;
use crate::scenario::Scenario;

/// Maximum number of latencies stored per workload; beyond that, only every n-th is stored.
const KEPT_LATENCIES: usize = 1 << 20;

/// Counters of a world.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    /// Number of events.
    pub events: u64,
    /// Turns of all hosts.
    pub turns: u64,
    /// Datagrams sent by hosts.
    pub sent_packets: u64,
    /// Datagrams dropped, by reason.
    pub(crate) drops: BTreeMap<&'static str, u64>,
    /// DATA packets among them.
    pub lost_data_packets: u64,
    /// For each lost packet that arrived later: time since its first transmission, ns.
    pub recovery_ns: Vec<u64>,
    /// Lost packets that never arrived; they may have left as plain VXLAN.
    pub unrecovered: u64,
    pub(crate) workloads: Vec<WorkloadStatistics>,
    bin_ns: u64,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct WorkloadStatistics {
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
    pub(crate) latencies: Vec<u64>,
    /// Every n-th latency is kept.
    every: u64,
    pub(crate) first_at: Option<u64>,
    pub(crate) last_at: u64,
    pub(crate) bins: Vec<u64>,
}

impl Statistics {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let empty = WorkloadStatistics { every: 1, ..WorkloadStatistics::default() };
        Statistics { workloads: vec![empty; scenario.workloads.len()], bin_ns: scenario.bin.0, ..Statistics::default() }
    }

    pub(crate) fn dropped(&mut self, reason: DropReason) {
        *self.drops.entry(reason.name()).or_default() += 1;
    }

    /// A message arrived: a packet of a light guest, or a request with its response.
    pub(crate) fn received(&mut self, workload: u32, at: u64, bytes: u64, latency: u64) {
        let w = &mut self.workloads[workload as usize];
        if w.messages.is_multiple_of(w.every) {
            w.latencies.push(latency);
            if w.latencies.len() >= KEPT_LATENCIES {
                let mut n = 0;
                w.latencies.retain(|_| {
                    n += 1;
                    n % 2 == 1
                });
                w.every *= 2;
            }
        }
        w.messages += 1;
        w.bytes += bytes;
        w.first_at = w.first_at.or(Some(at.saturating_sub(latency)));
        w.last_at = at;
        if let Some(bin) = at.checked_div(self.bin_ns) {
            let bin = bin as usize;
            if w.bins.len() <= bin {
                w.bins.resize(bin + 1, 0);
            }
            w.bins[bin] += bytes;
        }
    }

    /// Bytes that arrived, by workload.
    pub(crate) fn workload_bytes(&self) -> Vec<u64> {
        self.workloads.iter().map(|w| w.bytes).collect()
    }

    /// Datagrams dropped, by reason.
    pub fn drops(&self) -> &BTreeMap<&'static str, u64> {
        &self.drops
    }
}
