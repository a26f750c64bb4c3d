//! Guests of different VPCs reach each other only where both VPCs have a peering.

use bifrost_control::api::TraceSpec;

use crate::common::host::vpc;
use crate::common::traffic::{exchange, ping, ping_with};
use crate::common::{Guest, Lab, Options};

const MEGABYTES: u64 = 1 << 20;

/// Peerings to VNI 200 and back, IPv4 and IPv6.
const THERE: &str = "[[peering]]\nvni = 100\nprefix = \"10.2.0.0/16\"\nto_vni = 200\n\
                     [[peering]]\nvni = 100\nprefix = \"fd02::/64\"\nto_vni = 200\n";
const BACK: &str = "[[peering]]\nvni = 200\nprefix = \"10.1.0.0/16\"\nto_vni = 100\n\
                    [[peering]]\nvni = 200\nprefix = \"fd01::/64\"\nto_vni = 100\n";

/// `a` is in VNI 100. `b`, on the other host, and `c`, on the same one, are in VNI 200; `b` has the MAC address of `a`.
/// `d`, in VNI 300 and on the other host, has an address from VNI 200's subnet.
fn lab(peerings: &str) -> Lab {
    let gateways = |n: u32, v4: &str, v6: &str| format!("{}gateway = [\"{v4}\", \"{v6}\"]\n", vpc(n, "all", "flow"));
    let vpcs = gateways(100, "10.1.0.254", "fd01::fe")
        + &gateways(200, "10.2.0.254", "fd02::fe")
        + &gateways(300, "10.2.0.254", "fd02::fe")
        + peerings;
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.1.0.1/24", "fd01::1/64"]).gateway("10.1.0.254"));
    lab.add(1, Guest::new("b", 1, &["10.2.0.2/24", "fd02::2/64"]).vni(200).gateway("10.2.0.254"));
    lab.add(0, Guest::new("c", 3, &["10.2.0.3/24", "fd02::3/64"]).vni(200).gateway("10.2.0.254"));
    lab.add(1, Guest::new("d", 4, &["10.2.0.4/24"]).vni(300).gateway("10.2.0.254"));
    lab.start();
    for (guest, gateway) in [("a", "fd01::fe"), ("b", "fd02::fe"), ("c", "fd02::fe")] {
        lab.net(guest).ip(&format!("route add default via {gateway}\n"));
    }
    lab
}

#[test]
fn peered_networks_reach_each_other() {
    let lab = lab(&format!("{THERE}{BACK}"));
    let (a, b, c) = (lab.net("a"), lab.net("b"), lab.net("c"));
    for (from, to) in [(a, "10.2.0.2"), (a, "10.2.0.3"), (b, "10.1.0.1"), (c, "10.1.0.1")] {
        assert_eq!(ping_with(from, to, 5, 56, 64), [63; 5], "one hop to {to}");
    }
    for (from, to) in [(a, "fd02::2"), (c, "fd01::1")] {
        assert_eq!(ping(from, to, 5, 56), 5, "{to}");
    }
    assert_eq!(ping_with(b, "10.2.0.3", 5, 56, 64), [64; 5], "no hop within a VPC");
    let before: Vec<u64> = lab.hosts.iter().map(|h| h.counter("rte.sent_packets")).collect();
    exchange(a, b, "10.2.0.2", 5001, 4 * MEGABYTES);
    exchange(b, a, "fd01::1", 5002, 4 * MEGABYTES);
    exchange(a, c, "10.2.0.3", 5003, 4 * MEGABYTES);
    let after: Vec<u64> = lab.hosts.iter().map(|h| h.counter("rte.sent_packets")).collect();
    assert_eq!(before, after, "transport connections stay within one VPC");
    exchange(c, b, "10.2.0.2", 5004, 4 * MEGABYTES);

    let host = &lab.hosts[0];
    let trace = host.client.trace(&TraceSpec {
        port: Some("a".to_owned()),
        to: Some("10.2.0.2".parse().unwrap()),
        tcp: Some((40_000, 5001)),
        ..TraceSpec::default()
    });
    let trace = trace.unwrap();
    let route = trace.steps.iter().find(|s| s.stage == "route").unwrap();
    assert_eq!((route.details["vni"].as_str(), route.details["place"].as_str()), ("200", "host-b"), "{trace:#?}");
    let routes = host.client.routes().unwrap();
    assert!(routes.iter().any(|r| r.to_vni == Some(200) && r.prefix.to_string() == "10.2.0.0/16"), "{routes:?}");

    // The third VPC has the same addresses, without a peering.
    assert_eq!(ping(a, "10.2.0.4", 2, 56), 0, "VNI 200 does not have this address");
    assert_eq!(host.drops("a", "no_route"), 2);
    assert_eq!(ping(lab.net("d"), "10.1.0.1", 2, 56), 0, "VNI 300 has no peering");
    assert_eq!(lab.hosts[1].drops("d", "no_route"), 2);
}

#[test]
fn a_reload_removes_peerings() {
    let mut lab = lab(&format!("{THERE}{BACK}"));
    assert_eq!(ping(lab.net("a"), "10.2.0.2", 3, 56), 3);
    let config = lab.hosts[0].config.replace(THERE, "").replace(BACK, "");
    let whole = std::mem::replace(&mut lab.hosts[0].config, config);
    lab.hosts[0].write_config();
    let report = lab.hosts[0].client.reload().unwrap();
    assert_eq!(report.peerings.removed.len(), 4, "{report:?}");
    assert_eq!(ping(lab.net("a"), "10.2.0.2", 2, 56), 0);
    assert_eq!(lab.hosts[0].drops("a", "no_route"), 2);
    // Packets of the other host are refused: each host uses its own configuration.
    let refused = lab.hosts[0].counter("avs.underlay_dropped_wrong_peer_packets");
    assert_eq!(ping(lab.net("b"), "10.1.0.1", 2, 56), 0);
    assert_eq!(lab.hosts[0].counter("avs.underlay_dropped_wrong_peer_packets"), refused + 2);

    lab.hosts[0].config = whole;
    lab.hosts[0].write_config();
    lab.hosts[0].client.reload().unwrap();
    assert_eq!(ping(lab.net("a"), "10.2.0.2", 3, 56), 3);
}
