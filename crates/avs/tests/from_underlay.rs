//! Decisions about frames from peers.
#![allow(clippy::unwrap_used)]

mod common;

use bifrost_avs::{DropReason, GATEWAY_MAC, PortId};
use bifrost_wire::Mac;
use bifrost_wire::arp::Operation::{Reply, Request};
use bifrost_wire::icmp::v6::Advertisement;
use common::*;

#[test]
fn only_addresses_routed_to_the_peer_are_accepted() {
    let to_me = |src: Mac, from: &str| tcp((src, mac(1)), from, "10.0.0.1");
    let na = |a| advertise((mac(3), mac(1)), "fd00::3", "fd00::1", a);
    let honest = Advertisement {
        router: false,
        solicited: true,
        overrides: true,
        target: v6_addr("fd00::3"),
        target_mac: Some(mac(3)),
    };
    let router = {
        let mut body = [0; 16];
        body[0] = 134;
        packet((mac(3), mac(1)), "fe80::ff:fe00:3", "fd00::1", 255, 58, &body)
    };
    let group = Mac([0x33, 0x33, 0xff, 0, 0, 1]);
    let tagged = {
        let mut f = to_me(mac(3), "10.0.0.3");
        f.splice(12..12, [0x81, 0, 0, 5]);
        f
    };
    let ask = |src: Mac, sender, target| arp((src, Mac::BROADCAST), Request, sender, (Mac::ZERO, target));
    // VNI, peer, frame, expected port.
    type Case = (&'static str, u32, u32, Vec<u8>, Result<u32, DropReason>);
    let cases: Vec<Case> = vec![
        ("TCP", 100, 1, to_me(mac(3), "10.0.0.3"), Ok(0)),
        ("the other tenant's, same addresses", 200, 9, to_me(mac(3), "10.0.0.3"), Ok(5)),
        ("another tenant's peer", 200, 1, to_me(mac(3), "10.0.0.3"), Err(DropReason::WrongPeer)),
        ("no such network", 300, 1, to_me(mac(3), "10.0.0.3"), Err(DropReason::UnknownVni)),
        ("routed by the peer's gateway", 100, 2, to_me(GATEWAY_MAC, "10.1.2.3"), Ok(0)),
        ("routed, source elsewhere", 100, 1, to_me(GATEWAY_MAC, "10.1.2.3"), Err(DropReason::WrongPeer)),
        ("routed, source unknown", 100, 1, to_me(GATEWAY_MAC, "8.8.8.8"), Err(DropReason::WrongPeer)),
        ("right MAC, address of another host", 100, 1, to_me(mac(3), "10.1.2.3"), Err(DropReason::WrongPeer)),
        ("right MAC, address of a local port", 100, 1, to_me(mac(3), "10.0.0.2"), Err(DropReason::WrongPeer)),
        ("right MAC, address of the gateway", 100, 1, to_me(mac(3), "10.0.0.254"), Err(DropReason::WrongPeer)),
        ("right MAC, address that nobody has", 100, 1, to_me(mac(3), "10.0.0.77"), Ok(0)),
        ("MAC of another peer", 100, 2, to_me(mac(3), "10.0.0.77"), Err(DropReason::WrongPeer)),
        ("MAC of a local port", 100, 1, to_me(mac(2), "10.0.0.3"), Err(DropReason::WrongPeer)),
        ("MAC that nobody has", 100, 1, to_me(mac(77), "10.0.0.3"), Err(DropReason::WrongPeer)),
        ("link-local", 100, 1, tcp((mac(3), mac(1)), "fe80::ff:fe00:3", "fe80::ff:fe00:1"), Ok(0)),
        (
            "link-local of another",
            100,
            1,
            tcp((mac(3), mac(1)), "fe80::ff:fe00:4", "fd00::1"),
            Err(DropReason::WrongPeer),
        ),
        ("to a vNIC elsewhere", 100, 1, tcp((mac(3), mac(4)), "10.0.0.3", "10.1.0.1"), Err(DropReason::NotHere)),
        ("to nobody", 100, 1, tcp((mac(3), mac(77)), "10.0.0.3", "10.0.0.1"), Err(DropReason::UnknownMac)),
        (
            "to another tenant's vNIC",
            200,
            9,
            tcp((mac(3), mac(2)), "10.0.0.3", "10.0.0.2"),
            Err(DropReason::UnknownMac),
        ),
        ("VLAN", 100, 1, tagged, Err(DropReason::Vlan)),
        (
            "other EtherType",
            100,
            1,
            [&mac(1).0[..], &mac(3).0, &[0x88, 0xcc], &[0; 50]].concat(),
            Err(DropReason::EtherType),
        ),
        (
            "broadcast",
            100,
            1,
            udp((mac(3), Mac::BROADCAST), "10.0.0.3", "10.0.0.255", (1, 2)),
            Err(DropReason::Broadcast),
        ),
        (
            "multicast",
            100,
            1,
            udp((mac(3), Mac([1, 0, 0x5e, 0, 0, 1])), "10.0.0.3", "224.0.0.1", (1, 2)),
            Err(DropReason::Multicast),
        ),
        ("ARP request", 100, 1, ask(mac(3), (mac(3), "10.0.0.3"), "10.0.0.2"), Ok(1)),
        ("ARP probe", 100, 1, ask(mac(3), (mac(3), "0.0.0.0"), "10.0.0.2"), Ok(1)),
        ("ARP for a remote", 100, 1, ask(mac(3), (mac(3), "10.0.0.3"), "10.1.0.1"), Err(DropReason::NotHere)),
        ("ARP for nobody", 100, 1, ask(mac(3), (mac(3), "10.0.0.3"), "10.0.0.77"), Err(DropReason::UnknownNeighbour)),
        ("ARP announcement", 100, 1, ask(mac(3), (mac(3), "10.0.0.3"), "10.0.0.3"), Err(DropReason::OwnAddress)),
        ("ARP as another host", 100, 1, ask(mac(3), (mac(3), "10.1.0.1"), "10.0.0.2"), Err(DropReason::WrongPeer)),
        ("ARP as the gateway", 100, 1, ask(mac(3), (mac(3), "10.0.0.254"), "10.0.0.2"), Err(DropReason::WrongPeer)),
        (
            "ARP with another MAC inside",
            100,
            1,
            ask(mac(3), (mac(4), "10.0.0.3"), "10.0.0.2"),
            Err(DropReason::SpoofedArp),
        ),
        (
            "ARP reply",
            100,
            1,
            arp((mac(3), mac(1)), Reply, (mac(3), "10.0.0.3"), (mac(1), "10.0.0.1")),
            Err(DropReason::OwnAddress),
        ),
        (
            "ARP reply to all",
            100,
            1,
            arp((mac(3), Mac::BROADCAST), Reply, (mac(3), "10.0.0.3"), (mac(1), "10.0.0.1")),
            Err(DropReason::OwnAddress),
        ),
        (
            "solicitation",
            100,
            1,
            solicit((mac(3), group), "fd00::3", "ff02::1:ff00:1", 255, Some(mac(3)), "fd00::1"),
            Ok(0),
        ),
        (
            "solicitation, lying",
            100,
            1,
            solicit((mac(3), group), "fd00::3", "ff02::1:ff00:1", 255, Some(mac(4)), "fd00::1"),
            Err(DropReason::SpoofedNeighbour),
        ),
        (
            "solicitation, routed",
            100,
            1,
            solicit((mac(3), group), "fd00::3", "ff02::1:ff00:1", 9, Some(mac(3)), "fd00::1"),
            Err(DropReason::MalformedNeighbour),
        ),
        ("advertisement that nobody asked for", 100, 1, na(honest), Err(DropReason::OwnAddress)),
        (
            "advertisement for another",
            100,
            1,
            na(Advertisement { target: v6_addr("fd00::2"), ..honest }),
            Err(DropReason::SpoofedNeighbour),
        ),
        (
            "advertisement for the gateway",
            100,
            1,
            na(Advertisement { target: v6_addr("fd00::fe"), ..honest }),
            Err(DropReason::SpoofedNeighbour),
        ),
        (
            "advertisement as router",
            100,
            1,
            na(Advertisement { router: true, ..honest }),
            Err(DropReason::SpoofedNeighbour),
        ),
        ("router advertisement", 100, 1, router, Err(DropReason::SpoofedNeighbour)),
        ("ping", 100, 1, ping((mac(3), mac(1)), "fd00::3", "fd00::1", &[0; 56]), Ok(0)),
    ];
    for (name, n, peer, frame, expected) in cases {
        let mut switch = switch();
        let got = underlay(&mut switch, n, peer, &frame);
        assert_eq!(got, expected.map(PortId), "{name}");
        let counted: Vec<_> = switch.underlay_counters().iter().filter(|&(_, n)| n != 0).collect();
        match expected {
            Ok(port) => {
                assert_eq!(counted, [("accepted_packets", 1)], "{name}");
                assert_eq!(switch.port_counters(PortId(port)).unwrap().from_underlay_packets, 1, "{name}");
            }
            Err(reason) => assert_eq!(counted, [(reason.counter(), 1)], "{name}"),
        }
    }
}
