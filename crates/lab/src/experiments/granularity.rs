//! `granularity`: how packets sprayed over paths of different delay affect a guest's TCP, with and without reordering
//! before delivery to the guest (NSDI'26 paper, figures 17, 18 and 23).

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::daemon::Settings;
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::{Lab, Network};
use crate::options::{Guests, Mode};
use crate::plot::{self, Panel, Series};
use crate::programs::guest_tcp::{Flows, Tcp};
use crate::programs::iperf3::{self, Load};
use crate::progress::Progress;
use crate::report::{Table, factor};
use crate::results::{from_values, to_values};
use crate::stats::{Spread, cell, middle, paired_ratio};

/// Numbers of consecutive packets on one path.
const GROUPS: [u32; 5] = [1, 4, 16, 50, 500];
/// The numbers in a quick run.
const QUICK_GROUPS: [u32; 2] = [1, 50];
/// Difference of the paths' delays, µs: path k is delayed by k times this value, in addition to [`BASE_US`].
const STEP_US: u32 = 100;
/// Delay of all paths, µs. Without it, the slower paths would be several times slower than the best one, and so would
/// not be used.
const BASE_US: u32 = 300;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Granularity;

/// Where packets are put in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reordering {
    /// In the switch, in the guest's memory (`vpc.ordering = "flow"`).
    On,
    /// In the guest's TCP (`vpc.ordering = "off"`).
    Off,
}

impl Reordering {
    const ALL: [Reordering; 2] = [Reordering::On, Reordering::Off];

    fn name(self) -> &'static str {
        match self {
            Reordering::On => "on",
            Reordering::Off => "off",
        }
    }

    fn ordering(self) -> &'static str {
        match self {
            Reordering::On => "flow",
            Reordering::Off => "off",
        }
    }
}

/// The result of one flow between two virtual machines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Always `bifrost`.
    pub mode: Mode,
    /// Where packets were put in order.
    pub reordering: Reordering,
    /// Number of consecutive packets on one path.
    pub group_packets: u32,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Duration of the flow, s.
    pub duration_s: f64,
    /// Goodput at the receiver, Gbit/s.
    pub throughput_gbit_per_s: f64,
    /// Packets that reached the receiver's host before an earlier packet of their connection.
    pub disordered_packets: u64,
    /// Segments that reached the receiver's TCP; a merged segment counts once.
    pub received_segments: u64,
    /// Segments that its TCP put into its out-of-order queue.
    pub out_of_order_segments: u64,
    /// Segments that the sender's TCP retransmitted.
    pub retransmitted_segments: u64,
    /// Spurious ones among these: the receiver reported them as duplicates (RFC 2883).
    pub spurious_retransmissions: u64,
    /// Processor time of the receiving machine, kernel and programs, s per GB received.
    pub receiver_cpu_s_per_gb: f64,
    /// Processor time of the sending machine, s per GB received.
    pub sender_cpu_s_per_gb: f64,
}

impl Experiment for Granularity {
    fn name(&self) -> &'static str {
        "granularity"
    }

    fn summary(&self) -> &'static str {
        "TCP of virtual machines over sprayed paths of different delay, reordered or not (NSDI'26 figures 17, 18, 23)"
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        vec![Mode::Bifrost]
    }

    fn guests(&self) -> Vec<Guests> {
        vec![Guests::Vm]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let groups: &[u32] = if lab.options.quick { &QUICK_GROUPS } else { &GROUPS };
        let (repetitions, duration_s) = (lab.repetitions(3), lab.seconds(5.0, 2.0).ceil());
        let mut progress = Progress::new((groups.len() * Reordering::ALL.len()) as u64 * u64::from(repetitions));
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            for &group_packets in groups {
                for reordering in Reordering::ALL {
                    interrupt::check()?;
                    let name = format!("reordering {}, groups of {group_packets}", reordering.name());
                    progress.begin(&name);
                    let row = measure(lab, reordering, group_packets, repetition, duration_s).context(name)?;
                    progress.end(&line(&row));
                    rows.push(row);
                }
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "packets per path",
            "reordering",
            "Gbit/s",
            "disordered",
            "out of order",
            "retransmitted",
            "spurious",
            "receiver s/GB",
            "sender s/GB",
            "receiver, off over on",
        ]);
        for group in groups(&rows) {
            for reordering in Reordering::ALL {
                let of = |field: fn(&Row) -> f64| spread(&rows, reordering, group, field);
                let other = |field: fn(&Row) -> f64| spread(&rows, Reordering::Off, group, field);
                table.row(vec![
                    group.to_string(),
                    reordering.name().to_owned(),
                    cell(of(|r| r.throughput_gbit_per_s)),
                    cell(of(|r| r.disordered_packets as f64)),
                    cell(of(|r| r.out_of_order_segments as f64)),
                    cell(of(|r| r.retransmitted_segments as f64)),
                    cell(of(|r| r.spurious_retransmissions as f64)),
                    cell(of(|r| r.receiver_cpu_s_per_gb)),
                    cell(of(|r| r.sender_cpu_s_per_gb)),
                    factor(middle(other(|r| r.receiver_cpu_s_per_gb)), middle(of(|r| r.receiver_cpu_s_per_gb))),
                ]);
            }
        }
        Ok(format!(
            "One TCP flow of `iperf3` between two virtual machines (user-mode Linux, with its virtio_net and its TCP). \
             Path k is delayed by {BASE_US} + {STEP_US} k µs. *Disordered*: packets that arrived at the receiver's \
             host before an earlier packet; *out of order*: those that its TCP saw out of order; *spurious*: segments \
             that the sender's TCP retransmitted although they had arrived. Processor time is that of the whole \
             machine. Medians, with the minimum and maximum of the repetitions in brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series = [
            (Series::on("reordered in guest memory"), Reordering::On),
            (Series::off("reordered by the guest's TCP"), Reordering::Off),
        ];
        let groups = groups(&rows);
        let panel = |title: &str, y_title: &str, field: fn(&Row) -> f64| {
            let x = ("consecutive packets on one path", groups.as_slice());
            Panel::over(title, x, (y_title, false), &series, |of, group| spread(&rows, of, *group, field))
        };
        let panels = [
            panel("throughput", "Gbit/s", |r| r.throughput_gbit_per_s),
            panel("out of order in the guest", "segments", |r| r.out_of_order_segments as f64),
            panel("retransmitted by the guest", "segments", |r| r.retransmitted_segments as f64),
            panel("receiving guest's processor", "s per GB", |r| r.receiver_cpu_s_per_gb),
        ];
        Ok(vec![plot::draw(&directory.join("granularity.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let of = |reordering, field: fn(&Row) -> f64| {
            let values = rows.iter().filter(|r| r.reordering == reordering).map(field);
            values.reduce(f64::max)
        };
        let at_one = |reordering, field: fn(&Row) -> f64| Some(spread(&rows, reordering, 1, field)?.median);
        let (on, off) = (Reordering::On, Reordering::Off);
        let is = |reordering| move |r: &Row| r.reordering == reordering && r.group_packets == 1;
        let ratio = |field| paired_ratio(&rows, |r| r.repetition, (is(on), is(off)), field);
        Ok(vec![
            Bar::new(
                "packet by packet: disordered on arrival at the receiver's host",
                at_one(on, |r| r.disordered_packets as f64),
                Sense::AtLeast,
                1000.0,
                "packets",
            ),
            Bar::new(
                "reordering on: out of order for the guest, worst run",
                of(on, |r| r.out_of_order_segments as f64),
                Sense::AtMost,
                0.0,
                "segments",
            )
            .exact(),
            Bar::new(
                "reordering on: sent again in vain by the guest, worst run",
                of(on, |r| r.spurious_retransmissions as f64),
                Sense::AtMost,
                0.0,
                "segments",
            )
            .exact(),
            Bar::new(
                "reordering off, packet by packet: out of order for the guest",
                at_one(off, |r| r.out_of_order_segments as f64),
                Sense::AtLeast,
                100.0,
                "segments",
            ),
            Bar::new(
                "packet by packet: throughput with reordering over without",
                ratio(|r| r.throughput_gbit_per_s),
                Sense::AtLeast,
                1.0,
                "x",
            ),
            Bar::new(
                "packet by packet: receiving guest's processor time with reordering over without",
                ratio(|r| r.receiver_cpu_s_per_gb),
                Sense::AtMost,
                1.0,
                "x",
            ),
        ])
    }
}

fn measure(lab: &Lab, reordering: Reordering, group_packets: u32, repetition: u32, duration_s: f64) -> Result<Row> {
    let settings = Settings {
        guests: Guests::Vm,
        ordering: Some(reordering.ordering()),
        group_packets: Some(group_packets),
        ..Settings::default()
    };
    let label = format!("{}-{group_packets}-{repetition}", reordering.name());
    let mut network = lab.network_with(Mode::Bifrost, &label, settings)?;
    delay_paths(&network, lab.options.paths)?;
    let address = network.topology.hosts[1].guest.address;
    let logs = lab.logs(&label);
    let load = Load { flows: 1, seconds: duration_s, gbit_per_s: None };
    // A short flow first, so that everything that is set up on first use exists.
    Flows::start(&mut network.machines, address, Load { seconds: 1.0, ..load })?.finish(&mut network.machines)?;
    let before = State::of(&mut network)?;
    let flow = Flows::start(&mut network.machines, address, load)?;
    let (client, server) = flow.finish(&mut network.machines)?;
    let after = State::of(&mut network)?;
    for (name, text) in [("iperf3-client.json", &client), ("iperf3-server.json", &server)] {
        std::fs::write(logs.join(name), text).with_context(|| format!("writing {name}"))?;
    }
    for daemon in &mut network.overlay.daemons {
        daemon.check_alive()?;
    }
    let measured = iperf3::parse(&client, &server)?;
    let gigabytes = measured.gbit_per_s * duration_s / 8.0;
    Ok(Row {
        mode: Mode::Bifrost,
        reordering,
        group_packets,
        repetition,
        duration_s,
        throughput_gbit_per_s: measured.gbit_per_s,
        disordered_packets: after.disordered - before.disordered,
        received_segments: after.tcp[1].since(&before.tcp[1], "Tcp:InSegs"),
        out_of_order_segments: after.tcp[1].since(&before.tcp[1], "TcpExt:TCPOFOQueue"),
        retransmitted_segments: after.tcp[0].since(&before.tcp[0], "Tcp:RetransSegs"),
        spurious_retransmissions: after.tcp[0].since(&before.tcp[0], "TcpExt:TCPDSACKRecv"),
        receiver_cpu_s_per_gb: (after.cpu_s[1] - before.cpu_s[1]) / gigabytes,
        sender_cpu_s_per_gb: (after.cpu_s[0] - before.cpu_s[0]) / gigabytes,
    })
}

/// Counters of both ends, sender first.
struct State {
    tcp: [Tcp; 2],
    cpu_s: [f64; 2],
    /// Packets that reached the receiver's host before an earlier packet of their connection.
    disordered: u64,
}

impl State {
    fn of(network: &mut Network) -> Result<Self> {
        let disordered = network.overlay.daemons[1].counter("rte.out_of_order_packets")?;
        let [sender, receiver] = network.machines.as_mut_slice() else { bail!("not two virtual machines") };
        Ok(Self {
            tcp: [Tcp::of(sender)?, Tcp::of(receiver)?],
            cpu_s: [sender.cpu_seconds()?, receiver.cpu_seconds()?],
            disordered,
        })
    }
}

/// Makes the receiver's host delay each path more than the path before.
fn delay_paths(network: &Network, paths: u8) -> Result<()> {
    let (sender, daemon) = (&network.topology.hosts[0].name, &network.overlay.daemons[1]);
    for path in 0..paths {
        let delay = (BASE_US + STEP_US * u32::from(path)).to_string();
        daemon.control(&["fault", "add", "--peer", sender, "--path", &path.to_string(), "--delay-us", &delay])?;
    }
    Ok(())
}

fn line(row: &Row) -> String {
    format!(
        "groups of {:>3}, reordering {:<3}: {:.2} Gbit/s, {} disordered, {} out of order, {} retransmitted, {:.2} s/GB",
        row.group_packets,
        row.reordering.name(),
        row.throughput_gbit_per_s,
        row.disordered_packets,
        row.out_of_order_segments,
        row.retransmitted_segments,
        row.receiver_cpu_s_per_gb
    )
}

fn groups(rows: &[Row]) -> Vec<u32> {
    let set: std::collections::BTreeSet<u32> = rows.iter().map(|row| row.group_packets).collect();
    set.into_iter().collect()
}

/// The median over repetitions; `None` if the point was not measured.
fn spread(rows: &[Row], reordering: Reordering, group_packets: u32, field: fn(&Row) -> f64) -> Option<Spread> {
    let of_point = rows.iter().filter(|r| r.reordering == reordering && r.group_packets == group_packets);
    Spread::of(of_point.map(field))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(reordering: Reordering) -> Row {
        let off = reordering == Reordering::Off;
        Row {
            mode: Mode::Bifrost,
            reordering,
            group_packets: 1,
            repetition: 0,
            duration_s: 5.0,
            throughput_gbit_per_s: if off { 0.5 } else { 1.0 },
            disordered_packets: 50_000,
            received_segments: 100_000,
            out_of_order_segments: if off { 40_000 } else { 0 },
            retransmitted_segments: if off { 100 } else { 0 },
            spurious_retransmissions: if off { 50 } else { 0 },
            receiver_cpu_s_per_gb: if off { 9.0 } else { 6.0 },
            sender_cpu_s_per_gb: 5.0,
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let missed = |change: fn(&mut Row)| {
            let mut rows = vec![row(Reordering::On), row(Reordering::Off)];
            rows.iter_mut().for_each(change);
            Granularity.bars(&to_values(&rows).unwrap()).unwrap().iter().filter(|bar| !bar.passes()).count()
        };
        assert_eq!(missed(|_| {}), 0);
        assert_eq!(missed(|r| r.disordered_packets = 0), 1);
        assert_eq!(missed(|r| r.out_of_order_segments = 1), 2);
        assert_eq!(missed(|r| r.spurious_retransmissions = 1), 1);
        assert_eq!(missed(|r| r.throughput_gbit_per_s = 1.0 / r.throughput_gbit_per_s), 1);
        assert_eq!(missed(|r| r.receiver_cpu_s_per_gb = 1.0 / r.receiver_cpu_s_per_gb), 1);
        let bars = Granularity.bars(&[]).unwrap();
        assert!(bars.iter().all(|bar| !bar.passes()));
    }
}
