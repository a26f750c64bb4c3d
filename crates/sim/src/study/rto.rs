//! The RTO's floor: delay of repairs, and frequency of spurious retransmissions.

use anyhow::Result;
use serde_json::json;

use super::Outcome;
use super::plot::Panel;
use super::recovery::{WAYS, outages};
use super::runs::{each, percentile, scenario, whole};
use crate::faults::exponential;
use crate::scenario::{FaultConfig, Scenario};
use crate::{Ns, Rng};

/// Pauses of hosts: none, or 1 ms on average, every 20 ms on average.
const HOSTS: [(&str, u64); 2] = [("quiet hosts", 0), ("hosts that pause", 20_000_000)];

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let base = scenario("rto", include_str!("../../studies/rto.toml"))?;
    let floors: &[Option<u64>] = if quick {
        &[Some(200), Some(4000), None]
    } else {
        &[Some(100), Some(200), Some(350), Some(500), Some(1000), Some(2000), Some(4000), Some(10_000), None]
    };
    let seeds = if quick { 2 } else { 8 };
    let runs: Vec<(usize, Option<u64>, u64)> =
        (0..HOSTS.len()).flat_map(|h| floors.iter().flat_map(move |f| (1..=seeds).map(move |s| (h, *f, s)))).collect();
    let answers = each(&runs, |(hosts, floor, seed)| {
        let mut s = base.clone();
        s.transport.rto_floor = floor.map(Ns::us);
        pauses(&mut s, HOSTS[*hosts].1, *seed);
        let (_, report) = whole(&s, *seed)?;
        let count = |name: &str| report.hosts.iter().filter_map(|h| h.counters.get(name)).sum::<u64>() as f64;
        let sent = count("rte.sent_packets").max(1.0);
        let latency = &report.workloads[0].latency;
        Ok([
            latency.p99_us,
            latency.p999_us,
            count("rte.duplicate_packets") / sent * 100.0,
            count("rte.timeout_packets"),
        ])
    })?;
    let mut outcome = Outcome::default();
    let labels: Vec<String> =
        floors.iter().map(|f| f.map_or("adaptive".into(), |us| format!("{} ms", us as f64 / 1e3))).collect();
    let mut panels = [
        Panel::new("Requests, P99.9, 1 % loss", "RTO floor", "us").over(&labels),
        Panel::new("Packets that came twice", "RTO floor", "% of those sent").over(&labels),
    ];
    let mut data = Vec::new();
    for (h, (name, _)) in HOSTS.iter().enumerate() {
        let mut lines = [Vec::new(), Vec::new()];
        for (x, floor) in floors.iter().enumerate() {
            let own = || runs.iter().zip(&answers).filter(|((rh, f, _), _)| *rh == h && f == floor).map(|(_, a)| a);
            let n = own().count() as f64;
            let [p99, p999, twice, timeouts] = [0, 1, 2, 3].map(|i| own().map(|a| a[i]).sum::<f64>() / n);
            lines[0].push((x as f64, p999));
            lines[1].push((x as f64, twice));
            outcome.lines.push(format!(
                "{name}, floor {}: p99 {p99:.0} us, p99.9 {p999:.0} us, {twice:.2} % came twice, {timeouts:.1} timeouts a run",
                labels[x]
            ));
            data.push(json!({ "hosts": name, "floor": labels[x], "p99_us": p99, "p999_us": p999,
                "twice_percent": twice, "timeouts": timeouts }));
        }
        for (panel, line) in panels.iter_mut().zip(lines) {
            panel.lines.push((name.to_string(), line));
        }
    }
    outcome.panels.extend(panels);
    dead_paths(floors, &labels, quick, &mut outcome, &mut data)?;
    outcome.data = data.into();
    Ok(outcome)
}

/// The cost of a floor when only the RTO detects a failure: three of four paths fail.
fn dead_paths(
    floors: &[Option<u64>],
    labels: &[String],
    quick: bool,
    outcome: &mut Outcome,
    data: &mut Vec<serde_json::Value>,
) -> Result<()> {
    let base = scenario("recovery", include_str!("../../studies/recovery.toml"))?;
    let seeds = if quick { 2 } else { 40 };
    let runs: Vec<(usize, Option<u64>, u64)> =
        (0..WAYS.len()).flat_map(|w| floors.iter().flat_map(move |f| (1..=seeds).map(move |s| (w, *f, s)))).collect();
    let answers = each(&runs, |(way, floor, seed)| {
        let mut s = base.clone();
        s.transport.rto_floor = floor.map(Ns::us);
        outages(&s, *way, 3, true, *seed)
    })?;
    let mut panels = [
        Panel::new("Three of four paths die: outage of a flow, P99", "RTO floor", "ms").over(labels),
        Panel::new("Three of four paths die: the longest outage", "RTO floor", "ms").over(labels),
    ];
    for (w, (name, ..)) in WAYS.iter().enumerate() {
        let mut lines = [Vec::new(), Vec::new()];
        for (x, floor) in floors.iter().enumerate() {
            let own = runs.iter().zip(&answers).filter(|((rw, f, _), _)| *rw == w && f == floor);
            let mut own: Vec<f64> = own.flat_map(|(_, a)| a.iter().copied()).collect();
            let [p99, max] = [0.99, 1.0].map(|p| percentile(&mut own, p));
            lines[0].push((x as f64, p99));
            lines[1].push((x as f64, max));
            outcome.lines.push(format!(
                "three of four paths die, {name}, floor {}: outage p99 {p99:.2} ms, max {max:.2} ms",
                labels[x]
            ));
            data.push(json!({ "dead_paths": 3, "packets": name, "floor": labels[x], "p99_ms": p99, "max_ms": max }));
        }
        for (panel, line) in panels.iter_mut().zip(lines) {
            panel.lines.push((name.to_string(), line));
        }
    }
    outcome.panels.extend(panels);
    Ok(())
}

/// Both hosts pause now and then.
fn pauses(scenario: &mut Scenario, every: u64, seed: u64) {
    if every == 0 {
        return;
    }
    let mut rng = Rng::new(seed);
    for host in 0..2 {
        let mut at = 0;
        while at < 2_000_000_000 {
            at += exponential(&mut rng, every);
            let until = at + exponential(&mut rng, 1_000_000);
            scenario.faults.push(FaultConfig {
                at: Ns(at),
                until: Some(Ns(until)),
                pause: Some(host),
                ..FaultConfig::default()
            });
            at = until;
        }
    }
}
