//! Building a switch, swapping its configuration, and malformed bytes.
#![allow(clippy::unwrap_used)]

mod common;

use bifrost_avs::{
    Action, BuildError, DropReason, GATEWAY_MAC, PeerId, Port, PortId, Prepared, Route, Switch, Tables, Verdict, Vpc,
};
use bifrost_nic::{Offload, parse};
use bifrost_wire::Mac;
use common::*;
use proptest::prelude::*;

#[test]
fn contradictions_are_refused() {
    type Change = fn(&mut Tables);
    let prefix = |text: &str| BuildError::DuplicatePrefix { vni: vni(100), prefix: text.parse().unwrap() };
    let mac_twice = |n| BuildError::DuplicateMac { vni: vni(100), mac: mac(n) };
    let cases: &[(&str, Change, BuildError)] = &[
        ("VNI twice", |t| t.vpcs.push(t.vpcs[0].clone()), BuildError::DuplicateVni(vni(100))),
        ("port in no network", |t| t.ports[0].vni = vni(7), BuildError::UnknownVni(vni(7))),
        ("route in no network", |t| t.routes[0].vni = vni(7), BuildError::UnknownVni(vni(7))),
        ("port number twice", |t| t.ports[1].id = PortId(0), BuildError::DuplicatePort(PortId(0))),
        ("group address", |t| t.ports[1].mac = Mac::BROADCAST, BuildError::Mac(Mac::BROADCAST)),
        ("no address", |t| t.routes[1].mac = Mac::ZERO, BuildError::Mac(Mac::ZERO)),
        ("the gateway's MAC", |t| t.ports[0].mac = GATEWAY_MAC, BuildError::Mac(GATEWAY_MAC)),
        ("MAC of two ports", |t| t.ports[1].mac = mac(1), mac_twice(1)),
        ("MAC here and there", |t| t.routes[0].mac = mac(1), mac_twice(1)),
        ("MAC at two peers", |t| t.routes[1].peer = PeerId(2), mac_twice(3)),
        ("address of two ports", |t| t.ports[1].addresses.push(ip("10.0.0.1")), prefix("10.0.0.1/32")),
        ("address here and there", |t| t.routes[0].prefix = "10.0.0.1/32".parse().unwrap(), prefix("10.0.0.1/32")),
        ("prefix twice", |t| t.routes[1].prefix = "10.1.9.9/16".parse().unwrap(), prefix("10.1.0.0/16")),
        ("the gateway's address", |t| t.ports[0].addresses[0] = ip("10.0.0.254"), prefix("10.0.0.254/32")),
        ("group as address", |t| t.ports[0].addresses[0] = ip("224.0.0.1"), BuildError::Address(ip("224.0.0.1"))),
        ("unspecified gateway", |t| t.vpcs[0].gateways.push(ip("::")), BuildError::Address(ip("::"))),
    ];
    for (name, change, expected) in cases {
        let mut tables = tables();
        change(&mut tables);
        assert_eq!(Switch::build(&tables, 0).err(), Some(*expected), "{name}");
    }
}

#[test]
fn a_reload_swaps_everything_except_the_counters() {
    let mut switch = switch();
    let frame = tcp((mac(1), mac(3)), "10.0.0.1", "10.0.0.3");
    assert!(matches!(guest(&mut switch, 0, &frame).action, Action::Forward { .. }));
    let mut bad = tables();
    bad.routes.clear();
    bad.ports[1].mac = mac(1);
    assert!(switch.replace(&bad).is_err());
    assert!(matches!(guest(&mut switch, 0, &frame).action, Action::Forward { .. }), "nothing has changed");
    let mut next = tables();
    next.routes.remove(0);
    next.routes.remove(0);
    switch.replace(&next).unwrap();
    assert_eq!(guest(&mut switch, 0, &frame), Verdict::drop(DropReason::UnknownMac));
    assert_eq!(switch.port_counters(PortId(0)).unwrap().to_remote_packets, 2);
    assert_eq!(switch.port_counters(PortId(0)).unwrap().dropped.total_packets(), 1);
    // The port is removed and added again: same vNIC, same counters.
    let removed = next.ports.remove(0);
    switch.replace(&next).unwrap();
    assert_eq!(guest(&mut switch, 0, &frame), Verdict::drop(DropReason::UnknownPort));
    assert_eq!(switch.port_counters(PortId(0)), None);
    assert_eq!(switch.counters().map(|(id, _)| id).collect::<Vec<_>>(), [PortId(1), PortId(5)]);
    next.ports.push(removed.clone());
    switch.replace(&next).unwrap();
    assert_eq!(switch.port_counters(PortId(0)).unwrap().to_remote_packets, 2);
    // Another vNIC gets its number, after a configuration without it.
    next.ports.pop();
    switch.replace(&next).unwrap();
    next.ports.push(Port { mac: mac(50), ..removed });
    switch.replace(&next).unwrap();
    assert_eq!(switch.port_counters(PortId(0)).unwrap().to_remote_packets, 0);
    assert_eq!(switch.port(PortId(0)).unwrap().mac, mac(50));
}

#[test]
fn prepared_indexes_are_taken_over() {
    let mut switch = switch();
    let frame = tcp((mac(1), mac(3)), "10.0.0.1", "10.0.0.3");
    let mut next = tables();
    next.routes.clear();
    drop(switch.take_over(Prepared::build(&next).unwrap()));
    assert_eq!(guest(&mut switch, 0, &frame), Verdict::drop(DropReason::UnknownMac));
    drop(switch.take_over(Prepared::build(&tables()).unwrap()));
    assert!(matches!(guest(&mut switch, 0, &frame).action, Action::Forward { .. }));
    next.ports[1].mac = mac(1);
    assert!(Prepared::build(&next).is_err());
}

#[test]
fn one_vnic_may_have_many_prefixes() {
    let mut tables = tables();
    for n in 0..250u8 {
        tables.routes.push(Route {
            vni: vni(200),
            prefix: format!("192.168.{n}.0/24").parse().unwrap(),
            peer: PeerId(9),
            mac: mac(3),
            mtu: 1500,
        });
    }
    tables.vpcs.push(Vpc { vni: vni(300), ..tables.vpcs[1].clone() });
    Switch::build(&tables, 0).unwrap();
}

proptest! {
    #[test]
    fn any_frame_gets_a_verdict(
        mut frame in proptest::collection::vec(any::<u8>(), 14..200),
        shape in 0usize..6,
        flips in proptest::collection::vec((12usize..90, any::<u8>()), 0..5),
        cut in 0usize..200,
    ) {
        let shapes = [
            arp((mac(1), Mac::BROADCAST), bifrost_wire::arp::Operation::Request, (mac(1), "10.0.0.1"), (mac(0), "10.0.0.3")),
            solicit((mac(1), mac(3)), "fd00::1", "fd00::3", 255, Some(mac(1)), "fd00::3"),
            ping((mac(1), GATEWAY_MAC), "10.0.0.1", "10.0.0.254", &[0; 30]),
            ping((mac(1), GATEWAY_MAC), "fd00::1", "fd00::fe", &[0; 30]),
            tcp((mac(1), GATEWAY_MAC), "10.0.0.1", "10.1.0.1"),
        ];
        if let Some(shape) = shapes.get(shape) {
            frame = shape.clone();
        }
        for (at, value) in flips {
            if let Some(byte) = frame.get_mut(at) {
                *byte = value;
            }
        }
        if let Ok(parsed) = parse(&frame, frame.len()) {
            let mut switch = switch();
            // A head that is shorter than what was parsed must not cause a panic either.
            for head in [&frame[..], &frame[..cut.min(frame.len())]] {
                let verdict = *switch.from_guest(PortId(0), head, frame.len(), Offload::default(), &parsed);
                if let Verdict { action: Action::Forward { .. }, rewrite: Some(r), .. } = verdict {
                    r.apply(&mut frame.clone());
                }
                let _ = switch.from_underlay(vni(100), PeerId(1), head, &parsed);
            }
        }
    }
}
