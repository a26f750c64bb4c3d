//! `elephants`: two large TCP flows over rate-limited links, restarted repeatedly with new hashes (NSDI'26 paper,
//! figure 15).

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::inject;
use crate::lab::{Lab, Network};
use crate::options::{Cabling, Mode};
use crate::plot::{self, Panel};
use crate::programs::iperf3::{self, Load};
use crate::report::{Table, number};
use crate::results::from_values;
use crate::stats::{mean, median_of, percentile};
use crate::turns;

/// Rate of each link. The sum of the links is less than half of what the processors can carry, so that the links are
/// the bottleneck.
const LINK_MBIT_PER_S: u32 = 200;
/// Number of starts of new flows, and in a quick run.
const ATTEMPTS: (u32, u32) = (100, 8);
const FLOWS: u32 = 2;
/// Time excluded at the start of the flows, s: connection setup and TCP slow start.
const SETTLE_S: f64 = 0.5;
/// Two flows share a link if their total goodput is below this multiple of a link's rate.
const COLLIDED: f64 = 1.2;
/// A link that carries at least this share of its rate is in use.
const IN_USE: f64 = 0.1;
/// Percentiles of the report.
const PERCENTILES: [f64; 6] = [1.0, 5.0, 25.0, 50.0, 75.0, 99.0];

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Elephants;

/// The result of one start of the two flows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    pub mode: Mode,
    /// Number of the attempt, from 0.
    pub attempt: u32,
    /// Rate limit of each link, Mbit/s, Ethernet headers included.
    pub link_mbit_per_s: u32,
    /// Duration of the measurement, s: the flows' duration without the first half second.
    pub duration_s: f64,
    /// Total goodput of both flows at their receiver, mean over that time, Mbit/s.
    pub throughput_mbit_per_s: f64,
    /// Segments that the guest's TCP retransmitted since the start.
    pub guest_retransmits: u64,
    /// Rate of the sender's host over each link, mean over the whole attempt, Mbit/s, Ethernet headers included.
    pub links_mbit_per_s: Vec<f64>,
}

impl Row {
    fn collided(&self) -> bool {
        self.throughput_mbit_per_s < COLLIDED * f64::from(self.link_mbit_per_s)
    }

    fn links_in_use(&self) -> usize {
        self.links_mbit_per_s.iter().filter(|rate| **rate > IN_USE * f64::from(self.link_mbit_per_s)).count()
    }

    /// The highest utilization of a link.
    fn most(&self) -> f64 {
        self.links_mbit_per_s.iter().copied().fold(0.0, f64::max) / f64::from(self.link_mbit_per_s)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let links: Vec<_> = self.links_mbit_per_s.iter().map(|rate| format!("{rate:.0}")).collect();
        write!(
            f,
            "{:<12} {:>3}: {:>5.0} Mbit/s, links {}, {} retransmitted by the guest",
            self.mode,
            self.attempt,
            self.throughput_mbit_per_s,
            links.join(" "),
            self.guest_retransmits
        )
    }
}

impl Experiment for Elephants {
    fn name(&self) -> &'static str {
        "elephants"
    }

    fn summary(&self) -> &'static str {
        "Two large TCP flows over links of 200 Mbit/s, started a hundred times (NSDI'26 figure 15)"
    }

    fn modes(&self) -> Vec<Mode> {
        Mode::TRANSPORTS.to_vec()
    }

    /// The modes of the figure, in a full run.
    fn default_modes(&self, quick: bool) -> Vec<Mode> {
        if quick {
            vec![Mode::KernelVxlan, Mode::Bifrost]
        } else {
            vec![Mode::KernelVxlan, Mode::ProbeSwitch, Mode::Bifrost]
        }
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        ensure!(lab.options.cabling == Cabling::Paths, "elephants limits the links between two hosts: --cabling paths");
        let attempts = lab.options.repetitions.unwrap_or(if lab.options.quick { ATTEMPTS.1 } else { ATTEMPTS.0 });
        let points: Vec<Attempt> = (0..attempts).map(Attempt).collect();
        let seconds = (SETTLE_S + lab.seconds(1.5, 1.5)).ceil();
        let begin = |mode: &Mode, _| {
            let network = lab.network_with_spread_flows(*mode, mode.name())?;
            inject::limit_links(&network.topology.hosts[0], network.topology.plan.paths, LINK_MBIT_PER_S)?;
            Ok(network)
        };
        turns::measure(1, &lab.options.modes, &points, begin, |mode, network, point, _| {
            let row = measure(network, *point, seconds, &lab.logs(mode.name()))?;
            network.overlay.check_alive()?;
            Ok(row)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let names = PERCENTILES.map(|percent| format!("P{percent}"));
        let titles: Vec<&str> = names.iter().map(String::as_str).collect();
        let more = ["collided", "links in use", "retransmitted"];
        let mut table = Table::new(&[&["Mbit/s", "attempts"][..], &titles, &more].concat());
        for mode in Mode::ALL {
            let of: Vec<&Row> = rows.iter().filter(|row| row.mode == mode).collect();
            if of.is_empty() {
                continue;
            }
            let median = |field: fn(&Row) -> f64| median_of(of.iter().map(|row| field(row))).unwrap_or(f64::NAN);
            let throughputs = throughputs(&rows, mode);
            let collided = of.iter().filter(|row| row.collided()).count();
            let mut cells = vec![mode.to_string(), of.len().to_string()];
            cells.extend(PERCENTILES.map(|percent| number(percentile(&throughputs, percent))));
            cells.push(format!("{:.0} %", 100.0 * collided as f64 / of.len() as f64));
            cells.push(number(median(|row| row.links_in_use() as f64)));
            cells.push(number(median(|row| row.guest_retransmits as f64)));
            table.row(cells);
        }
        let links = rows.first().map_or(0, |row| row.links_mbit_per_s.len());
        Ok(format!(
            "{FLOWS} TCP flows of `iperf3` from one guest to another, with new ports in each attempt; each of {links} \
             links carries {LINK_MBIT_PER_S} Mbit/s. Percentiles over attempts of the total goodput. *Collided*: \
             attempts below {COLLIDED} times a link's rate. *In use*: links that carried at least a tenth of their \
             rate, median. Retransmissions of the guest's TCP are medians, too.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let line = |mode: Mode| {
            let values = throughputs(&rows, mode);
            let points = if values.is_empty() { 0 } else { 100 };
            let line: Vec<_> = (1..=points).map(|p| (f64::from(p), percentile(&values, f64::from(p)))).collect();
            (mode.into(), line)
        };
        let panel = Panel {
            title: format!("{FLOWS} flows, links of {LINK_MBIT_PER_S} Mbit/s"),
            x_title: "percentile of the attempts".to_owned(),
            y_title: "goodput of both [Mbit/s]".to_owned(),
            lines: Mode::ALL.into_iter().map(line).filter(|(_, line)| !line.is_empty()).collect(),
            ..Panel::default()
        };
        Ok(vec![plot::draw(&directory.join("elephants.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let (bifrost, kernel) = (throughputs(&rows, Mode::Bifrost), throughputs(&rows, Mode::KernelVxlan));
        let of = |values: &[f64], percent| (!values.is_empty()).then(|| percentile(values, percent));
        let over = |above: Option<f64>, below: Option<f64>| above.zip(below).map(|(above, below)| above / below);
        let most = rows.iter().map(Row::most).reduce(f64::max);
        let mut bars = vec![
            Bar::new(
                "BIFROST's P1 over its median",
                over(of(&bifrost, 1.0), of(&bifrost, 50.0)),
                Sense::AtLeast,
                0.9,
                "x",
            ),
            Bar::new(
                "P5 of BIFROST over kernel VXLAN's",
                over(of(&bifrost, 5.0), of(&kernel, 5.0)),
                Sense::AtLeast,
                1.5,
                "x",
            ),
            Bar::new("the most that any link carried, of its limit", most, Sense::AtMost, 1.05, "x").exact(),
        ];
        let probed = throughputs(&rows, Mode::ProbeSwitch);
        if !probed.is_empty() {
            // Its flows are hashed onto paths like the kernel's; it only must not be worse.
            let over = (!kernel.is_empty()).then(|| mean(&probed) / mean(&kernel));
            bars.push(Bar::new("mean of probe and switch over kernel VXLAN's", over, Sense::AtLeast, 1.0, "x"));
        }
        Ok(bars)
    }
}

/// Number of a start of the flows.
#[derive(Clone, Copy)]
struct Attempt(u32);

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attempt {}", self.0)
    }
}

fn measure(network: &Network, Attempt(attempt): Attempt, seconds: f64, logs: &Path) -> Result<Row> {
    let (sender, receiver) = (&network.topology.hosts[0], &network.topology.hosts[1]);
    let paths = network.topology.plan.paths;
    let load = Load { flows: FLOWS, ..Load::one_flow(seconds) };
    let (began, before) = (Instant::now(), sender.carried(paths)?);
    let running = iperf3::Running::start((&sender.guest, &receiver.guest), load, logs, &format!("iperf3-{attempt}"))?;
    let flows = running.finish()?;
    let (after, elapsed_s) = (sender.carried(paths)?, began.elapsed().as_secs_f64());
    let settle = (SETTLE_S / iperf3::BIN_S).round() as usize;
    let judged = flows.bins_gbit_per_s.get(settle..).unwrap_or_default();
    ensure!(!judged.is_empty(), "the flows of attempt {attempt} ended within {SETTLE_S} s");
    let sent = before.iter().zip(&after).map(|(before, after)| after.sent - before.sent);
    Ok(Row {
        mode: network.overlay.mode,
        attempt,
        link_mbit_per_s: LINK_MBIT_PER_S,
        duration_s: judged.len() as f64 * iperf3::BIN_S,
        throughput_mbit_per_s: mean(judged) * 1000.0,
        guest_retransmits: flows.retransmits,
        links_mbit_per_s: sent.map(|bytes| bytes as f64 * 8.0 / 1e6 / elapsed_s).collect(),
    })
}

/// Goodput of all attempts, Mbit/s.
fn throughputs(rows: &[Row], mode: Mode) -> Vec<f64> {
    rows.iter().filter(|row| row.mode == mode).map(|row| row.throughput_mbit_per_s).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn row(mode: Mode, attempt: u32, throughput_mbit_per_s: f64) -> Row {
        Row {
            mode,
            attempt,
            link_mbit_per_s: 200,
            duration_s: 2.5,
            throughput_mbit_per_s,
            guest_retransmits: 0,
            links_mbit_per_s: vec![throughput_mbit_per_s / 4.0; 4],
        }
    }

    fn rows(bifrost: [f64; 4], kernel: [f64; 4]) -> Vec<Row> {
        let of = |mode, values: [f64; 4]| (0..).zip(values).map(move |(attempt, value)| row(mode, attempt, value));
        of(Mode::Bifrost, bifrost).chain(of(Mode::KernelVxlan, kernel)).collect()
    }

    #[test]
    fn each_bar_can_fail() {
        let passed = |rows: &[Row]| -> Vec<bool> {
            Elephants.bars(&to_values(rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        let kernel = [185.0, 369.0, 370.0, 368.0];
        assert_eq!(passed(&rows([700.0, 710.0, 705.0, 690.0], kernel)), [true; 3]);
        assert_eq!(passed(&rows([700.0, 710.0, 705.0, 600.0], kernel)), [false, true, true]);
        assert_eq!(passed(&rows([270.0, 280.0, 275.0, 270.0], kernel)), [true, false, true]);
        let mut beyond = rows([700.0, 710.0, 705.0, 690.0], kernel);
        beyond[0].links_mbit_per_s[2] = 230.0;
        assert_eq!(passed(&beyond), [true, true, false]);
        assert_eq!(passed(&[]), [false; 3]);
        let probed = |mean: f64| {
            let more = (0..4).map(|attempt| row(Mode::ProbeSwitch, attempt, mean));
            passed(&rows([700.0, 710.0, 705.0, 690.0], kernel).into_iter().chain(more).collect::<Vec<_>>())
        };
        assert_eq!((probed(324.0), probed(322.0)), (vec![true; 4], vec![true, true, true, false]));
    }

    #[test]
    fn the_report_counts_collisions() {
        let rows = rows([700.0, 710.0, 705.0, 690.0], [185.0, 369.0, 370.0, 368.0]);
        let report = Elephants.report(&to_values(&rows).unwrap()).unwrap();
        assert!(report.contains(" 25 % |") && report.contains(" 0 % |"), "{report}");
        assert_eq!((rows[0].links_in_use(), row(Mode::Off, 0, 40.0).links_in_use()), (4, 0));
    }
}
