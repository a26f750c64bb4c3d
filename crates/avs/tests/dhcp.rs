//! DHCP messages of guests: which are answered, with which frame, and how often.
#![allow(clippy::unwrap_used)]

mod common;

use std::net::{IpAddr, Ipv4Addr};

use bifrost_avs::{Action, BuildError, DropReason, GATEWAY_MAC, Lease, PortId, Switch, Tables};
use bifrost_nic::{Checksum, parse, transport_checksum};
use bifrost_wire::Mac;
use bifrost_wire::protocol::UDP;
use common::{guest, ip, mac, packet, tables};

fn lease(port: u32) -> Lease {
    Lease {
        port: PortId(port),
        address: Ipv4Addr::new(10, 0, 0, 1 + port as u8),
        prefix_len: 24,
        gateway: Ipv4Addr::new(10, 0, 0, 254),
        dns: vec![],
        domain: None,
        mtu: 1500,
        seconds: 3600,
    }
}

fn world() -> Tables {
    Tables { leases: vec![lease(0)], ..tables() }
}

/// A request of vNIC 1 with this current address.
fn request(kind: u8, current: [u8; 4], ports: [u8; 2]) -> Vec<u8> {
    let mut message = vec![0; 240];
    message[..3].copy_from_slice(&[1, 1, 6]);
    message[12..16].copy_from_slice(&current);
    message[28..34].copy_from_slice(&mac(1).0);
    message[236..240].copy_from_slice(&[99, 130, 83, 99]);
    message.extend([53, 1, kind, 255]);
    let udp = [0, ports[0], 0, ports[1], 0, 8 + message.len() as u8, 0, 0];
    [&udp[..], &message].concat()
}

fn discover() -> Vec<u8> {
    packet((mac(1), Mac::BROADCAST), "0.0.0.0", "255.255.255.255", 64, UDP, &request(1, [0; 4], [68, 67]))
}

const ANSWERED: fn(Action) -> bool = |action| matches!(action, Action::Answer { .. });

#[test]
fn the_gateway_answers() {
    let mut switch = Switch::build(&world(), 0).unwrap();
    assert!(ANSWERED(guest(&mut switch, 0, &discover()).action));
    let answer = switch.answer().to_vec();
    let parsed = parse(&answer, answer.len()).unwrap();
    assert_eq!((parsed.src_mac, parsed.dst_mac), (GATEWAY_MAC, mac(1)));
    assert_eq!((parsed.src_ip, parsed.dst_ip), (ip("10.0.0.254"), ip("10.0.0.1")));
    assert_eq!((parsed.src_port, parsed.dst_port), (67, 68));
    assert_eq!(transport_checksum(&answer, &parsed), Checksum::Valid);
    assert!(bifrost_wire::ipv4::checksum_is_valid(&answer[14..34]));
    // `yiaddr`.
    assert_eq!(answer[42 + 16..42 + 20], [10, 0, 0, 1]);
    // The lease is renewed at the gateway's address.
    let renewal = request(3, [10, 0, 0, 1], [68, 67]);
    let renewal = packet((mac(1), GATEWAY_MAC), "10.0.0.1", "10.0.0.254", 64, UDP, &renewal);
    assert!(ANSWERED(guest(&mut switch, 0, &renewal).action));
    // A NAK is broadcast, because the guest may not accept another address.
    let other = request(3, [10, 0, 0, 9], [68, 67]);
    let other = packet((mac(1), Mac::BROADCAST), "0.0.0.0", "255.255.255.255", 64, UDP, &other);
    assert!(ANSWERED(guest(&mut switch, 0, &other).action));
    let answer = switch.answer();
    let parsed = parse(answer, answer.len()).unwrap();
    assert_eq!((parsed.dst_mac, parsed.dst_ip), (Mac::BROADCAST, IpAddr::V4(Ipv4Addr::BROADCAST)));
    assert_eq!(switch.port_counters(PortId(0)).unwrap().answered_packets, 3);
}

#[test]
fn other_messages_are_dropped_as_before() {
    let mut switch = Switch::build(&world(), 0).unwrap();
    let broadcast = |body: &[u8]| packet((mac(1), Mac::BROADCAST), "10.0.0.1", "255.255.255.255", 64, UDP, body);
    let from_elsewhere = broadcast(&request(1, [0; 4], [69, 67]));
    let elsewhere = broadcast(&request(1, [0; 4], [68, 69]));
    let to_gateway = packet((mac(1), GATEWAY_MAC), "10.0.0.1", "10.0.0.254", 64, UDP, &request(1, [0; 4], [69, 67]));
    let to_subnet = packet((mac(1), Mac::BROADCAST), "10.0.0.1", "10.0.0.255", 64, UDP, &request(1, [0; 4], [68, 67]));
    for (name, frame, reason) in [
        ("another client port", from_elsewhere, DropReason::Broadcast),
        ("another server port", elsewhere, DropReason::Broadcast),
        ("to the gateway", to_gateway, DropReason::GatewayService),
        ("to the subnet", to_subnet, DropReason::Broadcast),
    ] {
        assert_eq!(guest(&mut switch, 0, &frame).drop_reason(), Some(reason), "{name}");
    }
    // A guest without a lease gets no reply.
    let mut without = Switch::build(&tables(), 0).unwrap();
    assert_eq!(guest(&mut without, 0, &discover()).drop_reason(), Some(DropReason::Broadcast));
    // A spoofed frame does not reach the DHCP server.
    let mut spoofed = discover();
    spoofed[11] = 7;
    assert_eq!(guest(&mut switch, 0, &spoofed).drop_reason(), Some(DropReason::SpoofedMac));
}

#[test]
fn a_truncated_message_has_a_drop_reason() {
    let mut switch = Switch::build(&world(), 0).unwrap();
    switch.advance(1 << 40);
    let frame = discover();
    let parsed = parse(&frame, frame.len()).unwrap();
    // A port that does not copy a frame shows only its first bytes.
    let verdict = switch.from_guest(PortId(0), &frame[..256], frame.len(), Default::default(), &parsed);
    assert_eq!(verdict.drop_reason(), Some(DropReason::DhcpMalformed));
}

#[test]
fn a_guest_that_asks_too_often_waits() {
    let mut switch = Switch::build(&world(), 0).unwrap();
    let mut now_ns = 1 << 40;
    switch.advance(now_ns);
    let answered = |switch: &mut Switch| (0..100).filter(|_| ANSWERED(guest(switch, 0, &discover()).action)).count();
    assert_eq!(answered(&mut switch), 20);
    assert_eq!(guest(&mut switch, 0, &discover()).drop_reason(), Some(DropReason::DhcpRate));
    // A trace takes no token.
    now_ns += 100_000_000;
    switch.advance(now_ns);
    let frame = discover();
    let parsed = parse(&frame, frame.len()).unwrap();
    for _ in 0..3 {
        let trace = switch.trace_from_guest(PortId(0), &frame, frame.len(), Default::default(), &parsed);
        assert!(ANSWERED(trace.verdict.action));
    }
    assert_eq!(answered(&mut switch), 1);
    // The other guest has its own rate limit.
    assert_eq!(switch.port_counters(PortId(0)).unwrap().dropped.packets(DropReason::DhcpRate), 80 + 1 + 99);
}

#[test]
fn a_lease_needs_a_port_and_is_alone() {
    let twice = Tables { leases: vec![lease(0), lease(0)], ..tables() };
    let nowhere = Tables { leases: vec![lease(3)], ..tables() };
    assert_eq!(Switch::build(&twice, 0).err(), Some(BuildError::Lease(PortId(0))));
    assert_eq!(Switch::build(&nowhere, 0).err(), Some(BuildError::Lease(PortId(3))));
}
