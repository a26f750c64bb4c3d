//! Forged requests and replies, and floods of them.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::eventually;
use crate::common::front_end::{FrontEnd, Kind};
use crate::common::packets::{End, ICMP, ICMPV6, Listener, MORE, TCP, UDP, icmp, ipv4, ipv6, tcp, udp};
use crate::common::raw::{arp, ethernet};
use crate::common::tenants::{Attachment, GATEWAY, GATEWAY_MAC, Pace, Tenants, repeat};

/// Where `scripts/install-debian-packages.sh` unpacks testpmd.
const TESTPMD: &str = "/var/cache/bifrost-lab/dpdk/usr/bin/dpdk-testpmd";

/// Frames that a guest may not send, or that nobody needs: spoofed addresses, broadcasts, tags, forged ARP and ND
/// replies, and ICMP errors about other guests' flows.
fn forged() -> Vec<Vec<u8>> {
    let (x, y, gateway) = (End::attacker(1), End::attacker(2), End::gateway());
    // Addresses of the other tenant.
    let a = End { mac: [2, 0, 0, 0, 0, 1], v4: [10, 0, 0, 1], v6: x.v6 };
    let b = End { mac: [2, 0, 0, 0, 0, 2], v4: [10, 0, 0, 2], v6: y.v6 };
    let datagram = |from: End, to: End| udp(from, to, false, (68, 67), &[0; 240]);
    let syn = tcp(a, b, false, (40_000, 6379), 2);
    let everybody = End { mac: [0xff; 6], v4: [255; 4], v6: y.v6 };
    let inner = ipv4(b, a, TCP, 1, 0, &tcp(b, a, false, (6379, 40_000), 4));
    let mut frames = vec![
        // Spoofed as from the other tenant, and sent to it.
        ipv4(a, b, TCP, 1, 0, &syn),
        ipv4(x, b, TCP, 1, 0, &syn),
        ipv4(End { mac: x.mac, ..a }, gateway, TCP, 1, 0, &syn),
        ipv4(x, End { mac: gateway.mac, ..b }, TCP, 1, 0, &syn),
        // DHCP, and other broadcast and multicast datagrams.
        ipv4(End { v4: [0; 4], ..x }, everybody, UDP, 1, 0, &datagram(x, everybody)),
        ipv4(x, everybody, UDP, 1, 0, &datagram(x, everybody)),
        ipv4(x, End { mac: [1, 0, 0x5e, 0, 0, 251], v4: [224, 0, 0, 251], v6: y.v6 }, UDP, 1, 0, &datagram(x, y)),
        // ICMP errors about a flow of other guests, or about none.
        ipv4(x, y, ICMP, 1, 0, &icmp(x, y, false, 3, &[&[0, 0, 2, 0][..], &inner[14..]].concat())),
        ipv4(gateway, y, ICMP, 1, 0, &icmp(gateway, y, false, 3, &[&[0, 0, 2, 0][..], &inner[14..]].concat())),
        ipv6(x, y, ICMPV6, 64, &icmp(x, y, true, 2, &[&[0, 0, 5, 0][..], &[0x60; 48]].concat())),
        // Redirects and router advertisements.
        ipv4(x, y, ICMP, 1, 0, &icmp(x, y, false, 5, &[&x.v4[..], &inner[14..]].concat())),
        ipv6(gateway, y, ICMPV6, 255, &icmp(gateway, y, true, 134, &[64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0])),
        ipv6(x, y, ICMPV6, 255, &icmp(x, y, true, 134, &[64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0])),
        ipv6(x, y, ICMPV6, 255, &icmp(x, y, true, 137, &[&[0; 4][..], &x.v6, &y.v6].concat())),
        // ARP and neighbour advertisements for the addresses of the gateway and of others.
        ethernet([0xff; 6], x.mac, 0x0806, &arp(2, (x.mac, GATEWAY), ([0xff; 6], GATEWAY))),
        ethernet([0xff; 6], x.mac, 0x0806, &arp(1, (x.mac, y.v4), ([0; 6], y.v4))),
        ethernet(y.mac, x.mac, 0x0806, &arp(2, (x.mac, GATEWAY), (y.mac, y.v4))),
        ethernet(y.mac, x.mac, 0x0806, &arp(2, (GATEWAY_MAC, GATEWAY), (y.mac, y.v4))),
        ipv6(x, y, ICMPV6, 255, &icmp(x, y, true, 136, &[&[0x20, 0, 0, 0][..], &gateway.v6, &[2, 1], &x.mac].concat())),
        ipv6(x, y, ICMPV6, 255, &icmp(x, y, true, 136, &[&[0x20, 0, 0, 0][..], &y.v6, &[2, 1], &x.mac].concat())),
        // Other protocols, and link-layer protocols of the underlay.
        ethernet(y.mac, x.mac, 0x8847, &[0, 1, 0xf1, 64, 0x45, 0, 0, 20]),
        ethernet([1, 0x80, 0xc2, 0, 0, 0], x.mac, 38, &[0x42; 38]),
        ethernet(y.mac, x.mac, 0x88cc, &[7; 60]),
        ipv4(x, y, UDP, 1, MORE, &datagram(x, y)[..64]),
    ];
    let whole = ipv4(a, b, TCP, 1, 0, &syn);
    // One and two VLAN tags with the other network's VNI as VLAN ID, and a priority tag.
    for tags in [&[0x81, 0, 0, 100][..], &[0x88, 0xa8, 0, 100, 0x81, 0, 0, 100], &[0x81, 0, 0, 0]] {
        frames.push([&y.mac[..], &x.mac, tags, &whole[12..]].concat());
    }
    frames
}

/// Whether a frame should have been dropped: a guest may only send from its own addresses.
fn is_forged(frame: &[u8]) -> bool {
    let x = End::attacker(1);
    match frame[12..14] {
        [8, 0] => frame[26..30] != x.v4 && frame[26..30] != GATEWAY,
        [0x86, 0xdd] => {
            // Router advertisements, redirects, and neighbour advertisements for an address that is not the sender's
            // own.
            let claims = frame[20] == ICMPV6 && frame[54] == 136 && frame[62..78] != x.v6;
            frame[22..38] != x.v6
                || frame[20] == ICMPV6 && [134, 137].contains(&frame[54]) && frame[6..12] == x.mac
                || claims
        }
        [8, 6] => frame[28..32] != x.v4 && frame[6..12] == x.mac,
        _ => true,
    }
}

#[test]
fn frames_in_the_name_of_others() {
    let tenants = Tenants::new(Attachment::Machine);
    let listeners = [("y", Listener::start(tenants.lab.net("y"), End::attacker(1)))];
    let others = ["a", "b"].map(|name| Listener::start(tenants.lab.net(name), End::attacker(1)));
    tenants.judge("forged frames", |tenants, stop| {
        let kind = Kind { packed: true, size: 256 };
        let mut guest = FrontEnd::running(&tenants.socket(), kind).expect("the port serves a machine");
        let (frames, mut pace, mut n) = (forged(), Pace::new(6000.0), 0);
        vec![repeat(stop, move || {
            pace.wait();
            n += 1;
            u64::from(guest.send(&frames[n % frames.len()]))
        })]
    });
    for (name, listener) in listeners {
        let forged: Vec<_> = listener.take().into_iter().filter(|frame| is_forged(frame)).collect();
        assert!(forged.is_empty(), "{name} was sent {} forged frames, such as {:02x?}", forged.len(), forged[0]);
    }
    for other in others {
        let seen = other.take();
        assert!(seen.is_empty(), "the other tenant was sent {} frames, such as {:02x?}", seen.len(), seen[0]);
    }
    let drops = tenants.lab.hosts[0].port("x").drops_packets;
    for reason in ["spoofed_mac", "spoofed_ip", "spoofed_arp", "vlan", "ethertype", "multicast"] {
        assert!(drops.get(reason).copied().unwrap_or(0) > 0, "{reason}: {drops:?}");
    }
}

/// The switch answers each request to the gateway once, with a reply that is hardly longer than the request, and only
/// to the sender.
#[test]
fn questions_are_answered_once_and_to_who_asked() {
    let tenants = Tenants::new(Attachment::Machine);
    let (x, gateway) = (End::attacker(1), End::gateway());
    let solicit = [&[0, 0, 0, 0][..], &gateway.v6, &[1, 1], &x.mac].concat();
    let to_all = End {
        mac: [0x33, 0x33, 0xff, 0, 0, 0xfe],
        v4: GATEWAY,
        v6: [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 0xfe],
    };
    let frames = vec![
        ethernet([0xff; 6], x.mac, 0x0806, &arp(1, (x.mac, x.v4), ([0; 6], GATEWAY))),
        ipv6(x, to_all, ICMPV6, 255, &icmp(x, to_all, true, 135, &solicit)),
        ipv4(x, gateway, ICMP, 1, 0, &icmp(x, gateway, false, 8, &[7; 100])),
        ipv6(x, gateway, ICMPV6, 64, &icmp(x, gateway, true, 128, &[7; 100])),
    ];
    let asked: Arc<std::sync::Mutex<(u64, u64)>> = Arc::default();
    let y = Listener::start(tenants.lab.net("y"), x);
    let answered = || tenants.lab.hosts[0].counter("datapath.answered_packets");
    let before = answered();
    let done = tenants.judge("questions to the gateway", |tenants, stop| {
        let kind = Kind { packed: false, size: 256 };
        let mut guest = FrontEnd::running(&tenants.socket(), kind).expect("the port serves a machine");
        let (frames, asked) = (frames.clone(), Arc::clone(&asked));
        let (mut pace, mut n) = (Pace::new(6000.0), 0);
        vec![repeat(stop, move || {
            pace.wait();
            n += 1;
            let frame = &frames[n % frames.len()];
            let sent = guest.send(frame);
            let answers = guest.receive();
            let mut asked = asked.lock().unwrap();
            asked.0 += frame.len() as u64;
            asked.1 += answers.iter().map(|answer| answer.len() as u64).sum::<u64>();
            assert!(answers.iter().all(|answer| answer[..6] == x.mac));
            u64::from(sent)
        })]
    });
    let answered = answered() - before;
    let drops = tenants.lab.hosts[0].port("x").drops_packets;
    assert!(answered > done / 2 && answered <= done, "{answered} answers to {done} questions: {drops:?}");
    let (question_bytes, answer_bytes) = *asked.lock().unwrap();
    assert!(answer_bytes <= question_bytes + question_bytes / 10, "{answer_bytes} bytes for {question_bytes}");
    assert!(y.take().is_empty(), "a neighbour heard of it");
}

/// A user-space driver that sends the frames of a file in a loop, as fast as possible.
struct Testpmd(Child, PathBuf);

impl Testpmd {
    fn start(directory: &Path, socket: &Path, frames: &[Vec<u8>]) -> Testpmd {
        let file = directory.join("forged.pcap");
        let mut bytes: Vec<u8> =
            [0xa1b2_c3d4u32, 2 | 4 << 16, 0, 0, 65_535, 1].iter().flat_map(|word| word.to_le_bytes()).collect();
        for frame in frames {
            let length = frame.len() as u32;
            bytes.extend([0, 0, length, length].iter().flat_map(|word| word.to_le_bytes()));
            bytes.extend_from_slice(frame);
        }
        std::fs::write(&file, bytes).unwrap();
        let log = directory.join("testpmd.log");
        let output = File::create(&log).unwrap();
        let mut command = Command::new("setpriv");
        // It polls all the time, so it runs only when the CPUs are otherwise idle.
        command.args(["--pdeathsig", "KILL", "chrt", "--idle", "0", TESTPMD]);
        command.args([
            "--no-huge",
            "--no-shconf",
            "--no-pci",
            "--no-telemetry",
            "-m",
            "128",
            "--lcores",
            "0@(0-1),1@(0-1)",
        ]);
        let pcap = format!("net_pcap0,rx_pcap={},tx_pcap=/dev/null,infinite_rx=1", file.display());
        let port = format!("net_virtio_user0,path={},queue_size=256,mac=02:00:00:00:00:21", socket.display());
        command.args(["--vdev", &pcap, "--vdev", &port]);
        command.args(["--", "-i", "--forward-mode=io", "--total-num-mbufs=4096"]);
        let child = command.stdin(Stdio::piped()).stdout(output.try_clone().unwrap()).stderr(output).spawn();
        let child =
            child.unwrap_or_else(|error| panic!("{error}: scripts/install-debian-packages.sh unpacks {TESTPMD}"));
        Testpmd(child, log)
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{command}").unwrap();
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(&self.1).unwrap_or_default());
        }
    }
}

#[test]
fn a_flood_of_forged_frames_from_a_driver_in_user_space() {
    let tenants = Tenants::new(Attachment::Machine);
    let listeners = ["a", "b"].map(|name| Listener::start(tenants.lab.net(name), End::attacker(1)));
    let mut testpmd = Testpmd::start(&tenants.lab.hosts[0].directory, &tenants.socket(), &forged());
    eventually(30.0, "the port is in use", || !tenants.lab.hosts[0].port("x").waiting);
    let testpmd = Arc::new(std::sync::Mutex::new({
        testpmd.tell("set promisc all off");
        testpmd
    }));
    let before = tenants.lab.hosts[0].port("x").drops_packets.values().sum::<u64>();
    tenants.judge("forged frames from DPDK", |_, stop| {
        let (stop, testpmd) = (Arc::clone(stop), Arc::clone(&testpmd));
        vec![std::thread::spawn(move || {
            testpmd.lock().unwrap().tell("start");
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            testpmd.lock().unwrap().tell("stop");
            std::thread::sleep(std::time::Duration::from_millis(50));
            1
        })]
    });
    let dropped = tenants.lab.hosts[0].port("x").drops_packets.values().sum::<u64>() - before;
    println!("{dropped} forged frames were dropped");
    assert!(dropped > 5000, "{dropped} frames");
    for listener in listeners {
        assert!(listener.take().is_empty(), "the other tenant was sent frames");
    }
}
