//! Address resolution, which ACLs and security groups let pass: nothing else may pass this way.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use bifrost_avs::{
    AclRule, Action, Direction, DropReason, GATEWAY_MAC, GroupId, Pattern, PortId, SecurityGroup, Switch, Tables,
    Verdict,
};
use bifrost_wire::arp::Operation::{Reply, Request};
use bifrost_wire::icmp::v6::Advertisement;
use bifrost_wire::{Mac, ethernet::ethertype};
use common::*;

/// Rules deny everything, in both directions and at both guests.
fn closed() -> Tables {
    let mut tables = tables();
    let deny = |direction| AclRule { direction, allow: false, pattern: Pattern::default(), log: None };
    tables.vpcs[0].acl = vec![deny(Direction::Ingress), deny(Direction::Egress)];
    tables.groups = vec![SecurityGroup::default()];
    tables.ports[0].groups = vec![GroupId(0)];
    tables.ports[1].groups = vec![GroupId(0)];
    tables
}

fn switch_of(tables: &Tables) -> Switch {
    let mut switch = Switch::build(tables, 1).unwrap();
    switch.advance(1000 << 30);
    switch
}

const ME: Mac = mac(1);
const GROUP: Mac = Mac([0x33, 0x33, 0xff, 0, 0, 3]);

/// An ICMPv6 message of guest 1 with this hop limit and `len` bytes.
fn message(to: (Mac, &str), kind: u8, code: u8, hop_limit: u8, len: usize) -> Vec<u8> {
    let mut body = vec![0; len];
    (body[0], body[1]) = (kind, code);
    packet((ME, to.0), "fd00::1", to.1, hop_limit, 58, &body)
}

fn advertisement(to: (Mac, &str)) -> Vec<u8> {
    let a = Advertisement {
        router: false,
        solicited: true,
        overrides: true,
        target: v6_addr("fd00::1"),
        target_mac: Some(ME),
    };
    advertise((ME, to.0), "fd00::1", to.1, a)
}

/// The frame with more bytes at its end, as part of the message or as padding.
fn longer(mut frame: Vec<u8>, by: usize) -> Vec<u8> {
    frame.resize(frame.len() + by, 0);
    if frame[12..14] == ethertype::IPV6.to_be_bytes() {
        let len = (frame.len() - 54) as u16;
        frame[18..20].copy_from_slice(&len.to_be_bytes());
        // One option per 8 bytes.
        for at in (86..frame.len()).step_by(8) {
            frame[at..at + 2].copy_from_slice(&[14, 1]);
        }
    }
    frame
}

#[test]
fn only_short_replies_to_other_hosts_bypass_rules() {
    let (there, neighbour) = ((mac(3), "fd00::3"), (mac(2), "fd00::2"));
    let remote = (mac(3), "fd00::3");
    let arp_reply = |to: Mac, target| arp((ME, to), Reply, (ME, "10.0.0.1"), (to, target));
    let passes = Ok(());
    let refused = |reason| Err(reason);
    let cases: Vec<(&str, Vec<u8>, Result<(), DropReason>)> = vec![
        ("a solicitation of routers with 1000 bytes", message(there, 133, 0, 64, 1008), refused(DropReason::Acl)),
        ("the same to a neighbour", message(neighbour, 133, 0, 255, 1008), refused(DropReason::Acl)),
        ("the same, routed", message((GATEWAY_MAC, "fd00::3"), 133, 0, 64, 1008), refused(DropReason::Acl)),
        ("an advertisement of routers", message(there, 134, 0, 255, 16), refused(DropReason::SpoofedNeighbour)),
        ("with another code", message(neighbour, 134, 1, 255, 16), refused(DropReason::SpoofedNeighbour)),
        ("a redirect", message(there, 137, 0, 255, 40), refused(DropReason::SpoofedNeighbour)),
        ("a redirect with another code", message(neighbour, 137, 7, 255, 40), refused(DropReason::SpoofedNeighbour)),
        ("a solicitation with another code", message(there, 135, 1, 255, 100), refused(DropReason::MalformedNeighbour)),
        (
            "an advertisement with another code",
            message(there, 136, 1, 255, 100),
            refused(DropReason::MalformedNeighbour),
        ),
        ("an advertisement", advertisement(remote), passes),
        ("to a neighbour, who was answered", advertisement(neighbour), refused(DropReason::OwnAddress)),
        ("with a nonce", longer(advertisement(remote), 16), passes),
        ("with more", longer(advertisement(remote), 24), refused(DropReason::MalformedNeighbour)),
        ("with 1000 bytes", longer(advertisement(remote), 1000), refused(DropReason::MalformedNeighbour)),
        ("through the gateway", advertisement((GATEWAY_MAC, "fd00::3")), refused(DropReason::UnknownMac)),
        ("ARP's answer", arp_reply(mac(3), "10.0.0.3"), passes),
        ("in a small frame", longer(arp_reply(mac(3), "10.0.0.3"), 18), passes),
        ("with more", longer(arp_reply(mac(3), "10.0.0.3"), 19), refused(DropReason::MalformedNeighbour)),
        ("to a neighbour, who was answered", arp_reply(mac(2), "10.0.0.2"), refused(DropReason::OwnAddress)),
        ("a ping", ping((ME, mac(3)), "fd00::1", "fd00::3", b"x"), refused(DropReason::Acl)),
    ];
    for (name, frame, expected) in cases {
        let got = match guest(&mut switch_of(&closed()), 0, &frame).action {
            Action::Drop(reason) => Err(reason),
            Action::Forward { .. } => Ok(()),
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(got, expected, "{name}");
    }
    // With security groups only.
    let mut tables = closed();
    tables.vpcs[0].acl.clear();
    let frame = message(neighbour, 133, 0, 255, 1008);
    assert_eq!(guest(&mut switch_of(&tables), 0, &frame), Verdict::drop(DropReason::GroupIngress));
}

/// Even without any rules, because guests trust these messages.
#[test]
fn fragmented_neighbour_discovery_does_not_pass() {
    for (kind, reason) in [
        (133, DropReason::MalformedNeighbour),
        (134, DropReason::SpoofedNeighbour),
        (135, DropReason::MalformedNeighbour),
        (136, DropReason::MalformedNeighbour),
        (137, DropReason::SpoofedNeighbour),
    ] {
        let whole = message((mac(2), "fd00::2"), kind, 0, 255, 64);
        let first = pieces(&whole, 7, &[32]).remove(0);
        assert_eq!(guest(&mut switch(), 0, &first), Verdict::drop(reason), "{kind}");
        // As a peer without these checks might send it.
        let mut from_peer = first;
        from_peer[..12].copy_from_slice(&[mac(1).0, mac(3).0].concat());
        (from_peer[14 + 23], from_peer[14 + 39]) = (3, 1);
        assert_eq!(underlay(&mut switch(), 100, 1, &from_peer), Err(reason), "{kind}");
    }
}

#[test]
fn short_requests_of_plain_vxlan_hosts_pass() {
    let ask = |len| longer(solicit((mac(3), GROUP), "fd00::3", "ff02::1:ff00:1", 255, Some(mac(3)), "fd00::1"), len);
    let arp = |len| longer(arp((mac(3), Mac::BROADCAST), Request, (mac(3), "10.0.0.3"), (Mac::ZERO, "10.0.0.1")), len);
    let to_another = solicit((mac(3), mac(1)), "fd00::3", "fd00::2", 255, Some(mac(3)), "fd00::1");
    let cases = [
        ("a solicitation", ask(0), Ok(PortId(0))),
        ("with a nonce", ask(8), Ok(PortId(0))),
        ("with 1000 bytes", ask(1000), Err(DropReason::MalformedNeighbour)),
        ("to another address", to_another, Err(DropReason::MalformedNeighbour)),
        ("ARP", arp(18), Ok(PortId(0))),
        ("ARP with 1000 bytes", arp(1000), Err(DropReason::MalformedNeighbour)),
    ];
    for (name, frame, expected) in cases {
        assert_eq!(underlay(&mut switch_of(&closed()), 100, 1, &frame), expected, "{name}");
    }
}

#[test]
fn frames_that_rules_cannot_read_do_not_pass() {
    let tcp = tcp((ME, mac(3)), "10.0.0.1", "10.0.0.3");
    let tagged = |tags: &[u8]| {
        let mut frame = tcp.clone();
        frame.splice(12..12, tags.iter().copied());
        frame
    };
    let cases = [
        ("802.1Q", tagged(&[0x81, 0, 0, 5]), DropReason::Vlan),
        ("802.1Q, priority alone", tagged(&[0x81, 0, 0, 0]), DropReason::Vlan),
        ("802.1ad", tagged(&[0x88, 0xa8, 0, 5, 0x81, 0, 0, 5]), DropReason::Vlan),
        ("three tags", tagged(&[0x81, 0, 0, 5, 0x81, 0, 0, 5, 0x81, 0, 0, 5]), DropReason::Vlan),
        ("QinQ of old", tagged(&[0x91, 0, 0, 5]), DropReason::EtherType),
        ("MPLS", tagged(&[0x88, 0x47, 0, 0, 1, 64]), DropReason::EtherType),
        ("PPPoE", tagged(&[0x88, 0x64, 0x11, 0, 0, 1, 0, 42, 0, 0x21]), DropReason::EtherType),
        ("802.3 with LLC", tagged(&[0, 46, 0xaa, 0xaa, 3, 0, 0, 0]), DropReason::EtherType),
        ("another", tagged(&[0x88, 0xb5]), DropReason::EtherType),
    ];
    for (name, frame, reason) in cases {
        assert_eq!(guest(&mut switch(), 0, &frame), Verdict::drop(reason), "{name}");
        let mut from_peer = frame;
        from_peer[..12].copy_from_slice(&[mac(1).0, mac(3).0].concat());
        assert_eq!(underlay(&mut switch(), 100, 1, &from_peer), Err(reason), "{name}");
    }
}
