//! Small requests beside a bulk flow of the same vNIC pair, under loss, in three orders of publication.

use anyhow::Result;
use serde_json::json;

use super::plot::Panel;
use super::runs::{each, scenario, whole};
use super::{Bar, Outcome};
use crate::scenario::{Ordering, Topology};

const ORDERS: [(Ordering, &str); 3] =
    [(Ordering::Strict, "strict"), (Ordering::Flow, "by flow"), (Ordering::Off, "off")];

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let base = scenario("blocking", include_str!("../../studies/blocking.toml"))?;
    let losses: &[f64] = if quick { &[0.0, 0.01] } else { &[0.0, 0.0001, 0.001, 0.003, 0.01] };
    let seeds = if quick { 2 } else { 6 };
    let runs: Vec<(Ordering, f64, u64)> = ORDERS
        .iter()
        .flat_map(|(o, _)| losses.iter().flat_map(move |l| (1..=seeds).map(move |s| (*o, *l, s))))
        .collect();
    let answers = each(&runs, |(ordering, loss, seed)| {
        let mut s = base.clone();
        s.vnis[0].ordering = *ordering;
        if let Topology::Parallel { link, .. } = &mut s.topology {
            link.loss = Some(*loss);
        }
        let (_, report) = whole(&s, *seed)?;
        let (requests, bulk) = (&report.workloads[0], &report.workloads[1]);
        Ok([requests.latency.p50_us, requests.latency.p99_us, requests.latency.p999_us, bulk.throughput_gbps])
    })?;
    let mut outcome = Outcome::default();
    let labels: Vec<String> = losses.iter().map(|l| format!("{} %", l * 100.0)).collect();
    let mut panels = [
        Panel::new("Requests beside a bulk flow: P99", "loss on every path", "us").over(&labels),
        Panel::new("Requests beside a bulk flow: P99.9", "loss on every path", "us").over(&labels),
        Panel::new("The bulk flow", "loss on every path", "Gbit/s").over(&labels),
    ];
    let mut data = Vec::new();
    let mut worst = Vec::new();
    for (ordering, name) in ORDERS {
        let mut lines = [Vec::new(), Vec::new(), Vec::new()];
        for (x, loss) in losses.iter().enumerate() {
            let own: Vec<&[f64; 4]> = runs
                .iter()
                .zip(&answers)
                .filter(|((o, l, _), _)| *o == ordering && l == loss)
                .map(|(_, a)| a)
                .collect();
            let [p50, p99, p999, bulk] = [0, 1, 2, 3].map(|i| own.iter().map(|a| a[i]).sum::<f64>() / own.len() as f64);
            for (line, value) in lines.iter_mut().zip([p99, p999, bulk]) {
                line.push((x as f64, value));
            }
            outcome.lines.push(format!(
                "{name}, {} % loss: requests p50 {p50:.1} us, p99 {p99:.1} us, p99.9 {p999:.1} us; bulk {bulk:.2} Gbit/s",
                loss * 100.0
            ));
            data.push(json!({ "ordering": name, "loss": loss, "p50_us": p50, "p99_us": p99, "p999_us": p999,
                "bulk_gbps": bulk }));
        }
        worst.push(lines[0].last().map_or(0.0, |p| p.1));
        for (panel, line) in panels.iter_mut().zip(lines) {
            panel.lines.push((name.to_string(), line));
        }
    }
    outcome.panels.extend(panels);
    outcome.bars.push(Bar {
        name: "requests at 1 % loss, P99, by flow in % of strict".into(),
        value: worst[1] / worst[0] * 100.0,
        limit: 80.0,
    });
    outcome.data = data.into();
    Ok(outcome)
}
