//! Packets between networks: which may pass and which may not.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use bifrost_avs::{
    AclRule, Action, BuildError, Direction, DropReason, GATEWAY_MAC, GroupId, GroupRule, Hop, Ordering, Pattern,
    PeerId, Peering, Port, PortId, Reliability, Route, SecurityGroup, Switch, Tables, Verdict, Vpc,
};
use bifrost_nic::{Offload, parse};
use bifrost_wire::Mac;
use bifrost_wire::arp::Operation::{Reply, Request};
use bifrost_wire::icmp::v6::Advertisement;
use common::*;

/// From the guest of VNI 100 to its gateway.
const OUT: (Mac, Mac) = (mac(1), GATEWAY_MAC);
/// To the same guest, routed by the gateway of a peer.
const IN: (Mac, Mac) = (GATEWAY_MAC, mac(1));

fn peering(from: u32, prefix: &str, to: u32) -> Peering {
    Peering { vni: vni(from), prefix: prefix.parse().unwrap(), to: vni(to) }
}

/// VNI 100 of [`tables`], and VNI 300: vNIC 1 on this host as port 7, vNIC 3 at peer 2 with a network behind it; it
/// has the same MAC addresses as VNI 100. VNI 400 is reachable only from VNI 300. VNI 200 has no gateway.
fn peered() -> Tables {
    let mut tables = tables();
    let vpc = |n, gateways: &[&str]| Vpc {
        vni: vni(n),
        reliability: Reliability::All,
        ordering: Ordering::Flow,
        gateways: gateways.iter().map(|a| ip(a)).collect(),
        acl: vec![],
    };
    tables.vpcs.extend([vpc(300, &["10.3.0.254", "fd03::fe"]), vpc(400, &["10.4.0.254"])]);
    let addresses = vec![ip("10.3.0.1"), ip("fd03::1")];
    let port = Port {
        id: PortId(7),
        vni: vni(300),
        mac: mac(1),
        addresses,
        routed: vec![],
        mtu: 1000,
        groups: vec![GroupId(0)],
        home: None,
    };
    tables.ports.push(port);
    let open = |direction, pattern| GroupRule::new(direction, pattern);
    let services = Pattern { protocol: Some(6), dst_ports: 0..=0, ..Pattern::default() };
    tables.groups = vec![SecurityGroup::new(vec![open(Direction::Ingress, services)])];
    let route = |n, prefix: &str, peer, mac_of| {
        let prefix = prefix.parse().unwrap();
        Route { vni: vni(n), prefix, peer: PeerId(peer), mac: mac(mac_of), mtu: 1400 }
    };
    tables.routes.extend([
        route(300, "10.3.1.0/24", 2, 3),
        route(300, "fd03::3/128", 2, 3),
        route(400, "10.4.0.0/24", 2, 3),
    ]);
    tables.peerings = vec![
        peering(100, "10.3.0.0/16", 300),
        peering(100, "fd03::/16", 300),
        peering(300, "10.0.0.0/24", 100),
        peering(300, "fd00::/16", 100),
        // Across two networks, which is not allowed.
        peering(100, "10.4.0.0/16", 300),
        peering(300, "10.4.0.0/16", 400),
        peering(400, "10.0.0.0/16", 300),
        peering(400, "10.3.0.0/16", 300),
        // One way only, and to a network without a gateway.
        peering(100, "10.5.0.0/16", 400),
        peering(100, "10.6.0.0/16", 200),
    ];
    tables
}

fn switch() -> Switch {
    Switch::build(&peered(), 0).unwrap()
}

#[test]
fn guests_reach_the_other_network_through_the_gateways() {
    // The expected network, peer and vNIC.
    type Case = (&'static str, u32, Vec<u8>, Result<(u32, u32, u8), DropReason>);
    let cases: &[Case] = &[
        ("another host", 0, tcp(OUT, "10.0.0.1", "10.3.1.7"), Ok((300, 2, 3))),
        ("IPv6", 0, tcp(OUT, "fd00::1", "fd03::3"), Ok((300, 2, 3))),
        ("and the other way", 7, tcp(OUT, "10.3.0.1", "10.0.0.3"), Ok((100, 1, 3))),
        ("its own network as ever", 0, tcp(OUT, "10.0.0.1", "10.0.0.3"), Ok((100, 1, 3))),
        ("who is not there", 0, tcp(OUT, "10.0.0.1", "10.3.2.1"), Err(DropReason::NoRoute)),
        ("across two networks", 0, tcp(OUT, "10.0.0.1", "10.4.0.1"), Err(DropReason::NoRoute)),
        ("each half of it passes", 7, tcp(OUT, "10.3.0.1", "10.4.0.1"), Ok((400, 2, 3))),
        ("no way back", 0, tcp(OUT, "10.0.0.1", "10.5.0.1"), Err(DropReason::NoRoute)),
        ("no gateway there", 0, tcp(OUT, "10.0.0.1", "10.6.0.1"), Err(DropReason::NoRoute)),
        ("the other network's gateway", 0, tcp(OUT, "10.0.0.1", "10.3.0.254"), Err(DropReason::NoRoute)),
        ("not as a neighbour", 0, tcp((mac(1), mac(3)), "10.0.0.1", "10.3.1.7"), Ok((100, 1, 3))),
    ];
    for (name, port, frame, expected) in cases {
        let got = guest(&mut switch(), *port, frame);
        match *expected {
            Err(reason) => assert_eq!(got, Verdict::drop(reason), "{name}"),
            Ok((network, at, mac_of)) => {
                let Verdict { action: Action::Forward { vni: v, peer, local, remote, reliable, .. }, rewrite, .. } =
                    got
                else {
                    panic!("{name}: {got:?}")
                };
                assert_eq!((v, peer, local, remote), (vni(network), PeerId(at), mac(1), mac(mac_of)), "{name}");
                let own = if *port == 0 { 100 } else { 300 };
                assert_eq!(reliable, network == own, "{name}: connections are of one network");
                assert_eq!(rewrite.is_some(), frame[..6] == GATEWAY_MAC.0, "{name}");
            }
        }
    }
}

#[test]
fn guests_of_one_host_meet_under_the_rules_of_both() {
    let mut s = switch();
    let syn = |to: u16| {
        let mut frame = tcp(OUT, "10.0.0.1", "10.3.0.1");
        frame[36..38].copy_from_slice(&to.to_be_bytes());
        frame
    };
    let got = guest(&mut s, 0, &syn(0));
    let Verdict { action: Action::Deliver { port: PortId(7), .. }, rewrite: Some(rewrite), .. } = got else {
        panic!("{got:?}")
    };
    assert_eq!(rewrite.destination(), mac(1));
    assert_eq!(guest(&mut s, 0, &syn(80)), Verdict::drop(DropReason::GroupIngress), "its group allows no such port");
    let back = guest(&mut s, 7, &tcp(OUT, "10.3.0.1", "10.0.0.1"));
    assert!(matches!(back.action, Action::Deliver { port: PortId(0), .. }), "{back:?}");

    let mut tables = peered();
    let from = Some("10.0.0.0/24".parse().unwrap());
    tables.vpcs[2].acl = vec![AclRule {
        direction: Direction::Ingress,
        pattern: Pattern { src: from, ..Pattern::default() },
        allow: false,
        log: None,
    }];
    s.replace(&tables).unwrap();
    assert_eq!(guest(&mut s, 0, &syn(0)), Verdict::drop(DropReason::Acl), "the other network's list");
}

#[test]
fn peers_send_to_a_peered_network_from_their_own_addresses() {
    let spoofed = arp((GATEWAY_MAC, mac(1)), Reply, (mac(3), "10.3.1.7"), (mac(1), "10.0.0.1"));
    let neighbour = arp((mac(3), Mac::BROADCAST), Request, (mac(3), "10.3.1.7"), (Mac::ZERO, "10.0.0.1"));
    let target = Advertisement {
        router: false,
        solicited: true,
        overrides: true,
        target: v6_addr("fd03::3"),
        target_mac: Some(mac(3)),
    };
    let advertised = advertise((mac(3), mac(1)), "fd00::3", "fd00::1", target);
    type Case = (&'static str, u32, u32, Vec<u8>, Result<u32, DropReason>);
    let cases: &[Case] = &[
        ("from where it is", 100, 2, tcp(IN, "10.3.1.7", "10.0.0.1"), Ok(0)),
        ("IPv6", 100, 2, tcp(IN, "fd03::3", "fd00::1"), Ok(0)),
        ("and the other way", 300, 1, tcp(IN, "10.0.0.3", "10.3.0.1"), Ok(7)),
        ("from elsewhere", 100, 1, tcp(IN, "10.3.1.7", "10.0.0.1"), Err(DropReason::WrongPeer)),
        ("as one who is here", 100, 2, tcp(IN, "10.3.0.1", "10.0.0.1"), Err(DropReason::WrongPeer)),
        ("as nobody there", 100, 2, tcp(IN, "10.3.2.1", "10.0.0.1"), Err(DropReason::WrongPeer)),
        ("across two networks", 100, 2, tcp(IN, "10.4.0.1", "10.0.0.1"), Err(DropReason::WrongPeer)),
        ("from where no way leads", 100, 2, tcp(IN, "10.5.0.1", "10.0.0.1"), Err(DropReason::WrongPeer)),
        ("to where no way leads", 300, 2, tcp(IN, "10.1.0.1", "10.3.0.1"), Err(DropReason::WrongPeer)),
        ("as a neighbour", 100, 1, tcp((mac(3), mac(1)), "10.3.1.7", "10.0.0.1"), Err(DropReason::WrongPeer)),
        ("asking as a neighbour", 100, 1, neighbour, Err(DropReason::WrongPeer)),
        ("a false answer", 100, 2, spoofed, Err(DropReason::SpoofedArp)),
        ("a false advertisement", 100, 1, advertised, Err(DropReason::SpoofedNeighbour)),
    ];
    for (name, network, peer, frame, expected) in cases {
        assert_eq!(underlay(&mut switch(), *network, *peer, frame), expected.map(PortId), "{name}");
    }
}

#[test]
fn addresses_of_the_other_network_are_not_resolved() {
    let ask = arp((mac(1), Mac::BROADCAST), Request, (mac(1), "10.0.0.1"), (Mac::ZERO, "10.3.1.7"));
    assert_eq!(guest(&mut switch(), 0, &ask), Verdict::drop(DropReason::UnknownNeighbour));
}

#[test]
fn a_sender_in_the_other_network_gets_path_mtu_errors() {
    // By its own gateway, about the path MTU of the route in the other network.
    let large = |macs, from: &str, to: &str, len: usize| {
        let mut body = vec![0; len - 20];
        body[12] = 0x50;
        packet(macs, from, to, 64, 6, &body)
    };
    let mut s = switch();
    assert_eq!(guest(&mut s, 0, &large(OUT, "10.0.0.1", "10.3.1.7", 1401)), answered());
    let answer = parse(s.answer(), s.answer().len()).unwrap();
    assert_eq!((answer.src_mac, answer.src_ip), (GATEWAY_MAC, ip("10.0.0.254")));
    assert!(matches!(guest(&mut s, 0, &large(OUT, "10.0.0.1", "10.3.1.7", 1400)).action, Action::Forward { .. }));

    // By the packet's receiver, in the sender's network, whose host accepts the error.
    let frame = large((GATEWAY_MAC, mac(1)), "10.0.0.3", "10.3.0.1", 1001);
    let got = s.from_underlay(vni(300), PeerId(1), &frame, &parse(&frame, frame.len()).unwrap());
    assert_eq!(*got, answered());
    let told = s.answer().to_vec();
    let answer = parse(&told, told.len()).unwrap();
    assert_eq!((answer.src_mac, answer.dst_mac), (GATEWAY_MAC, mac(3)));
    assert_eq!((answer.src_ip, answer.dst_ip), (ip("10.3.0.1"), ip("10.0.0.3")));
    // The host of vNIC 3, from which port 7 is at a peer.
    let mut there = peered();
    there.ports = vec![Port { vni: vni(100), mac: mac(3), addresses: vec![ip("10.0.0.3")], ..there.ports[3].clone() }];
    there.ports[0].groups.clear();
    there.routes.remove(0);
    there.routes.remove(0);
    let route =
        Route { vni: vni(300), prefix: "10.3.0.1/32".parse().unwrap(), peer: PeerId(4), mac: mac(1), mtu: 1500 };
    there.routes.push(route);
    assert_eq!(underlay(&mut Switch::build(&there, 0).unwrap(), 100, 4, &told), Ok(PortId(7)));
}

#[test]
fn a_network_cannot_be_its_own_peer_nor_an_unknown_one() {
    type Change = fn(&mut Tables);
    let cases: &[(Change, BuildError)] = &[
        (|t| t.peerings[0].to = vni(100), BuildError::PeeringWithItself(vni(100))),
        (|t| t.peerings[0].to = vni(7), BuildError::UnknownVni(vni(7))),
        (|t| t.peerings[0].vni = vni(7), BuildError::UnknownVni(vni(7))),
        (
            |t| t.peerings[0].prefix = "10.0.0.3/32".parse().unwrap(),
            BuildError::DuplicatePrefix { vni: vni(100), prefix: "10.0.0.3/32".parse().unwrap() },
        ),
    ];
    for (change, expected) in cases {
        let mut tables = peered();
        change(&mut tables);
        assert_eq!(Switch::build(&tables, 0).err(), Some(*expected));
    }
}

#[test]
fn a_trace_names_the_next_hops_network() {
    let s = switch();
    let hop = |frame: &[u8]| {
        s.trace_from_guest(PortId(0), frame, frame.len(), Offload::default(), &parse(frame, frame.len()).unwrap()).hop
    };
    let across = Hop { routed: true, mac: mac(3), peer: Some(PeerId(2)), vni: vni(300), mtu: 1400 };
    assert_eq!(hop(&tcp(OUT, "10.0.0.1", "10.3.1.7")), Some(across));
    assert_eq!(hop(&tcp(OUT, "10.0.0.1", "10.4.0.1")), None);
}

#[test]
fn a_reload_can_end_a_peering() {
    let mut s = switch();
    let frame = tcp(OUT, "10.0.0.1", "10.3.1.7");
    for _ in 0..3 {
        assert!(matches!(guest(&mut s, 0, &frame).action, Action::Forward { .. }));
    }
    let mut tables = peered();
    tables.peerings.retain(|p| p.vni != vni(300));
    s.replace(&tables).unwrap();
    assert_eq!(guest(&mut s, 0, &frame), Verdict::drop(DropReason::NoRoute));
    let back = tcp(IN, "10.3.1.7", "10.0.0.1");
    assert_eq!(underlay(&mut s, 100, 2, &back), Err(DropReason::WrongPeer));
}
