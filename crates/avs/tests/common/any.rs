//! Random worlds that are small enough to reach most cases, and frames for them.

use bifrost_avs::{AclRule, Direction, GroupId, GroupRule, Pattern, Peering, SecurityGroup, SessionLimits, Tables};
use bifrost_wire::ipv4;

use super::*;

/// A second as the switch counts it, ns.
pub(crate) const SECOND: u64 = 1 << 30;
pub(crate) const SYN: u8 = 2;
const ETHERNET: usize = 14;

/// A TCP segment, with or without DF.
pub(crate) fn segment(from: u8, to: u8, ports: (u16, u16), flags: u8, payload: usize, dont_fragment: bool) -> Vec<u8> {
    let mut body = vec![0; 20 + payload];
    body[..2].copy_from_slice(&ports.0.to_be_bytes());
    body[2..4].copy_from_slice(&ports.1.to_be_bytes());
    (body[12], body[13]) = (0x50, flags);
    let mut frame = packet((mac(from), mac(to)), &format!("10.0.0.{from}"), &format!("10.0.0.{to}"), 64, 6, &body);
    let header = ipv4::Header { dont_fragment, ..ipv4::Header::parse(&frame[ETHERNET..]).unwrap() };
    frame[ETHERNET..ETHERNET + 20].copy_from_slice(&header.emit());
    frame
}

/// An ICMP error about a packet that went from `to` to `from`.
pub(crate) fn icmp_error(from: u8, to: u8, ports: (u16, u16), payload: usize) -> Vec<u8> {
    let about = segment(to, from, (ports.1, ports.0), SYN, payload, true);
    let body = [&[3, 1, 0, 0, 0, 0, 0, 0], &about[ETHERNET..]].concat();
    packet((mac(from), mac(to)), &format!("10.0.0.{from}"), &format!("10.0.0.{to}"), 64, 1, &body)
}

/// `crowded`: most frames are between the two guests of this host, whose ports both track sessions.
pub(crate) fn any_frame(rng: &mut fastrand::Rng, from: u8, crowded: bool) -> Vec<u8> {
    let to = if crowded && from < 3 && rng.u8(0..4) > 0 { 3 - from } else { rng.u8(1..=5) };
    let ports = (rng.u16(1..4), rng.u16(1..4));
    // Some are spoofed.
    let from = if rng.u8(..) < 10 { rng.u8(1..=4) } else { from };
    let (source, target) = (format!("10.0.0.{from}"), format!("10.0.0.{to}"));
    match rng.u8(0..13) {
        // A fragment of a datagram; there are few identifications, so that some fragments belong together.
        12 => {
            let mut body = [0; 64];
            body[..2].copy_from_slice(&ports.0.to_be_bytes());
            body[2..4].copy_from_slice(&ports.1.to_be_bytes());
            body[5] = 64;
            let whole = packet((mac(from), mac(to)), &source, &target, 64, 17, &body);
            let at = rng.usize(0..4) * 16;
            piece(&whole, rng.u32(0..2), at, at + 16, at < 48)
        }
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

pub(crate) fn any_pattern(rng: &mut fastrand::Rng) -> Pattern {
    Pattern {
        protocol: *rng.choice(&[None, Some(6), Some(6), Some(17)]).unwrap(),
        dst_ports: rng.choice(&[0..=u16::MAX, 1..=1, 2..=3]).unwrap().clone(),
        ..Pattern::default()
    }
}

pub(crate) fn any_direction(rng: &mut fastrand::Rng) -> Direction {
    if rng.bool() { Direction::Egress } else { Direction::Ingress }
}

pub(crate) fn any_tables(rng: &mut fastrand::Rng, crowded: bool) -> Tables {
    let mut tables = tables();
    for _ in 0..3 {
        let count = rng.usize(0..4);
        let rule = |_| GroupRule::new(any_direction(rng), any_pattern(rng));
        tables.groups.push(SecurityGroup::new((0..count).map(rule).collect()));
    }
    let all = |direction| GroupRule::new(direction, Pattern::default());
    tables.groups.push(SecurityGroup::new(vec![all(Direction::Egress), all(Direction::Ingress)]));
    for port in &mut tables.ports {
        port.groups = (0..3).filter(|_| rng.u8(0..3) == 0).map(GroupId).collect();
        port.groups.extend(crowded.then_some(GroupId(3)));
        port.mtu = *rng.choice(&[600, 1500, 1500]).unwrap();
    }
    for route in &mut tables.routes {
        route.mtu = *rng.choice(&[600, 1500]).unwrap();
    }
    if rng.bool() {
        // Guest 2 can reach a network of the other tenant.
        tables.vpcs[1].gateways = vec![ip("10.9.0.254")];
        let prefix = "10.9.9.0/24".parse().unwrap();
        tables.routes.push(Route { vni: vni(200), prefix, peer: PeerId(9), mac: mac(6), mtu: 600 });
        let peering = |of, prefix: &str, to| Peering { vni: vni(of), prefix: prefix.parse().unwrap(), to: vni(to) };
        tables.peerings = vec![peering(100, "10.9.0.0/16", 200), peering(200, "10.0.0.0/24", 100)];
    }
    if rng.u8(0..3) == 0 {
        let rule = |_| AclRule {
            direction: any_direction(rng),
            pattern: any_pattern(rng),
            allow: rng.u8(0..3) > 0,
            log: None,
        };
        tables.vpcs[0].acl = (0..3).map(rule).collect();
    }
    tables.sessions = SessionLimits { total: rng.u32(1..8), per_port: rng.u32(1..6) };
    tables
}
