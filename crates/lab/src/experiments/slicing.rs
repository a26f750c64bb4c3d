//! `slicing`: TCP throughput of virtual machines, and the cost in their switch, when complete packets are copied from
//! guest memory, when only their headers are copied (SIGCOMM'24 paper, section 5.2, figure 11), and with Open vSwitch
//! and DPDK.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::delayed_release::prove_that_buffers_are_not_reused;
use crate::bars::{Bar, Sense};
use crate::daemon::Settings;
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::{Lab, Network};
use crate::machine::Machine;
use crate::options::{Guests, Mode};
use crate::plot::{self, Panel, Series};
use crate::programs::guest_tcp::Flows;
use crate::programs::iperf3::{self, Load};
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{Spread, cell, mean, middle, paired_ratio};
use crate::turns;

/// The guests' MTU, bytes: the usual one, and Triton's jumbo frames.
const MTUS: [u32; 2] = [1500, 8500];
/// Bytes of an Ethernet header.
const ETHERNET: f64 = 14.0;
/// Sampling interval of copied bytes.
const LOOK: Duration = Duration::from_millis(500);
/// Timeout of a short script in a machine.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(30);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Slicing;

/// Which end segments the guest's TCP data into packets of the MTU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Segmentation {
    /// The guest: packets of the MTU cross the switch.
    Guest,
    /// The switch (TSO): it fetches packets of up to 64 KB, whatever the MTU.
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

/// The result of one flow between two virtual machines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// `bifrost`, or `open_vswitch` (with DPDK, because guests are virtual machines).
    pub mode: Mode,
    /// The guests' MTU, bytes.
    pub mtu_bytes: u32,
    /// Whether the machines' ports slice (`port.slicing`).
    pub slicing: bool,
    /// Which end segments.
    pub segmentation: Segmentation,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Duration of the flow, s.
    pub duration_s: f64,
    /// Goodput at the receiver, Gbit/s.
    pub throughput_gbit_per_s: f64,
    /// Processor time of the sender's switch, s per GB that the receiver received.
    pub switch_cpu_s_per_gb: f64,
    /// Mean length of packets that the sender's daemon fetched, Ethernet header included, bytes; `None` with Open
    /// vSwitch.
    pub packet_bytes: Option<f64>,
    /// Copied payload of the guest's packets without their headers, bytes, mean of samples every 500 ms; `None` with
    /// Open vSwitch.
    pub kept_payload_bytes: Option<f64>,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { segmentation, throughput_gbit_per_s, switch_cpu_s_per_gb, .. } = self;
        write!(
            f,
            "{}, {segmentation}: {throughput_gbit_per_s:.2} Gbit/s, {switch_cpu_s_per_gb:.3} s/GB",
            Ports::of(self)
        )?;
        if let Some((packet, copies)) = self.packet_bytes.zip(self.kept_payload_bytes) {
            write!(f, ", {packet:.0} bytes a packet, {copies:.0} bytes of copies")?;
        }
        Ok(())
    }
}

/// Configuration of the machines' ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    mode: Mode,
    mtu_bytes: u32,
    slicing: bool,
}

impl Ports {
    /// The configurations that are compared.
    fn all() -> Vec<Ports> {
        let kinds = [(Mode::OpenVswitch, false), (Mode::Bifrost, false), (Mode::Bifrost, true)];
        MTUS.iter().flat_map(|&mtu_bytes| kinds.map(|(mode, slicing)| Ports { mode, mtu_bytes, slicing })).collect()
    }

    fn of(row: &Row) -> Ports {
        Ports { mode: row.mode, mtu_bytes: row.mtu_bytes, slicing: row.slicing }
    }

    fn name(self) -> &'static str {
        match (self.mode, self.slicing) {
            (Mode::OpenVswitch, _) => "open_vswitch",
            (_, true) => "slicing",
            (_, false) => "whole",
        }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, MTU {}", self.name(), self.mtu_bytes)
    }
}

impl Experiment for Slicing {
    fn name(&self) -> &'static str {
        "slicing"
    }

    fn summary(&self) -> &'static str {
        "TCP of virtual machines with and without jumbo frames and header-payload slicing (SIGCOMM'24 figure 11)"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::OpenVswitch, Mode::Bifrost]
    }

    fn guests(&self) -> Vec<Guests> {
        vec![Guests::Vm]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let duration_s = lab.seconds(4.0, 2.0).ceil();
        let label = |ports: &Ports, repetition| format!("{}-{}-{repetition}", ports.mtu_bytes, ports.name());
        let mut all = Ports::all();
        all.retain(|ports| lab.options.modes.contains(&ports.mode));
        turns::measure(
            lab.repetitions(3),
            &all,
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
            "switch",
            "Gbit/s",
            "over Open vSwitch",
            "switch s/GB",
            "relative to whole",
            "bytes per packet",
            "copies, bytes",
        ]);
        for segmentation in Segmentation::ALL {
            for ports in Ports::all() {
                let at = |ports, field: fn(&Row) -> f64| spread(&rows, ports, segmentation, field);
                let of = |field| at(ports, field);
                let cost: fn(&Row) -> f64 = |r| r.switch_cpu_s_per_gb;
                let rate: fn(&Row) -> f64 = |r| r.throughput_gbit_per_s;
                let whole = Ports { mode: Mode::Bifrost, slicing: false, ..ports };
                let other = Ports { mode: Mode::OpenVswitch, slicing: false, ..ports };
                let counted = |field: fn(&Row) -> Option<f64>| {
                    cell(Spread::of(rows.iter().filter(|r| is_at(r, ports, segmentation)).filter_map(field)))
                };
                table.row(vec![
                    segmentation.name().to_owned(),
                    ports.mtu_bytes.to_string(),
                    ports.name().to_owned(),
                    cell(of(rate)),
                    factor(middle(of(rate)), middle(at(other, rate))),
                    cell(of(cost)),
                    factor(middle(of(cost)), middle(at(whole, cost))),
                    counted(|r| r.packet_bytes),
                    counted(|r| r.kept_payload_bytes),
                ]);
            }
        }
        Ok(format!(
            "One TCP flow of `iperf3` between two virtual machines (user-mode Linux), each with its switch on one \
             processor. With slicing, the switch copies the first 256 bytes of a packet when it fetches it, and reads \
             the rest from guest memory when it writes datagrams; without, it copies complete packets first. If the \
             guest segments, packets of its MTU cross the switch, as in the paper's figure. If the switch segments, \
             large packets cross it at any MTU, except with Open vSwitch, whose tunnels do not support them: there the \
             guest segments in both cases. Its DPDK polls, and sleeps for up to 50 µs when idle, so that the guest \
             gets its share. Processor time is that of the sender's switch, per GB received. Before each measurement, \
             with `bifrostd`, a flow runs for a second with 1 % loss: the first retransmission proves that the guest \
             does not reuse in-flight buffers. Medians, with the minimum and maximum of the repetitions in \
             brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let panel = |title: &str, segmentation, y_title: &str, field: fn(&Row) -> f64| {
            let series = [
                (Series::on("header-payload slicing"), (Mode::Bifrost, true)),
                (Series::other("packets copied whole"), (Mode::Bifrost, false)),
                (Series::off("Open vSwitch with DPDK"), (Mode::OpenVswitch, false)),
            ];
            let x = ("MTU [bytes]", &MTUS[..]);
            Panel::over(
                &format!("{title}, {segmentation}"),
                x,
                (y_title, false),
                &series,
                |(mode, slicing), &mtu_bytes| spread(&rows, Ports { mode, mtu_bytes, slicing }, segmentation, field),
            )
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
            move |r: &Row| is_at(r, Ports { mode: Mode::Bifrost, mtu_bytes, slicing }, segmentation)
        };
        let mut bars = Vec::new();
        let [usual, jumbo] = MTUS;
        for segmentation in Segmentation::ALL {
            // With small packets the difference is smaller than the noise, so no bar covers them.
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
        for mtu_bytes in MTUS {
            for segmentation in Segmentation::ALL {
                let other = Ports { mode: Mode::OpenVswitch, mtu_bytes, slicing: false };
                let both = (is(mtu_bytes, true, segmentation), |r: &Row| is_at(r, other, segmentation));
                bars.push(Bar::new(
                    format!("MTU {mtu_bytes}, {segmentation}: throughput with slicing over Open vSwitch with DPDK"),
                    paired_ratio(&rows, |r| r.repetition, both, |r| r.throughput_gbit_per_s),
                    Sense::AtLeast,
                    1.0,
                    "x",
                ));
            }
        }
        let copies = |slicing, worse: fn(f64, f64) -> f64| {
            rows.iter().filter(|r| r.slicing == slicing).filter_map(|r| r.kept_payload_bytes).reduce(worse)
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

/// Builds a network. With `bifrostd`, its sending guest has proven that it does not reuse in-flight buffers.
fn begin(lab: &Lab, ports: Ports, label: &str) -> Result<Network> {
    let settings = Settings {
        guests: Guests::Vm,
        guest_mtu: Some(ports.mtu_bytes),
        slicing: Some(ports.slicing),
        ..Settings::default()
    };
    let mut network = lab.network_with(ports.mode, label, settings)?;
    match ports.mode {
        Mode::OpenVswitch => {
            name_guests(&mut network, ports.mtu_bytes)?;
            freeze(&network, true)?;
        }
        _ => prove_that_buffers_are_not_reused(&mut network)?,
    }
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
    freeze(network, false)?;
    for machine in &mut network.machines {
        set_up(machine, ports, segmentation)?;
    }
    let load = Load { flows: 1, seconds: duration_s, gbit_per_s: None };
    let flow = Flows::start(&mut network.machines, address, load)?;
    let before = Sent::of(network)?;
    let end = Instant::now() + Duration::from_secs_f64((duration_s - 1.0).max(0.0));
    let mut kept_bytes = Vec::new();
    if let [sender, ..] = &network.overlay.daemons[..] {
        while kept_bytes.is_empty() || Instant::now() < end {
            interrupt::sleep(LOOK)?;
            kept_bytes.push(sender.counter("vhost.tx_kept_bytes")? as f64);
        }
    }
    let (client, server) = flow.finish(&mut network.machines)?;
    let after = Sent::of(network)?;
    freeze(network, true)?;
    for (end, text) in [("client", &client), ("server", &server)] {
        let file = logs.join(format!("iperf3-{}-{end}.json", segmentation.name()));
        std::fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
    }
    network.check()?;
    let throughput_gbit_per_s = iperf3::parse(&client, &server)?.gbit_per_s;
    let counted = before.counted.zip(after.counted);
    let packet_bytes = counted.map(|(before, after)| (after.bytes - before.bytes) / (after.packets - before.packets));
    ensure!(
        segmentation == Segmentation::Switch
            || packet_bytes.is_none_or(|bytes| bytes <= f64::from(ports.mtu_bytes) + ETHERNET),
        "the guest should segment, but its packets had {packet_bytes:?} bytes"
    );
    Ok(Row {
        mode: ports.mode,
        mtu_bytes: ports.mtu_bytes,
        slicing: ports.slicing,
        segmentation,
        repetition,
        duration_s,
        throughput_gbit_per_s,
        switch_cpu_s_per_gb: (after.cpu_s - before.cpu_s) / (throughput_gbit_per_s * duration_s / 8.0),
        packet_bytes,
        kept_payload_bytes: (!kept_bytes.is_empty()).then(|| mean(&kept_bytes)),
    })
}

/// Open vSwitch polls all the time, so it is stopped while other networks are measured.
fn freeze(network: &Network, still: bool) -> Result<()> {
    network.overlay.open_vswitches.iter().try_for_each(|switch| switch.freeze(still))
}

/// Configures in machines what Open vSwitch's device does not: addresses and MTU; and static neighbour entries,
/// because its OpenFlow rules match known MAC addresses.
fn name_guests(network: &mut Network, mtu_bytes: u32) -> Result<()> {
    let Network { machines, topology, .. } = network;
    for ((machine, host), other) in machines.iter_mut().zip(&topology.hosts).zip(topology.hosts.iter().rev()) {
        let (own, other) = (&host.guest, &other.guest);
        let script = format!(
            "ip link set eth0 address {} mtu {mtu_bytes} && ip neigh replace {} lladdr {} dev eth0 nud permanent",
            own.mac, other.address, other.mac
        );
        machine.run(&script, SCRIPT_TIMEOUT)?;
    }
    Ok(())
}

/// Configures segmentation offload and MTU of a machine, and checks the MTU.
fn set_up(machine: &mut Machine, ports: Ports, segmentation: Segmentation) -> Result<()> {
    let tso = on_or_off(segmentation == Segmentation::Switch && ports.mode != Mode::OpenVswitch);
    let mtu_bytes = ports.mtu_bytes;
    let script = format!("ethtool -K eth0 tso {tso} && cat /sys/class/net/eth0/mtu");
    let output = machine.run(&script, SCRIPT_TIMEOUT)?;
    ensure!(
        output.trim() == mtu_bytes.to_string(),
        "a machine should have an MTU of {mtu_bytes}, but reports: {output}"
    );
    Ok(())
}

/// Counters of the sender's switch since its start.
struct Sent {
    cpu_s: f64,
    /// `None` if it is not `bifrostd`.
    counted: Option<Counted>,
}

#[derive(Clone, Copy)]
struct Counted {
    packets: f64,
    bytes: f64,
}

impl Sent {
    fn of(network: &Network) -> Result<Self> {
        if let [switch, ..] = &network.overlay.open_vswitches[..] {
            return Ok(Self { cpu_s: switch.cpu_seconds()?, counted: None });
        }
        let daemon = &network.overlay.daemons[0];
        let counter = |name| daemon.counter(name).map(|value| value as f64);
        let counted = Counted { packets: counter("vhost.tx_packets")?, bytes: counter("vhost.tx_bytes")? };
        Ok(Self { cpu_s: daemon.cpu_seconds()?, counted: Some(counted) })
    }
}

fn on_or_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

fn is_at(row: &Row, ports: Ports, segmentation: Segmentation) -> bool {
    (Ports::of(row), row.segmentation) == (ports, segmentation)
}

/// The median over repetitions; `None` if the point was not measured.
fn spread(rows: &[Row], ports: Ports, segmentation: Segmentation, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|r| is_at(r, ports, segmentation)).map(field))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn rows() -> Vec<Row> {
        let row = |ports: Ports, segmentation| Row {
            mode: ports.mode,
            mtu_bytes: ports.mtu_bytes,
            slicing: ports.slicing,
            segmentation,
            repetition: 0,
            duration_s: 4.0,
            throughput_gbit_per_s: match (ports.mode, ports.mtu_bytes) {
                (Mode::OpenVswitch, _) => 0.4,
                (_, 1500) => 0.5,
                _ => 1.0,
            },
            switch_cpu_s_per_gb: if ports.slicing { 2.0 } else { 2.2 },
            packet_bytes: (ports.mode == Mode::Bifrost).then_some(1514.0),
            kept_payload_bytes: (ports.mode == Mode::Bifrost).then_some(if ports.slicing { 0.0 } else { 100_000.0 }),
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
        assert_eq!(missed(|r| r.throughput_gbit_per_s *= if r.slicing { 0.9 } else { 1.0 }), 2);
        assert_eq!(missed(|r| r.throughput_gbit_per_s = 1.0), 1);
        assert_eq!(missed(|r| r.throughput_gbit_per_s *= if r.mode == Mode::OpenVswitch { 2.0 } else { 1.0 }), 2);
        assert_eq!(missed(|r| r.throughput_gbit_per_s *= if r.mode == Mode::OpenVswitch { 3.0 } else { 1.0 }), 4);
        assert_eq!(missed(|r| r.kept_payload_bytes = r.kept_payload_bytes.map(|_| 1.0)), 1);
        assert_eq!(missed(|r| r.kept_payload_bytes = r.kept_payload_bytes.map(|_| 0.0)), 1);
        assert!(Slicing.bars(&[]).unwrap().iter().all(|bar| !bar.passes()));
    }

    #[test]
    fn the_report_compares_at_the_same_mtu() {
        let mut rows = rows();
        rows.retain(|r| r.mtu_bytes == 1500 || r.slicing);
        let report = Slicing.report(&to_values(&rows).unwrap()).unwrap();
        let factors: Vec<&str> =
            report.lines().filter_map(|line| line.split('|').nth(7)).map(str::trim).skip(2).collect();
        let of_both = ["1.00x", "1.00x", "0.91x", "-", "-", "-"];
        assert_eq!(factors, [of_both, of_both].concat());
    }
}
