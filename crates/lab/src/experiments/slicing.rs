//! `slicing`: what TCP of virtual machines carries, and what it costs their switch, when packets are copied whole as they are
//! fetched, and when only their heads are (SIGCOMM'24 paper, section 5.2, figure 11).

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::delayed_release::show_that_buffers_are_left_alone;
use crate::bars::{Bar, Sense};
use crate::daemon::{Daemon, Settings};
use crate::experiment::{Experiment, Lab, Network};
use crate::interrupt;
use crate::machine::Machine;
use crate::options::{Guests, Mode};
use crate::plot::{self, Panel, Series};
use crate::programs::guest_tcp::Flows;
use crate::programs::iperf3::{self, Load};
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{Spread, cell, mean, middle, paired_ratio};
use crate::turns;

/// The guests' MTU, bytes: the usual one, and that of Triton's jumbo frames.
const MTUS: [u32; 2] = [1500, 8500];
/// Bytes of an Ethernet header.
const ETHERNET: f64 = 14.0;
/// How often is looked at what is kept.
const LOOK: Duration = Duration::from_millis(500);
/// How long a short script may take in a machine.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(30);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Slicing;

/// Who cuts what the guest's TCP sends into packets of the MTU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Segmentation {
    /// The guest: packets of the MTU cross the switch.
    Guest,
    /// The switch (TSO): packets of up to 64 KB are fetched, whatever the MTU.
    Switch,
}

impl Segmentation {
    const ALL: [Segmentation; 2] = [Segmentation::Guest, Segmentation::Switch];

    fn name(self) -> &'static str {
        match self {
            Segmentation::Guest => "guest",
            Segmentation::Switch => "switch",
        }
    }
}

impl fmt::Display for Segmentation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segmented by the {}", self.name())
    }
}

/// One flow between two virtual machines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Always `bifrost`.
    pub mode: Mode,
    /// The guests' MTU, bytes.
    pub mtu_bytes: u32,
    /// Whether the machines' ports slice (`port.slicing`).
    pub slicing: bool,
    /// Who makes packets of the MTU.
    pub segmentation: Segmentation,
    /// Counts from 0.
    pub repetition: u32,
    /// How long the flow lasted, s.
    pub duration_s: f64,
    /// Goodput at the receiver, Gbit/s.
    pub throughput_gbit_per_s: f64,
    /// Processor time of the sender's daemon, s per GB that the receiver got.
    pub switch_cpu_s_per_gb: f64,
    /// Mean length of what the sender's daemon fetched, Ethernet header included, bytes.
    pub packet_bytes: f64,
    /// Copies of the guest's packets beyond their heads, bytes, mean of a look every 500 ms.
    pub kept_payload_bytes: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { throughput_gbit_per_s, switch_cpu_s_per_gb, packet_bytes, kept_payload_bytes, .. } = self;
        write!(
            f,
            "{}, {}: {throughput_gbit_per_s:.2} Gbit/s, {switch_cpu_s_per_gb:.3} s/GB, {packet_bytes:.0} bytes a packet, \
             {kept_payload_bytes:.0} bytes of copies",
            Ports { mtu_bytes: self.mtu_bytes, slicing: self.slicing },
            self.segmentation
        )
    }
}

/// What the machines' ports are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    mtu_bytes: u32,
    slicing: bool,
}

impl Ports {
    /// Those that are compared beside each other.
    fn all() -> Vec<Ports> {
        MTUS.iter().flat_map(|&mtu_bytes| [false, true].map(|slicing| Ports { mtu_bytes, slicing })).collect()
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MTU {}, slicing {}", self.mtu_bytes, on_or_off(self.slicing))
    }
}

impl Experiment for Slicing {
    fn name(&self) -> &'static str {
        "slicing"
    }

    fn summary(&self) -> &'static str {
        "TCP of virtual machines with and without jumbo frames and header-payload slicing (SIGCOMM'24 figure 11)"
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        vec![Mode::Bifrost]
    }

    fn guests(&self) -> Vec<Guests> {
        vec![Guests::Vm]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let duration_s = lab.seconds(4.0, 2.0).ceil();
        let label = |ports: &Ports, repetition| {
            format!("{}-{}-{repetition}", ports.mtu_bytes, if ports.slicing { "sliced" } else { "whole" })
        };
        turns::measure(
            lab.repetitions(3),
            &Ports::all(),
            &Segmentation::ALL,
            |ports, repetition| begin(lab, *ports, &label(ports, repetition)),
            |ports, network, segmentation, repetition| {
                let logs = lab.logs(&label(ports, repetition));
                measure(network, *ports, *segmentation, repetition, duration_s, &logs)
            },
        )
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "segmented by",
            "MTU",
            "slicing",
            "Gbit/s",
            "switch s/GB",
            "bytes a packet",
            "copies, bytes",
            "switch, off over on",
        ]);
        for segmentation in Segmentation::ALL {
            for ports in Ports::all() {
                let at =
                    |slicing, field: fn(&Row) -> f64| spread(&rows, Ports { slicing, ..ports }, segmentation, field);
                let of = |field| at(ports.slicing, field);
                let cost: fn(&Row) -> f64 = |r| r.switch_cpu_s_per_gb;
                table.row(vec![
                    segmentation.name().to_owned(),
                    ports.mtu_bytes.to_string(),
                    on_or_off(ports.slicing).to_owned(),
                    cell(of(|r| r.throughput_gbit_per_s)),
                    cell(of(cost)),
                    cell(of(|r| r.packet_bytes)),
                    cell(of(|r| r.kept_payload_bytes)),
                    factor(middle(at(false, cost)), middle(of(cost))),
                ]);
            }
        }
        Ok(format!(
            "One TCP flow of `iperf3` between two virtual machines (user-mode Linux). With slicing, the switch copies the first 256 \
             bytes of a packet when it fetches it, and reads the rest where it is when it writes datagrams; without, it copies packets whole \
             first. Segmented by the guest, packets of its MTU cross the switch, as in the paper's figure; segmented by the switch, large ones do at \
             any MTU. Processor time is that of the sender's daemon, for each GB received. Before, a second with 1 % loss: the first \
             retransmission shows that the guest leaves buffers alone. Medians, and in brackets the least and the most of the repetitions.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let panel = |title: &str, segmentation, y_title: &str, field: fn(&Row) -> f64| {
            let series = [(Series::on("header-payload slicing"), true), (Series::off("packets copied whole"), false)];
            let x = ("MTU [bytes]", &MTUS[..]);
            Panel::over(&format!("{title}, {segmentation}"), x, (y_title, false), &series, |slicing, &mtu_bytes| {
                spread(&rows, Ports { mtu_bytes, slicing }, segmentation, field)
            })
        };
        let (bandwidth, gbit): (_, fn(&Row) -> f64) = ("TCP bandwidth", |r| r.throughput_gbit_per_s);
        let (cost, seconds): (_, fn(&Row) -> f64) = ("sending switch's processor", |r| r.switch_cpu_s_per_gb);
        let panels = Segmentation::ALL.map(|segmentation| {
            [panel(bandwidth, segmentation, "Gbit/s", gbit), panel(cost, segmentation, "s per GB", seconds)]
        });
        Ok(vec![plot::draw(&directory.join("slicing.svg"), &panels.concat(), 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let is = |mtu_bytes, slicing, segmentation| {
            move |r: &Row| (r.mtu_bytes, r.slicing, r.segmentation) == (mtu_bytes, slicing, segmentation)
        };
        let mut bars = Vec::new();
        let [usual, jumbo] = MTUS;
        for segmentation in Segmentation::ALL {
            // With small packets the difference is less than what runs differ by: nothing is claimed for them.
            let (with, without) = (is(jumbo, true, segmentation), is(jumbo, false, segmentation));
            let ratio = |field| paired_ratio(&rows, |r| r.repetition, (with, without), field);
            let of = |what: &str| format!("MTU {jumbo}, {segmentation}: {what} with slicing over without");
            let (cost, throughput) = (ratio(|r| r.switch_cpu_s_per_gb), ratio(|r| r.throughput_gbit_per_s));
            bars.push(Bar::new(of("the switch's processor time for a GB"), cost, Sense::AtMost, 1.05, "x"));
            bars.push(Bar::new(of("throughput"), throughput, Sense::AtLeast, 0.95, "x"));
        }
        let (jumbo, usual) = (is(jumbo, true, Segmentation::Guest), is(usual, false, Segmentation::Guest));
        bars.push(Bar::new(
            "throughput with jumbo frames and slicing over neither",
            paired_ratio(&rows, |r| r.repetition, (jumbo, usual), |r| r.throughput_gbit_per_s),
            Sense::AtLeast,
            1.5,
            "x",
        ));
        let copies = |slicing, worse: fn(f64, f64) -> f64| {
            rows.iter().filter(|r| r.slicing == slicing).map(|r| r.kept_payload_bytes).reduce(worse)
        };
        bars.push(
            Bar::new("copies with slicing, most of any run", copies(true, f64::max), Sense::AtMost, 0.0, "bytes")
                .exact(),
        );
        bars.push(
            Bar::new("copies without, least of any run", copies(false, f64::min), Sense::AtLeast, 1.0, "bytes").exact(),
        );
        Ok(bars)
    }
}

/// Builds a network whose sending guest has shown that it leaves its buffers alone.
fn begin(lab: &Lab, ports: Ports, label: &str) -> Result<Network> {
    let settings = Settings {
        guests: Guests::Vm,
        guest_mtu: Some(ports.mtu_bytes),
        slicing: Some(ports.slicing),
        ..Settings::default()
    };
    let mut network = lab.network_with(Mode::Bifrost, label, settings)?;
    show_that_buffers_are_left_alone(&mut network)?;
    Ok(network)
}

fn measure(
    network: &mut Network,
    ports: Ports,
    segmentation: Segmentation,
    repetition: u32,
    duration_s: f64,
    logs: &Path,
) -> Result<Row> {
    let address = network.topology.hosts[1].guest.address;
    for machine in &mut network.machines {
        set_up(machine, ports.mtu_bytes, segmentation)?;
    }
    let before = Sent::of(&network.overlay.daemons[0])?;
    let load = Load { flows: 1, seconds: duration_s, gbit_per_s: None };
    let flow = Flows::start(&mut network.machines, address, load)?;
    let end = Instant::now() + Duration::from_secs_f64((duration_s - 1.0).max(0.0));
    let mut kept_bytes = Vec::new();
    while kept_bytes.is_empty() || Instant::now() < end {
        interrupt::sleep(LOOK)?;
        kept_bytes.push(network.overlay.daemons[0].counter("vhost.tx_kept_bytes")? as f64);
    }
    let (client, server) = flow.finish(&mut network.machines)?;
    let after = Sent::of(&network.overlay.daemons[0])?;
    for (end, text) in [("client", &client), ("server", &server)] {
        let file = logs.join(format!("iperf3-{}-{end}.json", segmentation.name()));
        std::fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
    }
    network.check()?;
    let throughput_gbit_per_s = iperf3::parse(&client, &server)?.gbit_per_s;
    let packet_bytes = (after.bytes - before.bytes) as f64 / (after.packets - before.packets) as f64;
    ensure!(
        segmentation == Segmentation::Switch || packet_bytes <= f64::from(ports.mtu_bytes) + ETHERNET,
        "the guest was to segment, but its packets had {packet_bytes:.0} bytes"
    );
    Ok(Row {
        mode: Mode::Bifrost,
        mtu_bytes: ports.mtu_bytes,
        slicing: ports.slicing,
        segmentation,
        repetition,
        duration_s,
        throughput_gbit_per_s,
        switch_cpu_s_per_gb: (after.cpu_s - before.cpu_s) / (throughput_gbit_per_s * duration_s / 8.0),
        packet_bytes,
        kept_payload_bytes: mean(&kept_bytes),
    })
}

/// Has a machine leave segmentation to its device, or not, and sees to it that it has the MTU.
fn set_up(machine: &mut Machine, mtu_bytes: u32, segmentation: Segmentation) -> Result<()> {
    let tso = on_or_off(segmentation == Segmentation::Switch);
    let script = format!("ethtool -K eth0 tso {tso} && cat /sys/class/net/eth0/mtu");
    let output = machine.run(&script, SCRIPT_TIMEOUT)?;
    ensure!(output.trim() == mtu_bytes.to_string(), "a machine was to have an MTU of {mtu_bytes}, and says: {output}");
    Ok(())
}

/// What the sender's daemon has done since it was started.
struct Sent {
    packets: u64,
    bytes: u64,
    cpu_s: f64,
}

impl Sent {
    fn of(daemon: &Daemon) -> Result<Self> {
        let cpu_s = daemon.cpu_seconds()?;
        Ok(Self { packets: daemon.counter("vhost.tx_packets")?, bytes: daemon.counter("vhost.tx_bytes")?, cpu_s })
    }
}

fn on_or_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// The median over repetitions; `None` if the point was not measured.
fn spread(rows: &[Row], ports: Ports, segmentation: Segmentation, field: fn(&Row) -> f64) -> Option<Spread> {
    let of_point = rows
        .iter()
        .filter(|r| (r.mtu_bytes, r.slicing, r.segmentation) == (ports.mtu_bytes, ports.slicing, segmentation));
    Spread::of(of_point.map(field))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn rows() -> Vec<Row> {
        let row = |ports: Ports, segmentation| Row {
            mode: Mode::Bifrost,
            mtu_bytes: ports.mtu_bytes,
            slicing: ports.slicing,
            segmentation,
            repetition: 0,
            duration_s: 4.0,
            throughput_gbit_per_s: if ports.mtu_bytes == 1500 { 0.5 } else { 1.0 },
            switch_cpu_s_per_gb: if ports.slicing { 2.0 } else { 2.2 },
            packet_bytes: 1514.0,
            kept_payload_bytes: if ports.slicing { 0.0 } else { 100_000.0 },
        };
        let of = |ports| Segmentation::ALL.map(|segmentation| row(ports, segmentation));
        Ports::all().into_iter().flat_map(of).collect()
    }

    #[test]
    fn each_bar_can_fail() {
        let missed = |change: fn(&mut Row)| {
            let mut rows = rows();
            rows.iter_mut().for_each(change);
            Slicing.bars(&to_values(&rows).unwrap()).unwrap().iter().filter(|bar| !bar.passes()).count()
        };
        assert_eq!(missed(|_| {}), 0);
        assert_eq!(missed(|r| r.switch_cpu_s_per_gb = 1.0 / r.switch_cpu_s_per_gb), 2);
        assert_eq!(missed(|r| r.throughput_gbit_per_s = if r.slicing { 1.0 } else { 1.1 }), 3);
        assert_eq!(missed(|r| r.throughput_gbit_per_s = 1.0), 1);
        assert_eq!(missed(|r| r.kept_payload_bytes = 1.0), 1);
        assert_eq!(missed(|r| r.kept_payload_bytes = 0.0), 1);
        assert!(Slicing.bars(&[]).unwrap().iter().all(|bar| !bar.passes()));
    }

    #[test]
    fn what_is_reported_is_compared_at_the_same_mtu() {
        let mut rows = rows();
        rows.retain(|r| r.mtu_bytes == 1500 || r.slicing);
        let report = Slicing.report(&to_values(&rows).unwrap()).unwrap();
        let factors: Vec<&str> =
            report.lines().filter_map(|line| line.split('|').nth(8)).map(str::trim).skip(2).collect();
        assert_eq!(factors, ["1.00x", "1.10x", "-", "-", "1.00x", "1.10x", "-", "-"]);
    }
}
