//! Packets that circulate between two vhost-user ports of one switch.
//!
//! The guest is `dpdk-testpmd` with two `net_virtio_user` ports. A fixed number of packets circulates: each packet
//! that arrives at one port leaves at the other, unchanged, and returns through the switch. So nothing is lost, and
//! the guest, which never inspects a packet, does not limit the rate.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::lab::Lab;
use crate::netns::Namespace;
use crate::process::{self, Program};
use crate::programs::testpmd::{self, Testpmd};
use crate::{command, interrupt};

/// Packets in each direction: a quarter of a ring, so that there is always room for all of them.
pub(super) const CIRCLING: u32 = 256;
/// Processor of the switch, and of the guest.
pub(super) const PROCESSORS: [usize; 2] = [0, 1];
/// Descriptors of each ring.
const RING: u32 = 1024;
/// The guest's virtio ports; the other two ports only feed them.
const VIRTIO: [usize; 2] = [1, 3];
/// Time for a program to start or to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns an error if the machine has fewer than [`PROCESSORS`].
pub(super) fn need_processors() -> Result<()> {
    if std::thread::available_parallelism().map_or(1, usize::from) < PROCESSORS.len() {
        bail!("this experiment needs two processors: the switch and the guest busy-poll");
    }
    Ok(())
}

/// The result of a measurement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Circled {
    /// Duration of the count, s.
    pub(super) duration_s: f64,
    /// Packets per second that both of the guest's ports received.
    pub(super) packets_per_s: f64,
    /// Busy cycles of the switch per packet, by the time stamp counter.
    pub(super) cycles_per_packet: f64,
    /// Packets that the guest could not send, of those in circulation.
    pub(super) lost_packets: u64,
}

/// A running switch.
pub(super) enum Running {
    Dpdk(Testpmd),
    Bifrost { daemon: Program, control: PathBuf },
}

impl Running {
    /// `dpdk-testpmd` with two vhost ports; it does not inspect packets.
    pub(super) fn dpdk(namespace: &Namespace, sockets: &[PathBuf; 2], logs: &Path) -> Result<Running> {
        let port = |n: usize| format!("net_vhost{n},iface={}", sockets[n].display());
        let mut switch = Testpmd::start(namespace, PROCESSORS[0], &[port(0), port(1)], &logs.join("switch"))?;
        switch.tell("start")?;
        Ok(Running::Dpdk(switch))
    }

    /// `bifrostd` with ports at the given sockets; `more` is added to its configuration (see [`configuration`]).
    pub(super) fn bifrostd(
        lab: &Lab,
        namespace: &Namespace,
        sockets: &[PathBuf; 2],
        more: &More,
        logs: &Path,
    ) -> Result<Running> {
        let control = lab.run.directory().join("circle.sock");
        let config = logs.join("bifrostd.toml");
        std::fs::create_dir_all(logs).with_context(|| format!("creating {}", logs.display()))?;
        std::fs::write(&config, configuration(&control, sockets, more)).context("writing a configuration")?;
        let mut command = namespace.command(&lab.binaries.bifrostd);
        command.arg("--config").arg(&config);
        Ok(Running::Bifrost { daemon: Program::start(command, "bifrostd", &logs.join("switch"))?, control })
    }

    fn freeze(&self, still: bool) -> Result<()> {
        match self {
            Running::Dpdk(switch) => switch.freeze(still),
            Running::Bifrost { daemon, .. } => process::freeze(daemon.pid(), still),
        }
    }

    /// For `bifrostd`: busy time, ns, and packets forwarded, so far.
    fn work(&self, lab: &Lab) -> Result<Option<(f64, f64)>> {
        let Running::Bifrost { control, .. } = self else { return Ok(None) };
        let program = lab.binaries.bifrostctl.to_string_lossy();
        let socket = control.to_string_lossy();
        let answer: Value = serde_json::from_str(&command::run(&program, &["--socket", &*socket, "--json", "stats"])?)?;
        let counter = |name: &str| answer.get("counters").and_then(|c| c.get(name)).and_then(Value::as_f64);
        Ok(counter("datapath.busy_ns").zip(counter("datapath.local_packets")))
    }
}

/// Lets `frames` circulate from each of the guest's ports, and counts for `seconds`. `start` starts the switch with
/// the given sockets.
pub(super) fn measure(
    lab: &Lab,
    logs: &Path,
    start: impl FnOnce(&Namespace, &[PathBuf; 2]) -> Result<Running>,
    frames: impl Fn(usize) -> Vec<u8>,
    seconds: f64,
) -> Result<Circled> {
    need_processors()?;
    let sockets = [0, 1].map(|n| lab.run.directory().join(format!("circle-{n}")));
    for socket in &sockets {
        let _ = std::fs::remove_file(socket);
    }
    let mut host = Namespace::create(format!("{}-switch", lab.run.id()))?;
    host.pin(PROCESSORS[0]);
    let mut guest = Namespace::create(format!("{}-guest", lab.run.id()))?;
    guest.pin(PROCESSORS[1]);
    let mut switch = start(&host, &sockets)?;
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
        std::fs::write(&file, frames(n)).with_context(|| format!("writing {}", file.display()))?;
        devices.push(format!("net_pcap{n},rx_pcap={}", file.display()));
        let mac = mac(n).map(|byte| format!("{byte:02x}")).join(":");
        devices.push(format!("net_virtio_user{n},path={},queue_size={RING},mac={mac}", socket.display()));
    }
    let mut guest = Testpmd::start(&guest, PROCESSORS[1], &devices, &logs.join("guest"))?;

    // The ports get their packets while the switch is stopped: otherwise the first port's packets would return, and
    // be dropped, before the second port is filled.
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
    let (_, clock_mhz) = testpmd::cycles_per_packet(&printed).context("dpdk-testpmd does not print its clock rate")?;
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
    Ok(Circled {
        duration_s,
        packets_per_s: received as f64 / duration_s,
        cycles_per_packet: cycles_per_packet.context("the switch does not report its busy cycles")?,
        lost_packets: dropped(&printed),
    })
}

/// Packets that the guest's ports could not send, from the summaries that testpmd prints when forwarding stops.
fn dropped(printed: &str) -> u64 {
    let dropped = |line: &str| line.split_once("TX-dropped:")?.1.split_whitespace().next()?.parse::<u64>().ok();
    // The last summary covers all ports.
    printed.lines().rev().find_map(dropped).unwrap_or(0)
}

/// The first source port, and the destination port of all frames.
const SOURCE_PORT: u16 = 1000;
pub(super) const DESTINATION_PORT: u16 = 2000;

fn mac(port: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, port as u8 + 1]
}

/// A `pcap` file of UDP frames from guest port `from` to the other port, with `flows` flows in turn.
pub(super) fn frames(from: usize, frame_bytes: u32, flows: u32) -> Vec<u8> {
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
    for field in [SOURCE_PORT, DESTINATION_PORT, len as u16 - 34, 0] {
        frame.extend(field.to_be_bytes());
    }
    frame.resize(len, 0);
    for number in 0..CIRCLING {
        frame[34..36].copy_from_slice(&(SOURCE_PORT + (number % flows) as u16).to_be_bytes());
        frame[42..46].copy_from_slice(&number.to_be_bytes());
        for word in [0, 0, len as u32, len as u32] {
            file.extend(word.to_le_bytes());
        }
        file.extend(&frame);
    }
    file
}

/// Additions to a daemon's configuration.
#[derive(Debug, Clone, Default)]
pub(super) struct More {
    /// Sections before the network.
    pub(super) sections: String,
    /// Lines and sections of the network.
    pub(super) network: String,
    /// Lines in each port's section.
    pub(super) port: String,
}

/// The daemon's configuration: one network, two ports.
fn configuration(control: &Path, sockets: &[PathBuf; 2], more: &More) -> String {
    let More { sections, network, port } = more;
    let mut text = format!(
        "[host]\nname = \"host-a\"\n\n[control]\nsocket = \"{}\"\n\n[workers]\ncount = 1\n\n\
         [underlay]\naddresses = [\"127.0.0.1\"]\nmtu = 1600\n\n{sections}[[vpc]]\nvni = 100\nreliability = \
         \"off\"\n{network}",
        control.display()
    );
    for (n, socket) in sockets.iter().enumerate() {
        text += &format!(
            "\n[[port]]\nname = \"guest-{n}\"\nkind = \"vhost-user\"\nsocket = \"{}\"\nvni = 100\nmac = \"{}\"\n\
             addresses = [\"10.0.0.{}/24\"]\nmtu = 1500\n{port}",
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
    fn frames_are_whole() {
        let file = frames(1, 64, 3);
        assert_eq!(file.len(), 24 + 256 * (16 + 60));
        let frame = &file[40..100];
        assert_eq!((&frame[..6], &frame[6..12]), (&mac(0)[..], &mac(1)[..]));
        let sum: u32 = frame[14..34].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "header checksum");
        assert_eq!(frame[38..40], 26u16.to_be_bytes());
        let port = |n: usize| u16::from_be_bytes([file[24 + n * 76 + 50], file[24 + n * 76 + 51]]);
        assert_eq!([0, 1, 2, 3].map(port), [1000, 1001, 1002, 1000], "flows take turns");
    }

    #[test]
    fn losses_come_from_the_last_summary() {
        let printed = "TX-packets: 5 TX-dropped: 7 TX-total: 12\nTX-packets: 9 TX-dropped: 2 TX-total: 11\n";
        assert_eq!((dropped(printed), dropped("")), (2, 0));
    }
}
