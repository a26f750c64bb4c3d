//! `iperf`: the throughput of one TCP flow, without loss and at 0.1 %.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::inject;
use crate::lab::Lab;
use crate::options::{Injector, Mode};
use crate::plot::{self, Panel};
use crate::programs::iperf3::{self, Load};
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{Spread, cell, distinct_values, middle, paired_ratio};
use crate::turns;

/// Loss rates on the wire, percent.
const LOSSES: [f64; 2] = [0.0, 0.1];

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Iperf;

/// The result of one flow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    pub mode: Mode,
    /// Always `wire`.
    pub injector: Injector,
    /// Probability that a packet was dropped on the wire, in either direction, percent.
    pub loss_percent: f64,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Duration of the flow, s.
    pub duration_s: f64,
    /// Goodput at the receiver, Gbit/s.
    pub throughput_gbit_per_s: f64,
    /// Segments that the guest's TCP retransmitted.
    pub guest_retransmits: u64,
    /// Packets that nftables dropped, over both hosts.
    pub wire_drops_packets: u64,
    /// Goodput of each 100 ms, Gbit/s.
    pub bins_gbit_per_s: Vec<f64>,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { mode, loss_percent, throughput_gbit_per_s: throughput, guest_retransmits: again, .. } = self;
        write!(f, "{mode:<12} {loss_percent:>5} %: {throughput:.2} Gbit/s, {again} retransmits by the guest")
    }
}

/// A loss rate, percent.
struct Point(f64);

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", self.0)
    }
}

impl Experiment for Iperf {
    fn name(&self) -> &'static str {
        "iperf"
    }

    fn summary(&self) -> &'static str {
        "Throughput of one TCP flow, without loss and at 0.1 % on the wire"
    }

    fn modes(&self) -> Vec<Mode> {
        Mode::TRANSPORTS.to_vec()
    }

    fn default_modes(&self, quick: bool) -> Vec<Mode> {
        if quick { Mode::USUAL.to_vec() } else { self.modes() }
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let points: Vec<Point> = lab.losses(&LOSSES, &LOSSES).into_iter().map(Point).collect();
        let duration_s = lab.seconds(5.0, 2.0).ceil();
        let label = |mode: Mode, repetition| format!("{mode}-{repetition}");
        let begin = |mode: &Mode, repetition| lab.network(*mode, &label(*mode, repetition));
        turns::measure(lab.repetitions(3), &lab.options.modes, &points, begin, |mode, network, point, repetition| {
            let Point(loss_percent) = *point;
            inject::wire_loss(&network.topology, &[], loss_percent)?;
            let [from, to] = [0, 1].map(|host| &network.topology.hosts[host].guest);
            let (logs, name) = (lab.logs(&label(*mode, repetition)), format!("iperf3-{loss_percent}"));
            let flow = iperf3::Running::start((from, to), Load::one_flow(duration_s), &logs, &name)?.finish()?;
            let wire_drops_packets = inject::wire_drops(&network.topology)?;
            network.check()?;
            Ok(Row {
                mode: *mode,
                injector: Injector::Wire,
                loss_percent,
                repetition,
                duration_s,
                throughput_gbit_per_s: flow.gbit_per_s,
                guest_retransmits: flow.retransmits,
                wire_drops_packets,
                bins_gbit_per_s: flow.bins_gbit_per_s,
            })
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&["loss", "mode", "Gbit/s", "of lossless", "guest retransmits"]);
        for loss in losses(&rows) {
            for mode in Mode::ALL {
                let Some(throughput) = spread(&rows, mode, loss, |row| row.throughput_gbit_per_s) else { continue };
                let lossless = spread(&rows, mode, 0.0, |row| row.throughput_gbit_per_s);
                table.row(vec![
                    format!("{loss} %"),
                    mode.name().to_owned(),
                    throughput.to_string(),
                    factor(throughput.median, middle(lossless)),
                    cell(spread(&rows, mode, loss, |row| row.guest_retransmits as f64)),
                ]);
            }
        }
        Ok(format!(
            "One TCP flow of `iperf3`, loss on the wire in both directions; medians, with the minimum and maximum of \
             the repetitions in brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let panel = Panel::over_losses("one TCP flow", ("throughput [Gbit/s]", false), &losses(&rows), |mode, loss| {
            spread(&rows, mode, loss, |r| r.throughput_gbit_per_s)
        });
        Ok(vec![plot::draw(&directory.join("throughput.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let at = |loss| Some(spread(&rows, Mode::Bifrost, loss, |row| row.throughput_gbit_per_s)?.median);
        let is = |loss| move |r: &Row| r.mode == Mode::Bifrost && r.loss_percent == loss;
        let kept = paired_ratio(&rows, |r| r.repetition, (is(0.1), is(0.0)), |r| r.throughput_gbit_per_s);
        Ok(vec![
            Bar::new("one TCP flow without loss, BIFROST", at(0.0), Sense::AtLeast, 3.0, "Gbit/s"),
            Bar::new("one TCP flow at 0.1 % loss over no loss, BIFROST", kept, Sense::AtLeast, 0.85, "x"),
        ])
    }
}

fn losses(rows: &[Row]) -> Vec<f64> {
    distinct_values(rows.iter().map(|row| row.loss_percent))
}

fn spread(rows: &[Row], mode: Mode, loss: f64, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|r| r.mode == mode && r.loss_percent == loss).map(field))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    #[test]
    fn bars_compare_with_the_lossless_flow() {
        let row = |loss_percent, throughput_gbit_per_s| Row {
            mode: Mode::Bifrost,
            injector: Injector::Wire,
            loss_percent,
            repetition: 0,
            duration_s: 5.0,
            throughput_gbit_per_s,
            guest_retransmits: 0,
            wire_drops_packets: 0,
            bins_gbit_per_s: Vec::new(),
        };
        let passed = |rows: &[Row]| -> Vec<bool> {
            Iperf.bars(&to_values(rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(&[row(0.0, 3.5), row(0.1, 3.0)]), [true, true]);
        assert_eq!(passed(&[row(0.0, 2.9), row(0.1, 2.4)]), [false, false]);
        assert_eq!(passed(&[row(0.0, 3.5)]), [true, false]);
    }
}
