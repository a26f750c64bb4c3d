//! Many senders and one receiver: the effect of congestion control on long transfers, and of the initial window on
//! bursts.

use anyhow::Result;
use serde_json::json;

use super::plot::Panel;
use super::runs::{each, scenario, whole};
use super::{Bar, Outcome};
use crate::Ns;
use crate::scenario::{CongestionControl, Members, Scenario, Topology, TransportSettings, Workload};

/// A variant: its name, and its transport settings.
struct Way {
    name: &'static str,
    set: fn(&mut TransportSettings),
}

/// Variants for long transfers.
const LONG: [Way; 4] = [
    Way { name: "Swift", set: |_| {} },
    Way { name: "Swift, a tenth lost is congestion", set: |t| t.heavy_loss_percent = Some(10) },
    Way { name: "Swift, target 25 us over base", set: |t| t.swift_noise = Some(Ns::us(25)) },
    Way { name: "none", set: |t| t.congestion_control = Some(CongestionControl::None) },
];

/// Variants for bursts, which depend on the initial window.
const BURST: [Way; 4] = [
    Way { name: "first window 512", set: |t| t.initial_window = Some(512) },
    Way { name: "128", set: |t| t.initial_window = Some(128) },
    Way { name: "32", set: |t| t.initial_window = Some(32) },
    Way { name: "16", set: |t| t.initial_window = Some(16) },
];

struct Answer {
    goodput: f64,
    lost: f64,
    p50: f64,
    p99: f64,
    last: f64,
    queue: f64,
}

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let base = scenario("incast", include_str!("../../studies/incast.toml"))?;
    let sizes: &[u32] = if quick { &[10, 100] } else { &[1, 10, 30, 100, 300, 1000] };
    let mut outcome = Outcome::default();
    let mut data = Vec::new();
    // In long transfers, all senders together send this many packets. In bursts, each sends 200.
    let total = if quick { 50_000 } else { 1_000_000 };
    let long = |senders: u32| total / u64::from(senders);
    compare(&base, "long transfers", &LONG, sizes, long, &mut outcome, &mut data)?;
    compare(&base, "bursts of 200 packets", &BURST, sizes, |_| 200, &mut outcome, &mut data)?;
    outcome.data = data.into();
    Ok(outcome)
}

fn compare(
    base: &Scenario,
    what: &str,
    ways: &[Way],
    sizes: &[u32],
    packets: impl Fn(u32) -> u64 + Sync,
    outcome: &mut Outcome,
    data: &mut Vec<serde_json::Value>,
) -> Result<()> {
    let runs: Vec<(u32, usize)> = sizes.iter().flat_map(|n| (0..ways.len()).map(move |w| (*n, w))).collect();
    let answers = each(&runs, |(senders, way)| {
        let mut s = base.clone();
        (ways[*way].set)(&mut s.transport);
        answer(&s, *senders, packets(*senders))
    })?;
    let mut panels = [
        Panel::new(&format!("Incast, {what}: goodput"), "senders", "Gbit/s").log(true, false),
        Panel::new(&format!("Incast, {what}: datagrams dropped"), "senders", "% of those sent").log(true, false),
        Panel::new(&format!("Incast, {what}: delivery of a packet, P99"), "senders", "ms").log(true, true),
        Panel::new(&format!("Incast, {what}: the last packet"), "senders", "ms").log(true, true),
    ];
    for (w, way) in ways.iter().enumerate() {
        let own: Vec<(u32, &Answer)> =
            runs.iter().zip(&answers).filter(|((_, own), _)| *own == w).map(|((n, _), a)| (*n, a)).collect();
        let line =
            |value: fn(&Answer) -> f64| own.iter().map(move |(n, a)| (f64::from(*n), value(a))).collect::<Vec<_>>();
        let lines = [line(|a| a.goodput), line(|a| a.lost), line(|a| a.p99), line(|a| a.last)];
        for (panel, line) in panels.iter_mut().zip(lines) {
            panel.lines.push((way.name.to_string(), line));
        }
        for (n, a) in &own {
            outcome.lines.push(format!(
                "{what}, {n}:1, {}: {:.2} Gbit/s, {:.3} % dropped, delivery p50 {:.2} ms p99 {:.2} ms, last at {:.2} ms, \
                 longest queue {:.0} KB",
                way.name, a.goodput, a.lost, a.p50, a.p99, a.last, a.queue
            ));
            if *n == 10 && w == 0 {
                outcome.bars.push(Bar {
                    name: format!("{what}, 10:1, {}: dropped, %", way.name),
                    value: a.lost,
                    limit: 15.0,
                });
            }
            data.push(json!({ "what": what, "senders": n, "way": way.name, "goodput_gbps": a.goodput,
                "dropped_percent": a.lost, "p50_ms": a.p50, "p99_ms": a.p99, "last_ms": a.last, "queue_kb": a.queue }));
        }
    }
    outcome.panels.extend(panels);
    Ok(())
}

fn answer(base: &Scenario, senders: u32, count: u64) -> Result<Answer> {
    let mut s = base.clone();
    if let Topology::Star { hosts, .. } = &mut s.topology {
        *hosts = senders + 1;
    }
    if let Workload::Packets { from, packets, .. } = &mut s.workloads[0] {
        *from = Members::List((1..=senders).collect());
        *packets = count;
    }
    let (world, report) = whole(&s, 1)?;
    let w = &report.workloads[0];
    let dropped: u64 = report.dropped_packets.values().sum();
    let queue = world.network().matching("s0>h0").map(|l| world.network().links[l as usize].queue_bytes_max).max();
    Ok(Answer {
        goodput: w.throughput_gbps,
        lost: dropped as f64 / report.sent_packets as f64 * 100.0,
        p50: w.latency.p50_us / 1e3,
        p99: w.latency.p99_us / 1e3,
        last: w.duration_ns as f64 / 1e6,
        queue: queue.unwrap_or(0) as f64 / 1e3,
    })
}
