//! `sockperf`: throughput of small messages over one TCP connection with packet loss (APNET'25 paper, figures 7b and
//! 9b).

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::inject;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel};
use crate::programs::sockperf::{MESSAGE_LEN, Server};
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{Spread, distinct_values, middle, paired_ratio};
use crate::turns;

/// Loss rates on the wire, percent.
const LOSSES: [f64; 7] = [0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0];
/// Loss rates of a quick run, percent.
const QUICK_LOSSES: [f64; 3] = [0.0, 1.0, 5.0];

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Sockperf;

/// The result of one connection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    pub mode: Mode,
    /// Probability that a packet was dropped on the wire, in either direction, percent.
    pub loss_percent: f64,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Sending time, s.
    pub duration_s: f64,
    /// Messages that the sender's TCP accepted, 14 bytes each.
    pub messages: u64,
    /// Throughput of their bytes, Mbit/s.
    pub throughput_mbit_per_s: f64,
    /// Packets that nftables dropped, over both hosts.
    pub wire_drops_packets: u64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { mode, loss_percent, throughput_mbit_per_s: throughput, wire_drops_packets: drops, .. } = self;
        write!(f, "{mode:<12} {loss_percent:>4} %: {throughput:>7.2} Mbit/s, {drops} packets dropped")
    }
}

impl Experiment for Sockperf {
    fn name(&self) -> &'static str {
        "sockperf"
    }

    fn summary(&self) -> &'static str {
        "Throughput of small messages over TCP at packet loss from 0 to 8 % (APNET'25 figures 7b and 9b)"
    }

    fn modes(&self) -> Vec<Mode> {
        Mode::TRANSPORTS.to_vec()
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        Mode::USUAL.to_vec()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let points: Vec<Point> = lab.losses(&LOSSES, &QUICK_LOSSES).into_iter().map(Point).collect();
        let seconds = lab.seconds(2.0, 2.0).ceil() as u32;
        let label = |mode: Mode, repetition| format!("{mode}-{repetition}");
        let begin = |mode: &Mode, repetition| {
            let label = label(*mode, repetition);
            let network = lab.network(*mode, &label)?;
            // The order matters: the server ends before its network is removed.
            Ok((Server::start(&network.topology.hosts[1].guest, &lab.logs(&label))?, network))
        };
        turns::measure(lab.repetitions(3), &lab.options.modes, &points, begin, |mode, bench, point, repetition| {
            let (server, network) = bench;
            let Point(loss_percent) = *point;
            inject::wire_loss(&network.topology, &[], loss_percent)?;
            let log = lab.logs(&label(*mode, repetition)).join(format!("sockperf-{loss_percent}.txt"));
            let sent = server.throughput(&network.topology.hosts[0].guest, seconds, &log)?;
            let wire_drops_packets = inject::wire_drops(&network.topology)?;
            network.check()?;
            Ok(Row {
                mode: *mode,
                loss_percent,
                repetition,
                duration_s: sent.seconds,
                messages: sent.messages,
                throughput_mbit_per_s: sent.messages as f64 * f64::from(MESSAGE_LEN) * 8.0 / 1e6 / sent.seconds,
                wire_drops_packets,
            })
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&["loss", "mode", "Mbit/s", "of lossless", "over kernel VXLAN"]);
        for loss in losses(&rows) {
            for mode in Mode::ALL {
                let Some(throughput) = spread(&rows, mode, loss) else { continue };
                let of = |mode, loss| middle(spread(&rows, mode, loss));
                table.row(vec![
                    format!("{loss} %"),
                    mode.name().to_owned(),
                    throughput.to_string(),
                    factor(throughput.median, of(mode, 0.0)),
                    factor(throughput.median, of(Mode::KernelVxlan, loss)),
                ]);
            }
        }
        Ok(format!(
            "`sockperf throughput --tcp` with its default message size, 14 bytes: one connection, as many messages as \
             the sender's TCP accepts. Loss on the wire in both directions. Medians, with the minimum and maximum of \
             the repetitions in brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let panel = Panel::over_losses(
            "sockperf, one TCP connection",
            ("throughput [Mbit/s]", false),
            &losses(&rows),
            |m, l| spread(&rows, m, l),
        );
        Ok(vec![plot::draw(&directory.join("sockperf.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let kept = |mode, loss| {
            let is = |loss| move |r: &Row| r.mode == mode && r.loss_percent == loss;
            paired_ratio(&rows, |r| r.repetition, (is(loss), is(0.0)), |r| r.throughput_mbit_per_s)
        };
        let (low, high) = (kept(Mode::Bifrost, 1.0), kept(Mode::Bifrost, 5.0));
        // Not at 1 %: with a round trip of some ten microseconds, the guest's TCP alone keeps two thirds of its
        // throughput.
        let better = high.zip(kept(Mode::KernelVxlan, 5.0)).map(|(bifrost, kernel)| bifrost / kernel);
        Ok(vec![
            Bar::new("1 % loss: BIFROST's throughput over its own without loss", low, Sense::AtLeast, 0.85, "x"),
            Bar::new("5 % loss: BIFROST's throughput over its own without loss", high, Sense::AtLeast, 0.65, "x"),
            Bar::new(
                "5 % loss: the share of its lossless throughput that BIFROST keeps, over that which kernel VXLAN keeps",
                better,
                Sense::AtLeast,
                3.0,
                "x",
            ),
        ])
    }
}

/// A loss rate, percent.
struct Point(f64);

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} % loss", self.0)
    }
}

fn losses(rows: &[Row]) -> Vec<f64> {
    distinct_values(rows.iter().map(|row| row.loss_percent))
}

/// The median throughput over repetitions, Mbit/s; `None` if it was not measured.
fn spread(rows: &[Row], mode: Mode, loss: f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|r| r.mode == mode && r.loss_percent == loss).map(|r| r.throughput_mbit_per_s))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn row(mode: Mode, loss_percent: f64, throughput_mbit_per_s: f64) -> Row {
        Row {
            mode,
            loss_percent,
            repetition: 0,
            duration_s: 5.0,
            messages: 1,
            throughput_mbit_per_s,
            wire_drops_packets: 0,
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let passed = |low, high, kernel| -> Vec<bool> {
            let rows = [
                row(Mode::Bifrost, 0.0, 100.0),
                row(Mode::Bifrost, 1.0, low),
                row(Mode::Bifrost, 5.0, high),
                row(Mode::KernelVxlan, 0.0, 120.0),
                row(Mode::KernelVxlan, 5.0, kernel),
            ];
            Sockperf.bars(&to_values(&rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(97.0, 75.0, 24.0), [true, true, true]);
        assert_eq!(passed(80.0, 75.0, 24.0), [false, true, true]);
        assert_eq!(passed(97.0, 60.0, 12.0), [true, false, true]);
        assert_eq!(passed(97.0, 75.0, 36.0), [true, true, false]);
        assert!(Sockperf.bars(&[]).unwrap().iter().all(|bar| !bar.passes()));
    }

    #[test]
    fn the_report_names_modes_and_losses() {
        let rows = [row(Mode::KernelVxlan, 1.0, 10.0), row(Mode::Bifrost, 1.0, 97.0)];
        let report = Sockperf.report(&to_values(&rows).unwrap()).unwrap();
        assert!(report.contains("9.70x") && !report.contains("| off"), "{report}");
    }
}
