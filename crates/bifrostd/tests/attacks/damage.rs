//! Packets that change after they were checked, and peers that provoke a host into sending more than it receives.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bifrost_control::Client;

use crate::common::front_end::{FrontEnd, Kind, MEMORY, TX};
use crate::common::packets::{End, Listener, UDP, ipv4, udp};
use crate::common::tenants::{Attachment, Pace, Tenants, repeat, spin};
use crate::common::traffic::Talk;
use crate::common::{Lab, Options, raw};

/// A front-end that changes payloads in flight. The packets are carried reliably: the network's `reliability` is "all".
#[test]
fn payloads_that_change_while_they_are_sent() {
    let tenants = Tenants::new(Attachment::Machine);
    let (x, y) = (End::attacker(1), End::attacker(2));
    let listener = Listener::start(tenants.lab.net("y"), x);
    // Paths that became suspect on either host during the attack.
    let blamed = Arc::new(AtomicU64::new(0));
    tenants.judge("payloads that change", |tenants, stop| {
        let kind = Kind { packed: false, size: 256 };
        let mut guest = FrontEnd::running(&tenants.socket(), kind).expect("the port serves a machine");
        let memory = Arc::clone(&guest.memory);
        let first = guest.buffer(TX, 0);
        let mut value = 0u64;
        let changing = spin(stop, move || {
            value = value.wrapping_add(0x0101);
            // In every buffer, beyond the head that the daemon copies.
            for n in 0..256 {
                memory.store64(first + 2048 * n + 800, value);
            }
            assert!(first < MEMORY);
        });
        let (mut pace, mut number) = (Pace::new(5000.0), 0u16);
        let sending = repeat(stop, move || {
            pace.wait();
            number = number.wrapping_add(1);
            let datagram = udp(x, y, false, (1000, 2000), &[number as u8; 1200]);
            u64::from(guest.send(&ipv4(x, y, UDP, number, 0, &datagram)))
        });
        let clients: Vec<_> = tenants.lab.hosts.iter().map(|host| Client::new(host.socket()).unwrap()).collect();
        let suspect_paths = move || {
            let counters = clients.iter().map(|client| client.stats().unwrap().counters);
            counters.map(|counters| counters.get("rte.suspect_paths").copied().unwrap_or(0)).sum::<u64>()
        };
        let (before, blamed, stop_seen) = (suspect_paths(), Arc::clone(&blamed), Arc::clone(stop));
        let counting = std::thread::spawn(move || {
            while !stop_seen.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(10));
            }
            blamed.fetch_add(suspect_paths() - before, Ordering::Relaxed);
            0
        });
        vec![changing, sending, counting]
    });
    let blamed = blamed.load(Ordering::Relaxed);
    assert!(blamed == 0 || tenants.lab.stood_still(), "{blamed} paths were blamed for what a guest did");
    // Frames that arrive must match their checksums.
    let wrong = |frame: &Vec<u8>| frame[12..14] == [8, 0] && frame[23] == UDP && !has_right_sum(&frame[14..]);
    let arrived = listener.take();
    let wrong = arrived.iter().filter(|frame| wrong(frame)).count();
    println!("{} frames arrived, {wrong} of them with a wrong checksum", arrived.len());
    assert!(arrived.len() > 100, "{} frames arrived", arrived.len());
}

/// Whether the UDP checksum of an IPv4 packet without options is valid.
fn has_right_sum(packet: &[u8]) -> bool {
    let length = usize::from(u16::from_be_bytes([packet[2], packet[3]]));
    let datagram = &packet[20..length];
    let pseudo = [&packet[12..20], &[0, UDP], &(datagram.len() as u16).to_be_bytes(), datagram].concat();
    raw::checksum(&pseudo) == 0
}

/// A DATA packet at the far end of the window, and duplicates of it.
#[test]
fn duplicates_far_ahead_are_not_answered_with_more() {
    let lab = Lab::running(Options::default());
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    for _ in 0..3 {
        talk.say(50_000);
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    let conn = lab.hosts[0].conns_with(lab.guest("b")).remove(0);
    let (a, b) = (lab.guest("a").mac_bytes(), lab.guest("b").mac_bytes());
    let frame = raw::ethernet(a, b, 0x0800, &raw::udp_in_ipv4([10, 0, 0, 2], [10, 0, 0, 1], &[7; 10]));
    let psn = (conn.rx_packets as u32).wrapping_add(4095);
    let mut packet = vec![1, conn.version << 4, 0, 0];
    packet.extend_from_slice(&psn.to_be_bytes());
    packet.extend_from_slice(&conn.cid.to_be_bytes());
    packet.extend_from_slice(&[0; 4]);
    packet.extend_from_slice(&frame);
    let datagram = raw::vxlan(100, &packet);
    let sent_bytes = |lab: &Lab| {
        lab.hosts[0].net.enter(|| {
            let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
            let links = text.lines().filter(|line| line.trim_start().starts_with('l') && !line.contains("lo:"));
            // Sent bytes are the ninth number after the name.
            links.map(|line| line.split_whitespace().nth(9).unwrap().parse::<u64>().unwrap()).sum::<u64>()
        })
    };
    let (from, to) = (lab.hosts[1].addresses[0], SocketAddr::new(lab.hosts[0].addresses[0], 4794));
    let before = sent_bytes(&lab);
    let (mut received, mut datagrams) = (0, 0);
    for _ in 0..50 {
        // One at a time, because one ACK may acknowledge a whole batch.
        for _ in 0..4 {
            raw::send_datagrams(&lab.hosts[1].net, from, to, vec![datagram.clone()]);
            received += datagram.len() as u64 + 42;
            datagrams += 1;
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    let answered = sent_bytes(&lab) - before;
    println!("{datagrams} datagrams, {received} bytes, were answered with {answered} bytes");
    // Probes of idle paths and similar packets are included; they are sent every 100 ms.
    assert!(answered < 2 * received, "{answered} bytes for {received}");
    assert!(lab.hosts[0].client.status().is_ok());
}
