//! DNS queries of guests to their gateway: which are answered, with which frame, and how often.
#![allow(clippy::unwrap_used)]

mod common;

use bifrost_avs::{Action, DropReason, GATEWAY_MAC, PortId, Switch, Tables, Zone};
use bifrost_nic::{Checksum, parse, transport_checksum};
use bifrost_wire::protocol::UDP;
use common::{guest, ip, mac, packet, tables, vni};

fn world() -> Tables {
    let names = vec![("web2".to_owned(), ip("10.0.0.2")), ("web2".to_owned(), ip("fd00::2"))];
    let zone = Zone { vni: vni(100), domain: "vpc".into(), names, subnets: vec![] };
    Tables { zones: vec![zone], ..tables() }
}

/// A query for the name `web2.vpc` with this record type.
fn question(from: &str, to: &str, kind: u8, ports: (u16, u16)) -> Vec<u8> {
    let message =
        [b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04web2\x03vpc\x00\x00", &[kind, 0, 1][..]].concat();
    let mut udp = [ports.0.to_be_bytes(), ports.1.to_be_bytes()].concat();
    udp.extend([0, 8 + message.len() as u8, 0, 0]);
    packet((mac(1), GATEWAY_MAC), from, to, 64, UDP, &[udp, message].concat())
}

#[test]
fn the_gateways_of_a_network_with_names_answer() {
    let mut switch = Switch::build(&world(), 0).unwrap();
    for (from, to, kind, address) in [
        ("10.0.0.1", "10.0.0.254", 1, "10.0.0.2"),
        ("10.0.0.1", "10.0.0.254", 28, "fd00::2"),
        ("fd00::1", "fd00::fe", 1, "10.0.0.2"),
        ("fd00::1", "fd00::fe", 28, "fd00::2"),
    ] {
        let verdict = guest(&mut switch, 0, &question(from, to, kind, (5000, 53)));
        assert!(matches!(verdict.action, Action::Answer { .. }), "{verdict:?}");
        let answer = switch.answer().to_vec();
        let parsed = parse(&answer, answer.len()).unwrap();
        assert_eq!((parsed.src_mac, parsed.dst_mac), (GATEWAY_MAC, mac(1)));
        assert_eq!((parsed.src_ip, parsed.dst_ip), (ip(to), ip(from)));
        assert_eq!((parsed.src_port, parsed.dst_port), (53, 5000));
        assert_eq!(transport_checksum(&answer, &parsed), Checksum::Valid);
        let octets = match ip(address) {
            std::net::IpAddr::V4(a) => a.octets().to_vec(),
            std::net::IpAddr::V6(a) => a.octets().to_vec(),
        };
        assert!(answer.ends_with(&octets), "{answer:?}");
    }
    assert_eq!(switch.port_counters(PortId(0)).unwrap().answered_packets, 4);
}

#[test]
fn what_is_not_answered_has_a_reason() {
    let mut switch = Switch::build(&world(), 0).unwrap();
    let mut reason = |frame: &[u8]| guest(&mut switch, 0, frame).drop_reason();
    let good = question("10.0.0.1", "10.0.0.254", 1, (5000, 53));
    assert_eq!(reason(&question("10.0.0.1", "10.0.0.254", 1, (5000, 54))), Some(DropReason::GatewayService));
    let mut reply = good.clone();
    reply[44] |= 0x80;
    assert_eq!(reason(&reply), Some(DropReason::DnsMalformed));
    // A port may show only the headers.
    let parsed = parse(&good, good.len()).unwrap();
    let mut switch = Switch::build(&world(), 0).unwrap();
    let offload = bifrost_nic::Offload::default();
    let verdict = switch.from_guest(PortId(0), &good[..60], good.len(), offload, &parsed);
    assert_eq!(verdict.drop_reason(), Some(DropReason::DnsMalformed));
    // A VPC without a domain has no name server.
    let mut switch = Switch::build(&tables(), 0).unwrap();
    assert_eq!(guest(&mut switch, 0, &good).drop_reason(), Some(DropReason::GatewayService));
}

#[test]
fn questions_are_bounded_for_each_guest() {
    let mut switch = Switch::build(&world(), 0).unwrap();
    switch.advance(1);
    let good = question("10.0.0.1", "10.0.0.254", 1, (5000, 53));
    let answered = (0..3000).filter(|_| guest(&mut switch, 0, &good).drop_reason().is_none()).count();
    assert_eq!(answered, 1000);
    let of_port = switch.port_counters(PortId(0)).unwrap();
    assert_eq!((of_port.answered_packets, of_port.dropped.packets(DropReason::DnsRate)), (1000, 2000));
    switch.advance(1 + 1_000_000_000);
    assert_eq!(guest(&mut switch, 0, &good).drop_reason(), None);
}

#[test]
fn a_query_to_another_server_is_forwarded() {
    let mut switch = Switch::build(&world(), 0).unwrap();
    assert!(guest(&mut switch, 0, &question("10.0.0.1", "10.1.0.53", 1, (5000, 53))).passes());
}
