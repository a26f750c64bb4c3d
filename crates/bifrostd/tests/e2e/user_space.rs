//! A guest with a user-space driver (`dpdk-testpmd`, `net_virtio_user`): it polls, disables notifications, and reuses a
//! buffer as soon as it is returned, but not before.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::common::host::{PATIENT, vpc};
use crate::common::{Guest, Lab, Options, eventually};

/// Installed by `scripts/install-debian-packages.sh`.
const TESTPMD: &str = "/var/cache/bifrost-lab/dpdk/usr/bin/dpdk-testpmd";
/// Frames in each direction: less than half of a ring, because each may take two descriptors and all must fit at once.
const FRAMES: u32 = 400;
/// Length of a frame, bytes.
const LEN: usize = 600;
/// Length of a capture file's header, and of each frame's header in it, bytes.
const FILE_HEADER: usize = 24;
const RECORD: usize = 16;

/// Frames from guest `from` to guest `to`, numbered, as a capture file.
fn capture(from: u8, to: u8) -> Vec<u8> {
    let mut file: Vec<u8> =
        [0xa1b2_c3d4u32, 2 | 4 << 16, 0, 0, 65_535, 1].iter().flat_map(|w| w.to_le_bytes()).collect();
    for number in 0..FRAMES {
        file.extend([0, 0, LEN as u32, LEN as u32].iter().flat_map(|w| w.to_le_bytes()));
        file.extend(frame(from, to, number));
    }
    file
}

fn frame(from: u8, to: u8, number: u32) -> Vec<u8> {
    let mut ip = [0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, from, 10, 0, 0, to];
    ip[2..4].copy_from_slice(&(LEN as u16 - 14).to_be_bytes());
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    ip[10..12].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
    let mut frame = [&[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0][..], &ip].concat();
    // UDP without a checksum.
    frame.extend([1000, 2000, LEN as u16 - 34, 0].iter().flat_map(|w: &u16| w.to_be_bytes()));
    frame.extend(number.to_be_bytes());
    frame.resize(LEN, number as u8);
    frame
}

/// The frames of a capture file.
fn frames(path: &Path) -> Vec<Vec<u8>> {
    let file = std::fs::read(path).unwrap();
    let mut rest = &file[FILE_HEADER..];
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        frames.push(rest[RECORD..RECORD + len].to_vec());
        rest = &rest[RECORD + len..];
    }
    frames
}

/// `dpdk-testpmd` with a port on each host. It sends frames from files, and writes received frames to files.
struct Testpmd {
    child: Child,
    directory: PathBuf,
}

impl Testpmd {
    fn start(directory: &Path, sockets: [PathBuf; 2]) -> Testpmd {
        let log = File::create(directory.join("testpmd.log")).unwrap();
        let mut command = Command::new("setpriv");
        // It never sleeps, so it has a lower priority than the daemons.
        command.args([
            "--pdeathsig",
            "KILL",
            "nice",
            "-n",
            "19",
            TESTPMD,
            "--no-huge",
            "--no-shconf",
            "--no-pci",
            "--no-telemetry",
        ]);
        command.args(["-m", "128", "--lcores", "0@(0-1),1@(0-1)"]);
        for (n, socket) in sockets.iter().enumerate() {
            let (from, to) = (n as u8 + 1, 2 - n as u8);
            let (sent, received) = (directory.join(format!("sent-{n}")), directory.join(format!("received-{n}")));
            std::fs::write(&sent, capture(from, to)).unwrap();
            command.arg("--vdev");
            command.arg(format!("net_pcap{n},rx_pcap={},tx_pcap={}", sent.display(), received.display()));
            command.arg("--vdev");
            command.arg(format!(
                "net_virtio_user{n},path={},queue_size=1024,mac=02:00:00:00:00:{from:02x}",
                socket.display()
            ));
        }
        // Forward between the two ports of a pair: file and guest.
        command.args(["--", "-i", "--forward-mode=io", "--no-flush-rx", "--total-num-mbufs=6144"]);
        let child = command
            .stdin(Stdio::piped())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{error}: scripts/install-debian-packages.sh unpacks {TESTPMD}"));
        Testpmd { child, directory: directory.to_path_buf() }
    }

    fn command(&mut self, command: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    /// Ends it, and returns the frames received at each port.
    fn finish(mut self) -> [Vec<Vec<u8>>; 2] {
        self.command("stop");
        self.command("quit");
        eventually(20.0, "testpmd exits", || self.child.try_wait().unwrap().is_some());
        let printed = std::fs::read_to_string(self.directory.join("testpmd.log")).unwrap();
        let dropped = |line: &&str| line.contains("TX-dropped:") && !line.contains("TX-dropped: 0 ");
        assert_eq!(printed.lines().find(dropped), None, "the driver's ring was full: the test sends too much at once");
        [0, 1].map(|n| frames(&self.directory.join(format!("received-{n}"))))
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.directory.join("testpmd.log")).unwrap_or_default());
        }
    }
}

#[test]
fn a_user_space_driver_gets_every_frame_once() {
    let mut lab =
        Lab::new(Options { vpcs: vpc(100, "all", "flow"), transport: PATIENT.to_owned(), ..Options::default() });
    lab.add_machine(0, &Guest::new("a", 1, &["10.0.0.1/24"]).mtu(1450), "server");
    lab.add_machine(1, &Guest::new("b", 2, &["10.0.0.2/24"]).mtu(1450), "server");
    lab.start();
    // Packets are retransmitted, and compared with the copies.
    lab.hosts[1].path_fault("host-a", None, |fault| fault.loss_percent = 3.0);
    let mut testpmd = Testpmd::start(&lab.hosts[0].directory, [lab.machine_socket("a"), lab.machine_socket("b")]);
    eventually(20.0, "both ports are in use", || !lab.hosts[0].port("a").waiting && !lab.hosts[1].port("b").waiting);
    testpmd.command("start");
    let arrived = |host: usize, port: &str| lab.hosts[host].port(port).rx_packets >= u64::from(FRAMES);
    eventually(20.0, "all frames arrive", || arrived(0, "a") && arrived(1, "b"));
    eventually(5.0, "all buffers are returned", || {
        lab.hosts[0].port("a").tx_held_packets == 0 && lab.hosts[1].port("b").tx_held_packets == 0
    });
    // The guest polls its rings: it has taken all delivered frames by then.
    std::thread::sleep(std::time::Duration::from_millis(100));
    let received = testpmd.finish();
    for (n, received) in received.iter().enumerate() {
        let (to, from) = (n as u8 + 1, 2 - n as u8);
        let sent: Vec<_> = (0..FRAMES).map(|number| frame(from, to, number)).collect();
        // One flow in each direction, so in order.
        assert!(*received == sent, "{} of {FRAMES} frames at port {n}, or out of order", received.len());
    }
    for host in &lab.hosts {
        assert!(host.counter("rte.sent_packets") >= u64::from(FRAMES));
        assert_eq!(host.counter("vhost.tx_reused_buffer_packets"), 0, "the driver does not reuse in-flight buffers");
        assert_eq!(host.counter("vhost.broken_rings"), 0);
        assert_eq!(host.counter("rte.given_up_packets"), 0);
    }
    assert!(lab.hosts[0].counter("rte.retransmitted_packets") > 0, "the fault causes retransmissions");
}
