//! Paths of unequal delay and rate: their shares of the traffic, and the cost in latency.

use anyhow::Result;
use serde_json::json;

use super::Outcome;
use super::plot::Panel;
use super::runs::{each, scenario, whole};
use crate::Ns;
use crate::scenario::{Topology, Workload};

/// Offered loads: name, and gap between packets, ns. 0: as fast as possible.
const LOADS: [(&str, u64); 2] = [("saturated", 0), ("5 Gbit/s", 2_300)];

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let base = scenario("unequal", include_str!("../../studies/unequal.toml"))?;
    let sprays: &[u8] = if quick { &[1, 4, 8] } else { &[1, 2, 3, 4, 5, 6, 7, 8] };
    let runs: Vec<(usize, u8)> = (0..LOADS.len()).flat_map(|l| sprays.iter().map(move |k| (l, *k))).collect();
    let reports = each(&runs, |(load, spray)| {
        let mut s = base.clone();
        s.transport.spray_paths = Some(*spray);
        if let Workload::Packets { gap, packets, .. } = &mut s.workloads[0] {
            *gap = Ns(LOADS[*load].1);
            *packets = if quick { *packets / 6 } else { *packets };
        }
        Ok(whole(&s, 1)?.1)
    })?;
    let rates: Vec<f64> = match &base.topology {
        Topology::Parallel { path, .. } => path.iter().map(|p| p.rate.unwrap_or_default().0 as f64 / 1e9).collect(),
        _ => Vec::new(),
    };
    let mut outcome = Outcome::default();
    let x = "paths sprayed over (spray_paths)";
    let mut throughput = Panel::new("Throughput, saturated", x, "Gbit/s");
    let mut latency = Panel::new("Delivery, P50 and P99", x, "us").log(false, true);
    let mut shares = Panel::new("Share of each path, saturated", "path, by round trip", "%").over([
        "20us 25G",
        "20us 1G",
        "40us 10G",
        "50us 5G",
        "100us 10G",
        "200us 10G",
        "500us 1G",
        "1ms 25G",
    ]);
    let mut data = Vec::new();
    for (l, (load, _)) in LOADS.iter().enumerate() {
        let own = || runs.iter().zip(&reports).filter(|((rl, _), _)| *rl == l).map(|((_, k), r)| (*k, r));
        for (k, r) in own() {
            let w = &r.workloads[0];
            let dropped: u64 = r.dropped_packets.values().sum();
            let share =
                |i: u16| r.paths.iter().find(|p| (p.from, p.to, p.path) == (0, 1, i)).map_or(0.0, |p| p.share * 100.0);
            let all: Vec<f64> = (0..8).map(share).collect();
            outcome.lines.push(format!(
                "{load}, {k} of 8 paths: {:.1} of {:.0} Gbit/s, delivery p50 {:.0} us p99 {:.0} us, {dropped} dropped, shares \
                 {}",
                w.throughput_gbps,
                rates.iter().sum::<f64>(),
                w.latency.p50_us,
                w.latency.p99_us,
                all.iter().map(|s| format!("{s:.0}")).collect::<Vec<_>>().join("/")
            ));
            data.push(json!({ "load": load, "spray_paths": k, "gbps": w.throughput_gbps, "p50_us": w.latency.p50_us,
                "p99_us": w.latency.p99_us, "dropped": dropped, "shares_percent": all }));
            if l == 0 && [1, 4, 8].contains(&k) {
                shares = shares.line(format!("{k} paths"), all.into_iter().enumerate().map(|(i, s)| (i as f64, s)));
            }
        }
        if l == 0 {
            throughput =
                throughput.line("throughput", own().map(|(k, r)| (f64::from(k), r.workloads[0].throughput_gbps)));
        }
        latency = latency
            .line(format!("{load}, P50"), own().map(|(k, r)| (f64::from(k), r.workloads[0].latency.p50_us)))
            .line(format!("{load}, P99"), own().map(|(k, r)| (f64::from(k), r.workloads[0].latency.p99_us)));
    }
    outcome.panels.extend([throughput, latency, shares]);
    outcome.data = data.into();
    Ok(outcome)
}
