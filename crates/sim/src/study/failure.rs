//! A path fails during a flow (NSDI'26, 6.1.1 and figure 16), at three resolutions.

use anyhow::{Context as _, Result};
use serde_json::json;

use super::elephants::Mode;
use super::plot::Panel;
use super::runs::{each, scenario};
use super::switching::run_until;
use super::watch::TcpWatch;
use super::{Bar, Outcome};
use crate::{LinkPatch, Rng, Scenario, World};

const BIN_NS: u64 = 10_000_000;

/// The fault of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Lossy,
    Dead,
}

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let mut base = scenario("failure", include_str!("../../studies/failure.toml"))?;
    // Quick: all times are shorter, so the relative probing rates stay the same.
    let (begin, end) = if quick { (2_000_000_000, 8_000_000_000) } else { (10_000_000_000, 50_000_000_000) };
    if quick {
        base.duration.0 = 10_000_000_000;
    }
    let runs: Vec<(Failure, Mode)> =
        [Failure::Lossy, Failure::Dead].iter().flat_map(|f| Mode::ALL.iter().map(move |m| (*f, *m))).collect();
    let bins = each(&runs, |(failure, mode)| throughput(&mode.of(&base), *failure, *mode, (begin, end)))?;
    let mut outcome = Outcome::default();
    let mut data = serde_json::Map::new();
    for failure in [Failure::Lossy, Failure::Dead] {
        let what = if failure == Failure::Lossy { "loses 10 %" } else { "is dead" };
        let own = || runs.iter().zip(&bins).filter(|((f, _), _)| *f == failure).map(|((_, m), b)| (*m, b));
        for (mode, bins) in own() {
            let at = |ns: u64| (ns / BIN_NS) as usize;
            let before = mean(&bins[at(begin / 2)..at(begin)], 1);
            let during = mean(&bins[at(begin)..at(end)], 1);
            let lowest = [100, 10, 1].map(|width| {
                let low = bins[at(begin)..at(end)].chunks_exact(width).map(|c| mean(c, 1)).fold(f64::MAX, f64::min);
                low / before.max(1e-9) * 100.0
            });
            let stalled = bins[at(begin)..at(end)].iter().filter(|b| **b == 0).count() as u64 * BIN_NS / 1_000_000;
            outcome.lines.push(format!(
                "path {what}, {}: {before:.1} Mbit/s before, {during:.1} during; lowest 1 s {:.0} %, 100 ms {:.0} %, \
                 10 ms {:.0} % of before; {stalled} ms without a byte",
                mode.name(),
                lowest[0],
                lowest[1],
                lowest[2]
            ));
            if mode == Mode::Bifrost {
                outcome.bars.push(Bar {
                    name: format!("path {what}, BIFROST: without a byte, ms"),
                    value: stalled as f64,
                    limit: 10.0,
                });
            }
            data.insert(
                format!("{failure:?} {}", mode.name()),
                json!({ "before_mbps": before, "during_mbps": during, "lowest_percent_1s_100ms_10ms": lowest,
                        "stalled_ms": stalled }),
            );
        }
        for (width, label, from, to) in [
            (100, "1 s", 0, base.duration.0),
            (10, "100 ms", begin - 1_000_000_000, begin + 3_000_000_000),
            (1, "10 ms", begin - 100_000_000, begin + 400_000_000),
        ] {
            let mut panel = Panel::new(&format!("Path {what}: throughput by {label}"), "s", "Mbit/s");
            for (mode, bins) in own() {
                let bins = &bins[(from / BIN_NS) as usize..((to / BIN_NS) as usize).min(bins.len())];
                let time = |i: usize| (from + (i * width) as u64 * BIN_NS) as f64 / 1e9;
                panel =
                    panel.line(mode.name(), bins.chunks_exact(width).enumerate().map(|(i, c)| (time(i), mean(c, 1))));
            }
            outcome.panels.push(panel);
        }
    }
    outcome.data = data.into();
    Ok(outcome)
}

/// Mean rate over these bins, Mbit/s.
fn mean(bins: &[u64], at_least: usize) -> f64 {
    bins.iter().sum::<u64>() as f64 * 8e3 / (bins.len().max(at_least) as u64 * BIN_NS) as f64
}

/// Bytes received in each bin.
fn throughput(scenario: &Scenario, failure: Failure, mode: Mode, (begin, end): (u64, u64)) -> Result<Vec<u64>> {
    let mut world = World::new(scenario, 1)?;
    let (watch, seen) = TcpWatch::new(1, BIN_NS);
    world.add_checker(watch);
    let mut flows = mode.flows(&mut Rng::new(1));
    run_until(&mut world, &mut flows, begin);
    // The path in use is the one that fails.
    let busiest = world.network.matching("spine*>leaf1").max_by_key(|l| world.network.links[*l as usize].packets);
    let link = busiest.context("a way from a spine to the receiver's leaf")?;
    let patch = match failure {
        Failure::Lossy => LinkPatch { loss: Some(0.1), ..LinkPatch::default() },
        Failure::Dead => LinkPatch { down: Some(true), ..LinkPatch::default() },
    };
    let l = &mut world.network.links[link as usize];
    l.change(begin, patch.on(l.config.clone()));
    run_until(&mut world, &mut flows, end);
    let l = &mut world.network.links[link as usize];
    l.change(end, l.original.clone());
    run_until(&mut world, &mut flows, scenario.duration.0 - 1);
    let mut bins = seen.borrow().bins.clone();
    bins.resize((scenario.duration.0 / BIN_NS) as usize, 0);
    Ok(bins)
}
