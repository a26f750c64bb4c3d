//! Several workers, and the cost of an idle daemon.

use std::collections::BTreeSet;

use bifrost_port::steer;

use crate::common::host::{Host, PATIENT};
use crate::common::traffic::{Exchange, ping};
use crate::common::{Guest, Lab, Options};

const MEGABYTES: u64 = 1 << 20;
const A: [&str; 4] = ["a1", "a2", "a3", "a4"];
const B: [&str; 4] = ["b1", "b2", "b3", "b4"];
const A_NET: [&str; 4] = ["10.0.0.11/24", "10.0.0.12/24", "10.0.0.13/24", "10.0.0.14/24"];
const B_NET: [&str; 4] = ["10.0.0.21/24", "10.0.0.22/24", "10.0.0.23/24", "10.0.0.24/24"];

fn lab(workers: usize) -> Lab {
    let mut lab = Lab::new(Options { workers, transport: PATIENT.to_owned(), ..Options::default() });
    for i in 0..4 {
        lab.add(0, Guest::new(A[i], 11 + i as u8, &[A_NET[i]]));
        lab.add(1, Guest::new(B[i], 21 + i as u8, &[B_NET[i]]));
    }
    lab.start();
    lab
}

fn plain(net: &str) -> &str {
    net.split('/').next().unwrap()
}

#[test]
fn two_workers_share_connections_without_wrong_deliveries() {
    let lab = lab(2);
    let mut streams = Vec::new();
    for i in 0..4 {
        for j in 0..4 {
            let port = 5000 + (10 * i + j) as u16;
            // Half of them start on the other side; two flows for each pair.
            for (more, flip) in [(0, false), (100, true)] {
                let (from, to, address) = if flip { (B[j], A[i], A_NET[i]) } else { (A[i], B[j], B_NET[j]) };
                streams.push(Exchange::start(lab.net(from), lab.net(to), plain(address), port + more, MEGABYTES / 2));
            }
        }
    }
    streams.into_iter().for_each(Exchange::finish);
    for host in &lab.hosts {
        let counters = host.counters();
        assert_eq!(counters["rte.unknown_cid_packets"], 0, "a packet reached the wrong worker");
        assert_eq!(counters["rte.unanswered_connections"], 0);
        assert_eq!(counters["rte.restarted_connections"], 0);
        let conns = host.client.conns().unwrap();
        assert_eq!(conns.len(), 16, "one for each pair");
        let owners: BTreeSet<u32> = conns.iter().map(|c| c.cid >> 24).collect();
        assert_eq!(owners, BTreeSet::from([0, 1]), "both workers have some");
        assert!(conns.iter().all(|c| c.cid >> 24 == c.peer_cid >> 24), "a pair has one worker on both sides");
        for worker in host.client.status().unwrap().workers {
            assert!(worker.guest_tx_packets > 100 && worker.guest_rx_packets > 100, "{worker:?}");
        }
    }
}

#[test]
fn hosts_with_different_numbers_of_workers() {
    let mut lab = Lab::new(Options { workers: 2, ..Options::default() });
    for i in 0..4 {
        lab.add(0, Guest::new(A[i], 11 + i as u8, &[A_NET[i]]));
        lab.add(1, Guest::new(B[i], 21 + i as u8, &[B_NET[i]]));
    }
    lab.hosts[1].config = lab.hosts[1].config.replace("count = 2", "count = 3");
    lab.start();
    let mut streams = Vec::new();
    for (i, a) in A.iter().enumerate() {
        for (j, b) in B_NET.iter().enumerate() {
            let port = 5000 + (10 * i + j) as u16;
            streams.push(Exchange::start(lab.net(a), lab.net(B[j]), plain(b), port, MEGABYTES / 2));
        }
    }
    streams.into_iter().for_each(Exchange::finish);
    for host in &lab.hosts {
        assert_eq!(host.counter("rte.unknown_cid_packets"), 0);
        assert_eq!(host.counter("rte.unanswered_connections"), 0);
    }
    // One kernel message holds datagrams for several workers, but is steered by the first only.
    let handed_over = lab.hosts.iter().map(|h| h.counter("datapath.handed_over_packets")).sum::<u64>();
    assert!(handed_over > 0, "nothing was handed over: the test is void");
    // Its RESETs arrive at worker 0, even if the other one owns the connection.
    let restarted = lab.hosts[0].counter("rte.restarted_connections");
    lab.hosts[1].crash();
    lab.hosts[1].start();
    let mut streams = Vec::new();
    for (i, a) in A.iter().enumerate() {
        for (j, b) in B_NET.iter().enumerate() {
            let port = 6000 + (10 * i + j) as u16;
            streams.push(Exchange::start(lab.net(a), lab.net(B[j]), plain(b), port, MEGABYTES / 8));
        }
    }
    streams.into_iter().for_each(Exchange::finish);
    let restarted = lab.hosts[0].counter("rte.restarted_connections") - restarted;
    assert!((16..=32).contains(&restarted), "{restarted}: once each, by RESET or REQUEST, or by both if they cross");
    assert_eq!(lab.hosts[0].counter("rte.rejects_received_packets"), 0);
    assert_eq!(lab.hosts[0].counter("rte.best_effort_connections"), 0);
}

#[test]
fn through_the_gateway_with_two_workers() {
    let vpcs = format!("{}gateway = [\"10.0.1.254\", \"10.0.2.254\"]\n", crate::common::host::vpc(100, "all", "flow"));
    let mut lab = Lab::new(Options { workers: 2, vpcs, ..Options::default() });
    let (near, far) = (["10.0.1.1/24", "10.0.1.2/24", "10.0.1.3/24"], ["10.0.2.1/24", "10.0.2.2/24", "10.0.2.3/24"]);
    for i in 0..3 {
        lab.add(0, Guest::new(A[i], 11 + i as u8, &[near[i]]).gateway("10.0.1.254"));
        lab.add(1, Guest::new(B[i], 21 + i as u8, &[far[i]]).gateway("10.0.2.254"));
    }
    lab.start();
    for (i, a) in A.iter().take(3).enumerate() {
        for (j, b) in far.iter().enumerate() {
            assert_eq!(ping(lab.net(a), plain(b), 3, 56), 3);
            let port = 5000 + (10 * i + j) as u16;
            crate::common::traffic::exchange(lab.net(a), lab.net(B[j]), plain(b), port, MEGABYTES / 2);
        }
    }
    for host in &lab.hosts {
        assert_eq!(host.counter("rte.unknown_cid_packets"), 0);
        assert_eq!(host.counter("rte.unanswered_connections"), 0);
        assert_eq!(host.counter("drop.wrong_vnic_packets"), 0);
    }
}

#[test]
fn idle_daemons_use_almost_no_cpu() {
    let lab = lab(2);
    assert_eq!(ping(lab.net("a1"), "10.0.0.21", 5, 56), 5);
    crate::common::traffic::exchange(lab.net("a1"), lab.net("b1"), "10.0.0.21", 5001, MEGABYTES);
    // The last probes of the paths leave a second after the traffic.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let ticks = |pid: u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<&str> = text.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let loops = |i: usize| lab.hosts[i].counter("datapath.loops");
    let before: Vec<(u64, u64)> = (0..2).map(|i| (ticks(lab.hosts[i].pid()), loops(i))).collect();
    std::thread::sleep(std::time::Duration::from_secs(5));
    for (i, (ticks_before, loops_before)) in before.into_iter().enumerate() {
        // Ticks are 10 ms: 2 % of 5 s are 10 of them.
        let used = ticks(lab.hosts[i].pid()) - ticks_before;
        assert!(used < 10, "{used} ticks of CPU in 5 s");
        let turns = loops(i) - loops_before;
        assert!(turns < 500, "{turns} turns in 5 s");
        let status = std::fs::read_to_string(format!("/proc/{}/status", lab.hosts[i].pid())).unwrap();
        let rss = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
        let kib: u64 = rss.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(kib < 100 << 10, "{kib} KiB");
    }
}

/// A TCP counter of a guest's kernel.
fn tcp_counter(lab: &Lab, guest: &str, name: &'static str) -> u64 {
    lab.net(guest).enter(move || {
        let text = std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap();
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let at = names.split(' ').position(|n| n == name).unwrap_or_else(|| panic!("no {name}"));
        values.split(' ').nth(at).unwrap().parse().unwrap()
    })
}

/// A counter of each worker of a host.
fn by_worker(host: &Host, counter: &str) -> Vec<u64> {
    let samples = host.client.samples().unwrap();
    let of = |worker| {
        let of_worker = samples.iter().filter(|s| s.counter == counter && s.at.worker == Some(worker));
        of_worker.map(|s| s.value).sum()
    };
    vec![of(0), of(1)]
}

#[test]
fn two_workers_keep_connections_and_order_on_a_lossy_path() {
    let lab = lab(2);
    for (host, peer) in [(0, "host-b"), (1, "host-a")] {
        lab.hosts[host].path_fault(peer, Some(1), |fault| fault.loss_percent = 1.0);
    }
    let mut streams = Vec::new();
    for (i, a) in A.iter().enumerate() {
        for (j, b) in B_NET.iter().enumerate() {
            let port = 5000 + (10 * i + j) as u16;
            streams.push(Exchange::start(lab.net(a), lab.net(B[j]), plain(b), port, MEGABYTES));
        }
    }
    streams.into_iter().for_each(Exchange::finish);
    assert!(lab.hosts.iter().map(|host| host.counter("fault.dropped_packets")).sum::<u64>() > 0, "nothing was lost");
    for host in &lab.hosts {
        let counters = host.counters();
        // Each pair's connection is on the worker that its two MAC addresses determine, on both hosts.
        let conns = host.client.conns().unwrap();
        assert_eq!(conns.len(), 16, "one for each pair");
        for conn in &conns {
            let [local, remote] = [&conn.local_mac, &conn.remote_mac].map(|m| m.parse::<bifrost_wire::Mac>().unwrap());
            let owner = u32::from(steer::worker_of_pair(local.octets(), remote.octets(), 2));
            assert_eq!((conn.cid >> 24, conn.peer_cid >> 24), (owner, owner), "{conn:?}");
        }
        // Its packets reach that worker: no worker received an unknown one, and few had to be handed over.
        assert_eq!((counters["rte.unknown_cid_packets"], counters["rte.restarted_connections"]), (0, 0));
        for counter in ["rte.sent_packets", "rte.received_packets"] {
            let packets = by_worker(host, counter);
            let of = |worker: u32| {
                let conns = conns.iter().filter(|c| c.cid >> 24 == worker);
                conns.map(|c| if counter == "rte.sent_packets" { c.tx_packets } else { c.rx_packets }).sum::<u64>()
            };
            assert!(packets.iter().all(|n| *n > 1000), "{counter}: {packets:?}");
            assert!(of(0) > 1000 && of(1) > 1000, "{counter}");
        }
        let (handed, arrived) = (counters["datapath.handed_over_packets"], counters["underlay.rx_packets"]);
        assert!(handed * 20 <= arrived, "{handed} of {arrived} datagrams had to be handed over");
        assert_eq!(counters["drop.hand_over_overflow_packets"], 0);
        host.assert_balanced();
        assert_eq!(counters["rte.given_up_packets"], 0);
    }
    // So no guest received segments out of order.
    for guest in A.iter().chain(&B) {
        let early = tcp_counter(&lab, guest, "TCPOFOQueue");
        assert_eq!(early, 0, "{guest} got segments out of order");
    }
}
