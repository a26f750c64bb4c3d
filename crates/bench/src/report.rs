//! Turns counts into a table, and checks the bars.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::gateway::Costs;
use crate::memory::{Held, Memory};
use crate::messages::{CHUNKS, SHORT};
use crate::routes::Cost;
use crate::vectors::Times;

/// A benchmark of `benches/instructions.rs`, and the divisor of its count.
struct Row {
    name: &'static str,
    per: u32,
    unit: &'static str,
    bar: Option<f64>,
}

const fn row(name: &'static str, per: u32, unit: &'static str) -> Row {
    Row { name, per, unit, bar: None }
}

const fn round(name: &'static str) -> Row {
    Row { name, per: 8192, unit: "a packet", bar: Some(INSTRUCTIONS_MAX) }
}

/// Instructions that a data packet may cost, both ends and its share of ACKs together.
const INSTRUCTIONS_MAX: f64 = 930.0;

/// The same with 64 connections in turns, where an ACK answers a packet or two.
const IN_TURNS_INSTRUCTIONS_MAX: f64 = 2_400.0;

/// The same for a packet that is alone on its way, with its ACK and its timers.
const LONE_INSTRUCTIONS_MAX: f64 = 4_800.0;

/// Instructions that dispatch, legal check and reorder check of a packet may cost together.
const SPRAY_INSTRUCTIONS_MAX: f64 = 250.0;

/// Bar: instructions per short message in the engines of both ends, with its share of ACKs.
const MESSAGE_INSTRUCTIONS_MAX: f64 = 2_600.0;

/// Bar: the same for a chunk of a long message, up to 64 KiB.
const CHUNK_INSTRUCTIONS_MAX: f64 = 5_800.0;

/// Bar: bytes per route in a table of ten million.
const LARGE_TABLE_BYTES_MAX: f64 = 24.0;

/// Bar: bytes per route in the switch, with as many IPv4 as IPv6 routes.
const ROUTE_BYTES_MAX: f64 = 160.0;

const ROWS: &[Row] = &[
    row("send.packets_256", 256, "a packet"),
    row("receive.in_order_256", 256, "a packet"),
    row("receive.reordered_256", 256, "a packet"),
    row("build_ack.in_order_256", 1, "an ACK"),
    row("build_ack.bitmap_of_256", 1, "an ACK"),
    row("process_ack.in_order_256", 1, "an ACK"),
    row("process_ack.bitmap_of_256", 1, "an ACK"),
    row("timers.idle_0", 1000, "a look"),
    row("timers.idle_100k", 1000, "a look"),
    row("set_up.connections_256", 256, "a connection"),
    round("round.strict_1_flow"),
    round("round.strict_8_flows"),
    round("round.by_flow_1_flow"),
    round("round.by_flow_8_flows"),
    round("round.beside_100k_idle"),
    round("round.unequal_paths"),
    round("round.unequal_paths_strict"),
    round("round.batch_of_1"),
    round("round.batch_of_8"),
    Row { name: "round.connections_64", per: 8192, unit: "a packet", bar: Some(IN_TURNS_INSTRUCTIONS_MAX) },
    round("round.buffers_of_32"),
    Row { name: "lone_packets.idle_0", per: 1024, unit: "a packet", bar: Some(LONE_INSTRUCTIONS_MAX) },
    Row { name: "lone_packets.beside_100k_idle", per: 1024, unit: "a packet", bar: Some(LONE_INSTRUCTIONS_MAX) },
    row("decide.remote", 256, "a packet"),
    row("decide.routed", 256, "a packet"),
    row("decide.local", 256, "a packet"),
    row("decide.incoming", 256, "a packet"),
    row("decide.remote_acl_10", 256, "a packet"),
    row("decide.remote_acl_1000", 256, "a packet"),
    row("decide.remote_groups", 256, "a packet"),
    row("decide.local_groups", 256, "a packet"),
    row("decide.local_groups_acl_1000", 256, "a packet"),
    row("decide.routed_groups_acl_1000", 256, "a packet"),
    row("decide.incoming_groups", 256, "a packet"),
    row("decide.incoming_groups_acl_1000", 256, "a packet"),
    row("decide.balanced", 256, "a packet"),
    row("decide.balanced_groups", 256, "a packet"),
    row("decide.balanced_incoming", 256, "a packet"),
    row("decide.balanced_incoming_groups", 256, "a packet"),
    row("decide.remote_vector", 256, "a packet"),
    row("decide.local_vector", 256, "a packet"),
    row("decide.incoming_vector", 256, "a packet"),
    row("decide.remote_groups_vector", 256, "a packet"),
    row("decide.local_groups_vector", 256, "a packet"),
    row("decide.incoming_groups_vector", 256, "a packet"),
    Row { name: "gateway_spray.in_order", per: 8192, unit: "a packet", bar: Some(SPRAY_INSTRUCTIONS_MAX) },
    Row { name: "gateway_spray.reordered", per: 8192, unit: "a packet", bar: Some(SPRAY_INSTRUCTIONS_MAX) },
    row("gateway_limit.two_stages", 8192, "a packet"),
    row("gateway_limit.found", 8192, "a packet"),
    row("gateway_forward.vpc", 8192, "a packet"),
    row("gateway_forward.eip", 8192, "a packet"),
    row("gateway_forward.snat", 8192, "a packet"),
    row("gateway_forward.idc", 8192, "a packet"),
    row("gateway_forward.cloud_service", 8192, "a packet"),
    row("gateway_lookup.batch_of_100k_routes", 8192, "a look-up"),
    Row { name: "message.of_64_bytes", per: SHORT, unit: "a message", bar: Some(MESSAGE_INSTRUCTIONS_MAX) },
    Row { name: "message_chunk.of_1_mib", per: CHUNKS, unit: "a chunk", bar: Some(CHUNK_INSTRUCTIONS_MAX) },
];

/// Pairs: the second, with 100k idle connections, may cost no more than the first.
const NO_GROWTH: &[(&str, &str)] = &[
    ("round.by_flow_8_flows", "round.beside_100k_idle"),
    ("lone_packets.idle_0", "lone_packets.beside_100k_idle"),
    ("timers.idle_0", "timers.idle_100k"),
];
/// Decisions: the second, through a load balancer, may make a packet a tenth more expensive than the first, without
/// one; and the benchmark of the transport that is added to both.
const BALANCED: &[(&str, &str, &str)] = &[
    ("decide.routed", "decide.balanced", "send.packets_256"),
    ("decide.routed_groups_acl_1000", "decide.balanced_groups", "send.packets_256"),
    ("decide.incoming", "decide.balanced_incoming", "receive.in_order_256"),
    ("decide.incoming_groups", "decide.balanced_incoming_groups", "receive.in_order_256"),
];
const BALANCED_TOLERANCE: f64 = 0.10;
/// Tolerance within a pair: a measurement begins at another position in a page or a batch.
const NO_GROWTH_TOLERANCE: f64 = 0.02;

/// Tolerance relative to the baseline: memory copies differ between processors and C libraries.
const BASELINE_TOLERANCE: f64 = 0.10;

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// What was measured.
    pub name: String,
    /// The value.
    pub value: f64,
    /// The unit.
    pub unit: String,
    /// The committed value of earlier runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baseline: Option<f64>,
    /// The bar, which holds whatever the baseline says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bar: Option<f64>,
}

/// All measurements.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Line by line.
    pub lines: Vec<Line>,
    /// Missed bars.
    pub missed: Vec<String>,
}

impl Report {
    /// Reads gungraun's counts below `dir` and compares them with `baseline`.
    ///
    /// # Errors
    /// A benchmark is missing or cannot be read.
    pub fn add_instructions(&mut self, dir: &Path, baseline: &BTreeMap<String, f64>) -> Result<()> {
        for row in ROWS {
            let value = instructions(dir, row.name)? / f64::from(row.per);
            let baseline = baseline.get(row.name).copied();
            if let Some(baseline) = baseline.filter(|b| value > b * (1.0 + BASELINE_TOLERANCE)) {
                self.missed.push(format!("{}: {value:.1} instructions, baseline {baseline:.1}", row.name));
            }
            self.add(row.name, value, &format!("instructions {}", row.unit), baseline, row.bar);
        }
        let value = |name: &str| self.lines.iter().find(|l| l.name == name).map_or(0.0, |l| l.value);
        for (alone, beside) in NO_GROWTH {
            let (alone, grown) = (value(alone), value(beside));
            if grown > alone * (1.0 + NO_GROWTH_TOLERANCE) {
                self.missed.push(format!("{beside}: {grown:.1} instructions, {alone:.1} without idle connections"));
            }
        }
        for (direct, balanced, transport) in BALANCED {
            let [direct, cost] = [direct, balanced].map(|decision| value(decision) + value(transport));
            if cost > direct * (1.0 + BALANCED_TOLERANCE) {
                self.missed.push(format!(
                    "{balanced}: {cost:.1} instructions with the transport, {direct:.1} without a load balancer"
                ));
            }
        }
        Ok(())
    }

    /// Adds the memory of connections.
    pub fn add_memory(&mut self, memory: &Memory) {
        let all = f64::from(memory.scale.idle + memory.scale.active);
        let active = f64::from(memory.scale.active);
        for (side, held) in [("sender", &memory.sender), ("receiver", &memory.receiver)] {
            let Held { idle, active: more, waiting_each, .. } = *held;
            let idle_each = idle as f64 / all;
            let active_each = idle_each + more as f64 / active;
            let mut add = |what: &str, value, unit, bar| self.add(&format!("{side}.{what}"), value, unit, None, bar);
            add("idle_connection", idle_each, "bytes", Some(512.0));
            add("active_connection", active_each, "bytes", Some(4096.0));
            add("active_and_16_waiting", active_each + waiting_each as f64, "bytes", Some(4096.0));
            add("idle_1M", idle_each, "MB", Some(600.0));
            add("active_100k", active_each / 10.0, "MB", Some(450.0));
        }
        self.add("both_ends_resident", memory.resident_bytes as f64 / 1e6, "MB", None, None);
    }

    /// Adds wall times, which have no bar because they depend on the machine.
    pub fn add_wall_times(&mut self, times: &[(impl AsRef<str>, f64)]) {
        for (name, ns) in times {
            self.add(&format!("wall.{}", name.as_ref()), *ns, "ns a packet", None, None);
        }
    }

    /// Adds the times of vectors. With very many flow records, the bar is four fifths of the time one by one: 25 %
    /// more packets per second.
    pub fn add_vectors(&mut self, times: &[Times]) {
        for Times { many, name, alone_ns, vectors_ns, percent } in times {
            let bar = many.then_some(80.0);
            self.add(&format!("wall.{name}.one_by_one"), *alone_ns, "ns a packet", None, None);
            self.add(&format!("wall.{name}.vectors"), *vectors_ns, "ns a packet", None, None);
            self.add(&format!("wall.{name}.over_one_by_one"), *percent, "% of the time", None, bar);
        }
    }

    /// Adds the cost of routes.
    pub fn add_routes(&mut self, costs: &[Cost]) {
        for Cost { name, bytes_each, build_ms, packet_ns } in costs {
            self.add(&format!("{name}.memory"), *bytes_each, "bytes a route", None, Some(ROUTE_BYTES_MAX));
            self.add(&format!("wall.{name}.build"), *build_ms, "ms", None, None);
            self.add(&format!("wall.{name}.decide"), *packet_ns, "ns a packet", None, None);
        }
    }

    /// Adds the cost of the gateway's pipeline.
    pub fn add_gateway(&mut self, costs: &Costs) {
        for (name, ns, bar) in &costs.times {
            self.add(&format!("time.{name}"), *ns, "ns a packet", None, *bar);
        }
        for (what, count) in &costs.allocations {
            self.add(&format!("gateway.allocations.{what}"), *count as f64, "allocations", None, Some(0.0));
        }
        self.add("gateway.10M_routes.memory", costs.route_bytes, "bytes a route", None, Some(LARGE_TABLE_BYTES_MAX));
    }

    /// Adds allocations in steady state; the bar is zero.
    pub fn add_allocations(&mut self, load: &str, sender: u64, receiver: u64) {
        for (side, count) in [("sender", sender), ("receiver", receiver)] {
            self.add(&format!("{side}.allocations.{load}"), count as f64, "allocations", None, Some(0.0));
        }
    }

    /// The values, as the next baseline.
    pub fn baseline(&self) -> BTreeMap<String, f64> {
        let counted = self.lines.iter().filter(|line| line.unit.starts_with("instructions"));
        counted.map(|line| (line.name.clone(), (line.value * 10.0).round() / 10.0)).collect()
    }

    fn add(&mut self, name: &str, value: f64, unit: &str, baseline: Option<f64>, bar: Option<f64>) {
        if let Some(bar) = bar.filter(|bar| value > *bar) {
            self.missed.push(format!("{name}: {value:.1} {unit}, at most {bar} allowed"));
        }
        self.lines.push(Line { name: name.to_owned(), value, unit: unit.to_owned(), baseline, bar });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<34} {:>10}  {:<25} {:>9} {:>6}", "", "measured", "", "baseline", "bar")?;
        let number = |value: Option<f64>, digits| value.map_or(String::new(), |v| format!("{v:.digits$}"));
        for Line { name, value, unit, baseline, bar } in &self.lines {
            let (baseline, bar) = (number(*baseline, 1), number(*bar, 0));
            writeln!(f, "{name:<34} {value:>10.1}  {unit:<25} {baseline:>9} {bar:>6}")?;
        }
        for missed in &self.missed {
            writeln!(f, "MISSED  {missed}")?;
        }
        Ok(())
    }
}

/// The instruction count in gungraun's summary of benchmark `name` (function, dot, id).
fn instructions(dir: &Path, name: &str) -> Result<f64> {
    let path = dir.join(name).join("summary.json");
    let text = std::fs::read_to_string(&path).with_context(|| format!("no result at {}", path.display()))?;
    let summary: serde_json::Value = serde_json::from_str(&text)?;
    let metrics = &summary["profiles"][0]["data"]["total"]["metrics"];
    metrics["Ir"]["values"]["new"].as_f64().with_context(|| format!("no instruction count in {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_of_a_service_is_a_missed_bar() {
        let costs = Costs { times: Vec::new(), allocations: vec![("vpc", 0), ("snat", 1)], route_bytes: 20.0 };
        let mut report = Report::default();
        report.add_gateway(&costs);
        assert_eq!(report.missed, ["gateway.allocations.snat: 1.0 allocations, at most 0 allowed"]);
    }

    #[test]
    fn vectors_must_save_a_fifth_of_the_time_with_very_many_records() {
        let missed = |many, percent| {
            let times = Times { many, name: "vectors".to_owned(), alone_ns: 100.0, vectors_ns: percent, percent };
            let mut report = Report::default();
            report.add_vectors(&[times]);
            assert_eq!(report.lines.len(), 3);
            report.missed
        };
        assert!(missed(true, 79.9).is_empty());
        assert_eq!(missed(true, 80.1), ["wall.vectors.over_one_by_one: 80.1 % of the time, at most 80 allowed"]);
        assert!(missed(false, 120.0).is_empty());
    }
}
