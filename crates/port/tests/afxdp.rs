//! The AF_XDP underlay between network namespaces.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use bifrost_port::afxdp::{AfxdpConfig, AfxdpError, AfxdpUnderlay, XdpMode};
use bifrost_port::udp::{UdpConfig, UdpUnderlay};
use bifrost_port::{LaneId, Service, TxBatch, Underlay, steer};
use support::Namespace;

#[path = "afxdp/hand_over.rs"]
mod hand_over;
mod support;

/// Two namespaces, connected by a veth pair with a device `x` with two queues in each.
struct Pair {
    a: Namespace,
    b: Namespace,
}

const V4: [&str; 2] = ["10.9.0.1", "10.9.0.2"];
const V6: [&str; 2] = ["fd09::1", "fd09::2"];

impl Pair {
    fn new() -> Self {
        let (a, b) = (Namespace::new(), Namespace::new());
        a.ip(&format!("link add x mtu 1600 numrxqueues 2 numtxqueues 2 type veth peer name x netns {} mtu 1600 numrxqueues 2 numtxqueues 2", b.0));
        for (side, (v4, v6)) in [&a, &b].into_iter().zip(V4.into_iter().zip(V6)) {
            side.ip(&format!("addr add {v4}/24 dev x"));
            side.ip(&format!("addr add {v6}/64 dev x nodad"));
            side.ip("link set x up");
        }
        Self { a, b }
    }
}

/// Runs work on a thread inside a namespace.
fn within<T: Send>(namespace: &Namespace, work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let inside = || {
            namespace.enter();
            work()
        };
        scope.spawn(inside).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn config(side: usize, workers: u16, mode: XdpMode) -> AfxdpConfig {
    let local = [V4[side], V6[side]].map(|a| a.parse::<IpAddr>().expect("an address")).to_vec();
    AfxdpConfig { udp: UdpConfig { local, workers, ..UdpConfig::default() }, mode, frames: 256, mtu: 1600 }
}

fn ends(v6: bool, from: usize, port: u16) -> (SocketAddr, SocketAddr) {
    let names = if v6 { V6 } else { V4 };
    let address = |side: usize| names[side].parse::<IpAddr>().expect("an address");
    (SocketAddr::new(address(from), 50_000), SocketAddr::new(address(1 - from), port))
}

/// A BIFROST packet of a connection of `worker` that contains a number.
fn data(worker: u8, number: u32, len: usize) -> Vec<u8> {
    let mut payload = vec![number as u8; len.max(24)];
    payload[8] = 1;
    payload[16] = worker;
    payload[20..24].copy_from_slice(&number.to_be_bytes());
    payload
}

fn send(underlay: &mut impl Underlay, lane: LaneId, payloads: impl Iterator<Item = Vec<u8>>) {
    let mut batch = TxBatch::default();
    payloads.for_each(|payload| batch.push(lane, 2, |bytes| bytes.extend_from_slice(&payload)));
    underlay.send(&mut batch);
    assert!(batch.is_empty());
}

/// Received datagrams (payload, source, ECN, TTL and whether they came to the BIFROST port) until there are `count` or
/// none arrive.
type Got = (Vec<u8>, SocketAddr, u8, u8, bool);

fn collect(underlay: &mut impl Underlay, count: usize) -> Vec<Got> {
    let (mut got, mut last) = (Vec::new(), Instant::now());
    while got.len() < count && last.elapsed() < Duration::from_secs(2) {
        for i in 0..underlay.recv().expect("recv") {
            let d = underlay.datagram(i);
            assert!(d.rx_time_ns <= underlay.received_at_ns());
            got.push((d.payload.to_vec(), d.source, d.ecn, d.ttl, d.service == Service::Bifrost));
            last = Instant::now();
        }
    }
    got
}

/// Sends through the kernel until the next hop is resolved.
fn resolve(underlay: &mut AfxdpUnderlay, peer: &mut impl Underlay, lane: LaneId) {
    let started = Instant::now();
    while !underlay.is_resolved(lane) {
        assert!(started.elapsed() < Duration::from_secs(20), "the neighbour is never resolved");
        send(underlay, lane, std::iter::once(data(0, 0, 24)));
        collect(peer, 1);
    }
}

/// One worker on each side, frames in both directions, IPv4 and IPv6.
fn both_ways(mode: XdpMode) {
    let pair = Pair::new();
    let open = |namespace, side| {
        within(namespace, || AfxdpUnderlay::open_all(&config(side, 1, mode))).expect("open").pop().expect("one")
    };
    let (mut a, mut b) = (open(&pair.a, 0), open(&pair.b, 1));
    let link = pair.a.ip("link show x");
    assert!(link.contains(if mode == XdpMode::Generic { "xdpgeneric" } else { "xdp" }), "{link}");
    for v6 in [false, true] {
        let (local, remote) = ends(v6, 0, 4794);
        let there = within(&pair.a, || a.lane(local, remote)).expect("lane");
        assert_eq!(a.lane(local, remote).expect("lane"), there, "one lane for the same ends");
        let (local_b, remote_b) = ends(v6, 1, 4789);
        let back = within(&pair.b, || b.lane(local_b, remote_b)).expect("lane");
        resolve(&mut a, &mut b, there);
        assert!(
            a.counters().tx_fallback_datagrams > 0,
            "the first datagrams use the kernel: the neighbour is unresolved"
        );
        resolve(&mut b, &mut a, back);
        let (before_a, before_b) = (a.counters(), b.counters());
        // More than there are TX frames, in batches that fit.
        for batch in 0..6u32 {
            let lengths = |n: u32| 24 + (n as usize * 97) % 1400;
            send(&mut a, there, (0..100).map(|n| data(0, batch * 100 + n, lengths(n))));
            let got = collect(&mut b, 100);
            assert_eq!(got.len(), 100);
            for (n, (payload, source, ecn, ttl, bifrost)) in (0u32..).zip(&got) {
                assert_eq!(*payload, data(0, batch * 100 + n, lengths(n)), "in order and whole");
                assert_eq!((*source, *ecn, *ttl, *bifrost), (local, 2, 64, true));
            }
            send(&mut b, back, (0..100).map(|n| data(0, n, 60)));
            let got = collect(&mut a, 100);
            assert_eq!(got.len(), 100);
            assert!(got.iter().all(|(_, source, _, _, bifrost)| *source == local_b && !bifrost));
        }
        for (before, after) in [(before_a, a.counters()), (before_b, b.counters())] {
            // One or two may use the kernel, so that it probes a stale neighbour.
            assert!(after.tx_datagrams - before.tx_datagrams >= 590, "{after:?}");
            assert!(after.rx_datagrams - before.rx_datagrams >= 590, "{after:?}");
            assert_eq!(after.rx_parsed_datagrams, 0, "notes are read");
            let dropped = [after.rx_malformed_frames, after.rx_bad_checksum_frames, after.rx_dropped_frames];
            assert_eq!((dropped, after.tx_no_frame_datagrams), ([0; 3], 0));
        }
    }
    drop(a);
    let link = pair.a.ip("link show x");
    assert!(!link.contains("xdp"), "still attached: {link}");
}

#[test]
fn frames_in_both_directions_native() {
    both_ways(XdpMode::Native);
}

#[test]
fn frames_in_both_directions_generic() {
    both_ways(XdpMode::Generic);
}

/// Three workers on two queues: each receives its own datagrams from a sender with UDP sockets, whichever queue they
/// arrive on; and each sends.
#[test]
fn each_worker_gets_its_own_datagrams() {
    let pair = Pair::new();
    let mut workers = within(&pair.b, || AfxdpUnderlay::open_all(&config(1, 3, XdpMode::Auto))).expect("open");
    let udp = UdpConfig { local: config(0, 1, XdpMode::Auto).udp.local, ..UdpConfig::default() };
    let mut sender = within(&pair.a, || {
        let mut sender = UdpUnderlay::open(udp).expect("open");
        for port in 0..8 {
            let (mut local, remote) = ends(false, 0, 4794);
            local.set_port(50_000 + port);
            sender.lane(local, remote).expect("lane");
        }
        sender
    });
    for n in 0..96u32 {
        send(&mut sender, LaneId(n % 8), std::iter::once(data((n % 3) as u8, n, 100)));
    }
    for (number, worker) in (0u16..).zip(&mut workers) {
        let got = collect(worker, 32);
        assert_eq!(got.len(), 32);
        assert!(got.iter().all(|(payload, ..)| steer::worker_of_bifrost(payload, 3) == number));
        let counters = worker.counters();
        assert_eq!((counters.rx_datagrams, counters.rx_fallback_datagrams), (32, 0), "{counters:?}");
    }
    // The kernel segments runs before they arrive.
    send(&mut sender, LaneId(0), (0..64).map(|n| data(1, n, 1200)));
    assert_eq!(collect(&mut workers[1], 64).len(), 64);
    let mut port = 51_000;
    for worker in &mut workers {
        let (mut local, remote) = ends(false, 1, 4794);
        port += 1;
        local.set_port(port);
        let lane = within(&pair.b, || worker.lane(local, remote)).expect("lane");
        resolve(worker, &mut sender, lane);
        let before = worker.counters().tx_datagrams;
        send(worker, lane, (0..50).map(|n| data(0, n, 100)));
        let got = collect(&mut sender, 50);
        assert!(got.len() == 50 && got.iter().all(|(_, source, ..)| *source == local));
        assert!(worker.counters().tx_datagrams - before >= 49);
    }
}

#[test]
fn complex_datagrams_arrive_through_the_kernel() {
    let pair = Pair::new();
    let mut b = within(&pair.b, || AfxdpUnderlay::open_all(&config(1, 1, XdpMode::Auto))).expect("open").remove(0);
    let (local, remote) = ends(false, 0, 4794);
    let stranger = within(&pair.a, || UdpSocket::bind(local).expect("bind"));
    stranger.send_to(&data(0, 1, 4000), remote).expect("a datagram in fragments");
    let got = collect(&mut b, 1);
    assert_eq!(got.len(), 1);
    assert_eq!((got[0].0.clone(), got[0].1), (data(0, 1, 4000), local));
    let counters = b.counters();
    assert_eq!((counters.rx_datagrams, counters.rx_fallback_datagrams), (0, 1));
    // A datagram larger than the link's MTU is counted where the kernel refuses it.
    let (local, remote) = ends(false, 1, 4794);
    let lane = within(&pair.b, || b.lane(local, remote)).expect("lane");
    send(&mut b, lane, std::iter::once(data(0, 2, 1700)));
    assert_eq!((b.udp_counters().tx_too_big_datagrams, b.counters().tx_fallback_datagrams), (1, 1));
}

#[test]
fn errors_say_what_to_do() {
    let pair = Pair::new();
    let open = |config: AfxdpConfig| {
        let error = within(&pair.a, || AfxdpUnderlay::open_all(&config).err());
        error.expect("it opens").to_string()
    };
    let base = config(0, 1, XdpMode::Auto);
    assert!(open(AfxdpConfig { frames: 100, ..base.clone() }).contains("power of two"));
    assert!(open(AfxdpConfig { mtu: 9000, ..base.clone() }).contains("at most 3800"));
    let nowhere = UdpConfig { local: vec!["10.77.0.1".parse().expect("an address")], ..UdpConfig::default() };
    assert!(open(AfxdpConfig { udp: nowhere, ..base.clone() }).contains("underlay.addresses"));
    // A device accepts only one program.
    let other = UdpConfig { bifrost_port: 14_794, vxlan_port: 14_789, ..base.udp.clone() };
    let _first = within(&pair.a, || AfxdpUnderlay::open_all(&base)).expect("open");
    let error = within(&pair.a, || AfxdpUnderlay::open_all(&AfxdpConfig { udp: other, ..base.clone() }).err());
    assert!(matches!(error, Some(AfxdpError::Attach { .. } | AfxdpError::Socket { .. })), "{error:?}");
}
