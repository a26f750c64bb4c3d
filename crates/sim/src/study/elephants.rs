//! Two large flows that may meet on one path (NSDI'26, 6.1.1 and figure 15).

use anyhow::Result;
use serde_json::json;

use super::plot::Panel;
use super::runs::{each, percentile, scenario};
use super::switching::{Switched, run_until};
use super::watch::TcpWatch;
use super::{Bar, Outcome};
use crate::scenario::{Members, Reliability, Workload};
use crate::{Rng, Scenario, World};

/// How traffic selects paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Plain VXLAN. A hash assigns each flow to a path.
    Ecmp,
    /// Plain VXLAN. Each flow has a path, which is checked every second.
    ProbeAndSwitch,
    /// BIFROST: the scenario unchanged.
    Bifrost,
}

impl Mode {
    pub(super) const ALL: [Mode; 3] = [Mode::Ecmp, Mode::ProbeAndSwitch, Mode::Bifrost];

    pub(super) fn name(self) -> &'static str {
        match self {
            Mode::Ecmp => "ECMP",
            Mode::ProbeAndSwitch => "probe and switch",
            Mode::Bifrost => "BIFROST",
        }
    }

    /// The scenario in this mode.
    pub(super) fn of(self, scenario: &Scenario) -> Scenario {
        let mut scenario = scenario.clone();
        if self != Mode::Bifrost {
            scenario.vnis[0].reliability = Reliability::Off;
        }
        scenario
    }

    /// Flows that the mode switches: those from host 0 to host 1.
    pub(super) fn flows(self, rng: &mut Rng) -> Vec<Switched> {
        let ports = match self {
            Mode::ProbeAndSwitch => 0..8,
            _ => 0..0,
        };
        let second = 1_000_000_000;
        ports.map(|i| Switched::new((0, 1, crate::build::SOURCE_PORT_BASE + i), second, rng)).collect()
    }
}

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let base = scenario("elephants", include_str!("../../studies/elephants.toml"))?;
    let seeds = if quick { 10 } else { 100 };
    let runs: Vec<(Mode, u64)> = Mode::ALL.iter().flat_map(|m| (1..=seeds).map(move |s| (*m, s))).collect();
    let rates = each(&runs, |(mode, seed)| rate(&mode.of(&base), *mode, *seed))?;
    let mut outcome = Outcome::default();
    let mut panel = Panel::new("Two elephants: throughput of both, by percentile of runs", "percentile", "Mbit/s");
    let mut data = serde_json::Map::new();
    for mode in Mode::ALL {
        let mut own: Vec<f64> = runs.iter().zip(&rates).filter(|((m, _), _)| *m == mode).map(|(_, r)| *r).collect();
        let [low, median, high] = [0.05, 0.5, 0.95].map(|p| percentile(&mut own, p));
        let mean = own.iter().sum::<f64>() / own.len() as f64;
        outcome.lines.push(format!(
            "{}: mean {mean:.1} Mbit/s; p5 {low:.1}, p50 {median:.1}, p95 {high:.1} ({} runs)",
            mode.name(),
            own.len()
        ));
        if mode == Mode::Bifrost {
            outcome.bars.push(Bar {
                name: "two elephants, BIFROST, P5: missing of the 178 Mbit/s that two links carry, %".into(),
                value: (1.0 - low / 178.0) * 100.0,
                limit: 25.0,
            });
        }
        panel = panel.line(mode.name(), (0..own.len()).map(|i| ((i + 1) as f64 / own.len() as f64 * 100.0, own[i])));
        data.insert(
            mode.name().into(),
            json!({ "mean_mbps": mean, "p5_mbps": low, "p50_mbps": median, "p95_mbps": high }),
        );
    }
    outcome.panels.push(panel);
    outcome.data = data.into();
    Ok(outcome)
}

/// Throughput of both flows together, Mbit/s.
fn rate(scenario: &Scenario, mode: Mode, seed: u64) -> Result<f64> {
    // Each host has 16 guests. The seed selects one of 256 pairs.
    let mut scenario = scenario.clone();
    let pair = (seed as u32 % 16, 16 + seed as u32 / 16 % 16);
    if let Workload::Bulk { from, to, .. } = &mut scenario.workloads[0] {
        (*from, *to) = (Members::List(vec![pair.0]), Members::List(vec![pair.1]));
    }
    let mut world = World::new(&scenario, seed)?;
    let end = scenario.duration.0;
    let (watch, seen) = TcpWatch::new(pair.1, end + 1);
    world.add_checker(watch);
    let mut flows = mode.flows(&mut Rng::new(seed));
    run_until(&mut world, &mut flows, end - 1);
    let bytes: u64 = seen.borrow().bins.iter().sum();
    Ok(bytes as f64 * 8e3 / end as f64)
}
