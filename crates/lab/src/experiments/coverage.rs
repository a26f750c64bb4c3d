//! `coverage`: packets lost inside the host, between switch and vNIC, and how many of them the guest's TCP must
//! retransmit (NSDI'26 paper, section 6.1.3, figure 19).

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::inject;
use crate::interrupt;
use crate::lab::Lab;
use crate::options::{Guests, Mode};
use crate::plot::{self, Panel};
use crate::programs::guest_tcp::{Flows, Tcp};
use crate::programs::iperf3::{self, Load};
use crate::report::Table;
use crate::results::from_values;
use crate::stats::{Spread, cell, paired_ratio};
use crate::turns;

/// Number of concurrent flows, like the paper's number of clients.
const FLOWS: u32 = 8;
/// Highest loss rate, hundredths of a percent.
const MAX_LOSS: u64 = 200;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Coverage;

/// The result of eight flows between two virtual machines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    pub mode: Mode,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Duration of the flows, s.
    pub duration_s: f64,
    /// Probability of loss between switch and vNIC, towards either guest, in each second, percent.
    pub losses_percent: Vec<f64>,
    /// Packets lost there, over both hosts.
    pub dropped_packets: u64,
    /// Goodput of all flows at the receiver, Gbit/s.
    pub throughput_gbit_per_s: f64,
    /// Segments that the sender's TCP had retransmitted by the end of each second.
    pub cumulative_retransmitted_segments: Vec<u64>,
    /// Segments that it had retransmitted at the end.
    pub retransmitted_segments: u64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { mode, throughput_gbit_per_s: throughput, dropped_packets, retransmitted_segments, .. } = self;
        write!(
            f,
            "{mode:<8} {throughput:.2} Gbit/s, {dropped_packets} packets lost, {retransmitted_segments} segments \
             retransmitted by the guest"
        )
    }
}

impl Experiment for Coverage {
    fn name(&self) -> &'static str {
        "coverage"
    }

    fn summary(&self) -> &'static str {
        "Losses between switch and vNIC that a virtual machine's TCP must recover (NSDI'26 figure 19)"
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        vec![Mode::Off, Mode::Bifrost]
    }

    fn guests(&self) -> Vec<Guests> {
        vec![Guests::Vm]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let duration_s = lab.seconds(20.0, 5.0).ceil();
        turns::each(lab.repetitions(3), &lab.options.modes, |mode, repetition| {
            measure(lab, *mode, repetition, duration_s)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table =
            Table::new(&["mode", "Gbit/s", "lost packets", "retransmitted by the guest", "per lost packet"]);
        for mode in Mode::ALL {
            let of = |field: fn(&Row) -> f64| spread(&rows, mode, field);
            if of(|r| r.throughput_gbit_per_s).is_none() {
                continue;
            }
            table.row(vec![
                mode.name().to_owned(),
                cell(of(|r| r.throughput_gbit_per_s)),
                cell(of(|r| r.dropped_packets as f64)),
                cell(of(|r| r.retransmitted_segments as f64)),
                cell(of(per_loss)),
            ]);
        }
        Ok(format!(
            "{FLOWS} TCP flows of `iperf3` between two virtual machines (user-mode Linux). Between switch and vNIC, \
             towards either guest, packets are lost with a probability that changes each second, at random from 0 to \
             {} %, and is the same for all networks. Medians, with the minimum and maximum of the repetitions in \
             brackets.\n\n{}",
            MAX_LOSS / 100,
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let line = |row: &Row| {
            let points = row.cumulative_retransmitted_segments.iter().enumerate();
            (row.mode.into(), points.map(|(i, n)| (i as f64 + 1.0, *n as f64)).collect())
        };
        let panel = Panel {
            title: "losses between switch and vNIC".to_owned(),
            x_title: "time [s]".to_owned(),
            y_title: "segments retransmitted by the guest".to_owned(),
            lines: rows.iter().filter(|row| row.repetition == 0).map(line).collect(),
            ..Panel::default()
        };
        Ok(vec![plot::draw(&directory.join("retransmissions.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let is = |mode| move |r: &Row| r.mode == mode;
        let ratio = |field| paired_ratio(&rows, |r| r.repetition, (is(Mode::Bifrost), is(Mode::Off)), field);
        Ok(vec![
            Bar::new(
                "packets lost before the vNIC, BIFROST",
                spread(&rows, Mode::Bifrost, |r| r.dropped_packets as f64).map(|s| s.median),
                Sense::AtLeast,
                100.0,
                "packets",
            ),
            // The paper's figure 19 shows 69.1 to 90.0 % fewer.
            Bar::new(
                "segments that the guest sends again for each lost packet, BIFROST over reliability off",
                ratio(per_loss),
                Sense::AtMost,
                0.309,
                "x",
            ),
            Bar::new(
                "throughput, BIFROST over reliability off",
                ratio(|r| r.throughput_gbit_per_s),
                Sense::AtLeast,
                1.0,
                "x",
            ),
        ])
    }
}

/// Segments that the guest retransmitted per lost packet: a faster network loses more packets.
fn per_loss(row: &Row) -> f64 {
    row.retransmitted_segments as f64 / row.dropped_packets as f64
}

fn measure(lab: &Lab, mode: Mode, repetition: u32, duration_s: f64) -> Result<Row> {
    let label = format!("{}-{repetition}", mode.name());
    let mut network = lab.network(mode, &label)?;
    let address = network.topology.hosts[1].guest.address;
    // All networks get the same losses.
    let mut random = Rng::with_seed(lab.options.seed.wrapping_add(u64::from(repetition)));
    let load = Load { flows: FLOWS, seconds: duration_s, gbit_per_s: None };
    let before = Tcp::of(&mut network.machines[0])?;
    let flows = Flows::start(&mut network.machines, address, load)?;
    let (mut losses_percent, mut cumulative) = (Vec::new(), Vec::new());
    let began = Instant::now();
    for second in 1..=duration_s as u64 {
        let loss = random.u64(..=MAX_LOSS) as f64 / 100.0;
        inject::vnic_loss(&network.topology, &network.overlay, loss)?;
        losses_percent.push(loss);
        interrupt::sleep_until(began + Duration::from_secs(second))?;
        cumulative.push(Tcp::of(&mut network.machines[0])?.since(&before, "Tcp:RetransSegs"));
    }
    let (client, server) = flows.finish(&mut network.machines)?;
    let retransmitted_segments = Tcp::of(&mut network.machines[0])?.since(&before, "Tcp:RetransSegs");
    let mut dropped_packets = 0;
    for daemon in &mut network.overlay.daemons {
        daemon.check_alive()?;
        dropped_packets += daemon.counter("fault.dropped_packets")?;
    }
    Ok(Row {
        mode,
        repetition,
        duration_s,
        losses_percent,
        dropped_packets,
        throughput_gbit_per_s: iperf3::parse(&client, &server)?.gbit_per_s,
        cumulative_retransmitted_segments: cumulative,
        retransmitted_segments,
    })
}

/// The median over repetitions; `None` if the mode was not measured.
fn spread(rows: &[Row], mode: Mode, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.mode == mode).map(field))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn row(mode: Mode, retransmitted_segments: u64, throughput_gbit_per_s: f64) -> Row {
        Row {
            mode,
            repetition: 0,
            duration_s: 5.0,
            losses_percent: vec![1.0; 5],
            dropped_packets: 1000,
            throughput_gbit_per_s,
            cumulative_retransmitted_segments: vec![retransmitted_segments],
            retransmitted_segments,
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let missed = |rows: &[Row]| -> Vec<bool> {
            Coverage.bars(&to_values(rows).unwrap()).unwrap().iter().map(|bar| !bar.passes()).collect()
        };
        let off = row(Mode::Off, 1000, 0.2);
        assert_eq!(missed(&[off.clone(), row(Mode::Bifrost, 100, 0.4)]), [false, false, false]);
        assert_eq!(missed(&[off.clone(), row(Mode::Bifrost, 400, 0.4)]), [false, true, false]);
        assert_eq!(missed(&[off.clone(), row(Mode::Bifrost, 100, 0.1)]), [false, false, true]);
        assert_eq!(missed(&[off]), [true, true, true]);
    }
}
