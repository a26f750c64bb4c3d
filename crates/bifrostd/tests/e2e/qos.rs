//! Guarantees and priorities on a full link to other hosts, and queues in front of guests.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use socket2::SockRef;

use crate::common::traffic::Exchange;
use crate::common::{Guest, Lab, Net, Options};

const EF: u32 = 46;
/// Bytes of a datagram of a flood, with its headers.
const DATAGRAM: u64 = 1400;
/// Rate of the only link from the first host to the second one, with a queue that drops.
const LINK: &str = "tbf rate 20mbit burst 4000 limit 60000";
/// The rate at which the first host sends.
const LINK_MBIT: u64 = 18;

/// `a` and `c` on the first host, `b` and `d` on the second one.
fn lab(v6: bool) -> Lab {
    let mut lab = Lab::new(Options { v6, links: 1, mtu: 1700, ..Options::default() });
    for (host, name, n, addresses) in [
        (0, "a", 1, ["10.0.0.1/24", "fd01::1/64"]),
        (1, "b", 2, ["10.0.0.2/24", "fd01::2/64"]),
        (0, "c", 3, ["10.0.0.3/24", "fd01::3/64"]),
        (1, "d", 4, ["10.0.0.4/24", "fd01::4/64"]),
    ] {
        lab.add(host, Guest::new(name, n, &addresses));
    }
    let arguments = format!("qdisc add dev l0 root {LINK}");
    let done = lab.hosts[0].net.command("tc").args(arguments.split(' ')).status().unwrap();
    assert!(done.success(), "tc {arguments}");
    lab
}

fn address(v6: bool, n: u8) -> String {
    if v6 { format!("fd01::{n}") } else { format!("10.0.0.{n}") }
}

/// Adds `[qos]` to a host's configuration.
fn set_link(lab: &mut Lab, queue_ms: u32) {
    let config = &mut lab.hosts[0].config;
    let section = format!("[qos]\nlink_mbit = {LINK_MBIT}\nqueue_ms = {queue_ms}\n[underlay]\n");
    *config = config.replacen("[underlay]\n", &section, 1);
}

/// Adds keys to a guest's `[[port]]`.
fn set(lab: &mut Lab, host: usize, guest: &str, keys: &str) {
    let mac = format!("mac = \"{}\"\n", lab.guest(guest).mac);
    let config = &mut lab.hosts[host].config;
    *config = config.replacen(&mac, &format!("{mac}{keys}\n"), 1);
}

fn reload(lab: &Lab, host: usize) {
    lab.hosts[host].write_config();
    lab.hosts[host].client.reload().unwrap();
}

/// A socket that sends with a DSCP.
fn socket(net: &Net, to: SocketAddr, dscp: u32) -> UdpSocket {
    net.enter(move || {
        let any: IpAddr = if to.is_ipv6() { "::".parse().unwrap() } else { "0.0.0.0".parse().unwrap() };
        let socket = UdpSocket::bind((any, 0)).unwrap();
        if to.is_ipv6() {
            SockRef::from(&socket).set_tclass_v6(dscp << 2).unwrap();
        } else {
            SockRef::from(&socket).set_tos_v4(dscp << 2).unwrap();
        }
        socket.connect(to).unwrap();
        socket
    })
}

/// Sends datagrams at a rate until it is dropped.
struct Flood {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    fn start(net: &Net, to: &str, mbit: u64) -> Flood {
        let socket = socket(net, SocketAddr::new(to.parse().unwrap(), 9), 0);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let (start, mut sent) = (Instant::now(), 0);
            while !stopped.load(Ordering::Relaxed) {
                while sent * DATAGRAM * 8 < start.elapsed().as_micros() as u64 * mbit {
                    // Fails if the receiver's port is closed, which does not matter.
                    let _ = socket.send(&[0; DATAGRAM as usize - 48]);
                    sent += 1;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Flood { stop, thread: Some(thread) }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

/// What each of the guests `b` and `d` receives in a time, Mbit/s.
fn rates(lab: &Lab, time: Duration) -> [f64; 2] {
    let received = || ["b", "d"].map(|name| lab.hosts[1].port(name).rx_bytes);
    let (start, before) = (Instant::now(), received());
    std::thread::sleep(time);
    let (after, seconds) = (received(), start.elapsed().as_secs_f64());
    [0, 1].map(|i| (after[i] - before[i]) as f64 * 8.0 / seconds / 1e6)
}

/// The delays of datagrams of a class, sent every 4 ms for a time: the 99th percentile of those that arrive, in ms, and
/// their share.
fn delays(from: &Net, to: &Net, address: &str, port: u16, dscp: u32, time: Duration) -> (f64, f64) {
    let server = SocketAddr::new(address.parse().unwrap(), port);
    let receiver = to.enter(move || UdpSocket::bind(server).unwrap());
    receiver.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let start = Instant::now();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let seen_there = Arc::clone(&seen);
    let listener = std::thread::spawn(move || {
        let mut buffer = [0; 2000];
        while receiver.recv(&mut buffer).is_ok() {
            let sent = u64::from_be_bytes(buffer[..8].try_into().unwrap());
            seen_there.lock().unwrap().push(start.elapsed().as_nanos() as u64 - sent);
        }
    });
    let sender = socket(from, server, dscp);
    let mut count = 0;
    while start.elapsed() < time {
        let mut payload = [0; 160];
        payload[..8].copy_from_slice(&(start.elapsed().as_nanos() as u64).to_be_bytes());
        sender.send(&payload).unwrap();
        count += 1;
        std::thread::sleep(Duration::from_millis(4));
    }
    listener.join().unwrap();
    let mut delays = seen.lock().unwrap().clone();
    let arrived = delays.len() as f64 / f64::from(count);
    delays.sort_unstable();
    let p99 = delays.get(delays.len() * 99 / 100).map_or(f64::INFINITY, |delay| *delay as f64 / 1e6);
    (p99, arrived)
}

/// Both classes at the same time.
fn both(from: &Net, to: &Net, address: &str, time: Duration) -> [(f64, f64); 2] {
    std::thread::scope(|scope| {
        let of = [(7001, EF), (7002, 0)]
            .map(|(port, dscp)| scope.spawn(move || delays(from, to, address, port, dscp, time)));
        of.map(|thread| thread.join().unwrap())
    })
}

fn a_guarantee_is_kept(v6: bool) {
    let mut lab = lab(v6);
    set_link(&mut lab, 50);
    // Without a guarantee, `a` gets a tenth of the link.
    set(&mut lab, 0, "c", "weight = 9");
    lab.start();
    let time = Duration::from_secs(2);
    {
        let _floods = [("a", 2), ("c", 4)].map(|(from, to)| Flood::start(lab.net(from), &address(v6, to), 40));
        std::thread::sleep(Duration::from_millis(500));
        let [b, d] = rates(&lab, time);
        println!("by weight: {b:.2} and {d:.2} Mbit/s");
        assert!(b < 3.0 && d > 10.0, "{b} and {d} Mbit/s by weight");
        set(&mut lab, 0, "a", "min_tx_mbit = 8");
        reload(&lab, 0);
        std::thread::sleep(Duration::from_millis(500));
        let [b, d] = rates(&lab, time);
        println!("with a guarantee of 8 Mbit/s: {b:.2} and {d:.2} Mbit/s");
        // Guarantees count the headers of the tunnel.
        assert!(b > 7.0 && d > 4.0, "{b} and {d} Mbit/s");
        // A guest that sends a single class to a single guest waits, and loses nothing here.
        assert_eq!(lab.hosts[0].drops("c", "queue_full"), 0);
    }
    // The same for reliable traffic, and several connections of the greedy guest.
    let greedy: Vec<Exchange> =
        (5001..5005).map(|port| Exchange::start(lab.net("c"), lab.net("d"), &address(v6, 4), port, 1 << 20)).collect();
    std::thread::sleep(Duration::from_millis(200));
    let (started, before) = (Instant::now(), lab.hosts[0].port("a").tx_bytes);
    let stream = Exchange::start(lab.net("a"), lab.net("b"), &address(v6, 2), 5000, 1 << 20);
    stream.finish();
    let bytes = lab.hosts[0].port("a").tx_bytes - before;
    let mbit = bytes as f64 * 8.0 / started.elapsed().as_secs_f64() / 1e6;
    let was_full = !greedy.iter().all(Exchange::is_finished);
    println!("TCP beside four connections: {mbit:.2} Mbit/s; the greedy guest was busy: {was_full}");
    // By weight it would get 1.8 Mbit/s. A new TCP connection needs some time for 8.
    assert!(mbit > 5.5 || lab.stood_still(), "{mbit} Mbit/s");
    greedy.into_iter().for_each(Exchange::finish);
    assert!(rates(&lab, Duration::from_millis(100)).iter().all(|rate| *rate < 1.0), "nothing waits any longer");
}

#[test]
fn a_guaranteed_port_gets_its_minimum_beside_a_greedy_one() {
    a_guarantee_is_kept(false);
}

#[test]
fn a_guaranteed_port_gets_its_minimum_beside_a_greedy_one_over_ipv6() {
    a_guarantee_is_kept(true);
}

fn ef_goes_first(v6: bool) {
    let mut lab = lab(v6);
    set_link(&mut lab, 100);
    lab.start();
    let flood = Flood::start(lab.net("a"), &address(v6, 2), 40);
    // The first packets of a class find the guest stopped, because it has sent a single class to a single guest.
    delays(lab.net("a"), lab.net("b"), &address(v6, 2), 7000, EF, Duration::from_secs(1));
    let [ef, normal] = both(lab.net("a"), lab.net("b"), &address(v6, 2), Duration::from_secs(3));
    println!("P99 in ms and share that arrived: EF {ef:.2?}, best effort {normal:.2?}");
    assert!(ef.1 > 0.99 || lab.stood_still(), "EF packets are lost: {ef:?}");
    assert!(ef.0 < normal.0 / 2.0 || lab.stood_still(), "EF {ef:?}, best effort {normal:?}");
    // Another guest's packets do not wait behind the flood either, whatever their class.
    let other = delays(lab.net("c"), lab.net("d"), &address(v6, 4), 7003, 0, Duration::from_secs(1));
    println!("another guest's packets: {other:.2?}");
    assert!(other.0 < normal.0 && other.1 > 0.99 || lab.stood_still(), "{other:?}");
    // Without turns, they are all in one queue.
    lab.hosts[0].config = lab.hosts[0].config.replacen(&format!("link_mbit = {LINK_MBIT}\n"), "", 1);
    reload(&lab, 0);
    std::thread::sleep(Duration::from_millis(300));
    let [alike, _] = both(lab.net("a"), lab.net("b"), &address(v6, 2), Duration::from_secs(2));
    println!("without turns: EF {alike:.2?}");
    assert!(alike.0 > ef.0 || lab.stood_still(), "{alike:?} without turns, {ef:?} with them");
    drop(flood);
}

#[test]
fn ef_packets_of_a_guest_overtake_its_others() {
    ef_goes_first(false);
}

#[test]
fn ef_packets_of_a_guest_overtake_its_others_over_ipv6() {
    ef_goes_first(true);
}

#[test]
fn packets_above_the_receive_limit_wait_by_class() {
    let mut lab = Lab::new(Options::default());
    for (host, name, n, addresses) in [
        (0, "a", 1, ["10.0.0.1/24", "fd01::1/64"]),
        (1, "b", 2, ["10.0.0.2/24", "fd01::2/64"]),
        (1, "c", 3, ["10.0.0.3/24", "fd01::3/64"]),
    ] {
        lab.add(host, Guest::new(name, n, &addresses));
    }
    set(&mut lab, 1, "b", "rx_mbit = 10\nrx_queue_kb = 256");
    lab.start();
    let limited = || lab.hosts[1].drops("b", "rate_limited");
    // A closed port would be reported to the senders, whose next packet would then fail.
    let _sink = lab.net("b").enter(|| UdpSocket::bind("[::]:9").unwrap());
    // A burst that is longer than the limit's own waits, from another host and from this one.
    for from in ["a", "c"] {
        let before = lab.hosts[1].port("b").rx_packets;
        let to = socket(lab.net(from), "10.0.0.2:9".parse().unwrap(), 0);
        to.send(b"resolve").unwrap();
        crate::common::eventually(5.0, "it arrives", || lab.hosts[1].port("b").rx_packets > before);
        let before = lab.hosts[1].port("b").rx_packets;
        // The queue has room for all of them, whether the limit's tokens of the last burst are back or not.
        (0..100).for_each(|_| _ = to.send(&[0; 1400]));
        crate::common::eventually(5.0, "all arrive", || lab.hosts[1].port("b").rx_packets >= before + 100);
    }
    assert_eq!(limited(), 0);
    assert!(lab.hosts[1].counter("datapath.rx_queued_packets") > 0);
    // A longer one is dropped, except for the first class.
    for v6 in [false, true] {
        let flood = Flood::start(lab.net("a"), &address(v6, 2), 30);
        std::thread::sleep(Duration::from_millis(300));
        let [ef, normal] = both(lab.net("a"), lab.net("b"), &address(v6, 2), Duration::from_secs(2));
        println!("P99 in ms and share that arrived: EF {ef:.2?}, best effort {normal:.2?}");
        assert!(ef.1 > 0.99 || lab.stood_still(), "EF packets are lost: {ef:?}");
        assert!(ef.0 < normal.0 / 2.0 || lab.stood_still(), "EF {ef:?}, best effort {normal:?}");
        drop(flood);
        std::thread::sleep(Duration::from_millis(300));
    }
    assert!(limited() > 0);
    // What waits when the port goes is accounted for, which the end of the test checks.
    let flood = Flood::start(lab.net("a"), "10.0.0.2", 30);
    std::thread::sleep(Duration::from_millis(200));
    lab.hosts[1].config = lab.hosts[1].config.replacen("rx_mbit = 10\nrx_queue_kb = 256\n", "", 1);
    reload(&lab, 1);
    drop(flood);
}
