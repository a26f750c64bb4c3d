//! Guests reach exactly the guests that they should, with intact data.

use crate::common::host::vpc;
use crate::common::traffic::{exchange, ping, ping_with};
use crate::common::{Guest, Lab, Options};

const MEGABYTES: u64 = 1 << 20;

/// Ping and TCP in both directions under one policy.
fn policy(reliability: &str, ordering: &str) {
    let lab = Lab::running(Options { vpcs: vpc(100, reliability, ordering), ..Options::default() });
    let (a, b) = (lab.net("a"), lab.net("b"));
    assert_eq!(ping(a, "10.0.0.2", 20, 56), 20);
    // The largest payload for the guest's MTU: 1500 - 28 bytes.
    assert_eq!(ping(b, "10.0.0.1", 20, 1472), 20);
    for host in &lab.hosts {
        let reliable = host.counter("rte.sent_packets");
        match reliability {
            "all" => assert!(reliable >= 40, "{reliable} of 40 pings and answers"),
            _ => assert_eq!(reliable, 0, "pings are not for the transport"),
        }
    }
    exchange(a, b, "10.0.0.2", 5001, 4 * MEGABYTES);
    exchange(b, a, "10.0.0.1", 5002, 4 * MEGABYTES);
    // Wait for the last acknowledgements.
    std::thread::sleep(std::time::Duration::from_millis(50));
    for host in &lab.hosts {
        let counters = host.counters();
        let (sent, plain) = (counters["rte.sent_packets"], counters["datapath.plain_tx_packets"]);
        // 8 MiB in each direction in segments of 1448 bytes.
        if reliability == "off" {
            assert_eq!(sent, 0);
            assert!(plain >= 5793, "{plain} plain");
            assert!(host.client.conns().unwrap().iter().all(|c| c.tx_packets == 0));
        } else {
            assert!(sent >= 5793, "{sent} sent");
            let expected = if reliability == "all" { 0..=0 } else { 40..=50 };
            assert!(expected.contains(&plain), "{plain} plain");
            assert_eq!(
                counters["rte.received_packets"],
                lab.hosts.iter().map(|h| h.counter("rte.sent_packets")).sum::<u64>() - sent
            );
            assert_eq!(host.client.conns().unwrap().len(), 1);
        }
        assert_eq!(counters["drop.no_buffer_packets"], 0);
        assert_eq!(counters["drop.bad_checksum_frames"], 0);
    }
    lab.assert_nothing_given_up();
    // The daemon segments: the guest sends large packets.
    let port = lab.hosts[0].port("a");
    assert!(port.tx_bytes / port.tx_packets > 3000, "{} bytes in {} packets", port.tx_bytes, port.tx_packets);
}

#[test]
fn tcp_reliable_in_flow_order() {
    policy("tcp", "flow");
}

#[test]
fn all_reliable_in_strict_order() {
    policy("all", "strict");
}

#[test]
fn all_reliable_unordered() {
    policy("all", "off");
}

#[test]
fn nothing_reliable() {
    policy("off", "flow");
}

#[test]
fn ipv6_guests_over_ipv6() {
    let mut lab = Lab::new(Options { v6: true, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd01::1/64"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24", "fd01::2/64"]));
    lab.start();
    let (a, b) = (lab.net("a"), lab.net("b"));
    assert_eq!(ping(a, "fd01::2", 10, 1452), 10, "the switch answers neighbor discovery");
    assert_eq!(ping(b, "10.0.0.1", 10, 56), 10);
    exchange(a, b, "fd01::2", 5001, 4 * MEGABYTES);
    exchange(b, a, "10.0.0.1", 5002, 4 * MEGABYTES);
    for host in &lab.hosts {
        assert!(host.counter("rte.sent_packets") > 5793);
        assert_eq!(host.client.conns().unwrap().len(), 1, "both families share the pair's connection");
        let paths = host.client.paths().unwrap();
        assert!(paths.len() == 4 && paths.iter().all(|p| p.remote.is_ipv6()), "{paths:?}");
    }
}

#[test]
fn the_gateway_routes_between_subnets() {
    let vpcs =
        format!("{}gateway = [\"10.0.1.254\", \"10.0.2.254\", \"fd01::fe\", \"fd02::fe\"]\n", vpc(100, "tcp", "flow"));
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.1.1/24"]).gateway("10.0.1.254"));
    lab.add(1, Guest::new("b", 2, &["10.0.2.2/24"]).gateway("10.0.2.254"));
    lab.add(0, Guest::new("c", 3, &["10.0.2.3/24"]).gateway("10.0.2.254"));
    lab.start();
    let (a, b, c) = (lab.net("a"), lab.net("b"), lab.net("c"));
    assert_eq!(ping(a, "10.0.1.254", 3, 56), 3, "the gateway answers pings");
    for (from, to) in [(a, "10.0.2.2"), (a, "10.0.2.3"), (b, "10.0.1.1")] {
        assert_eq!(ping_with(from, to, 5, 56, 64), [63; 5], "one hop to {to}");
    }
    assert_eq!(ping_with(b, "10.0.2.3", 5, 56, 64), [64; 5], "on-link guests are not a hop apart");
    exchange(a, b, "10.0.2.2", 5001, 2 * MEGABYTES);
    exchange(c, b, "10.0.2.2", 5002, 2 * MEGABYTES);
    exchange(a, c, "10.0.2.3", 5003, 2 * MEGABYTES);
    // A packet whose TTL expires is dropped.
    let before = lab.hosts[0].drops("a", "ttl_expired");
    assert!(ping_with(a, "10.0.2.2", 2, 56, 1).is_empty());
    assert_eq!(lab.hosts[0].drops("a", "ttl_expired"), before + 2);
    // An unused address.
    assert_eq!(ping(a, "10.0.2.77", 2, 56), 0);
    assert_eq!(lab.hosts[0].drops("a", "no_route"), 2);
}

#[test]
fn ports_of_one_host_do_not_use_the_underlay() {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(0, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.start();
    let (a, b) = (lab.net("a"), lab.net("b"));
    assert_eq!(ping(a, "10.0.0.2", 10, 1472), 10);
    exchange(a, b, "10.0.0.2", 5001, 8 * MEGABYTES);
    let counters = lab.hosts[0].counters();
    assert!(counters["datapath.local_packets"] > 20, "{counters:?}");
    assert_eq!(counters["underlay.tx_packets"], 0);
    assert!(lab.hosts[0].client.conns().unwrap().is_empty());
}

#[test]
fn networks_with_the_same_addresses_are_isolated() {
    let vpcs = vpc(100, "tcp", "flow") + &vpc(200, "all", "strict");
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    // The same MAC and IP addresses in both, and only VNI 100 has a third guest.
    lab.add(0, Guest::new("a1", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b1", 2, &["10.0.0.2/24"]));
    lab.add(1, Guest::new("c1", 3, &["10.0.0.3/24"]));
    lab.add(0, Guest::new("a2", 1, &["10.0.0.1/24"]).vni(200));
    lab.add(1, Guest::new("b2", 2, &["10.0.0.2/24"]).vni(200));
    lab.start();
    let sniff =
        |guest: &str| lab.hosts.iter().find_map(|h| h.client.ports().unwrap().into_iter().find(|p| p.name == guest));
    let received = |guest: &str| sniff(guest).unwrap().rx_packets;
    assert_eq!(ping(lab.net("a1"), "10.0.0.2", 10, 56), 10);
    assert_eq!((received("b2"), received("a2")), (0, 0), "VNI 200 received packets of VNI 100");
    let before = received("b1");
    assert_eq!(ping(lab.net("a2"), "10.0.0.2", 10, 56), 10);
    assert_eq!(received("b1"), before, "VNI 100 received packets of VNI 200");
    assert_eq!(ping(lab.net("a2"), "10.0.0.3", 2, 56), 0, "VNI 200 has no such guest");
    assert_eq!(received("c1"), 0);
    exchange(lab.net("a1"), lab.net("b1"), "10.0.0.2", 5001, 2 * MEGABYTES);
    exchange(lab.net("a2"), lab.net("b2"), "10.0.0.2", 5001, 2 * MEGABYTES);
    let vnis: Vec<u32> = lab.hosts[1].client.conns().unwrap().iter().map(|c| c.vni).collect();
    assert!(vnis.len() == 2 && vnis.contains(&100) && vnis.contains(&200), "{vnis:?}");
}
