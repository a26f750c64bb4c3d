//! Delivery times of lost packets, and the cost of a dead path to a flow, with bars.

use anyhow::Result;
use serde_json::json;

use super::plot::Panel;
use super::runs::{cumulative, each, percentile, scenario, whole};
use super::watch::Longest;
use super::{Bar, Outcome};
use crate::scenario::{FaultConfig, Gap, Scenario, Topology, Workload};
use crate::{LinkPatch, Ns, World};

/// Round trip of the fabric, ns.
const RTT_NS: f64 = 100_000.0;

/// Sending patterns: name, gap in ns, its distribution, packets at once, divisor of the number of packets.
pub(super) const WAYS: [(&str, u64, Gap, u32, u64); 4] = [
    ("many: every 2 us", 2_000, Gap::Poisson, 1, 1),
    ("some: every 50 us", 50_000, Gap::Poisson, 1, 1),
    ("bursts: 20 every ms", 1_000_000, Gap::Fixed, 20, 1),
    ("alone: every ms", 1_000_000, Gap::Poisson, 1, 2),
];

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let base = scenario("recovery", include_str!("../../studies/recovery.toml"))?;
    let mut outcome = Outcome::default();
    let mut data = serde_json::Map::new();
    lost_packets(&base, quick, &mut outcome, &mut data)?;
    dead_paths(&base, quick, &mut outcome, &mut data)?;
    outcome.data = data.into();
    Ok(outcome)
}

fn send(scenario: &mut Scenario, way: usize, part: u64) {
    if let Workload::Packets { packets, gap, gap_kind, burst, .. } = &mut scenario.workloads[0] {
        let (_, ns, kind, at_once, of) = WAYS[way];
        (*gap, *gap_kind, *burst) = (Ns(ns), kind, at_once);
        *packets /= of * part;
    }
}

fn lost_packets(
    base: &Scenario,
    quick: bool,
    outcome: &mut Outcome,
    data: &mut serde_json::Map<String, serde_json::Value>,
) -> Result<()> {
    let losses: &[f64] = if quick { &[0.001, 0.01] } else { &[0.001, 0.002, 0.005, 0.01] };
    let seeds = if quick { 4 } else { 8 };
    let runs: Vec<(usize, f64, u64)> =
        (0..WAYS.len()).flat_map(|w| losses.iter().flat_map(move |l| (1..=seeds).map(move |s| (w, *l, s)))).collect();
    let answers = each(&runs, |(way, loss, seed)| {
        let mut s = base.clone();
        if let Topology::Parallel { link, .. } = &mut s.topology {
            link.loss = Some(*loss);
        }
        // Single packets take little time to simulate, and few of them are lost.
        send(&mut s, *way, if quick && *way < 3 { 2 } else { 1 });
        let (world, _) = whole(&s, *seed)?;
        Ok(world.statistics().recovery_ns.iter().map(|ns| *ns as f64 / RTT_NS).collect::<Vec<f64>>())
    })?;
    let mut panels = Vec::new();
    for (w, way) in WAYS.iter().enumerate() {
        let mut panel =
            Panel::new(&format!("Delivery of lost packets; {}", way.0), "round trips of 100 us", "% of them");
        let mut all = Vec::new();
        for loss in losses {
            let own = runs.iter().zip(&answers).filter(|((rw, l, _), _)| *rw == w && l == loss);
            let mut own: Vec<f64> = own.flat_map(|(_, a)| a.iter().copied()).collect();
            let [p50, p99, max] = [0.5, 0.99, 1.0].map(|p| percentile(&mut own, p));
            outcome.lines.push(format!(
                "{}, {} % loss: {} lost; delivered after p50 {p50:.2}, p99 {p99:.2}, max {max:.2} RTT",
                way.0,
                loss * 100.0,
                own.len()
            ));
            data.insert(
                format!("{}, loss {loss}", way.0),
                json!({ "lost": own.len(), "p50_rtt": p50, "p99_rtt": p99, "max_rtt": max }),
            );
            panel = panel.line(format!("{} % loss", loss * 100.0), cumulative(&mut own));
            all.append(&mut own);
        }
        outcome.bars.push(Bar {
            name: format!("delivery of a lost packet, {}, P99, RTT", way.0),
            value: percentile(&mut all, 0.99),
            limit: 3.0,
        });
        panels.push(panel);
    }
    outcome.panels.extend(panels);
    Ok(())
}

fn dead_paths(
    base: &Scenario,
    quick: bool,
    outcome: &mut Outcome,
    data: &mut serde_json::Map<String, serde_json::Value>,
) -> Result<()> {
    let seeds = if quick { 4 } else { 50 };
    // One, two or three of four paths fail permanently, in one direction or both.
    let runs: Vec<(usize, u32, bool, u64)> = (0..WAYS.len())
        .flat_map(|w| [1, 2, 3].into_iter().map(move |n| (w, n)))
        .flat_map(|(w, n)| [false, true].into_iter().map(move |b| (w, n, b)))
        .flat_map(|(w, n, b)| (1..=seeds).map(move |s| (w, n, b, s)))
        .collect();
    let answers = each(&runs, |(way, dead, both, seed)| outages(base, *way, *dead, *both, *seed))?;
    let mut panel = Panel::new("Outage of a flow when 1 to 3 of 4 paths die", "ms", "% of flows").log(true, false);
    for (w, way) in WAYS.iter().enumerate() {
        let own = runs.iter().zip(&answers).filter(|((rw, ..), _)| *rw == w);
        let mut own: Vec<f64> = own.flat_map(|(_, a)| a.iter().copied()).collect();
        let [p50, p99, max] = [0.5, 0.99, 1.0].map(|p| percentile(&mut own, p));
        outcome.lines.push(format!(
            "dead paths, {}: {} flows, outage p50 {p50:.3} ms, p99 {p99:.3} ms, max {max:.3} ms",
            way.0,
            own.len()
        ));
        data.insert(
            format!("dead paths, {}", way.0),
            json!({ "flows": own.len(), "p50_ms": p50, "p99_ms": p99, "max_ms": max }),
        );
        outcome.bars.push(Bar {
            name: format!("outage of a flow by dead paths, {}, max, ms", way.0),
            value: max,
            limit: 5.0,
        });
        panel = panel.line(way.0, cumulative(&mut own));
    }
    outcome.panels.push(panel);
    Ok(())
}

/// Outage of each flow when this many of four paths fail permanently, in one direction or both, ms.
pub(super) fn outages(base: &Scenario, way: usize, dead: u32, both: bool, seed: u64) -> Result<Vec<f64>> {
    let mut s = base.clone();
    send(&mut s, way, if way == 0 { 4 } else { 50 });
    for path in 0..dead {
        for direction in if both { &["h0>h1", "h1>h0"][..] } else { &["h0>h1"] } {
            s.faults.push(FaultConfig {
                // At a different position in a group of packets for each seed.
                at: Ns(20_000_000 + seed * 37_000),
                links: Some(format!("{direction}/{}", (seed + u64::from(path)) % 4)),
                set: LinkPatch { down: Some(true), ..LinkPatch::default() },
                ..FaultConfig::default()
            });
        }
    }
    let mut world = World::new(&s, seed)?;
    let (watch, longest) = Longest::new();
    world.add_checker(watch);
    world.run();
    anyhow::ensure!(world.violations.is_empty(), "{}", crate::Report::of(&world));
    // The usual delay of a packet is not part of the outage.
    let usual = RTT_NS / 2.0;
    Ok(longest.borrow().values().map(|ns| (*ns as f64 - usual).max(0.0) / 1e6).collect())
}
