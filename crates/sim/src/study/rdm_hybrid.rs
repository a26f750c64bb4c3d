//! NICs of two generations in one network, all-to-all traffic (paper: section 4.5, figure 10).

use anyhow::Result;
use serde_json::json;

use super::plot::Panel;
use super::rdm_mesh::{Run, Setup, run as run_mesh};
use super::runs::each;
use super::{Bar, Outcome};
use crate::rdma::{DcqcnConfig, Machine, Mesh, Topology};

/// Two ports of 25 Gbit/s.
const RATE: f64 = 50e9;
const DELAY_NS: u64 = 25_000;
const LEN: u32 = 512 * 1024;
const DEPTH: u32 = 32;

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let each_kind: usize = if quick { 3 } else { 8 };
    let times = if quick { (4_000_000, 2_000_000, 4) } else { (10_000_000, 5_000_000, 8) };
    let setups: &[Setup] = if quick { &[Setup::Engine] } else { &[Setup::Engine, Setup::RcPaused] };
    let seeds: u64 = if quick { 1 } else { 2 };
    let runs: Vec<(Setup, u64)> = setups.iter().flat_map(|setup| (1..=seeds).map(|seed| (*setup, seed))).collect();
    let answers = each(&runs, |&(setup, seed)| mesh(setup, each_kind, seed, times))?;
    let mut outcome = Outcome::default();
    let mut data = Vec::new();
    for &setup in setups {
        let own = || runs.iter().zip(&answers).filter(|(run, _)| run.0 == setup).map(|(_, run)| run);
        let mean =
            |kind: usize| own().map(|run| run.mean_gbps((kind..2 * each_kind).step_by(2))).sum::<f64>() / seeds as f64;
        let [old, new] = [0, 1].map(mean);
        let gap = (old - new).abs() / old.max(new) * 100.0;
        let dropped: u64 = own().map(|run| run.counts.dropped_packets + run.counts.overrun_packets).sum();
        outcome.lines.push(format!(
            "{}: NICs of 2015 {old:.2} Gbit/s, of 2017 {new:.2}: a gap of {gap:.2} %; {dropped} packets dropped",
            setup.name()
        ));
        data.push(json!({ "setup": setup.name(), "old_gbps": old, "new_gbps": new, "gap_percent": gap,
            "dropped": dropped }));
        let mut panel =
            Panel::new(&format!("{each_kind} NICs of each kind: {}", setup.name()), "ms", "Gbit/s of a host");
        if let Some(run) = own().next() {
            for (kind, label) in [(0, "of 2015"), (1, "of 2017")] {
                let line = run.gbps((kind..2 * each_kind).step_by(2)).into_iter().zip(1u64..);
                panel = panel.line(label, line.map(|(gbps, bin)| ((times.0 + bin * times.1) as f64 / 1e6, gbps)));
            }
        }
        outcome.panels.push(panel);
        if setup == Setup::Engine {
            outcome.bars.push(Bar { name: "gap between the two kinds, %".into(), value: gap, limit: 2.0 });
        }
    }
    outcome.data = data.into();
    Ok(outcome)
}

fn mesh(setup: Setup, each_kind: usize, seed: u64, times: (u64, u64, u64)) -> Result<Run> {
    let kinds =
        [(setup.stack(DcqcnConfig::new(RATE)), Machine::OLD), (setup.stack(DcqcnConfig::slow(RATE)), Machine::NEW)];
    let hosts = (0..2 * each_kind).map(|index| kinds[index % 2]).collect();
    let mesh = Mesh::full(hosts, LEN, DEPTH);
    run_mesh(&mesh, setup.fabric(RATE, DELAY_NS, true), &Topology::Star, seed, times, |_| ())
}
