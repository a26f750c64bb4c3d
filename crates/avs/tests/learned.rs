//! Networks whose routes are learned when a packet needs them.
#![allow(clippy::unwrap_used)]

mod common;

use std::net::IpAddr;

use bifrost_avs::{
    AclRule, Action, Direction, DropReason, FlowLimits, GATEWAY_MAC, LearnedAnswer, LearnedChange, Pattern, PeerId,
    Peering, PortId, Switch, Tables,
};
use bifrost_wire::Mac;
use bifrost_wire::arp::Operation::Request;
use common::*;

const ALL: Mac = Mac([0xff; 6]);

/// The first network without routes: all of 10.0.0.0/8 and fd00::/8 is learned.
fn learning() -> Tables {
    let mut tables = tables();
    tables.routes.retain(|route| route.vni != vni(100));
    tables.learned = vec![(vni(100), ["10.0.0.0/8", "fd00::/8"].map(|net| net.parse().unwrap()).to_vec())];
    tables
}

fn build(tables: &Tables) -> Switch {
    Switch::build(tables, 0).unwrap()
}

fn learn(switch: &mut Switch, range: &str, answer: Option<LearnedAnswer>) {
    switch.learn(vni(100), &[LearnedChange { range: range.parse().unwrap(), answer }]);
}

fn at(peer: u32, n: u8) -> Option<LearnedAnswer> {
    Some(LearnedAnswer::Route { peer: PeerId(peer), mac: mac(n), mtu: 1500 })
}

fn ask(address: &str) -> Action {
    Action::Ask { vni: vni(100), address: ip(address) }
}

fn arp_for(switch: &mut Switch, target: &str) -> Action {
    guest(switch, 0, &arp((mac(1), ALL), Request, (mac(1), "10.0.0.1"), (Mac::ZERO, target))).action
}

fn routed(switch: &mut Switch, to: &str) -> Action {
    let from = if to.contains(':') { "fd00::1" } else { "10.0.0.1" };
    guest(switch, 0, &udp((mac(1), GATEWAY_MAC), from, to, (1, 2))).action
}

fn peer(action: Action) -> Option<(u32, Mac)> {
    match action {
        Action::Forward { peer, remote, .. } => Some((peer.0, remote)),
        _ => None,
    }
}

#[test]
fn what_has_no_route_is_asked_for_and_goes_where_the_answer_says() {
    let mut s = build(&learning());
    assert_eq!(arp_for(&mut s, "10.0.0.3"), ask("10.0.0.3"));
    assert_eq!(routed(&mut s, "10.1.2.3"), ask("10.1.2.3"));
    assert_eq!(routed(&mut s, "fd00::3"), ask("fd00::3"));
    // Guests of this host, the gateway, and what is not learned are not asked for.
    assert_eq!(arp_for(&mut s, "10.0.0.2"), answered().action);
    assert_eq!(arp_for(&mut s, "10.0.0.254"), answered().action);
    assert_eq!(routed(&mut s, "192.0.2.1"), Action::Drop(DropReason::NoRoute));
    assert_eq!(arp_for(&mut s, "192.0.2.1"), Action::Drop(DropReason::UnknownNeighbour));
    assert_eq!(routed(&mut s, "10.255.255.255"), ask("10.255.255.255"), "it may be the address of a guest");
    // Neither are packets that may not be sent.
    let spoofed = guest(&mut s, 0, &udp((mac(1), GATEWAY_MAC), "10.0.0.9", "10.1.2.3", (1, 2))).action;
    assert_eq!(spoofed, Action::Drop(DropReason::SpoofedIp));

    learn(&mut s, "10.0.0.3/32", at(1, 3));
    learn(&mut s, "10.1.0.0/16", at(2, 4));
    assert_eq!(arp_for(&mut s, "10.0.0.3"), answered().action);
    assert_eq!(peer(routed(&mut s, "10.1.200.1")), Some((2, mac(4))));
    // By its MAC address, once the guest knows it.
    let switched = udp((mac(1), mac(3)), "10.0.0.1", "10.0.0.3", (1, 2));
    assert_eq!(peer(guest(&mut s, 0, &switched).action), Some((1, mac(3))));
    // The route is forgotten, but the guest remembers the MAC address.
    learn(&mut s, "10.0.0.3/32", None);
    assert_eq!(guest(&mut s, 0, &switched).action, ask("10.0.0.3"));
    learn(&mut s, "10.0.0.3/32", at(1, 9));
    assert_eq!(guest(&mut s, 0, &switched).action, Action::Drop(DropReason::UnknownMac), "another vNIC has it now");
    assert_eq!(s.port_counters(PortId(0)).unwrap().asked_packets, 5);
}

#[test]
fn negative_answers_hold_for_their_time() {
    let mut s = build(&learning());
    s.advance(100);
    learn(&mut s, "10.0.0.8/29", Some(LearnedAnswer::Nothing { until_ns: 1000 }));
    learn(&mut s, "10.2.0.0/16", Some(LearnedAnswer::Full { until_ns: 1000 }));
    assert_eq!(arp_for(&mut s, "10.0.0.9"), Action::Drop(DropReason::UnknownNeighbour));
    assert_eq!(routed(&mut s, "10.0.0.9"), Action::Drop(DropReason::NoRoute));
    assert_eq!(routed(&mut s, "10.2.0.9"), Action::Drop(DropReason::LearnedFull));
    s.advance(1000);
    assert_eq!(arp_for(&mut s, "10.0.0.9"), ask("10.0.0.9"));
    assert_eq!(routed(&mut s, "10.2.0.9"), ask("10.2.0.9"));
}

#[test]
fn senders_without_a_route_are_accepted_unless_they_are_known_to_be_elsewhere() {
    let mut s = build(&learning());
    let from = |src_mac: Mac, src: &str| udp((src_mac, mac(1)), src, "10.0.0.1", (1, 2));
    assert_eq!(underlay(&mut s, 100, 1, &from(mac(3), "10.0.0.3")), Ok(PortId(0)));
    assert_eq!(underlay(&mut s, 100, 1, &from(GATEWAY_MAC, "10.7.0.3")), Ok(PortId(0)));
    // The addresses and vNICs of this host, of its switch, and those that are not learned.
    for (src_mac, src) in [
        (mac(2), "10.0.0.3"),
        (mac(3), "10.0.0.2"),
        (GATEWAY_MAC, "10.0.0.2"),
        (mac(3), "10.0.0.254"),
        (mac(3), "192.0.2.1"),
        (GATEWAY_MAC, "192.0.2.1"),
    ] {
        assert_eq!(underlay(&mut s, 100, 1, &from(src_mac, src)), Err(DropReason::WrongPeer), "{src_mac} {src}");
    }
    learn(&mut s, "10.0.0.3/32", at(1, 3));
    assert_eq!(underlay(&mut s, 100, 1, &from(mac(3), "10.0.0.3")), Ok(PortId(0)));
    for (peer, src_mac, src) in
        [(2, mac(3), "10.0.0.3"), (2, mac(8), "10.0.0.3"), (2, mac(3), "10.0.0.8"), (2, GATEWAY_MAC, "10.0.0.3")]
    {
        assert_eq!(underlay(&mut s, 100, peer, &from(src_mac, src)), Err(DropReason::WrongPeer), "{peer} {src}");
    }
    assert!(s.is_at_peer(vni(100), mac(3), PeerId(1)) && s.is_at_peer(vni(100), mac(77), PeerId(2)));
    assert!(!s.is_at_peer(vni(100), mac(3), PeerId(2)) && !s.is_at_peer(vni(100), mac(2), PeerId(2)));
    // In a network that learns nothing, nothing changes.
    assert_eq!(
        underlay(&mut s, 200, 1, &udp((mac(7), mac(1)), "10.0.0.7", "10.0.0.1", (1, 2))),
        Err(DropReason::WrongPeer)
    );
}

#[test]
fn flow_records_and_notes_follow_a_route_that_changes() {
    let mut tables = learning();
    tables.flows = FlowLimits { records: 64, vectors: true };
    // An ACL makes records worthwhile.
    let pattern = Pattern { protocol: Some(6), ..Pattern::default() };
    tables.vpcs[0].acl = vec![AclRule { direction: Direction::Egress, allow: false, pattern, log: None }];
    let mut s = build(&tables);
    learn(&mut s, "10.1.0.0/16", at(1, 3));
    for n in 0..3 {
        s.advance(n);
        for _ in 0..3 {
            assert_eq!(peer(routed(&mut s, "10.1.2.3")), Some((1, mac(3))));
        }
    }
    // Without time passing: a note is still there.
    learn(&mut s, "10.1.0.0/16", at(2, 4));
    assert_eq!(peer(routed(&mut s, "10.1.2.3")), Some((2, mac(4))));
    learn(&mut s, "10.1.2.0/24", None);
    assert_eq!(routed(&mut s, "10.1.2.3"), ask("10.1.2.3"));
    // An answer about something else leaves them alone.
    learn(&mut s, "10.1.0.0/16", at(2, 4));
    routed(&mut s, "10.1.2.3");
    let found = s.flow_counters().found_packets + s.flow_counters().batched_packets;
    learn(&mut s, "10.3.0.0/16", at(2, 4));
    assert_eq!(peer(routed(&mut s, "10.1.2.3")), Some((2, mac(4))));
    assert_eq!(s.flow_counters().found_packets + s.flow_counters().batched_packets, found + 1);
}

#[test]
fn another_configuration_keeps_what_is_still_to_be_learned() {
    let mut s = build(&learning());
    learn(&mut s, "10.0.0.3/32", at(1, 3));
    learn(&mut s, "fd00::3/128", at(1, 3));
    let mut tables = learning();
    s.replace(&tables).unwrap();
    assert_eq!(peer(routed(&mut s, "10.0.0.3")), Some((1, mac(3))));
    tables.learned[0].1.truncate(1);
    s.replace(&tables).unwrap();
    assert_eq!(peer(routed(&mut s, "10.0.0.3")), Some((1, mac(3))));
    assert_eq!(routed(&mut s, "fd00::3"), Action::Drop(DropReason::NoRoute));
    // A configured route comes first.
    tables.routes = common::tables().routes;
    tables.routes[0].peer = PeerId(7);
    tables.routes[1].peer = PeerId(7);
    s.replace(&tables).unwrap();
    assert_eq!(peer(routed(&mut s, "10.0.0.3")), Some((7, mac(3))));
    tables.learned.clear();
    tables.routes.retain(|route| route.vni != vni(100));
    s.replace(&tables).unwrap();
    assert_eq!(routed(&mut s, "10.0.0.3"), Action::Drop(DropReason::NoRoute));
    assert_eq!(arp_for(&mut s, "10.0.0.3"), Action::Drop(DropReason::UnknownNeighbour));
}

#[test]
fn a_peered_network_is_asked_for_in_its_own_name() {
    let mut tables = learning();
    tables.vpcs[1].gateways = vec![ip("10.9.0.1")];
    tables.ports[2].addresses = vec![ip("10.9.0.2")];
    tables.routes.clear();
    tables.learned = vec![(vni(200), vec!["10.9.0.0/16".parse().unwrap()])];
    let way = |from, prefix: &str, to| Peering { vni: vni(from), prefix: prefix.parse().unwrap(), to: vni(to) };
    tables.peerings = vec![way(100, "10.9.0.0/16", 200), way(200, "10.0.0.0/24", 100)];
    let mut s = build(&tables);
    assert_eq!(routed(&mut s, "10.9.0.3"), Action::Ask { vni: vni(200), address: ip("10.9.0.3") });
    s.learn(vni(200), &[LearnedChange { range: "10.9.0.3/32".parse().unwrap(), answer: at(9, 3) }]);
    let Action::Forward { vni: to, peer, remote, .. } = routed(&mut s, "10.9.0.3") else { panic!("it has a route") };
    assert_eq!((to, peer, remote), (vni(200), PeerId(9), mac(3)));
    // And in the other direction: from a peer, with an address that is not known.
    let from = udp((GATEWAY_MAC, mac(1)), "10.9.0.77", "10.0.0.1", (1, 2));
    assert_eq!(underlay(&mut s, 100, 1, &from), Ok(PortId(0)));
    let known = udp((GATEWAY_MAC, mac(1)), "10.9.0.3", "10.0.0.1", (1, 2));
    assert_eq!(underlay(&mut s, 100, 1, &known), Err(DropReason::WrongPeer));
    assert_eq!(underlay(&mut s, 100, 9, &known), Ok(PortId(0)));
}

#[test]
fn routes_that_packets_use_are_reported() {
    let mut s = build(&learning());
    for n in 3..9u8 {
        learn(&mut s, &format!("10.0.0.{n}/32"), at(1, n));
    }
    routed(&mut s, "10.0.0.4");
    arp_for(&mut s, "10.0.0.6");
    let mut used = Vec::new();
    let rest = s.take_used(vni(100), IpAddr::from([0u8; 16]), 100, &mut used);
    assert_eq!((used, rest), (vec![ip("10.0.0.4"), ip("10.0.0.6")], None));
    assert_eq!(s.take_used(vni(200), IpAddr::from([0u8; 16]), 100, &mut Vec::new()), None);
}
