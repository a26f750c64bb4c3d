//! NAT: guests get outside ends, and each reply reaches the right guest.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;
use std::net::IpAddr;

use bifrost_avs::{
    Action, BuildError, By, DropReason, FlowLimits, GATEWAY_MAC, GroupId, GroupRule, Nat, Pattern, PortId,
    SecurityGroup, Switch, Tables, Verdict, WorkerId, Workers,
};
use bifrost_nic::Offload;
use bifrost_wire::{Mac, arp};
use common::any::{SECOND, SYN};
use common::ends::*;
use common::outside::*;
use common::*;
use proptest::prelude::*;

const ACK: u8 = 0x10;

#[test]
fn guests_share_addresses_and_replies_find_them() {
    let mut switch = build(&world());
    for (own, remote, shared) in [("10.0.0.1", REMOTE, SHARED), ("fd00::1", REMOTE6, SHARED6)] {
        for tcp in [Some(SYN), None] {
            let sent = from_guest((own, 5001), (remote, 443), tcp);
            let out = leaves(&mut switch, 0, &sent).unwrap();
            let (source, destination) = ends(&out);
            assert_eq!((source.0, destination), (ip(shared), at(remote, 443)));
            assert!((2000..=2999).contains(&source.1) && source.1 % 2 == 1, "of the block, and of the same parity");
            assert_eq!(out[if shared == SHARED { 22 } else { 21 }], 63, "one hop");
            let back = answer_to(&out, outside(), tcp.map(|_| SYN | ACK));
            let (port, back) = comes(&mut switch, &back).unwrap();
            assert_eq!((port, ends(&back)), (0, (at(remote, 443), at(own, 5001))));
            assert_eq!((read(&back).src_mac, read(&back).dst_mac), (GATEWAY_MAC, mac(1)));
            // All destinations see the same outside end (endpoint-independent mapping; RFC 4787, REQ-1).
            let other = if shared == SHARED { "192.0.2.9" } else { "2001:db8:9::9" };
            let elsewhere = leaves(&mut switch, 0, &from_guest((own, 5001), (other, 80), tcp)).unwrap();
            assert_eq!(ends(&elsewhere).0, source);
        }
    }
    assert_eq!((switch.nat_counters().current, switch.connection_counters().current), (4, 8));
    assert_eq!(switch.nat_ports(PortId(UPLINK), ip(SHARED)), [1, 1, 0]);
}

#[test]
fn packets_of_a_translated_flow_use_its_record() {
    let tables = Tables { flows: FlowLimits { records: 64, vectors: false }, ..world() };
    let mut switch = build(&tables);
    let out = leaves(&mut switch, 0, &from_guest(("10.0.0.1", 5001), (REMOTE, 443), Some(SYN))).unwrap();
    for round in 0..3 {
        let out = leaves(&mut switch, 0, &from_guest(("10.0.0.1", 5001), (REMOTE, 443), Some(ACK))).unwrap();
        let back = answer_to(&out, outside(), Some(ACK));
        assert_eq!(ends(&comes(&mut switch, &back).unwrap().1).1, at("10.0.0.1", 5001));
        assert_eq!(switch.flow_counters().found_packets, 2 * round);
    }
    let _ = out;
}

#[test]
fn pings_are_mapped_by_identifier() {
    let mut switch = build(&world());
    for (own, remote, shared) in [("10.0.0.1", REMOTE, SHARED), ("fd00::1", REMOTE6, SHARED6)] {
        let sent = ping((mac(1), GATEWAY_MAC), own, remote, b"hello");
        let out = leaves(&mut switch, 0, &sent).unwrap();
        let p = read(&out);
        let l4 = usize::from(p.l4);
        assert_eq!((p.src_ip, p.dst_ip), (ip(shared), ip(remote)));
        let identifier = u16::from_be_bytes([out[l4 + 4], out[l4 + 5]]);
        assert!((2000..=2999).contains(&identifier));
        // The reply of the other end. Its checksum is correct if that of the request was.
        let mut back = ping(outside(), remote, shared, b"hello");
        let kind = if p.src_ip.is_ipv6() { 129 } else { 0 };
        let old = [back[l4], 0, back[l4 + 4], back[l4 + 5]];
        let new = [kind, 0, out[l4 + 4], out[l4 + 5]];
        let mut sum = u16::from_be_bytes([back[l4 + 2], back[l4 + 3]]);
        for at in [0, 2] {
            let word = |bytes: [u8; 4]| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
            sum = bifrost_wire::checksum::update_u16(sum, word(old), word(new));
        }
        (back[l4], back[l4 + 4], back[l4 + 5]) = (kind, out[l4 + 4], out[l4 + 5]);
        back[l4 + 2..l4 + 4].copy_from_slice(&sum.to_be_bytes());
        let (port, got) = comes(&mut switch, &back).unwrap();
        assert_eq!((port, read(&got).dst_ip), (0, ip(own)));
        assert_eq!(got[l4 + 4..l4 + 6], sent[l4 + 4..l4 + 6]);
        icmp_is_right(&out);
        icmp_is_right(&got);
        // The guest cannot be pinged at the outside address.
        let request = ping(outside(), remote, shared, b"hello");
        assert_eq!(comes(&mut switch, &request), Err(DropReason::NatNoMapping));
    }
}

fn icmp_is_right(frame: &[u8]) {
    let p = read(frame);
    let message = &frame[usize::from(p.l4)..p.end as usize];
    let pseudo = match (p.src_ip, p.dst_ip) {
        (IpAddr::V6(s), IpAddr::V6(d)) => bifrost_wire::checksum::pseudo_v6(s, d, 58, message.len() as u32),
        _ => 0,
    };
    assert_eq!(bifrost_wire::checksum::finish(pseudo + bifrost_wire::checksum::sum(message)), 0);
}

#[test]
fn tenants_with_the_same_addresses_stay_apart() {
    let mut switch = build(&world());
    let sent = from_guest(("10.0.0.1", 5001), (REMOTE, 443), None);
    let (first, second) = (leaves(&mut switch, 0, &sent).unwrap(), leaves(&mut switch, 5, &sent).unwrap());
    assert_ne!(ends(&first).0, ends(&second).0);
    for (out, port) in [(first, 0), (second, 5)] {
        assert_eq!(comes(&mut switch, &answer_to(&out, outside(), None)).unwrap().0, port);
    }
}

#[test]
fn any_outside_address_may_send_through_a_mapping() {
    let mut switch = build(&world());
    let (shared, stranger) = (SHARED, ("192.0.2.77", 9));
    let strange = |to: u16, tcp| frame(outside(), stranger, (shared, to), tcp);
    assert_eq!(comes(&mut switch, &strange(2001, None)), Err(DropReason::NatNoMapping));
    for tcp in [None, Some(SYN)] {
        let out = leaves(&mut switch, 0, &from_guest(("10.0.0.1", 5001), (REMOTE, 443), tcp)).unwrap();
        let port = ends(&out).0.1;
        // Not in the middle of a connection, however.
        if tcp.is_some() {
            assert_eq!(comes(&mut switch, &strange(port, Some(ACK))), Err(DropReason::NatNoMapping));
        }
        let (to, got) = comes(&mut switch, &strange(port, tcp)).unwrap();
        assert_eq!((to, ends(&got)), (0, (at(stranger.0, stranger.1), at("10.0.0.1", 5001))));
        let answer = from_guest(("10.0.0.1", 5001), stranger, tcp.map(|_| SYN | ACK));
        assert_eq!(ends(&leaves(&mut switch, 0, &answer).unwrap()), (at(shared, port), at(stranger.0, stranger.1)));
    }
}

#[test]
fn security_groups_filter_translated_packets() {
    let mut tables = world();
    // Guest 1 may begin any conversation, others may begin none with it.
    let rule = GroupRule::new(bifrost_avs::Direction::Egress, Pattern::default());
    tables.groups = vec![SecurityGroup::new(vec![rule])];
    tables.ports[0].groups = vec![GroupId(0)];
    let mut switch = build(&tables);
    let out = leaves(&mut switch, 0, &from_guest(("10.0.0.1", 5001), (REMOTE, 443), None)).unwrap();
    let stranger = frame(outside(), ("192.0.2.77", 9), (SHARED, ends(&out).0.1), None);
    assert_eq!(comes(&mut switch, &stranger), Err(DropReason::GroupIngress));
    assert_eq!(switch.connection_counters().current, 1, "what is refused leaves nothing");
    assert!(comes(&mut switch, &answer_to(&out, outside(), None)).is_ok());
    // A router on the way reports that the packet was too large.
    let told = error(outside(), "192.0.2.1", &out, 28);
    assert_eq!(comes(&mut switch, &told).unwrap().0, 0);
    let ask = ping((mac(1), GATEWAY_MAC), "10.0.0.1", REMOTE, b"x");
    let mut reply = leaves(&mut switch, 0, &ask).unwrap();
    let l4 = usize::from(read(&reply).l4);
    reply = [&ping(outside(), REMOTE, SHARED, b"x")[..l4], &[0, 0, 0, 0], &reply[l4 + 4..]].concat();
    assert_eq!(comes(&mut switch, &reply).unwrap().0, 0, "judged by the identifier that the guest has sent");
    // The forward accepts everybody, the security group does not.
    let syn = frame(outside(), (REMOTE, 7), (SHARED, 8080), Some(SYN));
    assert_eq!(comes(&mut switch, &syn), Err(DropReason::GroupIngress));
}

#[test]
fn a_floating_address_translates_any_packet() {
    let mut switch = build(&world());
    let own = (mac(2), GATEWAY_MAC);
    for (inside, floating, remote) in [("10.0.0.2", FLOATING, REMOTE), ("fd00::2", FLOATING6, REMOTE6)] {
        for tcp in [Some(SYN), Some(ACK), None] {
            let out = leaves(&mut switch, 1, &frame(own, (inside, 5001), (remote, 443), tcp)).unwrap();
            assert_eq!(ends(&out), (at(floating, 5001), at(remote, 443)));
            let (port, got) = comes(&mut switch, &frame(outside(), (remote, 9), (floating, 22), tcp)).unwrap();
            assert_eq!((port, ends(&got)), (1, (at(remote, 9), at(inside, 22))));
        }
        let gre = packet(own, inside, remote, 64, 47, b"anything");
        let out = leaves(&mut switch, 1, &gre).unwrap();
        assert_eq!((read(&out).src_ip, read(&out).dst_ip), (ip(floating), ip(remote)));
        let request = ping(outside(), remote, floating, b"hello");
        let (port, got) = comes(&mut switch, &request).unwrap();
        assert_eq!((port, read(&got).dst_ip), (1, ip(inside)));
        icmp_is_right(&got);
        icmp_is_right(&leaves(&mut switch, 1, &ping(own, inside, remote, b"hello")).unwrap());
        // Fragments are translated too: reassembled, they are the translated packet.
        let whole = frame(own, (inside, 5001), (remote, 443), None);
        let l4 = usize::from(read(&whole).l4);
        let pieces = pieces(&whole, 77, &[8]);
        let parts: Vec<_> = pieces.iter().map(|piece| leaves(&mut switch, 1, piece).unwrap()).collect();
        assert!(parts.iter().all(|part| read(part).src_ip == ip(floating)));
        let expected = leaves(&mut switch, 1, &whole).unwrap();
        let bodies: Vec<u8> = parts.iter().flat_map(|part| part[usize::from(read(part).l4)..].to_vec()).collect();
        assert_eq!(bodies, expected[l4..]);
    }
    assert_eq!(switch.connection_counters().current, 0, "nothing is remembered");
}

#[test]
fn a_forward_leads_to_a_guest() {
    let mut switch = build(&world());
    for (own, remote, shared) in [("10.0.0.1", REMOTE, SHARED), ("fd00::1", REMOTE6, SHARED6)] {
        let syn = frame(outside(), (remote, 9), (shared, 8080), Some(SYN));
        let (port, got) = comes(&mut switch, &syn).unwrap();
        assert_eq!((port, ends(&got)), (0, (at(remote, 9), at(own, 80))));
        let answer = from_guest((own, 80), (remote, 9), Some(SYN | ACK));
        assert_eq!(ends(&leaves(&mut switch, 0, &answer).unwrap()).0, at(shared, 8080));
        let datagram = frame(outside(), (remote, 9), (shared, 8080), None);
        assert_eq!(comes(&mut switch, &datagram), Err(DropReason::NatNoMapping));
    }
}

#[test]
fn guests_reach_each_other_at_outside_addresses() {
    let mut switch = build(&world());
    let there = |switch: &mut Switch, port, frame: &[u8]| {
        let verdict = guest(switch, port, frame);
        let Action::Deliver { port, worker: None } = verdict.action else { panic!("{verdict:?}") };
        let out = checked(frame, &verdict);
        (port.0, ends(&out), out)
    };
    // Guest 1 connects to guest 2 at its floating address, and appears with its outside address.
    let syn = from_guest(("10.0.0.1", 5001), (FLOATING, 443), Some(SYN));
    let (port, seen, out) = there(&mut switch, 0, &syn);
    assert_eq!((port, seen.0.0, seen.1), (1, ip(SHARED), at("10.0.0.2", 443)));
    assert_eq!((read(&out).src_mac, read(&out).dst_mac), (GATEWAY_MAC, mac(2)));
    let answer = answer_to(&out, (mac(2), GATEWAY_MAC), Some(SYN | ACK));
    let (port, seen, _) = there(&mut switch, 1, &answer);
    assert_eq!((port, seen), (0, (at(FLOATING, 443), at("10.0.0.1", 5001))));
    // Guest 2 connects to the port that is forwarded to guest 1.
    let syn = frame((mac(2), GATEWAY_MAC), ("10.0.0.2", 6001), (SHARED, 8080), Some(SYN));
    let (port, seen, out) = there(&mut switch, 1, &syn);
    assert_eq!((port, seen), (0, (at(FLOATING, 6001), at("10.0.0.1", 80))));
    let answer = answer_to(&out, (mac(1), GATEWAY_MAC), Some(SYN | ACK));
    let (port, seen, _) = there(&mut switch, 0, &answer);
    assert_eq!((port, seen), (1, (at(SHARED, 8080), at("10.0.0.2", 6001))));
    // Another tenant's guest connects to it and gets a reply, although both share one address.
    let syn = from_guest(("10.0.0.1", 7001), (SHARED, 8080), Some(SYN));
    let (port, seen, out) = there(&mut switch, 5, &syn);
    assert_eq!((port, seen.0.0, seen.1), (0, ip(SHARED), at("10.0.0.1", 80)));
    let (port, seen, _) = there(&mut switch, 0, &answer_to(&out, (mac(1), GATEWAY_MAC), Some(SYN | ACK)));
    assert_eq!((port, seen), (5, (at(SHARED, 8080), at("10.0.0.1", 7001))));
    // Pings work as well.
    let verdict = guest(&mut switch, 0, &ping((mac(1), GATEWAY_MAC), "10.0.0.1", FLOATING, b"x"));
    assert_eq!(verdict.action, Action::Deliver { port: PortId(1), worker: None });
    // To an end without a mapping.
    let nobody = from_guest(("10.0.0.1", 5001), (SHARED, 2999), Some(SYN));
    assert_eq!(guest(&mut switch, 0, &nobody), Verdict::drop(DropReason::NatNoMapping));
}

#[test]
fn icmp_errors_are_translated_for_each_end() {
    let mut switch = build(&world());
    for (own, remote, shared, router) in
        [("10.0.0.1", REMOTE, SHARED, "192.0.2.1"), ("fd00::1", REMOTE6, SHARED6, "2001:db8:1::1")]
    {
        let out = leaves(&mut switch, 0, &from_guest((own, 5001), (remote, 443), None)).unwrap();
        // From a router on the way.
        let (port, got) = comes(&mut switch, &error(outside(), router, &out, 128)).unwrap();
        assert_eq!((port, read(&got).src_ip, read(&got).dst_ip), (0, ip(router), ip(own)));
        assert_eq!(ends(&quoted(&got)), (at(own, 5001), at(remote, 443)));
        // From the other end itself.
        let (_, got) = comes(&mut switch, &error(outside(), remote, &out, 128)).unwrap();
        assert_eq!(read(&got).src_ip, ip(remote));
        // From the guest, about a reply.
        let (_, answer) = comes(&mut switch, &answer_to(&out, outside(), None)).unwrap();
        let told = error((mac(1), GATEWAY_MAC), own, &answer, 128);
        let told = leaves(&mut switch, 0, &told).unwrap();
        assert_eq!((read(&told).src_ip, read(&told).dst_ip), (ip(shared), ip(remote)));
        assert_eq!(ends(&quoted(&told)), (at(remote, 443), ends(&out).0));
        // About a packet that no guest has sent.
        let other = frame(outside(), (shared, 2999), (remote, 443), None);
        assert_eq!(comes(&mut switch, &error(outside(), router, &other, 128)), Err(DropReason::NatNoMapping));
    }
    for (own, remote, floating, router) in
        [("10.0.0.2", REMOTE, FLOATING, "192.0.2.1"), ("fd00::2", REMOTE6, FLOATING6, "2001:db8:1::1")]
    {
        let out = leaves(&mut switch, 1, &frame((mac(2), GATEWAY_MAC), (own, 5001), (remote, 443), None)).unwrap();
        let (port, got) = comes(&mut switch, &error(outside(), router, &out, 128)).unwrap();
        assert_eq!((port, read(&got).src_ip, read(&got).dst_ip), (1, ip(router), ip(own)));
        assert_eq!(ends(&quoted(&got)), (at(own, 5001), at(remote, 443)));
        let (_, came) = comes(&mut switch, &frame(outside(), (remote, 9), (floating, 22), None)).unwrap();
        let told = leaves(&mut switch, 1, &error((mac(2), GATEWAY_MAC), own, &came, 128)).unwrap();
        assert_eq!((read(&told).src_ip, ends(&quoted(&told))), (ip(floating), (at(remote, 9), at(floating, 22))));
    }
}

#[test]
fn an_error_about_a_ping_is_translated() {
    let mut switch = build(&world());
    let sent = ping((mac(1), GATEWAY_MAC), "10.0.0.1", REMOTE, b"hello");
    let out = leaves(&mut switch, 0, &sent).unwrap();
    let (port, got) = comes(&mut switch, &error(outside(), "192.0.2.1", &out, 128)).unwrap();
    let inner = quoted(&got);
    assert_eq!((port, read(&inner).src_ip), (0, ip("10.0.0.1")));
    assert_eq!(inner[34..], sent[34..], "the whole message, as it was sent");
}

#[test]
fn ports_run_out_for_one_guest_and_for_all() {
    let mut tables = world();
    (tables.nat.sources[0].ports, tables.nat.sources[0].per_guest) = ((2000, 2009), 4);
    (tables.nat.sources[1].ports, tables.nat.sources[1].per_guest) = ((2000, 2009), 100);
    let mut switch = build(&tables);
    let mut send = |port, n: u16| leaves(&mut switch, port, &from_guest(("10.0.0.1", 5000 + n), (REMOTE, 443), None));
    let results: Vec<_> = (0..6).map(|n| send(0, n).map(|out| ends(&out).0.1)).collect();
    assert!(results[..4].iter().all(Result::is_ok));
    assert!(results[4..].iter().all(|result| *result == Err(DropReason::NatPortsFull)));
    let others: Vec<_> = (0..8).map(|n| send(5, n).map(|out| ends(&out).0.1)).collect();
    assert_eq!(others.iter().filter(|result| result.is_ok()).count(), 6);
    let mut given: Vec<u16> = results.into_iter().chain(others).filter_map(Result::ok).collect();
    given.sort_unstable();
    assert_eq!(given, (2000..=2009).collect::<Vec<_>>());
    // Existing connections keep their ports, and other guests get ports as time passes.
    assert!(send(0, 1).is_ok());
    assert_eq!(switch.port_counters(PortId(0)).unwrap().dropped.packets(DropReason::NatPortsFull), 2);
    (1..400).for_each(|second| switch.advance((1000 + second) * SECOND));
    assert_eq!((switch.nat_counters().current, switch.connection_counters().current), (0, 0));
    assert!(leaves(&mut switch, 0, &from_guest(("10.0.0.1", 5005), (REMOTE, 443), None)).is_ok());
}

#[test]
fn outside_packets_cannot_use_inside_addresses() {
    let mut switch = build(&world());
    let refused = [
        (frame(outside(), ("10.0.0.1", 1), (FLOATING, 2), None), DropReason::SpoofedIp),
        (frame(outside(), ("10.0.0.254", 1), (FLOATING, 2), None), DropReason::SpoofedIp),
        (frame(outside(), ("10.1.0.9", 1), (FLOATING, 2), None), DropReason::SpoofedIp),
        (frame(outside(), (SHARED, 1), (FLOATING, 2), None), DropReason::SpoofedIp),
        (frame(outside(), (REMOTE, 1), ("10.0.0.2", 2), None), DropReason::NatNoMapping),
        (frame((KERNEL, mac(1)), (REMOTE, 1), (FLOATING, 2), None), DropReason::UnknownMac),
        (packet(outside(), REMOTE, FLOATING, 1, 47, b"x"), DropReason::TtlExpired),
        (packet(outside(), REMOTE, SHARED, 64, 47, b"x"), DropReason::NatProtocol),
        (frame((KERNEL, Mac([0xff; 6])), (REMOTE, 1), (FLOATING, 2), None), DropReason::Broadcast),
    ];
    for (n, (frame, reason)) in refused.into_iter().enumerate() {
        assert_eq!(comes(&mut switch, &frame), Err(reason), "case {n}");
    }
    let whole = frame(outside(), (REMOTE, 1), (SHARED, 8080), Some(SYN));
    for piece in pieces(&whole, 7, &[24]) {
        assert_eq!(comes(&mut switch, &piece), Err(DropReason::NatFragment));
    }
    let gre = packet((mac(1), GATEWAY_MAC), "10.0.0.1", REMOTE, 64, 47, b"x");
    assert_eq!(leaves(&mut switch, 0, &gre), Err(DropReason::NatProtocol));
    assert_eq!(switch.connection_counters().current, 0);
}

#[test]
fn outside_addresses_are_resolved_for_the_uplink() {
    let mut switch = build(&world());
    let asked = |target| {
        let broadcast = (KERNEL, Mac([0xff; 6]));
        arp(broadcast, arp::Operation::Request, (KERNEL, "203.0.113.1"), (Mac::default(), target))
    };
    for (target, expected) in [(SHARED, true), (FLOATING, true), ("203.0.113.1", false), ("203.0.113.99", false)] {
        let verdict = guest(&mut switch, UPLINK, &asked(target));
        assert_eq!(matches!(verdict.action, Action::Answer { .. }), expected, "{target}: {verdict:?}");
        if expected {
            let reply = arp::Packet::parse(&switch.answer()[14..]).unwrap();
            assert_eq!((reply.sender_mac, reply.sender_ip.to_string()), (GATEWAY_MAC, target.to_owned()));
        }
    }
    let group = "ff02::1:ff00:20";
    let solicitation =
        solicit((KERNEL, Mac([0x33, 0x33, 0xff, 0, 0, 0x20])), "fe80::9", group, 255, Some(KERNEL), FLOATING6);
    assert!(matches!(guest(&mut switch, UPLINK, &solicitation).action, Action::Answer { .. }));
    assert_eq!(read(switch.answer()).src_mac, GATEWAY_MAC);
}

#[test]
fn a_reload_ends_connections_that_depend_on_removed_configuration() {
    let tables = Tables { flows: FlowLimits { records: 64, vectors: true }, ..world() };
    let mut switch = build(&tables);
    let first = |switch: &mut Switch, port: u32, tcp| {
        leaves(switch, port, &from_guest(("10.0.0.1", 5001), (REMOTE, 443), tcp)).map(|out| ends(&out).0)
    };
    let (one, other) = (first(&mut switch, 0, Some(SYN)).unwrap(), first(&mut switch, 5, Some(SYN)).unwrap());
    assert_eq!((first(&mut switch, 0, Some(ACK)), first(&mut switch, 5, Some(ACK))), (Ok(one), Ok(other)));
    let mut next = tables.clone();
    next.nat.sources[0].addresses[0] = ip("203.0.113.11");
    switch.replace(&next).unwrap();
    assert_eq!(first(&mut switch, 5, Some(ACK)), Ok(other), "nothing has changed for it");
    let back = frame(outside(), (REMOTE, 443), (&one.0.to_string(), one.1), Some(ACK));
    assert_eq!(comes(&mut switch, &back), Err(DropReason::NatNoMapping));
    // The connection continues from another address, where the other end does not know it.
    let moved = first(&mut switch, 0, Some(ACK)).unwrap();
    assert_eq!(moved.0, ip("203.0.113.11"));
    // Another guest gets the port's number.
    next.ports[0].mac = mac(77);
    switch.replace(&next).unwrap();
    let stranger = frame(outside(), ("192.0.2.77", 443), ("203.0.113.11", moved.1), Some(SYN));
    assert_eq!(comes(&mut switch, &stranger), Err(DropReason::NatNoMapping));
    // NAT is removed: everything ends.
    next.nat = Nat::default();
    switch.replace(&next).unwrap();
    assert_eq!(first(&mut switch, 5, Some(ACK)), Err(DropReason::NoRoute));
}

#[test]
fn the_uplinks_worker_translates() {
    let mut tables = world();
    tables.ports.iter_mut().for_each(|port| port.home = Some(WorkerId(u16::from(port.id.0 == UPLINK))));
    let mut workers =
        [0, 1].map(|own| build(&Tables { workers: Workers { own: WorkerId(own), count: 2 }, ..tables.clone() }));
    let sent = from_guest(("10.0.0.1", 5001), (REMOTE, 443), Some(SYN));
    let verdict = guest(&mut workers[0], 0, &sent);
    assert_eq!(verdict.action, Action::Deliver { port: PortId(UPLINK), worker: Some(WorkerId(1)) });
    let handed = rewritten(&sent, &verdict);
    let there = *workers[1].from_worker(PortId(0), PortId(UPLINK), &handed, &read(&handed));
    assert_eq!(there.action, Action::Deliver { port: PortId(UPLINK), worker: None });
    let out = rewritten(&handed, &there);
    assert_eq!((ends(&out).0.0, read(&out).dst_mac), (ip(SHARED), KERNEL));
    let answer = answer_to(&out, outside(), Some(SYN | ACK));
    let back = guest(&mut workers[1], UPLINK, &answer);
    assert_eq!(back.action, Action::Deliver { port: PortId(0), worker: Some(WorkerId(0)) });
    let back = rewritten(&answer, &back);
    assert_eq!(ends(&back).1, at("10.0.0.1", 5001));
    assert!(workers[0].from_worker(PortId(UPLINK), PortId(0), &back, &read(&back)).passes());
    // To a guest of this host, through the outside.
    let call = from_guest(("10.0.0.1", 5001), (FLOATING, 443), Some(SYN));
    let handed = rewritten(&call, &guest(&mut workers[0], 0, &call));
    let there = *workers[1].from_worker(PortId(0), PortId(UPLINK), &handed, &read(&handed));
    assert_eq!(there.action, Action::Deliver { port: PortId(1), worker: Some(WorkerId(0)) });
    assert_eq!(ends(&rewritten(&handed, &there)).1, at("10.0.0.2", 443));
}

#[test]
fn path_mtu_errors_to_the_outside_come_from_the_outside_address() {
    let mut tables = world();
    tables.ports[1].mtu = 600;
    let mut switch = build(&tables);
    let large = packet(outside(), REMOTE, FLOATING, 64, 47, &[0; 700]);
    assert_eq!(guest(&mut switch, UPLINK, &large).action, Action::Answer { vni: vni(OUTSIDE) });
    let told = read(switch.answer());
    assert_eq!((told.src_ip, told.dst_ip, told.dst_mac), (ip(FLOATING), ip(REMOTE), KERNEL));
    let quote = &switch.answer()[usize::from(told.l4) + 8..];
    assert_eq!(quote[16..20], [203, 0, 113, 20], "what it has sent");
}

#[test]
fn a_trace_reports_the_outside_end_and_changes_nothing() {
    let mut switch = build(&world());
    let syn = from_guest(("10.0.0.1", 5001), (REMOTE, 443), Some(SYN));
    for is_new in [true, false] {
        let before = format!("{switch:?}");
        let trace = switch.trace_from_guest(PortId(0), &syn, syn.len(), Offload::default(), &read(&syn));
        assert_eq!(before, format!("{switch:?}"));
        let out = leaves(&mut switch, 0, &syn).unwrap();
        let found = trace.checks.iter().find_map(|check| match check.by {
            By::Nat { outside, is_new } => Some((outside, is_new)),
            _ => None,
        });
        assert_eq!(found, Some((ends(&out).0, is_new)));
    }
}

#[test]
fn contradictory_tables_are_rejected() {
    let with = |change: fn(&mut Tables)| {
        let mut tables = world();
        change(&mut tables);
        Switch::build(&tables, 1).map(|_| ()).unwrap_err()
    };
    assert_eq!(with(|t| t.nat.uplinks.clear()), BuildError::UnknownUplink(PortId(UPLINK)));
    assert_eq!(with(|t| t.nat.floating[0].outside = ip(SHARED)), BuildError::OutsideAddress(ip(SHARED)));
    assert_eq!(with(|t| t.nat.floating[1].inside = ip("10.0.0.1")), BuildError::OutsideAddress(ip(FLOATING6)));
    assert_eq!(with(|t| t.nat.forwards.push(t.nat.forwards[0])), BuildError::OutsideAddress(ip(SHARED)));
    let twice = with(|t| {
        let route = bifrost_avs::Route { prefix: "0.0.0.0/0".parse().unwrap(), ..t.routes[0].clone() };
        t.routes.push(route);
    });
    assert_eq!(twice, BuildError::DuplicatePrefix { vni: vni(100), prefix: "0.0.0.0/0".parse().unwrap() });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever guests send: outside ends and inside ends are mapped one to one, and every reply reaches its guest,
    /// unchanged except for its ends.
    #[test]
    fn outside_ends_and_inside_ends_are_one_to_one(
        packets in proptest::collection::vec((any::<bool>(), 0u16..40, 0u16..4, any::<bool>(), 0u64..30), 1..120)
    ) {
        let mut switch = build(&Tables { flows: FlowLimits { records: 64, vectors: true }, ..world() });
        let (mut inside_of, mut outside_of) = (BTreeMap::new(), BTreeMap::new());
        let mut now = 1000;
        for (other, source, remote, udp, wait) in packets {
            now += wait;
            switch.advance(now * SECOND);
            // Mappings may have expired: forget them.
            if wait > 0 {
                (inside_of, outside_of) = (BTreeMap::new(), BTreeMap::new());
            }
            let (port, tcp) = (if other { 5 } else { 0 }, if udp { None } else { Some(SYN) });
            let sent = from_guest(("10.0.0.1", 1000 + source), (&format!("192.0.2.{remote}"), 443), tcp);
            let out = leaves(&mut switch, port, &sent).unwrap();
            let (inside, seen) = ((port, source, udp), (ends(&out).0, udp));
            prop_assert_eq!(*inside_of.entry(seen).or_insert(inside), inside);
            prop_assert_eq!(*outside_of.entry(inside).or_insert(seen), seen);
            let back = answer_to(&out, outside(), tcp.map(|_| SYN | ACK));
            let (to, got) = comes(&mut switch, &back).unwrap();
            prop_assert_eq!((to, ends(&got).1, ends(&got).0), (port, ends(&sent).0, ends(&sent).1));
            prop_assert!(got.ends_with(b"hello") && got.len() == back.len());
        }
    }
}

/// The state that a switch carries over, as bytes.
fn memory(switch: &mut Switch) -> Vec<u8> {
    let mut bytes = Vec::new();
    switch.carry_memory(&mut bytes);
    bytes
}

#[test]
fn another_switch_continues_translated_connections() {
    let mut first = build(&world());
    let mut sent = Vec::new();
    for (own, remote) in [("10.0.0.1", REMOTE), ("fd00::1", REMOTE6)] {
        for (port, tcp) in [(5001, Some(SYN)), (5002, None), (5003, Some(SYN))] {
            let frame = from_guest((own, port), (remote, 443), tcp);
            let out = leaves(&mut first, 0, &frame).unwrap();
            sent.push((own, port, remote, tcp, out));
        }
    }
    let forward = frame(outside(), (REMOTE, 7000), (SHARED, 8080), Some(SYN));
    assert_eq!(comes(&mut first, &forward).unwrap().0, 0);
    let bytes = memory(&mut first);
    let mut second = Switch::build(&world(), 2).unwrap();
    let taken = second.take_over_memory(1010 * SECOND, &bytes).unwrap();
    assert_eq!((taken.mappings, taken.left_out), (6, 0));
    assert_eq!(taken.sessions, first.session_counters().current + first.connection_counters().current);
    assert_eq!(second.nat_ports(PortId(UPLINK), ip(SHARED)), first.nat_ports(PortId(UPLINK), ip(SHARED)));
    for (own, port, remote, tcp, out) in &sent {
        let flags = tcp.map(|_| SYN | ACK);
        assert_eq!(comes(&mut second, &answer_to(out, outside(), flags)).unwrap().0, 0, "{own} {port}");
        let next = from_guest((own, *port), (remote, 443), tcp.map(|_| ACK));
        assert_eq!(ends(&leaves(&mut second, 0, &next).unwrap()), ends(out), "{own} {port}");
    }
    let next = frame(outside(), (REMOTE, 7000), (SHARED, 8080), Some(ACK));
    assert_eq!(comes(&mut second, &next).unwrap().0, 0);
    // A new conversation gets an unused outside end.
    let out = leaves(&mut second, 0, &from_guest(("10.0.0.1", 5009), (REMOTE, 443), None)).unwrap();
    assert!(sent.iter().all(|(.., other)| ends(other).0 != ends(&out).0));
    // Carried over once more, the state is the same.
    let (again, mut third) = (memory(&mut second), Switch::build(&world(), 3).unwrap());
    third.take_over_memory(1010 * SECOND, &again).unwrap();
    assert_eq!(memory(&mut third).len(), again.len());
    // Everything expires in time.
    third.advance(20_000 * SECOND);
    (20_001..20_400).for_each(|s| third.advance(s * SECOND));
    assert_eq!((third.connection_counters().current, third.nat_counters().current), (0, 0));
}

#[test]
fn memory_of_a_later_release_is_read_and_damaged_memory_is_refused() {
    let mut first = build(&world());
    leaves(&mut first, 0, &from_guest(("10.0.0.1", 5001), (REMOTE, 443), Some(SYN))).unwrap();
    let bytes = memory(&mut first);
    // A later release has longer records, and another section.
    let mut later = vec![9, 0, 1, 0, 3, 0, 0, 0, 1, 2, 3];
    let mut rest = &bytes[..];
    while let Some((head, behind)) = rest.split_first_chunk::<8>() {
        let len = u16::from_le_bytes([head[2], head[3]]);
        let count = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        later.extend(&head[..2]);
        later.extend((len + 3).to_le_bytes());
        later.extend(&head[4..]);
        for record in behind[..count * usize::from(len)].chunks(usize::from(len)) {
            later.extend(record);
            later.extend([7; 3]);
        }
        rest = &behind[count * usize::from(len)..];
    }
    let mut second = Switch::build(&world(), 2).unwrap();
    let taken = second.take_over_memory(1010 * SECOND, &later).unwrap();
    assert_eq!((taken.mappings, taken.left_out, second.connection_counters().current), (1, 0, 1));
    for len in (0..bytes.len()).filter(|len| *len > 0) {
        let mut other = Switch::build(&world(), 2).unwrap();
        let result = other.take_over_memory(1010 * SECOND, &bytes[..len]);
        // The bytes end between two sections, or are rejected.
        assert!(result.is_err() || [56, 64].contains(&len), "{len} bytes: {result:?}");
    }
}

proptest! {
    /// Whatever is damaged: no panic, no number beyond its limits, and the switch continues to work.
    #[test]
    fn damaged_memory_does_no_harm(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..12),
        cut in any::<Option<proptest::sample::Index>>(),
    ) {
        let mut first = build(&world());
        for port in 0..4 {
            leaves(&mut first, 0, &from_guest(("10.0.0.1", 5000 + port), (REMOTE, 443), Some(SYN))).unwrap();
            leaves(&mut first, 0, &from_guest(("fd00::1", 5000 + port), (REMOTE6, 443), None)).unwrap();
        }
        let mut bytes = memory(&mut first);
        for (at, to) in &changes {
            let at = at.index(bytes.len());
            bytes[at] = *to;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let mut second = Switch::build(&world(), 2).unwrap();
        let _ = second.take_over_memory(1010 * SECOND, &bytes);
        prop_assert!(second.connection_counters().current <= 8 && second.nat_counters().current <= 8);
        for port in 0..8 {
            let _ = leaves(&mut second, 0, &from_guest(("10.0.0.1", 5000 + port), (REMOTE, 443), Some(ACK)));
        }
        (1011..1400).for_each(|s| second.advance(s * SECOND));
        second.advance(20_000 * SECOND);
        (20_001..20_400).for_each(|s| second.advance(s * SECOND));
        prop_assert_eq!((second.connection_counters().current, second.nat_counters().current), (0, 0));
    }
}
