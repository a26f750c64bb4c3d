//! What is told about a packet beforehand is what becomes of it, and telling changes nothing.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use bifrost_avs::{
    AclRule, By, Check, Direction, DropReason, FromGuest, GroupId, GroupRule, Hop, Pattern, PeerId, Permission, PortId,
    SecurityGroup, SessionLimits, Switch, Tables,
};
use bifrost_nic::{Offload, parse};
use bifrost_wire::ipv4;
use common::*;

const SECOND: u64 = 1 << 30;
const SYN: u8 = 2;
const ETHERNET: usize = 14;

/// A TCP segment, with or without DF.
fn segment(from: u8, to: u8, ports: (u16, u16), flags: u8, payload: usize, dont_fragment: bool) -> Vec<u8> {
    let mut body = vec![0; 20 + payload];
    body[..2].copy_from_slice(&ports.0.to_be_bytes());
    body[2..4].copy_from_slice(&ports.1.to_be_bytes());
    (body[12], body[13]) = (0x50, flags);
    let mut frame = packet((mac(from), mac(to)), &format!("10.0.0.{from}"), &format!("10.0.0.{to}"), 64, 6, &body);
    let header = ipv4::Header { dont_fragment, ..ipv4::Header::parse(&frame[ETHERNET..]).unwrap() };
    frame[ETHERNET..ETHERNET + 20].copy_from_slice(&header.emit());
    frame
}

/// An error about a packet that went from `to` to `from`.
fn icmp_error(from: u8, to: u8, ports: (u16, u16), payload: usize) -> Vec<u8> {
    let about = segment(to, from, (ports.1, ports.0), SYN, payload, true);
    let body = [&[3, 1, 0, 0, 0, 0, 0, 0], &about[ETHERNET..]].concat();
    packet((mac(from), mac(to)), &format!("10.0.0.{from}"), &format!("10.0.0.{to}"), 64, 1, &body)
}

/// `crowded`: mostly between the two guests of this host, whose ports remember both.
fn any_frame(rng: &mut fastrand::Rng, from: u8, crowded: bool) -> Vec<u8> {
    let to = if crowded && from < 3 && rng.u8(0..4) > 0 { 3 - from } else { rng.u8(1..=5) };
    let ports = (rng.u16(1..4), rng.u16(1..4));
    // Some of them spoofed.
    let from = if rng.u8(..) < 10 { rng.u8(1..=4) } else { from };
    let (source, target) = (format!("10.0.0.{from}"), format!("10.0.0.{to}"));
    match rng.u8(0..12) {
        0 => udp((mac(from), mac(to)), &source, &target, ports),
        1 => ping((mac(from), mac(to)), &source, &target, b"there?"),
        2 => icmp_error(from, to, ports, *rng.choice(&[0, 1000]).unwrap()),
        3 => udp((mac(from), bifrost_avs::GATEWAY_MAC), &source, "10.1.2.3", ports),
        4 => udp((mac(from), bifrost_avs::GATEWAY_MAC), &source, "10.9.9.9", ports),
        5 => arp(
            (mac(from), bifrost_wire::Mac::BROADCAST),
            bifrost_wire::arp::Operation::Request,
            (mac(from), &source),
            (bifrost_wire::Mac::ZERO, &target),
        ),
        n => {
            let flags = *rng.choice(&[SYN, SYN, 0x12, 0x10, 0x11, 0x04]).unwrap();
            segment(from, to, ports, flags, if n < 8 { 1000 } else { 0 }, rng.bool())
        }
    }
}

fn any_pattern(rng: &mut fastrand::Rng) -> Pattern {
    Pattern {
        protocol: *rng.choice(&[None, Some(6), Some(6), Some(17)]).unwrap(),
        dst_ports: rng.choice(&[0..=u16::MAX, 1..=1, 2..=3]).unwrap().clone(),
        ..Pattern::default()
    }
}

fn any_direction(rng: &mut fastrand::Rng) -> Direction {
    if rng.bool() { Direction::Egress } else { Direction::Ingress }
}

fn any_tables(rng: &mut fastrand::Rng, crowded: bool) -> Tables {
    let mut tables = tables();
    for _ in 0..3 {
        let count = rng.usize(0..4);
        let rule = |_| GroupRule { direction: any_direction(rng), pattern: any_pattern(rng) };
        tables.groups.push(SecurityGroup { rules: (0..count).map(rule).collect() });
    }
    let all = |direction| GroupRule { direction, pattern: Pattern::default() };
    tables.groups.push(SecurityGroup { rules: vec![all(Direction::Egress), all(Direction::Ingress)] });
    for port in &mut tables.ports {
        port.groups = (0..3).filter(|_| rng.u8(0..3) == 0).map(GroupId).collect();
        port.groups.extend(crowded.then_some(GroupId(3)));
        port.mtu = *rng.choice(&[600, 1500, 1500]).unwrap();
    }
    for route in &mut tables.routes {
        route.mtu = *rng.choice(&[600, 1500]).unwrap();
    }
    if rng.u8(0..3) == 0 {
        let rule = |_| AclRule { direction: any_direction(rng), pattern: any_pattern(rng), allow: rng.u8(0..3) > 0 };
        tables.vpcs[0].acl = (0..3).map(rule).collect();
    }
    tables.sessions = SessionLimits { total: rng.u32(1..8), per_port: rng.u32(1..6) };
    tables
}

#[test]
fn it_tells_what_happens_then_and_changes_nothing() {
    let (mut dropped, mut passed, mut sessions) = (vec![0; DropReason::ALL.len()], 0, 0);
    for seed in 0..600 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let crowded = rng.bool();
        let mut switch = Switch::build(&any_tables(&mut rng, crowded), seed).unwrap();
        let mut now = 1000 * SECOND;
        for step in 0..80 {
            now += u64::from(rng.u32(0..40)) * SECOND / 4;
            switch.advance(now);
            if rng.u8(0..40) == 0 {
                switch.replace(&any_tables(&mut rng, crowded)).unwrap();
            }
            // The whole state as text is long: now and then it is looked at.
            let before = (step == 79).then(|| format!("{switch:?}"));
            let n = rng.u8(0..4);
            let frame = any_frame(&mut rng, n + 1, crowded);
            let parsed = parse(&frame, frame.len()).unwrap();
            let (told, checks, happened, reason);
            if n < 2 {
                let (port, offload) = (PortId(u16::from(n)), Offload::default());
                let trace = switch.trace_from_guest(port, &frame, frame.len(), offload, &parsed);
                assert!(before.is_none_or(|before| before == format!("{switch:?}")), "seed {seed} step {step}");
                let decision = switch.from_guest(port, &frame, frame.len(), offload, &parsed);
                assert!(trace.admitted.is_ok() || trace.decision == FromGuest::Drop(trace.admitted.unwrap_err()));
                reason = if let FromGuest::Drop(reason) = decision { Some(reason) } else { None };
                (told, checks, happened) = (format!("{:?}", trace.decision), trace.checks, format!("{decision:?}"));
            } else {
                let (vni, peer) = (vni(100), PeerId(u16::from(n - 1)));
                let trace = switch.trace_from_underlay(vni, peer, &frame, &parsed);
                assert!(before.is_none_or(|before| before == format!("{switch:?}")), "seed {seed} step {step}");
                let decision = switch.from_underlay(vni, peer, &frame, &parsed);
                reason = if let bifrost_avs::FromUnderlay::Drop(reason) = decision { Some(reason) } else { None };
                (told, checks, happened) = (format!("{:?}", trace.decision), trace.checks, format!("{decision:?}"));
            }
            assert_eq!(told, happened, "seed {seed} step {step}");
            // A check that fails is the last one, and the reason.
            if let Some(failed) = checks.iter().position(|check| check.result.is_err()) {
                assert_eq!(
                    (failed + 1, checks[failed].result.err()),
                    (checks.len(), reason),
                    "seed {seed} step {step}"
                );
            }
            sessions += usize::from(checks.iter().any(|check| matches!(check.by, By::Session { .. })));
            match reason {
                Some(reason) => dropped[reason.index()] += 1,
                None => passed += 1,
            }
        }
    }
    // Worlds in which nothing of interest happens would show nothing.
    for reason in [
        DropReason::SessionsFull,
        DropReason::Acl,
        DropReason::GroupEgress,
        DropReason::GroupIngress,
        DropReason::PathMtu,
        DropReason::SpoofedMac,
        DropReason::NoRoute,
        DropReason::UnknownMac,
    ] {
        assert!(dropped[reason.index()] > 10, "{reason}: {}", dropped[reason.index()]);
    }
    assert!(passed > 1000 && sessions > 100, "{passed} {sessions}");
}

/// Guest 1 lets in port 80 by its second rule, its network refuses port 23 by its first.
fn guarded() -> Switch {
    let mut tables = tables();
    let to = |port: u16| Pattern { protocol: Some(6), dst_ports: port..=port, ..Pattern::default() };
    let ingress = |port| GroupRule { direction: Direction::Ingress, pattern: to(port) };
    tables.groups = vec![SecurityGroup { rules: vec![ingress(22)] }, SecurityGroup { rules: vec![ingress(80)] }];
    tables.ports[0].groups = vec![GroupId(0), GroupId(1)];
    tables.vpcs[0].acl = vec![AclRule { direction: Direction::Ingress, pattern: to(23), allow: false }];
    let mut switch = Switch::build(&tables, 1).unwrap();
    switch.advance(1000 * SECOND);
    switch
}

#[test]
fn every_judgement_is_told_with_its_rule() {
    let mut switch = guarded();
    let from_peer = |switch: &Switch, frame: &[u8]| {
        switch.trace_from_underlay(vni(100), PeerId(1), frame, &parse(frame, frame.len()).unwrap())
    };
    let check = |by, result| Check { port: PortId(0), direction: Direction::Ingress, by, result };
    let groups = |permission| By::Groups { ends: None, permission };

    let syn = segment(3, 1, (5000, 80), SYN, 0, true);
    let trace = from_peer(&switch, &syn);
    assert_eq!(trace.checks, [check(By::Acl(None), Ok(())), check(groups(Permission::Rule(1)), Ok(()))]);
    assert_eq!(trace.port, Some(PortId(0)));
    assert_eq!(from_peer(&switch, &syn).checks, trace.checks, "asked twice, answered alike: no session was begun");
    assert_eq!(switch.session_counters().created, 0);

    underlay(&mut switch, 100, 1, &syn).unwrap();
    switch.advance(1007 * SECOND);
    let session = By::Session { state: "opening", origin: Direction::Ingress, idle_s: 7 };
    assert_eq!(from_peer(&switch, &syn).checks[1], check(session, Ok(())));

    let closed = segment(3, 1, (5000, 81), SYN, 0, true);
    let refused = check(groups(Permission::None), Err(DropReason::GroupIngress));
    assert_eq!(from_peer(&switch, &closed).checks[1], refused);
    let denied = segment(3, 1, (5000, 23), SYN, 0, true);
    assert_eq!(from_peer(&switch, &denied).checks, [check(By::Acl(Some(0)), Err(DropReason::Acl))]);
    let error = By::Error { known: false, permission: Permission::None };
    let about_nothing = icmp_error(3, 1, (9, 9), 0);
    assert_eq!(from_peer(&switch, &about_nothing).checks[1], check(error, Err(DropReason::GroupIngress)));
}

#[test]
fn the_next_hop_is_told() {
    let switch = guarded();
    let hop = |frame: &[u8]| {
        let parsed = parse(frame, frame.len()).unwrap();
        switch.trace_from_guest(PortId(0), frame, frame.len(), Offload::default(), &parsed).hop
    };
    let direct = Hop { routed: false, mac: mac(3), peer: Some(PeerId(1)), mtu: 1500 };
    assert_eq!(hop(&tcp((mac(1), mac(3)), "10.0.0.1", "10.0.0.3")), Some(direct));
    assert_eq!(hop(&tcp((mac(1), mac(2)), "10.0.0.1", "10.0.0.2")), Some(Hop { mac: mac(2), peer: None, ..direct }));
    let routed = Hop { routed: true, mac: mac(4), peer: Some(PeerId(2)), mtu: 1500 };
    assert_eq!(hop(&tcp((mac(1), bifrost_avs::GATEWAY_MAC), "10.0.0.1", "10.1.2.3")), Some(routed));
    assert_eq!(hop(&tcp((mac(1), bifrost_avs::GATEWAY_MAC), "10.0.0.1", "10.9.0.1")), None);
    assert_eq!(hop(&tcp((mac(1), mac(9)), "10.0.0.1", "10.0.0.3")), None);
}
