//! Losses, delays, duplicates, corruption and outages that guests must not notice.

use std::time::{Duration, Instant};

use crate::common::host::vpc;
use crate::common::traffic::{Exchange, Talk, exchange, ping};
use crate::common::{Guest, Lab, Options, eventually};
use bifrost_control::api::{ConnState, PathState};

const MEGABYTES: u64 = 1 << 20;

/// nftables rules for incoming BIFROST packets.
fn wire(verdict: &str) -> String {
    format!(
        "table inet loss {{\n chain in {{\n  type filter hook prerouting priority raw;\n  udp dport 4794 {verdict}\n }}\n}}\n"
    )
}

fn is_out(state: PathState) -> bool {
    matches!(state, PathState::Suspect | PathState::Down)
}

/// Guests' own retransmissions on both sides.
fn retransmits(lab: &Lab) -> u64 {
    lab.net("a").retransmits() + lab.net("b").retransmits()
}

#[test]
fn loss_at_the_port_is_repaired_below_the_guests() {
    let lab = Lab::running(Options::default());
    lab.hosts[1].port_fault("b", |f| f.loss_percent = 1.0);
    lab.hosts[0].port_fault("a", |f| f.loss_percent = 1.0);
    exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 8 * MEGABYTES);
    for host in &lab.hosts {
        let counters = host.counters();
        // 1 % of at least 5793 packets and their acknowledgements.
        let dropped = counters["fault.dropped_packets"];
        assert!(dropped > 30, "{dropped}");
        assert_eq!(counters["rte.no_guest_buffer_packets"], 0, "packets that have not arrived are not refused");
        assert_eq!(counters["rte.refused_packets"], 0, "packets that have not arrived are not refused");
        assert!(host.counter("rte.retransmitted_packets") > 20);
        assert_eq!(host.client.faults().unwrap()[0].hits_packets, dropped);
    }
    lab.assert_nothing_given_up();
    assert!(retransmits(&lab) <= 2, "{} retransmissions by the guests", retransmits(&lab));
}

#[test]
fn without_reliability_the_same_loss_reaches_the_guests() {
    let lab = Lab::running(Options { vpcs: vpc(100, "off", "flow"), ..Options::default() });
    lab.hosts[1].port_fault("b", |f| f.loss_percent = 1.0);
    lab.hosts[0].port_fault("a", |f| f.loss_percent = 1.0);
    exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 4 * MEGABYTES);
    assert!(retransmits(&lab) > 20, "{} retransmissions by the guests", retransmits(&lab));
}

#[test]
fn everything_at_once_on_the_underlay_in_any_order() {
    for ordering in ["flow", "strict", "off"] {
        let lab = Lab::running(Options { vpcs: vpc(100, "all", ordering), ..Options::default() });
        for (host, peer) in [(0, "host-b"), (1, "host-a")] {
            lab.hosts[host].path_fault(peer, None, |f| {
                (f.loss_percent, f.reorder_percent, f.duplicate_percent, f.corrupt_percent) = (0.5, 1.0, 1.0, 0.5);
            });
            lab.hosts[host].path_fault(peer, Some(2), |f| (f.delay_us, f.jitter_us) = (300, 100));
        }
        exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 4 * MEGABYTES);
        assert_eq!(ping(lab.net("a"), "10.0.0.2", 100, 1000), 100, "pings are carried reliably, too");
        for host in &lab.hosts {
            let counters = host.counters();
            for kind in ["dropped", "delayed", "duplicated", "corrupted"] {
                assert!(counters[&format!("fault.{kind}_packets")] > 5, "{kind}: {counters:?}");
            }
            assert!(counters["rte.duplicate_packets"] > 0 && counters["rte.retransmitted_packets"] > 0);
        }
    }
}

#[test]
fn corruption_at_the_port_never_reaches_the_guest() {
    let lab = Lab::running(Options::default());
    lab.hosts[1].port_fault("b", |f| f.corrupt_percent = 3.0);
    exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 4 * MEGABYTES);
    let counters = lab.hosts[1].counters();
    assert!(counters["fault.corrupted_packets"] > 20);
    assert!(counters["drop.bad_checksum_frames"] > 20);
    assert!(lab.net("b").tcp_counter("InErrs") == 0, "a corrupted segment reached the guest");
    assert!(retransmits(&lab) <= 2, "{}", retransmits(&lab));
}

#[test]
fn loss_on_the_wire_is_repaired_below_the_guests() {
    let mut lab = Lab::new(Options { transport: "setup_tries = 20\n".to_string(), ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    // The rule sees packets as a veth pair carries them; with GSO these would be many datagrams in one.
    for host in &mut lab.hosts {
        host.config = host.config.replace("mtu = 1700", "mtu = 1700\ngso = false");
    }
    lab.start();
    for host in &lab.hosts {
        let rules = &wire("numgen random mod 1000 < 10 drop");
        let output = host.net.run("nft", &["-f", "-"], rules);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 8 * MEGABYTES);
    for host in &lab.hosts {
        assert!(host.counter("rte.retransmitted_packets") > 20);
        assert_eq!(host.counter("fault.dropped_packets"), 0);
    }
    assert!(retransmits(&lab) <= 2, "{} retransmissions by the guests", retransmits(&lab));
}

#[test]
fn a_dead_path_is_avoided_and_used_again_after_recovery() {
    let lab = Lab::running(Options::default());
    let stream = Exchange::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 24 * MEGABYTES);
    eventually(5.0, "the stream is running", || lab.hosts[0].counter("rte.sent_packets") > 2000);
    let id = lab.hosts[1].path_fault("host-a", Some(1), |f| f.down = true);
    let state = || lab.hosts[0].client.paths().unwrap().into_iter().find(|p| p.path == 1).unwrap().state;
    stream.finish();
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5002);
    eventually(3.0, "the dead path is suspect", || {
        talk.say(4000);
        is_out(state())
    });
    assert!(retransmits(&lab) <= 2, "{} retransmissions by the guests", retransmits(&lab));
    lab.hosts[1].client.remove_fault(id).unwrap();
    eventually(5.0, "the path is usable again", || {
        talk.say(4000);
        !is_out(state())
    });
    assert!(lab.hosts[0].counter("rte.recovered_paths") >= 1);
}

#[test]
fn a_dead_path_is_avoided_by_plain_vxlan() {
    let lab = Lab::running(Options::default());
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 10, 56), 10);
    lab.hosts[1].path_fault("host-a", Some(1), |f| f.down = true);
    let state = |host: usize| lab.hosts[host].client.paths().unwrap().into_iter().find(|p| p.path == 1).unwrap().state;
    eventually(5.0, "the dead path is suspect on both sides", || {
        ping(lab.net("a"), "10.0.0.2", 5, 56);
        is_out(state(0)) && is_out(state(1))
    });
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 100, 56), 100);
    for host in &lab.hosts {
        assert_eq!(host.counter("rte.sent_packets"), 0, "packets were sent reliably: the test is void");
    }
}

#[test]
fn when_all_paths_fail_traffic_falls_back_and_recovers() {
    // BIFROST's port is blocked, plain VXLAN passes: the guests can still communicate.
    let lab = Lab::running(Options::default());
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    for _ in 0..20 {
        talk.say(10_000);
    }
    for host in &lab.hosts {
        let rules = &wire("drop");
        assert!(host.net.run("nft", &["-f", "-"], rules).status.success());
    }
    let conn = || lab.hosts[0].conns_with(lab.guest("b"))[0].clone();
    let started = Instant::now();
    eventually(5.0, "best effort", || {
        talk.say(1000);
        conn().state == ConnState::Fallback
    });
    assert!(started.elapsed().as_secs_f64() < 2.0, "it took {:?} to fall back", started.elapsed());
    for _ in 0..20 {
        assert!(talk.say(1000).as_secs_f64() < 0.25);
    }
    assert!(lab.hosts[0].counter("rte.best_effort_connections") >= 1);
    assert!(lab.hosts[0].counter("datapath.plain_tx_packets") > 20);
    for host in &lab.hosts {
        assert!(host.net.run("nft", &["delete", "table", "inet", "loss"], "").status.success());
    }
    eventually(5.0, "recovery", || {
        talk.say(1000);
        conn().state == ConnState::Established
            && lab.hosts[1].conns_with(lab.guest("a"))[0].state == ConnState::Established
    });
    let before = lab.hosts[0].counter("rte.sent_packets");
    for _ in 0..20 {
        talk.say(10_000);
    }
    assert!(lab.hosts[0].counter("rte.sent_packets") > before + 100, "reliable again");
    assert!(lab.hosts[0].counter("rte.recovered_connections") >= 1);
}

#[test]
fn connections_survive_a_total_outage() {
    let lab = Lab::running(Options::default());
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    talk.say(10_000);
    let ids = [lab.hosts[0].path_fault("host-b", None, |f| f.down = true), {
        lab.hosts[1].path_fault("host-a", None, |f| f.down = true)
    }];
    let outage = std::thread::scope(|scope| {
        let talking = scope.spawn(|| talk.say(10_000));
        std::thread::sleep(Duration::from_millis(500));
        for (host, id) in lab.hosts.iter().zip(ids) {
            host.client.remove_fault(id).unwrap();
        }
        talking.join().unwrap()
    });
    assert!(outage.as_millis() >= 500, "no traffic during the outage: {outage:?}");
    // The guests' own timers double from 200 ms; the outage must not last longer than these require.
    assert!(outage.as_millis() < 2500, "{outage:?}");
    for _ in 0..20 {
        talk.say(10_000);
    }
}

#[test]
fn a_packet_is_kept_during_an_outage_for_the_configured_time() {
    for give_up_ms in [10, 1000] {
        let lab = Lab::running(Options { transport: format!("give_up_ms = {give_up_ms}\n"), ..Options::default() });
        let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
        talk.say(10_000);
        let began = Instant::now();
        let ids = [lab.hosts[0].path_fault("host-b", None, |f| f.down = true), {
            lab.hosts[1].path_fault("host-a", None, |f| f.down = true)
        }];
        let given_up = || lab.hosts.iter().map(|host| host.counter("rte.given_up_packets")).sum::<u64>();
        std::thread::scope(|scope| {
            let talking = scope.spawn(|| talk.say(10_000));
            if give_up_ms == 10 {
                eventually(5.0, "packets are given up", || given_up() > 0);
            } else {
                std::thread::sleep(Duration::from_millis(300));
                let (given_up, lasted) = (given_up(), began.elapsed());
                // If read in time, no packet can have been given up.
                assert!(given_up == 0 || lasted.as_millis() >= give_up_ms, "{given_up} given up within {lasted:?}");
            }
            for (host, id) in lab.hosts.iter().zip(ids) {
                host.client.remove_fault(id).unwrap();
            }
            talking.join().unwrap()
        });
    }
}
