//! TAP devices in their own network namespaces, with real TCP and UDP through them. Needs root and /dev/net/tun.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bifrost_nic::Segments;
use bifrost_port::tap::{self, DeviceId, PoolSizes, Steering, TapConfig, TapError, TapQueue};
use bifrost_port::{GuestPort, PlaceError, PolledPort as _, TxFrame, steer};
use support::Namespace;

mod support;

fn config(ns: &Namespace, n: u8) -> TapConfig {
    TapConfig {
        device: "eth0".into(),
        netns: Some(ns.0.clone()),
        mac: [2, 0, 0, 0, 0, n],
        addresses: vec![
            (IpAddr::from([10, 77, 0, n]), 24),
            (IpAddr::from([0xfd77, 0, 0, 0, 0, 0, 0, u16::from(n)]), 64),
        ],
        default_gateway: Some(IpAddr::from([10, 77, 0, 254])),
        ..TapConfig::default()
    }
}

/// Moves packets from one guest to the other like the data path: segmented and with complete checksums in between.
/// Returns whether any packet moved.
fn copy(from: &mut TapQueue, to: &mut TapQueue, frames: &mut Vec<TxFrame>, scratch: &mut Vec<u8>) -> bool {
    frames.clear();
    from.fetch(64, frames).expect("fetch");
    for frame in frames.iter() {
        let (head, tail) = from.bytes(frame.handle);
        assert_eq!(head.len() + tail.len(), frame.len as usize);
        let segments = Segments::plan(head, frame.len as usize, frame.offload).expect("a kernel's frame is valid");
        for i in 0..segments.count() {
            scratch.clear();
            segments.write(i, |a, b, out| from.copy(frame.handle, a, b, out), scratch);
            let placed = to.place(scratch, true).expect("room, because everything is published at once");
            to.publish(placed);
        }
        from.complete(frame.handle);
    }
    to.notify().expect("notify");
    !frames.is_empty()
}

/// Two guests, with a thread that copies between them while `work` runs. Returns the two queues.
fn between(a: &Namespace, b: &Namespace, mtu: u16, work: impl FnOnce()) -> (TapQueue, TapQueue) {
    let make = |ns, n| tap::create(&TapConfig { mtu, ..config(ns, n) }).expect("create").remove(0);
    let (mut left, mut right) = (make(a, 1), make(b, 2));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let copier = scope.spawn(|| {
            let (mut frames, mut scratch) = (Vec::new(), Vec::new());
            while !stop.load(Ordering::Relaxed) {
                let moved = copy(&mut left, &mut right, &mut frames, &mut scratch)
                    | copy(&mut right, &mut left, &mut frames, &mut scratch);
                if !moved {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        });
        work();
        stop.store(true, Ordering::Relaxed);
        copier.join().expect("copier");
    });
    (left, right)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// Sends `data` over TCP from `b` to `a` and back.
fn tcp_echo(a: &Namespace, b: &Namespace, server: SocketAddr, data: &[u8]) {
    let listener = std::thread::scope(|s| {
        s.spawn(|| {
            a.enter();
            TcpListener::bind(server).expect("listen")
        })
        .join()
        .expect("server thread")
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().expect("accept");
            stream.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
            let mut got = vec![0; data.len()];
            stream.read_exact(&mut got).expect("server reads");
            stream.write_all(&got).expect("server writes");
        });
        scope.spawn(|| {
            b.enter();
            let mut stream = TcpStream::connect_timeout(&server, Duration::from_secs(10)).expect("connect");
            stream.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
            stream.write_all(data).expect("client writes");
            let mut got = vec![0; data.len()];
            stream.read_exact(&mut got).expect("client reads");
            assert!(got == data, "the returned bytes differ");
        });
    });
}

fn segments_both_ways(mtu: u16, server: IpAddr) {
    let (a, b) = (Namespace::new(), Namespace::new());
    let data = pattern(8 << 20);
    let (left, right) = between(&a, &b, mtu, || tcp_echo(&a, &b, SocketAddr::new(server, 7000), &data));
    for (name, queue) in [("left", &left), ("right", &right)] {
        let c = queue.tap_counters();
        assert!(c.tx_bytes > 8 << 20, "{name}: {c:?}");
        assert!(c.tx_large_packets > 50, "{name} sent large packets: {c:?}");
        assert!(c.rx_packets * 2 < c.rx_frames, "{name} received merged packets: {c:?}");
        let lost = c.rx_device_down_frames + c.rx_refused_frames + c.rx_other_error_frames + c.rx_no_buffer_frames;
        assert_eq!(lost + c.tx_malformed_packets.iter().sum::<u64>() + c.rx_too_large_frames, 0, "{name}: {c:?}");
        assert_eq!(queue.tx_free(), queue.tx_capacity());
    }
}

#[test]
fn tcp_crosses_in_large_packets_in_both_directions() {
    segments_both_ways(1500, IpAddr::from([10, 77, 0, 1]));
}

#[test]
fn tcp_crosses_in_large_packets_over_ipv6_and_jumbo_frames() {
    segments_both_ways(8000, IpAddr::from([0xfd77, 0, 0, 0, 0, 0, 0, 1]));
}

#[test]
fn udp_crosses_whole_and_fragmented() {
    let (a, b) = (Namespace::new(), Namespace::new());
    let (left, right) = between(&a, &b, 1500, || {
        let socket = |ns: &Namespace, addr: [u8; 4]| {
            std::thread::scope(|s| {
                s.spawn(|| {
                    ns.enter();
                    UdpSocket::bind((IpAddr::from(addr), 7001)).expect("bind")
                })
                .join()
                .expect("thread")
            })
        };
        let (x, y) = (socket(&a, [10, 77, 0, 1]), socket(&b, [10, 77, 0, 2]));
        y.set_read_timeout(Some(Duration::from_secs(5))).expect("timeout");
        for len in [0, 1, 100, 1472, 1473, 9000, 40_000] {
            let sent = pattern(len);
            x.send_to(&sent, "10.77.0.2:7001").expect("send");
            let mut got = vec![0; 65_536];
            let (n, from) = y.recv_from(&mut got).unwrap_or_else(|e| panic!("{len} bytes: {e}"));
            assert_eq!(from.ip(), IpAddr::from([10, 77, 0, 1]));
            assert!(got[..n] == sent, "{len} bytes arrived as {n}, or changed");
        }
    });
    assert!(left.tap_counters().tx_packets >= 7 && right.tap_counters().rx_packets >= 7);
}

#[test]
fn the_device_is_as_configured_and_disappears_with_its_queues() {
    let ns = Namespace::new();
    let queues = tap::create(&TapConfig { mtu: 1400, queues: 3, ..config(&ns, 9) }).expect("create");
    assert_eq!(queues.len(), 3);
    let link = ns.ip("link show eth0");
    for needle in ["mtu 1400", "02:00:00:00:00:09", "UP", "qlen 4096"] {
        assert!(link.contains(needle), "{needle} in {link}");
    }
    let addresses = ns.ip("addr show eth0");
    assert!(addresses.contains("10.77.0.9/24") && addresses.contains("fd77::9/64"), "{addresses}");
    assert!(!addresses.contains("tentative fd77"), "{addresses}");
    assert!(ns.ip("route").contains("default via 10.77.0.254 dev eth0"), "{}", ns.ip("route"));
    drop(queues);
    assert!(!ns.ip("link").contains("eth0"), "{}", ns.ip("link"));
}

#[test]
fn a_guest_with_one_host_address_reaches_its_gateway() {
    let ns = Namespace::new();
    let only_v6 = TapConfig {
        addresses: vec![(IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 5]), 128)],
        default_gateway: Some(IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 1, 0])),
        ..config(&ns, 5)
    };
    let _v6 = tap::create(&only_v6).expect("IPv6");
    assert!(ns.ip("-6 route").contains("default via fd00::1:0 dev eth0"), "{}", ns.ip("-6 route"));
    let other = Namespace::new();
    let v4 = TapConfig { addresses: vec![(IpAddr::from([10, 1, 1, 1]), 32)], ..config(&other, 6) };
    let _v4 = tap::create(&v4).expect("IPv4");
    assert!(other.ip("route").contains("default via 10.77.0.254 dev eth0"), "{}", other.ip("route"));
}

#[test]
fn creation_errors_state_the_cause() {
    let ns = Namespace::new();
    let good = config(&ns, 1);
    let _holder = tap::create(&good).expect("create");
    let plain = |device: &str| TapConfig { device: device.into(), ..good.clone() };
    ns.ip("link add veth0 type veth peer name veth1");
    let cases = [
        ("no such namespace", TapConfig { netns: Some("no-such-netns".into()), ..good.clone() }, "ip netns add"),
        ("not a namespace", TapConfig { netns: Some("/etc/passwd".into()), ..good.clone() }, "cannot enter"),
        ("our own device", good.clone(), "an interface of this name exists"),
        ("another kind of device", plain("veth0"), "an interface of this name exists"),
        ("long name", plain("a-very-long-name"), "1 to 15"),
        ("template", plain("eth%d"), "1 to 15"),
        ("MTU", TapConfig { mtu: 60, ..plain("eth1") }, "68 to 65521"),
        ("group MAC", TapConfig { mac: [1; 6], ..plain("eth1") }, "MAC"),
        ("no queues", TapConfig { queues: 0, ..plain("eth1") }, "1 to 32"),
        ("prefix", TapConfig { addresses: vec![(IpAddr::from([10, 0, 0, 1]), 33)], ..plain("eth1") }, "10.0.0.1/33"),
        (
            "address twice",
            TapConfig { addresses: vec![(IpAddr::from([10, 0, 0, 1]), 24); 2], ..plain("eth1") },
            "add address 10.0.0.1/24",
        ),
    ];
    for (name, config, needle) in cases {
        let error = tap::create(&config).err().unwrap_or_else(|| panic!("{name}: created")).to_string();
        assert!(error.contains(needle), "{name}: {error}");
    }
    assert!(!ns.ip("link").contains(" eth1:"), "nothing is left behind: {}", ns.ip("link"));
    let missing = tap::create(&TapConfig { netns: Some("no-such-netns".into()), ..good }).expect_err("missing");
    assert!(matches!(missing, TapError::NoNamespace { .. }));
}

#[test]
fn each_vnic_pair_stays_on_its_workers_queue() {
    let ns = Namespace::new();
    let mut queues = tap::create(&TapConfig { queues: 2, ..config(&ns, 1) }).expect("create");
    for n in 10..60u8 {
        ns.ip(&format!("neigh add 10.77.0.{n} lladdr 02:00:00:{n:02x}:00:{:02x} dev eth0", n.wrapping_mul(37)));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ns.enter();
            for round in 0..2 {
                // A socket each: the kernel may keep one queue per socket.
                let socket = UdpSocket::bind("10.77.0.1:0").expect("bind");
                for n in 10..60u8 {
                    socket.send_to(&[n, round], (IpAddr::from([10, 77, 0, n]), 9)).expect("send");
                }
            }
        });
    });
    let mut hits = [0; 2];
    for (worker, queue) in (0u16..).zip(&mut queues) {
        let mut frames = Vec::new();
        while queue.fetch(64, &mut frames).expect("fetch") {}
        for frame in frames {
            let (head, _) = queue.bytes(frame.handle);
            let (dst, src): ([u8; 6], [u8; 6]) = (head[..6].try_into().expect("6"), head[6..12].try_into().expect("6"));
            assert_eq!(steer::worker_of_pair(src, dst, 2), worker, "{dst:02x?}");
            if head[12..14] == [8, 0] {
                hits[usize::from(worker)] += 1;
            }
        }
    }
    assert!(hits[0] + hits[1] == 100 && hits.iter().all(|&n| n > 20), "{hits:?}");
}

#[test]
fn unfetched_packets_are_counted() {
    let ns = Namespace::new();
    let queues = tap::create(&TapConfig { tx_queue_packets: 16, queues: 2, ..config(&ns, 1) }).expect("create");
    ns.ip("neigh add 10.77.0.2 lladdr 02:00:00:00:00:02 dev eth0");
    let overrun =
        |queue: &TapQueue| queue.kernel_counters().map(|kernel| kernel.read().iter().map(|(_, n)| *n).sum::<u64>());
    assert_eq!(overrun(&queues[0]), Some(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ns.enter();
            let socket = UdpSocket::bind("10.77.0.1:0").expect("bind");
            for _ in 0..100 {
                socket.send_to(&[0; 100], "10.77.0.2:9").expect("send");
            }
        });
    });
    assert!(overrun(&queues[0]).expect("counted") >= 80, "{:?}", overrun(&queues[0]));
    assert_eq!(overrun(&queues[1]), None, "counted per device, so once only");
}

#[test]
fn a_device_down_or_gone_is_counted_not_fatal() {
    let ns = Namespace::new();
    let mut queue = tap::create(&config(&ns, 1)).expect("create").remove(0);
    let deliver = |queue: &mut TapQueue| {
        let frame = queue.place(&[0xff; 60], false).expect("place");
        queue.publish(frame);
        queue.notify().expect("notify");
    };
    deliver(&mut queue);
    assert_eq!(queue.tap_counters().rx_frames, 1);
    ns.ip("link set eth0 down");
    deliver(&mut queue);
    assert_eq!(queue.tap_counters().rx_device_down_frames, 1, "{:?}", queue.tap_counters());
    ns.ip("link set eth0 up");
    deliver(&mut queue);
    assert_eq!(queue.tap_counters().rx_frames, 2);
    ns.ip("link del eth0");
    deliver(&mut queue);
    assert_eq!(queue.tap_counters().rx_device_down_frames, 2, "{:?}", queue.tap_counters());
    assert!(queue.fetch(1, &mut Vec::new()).is_err(), "fetching fails once the device is gone");
}

#[test]
fn a_guest_is_limited_by_the_rate_of_acknowledgements() {
    let ns = Namespace::new();
    let pools = PoolSizes { heads: 8, spills: 2, slots: 2 };
    let mut queue = tap::create(&TapConfig { pools, ..config(&ns, 1) }).expect("create").remove(0);
    ns.ip("neigh add 10.77.0.2 lladdr 02:00:00:00:00:02 dev eth0");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ns.enter();
            let socket = UdpSocket::bind("10.77.0.1:0").expect("bind");
            for n in 0..20u8 {
                socket.send_to(&[n; 100], "10.77.0.2:9").expect("send");
            }
        });
    });
    let mut seen = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(5);
    while seen.len() < 20 && Instant::now() < deadline {
        let mut frames = Vec::new();
        queue.fetch(64, &mut frames).expect("fetch");
        assert!(frames.len() <= 8);
        for frame in frames {
            let (head, tail) = queue.bytes(frame.handle);
            assert!(tail.is_empty());
            if head[12..14] == [8, 0] && head[23] == 17 {
                seen.push(head[42]);
            }
            queue.complete(frame.handle);
        }
    }
    assert_eq!(seen, (0..20).collect::<Vec<u8>>());
    assert!(queue.tap_counters().tx_no_buffer_pauses > 0);
    let held = [queue.place(&[0; 60], false), queue.place(&[0; 60], false)];
    assert!(held.iter().all(Result::is_ok));
    assert_eq!(queue.place(&[0; 60], false), Err(PlaceError::NoBuffer));
    assert_eq!(queue.place(&[0; 2000], false), Err(PlaceError::TooLarge));
    queue.discard(held[0].expect("placed"));
    assert!(queue.place(&[0; 60], false).is_ok());
}

/// Descriptors of all queues, as if held by another process.
fn held(queues: &[TapQueue]) -> Vec<OwnedFd> {
    queues.iter().map(|queue| queue.fd().try_clone_to_owned().expect("dup")).collect()
}

#[test]
fn held_queues_are_adopted_with_queued_packets() {
    let ns = Namespace::new();
    for queues in [1, 2] {
        let config = TapConfig { queues, ..config(&ns, 1) };
        let first = tap::create(&config).expect("create");
        ns.ip("neigh replace 10.77.0.2 lladdr 02:00:00:00:00:02 dev eth0");
        // Settings that we did not configure stay, too.
        ns.ip("route add 10.78.0.0/16 via 10.77.0.9");
        let index = ns.ip("-o link show eth0").split(':').next().expect("index").to_owned();
        let fds = held(&first);
        drop(first);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ns.enter();
                let socket = UdpSocket::bind("10.77.0.1:0").expect("bind");
                for n in 0..20u8 {
                    socket.send_to(&[n; 100], "10.77.0.2:9").expect("send");
                }
            });
        });
        let copies: Vec<_> = fds.iter().map(|fd| fd.try_clone().expect("dup")).collect();
        let mut adopted = tap::adopt(&config, &config, copies).expect("adopt");
        let mut frames = Vec::new();
        for queue in &mut adopted {
            queue.fetch(64, &mut frames).expect("fetch");
        }
        assert!(frames.iter().filter(|frame| frame.len == 142).count() == 20, "{frames:?}");
        assert!(ns.ip("-o link show eth0").starts_with(&format!("{index}:")));
        assert!(ns.ip("route").contains("10.78.0.0/16 via 10.77.0.9"));
        drop(adopted);
        assert!(ns.ip("link").contains("eth0"), "another process holds its queues");
        tap::remove(fds[0].as_fd()).expect("remove");
        assert!(!ns.ip("link").contains("eth0"));
        // It is already gone.
        tap::remove(fds[0].as_fd()).expect("remove");
        assert!(matches!(tap::adopt(&config, &config, fds), Err(TapError::Foreign { .. })));
    }
}

/// The numbers in the last bytes of the frames that wait in a queue, and whether all belong to it.
fn waiting(queue: &mut TapQueue, number: u16, queues: u16) -> BTreeSet<u8> {
    let mut frames = Vec::new();
    queue.fetch(256, &mut frames).expect("fetch");
    let mut seen = BTreeSet::new();
    for frame in frames {
        let head = queue.bytes(frame.handle).0.to_vec();
        queue.complete(frame.handle);
        if head[12..14] == [8, 0] && head[23] == 17 {
            let [to, from]: [[u8; 6]; 2] = [0, 6].map(|at| head[at..at + 6].try_into().expect("six bytes"));
            assert_eq!(steer::worker_of_pair(to, from, queues), number, "{head:?}");
            seen.insert(head[42]);
        }
    }
    seen
}

/// Sends a numbered datagram to each of 40 neighbours.
fn send_to_neighbours(ns: &Namespace) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ns.enter();
            let socket = UdpSocket::bind("10.77.0.1:0").expect("bind");
            for n in 0..40u8 {
                socket.send_to(&[n; 100], format!("10.77.0.{}:9", 100 + n)).expect("send");
            }
        });
    });
}

/// A daemon with another number of workers takes over: until it begins, the former queues get all packets.
#[test]
fn devices_get_more_and_fewer_queues() {
    let ns = Namespace::new();
    let all: BTreeSet<u8> = (0..40).collect();
    for (former, next) in [(2, 3), (3, 1), (4, 2)] {
        let of = |queues| TapConfig { queues, ..config(&ns, 1) };
        let mut first = tap::create(&of(former)).expect("create");
        for n in 0..40 {
            ns.ip(&format!("neigh replace 10.77.0.{} lladdr 02:00:00:00:01:{n:02x} dev eth0", 100 + n));
        }
        let index = index(&ns, "eth0");
        let collect = |queues: &mut [TapQueue]| {
            let count = queues.len() as u16;
            (0..).zip(queues).flat_map(|(number, queue)| waiting(queue, number, count)).collect::<BTreeSet<u8>>()
        };
        for round in 0..2 {
            let (second, requeued) = tap::take_over(&of(next), held(&first)).expect("take over");
            send_to_neighbours(&ns);
            assert_eq!(collect(&mut first), all, "{former} -> {next}: before it begins");
            if round == 1 {
                // It begins, and fails.
                requeued.expect("another number").begin(&Steering::load(next).expect("load")).expect("begin");
                Steering::load(former).and_then(|former| former.attach(first[0].fd())).expect("as before");
            }
            drop(second);
            send_to_neighbours(&ns);
            assert_eq!(collect(&mut first), all, "{former} -> {next}: after it has failed");
        }
        let (mut second, requeued) = tap::take_over(&of(next), held(&first)).expect("take over");
        send_to_neighbours(&ns);
        let requeued = requeued.expect("another number");
        requeued.begin(&Steering::load(next).expect("load")).expect("begin");
        // What waits is of the former queues.
        let waiting = requeued.fetch(1 << 20);
        let numbers = waiting.iter().map(|packet| tap::frame(packet));
        let numbers = numbers.filter(|frame| frame[12..14] == [8, 0] && frame[23] == 17).map(|frame| frame[42]);
        assert_eq!(numbers.collect::<BTreeSet<u8>>(), all, "{former} -> {next}");
        send_to_neighbours(&ns);
        assert_eq!(collect(&mut second), all, "{former} -> {next}: begun");
        drop((first, requeued));
        send_to_neighbours(&ns);
        assert_eq!(collect(&mut second), all, "{former} -> {next}: alone");
        assert_eq!(self::index(&ns, "eth0"), index);
        tap::remove(second[0].fd()).expect("remove");
    }
    // A single-queue device cannot get more.
    let single = TapConfig { queues: 1, ..config(&ns, 1) };
    let first = tap::create(&single).expect("create");
    assert!(!tap::is_multi_queue(first[0].fd()).expect("attached"));
    let more = TapConfig { queues: 2, ..single };
    assert!(matches!(tap::take_over(&more, held(&first)), Err(TapError::Foreign { .. })));
}

#[test]
fn queues_of_another_device_are_not_adopted() {
    let (ns, other) = (Namespace::new(), Namespace::new());
    let config = config(&ns, 1);
    let queues = tap::create(&config).expect("create");
    let file = || OwnedFd::from(std::fs::File::open("/dev/null").expect("open"));
    for (name, wanted, fds) in [
        ("fewer", TapConfig { queues: 2, ..config.clone() }, held(&queues)),
        ("none", config.clone(), Vec::new()),
        ("another name", TapConfig { device: "eth1".into(), ..config.clone() }, held(&queues)),
        ("another namespace", TapConfig { netns: Some(other.0.clone()), ..config.clone() }, held(&queues)),
        ("our namespace", TapConfig { netns: None, ..config.clone() }, held(&queues)),
        ("no such namespace", TapConfig { netns: Some("bft-none".into()), ..config.clone() }, held(&queues)),
        ("no queue", config.clone(), vec![file()]),
        (
            "no further queue",
            TapConfig { queues: 2, ..config.clone() },
            held(&queues).into_iter().chain([file()]).collect(),
        ),
    ] {
        let result = tap::adopt(&wanted, &config, fds);
        assert!(matches!(result, Err(TapError::Foreign { .. })), "{name}: {result:?}");
    }
    tap::adopt(&config, &config, held(&queues)).expect("adopt");
}

/// The index of a device, with its colon.
fn index(ns: &Namespace, device: &str) -> String {
    ns.ip(&format!("-o link show {device}")).split(' ').next().expect("index").to_owned()
}

/// Creates a device and closes its queues.
fn abandoned(config: &TapConfig) -> DeviceId {
    let queues = tap::create(config).expect("create");
    let id = queues[0].device().expect("the kernel reports the device");
    assert_eq!(tap::identify(queues[0].fd()).expect("identify"), id);
    tap::set_persistent(queues[0].fd(), true).expect("persistent");
    id
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(200)
}

#[test]
fn a_persistent_device_is_reattached_with_the_guests_own_settings() {
    let ns = Namespace::new();
    for queues in [1, 3] {
        let config = TapConfig { queues, ..config(&ns, 1) };
        let id = abandoned(&config);
        let before = index(&ns, "eth0");
        ns.ip("route add 10.78.0.0/16 via 10.77.0.9");
        ns.ip("addr add 10.79.0.1/24 dev eth0");
        ns.ip("link set eth0 mtu 1300");
        assert!(ns.ip("-o link show eth0").contains("NO-CARRIER"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ns.enter();
                let socket = UdpSocket::bind("10.77.0.1:0").expect("bind");
                assert!(socket.send_to(&[1; 100], "10.77.0.2:9").is_ok(), "the guest gets no error");
            });
        });
        let mut again = tap::reattach(&config, &config, id, soon()).expect("reattach").expect("the device exists");
        assert_eq!((again.len(), again[0].device()), (usize::from(queues), Some(id)));
        assert_eq!(index(&ns, "eth0"), before);
        let link = ns.ip("-o link show eth0");
        assert!(!link.contains("NO-CARRIER") && link.contains("mtu 1300"), "{link}");
        let routes = ns.ip("route");
        let all = ["10.78.0.0/16 via 10.77.0.9", "default via 10.77.0.254", "10.79.0.0/24"];
        assert!(all.iter().all(|route| routes.contains(route)), "{routes}");
        ns.ip("neigh replace 10.77.0.2 lladdr 02:00:00:00:00:02 dev eth0");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ns.enter();
                let socket = UdpSocket::bind("10.77.0.1:0").expect("bind");
                (0..20u8).for_each(|n| assert!(socket.send_to(&[n; 100], "10.77.0.2:9").is_ok()));
            });
        });
        let mut frames = Vec::new();
        for queue in &mut again {
            queue.fetch(64, &mut frames).expect("fetch");
        }
        assert_eq!(frames.iter().filter(|frame| frame.len == 142).count(), 20, "{frames:?}");
        drop(again);
        assert!(tap::remove_device(Some(&ns.0), id).expect("remove"));
        assert!(!tap::remove_device(Some(&ns.0), id).expect("remove again"));
        assert!(tap::reattach(&config, &config, id, soon()).expect("reattach").is_none());
    }
}

#[test]
fn a_reattached_device_gets_the_current_configuration() {
    let ns = Namespace::new();
    let former = TapConfig { queues: 2, ..config(&ns, 1) };
    let id = abandoned(&former);
    ns.ip("addr add 10.79.0.1/24 dev eth0");
    let config = TapConfig {
        mac: [2, 0, 0, 0, 0, 9],
        mtu: 1400,
        addresses: vec![(IpAddr::from([10, 77, 0, 5]), 24), (IpAddr::from([10, 80, 0, 1]), 16)],
        default_gateway: Some(IpAddr::from([10, 77, 0, 253])),
        queues: 4,
        ..former.clone()
    };
    for device in [&config, &former, &config] {
        let before = if *device == former { &config } else { &former };
        let queues = tap::reattach(device, before, id, soon()).expect("reattach").expect("the device exists");
        assert_eq!(queues.len(), usize::from(device.queues));
        let addresses = ns.ip("-o addr show eth0");
        let all: Vec<_> = device.addresses.iter().map(|(address, prefix)| format!("{address}/{prefix}")).collect();
        let hand = "10.79.0.1/24".to_owned();
        assert!(all.iter().chain([&hand]).all(|address| addresses.contains(address)), "{all:?}: {addresses}");
        let gone = before.addresses.iter().filter(|address| !device.addresses.contains(address));
        assert!(!gone.clone().any(|(address, _)| addresses.contains(&format!(" {address}/"))), "{addresses}");
        let link = ns.ip("-o link show eth0");
        let [.., last] = device.mac;
        assert!(link.contains(&format!("mtu {}", device.mtu)) && link.contains(&format!(":{last:02x} ")), "{link}");
        let routes = ns.ip("route show default");
        assert_eq!(routes.lines().count(), 1, "{routes}");
        assert!(routes.contains(&format!("via {}", device.default_gateway.expect("one"))), "{routes}");
        drop(queues);
    }
    tap::remove_device(Some(&ns.0), id).expect("remove");
}

#[test]
fn only_the_identical_device_is_reattached() {
    let (ns, other) = (Namespace::new(), Namespace::new());
    let config = config(&ns, 1);
    let id = abandoned(&config);
    let reattach = |config: &TapConfig, id| tap::reattach(config, config, id, soon());
    // The guest renames it, or creates another one with its name.
    ns.ip("link set eth0 down");
    ns.ip("link set eth0 name mine");
    ns.ip("link add eth0 type veth peer name peer");
    let queues = reattach(&config, id).expect("reattach").expect("the device exists");
    assert_eq!(sys_name(&queues[0]), "mine");
    // While another process uses it.
    let busy = reattach(&config, id);
    assert!(matches!(&busy, Err(error @ TapError::Foreign { .. }) if error.to_string().contains("another process")));
    // Waits for a process that is just ending.
    let later = std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(queues);
        });
        tap::reattach(&config, &config, id, Instant::now() + Duration::from_secs(10))
    });
    drop(later.expect("reattach").expect("the device exists"));
    let several = TapConfig { queues: 2, ..config.clone() };
    let other_several = TapConfig { device: "eth2".into(), ..several.clone() };
    let of_several = abandoned(&other_several);
    let queue = reattach(&other_several, of_several).expect("reattach");
    assert!(matches!(reattach(&other_several, of_several), Err(TapError::Foreign { .. })), "in use");
    drop(queue);
    assert!(matches!(reattach(&several, id), Err(TapError::Foreign { .. })));
    // Other devices, other namespaces.
    let veth = DeviceId { index: number(&ns, "eth0"), ..id };
    assert!(reattach(&config, veth).expect("reattach").is_none());
    assert!(!tap::remove_device(Some(&ns.0), veth).expect("remove"));
    for (netns, id) in [
        (Some(ns.0.clone()), DeviceId { index: 999, ..id }),
        (Some(ns.0.clone()), DeviceId { namespace: id.namespace + 1, ..id }),
        (Some(other.0.clone()), id),
        (Some("bft-none".into()), id),
        (None, id),
    ] {
        let config = TapConfig { netns: netns.clone(), ..config.clone() };
        assert!(reattach(&config, id).expect("reattach").is_none(), "{netns:?} {id:?}");
        assert!(!tap::remove_device(netns.as_deref(), id).expect("remove"), "{netns:?} {id:?}");
    }
    // The guest moves it to another namespace.
    ns.ip(&format!("link set mine netns {}", other.0));
    assert!(reattach(&config, id).expect("reattach").is_none());
    assert!(ns.ip("link").contains("eth0"), "the guest's own device is left alone");
}

/// A new namespace of the same name has another identity, although the kernel reuses inode numbers.
#[test]
fn a_recreated_namespace_has_another_identity() {
    let ns = Namespace::new();
    let config = config(&ns, 1);
    let id = abandoned(&config);
    ns.again();
    let second = abandoned(&config);
    assert!(second.namespace != id.namespace);
    assert!(tap::reattach(&config, &config, id, soon()).expect("reattach").is_none());
    assert!(tap::reattach(&config, &config, second, soon()).expect("reattach").is_some());
}

fn number(ns: &Namespace, device: &str) -> u32 {
    index(ns, device).trim_end_matches(':').parse().expect("a number")
}

/// The name of a queue's device in the kernel.
fn sys_name(queue: &TapQueue) -> String {
    let id = tap::identify(queue.fd()).expect("identify");
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", queue.fd().as_raw_fd())).expect("fdinfo");
    assert!(id == queue.device().expect("known"));
    info.lines().find_map(|line| line.strip_prefix("iff:")).expect("iff").trim().to_owned()
}
