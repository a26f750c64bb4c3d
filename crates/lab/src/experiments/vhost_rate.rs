//! `vhost-rate`: packets a second between two vhost-user ports of one host, through `bifrostd` and through DPDK's own vhost
//! back-end.
//!
//! The guest is `dpdk-testpmd` with two `net_virtio_user` ports. As many packets as fit circle for ever: what arrives at one
//! port leaves at the other, unchanged, and comes back through the switch under test. So nothing is lost, and the guest, which
//! never looks at a packet, is not what limits the rate.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::experiment::{Experiment, Lab};
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::process::Program;
use crate::programs::testpmd::{self, Testpmd};
use crate::progress::Progress;
use crate::report::{Table, number};
use crate::results::{from_values, to_values};
use crate::stats::median_of;
use crate::{command, interrupt};

/// Bytes of a frame on a wire, its four bytes of checksum included, which no virtual port sees.
const FRAME_BYTES: [u32; 2] = [64, 1500];
/// Packets that circle in each direction: a quarter of a ring, so that there is always room for all.
const CIRCLING: u32 = 256;
/// Descriptors of each ring.
const RING: u32 = 1024;
/// Processors: of the switch, and of the guest.
const PROCESSORS: [usize; 2] = [0, 1];
/// The guest's ports that are virtio ports; the other two only feed them.
const VIRTIO: [usize; 2] = [1, 3];
/// How long a program may take to start or to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct VhostRate;

/// What forwards between the two ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    /// `dpdk-testpmd` with two `net_vhost` ports; it copies packets from one to the other and looks at none.
    DpdkVhost,
    /// `bifrostd`, reliability off.
    Off,
}

impl Switch {
    const ALL: [Switch; 2] = [Switch::DpdkVhost, Switch::Off];
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Switch::DpdkVhost => "dpdk_vhost",
            Switch::Off => "off",
        })
    }
}

/// One frame size, through one switch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What forwarded.
    pub mode: Switch,
    /// Counts from 0.
    pub repetition: u32,
    /// Bytes of a frame, with its checksum.
    pub frame_bytes: u32,
    /// How long packets were counted, s.
    pub duration_s: f64,
    /// What both of the guest's ports received in that time, packets a second.
    pub packets_per_s: f64,
    /// Time stamp counter's cycles that the switch was at work for each packet.
    pub cycles_per_packet: f64,
    /// Packets that the guest could not send, of those that circle.
    pub lost_packets: u64,
}

impl Experiment for VhostRate {
    fn name(&self) -> &'static str {
        "vhost-rate"
    }

    fn summary(&self) -> &'static str {
        "Packets a second between two vhost-user ports, compared with DPDK's own vhost back-end"
    }

    fn default_modes(&self) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        if std::thread::available_parallelism().map_or(1, usize::from) < PROCESSORS.len() {
            bail!("vhost-rate needs two processors: the switch and the guest never sleep");
        }
        let (repetitions, seconds) = (lab.repetitions(3), lab.seconds(4.0, 2.0));
        let mut progress = Progress::new(u64::from(repetitions) * 4);
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            for frame_bytes in FRAME_BYTES {
                for mode in Switch::ALL {
                    progress.begin(&format!("{mode}, {frame_bytes} bytes"));
                    let row = measure(lab, mode, frame_bytes, repetition, seconds)?;
                    progress.end(&format!(
                        "{mode}, {frame_bytes} bytes: {:.2} million packets a second, {:.0} cycles a packet",
                        row.packets_per_s / 1e6,
                        row.cycles_per_packet
                    ));
                    rows.push(row);
                }
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table =
            Table::new(&["switch", "frame, bytes", "million packets/s", "cycles a packet", "of DPDK's rate, %"]);
        for frame_bytes in FRAME_BYTES {
            for mode in Switch::ALL {
                let of = |field: fn(&Row) -> f64| medians(&rows, mode, frame_bytes, field).unwrap_or(f64::NAN);
                table.row(vec![
                    mode.to_string(),
                    frame_bytes.to_string(),
                    number(of(|r| r.packets_per_s) / 1e6),
                    format!("{:.0}", of(|r| r.cycles_per_packet)),
                    number(share(&rows, frame_bytes).filter(|_| mode == Switch::Off).unwrap_or(100.0)),
                ]);
            }
        }
        Ok(format!(
            "`dpdk-testpmd` with two `net_virtio_user` ports lets {CIRCLING} packets circle in each direction; both directions count. \
             One processor for the switch, one for the guest. Medians.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let line = |mode| {
            FRAME_BYTES
                .iter()
                .filter_map(|&size| Some((f64::from(size), medians(&rows, mode, size, |r| r.packets_per_s)? / 1e6)))
                .collect()
        };
        let panel = Panel {
            title: "between two vhost-user ports".to_owned(),
            x_title: "frame [bytes]".to_owned(),
            y_title: "million packets/s".to_owned(),
            log_y: false,
            categories: Vec::new(),
            lines: vec![
                (Series::on("bifrostd"), line(Switch::Off)),
                (Series::off("DPDK's vhost back-end"), line(Switch::DpdkVhost)),
            ],
            marks: Vec::new(),
        };
        Ok(vec![plot::draw(&directory.join("rate.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let rate = |size| {
            let name = format!("share of the rate of DPDK's vhost back-end, {size} bytes");
            Bar::new(name, share(&rows, size), Sense::AtLeast, 40.0, "%")
        };
        let lost = rows.iter().filter(|r| r.mode == Switch::Off).map(|r| r.lost_packets as f64).reduce(f64::max);
        let mut bars: Vec<Bar> = FRAME_BYTES.into_iter().map(rate).collect();
        bars.push(
            Bar::new("packets that the guest could not send, worst run", lost, Sense::AtMost, 0.0, "packets").exact(),
        );
        Ok(bars)
    }
}

/// `bifrostd`'s rate, percent of DPDK's.
fn share(rows: &[Row], frame_bytes: u32) -> Option<f64> {
    let of = |mode| medians(rows, mode, frame_bytes, |r| r.packets_per_s);
    Some(of(Switch::Off)? / of(Switch::DpdkVhost)? * 100.0)
}

/// The median over repetitions; `None` if that was not measured.
fn medians(rows: &[Row], mode: Switch, frame_bytes: u32, field: fn(&Row) -> f64) -> Option<f64> {
    median_of(rows.iter().filter(|row| row.mode == mode && row.frame_bytes == frame_bytes).map(field))
}

/// What is being measured, while it runs.
enum Running {
    Dpdk(Testpmd),
    Bifrost { daemon: Program, control: PathBuf },
}

impl Running {
    fn start(lab: &Lab, mode: Switch, namespace: &Namespace, sockets: &[PathBuf; 2], logs: &Path) -> Result<Running> {
        match mode {
            Switch::DpdkVhost => {
                let port = |n: usize| format!("net_vhost{n},iface={}", sockets[n].display());
                let mut switch = Testpmd::start(namespace, PROCESSORS[0], &[port(0), port(1)], &logs.join("switch"))?;
                switch.tell("start")?;
                Ok(Running::Dpdk(switch))
            }
            Switch::Off => {
                let control = lab.run.directory().join("vhost-rate.sock");
                let config = logs.join("bifrostd.toml");
                std::fs::create_dir_all(logs).with_context(|| format!("creating {}", logs.display()))?;
                std::fs::write(&config, configuration(&control, sockets)).context("writing a configuration")?;
                let mut command = namespace.command(&lab.binaries.bifrostd);
                command.arg("--config").arg(&config);
                Ok(Running::Bifrost { daemon: Program::start(command, "bifrostd", &logs.join("switch"))?, control })
            }
        }
    }

    fn freeze(&self, still: bool) -> Result<()> {
        match self {
            Running::Dpdk(switch) => switch.freeze(still),
            Running::Bifrost { daemon, .. } => testpmd::freeze(daemon.pid(), still),
        }
    }

    /// For `bifrostd`: nanoseconds at work, packets forwarded, so far.
    fn work(&self, lab: &Lab) -> Result<Option<(f64, f64)>> {
        let Running::Bifrost { control, .. } = self else { return Ok(None) };
        let program = lab.binaries.bifrostctl.to_string_lossy();
        let socket = control.to_string_lossy();
        let answer: Value = serde_json::from_str(&command::run(&program, &["--socket", &*socket, "--json", "stats"])?)?;
        let counter = |name: &str| answer.get("counters").and_then(|c| c.get(name)).and_then(Value::as_f64);
        Ok(counter("datapath.busy_ns").zip(counter("datapath.local_packets")))
    }
}

fn measure(lab: &Lab, mode: Switch, frame_bytes: u32, repetition: u32, seconds: f64) -> Result<Row> {
    let logs = lab.logs(&format!("{mode}-{frame_bytes}-{repetition}"));
    let sockets = [0, 1].map(|n| lab.run.directory().join(format!("vhost-rate-{n}")));
    for socket in &sockets {
        let _ = std::fs::remove_file(socket);
    }
    let mut host = Namespace::create(format!("{}-switch", lab.run.id()))?;
    host.pin(PROCESSORS[0]);
    let mut guest = Namespace::create(format!("{}-guest", lab.run.id()))?;
    guest.pin(PROCESSORS[1]);
    let mut switch = Running::start(lab, mode, &host, &sockets, &logs)?;
    let deadline = Instant::now() + PATIENCE;
    while !sockets.iter().all(|socket| socket.exists()) {
        if Instant::now() > deadline {
            bail!("the switch does not listen; its output is in {}", logs.display());
        }
        interrupt::sleep(Duration::from_millis(20))?;
    }
    let mut devices = Vec::new();
    for (n, socket) in sockets.iter().enumerate() {
        let file = lab.run.directory().join(format!("frames-{n}.pcap"));
        std::fs::write(&file, frames(n, frame_bytes)).with_context(|| format!("writing {}", file.display()))?;
        devices.push(format!("net_pcap{n},rx_pcap={}", file.display()));
        let mac = mac(n).map(|byte| format!("{byte:02x}")).join(":");
        devices.push(format!("net_virtio_user{n},path={},queue_size={RING},mac={mac}", socket.display()));
    }
    let mut guest = Testpmd::start(&guest, PROCESSORS[1], &devices, &logs.join("guest"))?;

    // Each port is given its packets while the switch stands still: otherwise the first would be back, and taken away again,
    // before the second one's turn.
    interrupt::sleep(Duration::from_millis(500))?;
    switch.freeze(true)?;
    for ports in ["0,1", "2,3"] {
        for line in [&format!("set portlist {ports}"), "start"] {
            guest.tell(line)?;
        }
        interrupt::sleep(Duration::from_millis(300))?;
        guest.tell("stop")?;
    }
    guest.tell(&format!("set portlist {},{}", VIRTIO[0], VIRTIO[1]))?;
    guest.tell("start")?;
    switch.freeze(false)?;
    interrupt::sleep(Duration::from_secs(1))?;

    let (before, began) = (switch.work(lab)?, Instant::now());
    guest.tell("show port stats all")?;
    interrupt::sleep(Duration::from_secs_f64(seconds))?;
    let duration_s = began.elapsed().as_secs_f64();
    guest.tell("show port stats all")?;
    let after = switch.work(lab)?;
    interrupt::sleep(Duration::from_millis(300))?;
    guest.tell("stop")?;
    guest.wait_for("cycles/packet=", PATIENCE)?;
    interrupt::sleep(Duration::from_millis(300))?;
    let printed = guest.printed();
    let (_, clock_mhz) = testpmd::cycles_per_packet(&printed).context("dpdk-testpmd does not name its clock")?;
    let mut received = 0;
    for port in VIRTIO {
        let counts = testpmd::port_packets(&printed, port);
        let [(first, _), (last, _)] = counts[..] else { bail!("dpdk-testpmd shows no statistics of port {port}") };
        received += last - first;
    }
    let cycles_per_packet = match (&mut switch, before.zip(after)) {
        (Running::Dpdk(switch), _) => {
            switch.tell("stop")?;
            switch.wait_for("cycles/packet=", PATIENCE)?;
            testpmd::cycles_per_packet(&switch.printed()).map(|(cycles, _)| cycles)
        }
        (_, Some((before, after))) => Some((after.0 - before.0) / (after.1 - before.1) * clock_mhz / 1000.0),
        _ => None,
    };
    Ok(Row {
        mode,
        repetition,
        frame_bytes,
        duration_s,
        packets_per_s: received as f64 / duration_s,
        cycles_per_packet: cycles_per_packet.context("the switch does not tell its work")?,
        lost_packets: dropped(&printed),
    })
}

/// What the guest's ports could not send, by the summaries that it prints when forwarding stops.
fn dropped(printed: &str) -> u64 {
    let dropped = |line: &str| line.split_once("TX-dropped:")?.1.split_whitespace().next()?.parse::<u64>().ok();
    // The last summary is that of all ports.
    printed.lines().rev().find_map(dropped).unwrap_or(0)
}

fn mac(port: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, port as u8 + 1]
}

/// A file (`pcap`) of UDP frames from guest port `from` to the other one.
fn frames(from: usize, frame_bytes: u32) -> Vec<u8> {
    let len = frame_bytes as usize - 4;
    let mut file = Vec::with_capacity(24 + CIRCLING as usize * (16 + len));
    for word in [0xa1b2_c3d4u32, 2 | 4 << 16, 0, 0, 65_535, 1] {
        file.extend(word.to_le_bytes());
    }
    let address = |port: usize| [10, 0, 0, port as u8 + 1];
    let mut ip = [0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    ip[2..4].copy_from_slice(&(len as u16 - 14).to_be_bytes());
    ip[12..16].copy_from_slice(&address(from));
    ip[16..20].copy_from_slice(&address(1 - from));
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ip[10..12].copy_from_slice(&(!folded as u16).to_be_bytes());
    let mut frame = [&mac(1 - from)[..], &mac(from), &[8, 0], &ip].concat();
    for field in [1000, 2000, len as u16 - 34, 0] {
        frame.extend(field.to_be_bytes());
    }
    frame.resize(len, 0);
    for number in 0..CIRCLING {
        frame[42..46].copy_from_slice(&number.to_be_bytes());
        for word in [0, 0, len as u32, len as u32] {
            file.extend(word.to_le_bytes());
        }
        file.extend(&frame);
    }
    file
}

/// The daemon's configuration: one network, two ports.
fn configuration(control: &Path, sockets: &[PathBuf; 2]) -> String {
    let mut text = format!(
        "[host]\nname = \"host-a\"\n\n[control]\nsocket = \"{}\"\n\n[workers]\ncount = 1\n\n\
         [underlay]\naddresses = [\"127.0.0.1\"]\nmtu = 1600\n\n[[vpc]]\nvni = 100\nreliability = \"off\"\n",
        control.display()
    );
    for (n, socket) in sockets.iter().enumerate() {
        text += &format!(
            "\n[[port]]\nname = \"guest-{n}\"\nkind = \"vhost-user\"\nsocket = \"{}\"\nvni = 100\nmac = \"{}\"\n\
             addresses = [\"10.0.0.{}/24\"]\nmtu = 1500\n",
            socket.display(),
            mac(n).map(|byte| format!("{byte:02x}")).join(":"),
            n + 1,
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bar_can_fail() {
        let row = |mode, frame_bytes, packets_per_s| Row {
            mode,
            repetition: 0,
            frame_bytes,
            duration_s: 4.0,
            packets_per_s,
            cycles_per_packet: 300.0,
            lost_packets: 0,
        };
        let missed = |change: fn(&mut Vec<Row>)| {
            let mut rows: Vec<Row> = FRAME_BYTES
                .into_iter()
                .flat_map(|size| [row(Switch::DpdkVhost, size, 5e6), row(Switch::Off, size, 3e6)])
                .collect();
            change(&mut rows);
            VhostRate.bars(&to_values(&rows).unwrap()).unwrap().iter().filter(|bar| !bar.passes()).count()
        };
        assert_eq!(missed(|_| {}), 0);
        assert_eq!(missed(|rows| rows[1].packets_per_s = 1.9e6), 1);
        assert_eq!(missed(|rows| rows[3].packets_per_s = 1.9e6), 1);
        assert_eq!(missed(|rows| rows[1].lost_packets = 1), 1);
        assert_eq!(missed(|rows| rows.retain(|r| r.mode == Switch::Off)), 2, "nothing to compare with");
    }

    #[test]
    fn frames_are_whole() {
        let file = frames(1, 64);
        assert_eq!(file.len(), 24 + 256 * (16 + 60));
        let frame = &file[40..100];
        assert_eq!((&frame[..6], &frame[6..12]), (&mac(0)[..], &mac(1)[..]));
        let sum: u32 = frame[14..34].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "the header's checksum");
        assert_eq!(frame[38..40], 26u16.to_be_bytes());
    }

    #[test]
    fn losses_are_those_of_the_last_summary() {
        let printed = "TX-packets: 5 TX-dropped: 7 TX-total: 12\nTX-packets: 9 TX-dropped: 2 TX-total: 11\n";
        assert_eq!((dropped(printed), dropped("")), (2, 0));
    }
}
