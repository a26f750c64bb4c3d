//! `delayed-release`: memory that the sender's host needs for packets in flight while they stay in the guest's memory
//! (NSDI'26 paper, section 6.1.4, figure 22).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::daemon::Daemon;
use crate::frame::Experiment;
use crate::inject;
use crate::interrupt;
use crate::lab::{Lab, Network};
use crate::options::{Guests, Mode};
use crate::plot::{self, Panel, Series};
use crate::programs::guest_tcp::Flows;
use crate::programs::iperf3::{self, Load};
use crate::progress::Progress;
use crate::report::{Table, number};
use crate::results::{from_values, to_values};
use crate::stats::{Spread, cell, distinct_values, mean};

/// Offered rates of the flow, Gbit/s.
const RATES: [f64; 5] = [0.1, 0.2, 0.4, 0.6, 0.8];
/// Offered rates in a quick run, Gbit/s.
const QUICK_RATES: [f64; 2] = [0.1, 0.4];
/// Delay of every path, µs: longer than between adjacent hosts, so that more packets are in flight.
const DELAY_US: u32 = 1000;
/// Size of a page of the send window: 64 packets of 16 bytes, plus the links between pages.
const PAGE_BYTES: f64 = 1030.0;
/// Sampling interval.
const LOOK: Duration = Duration::from_millis(100);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct DelayedRelease;

/// The result of one flow at one rate; memory values are means of samples every 100 ms.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Always `bifrost`.
    pub mode: Mode,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Offered rate of the flow, Gbit/s.
    pub offered_gbit_per_s: f64,
    /// Goodput at the receiver, Gbit/s.
    pub throughput_gbit_per_s: f64,
    /// Duration of the flow, s.
    pub duration_s: f64,
    /// Packets sent but not acknowledged.
    pub in_flight_packets: f64,
    /// The guest's TX buffers in use by the host; a buffer of several packets counts once.
    pub held_buffers: f64,
    /// The send window's pages of 64 packets.
    pub window_bytes: f64,
    /// Copies of the guest's packets, bytes.
    pub kept_payload_bytes: f64,
    /// Growth of the process's own memory (`RssAnon`) since before the first rate, KiB.
    pub memory_growth_kib: f64,
}

impl Experiment for DelayedRelease {
    fn name(&self) -> &'static str {
        "delayed-release"
    }

    fn summary(&self) -> &'static str {
        "Memory of the sender's host for packets in flight that stay in the virtual machine (NSDI'26 figure 22)"
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        vec![Mode::Bifrost]
    }

    fn guests(&self) -> Vec<Guests> {
        vec![Guests::Vm]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let rates: &[f64] = if lab.options.quick { &QUICK_RATES } else { &RATES };
        let (repetitions, duration_s) = (lab.repetitions(3), lab.seconds(5.0, 2.0).ceil());
        let mut progress = Progress::new(rates.len() as u64 * u64::from(repetitions));
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            progress.begin("building the network");
            let mut network = lab.network(Mode::Bifrost, &format!("{repetition}"))?;
            let idle_kib = prepare(&mut network)?;
            for &rate in rates {
                progress.begin(&format!("{rate} Gbit/s"));
                let row = measure(&mut network, rate, duration_s, repetition, idle_kib)?;
                progress.end(&format!(
                    "{rate} Gbit/s: {:.0} packets in flight, {:.0} bytes of window, {:.0} bytes of copies, {:.0} KiB \
                     more",
                    row.in_flight_packets, row.window_bytes, row.kept_payload_bytes, row.memory_growth_kib
                ));
                rows.push(row);
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "offered Gbit/s",
            "Gbit/s",
            "packets in flight",
            "guest's buffers held",
            "window, bytes",
            "bytes a packet",
            "copies, bytes",
            "memory growth, KiB",
        ]);
        for rate in rates(&rows) {
            let of = |field: fn(&Row) -> f64| spread(&rows, rate, field);
            table.row(vec![
                number(rate),
                cell(of(|r| r.throughput_gbit_per_s)),
                cell(of(|r| r.in_flight_packets)),
                cell(of(|r| r.held_buffers)),
                cell(of(|r| r.window_bytes)),
                cell(of(per_packet)),
                cell(of(|r| r.kept_payload_bytes)),
                cell(of(|r| r.memory_growth_kib)),
            ]);
        }
        Ok(format!(
            "One TCP flow of `iperf3` at increasing rates between two virtual machines (user-mode Linux); every path \
             is delayed by {} ms. Before, a flow runs for a second at full speed with 1 % loss: the first \
             retransmission proves that the guest does not reuse in-flight buffers, and pools reach their size. \
             Medians of means, with the minimum and maximum of the repetitions in brackets.\n\n{}",
            DELAY_US / 1000,
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let line = |field: fn(&Row) -> f64| {
            rates(&rows).into_iter().filter_map(|rate| Some((rate, spread(&rows, rate, field)?.median))).collect()
        };
        let panel = Panel {
            title: "memory for packets in flight".to_owned(),
            x_title: "offered [Gbit/s]".to_owned(),
            y_title: "KiB".to_owned(),
            lines: vec![
                (Series::on("send window"), line(|r| r.window_bytes / 1024.0)),
                (Series::off("the packets themselves, in the guest"), line(|r| r.in_flight_packets * 1514.0 / 1024.0)),
            ],
            ..Panel::default()
        };
        Ok(vec![plot::draw(&directory.join("memory.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let top = rates(&rows).pop().unwrap_or(f64::NAN);
        let of = |field: fn(&Row) -> f64| Some(spread(&rows, top, field)?.median);
        Ok(vec![
            Bar::new("in flight at the highest rate", of(|r| r.in_flight_packets), Sense::AtLeast, 20.0, "packets"),
            // 16 bytes per packet; a partly filled page counts as a whole one.
            Bar::new("window for each packet in flight, highest rate", of(per_packet), Sense::AtMost, 80.0, "bytes"),
            Bar::new(
                "copies of packets, worst rate",
                rows.iter().map(|r| r.kept_payload_bytes).reduce(f64::max),
                Sense::AtMost,
                0.0,
                "bytes",
            )
            .exact(),
            Bar::new("growth of memory at the highest rate", of(|r| r.memory_growth_kib), Sense::AtMost, 500.0, "KiB"),
        ])
    }
}

fn per_packet(row: &Row) -> f64 {
    row.window_bytes / row.in_flight_packets
}

/// Runs a lossy flow for a second: the first retransmission proves that the first machine does not reuse in-flight
/// buffers.
pub(super) fn prove_that_buffers_are_not_reused(network: &mut Network) -> Result<()> {
    let address = network.topology.hosts[1].guest.address;
    inject::vnic_loss(&network.topology, &network.overlay, 1.0)?;
    let load = Load { flows: 1, seconds: 1.0, gbit_per_s: None };
    Flows::start(&mut network.machines, address, load)?.finish(&mut network.machines)?;
    inject::vnic_loss(&network.topology, &network.overlay, 0.0)
}

/// Runs a lossy flow, then delays the paths. Returns the memory of the sender's daemon, KiB.
fn prepare(network: &mut Network) -> Result<f64> {
    let delay = DELAY_US.to_string();
    let address = network.topology.hosts[1].guest.address;
    prove_that_buffers_are_not_reused(network)?;
    let load = Load { flows: 1, seconds: 1.0, gbit_per_s: None };
    let (sender, receiver) = (&network.topology.hosts[0].name, &network.overlay.daemons[1]);
    receiver.control(&["fault", "add", "--peer", sender, "--delay-us", &delay])?;
    Flows::start(&mut network.machines, address, load)?.finish(&mut network.machines)?;
    memory_kib(&network.overlay.daemons[0])
}

fn measure(network: &mut Network, rate: f64, duration_s: f64, repetition: u32, idle_kib: f64) -> Result<Row> {
    let address = network.topology.hosts[1].guest.address;
    let load = Load { flows: 1, seconds: duration_s, gbit_per_s: Some(rate) };
    let flow = Flows::start(&mut network.machines, address, load)?;
    let end = Instant::now() + Duration::from_secs_f64(duration_s - 0.5);
    interrupt::sleep(Duration::from_millis(300))?;
    let daemon = &network.overlay.daemons[0];
    let mut looks = Vec::new();
    while Instant::now() < end {
        looks.push(look(daemon)?);
        interrupt::sleep(LOOK)?;
    }
    let mean_of = |at: usize| mean(&looks.iter().map(|look| look[at]).collect::<Vec<_>>());
    let (client, server) = flow.finish(&mut network.machines)?;
    for daemon in &mut network.overlay.daemons {
        daemon.check_alive()?;
    }
    Ok(Row {
        mode: Mode::Bifrost,
        repetition,
        offered_gbit_per_s: rate,
        throughput_gbit_per_s: iperf3::parse(&client, &server)?.gbit_per_s,
        duration_s,
        in_flight_packets: mean_of(0),
        held_buffers: mean_of(1),
        window_bytes: mean_of(2) * PAGE_BYTES,
        kept_payload_bytes: mean_of(3),
        memory_growth_kib: mean_of(4) - idle_kib,
    })
}

/// Samples packets in flight, buffers held, window pages, bytes of copies, and memory in KiB.
fn look(daemon: &Daemon) -> Result<[f64; 5]> {
    let sum = |what: &str, field: &str| -> Result<f64> {
        let answer = daemon.control(&[what])?;
        let entries = answer.as_array().with_context(|| format!("`bifrostctl {what}` did not print a list"))?;
        Ok(entries.iter().filter_map(|entry| entry.get(field)?.as_f64()).sum())
    };
    Ok([
        sum("conns", "in_flight_packets")?,
        sum("ports", "tx_held_packets")?,
        daemon.counter("rte.send_pages")? as f64,
        daemon.counter("vhost.tx_kept_bytes")? as f64,
        memory_kib(daemon)?,
    ])
}

/// The process's own memory, without memory shared with guests, KiB.
fn memory_kib(daemon: &Daemon) -> Result<f64> {
    let path = format!("/proc/{}/status", daemon.pid());
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).context("RssAnon is missing")?;
    line.trim().trim_end_matches(" kB").parse().with_context(|| format!("`{line}` is not a number"))
}

fn rates(rows: &[Row]) -> Vec<f64> {
    distinct_values(rows.iter().map(|row| row.offered_gbit_per_s))
}

/// The median over repetitions; `None` if the rate was not measured.
fn spread(rows: &[Row], rate: f64, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.offered_gbit_per_s == rate).map(field))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bar_can_fail() {
        let row = Row {
            mode: Mode::Bifrost,
            repetition: 0,
            offered_gbit_per_s: 0.8,
            throughput_gbit_per_s: 0.8,
            duration_s: 5.0,
            in_flight_packets: 100.0,
            held_buffers: 5.0,
            window_bytes: 3090.0,
            kept_payload_bytes: 0.0,
            memory_growth_kib: 12.0,
        };
        let missed = |change: fn(&mut Row)| {
            let mut row = row.clone();
            change(&mut row);
            DelayedRelease.bars(&to_values(&[row]).unwrap()).unwrap().iter().filter(|bar| !bar.passes()).count()
        };
        assert_eq!(missed(|_| {}), 0);
        assert_eq!(missed(|r| (r.in_flight_packets, r.window_bytes) = (10.0, 500.0)), 1);
        assert_eq!(missed(|r| r.window_bytes = 150_000.0), 1);
        assert_eq!(missed(|r| r.kept_payload_bytes = 1514.0), 1);
        assert_eq!(missed(|r| r.memory_growth_kib = 600.0), 1);
    }
}
