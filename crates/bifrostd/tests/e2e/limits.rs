//! Limits of ports.

use std::time::{Duration, Instant};

use crate::common::traffic::{Exchange, exchange};
use crate::common::{Guest, Lab, Options, eventually};

const MEGABYTES: u64 = 1 << 20;
/// The tests' limit, bit/s.
const RATE: f64 = 40e6;

/// Two guests on each host: `a` and `b` are to be limited, `c` and `d` are not.
fn lab() -> Lab {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24"]));
    lab.add(1, Guest::new("d", 4, &["10.0.0.4/24"]));
    lab
}

/// Adds keys to a guest's `[[port]]`.
fn limit(lab: &mut Lab, host: usize, guest: &str, keys: &str) {
    let mac = format!("mac = \"{}\"\n", lab.guest(guest).mac);
    let config = &mut lab.hosts[host].config;
    *config = config.replacen(&mac, &format!("{mac}{keys}\n"), 1);
}

/// Transfers data between the limited guests, and between the others at the same time. Returns the duration for the
/// limited ones.
fn stream(lab: &Lab, bytes: u64) -> Duration {
    let started = Instant::now();
    let slow = Exchange::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, bytes);
    exchange(lab.net("c"), lab.net("d"), "10.0.0.4", 5002, 8 * MEGABYTES);
    slow.finish();
    let took = started.elapsed();
    for (host, port) in [(0, "c"), (1, "d")] {
        let port = lab.hosts[host].port(port);
        assert_eq!((port.tx_held_back_times, port.drops_packets.get("rate_limited")), (0, None), "{}", port.name);
    }
    took
}

/// Packets dropped by the queue of guest `a`. Retransmissions of its TCP after a long wait are not losses.
fn dropped(lab: &Lab) -> u64 {
    let text = lab.net("a").enter(|| std::fs::read_to_string("/sys/class/net/eth0/statistics/tx_dropped").unwrap());
    text.trim().parse().unwrap()
}

fn assert_rate(lab: &Lab, bytes: u64, took: Duration) {
    let rate = bytes as f64 * 8.0 / took.as_secs_f64();
    assert!(rate < RATE * 1.15, "{rate} bit/s");
    assert!(rate > RATE * 0.85 || lab.stood_still(), "{rate} bit/s");
}

#[test]
fn packets_above_the_send_limit_wait_in_the_guests_queue() {
    let mut lab = lab();
    limit(&mut lab, 0, "a", "tx_mbit = 40");
    lab.start();
    let took = stream(&lab, 8 * MEGABYTES);
    let port = lab.hosts[0].port("a");
    assert_rate(&lab, port.tx_bytes, took);
    assert!(port.tx_held_back_times > 50, "{}", port.tx_held_back_times);
    assert_eq!(port.drops_packets.get("rate_limited"), None);
    assert_eq!(dropped(&lab), 0);
    lab.assert_nothing_given_up();
}

#[test]
fn packets_above_the_receive_limit_are_dropped_and_retransmitted() {
    let mut lab = lab();
    limit(&mut lab, 1, "b", "rx_mbit = 40");
    lab.start();
    let took = stream(&lab, 8 * MEGABYTES);
    assert!(lab.hosts[1].drops("b", "rate_limited") > 0);
    assert!(lab.hosts[1].counter("rte.rate_limited_packets") > 0);
    assert_rate(&lab, lab.hosts[1].port("b").rx_bytes, took);
}

#[test]
fn a_reload_changes_limits_under_a_stream() {
    let mut lab = lab();
    let unlimited = lab.hosts[0].config.clone();
    limit(&mut lab, 0, "a", "tx_mbit = 4\ntx_kpps = 1");
    lab.start();
    let stream = Exchange::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 16 * MEGABYTES);
    eventually(5.0, "the limit is reached", || lab.hosts[0].port("a").tx_held_back_times > 10);
    assert!(lab.hosts[0].port("a").tx_bytes < MEGABYTES, "at 4 Mbit/s that takes two seconds");
    lab.hosts[0].config = unlimited;
    lab.hosts[0].write_config();
    assert_eq!(lab.hosts[0].client.reload().unwrap().ports.changed, ["a"]);
    let started = Instant::now();
    stream.finish();
    // With the limit it would take half a minute.
    assert!(started.elapsed() < Duration::from_secs(15));
    assert_eq!(dropped(&lab), 0);
    lab.assert_nothing_given_up();
}

#[test]
fn workers_share_a_guests_limit() {
    let mut lab = Lab::new(Options { workers: 2, ..Options::default() });
    for (name, n, address) in [("a", 11, "10.0.0.11/24"), ("c", 12, "10.0.0.12/24"), ("e", 13, "10.0.0.13/24")] {
        lab.add(0, Guest::new(name, n, &[address]));
    }
    for (name, n, address) in [("b", 21, "10.0.0.21/24"), ("d", 22, "10.0.0.22/24"), ("f", 23, "10.0.0.23/24")] {
        lab.add(1, Guest::new(name, n, &[address]));
    }
    limit(&mut lab, 0, "a", "tx_mbit = 40");
    limit(&mut lab, 1, "b", "rx_mbit = 40");
    lab.start();
    let started = Instant::now();
    // The first worker has the pairs a-d and b-c, the second one a-f and b-e.
    let pairs = [("a", "d", "10.0.0.22"), ("a", "f", "10.0.0.23"), ("c", "b", "10.0.0.21"), ("e", "b", "10.0.0.21")];
    let stream = |(port, (from, to, address)): (u16, (&str, &str, &str))| {
        Exchange::start(lab.net(from), lab.net(to), address, port, 3 * MEGABYTES)
    };
    let streams: Vec<Exchange> = (5001..).zip(pairs).map(stream).collect();
    streams.into_iter().for_each(Exchange::finish);
    let took = started.elapsed().as_secs_f64();
    let (a, b) = (lab.hosts[0].port("a"), lab.hosts[1].port("b"));
    for (what, bytes) in [("a sent", a.tx_bytes), ("b got", b.rx_bytes)] {
        let rate = bytes as f64 * 8.0 / took;
        assert!(bytes > 6 * MEGABYTES && rate < RATE * 1.15, "{what} {rate} bit/s");
    }
    assert!(a.tx_held_back_times > 0 && lab.hosts[1].drops("b", "rate_limited") > 0);
    for (host, port, counter) in [(0, "a", "port.tx_packets"), (1, "b", "port.rx_packets")] {
        let samples = lab.hosts[host].client.samples().unwrap();
        let of_port = samples.iter().filter(|s| s.counter == counter && s.at.port.as_deref() == Some(port));
        let packets: Vec<u64> = of_port.map(|s| s.value).collect();
        assert!(packets.len() == 2 && packets.iter().all(|n| *n > 30), "{counter} of {port}: {packets:?}");
    }
}
