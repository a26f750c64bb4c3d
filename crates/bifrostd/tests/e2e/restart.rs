//! A daemon crashes and restarts.

use crate::common::traffic::{Talk, exchange, ping};
use crate::common::{Lab, Options};

const MEGABYTES: u64 = 1 << 20;

fn crash_and_restart(options: Options) {
    let mut lab = Lab::running(options);
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    talk.say(100_000);
    let before = lab.hosts[0].conns_with(lab.guest("b"));
    assert_eq!(before.len(), 1);
    lab.hosts[1].crash();
    lab.hosts[1].start();
    // The surviving side sends first, to an unknown CID; the guests' connection continues.
    let took = talk.say(1000);
    assert!(took.as_millis() < 1000, "{took:?}");
    for _ in 0..20 {
        talk.say(100_000);
    }
    let survivor = lab.hosts[0].counters();
    let newcomer = lab.hosts[1].counters();
    // Restarted by RESET, by the other side's REQUEST if its guest was faster, or by both if they cross.
    let (resets, requests) = (survivor["rte.resets_received_packets"], newcomer["rte.requests_sent_packets"]);
    assert!(resets + requests >= 1 && resets <= newcomer["rte.resets_sent_packets"], "{survivor:?}");
    assert!((1..=4).contains(&survivor["rte.restarted_connections"]), "{survivor:?}");
    assert_eq!(survivor["rte.unanswered_connections"], 0);
    assert_eq!(survivor["rte.rejects_received_packets"], 0, "it was not notified that the vNIC is unknown");
    let after = lab.hosts[0].conns_with(lab.guest("b"));
    assert_eq!(after.len(), 1);
    assert!(after[0].cid != before[0].cid && after[0].peer_cid != before[0].peer_cid, "old identifiers are reused");
    // New connections work immediately, in both directions.
    exchange(lab.net("b"), lab.net("a"), "10.0.0.1", 5002, 2 * MEGABYTES);
    assert_eq!(ping(lab.net("b"), "10.0.0.1", 5, 56), 5);

    // Now the restarted side sends first: its REQUEST has a newer instance than the survivor knows.
    let restarted = lab.hosts[0].counter("rte.restarted_connections");
    lab.hosts[1].crash();
    lab.hosts[1].start();
    exchange(lab.net("b"), lab.net("a"), "10.0.0.1", 5003, 2 * MEGABYTES);
    let restarted = lab.hosts[0].counter("rte.restarted_connections") - restarted;
    assert!((1..=4).contains(&restarted), "{restarted}");
    assert_eq!(lab.hosts[0].conns_with(lab.guest("b")).len(), 1);
    talk.say(100_000);
}

#[test]
fn a_crashed_peer_is_recognized() {
    crash_and_restart(Options::default());
}

#[test]
fn a_crashed_peer_is_recognized_by_the_right_worker() {
    crash_and_restart(Options { workers: 2, ..Options::default() });
}

#[test]
fn both_hosts_restart_under_load() {
    let mut lab = Lab::running(Options { workers: 2, ..Options::default() });
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    for round in 0..4 {
        talk.say(200_000);
        lab.hosts[round % 2].crash();
        lab.hosts[round % 2].start();
    }
    talk.say(200_000);
    for host in &lab.hosts {
        assert_eq!(host.client.conns().unwrap().len(), 1);
    }
}
