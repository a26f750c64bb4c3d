//! Results of a run.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::violation::Violation;
use crate::world::World;

/// Maximum number of hosts for a report of every path between two of them, because the number of paths is quadratic.
const MOST_HOSTS_WITH_PATHS: usize = 128;

/// A distribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    /// Number of values.
    pub count: u64,
    /// Their mean, us.
    pub mean_us: f64,
    /// Smallest, us.
    pub min_us: f64,
    /// 50th percentile, us.
    pub p50_us: f64,
    /// 90th percentile, us.
    pub p90_us: f64,
    /// 99th percentile, us.
    pub p99_us: f64,
    /// 99.9th percentile, us.
    pub p999_us: f64,
    /// Largest, us.
    pub max_us: f64,
}

impl Distribution {
    /// From values in ns.
    pub fn of(values: &[u64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_unstable();
        let us = |ns: u64| ns as f64 / 1e3;
        // Nearest rank.
        let at = |p: f64| us(sorted[((sorted.len() as f64 * p).ceil() as usize).clamp(1, sorted.len()) - 1]);
        match (sorted.first(), sorted.last()) {
            (Some(&min), Some(&max)) => Distribution {
                count: sorted.len() as u64,
                mean_us: sorted.iter().map(|v| *v as f64).sum::<f64>() / sorted.len() as f64 / 1e3,
                min_us: us(min),
                p50_us: at(0.5),
                p90_us: at(0.9),
                p99_us: at(0.99),
                p999_us: at(0.999),
                max_us: us(max),
            },
            _ => Distribution::default(),
        }
    }
}

/// One workload.
#[derive(Clone, Debug, Serialize)]
pub struct WorkloadReport {
    /// Its name.
    pub name: String,
    /// Packets, or requests with their responses.
    pub messages: u64,
    /// Their size, bytes: of frames for packets, of payload for requests.
    pub bytes: u64,
    /// From sending to delivery, or from a request to its response.
    pub latency: Distribution,
    /// From the first transmission to the last delivery, ns.
    pub duration_ns: u64,
    /// Bytes divided by that time, Gbit/s.
    pub throughput_gbps: f64,
    /// Bytes delivered in each bin of the scenario's width.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bins_bytes: Vec<u64>,
}

/// One path between two hosts.
#[derive(Clone, Debug, Serialize)]
pub struct PathReport {
    /// Sending host.
    pub from: u32,
    /// Receiving host.
    pub to: u32,
    /// Index of the path.
    pub path: u16,
    /// Datagrams sent, plain VXLAN included.
    pub packets: u64,
    /// Its share of the bytes between the two hosts, 0 to 1.
    pub share: f64,
}

/// One link with losses or marks.
#[derive(Clone, Debug, Serialize)]
pub struct LinkReport {
    /// Its name.
    pub name: String,
    /// Packets that entered.
    pub packets: u64,
    /// Packets that it lost.
    pub dropped_packets: u64,
    /// Packets that it marked.
    pub marked_packets: u64,
    /// Maximum queue length, bytes.
    pub queue_bytes_max: u64,
}

/// One host.
#[derive(Clone, Debug, Serialize)]
pub struct HostReport {
    /// Its number.
    pub host: u32,
    /// Turns of its loop.
    pub turns: u64,
    /// CPU time of these turns, ns.
    pub busy_ns: u64,
    /// All counters of its daemon, without zeros.
    pub counters: BTreeMap<String, u64>,
}

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The scenario's name.
    pub scenario: String,
    /// The seed.
    pub seed: u64,
    /// When the run ended, ns.
    pub ended_at_ns: u64,
    /// All workloads are finished, and all buffers released.
    pub done: bool,
    /// Equal for two runs if and only if they were the same (up to hash collisions).
    pub event_hash: String,
    /// Number of events.
    pub events: u64,
    /// Datagrams sent by hosts.
    pub sent_packets: u64,
    /// Datagrams dropped, by reason.
    pub dropped_packets: BTreeMap<&'static str, u64>,
    /// DATA packets among them.
    pub lost_data_packets: u64,
    /// Time from the first transmission of a lost packet until it arrived.
    pub recovery: Distribution,
    /// Lost packets that were never retransmitted (they left as plain VXLAN, or their host crashed).
    pub unrecovered_packets: u64,
    /// Packets of light guests that left as plain VXLAN or were in a daemon that crashed.
    pub exempt_packets: u64,
    /// Workloads.
    pub workloads: Vec<WorkloadReport>,
    /// Paths with traffic; none in worlds of more than 128 hosts.
    pub paths: Vec<PathReport>,
    /// Links that lost or marked something.
    pub links: Vec<LinkReport>,
    /// Hosts.
    pub hosts: Vec<HostReport>,
    /// Number of violations.
    pub violations: u64,
    /// The first violations.
    pub violation_list: Vec<Violation>,
}

impl Report {
    /// The results of a world so far.
    pub fn of(world: &World) -> Self {
        let s = &world.statistics;
        let workloads = world.scenario.workloads.iter().zip(&s.workloads).enumerate().map(|(i, (workload, w))| {
            let duration_ns = w.first_at.map_or(0, |first| w.last_at.saturating_sub(first));
            WorkloadReport {
                name: if workload.name().is_empty() { format!("workload {i}") } else { workload.name().to_string() },
                messages: w.messages,
                bytes: w.bytes,
                latency: Distribution::of(&w.latencies),
                duration_ns,
                throughput_gbps: if duration_ns > 0 { w.bytes as f64 * 8.0 / duration_ns as f64 } else { 0.0 },
                bins_bytes: w.bins.clone(),
            }
        });
        let links = (0..).zip(&world.network.links).filter(|(_, l)| l.dropped_packets + l.marked_packets > 0);
        let links = links.map(|(i, l)| LinkReport {
            name: world.network.name(i).to_string(),
            packets: l.packets,
            dropped_packets: l.dropped_packets,
            marked_packets: l.marked_packets,
            queue_bytes_max: l.queue_bytes_max,
        });
        let hosts = world.hosts.iter().map(|h| HostReport {
            host: h.id,
            turns: h.turns,
            busy_ns: h.busy_ns,
            counters: h
                .core()
                .map(|core| core.totals().counters().into_iter().filter(|(_, n)| *n > 0).collect())
                .unwrap_or_default(),
        });
        Report {
            scenario: world.scenario.name.clone(),
            seed: world.seed,
            ended_at_ns: world.now(),
            done: world.done_at().is_some(),
            event_hash: format!("{:016x}", world.event_hash()),
            events: s.events,
            sent_packets: s.sent_packets,
            dropped_packets: s.drops.clone(),
            lost_data_packets: s.lost_data_packets,
            recovery: Distribution::of(&s.recovery_ns),
            unrecovered_packets: s.unrecovered,
            exempt_packets: world.flows.exempt,
            workloads: workloads.collect(),
            paths: paths(world),
            links: links.collect(),
            hosts: hosts.collect(),
            violations: world.violations.len(),
            violation_list: world.violations.iter().cloned().collect(),
        }
    }
}

fn paths(world: &World) -> Vec<PathReport> {
    if world.hosts.len() > MOST_HOSTS_WITH_PATHS {
        return Vec::new();
    }
    let mut all: BTreeMap<(u32, u32, u16), (u64, u64)> = BTreeMap::new();
    for host in &world.hosts {
        for lane in host.underlay().lanes().iter().filter(|l| l.packets > 0) {
            let path = lane.source_port.wrapping_sub(crate::build::SOURCE_PORT_BASE);
            let entry = all.entry((host.id, lane.to, path)).or_default();
            *entry = (entry.0 + lane.packets, entry.1 + lane.bytes);
        }
    }
    let mut totals: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for (&(from, to, _), &(_, bytes)) in &all {
        *totals.entry((from, to)).or_default() += bytes;
    }
    let report = |(&(from, to, path), &(packets, bytes)): (&(u32, u32, u16), &(u64, u64))| {
        let share = bytes as f64 / totals.get(&(from, to)).copied().unwrap_or(1).max(1) as f64;
        PathReport { from, to, path, packets, share }
    };
    all.iter().map(report).collect()
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "p50 {:.1}  p90 {:.1}  p99 {:.1}  p99.9 {:.1}  max {:.1} us",
            self.p50_us, self.p90_us, self.p99_us, self.p999_us, self.max_us
        )
    }
}

/// Maximum rows of a kind in the text report; the JSON has all.
const ROWS: usize = 16;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.scenario.is_empty() { "unnamed scenario" } else { &self.scenario };
        writeln!(f, "{name}, seed {}, event hash {}", self.seed, self.event_hash)?;
        let ended = self.ended_at_ns as f64 / 1e6;
        let done = if self.done { "everything done and released" } else { "NOT everything done" };
        writeln!(f, "{ended:.3} ms of virtual time, {done}; {} events", self.events)?;
        for w in &self.workloads {
            writeln!(f, "\n{}", w.name)?;
            writeln!(f, "  {} messages, {} bytes, {:.3} Gbit/s", w.messages, w.bytes, w.throughput_gbps)?;
            writeln!(f, "  latency  {}", w.latency)?;
        }
        writeln!(f, "\nunderlay")?;
        writeln!(f, "  {} datagrams sent, {} DATA lost", self.sent_packets, self.lost_data_packets)?;
        for (reason, count) in &self.dropped_packets {
            writeln!(f, "  dropped: {reason} {count}")?;
        }
        if self.recovery.count > 0 {
            writeln!(f, "  {} lost and repaired, after  {}", self.recovery.count, self.recovery)?;
        }
        if self.unrecovered_packets + self.exempt_packets > 0 {
            writeln!(
                f,
                "  {} never repeated; {} guest packets exempt (plain VXLAN, or their daemon died)",
                self.unrecovered_packets, self.exempt_packets
            )?;
        }
        for p in self.paths.iter().take(ROWS) {
            writeln!(
                f,
                "  h{} to h{} path {}: {} datagrams, {:.1} %",
                p.from,
                p.to,
                p.path,
                p.packets,
                p.share * 100.0
            )?;
        }
        for l in self.links.iter().take(ROWS) {
            let queue = l.queue_bytes_max;
            writeln!(
                f,
                "  link {}: {} in, {} lost, {} marked, queue up to {queue} bytes",
                l.name, l.packets, l.dropped_packets, l.marked_packets
            )?;
        }
        for h in self.hosts.iter().take(4) {
            writeln!(f, "\nhost {}: {} turns, {:.3} ms of CPU", h.host, h.turns, h.busy_ns as f64 / 1e6)?;
            let shown = ["rte.", "drop.", "datapath.plain", "fault."];
            for (name, count) in h.counters.iter().filter(|(n, _)| shown.iter().any(|s| n.starts_with(s))) {
                writeln!(f, "  {name} {count}")?;
            }
        }
        if self.violations == 0 {
            return writeln!(f, "\nno violations");
        }
        writeln!(f, "\n{} VIOLATIONS", self.violations)?;
        for v in &self.violation_list {
            writeln!(f, "  {:.3} ms {:?}: {}", v.at_ns as f64 / 1e6, v.kind, v.detail)?;
        }
        Ok(())
    }
}
