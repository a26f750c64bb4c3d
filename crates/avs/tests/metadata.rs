//! The metadata service: which guests' packets go to the daemon, and how often.
#![allow(clippy::unwrap_used)]

mod common;

use bifrost_avs::{Action, BuildError, DropReason, GATEWAY_MAC, METADATA, PortId, Switch, Tables};
use bifrost_nic::parse;
use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::{Mac, arp as wire_arp};
use common::{answered, arp, guest, ip, mac, packet, tables, underlay};

/// Port 0 has metadata; port 1, in the same network, does not.
fn world() -> Tables {
    Tables { metadata: vec![PortId(0)], ..tables() }
}

fn request(n: u8, from: &str, to: &str, protocol: u8, port: u16) -> Vec<u8> {
    let mut header = [&5000_u16.to_be_bytes()[..], &port.to_be_bytes(), &[0; 16]].concat();
    // TCP's data offset, UDP's length.
    header[if protocol == TCP { 12 } else { 5 }] = if protocol == TCP { 0x50 } else { 20 };
    packet((mac(n), GATEWAY_MAC), from, to, 64, protocol, &header)
}

#[test]
fn requests_of_guests_with_metadata_go_to_the_daemon() {
    let mut switch = Switch::build(&world(), 0).unwrap();
    let (v4, v6) = (METADATA.0.to_string(), METADATA.1.to_string());
    assert_eq!((v4.as_str(), v6.as_str()), ("169.254.169.254", "fd00:ec2::254"));
    for (from, to) in [("10.0.0.1", &v4), ("fd00::1", &v6)] {
        assert_eq!(guest(&mut switch, 0, &request(1, from, to, TCP, 80)).action, Action::Host);
    }
    assert_eq!(switch.port_counters(PortId(0)).unwrap().to_host_packets, 2);
    for (name, port, frame, reason) in [
        ("another port", 0, request(1, "10.0.0.1", &v4, TCP, 81), DropReason::GatewayService),
        ("another protocol", 0, request(1, "10.0.0.1", &v4, UDP, 80), DropReason::GatewayService),
        ("the gateway itself", 0, request(1, "10.0.0.1", "10.0.0.254", TCP, 80), DropReason::GatewayService),
        ("a guest without metadata", 1, request(2, "10.0.0.2", &v4, TCP, 80), DropReason::GatewayService),
        ("another one's address", 0, request(1, "10.0.0.2", &v4, TCP, 80), DropReason::SpoofedIp),
        ("its address", 0, request(1, &v4, "10.0.0.2", TCP, 80), DropReason::SpoofedIp),
    ] {
        assert_eq!(guest(&mut switch, port, &frame).drop_reason(), Some(reason), "{name}");
    }
    // A peer may neither use the service's address nor send requests to it.
    let mut header = [0; 20];
    header[12] = 0x50;
    let forged = packet((GATEWAY_MAC, mac(1)), &v4, "10.0.0.1", 64, TCP, &header);
    assert_eq!(underlay(&mut switch, 100, 1, &forged), Err(DropReason::WrongPeer));
    // Other networks do not have the address.
    assert!(guest(&mut switch, 5, &request(1, "10.0.0.1", &v4, TCP, 80)).drop_reason().is_some());
    let mut without = Switch::build(&tables(), 0).unwrap();
    let refused = guest(&mut without, 0, &request(1, "10.0.0.1", &v4, TCP, 80)).drop_reason();
    assert_eq!(refused, Some(DropReason::NotRoutable));
}

#[test]
fn the_gateway_has_the_address() {
    let mut switch = Switch::build(&world(), 0).unwrap();
    let question = arp(
        (mac(1), Mac::BROADCAST),
        wire_arp::Operation::Request,
        (mac(1), "10.0.0.1"),
        (Mac([0; 6]), "169.254.169.254"),
    );
    assert_eq!(guest(&mut switch, 0, &question), answered());
    let answer = switch.answer().to_vec();
    assert_eq!(parse(&answer, answer.len()).unwrap().src_mac, GATEWAY_MAC);
}

#[test]
fn packets_to_the_service_are_bounded_for_each_guest() {
    let mut switch = Switch::build(&world(), 0).unwrap();
    switch.advance(1);
    let frame = request(1, "10.0.0.1", "169.254.169.254", TCP, 80);
    let passed = (0..2000).filter(|_| guest(&mut switch, 0, &frame).action == Action::Host).count();
    assert_eq!(passed, 500);
    assert_eq!(switch.port_counters(PortId(0)).unwrap().dropped.packets(DropReason::MetadataRate), 1500);
    switch.advance(1 + 1_000_000_000);
    assert_eq!(guest(&mut switch, 0, &frame).action, Action::Host);
}

#[test]
fn contradictions_are_refused() {
    let error = |change: fn(&mut Tables)| {
        let mut tables = world();
        change(&mut tables);
        Switch::build(&tables, 0).err()
    };
    assert_eq!(error(|_| ()), None);
    assert_eq!(error(|t| t.metadata.push(PortId(99))), Some(BuildError::Metadata(PortId(99))));
    assert_eq!(error(|t| t.metadata.push(PortId(5))), Some(BuildError::Metadata(PortId(5))), "without a gateway");
    assert!(error(|t| t.ports[1].addresses.push(ip("169.254.169.254"))).is_some());
}
