//! The UDP underlay over real loopback sockets.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bifrost_port::clock::monotonic_ns;
use bifrost_port::udp::{UdpConfig, UdpError, UdpUnderlay};
use bifrost_port::{LaneId, Service, TxBatch, Underlay, steer};
use support::Namespace;

mod support;

/// A loopback address that no other test, and no concurrent run, uses.
fn address() -> IpAddr {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let n = (std::process::id() << 6) + NEXT.fetch_add(1, Ordering::Relaxed);
    IpAddr::V4(Ipv4Addr::from(0x7f00_0000 | 0x0040_0000 | (n & 0x3f_ffff)))
}

/// Taken by tests that create children, which hold copies of all sockets for a moment, and by those that bind a port
/// again.
static CHILDREN: Mutex<()> = Mutex::new(());

fn config(local: IpAddr) -> UdpConfig {
    UdpConfig { local: vec![local], ..UdpConfig::default() }
}

/// Two local addresses share one queue, which preserves the arrival order; a third address of the host receives
/// nothing.
#[test]
fn several_addresses_keep_the_order_of_arrival() {
    let (a, b, c, stranger) = (address(), address(), address(), address());
    let ports = UdpConfig { bifrost_port: 24_796, vxlan_port: 24_797, ..UdpConfig::default() };
    let mut receiver = UdpUnderlay::open(UdpConfig { local: vec![a, b], ..ports }).expect("open");
    let socket = UdpSocket::bind((c, 0)).expect("bind");
    for i in 0..200u32 {
        socket.send_to(&i.to_be_bytes(), (if i / 7 % 2 == 0 { a } else { b }, 24_796)).expect("send");
        socket.send_to(&[0xff; 4], (stranger, 24_796)).expect("send");
    }
    let got: Vec<u32> = collect(&mut receiver, 200)
        .iter()
        .map(|g| u32::from_be_bytes(g.payload[..].try_into().expect("four bytes")))
        .collect();
    assert_eq!(got, (0..200).collect::<Vec<_>>());
}

/// Over IPv6, a tunnel's packets may have no UDP checksum; the transport's must have one.
#[test]
fn plain_vxlan_needs_no_checksum() {
    let ports = UdpConfig { bifrost_port: 24_896, vxlan_port: 24_897, ..UdpConfig::default() };
    let local = IpAddr::V6(Ipv6Addr::LOCALHOST);
    let mut receiver = UdpUnderlay::open(UdpConfig { local: vec![local], ..ports }).expect("open");
    let socket = UdpSocket::bind((local, 0)).expect("bind");
    bifrost_udp::set_int(&socket, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1).expect("no checksums");
    for port in [24_896, 24_897] {
        socket.send_to(&[port as u8; 40], (local, port)).expect("send");
    }
    let got = collect(&mut receiver, 2);
    assert_eq!(got.iter().map(|got| got.service).collect::<Vec<_>>(), [Service::Vxlan]);
}

/// The datagrams received until there are `count`, or none for half a second.
fn collect(underlay: &mut UdpUnderlay, count: usize) -> Vec<Got> {
    let mut out = Vec::new();
    let mut last = Instant::now();
    while out.len() < count && last.elapsed() < Duration::from_millis(500) {
        let n = underlay.recv().expect("recv");
        for i in 0..n {
            let d = underlay.datagram(i);
            out.push(Got {
                payload: d.payload.to_vec(),
                source: d.source,
                service: d.service,
                ecn: d.ecn,
                ttl: d.ttl,
                rx_time_ns: d.rx_time_ns,
                age_ns: underlay.received_at_ns() - d.rx_time_ns,
            });
            last = Instant::now();
        }
    }
    out
}

struct Got {
    payload: Vec<u8>,
    source: SocketAddr,
    service: Service,
    ecn: u8,
    ttl: u8,
    rx_time_ns: u64,
    age_ns: u64,
}

/// Sends runs of mixed sizes over interleaved lanes with mixed ECN marks; checks everything that arrives.
fn round_trip(a: IpAddr, b: IpAddr, base: UdpConfig) -> (UdpUnderlay, UdpUnderlay, usize) {
    let mut sender = UdpUnderlay::open(UdpConfig { local: vec![a], ..base.clone() }).expect("open sender");
    let mut receiver = UdpUnderlay::open(UdpConfig { local: vec![b], ..base.clone() }).expect("open receiver");
    let remote = [SocketAddr::new(b, base.bifrost_port), SocketAddr::new(b, base.vxlan_port)];
    let lanes: Vec<LaneId> = (0..4)
        .map(|i| sender.lane(SocketAddr::new(a, 50_100 + i), remote[usize::from(i == 3)]).expect("lane"))
        .collect();
    assert_eq!(sender.lane(SocketAddr::new(a, 50_100), remote[0]).expect("same lane"), lanes[0]);

    let mut batch = TxBatch::default();
    let mut sent: HashMap<u16, Vec<(u8, Vec<u8>)>> = HashMap::new();
    let mut total = 0;
    for round in 0..40u32 {
        for (l, &lane) in (0u16..).zip(&lanes) {
            for n in 0..(round % 5) {
                let len = match (round + n) % 7 {
                    0 => 16,
                    1 => 900,
                    _ => 1400,
                };
                let ecn = if round % 10 == 9 { 1 } else { 0 };
                let payload: Vec<u8> = (0..len).map(|i| (i + round * 3 + n * 7 + u32::from(l)) as u8).collect();
                batch.push(lane, ecn, |out| out.extend_from_slice(&payload));
                sent.entry(50_100 + l).or_default().push((ecn, payload));
                total += 1;
            }
        }
    }
    sender.send(&mut batch);
    assert!(batch.is_empty());
    assert_eq!(sender.counters().tx_datagrams, total as u64, "{:?}", sender.counters());

    let got = collect(&mut receiver, total);
    assert_eq!(got.len(), total, "{:?}", receiver.counters());
    let mut per_source: HashMap<u16, Vec<(u8, Vec<u8>)>> = HashMap::new();
    let now = monotonic_ns();
    for g in got {
        assert_eq!(g.source.ip(), a);
        assert_eq!(g.ttl, 64);
        assert_eq!(g.service, if g.source.port() == 50_103 { Service::Vxlan } else { Service::Bifrost });
        assert!(g.rx_time_ns <= now && now - g.rx_time_ns < 10_000_000_000, "time {} now {now}", g.rx_time_ns);
        assert!(g.age_ns > 0, "the kernel's time, not the batch's");
        per_source.entry(g.source.port()).or_default().push((g.ecn, g.payload));
    }
    assert!(per_source == sent, "contents, marks and order per lane");
    (sender, receiver, total)
}

#[test]
fn segmentation_and_coalescing_round_trip() {
    let (sender, receiver, total) = round_trip(address(), address(), UdpConfig::default());
    let (tx, rx) = (sender.counters(), receiver.counters());
    assert!(tx.tx_messages < total as u64 / 2, "{tx:?}");
    assert!(tx.tx_system_calls <= 12, "{tx:?}");
    assert!(rx.rx_messages < total as u64 / 2, "{rx:?}");
    assert_eq!((rx.rx_datagrams, rx.rx_bytes), (total as u64, tx.tx_bytes));
    assert_eq!(tx.tx_gso_refused_messages, 0);
}

#[test]
fn works_without_segmentation() {
    let (sender, _, total) = round_trip(address(), address(), UdpConfig { gso: false, ..UdpConfig::default() });
    assert_eq!(sender.counters().tx_messages, total as u64);
}

#[test]
fn works_over_ipv6() {
    let loopback = IpAddr::V6(Ipv6Addr::LOCALHOST);
    let mut a =
        UdpUnderlay::open(UdpConfig { bifrost_port: 24_794, vxlan_port: 24_789, ..config(loopback) }).expect("open");
    let lane = a.lane(SocketAddr::new(loopback, 50_200), SocketAddr::new(loopback, 24_794)).expect("lane");
    let mut batch = TxBatch::default();
    for i in 0..20u8 {
        batch.push(lane, if i < 10 { 2 } else { 0 }, |out| out.extend([i; 300]));
    }
    a.send(&mut batch);
    let got = collect(&mut a, 20);
    assert_eq!(got.len(), 20, "{:?}", a.counters());
    for (i, g) in got.iter().enumerate() {
        assert_eq!((g.payload.as_slice(), g.ecn, g.ttl), (&[i as u8; 300][..], if i < 10 { 2 } else { 0 }, 64));
        assert!(g.rx_time_ns > 0);
        assert_eq!(g.source, SocketAddr::new(loopback, 50_200));
    }
    assert!(a.counters().tx_messages == 2 && a.counters().rx_messages <= 4, "{:?}", a.counters());
    let v4 = a.lane(SocketAddr::new(loopback, 50_200), SocketAddr::from(([127, 0, 0, 1], 24_794)));
    assert!(v4.expect_err("families differ").to_string().contains("IPv6"));
}

#[test]
fn one_source_port_serves_many_peers_in_one_call() {
    let a = address();
    let mut sender = UdpUnderlay::open(config(a)).expect("open");
    let mut peers: Vec<_> =
        (0..5).map(|_| address()).map(|ip| (ip, UdpUnderlay::open(config(ip)).expect("open"))).collect();
    let mut batch = TxBatch::default();
    for (i, (ip, _)) in peers.iter().enumerate() {
        let lane = sender.lane(SocketAddr::new(a, 50_300), SocketAddr::new(*ip, 4794)).expect("lane");
        batch.push(lane, 0, |out| out.extend([i as u8; 64]));
    }
    sender.send(&mut batch);
    assert_eq!(sender.counters().tx_system_calls, 1);
    for (i, (_, peer)) in peers.iter_mut().enumerate() {
        let got = collect(peer, 1);
        assert_eq!(got[0].payload, [i as u8; 64]);
    }
}

#[test]
fn refused_datagrams_are_counted_and_the_others_sent() {
    let (a, b) = (address(), address());
    let mut sender = UdpUnderlay::open(config(a)).expect("open");
    let mut receiver = UdpUnderlay::open(config(b)).expect("open");
    let good = sender.lane(SocketAddr::new(a, 50_400), SocketAddr::new(b, 4794)).expect("lane");
    let off_host = sender.lane(SocketAddr::new(a, 50_400), SocketAddr::from(([192, 0, 2, 77], 4794))).expect("lane");
    let mut batch = TxBatch::default();
    batch.push(good, 0, |out| out.extend([1; 100]));
    batch.push(good, 0, |out| out.extend(vec![2; 65_530]));
    batch.push(off_host, 0, |out| out.extend([3; 100]));
    batch.push(off_host, 0, |out| out.extend([3; 100]));
    batch.push(LaneId(999), 0, |out| out.extend([4; 100]));
    batch.push(good, 0, |out| out.extend([5; 100]));
    sender.send(&mut batch);
    let c = sender.counters();
    assert_eq!(c.tx_too_big_datagrams, 1, "{c:?}");
    assert_eq!(c.tx_unknown_lane_datagrams, 1, "{c:?}");
    assert_eq!(c.tx_unreachable_datagrams + c.tx_other_error_datagrams, 2, "{c:?}");
    assert_eq!(c.tx_datagrams, 2, "{c:?}");
    let got = collect(&mut receiver, 2);
    assert_eq!(got.iter().map(|g| g.payload[0]).collect::<Vec<_>>(), [1, 5]);
}

#[test]
fn oversized_datagrams_are_not_fragmented_and_smaller_ones_sent() {
    let ns = Namespace::new();
    ns.ip("link set lo mtu 1600");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ns.enter();
            for (a, bits) in [(IpAddr::from([127, 0, 0, 1]), 28), (IpAddr::V6(Ipv6Addr::LOCALHOST), 48)] {
                let mut underlay = UdpUnderlay::open(config(a)).expect("open");
                let lane = underlay.lane(SocketAddr::new(a, 50_800), SocketAddr::new(a, 4794)).expect("lane");
                let mut batch = TxBatch::default();
                let sizes = [1600 - bits, 1600 - bits, 1601 - bits, 1601 - bits, 1601 - bits, 100, 1600 - bits];
                for len in sizes {
                    batch.push(lane, 0, |out| out.resize(out.len() + len, len as u8));
                }
                underlay.send(&mut batch);
                let got = collect(&mut underlay, 4);
                assert_eq!(
                    got.iter().map(|g| g.payload.len()).collect::<Vec<_>>(),
                    [sizes[0], sizes[0], 100, sizes[0]]
                );
                let c = underlay.counters();
                assert_eq!((c.tx_too_big_datagrams, c.tx_datagrams), (3, 4), "{c:?}");
            }
        });
    });
}

#[test]
fn a_full_receive_buffer_is_counted() {
    let (a, b) = (address(), address());
    let mut sender = UdpUnderlay::open(config(a)).expect("open");
    let mut receiver = UdpUnderlay::open(UdpConfig { receive_buffer_bytes: 8192, ..config(b) }).expect("open");
    let lane = sender.lane(SocketAddr::new(a, 50_500), SocketAddr::new(b, 4794)).expect("lane");
    let mut batch = TxBatch::default();
    for i in 0..200u16 {
        // Increasing sizes, so that no two form one message.
        batch.push(lane, 0, |out| out.extend(vec![0; 1000 + usize::from(i)]));
    }
    sender.send(&mut batch);
    let first = collect(&mut receiver, 200).len();
    assert!(first > 0 && first < 200, "{first}");
    batch.push(lane, 0, |out| out.push(1));
    sender.send(&mut batch);
    assert_eq!(collect(&mut receiver, 1).len(), 1);
    let c = receiver.counters();
    assert_eq!(c.rx_buffer_full_messages + c.rx_datagrams, sender.counters().tx_datagrams, "{c:?}");
}

#[test]
fn transmit_sockets_receive_nothing() {
    let a = address();
    let mut underlay = UdpUnderlay::open(config(a)).expect("open");
    underlay.lane(SocketAddr::new(a, 50_600), SocketAddr::new(a, 4794)).expect("lane");
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("bind");
    for _ in 0..100 {
        stranger.send_to(&[0; 1000], SocketAddr::new(a, 50_600)).expect("send");
    }
    let IpAddr::V4(v4) = a else { unreachable!() };
    let key = format!("{:08X}:{:04X}", u32::from(v4).swap_bytes(), 50_600);
    let table = std::fs::read_to_string("/proc/net/udp").expect("/proc/net/udp");
    let line = table.lines().find(|l| l.contains(&key)).expect("the transmit socket is listed");
    let queues = line.split_whitespace().nth(4).expect("queue column");
    assert!(queues.ends_with(":00000000"), "queued: {line}");
    assert_eq!(underlay.recv().expect("recv"), 0);
}

#[test]
fn several_workers_share_the_ports_by_rule() {
    let (a, b) = (address(), address());
    let base = UdpConfig { workers: 3, ..config(b) };
    let mut workers = UdpUnderlay::open_all(&base).expect("open all");
    let twice = UdpUnderlay::open(base.clone()).err().expect("a second daemon must not join the group");
    assert!(matches!(twice, UdpError::Bind { .. }), "{twice}");

    let mut sender = UdpUnderlay::open(config(a)).expect("open");
    let bifrost = sender.lane(SocketAddr::new(a, 50_700), SocketAddr::new(b, 4794)).expect("lane");
    let vxlan = sender.lane(SocketAddr::new(a, 50_700), SocketAddr::new(b, 4789)).expect("lane");
    let mut batch = TxBatch::default();
    let mut want = [0usize; 3];
    let mut seed = 0x1234_5678u32;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 17;
        seed ^= seed << 5;
        seed
    };
    for n in 0..600u32 {
        let len = [3, 9, 17, 19, 20, 25, 31, 32, 48, 200][random() as usize % 10];
        let mut p: Vec<u8> = (0..len).map(|_| random() as u8).collect();
        if len >= 20 {
            p[8] = [1, 2, 3, 3, 3, 6][random() as usize % 6];
            if random() % 2 == 0 {
                p[16..20].copy_from_slice(&[0; 4]);
            } else {
                p[16] = (random() % 5) as u8;
            }
        }
        let on_vxlan = n % 3 == 0;
        let worker = if on_vxlan { steer::worker_of_vxlan(&p, 3) } else { steer::worker_of_bifrost(&p, 3) };
        want[usize::from(worker)] += 1;
        batch.push(if on_vxlan { vxlan } else { bifrost }, 0, |out| out.extend_from_slice(&p));
        // One at a time: the kernel steers a coalesced run as a whole.
        sender.send(&mut batch);
    }
    assert!(want.iter().all(|&n| n > 50), "{want:?}");
    for (i, worker) in (0u16..).zip(&mut workers) {
        let got = collect(worker, want[usize::from(i)]);
        assert_eq!(got.len(), want[usize::from(i)], "worker {i} of {want:?}");
        for g in got {
            let owner = match g.service {
                Service::Bifrost => steer::worker_of_bifrost(&g.payload, 3),
                Service::Vxlan => steer::worker_of_vxlan(&g.payload, 3),
            };
            assert_eq!(owner, i);
        }
    }
    // Each worker sends from the same source port.
    for worker in &mut workers {
        worker.lane(SocketAddr::new(b, 50_701), SocketAddr::new(a, 4794)).expect("lane");
    }
}

/// From its creation until it executes its program, a child process holds its parent's descriptors. A port that was
/// bound and closed just before stays in use for that time.
#[test]
fn workers_open_while_the_process_creates_children() {
    let _children = CHILDREN.lock().unwrap_or_else(PoisonError::into_inner);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let children = || {
            while !done.load(Ordering::Relaxed) {
                assert!(Command::new("true").status().expect("run true").success());
            }
        };
        let spawning = scope.spawn(children);
        let failed = (0..300).find_map(|_| UdpUnderlay::open_all(&UdpConfig { workers: 2, ..config(address()) }).err());
        done.store(true, Ordering::Relaxed);
        spawning.join().expect("the thread that creates children");
        assert!(failed.is_none(), "{failed:?}");
    });
}

#[test]
fn bad_configurations_say_what_to_do() {
    let busy = address();
    let _held = UdpUnderlay::open(config(busy)).expect("open");
    let cases = [
        ("port taken", config(busy), "another program"),
        ("not our address", config(IpAddr::from([192, 0, 2, 200])), "no interface has this address"),
        ("no address", UdpConfig::default(), "local addresses"),
        ("worker too high", UdpConfig { worker: 1, ..config(address()) }, "worker 1 of 1"),
        ("no workers", UdpConfig { workers: 0, ..config(address()) }, "1 to 32"),
        ("one port for both", UdpConfig { bifrost_port: 4789, ..config(address()) }, "4789"),
        ("no buffers", UdpConfig { receive_messages: 0, ..config(address()) }, "1 to 1024"),
    ];
    for (name, config, needle) in cases {
        let error = UdpUnderlay::open(config).err().unwrap_or_else(|| panic!("{name}: opened")).to_string();
        assert!(error.contains(needle), "{name}: {error}");
    }
    let a = address();
    let mut underlay = UdpUnderlay::open(config(a)).expect("open");
    let clash = underlay.lane(SocketAddr::new(a, 4794), SocketAddr::new(a, 4794)).expect_err("clash");
    assert!(clash.to_string().contains("source_port_base"), "{clash}");
}

/// Another process's worker adopts the sockets of one: queued datagrams, and the source ports.
#[test]
fn sockets_are_adopted_with_queued_datagrams() {
    let (a, b) = (address(), address());
    let ports = UdpConfig { bifrost_port: 24_996, vxlan_port: 24_997, ..UdpConfig::default() };
    let own = UdpConfig { local: vec![a], ..ports.clone() };
    let mut first = UdpUnderlay::open(own.clone()).expect("open");
    let peer = UdpSocket::bind((b, 0)).expect("bind");
    let to = peer.local_addr().expect("bound");
    let lane = |underlay: &mut UdpUnderlay, port| underlay.open_lane(SocketAddr::new(a, port), to).expect("a lane");
    lane(&mut first, 25_100);
    peer.send_to(b"before", (a, 24_996)).expect("send");
    let mut second = UdpUnderlay::adopt(own.clone(), first.sockets().expect("copies")).expect("adopt");
    // While both are open, either may receive.
    drop(first);
    peer.send_to(b"after", (a, 24_997)).expect("send");
    let got = collect(&mut second, 2);
    let of = |service| got.iter().find(|got| got.service == service).map(|got| &got.payload[..]);
    assert_eq!((of(Service::Bifrost), of(Service::Vxlan)), (Some(&b"before"[..]), Some(&b"after"[..])));
    // The same port again, which no other socket could bind, and another one.
    for port in [25_100, 25_101] {
        let lane = lane(&mut second, port);
        let mut batch = TxBatch::default();
        batch.push(lane, 0, |out| out.extend(b"hello"));
        second.send(&mut batch);
        let mut buffer = [0; 16];
        peer.set_read_timeout(Some(Duration::from_secs(2))).expect("timeout");
        let (len, from) = peer.recv_from(&mut buffer).expect("sent");
        assert_eq!((&buffer[..len], from), (&b"hello"[..], SocketAddr::new(a, port)));
    }
    // Something else than sockets is refused.
    let mut foreign = second.sockets().expect("copies");
    foreign.receive[0] = std::fs::File::open("/dev/null").expect("open").into();
    assert!(UdpUnderlay::adopt(own, foreign).is_err());
}

/// With another number of workers, new ones join the group of sockets, and what others hold is received. If the attempt
/// fails, the first process continues.
#[test]
fn sockets_are_adopted_by_another_number_of_workers() {
    let _no_children = CHILDREN.lock().unwrap_or_else(PoisonError::into_inner);
    let a = address();
    let ports = UdpConfig { local: vec![a], bifrost_port: 24_976, vxlan_port: 24_977, ..UdpConfig::default() };
    let peer = UdpSocket::bind((a, 0)).expect("bind");
    let to = peer.local_addr().expect("bound");
    // A packet of a connection of that worker.
    let of_worker = |worker: u16, mark: u8| {
        let mut packet = [0u8; 40];
        (packet[8], packet[16], packet[39]) = (1, worker as u8, mark);
        packet
    };
    let send = |mark: u8| {
        for worker in 0..6 {
            peer.send_to(&of_worker(worker, mark), (a, 24_976)).expect("send");
        }
    };
    let assert_steered = |all: &mut [UdpUnderlay], mark: u8, what: &str| {
        send(mark);
        let workers = all.len() as u16;
        for (worker, underlay) in (0..).zip(all) {
            let wanted = (0..6u32).filter(|of| steer::worker_of_cid(of << 24, workers) == worker);
            let wanted: Vec<u8> = wanted.map(|of| of as u8).collect();
            let got = collect(underlay, wanted.len());
            let got: Vec<u8> = got.iter().filter(|got| got.payload[39] == mark).map(|got| got.payload[16]).collect();
            assert_eq!(got, wanted, "{what}: worker {worker} of {workers}");
        }
    };
    for (former, next) in [(1, 2), (2, 1), (2, 3), (3, 2), (1, 4), (4, 1), (5, 3)] {
        let what = format!("{former} -> {next}");
        let of = |workers| UdpConfig { workers, ..ports.clone() };
        let mut first = UdpUnderlay::open_all(&of(former)).expect("open");
        for underlay in &mut first {
            underlay.open_lane(SocketAddr::new(a, 25_200), to).expect("a lane");
        }
        let adopt = |first: &[UdpUnderlay]| {
            let handed = first.iter().map(|first| first.sockets().expect("copies")).collect();
            let mut second = UdpUnderlay::adopt_all(&of(next), handed).expect("adopt");
            for underlay in &mut second {
                // Workers share the source port from the beginning.
                underlay.open_lane(SocketAddr::new(a, 25_200), to).expect("a lane");
            }
            second
        };
        // It ends before it has begun, and afterwards; its sockets may be closed later.
        for begins in [false, true] {
            let mut second = adopt(&first);
            assert_steered(&mut first, 1, &what);
            if begins {
                second.iter_mut().for_each(|second| second.begin(false).expect("begin"));
            }
            first.iter().for_each(|first| first.resume(false, true).expect("resume"));
            assert_steered(&mut first, 2, &what);
            drop(second);
            assert_steered(&mut first, 3, &what);
        }
        let mut second = adopt(&first);
        send(4);
        second.iter_mut().for_each(|second| second.begin(false).expect("begin"));
        assert_eq!(second.iter_mut().map(|second| collect(second, 6).len()).sum::<usize>(), 6, "{what}: queued");
        assert_steered(&mut second, 5, &what);
        drop(first);
        assert_steered(&mut second, 6, &what);
        second.iter_mut().for_each(|second| assert!(second.close_retired(false)));
        assert_steered(&mut second, 7, &what);
        assert!(second.iter().all(|second| second.sockets().expect("copies").receive.len() == 2));
        // Nobody else can bind the port.
        let other = UdpUnderlay::open_all(&of(1)).map(drop).expect_err("in use").to_string();
        assert!(other.contains("uses this port"), "{what}: {other}");
    }
}

/// With other addresses or ports, sockets that fit are used, and others opened. Those that do not fit are read until
/// they are empty. If the attempt fails, the first process continues.
#[test]
fn sockets_are_adopted_for_other_addresses_and_ports() {
    let _no_children = CHILDREN.lock().unwrap_or_else(PoisonError::into_inner);
    let (a, b) = (address(), address());
    let one = UdpConfig { local: vec![a], bifrost_port: 24_986, vxlan_port: 24_987, ..UdpConfig::default() };
    let two = UdpConfig { local: vec![a, b], ..one.clone() };
    let other = UdpConfig { bifrost_port: 24_988, ..one.clone() };
    let peer = UdpSocket::bind((a, 0)).expect("bind");
    let send = |text: &str, to: IpAddr, port: u16| {
        peer.send_to(text.as_bytes(), (to, port)).expect("send");
    };
    let payloads =
        |got: &[Got]| got.iter().map(|got| String::from_utf8_lossy(&got.payload).into_owned()).collect::<Vec<_>>();
    for workers in [1, 2] {
        let of = |config: &UdpConfig| UdpConfig { workers, ..config.clone() };
        for (former, next) in [(of(&one), of(&two)), (of(&two), of(&one)), (of(&one), of(&other))] {
            let mut first = UdpUnderlay::open_all(&former).expect("open");
            let adopt = |first: &[UdpUnderlay]| {
                let of_worker = |(worker, first): (u16, &UdpUnderlay)| {
                    UdpUnderlay::adopt(UdpConfig { worker, ..next.clone() }, first.sockets().expect("copies"))
                };
                (0..).zip(first).map(of_worker).collect::<Result<Vec<_>, _>>().expect("adopt")
            };
            // It ends before it has begun, and afterwards.
            for begins in [false, true] {
                let mut second = adopt(&first);
                if begins {
                    second.iter_mut().for_each(|second| second.begin(true).expect("begin"));
                }
                drop(second);
                first.iter().for_each(|first| first.resume(true, false).expect("resume"));
                send("first", a, former.bifrost_port);
                assert_eq!(payloads(&collect(&mut first[0], 1)), ["first"], "{former:?}");
            }
            let mut second = adopt(&first);
            send("queued", a, former.bifrost_port);
            second.iter_mut().for_each(|second| second.begin(true).expect("begin"));
            send("begun", a, next.bifrost_port);
            let mut got = payloads(&collect(&mut second[0], 2));
            got.sort();
            assert_eq!(got, ["begun", "queued"], "{next:?}");
            drop(first);
            // One that a datagram has reached is read first.
            let is_retired = former.local.len() < next.local.len();
            if is_retired {
                send("late", a, former.bifrost_port);
                assert!(!second[0].close_retired(false));
                assert_eq!(payloads(&collect(&mut second[0], 1)), ["late"]);
            }
            second.iter_mut().for_each(|second| assert!(second.close_retired(false)));
            for local in &next.local {
                send("at last", *local, next.bifrost_port);
                assert_eq!(payloads(&collect(&mut second[0], 1)), ["at last"], "{next:?}");
            }
            // These can be handed over again.
            let handed = second[0].sockets().expect("copies");
            assert_eq!(handed.receive.len(), 2);
        }
    }
    // A port in use.
    let first = UdpUnderlay::open(one.clone()).expect("open");
    let taken = UdpConfig { bifrost_port: peer.local_addr().expect("bound").port(), ..one };
    let mut second = UdpUnderlay::adopt(taken, first.sockets().expect("copies")).expect("adopt");
    let error = second.begin(true).expect_err("in use").to_string();
    assert!(error.contains("uses this port"), "{error}");
}
