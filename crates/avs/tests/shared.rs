//! Addresses that vNICs share: which vNIC may use one, which receives packets to it, how a vNIC takes one, and where
//! VRRP goes.
#![allow(clippy::unwrap_used)]

mod common;

use std::net::IpAddr;

use bifrost_avs::Statement::{Has, Takes};
use bifrost_avs::{
    Action, BuildError, DropReason, GATEWAY_MAC, GroupId, GroupRule, PeerId, PortId, Remote, SecurityGroup,
    SharedAddress, Statement, Switch, Tables, announcement,
};
use bifrost_nic::parse;
use bifrost_wire::arp::Operation::{Reply, Request};
use bifrost_wire::icmp::v6;
use bifrost_wire::{Mac, arp as wire_arp};
use common::{advertise, answered, arp, guest, ip, mac, packet, solicit, tables, udp, underlay, v6_addr, vni};

const SHARED: &str = "10.0.0.100";
const SHARED_V6: &str = "fd00::100";
const ALL_NODES: (Mac, &str) = (Mac([0x33, 0x33, 0, 0, 0, 1]), "ff02::1");

/// vNICs 1 and 2 (ports 0 and 1) and vNIC 3 at peer 1 share two addresses, which `holders` hold. vNIC 7 (port 2) and
/// vNIC 4 at peer 2 do not share them.
fn world(holders: [Option<u8>; 2]) -> Tables {
    let mut tables = tables();
    let outsider = bifrost_avs::Port {
        id: PortId(2),
        mac: mac(7),
        addresses: vec![ip("10.0.0.7"), ip("fd00::7")],
        ..tables.ports[0].clone()
    };
    tables.ports.push(outsider);
    tables.shared = [SHARED, SHARED_V6]
        .into_iter()
        .zip(holders)
        .map(|(address, holder)| SharedAddress {
            vni: vni(100),
            address: ip(address),
            vnics: vec![mac(1), mac(2), mac(3)],
            holder: holder.map(mac),
        })
        .collect();
    tables
}

fn switch_of(tables: &Tables) -> Switch {
    let mut switch = Switch::build(tables, 0).unwrap();
    switch.advance(5);
    switch
}

/// The claims, by vNIC.
fn claims(switch: &mut Switch) -> Vec<(u8, IpAddr, Statement)> {
    let mut all = vec![];
    switch.take_claims(&mut all);
    assert!(all.iter().all(|claim| claim.at_ns == 5 && claim.vni == vni(100)));
    all.into_iter().map(|claim| (claim.mac.0[5], claim.address, claim.statement)).collect()
}

fn gratuitous(n: u8, operation: wire_arp::Operation, address: &str) -> Vec<u8> {
    arp((mac(n), Mac::BROADCAST), operation, (mac(n), address), (Mac::BROADCAST, address))
}

fn unsolicited(n: u8, target: &str) -> Vec<u8> {
    let target_mac = Some(mac(n));
    let message =
        v6::Advertisement { router: false, solicited: false, overrides: true, target: v6_addr(target), target_mac };
    advertise((mac(n), ALL_NODES.0), target, ALL_NODES.1, message)
}

#[test]
fn a_guest_takes_an_address_by_announcing_it() {
    for (name, frame, address) in [
        ("a request", gratuitous(2, Request, SHARED), SHARED),
        ("a reply", gratuitous(2, Reply, SHARED), SHARED),
        ("an advertisement", unsolicited(2, SHARED_V6), SHARED_V6),
    ] {
        // From another holder, from none, and from itself: other hosts may not know it.
        for holder in [Some(1), None, Some(2), Some(3)] {
            let mut switch = switch_of(&world([holder, holder]));
            for _ in 0..3 {
                assert_eq!(guest(&mut switch, 1, &frame).drop_reason(), Some(DropReason::OwnAddress), "{name}");
            }
            assert_eq!(claims(&mut switch), [(2, ip(address), Takes)], "{name}: once");
            assert_eq!(claims(&mut switch), [], "{name}: it is taken away");
        }
    }
}

#[test]
fn a_guest_of_another_host_takes_an_address_by_its_hosts_announcement() {
    for address in [SHARED, SHARED_V6] {
        for (holder, statement, claimed) in [
            (Some(1), Takes, Some(Takes)),
            (None, Takes, Some(Takes)),
            (Some(3), Takes, Some(Takes)),
            // A repetition: it counts if no holder is known.
            (Some(1), Has, None),
            (None, Has, Some(Has)),
        ] {
            let mut switch = switch_of(&world([holder, holder]));
            let frame = announcement(mac(3), ip(address), statement);
            assert_eq!(underlay(&mut switch, 100, 1, &frame), Err(DropReason::OwnAddress), "{address} {statement:?}");
            let expected: Vec<_> = claimed.map(|claimed| (3, ip(address), claimed)).into_iter().collect();
            assert_eq!(claims(&mut switch), expected, "{address} {statement:?} {holder:?}");
        }
    }
    let mut switch = switch_of(&world([None, None]));
    // Not from another host, and not for a vNIC that does not share the address.
    assert_eq!(underlay(&mut switch, 100, 2, &announcement(mac(3), ip(SHARED), Takes)), Err(DropReason::WrongPeer));
    assert!(underlay(&mut switch, 100, 2, &announcement(mac(4), ip(SHARED), Takes)).is_err());
    assert!(underlay(&mut switch, 100, 1, &announcement(mac(1), ip(SHARED), Takes)).is_err());
    assert_eq!(claims(&mut switch), []);
    // A packet from it with its vNIC's MAC address shows that the vNIC holds it.
    let packet = udp((mac(3), mac(7)), SHARED, "10.0.0.7", (5, 6));
    assert!(underlay(&mut switch, 100, 1, &packet).is_ok());
    assert_eq!(claims(&mut switch), [(3, ip(SHARED), Has)]);
}

#[test]
fn packets_from_a_shared_address_pass_from_each_host_that_shares_it() {
    for holder in [None, Some(1), Some(3)] {
        let mut switch = switch_of(&world([holder, None]));
        let packet = udp((GATEWAY_MAC, mac(7)), SHARED, "10.0.0.7", (5, 6));
        assert!(underlay(&mut switch, 100, 1, &packet).is_ok(), "{holder:?}");
        assert_eq!(underlay(&mut switch, 100, 2, &packet), Err(DropReason::WrongPeer), "{holder:?}");
    }
}

/// VRRP from vNIC `n` to its group.
fn vrrp(n: u8, from: &str, v6: bool) -> Vec<u8> {
    let (group, to) = if v6 { (0x33, "ff02::12") } else { (1, "224.0.0.18") };
    let group = if group == 1 { Mac([1, 0, 0x5e, 0, 0, 0x12]) } else { Mac([0x33, 0x33, 0, 0, 0, 0x12]) };
    packet((mac(n), group), from, to, 255, 112, &[0x31, 51, 100, 1, 0, 100, 0, 0, 10, 0, 0, 100])
}

#[test]
fn vrrp_is_copied_to_those_that_share_an_address() {
    let mut switch = switch_of(&world([None, None]));
    for (from, v6) in [("10.0.0.2", false), ("fe80::ff:fe00:2", true)] {
        let frame = vrrp(2, from, v6);
        assert_eq!(guest(&mut switch, 1, &frame).action, Action::Copy);
        assert_eq!(switch.copies(PortId(1)), [mac(1), mac(3)]);
        // A copy goes where a frame to that vNIC goes.
        let mut copy = frame.clone();
        copy[..6].copy_from_slice(&mac(1).0);
        assert!(matches!(guest(&mut switch, 1, &copy).action, Action::Deliver { port: PortId(0), .. }));
        copy[..6].copy_from_slice(&mac(3).0);
        let action = guest(&mut switch, 1, &copy).action;
        assert!(matches!(action, Action::Forward { peer: PeerId(1), reliable: false, .. }), "{action:?}");
        // And it is accepted where it arrives.
        copy[..6].copy_from_slice(&mac(2).0);
        copy[6..12].copy_from_slice(&mac(3).0);
        let of_peer = if v6 { "fe80::ff:fe00:3" } else { "10.0.0.3" };
        let arrived = packet((mac(3), mac(2)), of_peer, if v6 { "ff02::12" } else { "224.0.0.18" }, 255, 112, &[0; 12]);
        assert!(underlay(&mut switch, 100, 1, &arrived).is_ok());
        // A guest that shares no address may not send VRRP.
        let outsider = vrrp(7, if v6 { "fe80::ff:fe00:7" } else { "10.0.0.7" }, v6);
        assert_eq!(guest(&mut switch, 2, &outsider).drop_reason(), Some(DropReason::Multicast));
    }
    assert_eq!(switch.copies(PortId(2)), []);
    assert_eq!(guest(&mut switch, 1, &vrrp(2, "10.0.0.7", false)).drop_reason(), Some(DropReason::SpoofedIp));
    assert_eq!(claims(&mut switch), [], "it claims nothing");
}

#[test]
fn vrrp_and_announcements_are_bounded() {
    let mut switch = switch_of(&world([None, None]));
    for frame in [vrrp(2, "10.0.0.2", false), gratuitous(2, Request, SHARED)] {
        switch.advance(5);
        let mut passed = 0;
        while guest(&mut switch, 1, &frame).drop_reason() != Some(DropReason::SharingRate) {
            passed += 1;
            assert!(passed <= 200);
        }
        switch.advance(1_000_000_005);
        assert_ne!(guest(&mut switch, 1, &frame).drop_reason(), Some(DropReason::SharingRate));
        switch = switch_of(&world([None, None]));
    }
}

#[test]
fn an_address_without_a_holder_is_taken_by_its_first_packet() {
    let packet = udp((mac(2), mac(7)), SHARED, "10.0.0.7", (5, 6));
    let mut switch = switch_of(&world([None, None]));
    assert!(guest(&mut switch, 1, &packet).passes());
    assert_eq!(claims(&mut switch), [(2, ip(SHARED), Has)]);
    // An address that has a holder is taken only by an announcement: packets in flight when it moves do not move it
    // back.
    let mut switch = switch_of(&world([Some(1), None]));
    assert!(guest(&mut switch, 1, &packet).passes());
    assert_eq!(claims(&mut switch), []);
}

#[test]
fn no_other_vnic_takes_or_uses_a_shared_address() {
    let mut switch = switch_of(&world([Some(1), Some(1)]));
    use DropReason::{SpoofedArp, SpoofedIp, SpoofedNeighbour};
    let mut forged = gratuitous(2, Request, SHARED);
    forged[22..28].copy_from_slice(&mac(1).0);
    let foreign = |target_mac| v6::Advertisement {
        router: false,
        solicited: false,
        overrides: true,
        target: v6_addr(SHARED_V6),
        target_mac,
    };
    for (name, port, frame, reason) in [
        ("an outsider's ARP", 2, gratuitous(7, Request, SHARED), SpoofedArp),
        ("an outsider's advertisement", 2, unsolicited(7, SHARED_V6), SpoofedIp),
        (
            "an outsider's, from its own address",
            2,
            advertise((mac(7), ALL_NODES.0), "fd00::7", ALL_NODES.1, foreign(Some(mac(7)))),
            SpoofedNeighbour,
        ),
        ("an outsider's packet", 2, udp((mac(7), mac(1)), SHARED, "10.0.0.1", (5, 6)), SpoofedIp),
        ("for another one's MAC address", 1, forged, SpoofedArp),
        (
            "the same in IPv6",
            1,
            advertise((mac(2), ALL_NODES.0), SHARED_V6, ALL_NODES.1, foreign(Some(mac(1)))),
            SpoofedNeighbour,
        ),
    ] {
        assert_eq!(guest(&mut switch, port, &frame).drop_reason(), Some(reason), "{name}");
        assert_eq!(claims(&mut switch), [], "{name}");
    }
}

#[test]
fn packets_to_a_shared_address_go_to_its_holder() {
    let to = |address: &str, from: &str| udp((mac(7), GATEWAY_MAC), from, address, (5, 6));
    let receiver = |tables: &Tables, frame: &[u8]| {
        let mut switch = switch_of(tables);
        let verdict = guest(&mut switch, 2, frame);
        match verdict.action {
            Action::Deliver { port, .. } => Ok((port.0, verdict.rewrite.map(|_| ()))),
            Action::Drop(reason) => Err(reason),
            other => panic!("{other:?}"),
        }
    };
    for (frame, holders) in [
        (to(SHARED, "10.0.0.7"), (|n| [n, None]) as fn(Option<u8>) -> [Option<u8>; 2]),
        (to(SHARED_V6, "fd00::7"), |n| [None, n]),
    ] {
        assert_eq!(receiver(&world(holders(Some(1))), &frame), Ok((0, Some(()))));
        assert_eq!(receiver(&world(holders(Some(2))), &frame), Ok((1, Some(()))));
        let mut switch = switch_of(&world(holders(Some(3))));
        let action = guest(&mut switch, 2, &frame).action;
        assert!(matches!(action, Action::Forward { peer: PeerId(1), remote, .. } if remote == mac(3)), "{action:?}");
        assert_eq!(receiver(&world(holders(None)), &frame), Err(DropReason::NoRoute));
    }
    // The same switch after the address has moved.
    let mut switch = switch_of(&world([Some(1), None]));
    let frame = to(SHARED, "10.0.0.7");
    for holder in [1, 2, 1] {
        switch.replace(&world([Some(holder), None])).unwrap();
        for _ in 0..3 {
            let action = guest(&mut switch, 2, &frame).action;
            assert!(matches!(action, Action::Deliver { port, .. } if port.0 + 1 == u32::from(holder)), "{action:?}");
        }
    }
}

#[test]
fn a_shared_address_resolves_to_the_gateway_except_for_its_next_holder() {
    for holder in [None, Some(1), Some(2), Some(3)] {
        let mut switch = switch_of(&world([holder, holder]));
        for (port, n, own, own_v6) in [(2, 7, "10.0.0.7", "fd00::7"), (1, 2, "10.0.0.2", "fd00::2")] {
            let question = arp((mac(n), Mac::BROADCAST), Request, (mac(n), own), (Mac([0; 6]), SHARED));
            assert_eq!(guest(&mut switch, port, &question), answered(), "port {port}");
            assert_eq!(switch.answer()[22..28], GATEWAY_MAC.0);
            let group = (Mac([0x33, 0x33, 0xff, 0, 1, 0]), "ff02::1:ff00:100");
            let question = solicit((mac(n), group.0), own_v6, group.1, 255, Some(mac(n)), SHARED_V6);
            assert_eq!(guest(&mut switch, port, &question), answered(), "port {port}");
            let answer = switch.answer().to_vec();
            assert_eq!(parse(&answer, answer.len()).unwrap().src_mac, GATEWAY_MAC);
        }
        // Duplicate address detection.
        let probe = arp((mac(2), Mac::BROADCAST), Request, (mac(2), "0.0.0.0"), (Mac([0; 6]), SHARED));
        assert_eq!(guest(&mut switch, 1, &probe).drop_reason(), Some(DropReason::OwnAddress));
        let group = (Mac([0x33, 0x33, 0xff, 0, 1, 0]), "ff02::1:ff00:100");
        let probe = solicit((mac(2), group.0), "::", group.1, 255, None, SHARED_V6);
        assert_eq!(guest(&mut switch, 1, &probe).drop_reason(), Some(DropReason::OwnAddress));
        assert_eq!(claims(&mut switch), [], "a request claims nothing");
    }
}

#[test]
fn rules_about_a_group_include_shared_addresses_held_by_members() {
    let from_group = GroupRule {
        remote: Remote::Group(GroupId(1)),
        ..GroupRule::new(bifrost_avs::Direction::Ingress, bifrost_avs::Pattern::default())
    };
    for (holder, expected) in [(Some(2), None), (Some(1), Some(DropReason::GroupIngress))] {
        let mut tables = world([holder, None]);
        tables.groups = vec![SecurityGroup::new(vec![from_group.clone()]), SecurityGroup::default()];
        tables.ports[1].groups = vec![GroupId(1)];
        tables.ports.iter_mut().find(|port| port.id.0 == 2).unwrap().groups = vec![GroupId(0)];
        let mut switch = switch_of(&tables);
        let frame = udp((mac(2), mac(7)), SHARED, "10.0.0.7", (5, 6));
        assert_eq!(guest(&mut switch, 1, &frame).drop_reason(), expected, "{holder:?} has it");
    }
}

#[test]
fn contradictions_are_refused() {
    let error = |change: fn(&mut Tables)| {
        let mut tables = world([Some(1), Some(1)]);
        change(&mut tables);
        Switch::build(&tables, 0).err()
    };
    let of = |text: &str| Some(BuildError::SharedAddress(ip(text)));
    assert_eq!(error(|_| ()), None);
    assert_eq!(error(|t| t.shared[1] = t.shared[0].clone()), of(SHARED));
    assert_eq!(error(|t| t.shared[0].address = ip("10.0.0.254")), of("10.0.0.254"));
    assert_eq!(error(|t| t.shared[0].holder = Some(mac(7))), of(SHARED));
    assert_eq!(error(|t| t.shared[0].vnics.push(mac(99))), of(SHARED));
    assert_eq!(error(|t| t.shared[0].address = ip("224.0.0.1")), Some(BuildError::Address(ip("224.0.0.1"))));
    assert_eq!(error(|t| t.vpcs[0].gateways.clear()), of(SHARED));
    let twice = BuildError::DuplicatePrefix { vni: vni(100), prefix: "10.0.0.2/32".parse().unwrap() };
    assert_eq!(error(|t| t.shared[0].address = ip("10.0.0.2")), Some(twice));
}
