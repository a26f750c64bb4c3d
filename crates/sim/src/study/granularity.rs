//! Group size: packets sent on one path before the next path is chosen (NSDI'26, 6.1.2).

use anyhow::Result;
use serde_json::json;

use super::Outcome;
use super::plot::Panel;
use super::runs::{each, scenario};
use super::watch::TcpWatch;
use crate::scenario::{Ordering, Scenario};
use crate::{Report, World};

const ORDERS: [(Ordering, &str); 2] = [(Ordering::Flow, "in flow order"), (Ordering::Off, "as they come")];

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let base = scenario("granularity", include_str!("../../studies/granularity.toml"))?;
    let groups: &[u16] = if quick { &[1, 50, 2000] } else { &[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000] };
    let seeds = if quick { 1 } else { 4 };
    let runs: Vec<(Ordering, u16, u64)> = ORDERS
        .iter()
        .flat_map(|(o, _)| groups.iter().flat_map(move |g| (1..=seeds).map(move |s| (*o, *g, s))))
        .collect();
    let answers = each(&runs, |(ordering, group, seed)| answer(&base, *ordering, *group, *seed))?;
    let mut outcome = Outcome::default();
    let x = "packets in a group";
    let mut panels = [
        Panel::new("One TCP flow: goodput", x, "Gbit/s").log(true, false),
        Panel::new("One TCP flow: segments that the guest repeats", x, "% of those sent").log(true, false),
        Panel::new("Repair of a lost packet, P99", x, "us").log(true, false),
    ];
    let mut data = Vec::new();
    for (ordering, name) in ORDERS {
        let mut lines = [Vec::new(), Vec::new(), Vec::new()];
        for group in groups {
            let own =
                || runs.iter().zip(&answers).filter(|((o, g, _), _)| *o == ordering && g == group).map(|(_, a)| a);
            let n = own().count() as f64;
            let [goodput, repeated, p50, p99] = [0, 1, 2, 3].map(|i| own().map(|a| a[i]).sum::<f64>() / n);
            for (line, value) in lines.iter_mut().zip([goodput, repeated, p99]) {
                line.push((f64::from(*group), value));
            }
            outcome.lines.push(format!(
                "{name}, groups of {group}: {goodput:.2} Gbit/s, guest repeats {repeated:.3} %, repair p50 {p50:.0} us p99 \
                 {p99:.0} us"
            ));
            data.push(json!({ "publication": name, "group_packets": group, "goodput_gbps": goodput,
                "guest_repeats_percent": repeated, "repair_p50_us": p50, "repair_p99_us": p99 }));
        }
        for (panel, line) in panels.iter_mut().zip(lines) {
            panel.lines.push((name.to_string(), line));
        }
    }
    outcome.panels.extend(panels);
    outcome.data = data.into();
    Ok(outcome)
}

/// Goodput in Gbit/s, segments that the guest retransmits in %, repair P50 and P99 in us.
fn answer(base: &Scenario, ordering: Ordering, group: u16, seed: u64) -> Result<[f64; 4]> {
    let mut s = base.clone();
    s.vnis[0].ordering = ordering;
    s.transport.group_packets = Some(group);
    let mut world = World::new(&s, seed)?;
    let end = s.duration.0;
    let (watch, seen) = TcpWatch::new(1, end + 1);
    world.add_checker(watch);
    world.run_until(end - 1);
    let report = Report::of(&world);
    let seen = seen.borrow();
    let bytes: u64 = seen.bins.iter().sum();
    let segments = (bytes / 1448).max(1);
    Ok([
        bytes as f64 * 8.0 / end as f64,
        seen.repeated as f64 / segments as f64 * 100.0,
        report.recovery.p50_us,
        report.recovery.p99_us,
    ])
}
