//! The report, as text and as JSON.

use std::fmt;

use hdrhistogram::Histogram;
use serde::Serialize;

/// A report. Values that a test does not measure are omitted.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) test: &'static str,
    pub(crate) transport: String,
    pub(crate) size_bytes: usize,
    pub(crate) messages: u64,
    pub(crate) seconds: f64,
    pub(crate) gbit_per_s: f64,
    pub(crate) messages_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) latency_us: Option<Latency>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) engine: Option<Engine>,
}

/// Latency of calls, us.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Latency {
    pub(crate) min: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p99_9: f64,
    pub(crate) max: f64,
    /// Cumulative distribution for plots: share of calls, and latency.
    pub(crate) distribution: Vec<(f64, f64)>,
}

/// Counters of this end's engine and NIC.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Engine {
    pub(crate) rtt_us: f64,
    pub(crate) base_rtt_us: f64,
    pub(crate) window_bytes: u32,
    pub(crate) loss: f32,
    pub(crate) repairs: u64,
    pub(crate) lost: u64,
    pub(crate) timeouts: u64,
    pub(crate) lane_flips: u64,
    pub(crate) switches: u64,
    /// Packets per system call; with an RDMA NIC, requests per doorbell.
    pub(crate) packets_per_call: f64,
    /// Whether an RDMA NIC is used.
    pub(crate) verbs: bool,
}

impl Engine {
    /// Counters of a worker with one connection.
    pub(crate) fn of(worker: &bifrost_endpoint::Worker, endpoint: &bifrost_endpoint::Endpoint) -> Option<Self> {
        let (rtt, base, window_bytes, loss, _) = endpoint.measured()?;
        let counters = worker.counters();
        let (nic, socket) = worker.nic_counters();
        Some(Self {
            rtt_us: rtt as f64 / 1e3,
            base_rtt_us: base as f64 / 1e3,
            window_bytes,
            loss,
            repairs: counters.repair_requests,
            lost: counters.lost_requests,
            timeouts: counters.timeouts,
            lane_flips: counters.lane_flips,
            switches: counters.switches,
            packets_per_call: match worker.verbs_counters() {
                Some(nic) => nic.posted_requests as f64 / nic.batches.max(1) as f64,
                None => nic.sent_packets as f64 / socket.send_calls.max(1) as f64,
            },
            verbs: worker.verbs_counters().is_some(),
        })
    }
}

impl Latency {
    /// Converts a histogram of nanoseconds.
    pub(crate) fn of(histogram: &Histogram<u64>) -> Self {
        let us = |ns: u64| ns as f64 / 1e3;
        let at = |share| us(histogram.value_at_quantile(share));
        let distribution =
            histogram.iter_quantiles(2).map(|v| (v.quantile_iterated_to(), us(v.value_iterated_to()))).collect();
        Self {
            min: us(histogram.min()),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p99_9: at(0.999),
            max: us(histogram.max()),
            distribution,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} over {}", self.test, self.transport)?;
        writeln!(f, "{} messages of {} bytes in {:.2} s", self.messages, self.size_bytes, self.seconds)?;
        writeln!(f, "{:.2} Gbit/s, {:.0} messages/s", self.gbit_per_s, self.messages_per_s)?;
        if let Some(l) = &self.latency_us {
            writeln!(f, "{:>10} {:>10} {:>10} {:>10} {:>10} {:>10}", "min", "p50", "p90", "p99", "p99.9", "max us")?;
            let Latency { min, p50, p90, p99, p99_9, max, .. } = l;
            writeln!(f, "{min:>10.1} {p50:>10.1} {p90:>10.1} {p99:>10.1} {p99_9:>10.1} {max:>10.1}")?;
        }
        if let Some(e) = &self.engine {
            writeln!(
                f,
                "round trip {:.0} us (minimum {:.0}), window {} KB",
                e.rtt_us,
                e.base_rtt_us,
                e.window_bytes / 1024
            )?;
            writeln!(
                f,
                "loss {:.3} %, {} requests lost, {} units resent, {} timeouts, {} changes of queue pair, {} of service",
                e.loss * 100.0,
                e.lost,
                e.repairs,
                e.timeouts,
                e.lane_flips,
                e.switches
            )?;
            let what = if e.verbs { "requests per doorbell" } else { "packets per system call" };
            writeln!(f, "{:.1} {what}", e.packets_per_call)?;
        }
        Ok(())
    }
}
