//! Decisions about frames from guests.
#![allow(clippy::unwrap_used)]

mod common;

use bifrost_avs::{Action, DropReason, GATEWAY_MAC, Ordering, PeerId, PortId, Verdict};
use bifrost_nic::{Checksum, Offload, parse, transport_checksum};
use bifrost_wire::Mac;
use bifrost_wire::arp::Operation::{Reply, Request};
use bifrost_wire::icmp::v6::{self, Advertisement, Message};
use bifrost_wire::{arp, ipv4};
use common::*;

const ALL: Mac = Mac::BROADCAST;
const GROUP: Mac = Mac([0x33, 0x33, 0xff, 0, 0, 3]);
const ME: Mac = mac(1);

fn remote(n: u32, peer: u32, remote: u8, reliable: bool, ordering: Ordering) -> Verdict {
    let (vni, peer, remote) = (vni(n), PeerId(peer), mac(remote));
    Verdict::unchanged(Action::Forward { vni, peer, local: ME, remote, reliable, ordering })
}

fn drop(reason: DropReason) -> Verdict {
    Verdict::drop(reason)
}

#[test]
fn switched_frames() {
    let own = Advertisement {
        router: false,
        solicited: true,
        overrides: true,
        target: v6_addr("fd00::1"),
        target_mac: Some(ME),
    };
    let na = |dst: Mac, a| advertise((ME, dst), "fd00::1", "fd00::3", a);
    let tagged = {
        let mut f = tcp((ME, mac(3)), "10.0.0.1", "10.0.0.3");
        f.splice(12..12, [0x81, 0, 0, 5]);
        f
    };
    let fragment = {
        let mut f = tcp((ME, mac(3)), "10.0.0.1", "10.0.0.3");
        // The last fragment, at offset 24 of the packet's payload.
        f[20..22].copy_from_slice(&[0, 3]);
        f
    };
    let to = |dst: Mac| tcp((ME, dst), "10.0.0.1", "10.0.0.3");
    let router = {
        let mut body = [0; 16];
        body[0] = 134;
        packet((ME, mac(3)), "fe80::ff:fe00:1", "fd00::3", 255, 58, &body)
    };
    let dhcp = |dst| udp((ME, dst), "0.0.0.0", "255.255.255.255", (68, 67));
    let unspecified = "::";
    let cases: Vec<(&str, u32, Vec<u8>, Verdict)> = vec![
        ("TCP to another host", 0, to(mac(3)), remote(100, 1, 3, true, Ordering::Flow)),
        ("TCP fragment", 0, fragment, remote(100, 1, 3, true, Ordering::Flow)),
        ("TCP over IPv6", 0, tcp((ME, mac(3)), "fd00::1", "fd00::3"), remote(100, 1, 3, true, Ordering::Flow)),
        (
            "UDP, policy tcp",
            0,
            udp((ME, mac(3)), "10.0.0.1", "10.0.0.3", (1, 2)),
            remote(100, 1, 3, false, Ordering::Flow),
        ),
        (
            "UDP, policy all",
            5,
            udp((ME, mac(3)), "10.0.0.1", "10.0.0.3", (1, 2)),
            remote(200, 9, 3, true, Ordering::Strict),
        ),
        ("another tenant's host", 5, to(mac(3)), remote(200, 9, 3, true, Ordering::Strict)),
        ("to a neighbour port", 0, to(mac(2)), Verdict::unchanged(Action::Deliver { port: PortId(1), worker: None })),
        ("to a vNIC of another tenant", 5, to(mac(2)), drop(DropReason::UnknownMac)),
        ("to itself", 0, to(ME), drop(DropReason::Loop)),
        ("to nobody", 0, to(mac(99)), drop(DropReason::UnknownMac)),
        ("to the gateway where there is none", 5, to(GATEWAY_MAC), drop(DropReason::UnknownMac)),
        ("no such port", 3, to(mac(3)), drop(DropReason::UnknownPort)),
        ("port number far out", 999, to(mac(3)), drop(DropReason::UnknownPort)),
        ("VLAN", 0, tagged, drop(DropReason::Vlan)),
        ("other EtherType", 0, [&mac(3).0[..], &ME.0, &[0x88, 0xcc], &[0; 50]].concat(), drop(DropReason::EtherType)),
        ("source MAC of another", 0, tcp((mac(2), mac(3)), "10.0.0.1", "10.0.0.3"), drop(DropReason::SpoofedMac)),
        ("source IP of another", 0, tcp((ME, mac(3)), "10.0.0.2", "10.0.0.3"), drop(DropReason::SpoofedIp)),
        ("source IP of the gateway", 0, tcp((ME, mac(3)), "10.0.0.254", "10.0.0.3"), drop(DropReason::SpoofedIp)),
        ("IPv6 source of another", 0, tcp((ME, mac(3)), "fd00::2", "fd00::3"), drop(DropReason::SpoofedIp)),
        (
            "own link-local",
            0,
            tcp((ME, mac(3)), "fe80::ff:fe00:1", "fe80::ff:fe00:3"),
            remote(100, 1, 3, true, Ordering::Flow),
        ),
        ("another's link-local", 0, tcp((ME, mac(3)), "fe80::ff:fe00:2", "fd00::3"), drop(DropReason::SpoofedIp)),
        ("unspecified source, TCP", 0, tcp((ME, mac(3)), "0.0.0.0", "10.0.0.3"), drop(DropReason::SpoofedIp)),
        ("unspecified source, unicast", 0, tcp((ME, mac(3)), unspecified, "fd00::3"), drop(DropReason::SpoofedIp)),
        ("DHCP, not spoofed, nobody serves it", 0, dhcp(ALL), drop(DropReason::Broadcast)),
        ("DHCP by unicast", 0, dhcp(mac(3)), drop(DropReason::SpoofedIp)),
        ("broadcast", 0, udp((ME, ALL), "10.0.0.1", "10.0.0.255", (1, 2)), drop(DropReason::Broadcast)),
        (
            "multicast",
            0,
            udp((ME, Mac([1, 0, 0x5e, 0, 0, 0xfb])), "10.0.0.1", "224.0.0.251", (1, 2)),
            drop(DropReason::Multicast),
        ),
        (
            "group report without address",
            0,
            packet((ME, GROUP), "::", "ff02::16", 1, 58, &[143; 20]),
            drop(DropReason::Multicast),
        ),
        ("router advertisement", 0, router, drop(DropReason::SpoofedNeighbour)),
        (
            "ARP reply to a remote",
            0,
            arp((ME, mac(3)), Reply, (ME, "10.0.0.1"), (mac(3), "10.0.0.3")),
            remote(100, 1, 3, false, Ordering::Flow),
        ),
        (
            "ARP reply, policy all",
            5,
            arp((ME, mac(3)), Reply, (ME, "10.0.0.1"), (mac(3), "10.0.0.3")),
            remote(200, 9, 3, false, Ordering::Strict),
        ),
        (
            "ARP reply to all",
            0,
            arp((ME, ALL), Reply, (ME, "10.0.0.1"), (mac(3), "10.0.0.3")),
            drop(DropReason::Broadcast),
        ),
        ("advertisement to a remote", 0, na(mac(3), own), remote(100, 1, 3, false, Ordering::Flow)),
        ("advertisement to a neighbour, who did not ask", 0, na(mac(2), own), drop(DropReason::OwnAddress)),
        (
            "ARP reply to a neighbour",
            0,
            arp((ME, mac(2)), Reply, (ME, "10.0.0.1"), (mac(2), "10.0.0.2")),
            drop(DropReason::OwnAddress),
        ),
        ("advertisement to all", 0, na(GROUP, own), drop(DropReason::OwnAddress)),
        (
            "advertisement as router",
            0,
            na(mac(3), Advertisement { router: true, ..own }),
            drop(DropReason::SpoofedNeighbour),
        ),
        (
            "advertisement of another's address",
            0,
            na(mac(3), Advertisement { target: v6_addr("fd00::2"), ..own }),
            drop(DropReason::SpoofedNeighbour),
        ),
        (
            "advertisement of another's MAC",
            0,
            na(mac(3), Advertisement { target_mac: Some(mac(2)), ..own }),
            drop(DropReason::SpoofedNeighbour),
        ),
    ];
    for (name, port, frame, expected) in cases {
        let mut switch = switch();
        assert_eq!(guest(&mut switch, port, &frame), expected, "{name}");
        let Some(counters) = switch.port_counters(PortId(port)) else {
            assert_eq!(switch.underlay_counters().dropped.packets(DropReason::UnknownPort), 1, "{name}");
            continue;
        };
        let counted = counters.iter().filter(|&(_, n)| n != 0).collect::<Vec<_>>();
        let counter = match expected.action {
            Action::Forward { .. } => "to_remote_packets",
            Action::Deliver { .. } => "to_local_packets",
            Action::Answer { .. } => "answered_packets",
            Action::Copy => "copied_packets",
            Action::Ask { .. } => "asked_packets",
            Action::Host => "to_host_packets",
            Action::Drop(reason) => reason.counter(),
        };
        assert_eq!(counted, [(counter, 1)], "{name}");
    }
}

#[test]
fn arp_is_answered_for_every_known_address() {
    let ask = |sender: (Mac, &str), target| arp((ME, ALL), Request, sender, (Mac::ZERO, target));
    let cases: &[(&str, Vec<u8>, Result<Mac, DropReason>)] = &[
        ("local", ask((ME, "10.0.0.1"), "10.0.0.2"), Ok(mac(2))),
        ("remote", ask((ME, "10.0.0.1"), "10.0.0.3"), Ok(mac(3))),
        ("network behind a remote", ask((ME, "10.0.0.1"), "10.1.2.3"), Ok(mac(4))),
        ("gateway", ask((ME, "10.0.0.1"), "10.0.0.254"), Ok(GATEWAY_MAC)),
        ("unicast, to keep an entry", arp((ME, mac(3)), Request, (ME, "10.0.0.1"), (mac(3), "10.0.0.3")), Ok(mac(3))),
        ("probe of another's address", ask((ME, "0.0.0.0"), "10.0.0.2"), Ok(mac(2))),
        ("probe of its own", ask((ME, "0.0.0.0"), "10.0.0.1"), Err(DropReason::OwnAddress)),
        ("announcement", ask((ME, "10.0.0.1"), "10.0.0.1"), Err(DropReason::OwnAddress)),
        ("nobody", ask((ME, "10.0.0.1"), "10.0.0.99"), Err(DropReason::UnknownNeighbour)),
        ("sender IP of another", ask((ME, "10.0.0.2"), "10.0.0.3"), Err(DropReason::SpoofedArp)),
        ("sender MAC of another", ask((mac(2), "10.0.0.1"), "10.0.0.3"), Err(DropReason::SpoofedArp)),
        (
            "Ethernet source of another",
            arp((mac(2), ALL), Request, (ME, "10.0.0.1"), (ME, "10.0.0.3")),
            Err(DropReason::SpoofedMac),
        ),
        (
            "reply for another",
            arp((ME, mac(3)), Reply, (ME, "10.0.0.2"), (mac(3), "10.0.0.3")),
            Err(DropReason::SpoofedArp),
        ),
        (
            "reply without address",
            arp((ME, mac(3)), Reply, (ME, "0.0.0.0"), (mac(3), "10.0.0.3")),
            Err(DropReason::SpoofedArp),
        ),
    ];
    for (name, frame, expected) in cases {
        let mut switch = switch();
        let got = guest(&mut switch, 0, frame);
        match *expected {
            Err(reason) => assert_eq!(got, drop(reason), "{name}"),
            Ok(mac) => {
                assert_eq!(got, answered(), "{name}");
                let request = arp::Packet::parse(&frame[14..]).unwrap();
                let answer = switch.answer();
                assert_eq!(answer.len(), 42);
                assert_eq!((&answer[..6], &answer[6..12]), (&ME.0[..], &mac.0[..]), "{name}");
                let reply = arp::Packet::parse(&answer[14..]).unwrap();
                assert_eq!(reply, request.reply(mac), "{name}");
            }
        }
    }
}

#[test]
fn neighbour_discovery_is_answered_for_every_known_address() {
    type Case = (&'static str, Vec<u8>, Result<(Mac, bool), DropReason>);
    let ask = |src, target| solicit((ME, GROUP), src, "ff02::1:ff00:3", 255, Some(ME), target);
    let dad = |target| solicit((ME, GROUP), "::", "ff02::1:ff00:3", 255, None, target);
    let cases: Vec<Case> = vec![
        ("local", ask("fd00::1", "fd00::2"), Ok((mac(2), false))),
        ("remote", ask("fd00::1", "fd00::3"), Ok((mac(3), false))),
        ("from link-local", ask("fe80::ff:fe00:1", "fd00::3"), Ok((mac(3), false))),
        ("link-local of a remote", ask("fd00::1", "fe80::ff:fe00:3"), Ok((mac(3), false))),
        ("link-local of a network behind", ask("fd00::1", "fe80::ff:fe00:4"), Ok((mac(4), false))),
        ("gateway", ask("fd00::1", "fd00::fe"), Ok((GATEWAY_MAC, true))),
        ("gateway's link-local", ask("fd00::1", "fe80::bf:ff:fe00:1"), Ok((GATEWAY_MAC, true))),
        ("duplicate found", dad("fd00::3"), Ok((mac(3), false))),
        ("no duplicate", dad("fd00::1"), Err(DropReason::OwnAddress)),
        ("no duplicate, link-local", dad("fe80::ff:fe00:1"), Err(DropReason::OwnAddress)),
        ("nobody", ask("fd00::1", "fd00::99"), Err(DropReason::UnknownNeighbour)),
        ("source of another", ask("fd00::2", "fd00::3"), Err(DropReason::SpoofedIp)),
        (
            "link-layer address of another",
            solicit((ME, GROUP), "fd00::1", "ff02::1:ff00:3", 255, Some(mac(2)), "fd00::3"),
            Err(DropReason::SpoofedNeighbour),
        ),
        (
            "routed",
            solicit((ME, GROUP), "fd00::1", "ff02::1:ff00:3", 254, Some(ME), "fd00::3"),
            Err(DropReason::MalformedNeighbour),
        ),
        ("for a group", ask("fd00::1", "ff02::1"), Err(DropReason::MalformedNeighbour)),
        (
            "cut short",
            packet((ME, GROUP), "fd00::1", "ff02::1", 255, 58, &[135, 0, 0, 0, 0, 0, 0, 0]),
            Err(DropReason::MalformedNeighbour),
        ),
    ];
    for (name, frame, expected) in cases {
        let mut switch = switch();
        let got = guest(&mut switch, 0, &frame);
        let (mac, router) = match expected {
            Err(reason) => {
                assert_eq!(got, drop(reason), "{name}");
                continue;
            }
            Ok(expected) => expected,
        };
        assert_eq!(got, answered(), "{name}");
        let asked = parse(&frame, frame.len()).unwrap();
        let answer = switch.answer();
        let parsed = parse(answer, answer.len()).unwrap();
        assert_eq!(transport_checksum(answer, &parsed), Checksum::Valid, "{name}");
        let unaddressed = asked.src_ip.is_unspecified();
        let (to, to_mac) =
            if unaddressed { (ip("ff02::1"), Mac([0x33, 0x33, 0, 0, 0, 1])) } else { (asked.src_ip, ME) };
        assert_eq!((parsed.dst_ip, parsed.dst_mac, parsed.src_mac), (to, to_mac, mac), "{name}");
        assert_eq!(answer[21], 255, "{name}: hop limit");
        let Message::Solicitation(s) = Message::parse(&frame[54..]).unwrap() else { panic!() };
        let Message::Advertisement(a) = Message::parse(&answer[54..]).unwrap() else { panic!("{name}") };
        let v6::Advertisement { target, target_mac, .. } = a;
        assert_eq!((target, target_mac, a.router, a.solicited), (s.target, Some(mac), router, !unaddressed), "{name}");
    }
}

#[test]
fn the_gateway_routes() {
    let gw = (ME, GATEWAY_MAC);
    let mut expired = tcp(gw, "10.0.0.1", "10.1.2.3");
    expired[22] = 1;
    // The expected peer and vNIC.
    type Case = (&'static str, Vec<u8>, Result<(u32, u8), DropReason>);
    let cases: &[Case] = &[
        ("to a remote", tcp(gw, "10.0.0.1", "10.0.0.3"), Ok((1, 3))),
        ("to a network behind a remote", tcp(gw, "10.0.0.1", "10.1.2.3"), Ok((2, 4))),
        ("IPv6", tcp(gw, "fd00::1", "fd00::3"), Ok((1, 3))),
        ("no route", tcp(gw, "10.0.0.1", "10.2.0.1"), Err(DropReason::NoRoute)),
        ("no IPv6 route", tcp(gw, "fd00::1", "2001:db8::1"), Err(DropReason::NoRoute)),
        ("TTL used up", expired, Err(DropReason::TtlExpired)),
        ("hop limit used up", packet(gw, "fd00::1", "fd00::3", 1, 59, &[]), Err(DropReason::TtlExpired)),
        ("back to itself", tcp(gw, "10.0.0.1", "10.0.0.1"), Err(DropReason::Loop)),
        ("from link-local", tcp(gw, "fe80::ff:fe00:1", "fd00::3"), Err(DropReason::NotRoutable)),
        ("to link-local", tcp(gw, "fd00::1", "fe80::ff:fe00:3"), Err(DropReason::NotRoutable)),
        ("to a group", tcp(gw, "10.0.0.1", "224.0.0.1"), Err(DropReason::NotRoutable)),
        ("to loopback", tcp(gw, "10.0.0.1", "127.0.0.1"), Err(DropReason::NotRoutable)),
        ("TCP to the gateway itself", tcp(gw, "10.0.0.1", "10.0.0.254"), Err(DropReason::GatewayService)),
    ];
    for (name, frame, expected) in cases {
        let got = guest(&mut switch(), 0, frame);
        let (peer, mac_of) = match *expected {
            Err(reason) => {
                assert_eq!(got, drop(reason), "{name}");
                continue;
            }
            Ok(expected) => expected,
        };
        let Verdict { action: Action::Forward { peer: p, local, remote, reliable: true, .. }, rewrite, .. } = got
        else {
            panic!("{name}: {got:?}")
        };
        let rewrite = rewrite.unwrap();
        assert_eq!((p, local, remote, rewrite.destination()), (PeerId(peer), ME, mac(mac_of), mac(mac_of)), "{name}");
        let mut out = frame.clone();
        rewrite.apply(&mut out);
        let mut expected = frame.clone();
        expected[..6].copy_from_slice(&mac(mac_of).0);
        expected[6..12].copy_from_slice(&GATEWAY_MAC.0);
        if frame[14] >> 4 == 4 {
            expected[22] -= 1;
            ipv4::fill_checksum(&mut expected[14..34]);
        } else {
            expected[21] -= 1;
        }
        assert_eq!(out, expected, "{name}");
        for len in 0..34 {
            let mut short = frame[..len].to_vec();
            rewrite.apply(&mut short);
            assert_eq!(short, frame[..len], "{name}: too short to be changed");
        }
    }
    let got = guest(&mut switch(), 0, &tcp(gw, "10.0.0.1", "10.0.0.2"));
    assert!(
        matches!(got.action, Action::Deliver { port: PortId(1), .. }) && got.rewrite.unwrap().destination() == mac(2),
        "{got:?}"
    );
}

#[test]
fn the_gateway_answers_pings() {
    let gw = (ME, GATEWAY_MAC);
    for (src, dst) in [("10.0.0.1", "10.0.0.254"), ("fd00::1", "fd00::fe"), ("fe80::ff:fe00:1", "fe80::bf:ff:fe00:1")] {
        for len in [0, 1, 56, 1472] {
            let payload: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let frame = ping(gw, src, dst, &payload);
            let mut switch = switch();
            assert_eq!(guest(&mut switch, 0, &frame), answered(), "{src} {len}");
            let answer = switch.answer();
            let parsed = parse(answer, answer.len()).unwrap();
            assert_eq!((parsed.src_mac, parsed.dst_mac), (GATEWAY_MAC, ME));
            assert_eq!((parsed.src_ip, parsed.dst_ip), (ip(dst), ip(src)));
            let body = &answer[parsed.l4 as usize..];
            assert_eq!(body[..2], [if ip(src).is_ipv6() { 129 } else { 0 }, 0]);
            assert_eq!(body[4..], frame[parsed.l4 as usize + 4..]);
            if ip(src).is_ipv6() {
                assert_eq!(transport_checksum(answer, &parsed), Checksum::Valid);
            } else {
                assert!(ipv4::checksum_is_valid(&answer[14..34]) && bifrost_wire::checksum::is_valid(body));
                assert_eq!(answer[22], 64);
            }
        }
    }
    // An incomplete ping, a fragment of one, and one with IP options.
    let whole = ping(gw, "10.0.0.1", "10.0.0.254", &[1; 400]);
    let parsed = parse(&whole[..256], whole.len()).unwrap();
    assert_eq!(
        *switch().from_guest(PortId(0), &whole[..256], whole.len(), Offload::default(), &parsed),
        drop(DropReason::GatewayService)
    );
    let mut fragment = whole.clone();
    fragment[20] = 0x20;
    assert_eq!(guest(&mut switch(), 0, &fragment), drop(DropReason::GatewayService));
    let mut reply = whole;
    reply[34] = 0;
    assert_eq!(guest(&mut switch(), 0, &reply), drop(DropReason::GatewayService));
}
