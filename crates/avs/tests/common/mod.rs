//! A small world, and frames for it.
#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod any;
pub(crate) mod ends;
pub(crate) mod outside;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_avs::{
    Action, DropReason, Ordering, PeerId, Port, PortId, Reliability, Route, Switch, Tables, Verdict, Vpc,
};
use bifrost_nic::{Offload, parse};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::icmp::v6;
use bifrost_wire::{Mac, Vni, arp, checksum, ipv4, ipv6};

pub(crate) const fn mac(n: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, n])
}

pub(crate) fn vni(n: u32) -> Vni {
    Vni::new(n).unwrap()
}

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Two tenants with the same addresses. VNI 100: vNICs 1 and 2 on this host as ports 0 and 1, vNIC 3 at peer 1, vNIC
/// 4 at peer 2 with a network behind it, and gateways. VNI 200: vNIC 1 on this host as port 5, vNIC 3 at peer 9.
pub(crate) fn tables() -> Tables {
    let port = |id, n, mac_of, addresses: &[&str]| Port {
        id: PortId(id),
        vni: vni(n),
        mac: mac(mac_of),
        addresses: addresses.iter().map(|a| ip(a)).collect(),
        routed: vec![],
        mtu: 1500,
        groups: vec![],
        home: None,
    };
    let route = |n, prefix: &str, peer, mac_of| Route {
        vni: vni(n),
        prefix: prefix.parse().unwrap(),
        peer: PeerId(peer),
        mac: mac(mac_of),
        mtu: 1500,
    };
    Tables {
        vpcs: vec![
            Vpc {
                vni: vni(100),
                reliability: Reliability::Tcp,
                ordering: Ordering::Flow,
                gateways: vec![ip("10.0.0.254"), ip("fd00::fe")],
                acl: vec![],
            },
            Vpc {
                vni: vni(200),
                reliability: Reliability::All,
                ordering: Ordering::Strict,
                gateways: vec![],
                acl: vec![],
            },
        ],
        ports: vec![
            port(0, 100, 1, &["10.0.0.1", "fd00::1"]),
            port(1, 100, 2, &["10.0.0.2", "fd00::2"]),
            port(5, 200, 1, &["10.0.0.1"]),
        ],
        routes: vec![
            route(100, "10.0.0.3/32", 1, 3),
            route(100, "fd00::3/128", 1, 3),
            route(100, "10.1.0.0/16", 2, 4),
            route(200, "10.0.0.3/32", 9, 3),
        ],
        ..Tables::default()
    }
}

pub(crate) fn switch() -> Switch {
    Switch::build(&tables(), 0).unwrap()
}

fn eth(src: Mac, dst: Mac, ethertype: u16) -> Vec<u8> {
    ethernet::Header::new(dst, src, ethertype).emit().to_vec()
}

/// An IP packet with `body` as transport header and payload.
pub(crate) fn packet(macs: (Mac, Mac), src: &str, dst: &str, ttl: u8, protocol: u8, body: &[u8]) -> Vec<u8> {
    match (ip(src), ip(dst)) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let header = ipv4::Header {
                header_len: 20,
                traffic_class: 0,
                total_len: 20 + body.len() as u16,
                identification: 7,
                dont_fragment: true,
                more_fragments: false,
                fragment_offset: 0,
                ttl,
                protocol,
                checksum: 0,
                source,
                destination,
            };
            [&eth(macs.0, macs.1, ethertype::IPV4)[..], &header.emit(), body].concat()
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let header = ipv6::Header {
                traffic_class: 0,
                flow_label: 0,
                payload_len: body.len() as u16,
                next_header: protocol,
                hop_limit: ttl,
                source,
                destination,
            };
            [&eth(macs.0, macs.1, ethertype::IPV6)[..], &header.emit(), body].concat()
        }
        _ => panic!("mixed families"),
    }
}

pub(crate) fn tcp(macs: (Mac, Mac), src: &str, dst: &str) -> Vec<u8> {
    let mut body = [0; 20];
    body[12] = 0x50;
    packet(macs, src, dst, 64, 6, &body)
}

pub(crate) fn udp(macs: (Mac, Mac), src: &str, dst: &str, ports: (u16, u16)) -> Vec<u8> {
    let [a, b] = ports.0.to_be_bytes();
    let [c, d] = ports.1.to_be_bytes();
    packet(macs, src, dst, 64, 17, &[a, b, c, d, 0, 8, 0, 0])
}

pub(crate) fn arp(macs: (Mac, Mac), operation: arp::Operation, sender: (Mac, &str), target: (Mac, &str)) -> Vec<u8> {
    let v4 = |text: &str| text.parse::<Ipv4Addr>().unwrap();
    let packet = arp::Packet {
        operation,
        sender_mac: sender.0,
        sender_ip: v4(sender.1),
        target_mac: target.0,
        target_ip: v4(target.1),
    };
    [&eth(macs.0, macs.1, ethertype::ARP)[..], &packet.emit()].concat()
}

pub(crate) fn v6_addr(text: &str) -> Ipv6Addr {
    text.parse().unwrap()
}

pub(crate) fn solicit(
    macs: (Mac, Mac),
    src: &str,
    dst: &str,
    ttl: u8,
    source_mac: Option<Mac>,
    target: &str,
) -> Vec<u8> {
    let s = v6::Solicitation { target: v6_addr(target), source_mac };
    let (body, len) = s.emit(v6_addr(src), v6_addr(dst));
    packet(macs, src, dst, ttl, 58, &body[..len])
}

pub(crate) fn advertise(macs: (Mac, Mac), src: &str, dst: &str, a: v6::Advertisement) -> Vec<u8> {
    let (body, len) = a.emit(v6_addr(src), v6_addr(dst));
    packet(macs, src, dst, 255, 58, &body[..len])
}

/// A ping with `payload`, checksum included.
pub(crate) fn ping(macs: (Mac, Mac), src: &str, dst: &str, payload: &[u8]) -> Vec<u8> {
    let v6 = ip(src).is_ipv6();
    let mut body = vec![if v6 { 128 } else { 8 }, 0, 0, 0, 0x12, 0x34, 0, 1];
    body.extend_from_slice(payload);
    let pseudo = match (ip(src), ip(dst)) {
        (IpAddr::V6(s), IpAddr::V6(d)) => checksum::pseudo_v6(s, d, 58, body.len() as u32),
        _ => 0,
    };
    let sum = checksum::finish(pseudo + checksum::sum(&body));
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    packet(macs, src, dst, 64, if v6 { 58 } else { 1 }, &body)
}

/// A fragment of the packet in `whole`: bytes `from..to` of what follows its fixed IP header.
pub(crate) fn piece(whole: &[u8], identification: u32, from: usize, to: usize, more: bool) -> Vec<u8> {
    let v6 = whole[12..14] == ethertype::IPV6.to_be_bytes();
    let l4 = if v6 { 54 } else { 34 };
    let field = (from as u16) | u16::from(more);
    let mut out = whole[..l4].to_vec();
    if v6 {
        let next = std::mem::replace(&mut out[20], 44);
        out.extend([next, 0]);
        out.extend(field.to_be_bytes());
        out.extend(identification.to_be_bytes());
    } else {
        let field = (from / 8) as u16 | if more { 0x2000 } else { 0 };
        out[18..20].copy_from_slice(&(identification as u16).to_be_bytes());
        out[20..22].copy_from_slice(&field.to_be_bytes());
    }
    out.extend(&whole[l4 + from..l4 + to]);
    let len = (out.len() - 14) as u16;
    if v6 {
        out[18..20].copy_from_slice(&(len - 40).to_be_bytes());
    } else {
        out[16..18].copy_from_slice(&len.to_be_bytes());
    }
    out
}

/// The packet fragmented at these offsets.
pub(crate) fn pieces(whole: &[u8], identification: u32, at: &[usize]) -> Vec<Vec<u8>> {
    let l4 = if whole[12..14] == ethertype::IPV6.to_be_bytes() { 54 } else { 34 };
    let end = whole.len() - l4;
    let starts = std::iter::once(0).chain(at.iter().copied());
    let ends = at.iter().copied().chain([end]);
    starts.zip(ends).map(|(from, to)| piece(whole, identification, from, to, to != end)).collect()
}

pub(crate) fn guest(switch: &mut Switch, port: u32, frame: &[u8]) -> Verdict {
    let parsed = parse(frame, frame.len()).unwrap();
    *switch.from_guest(PortId(port), frame, frame.len(), Offload::default(), &parsed)
}

/// The verdict if the switch replies to a guest of the first tenant.
pub(crate) fn answered() -> Verdict {
    Verdict::unchanged(Action::Answer { vni: vni(100) })
}

pub(crate) fn underlay(switch: &mut Switch, n: u32, peer: u32, frame: &[u8]) -> Result<PortId, DropReason> {
    let parsed = parse(frame, frame.len()).unwrap();
    match *switch.from_underlay(vni(n), PeerId(peer), frame, &parsed) {
        Verdict { action: Action::Deliver { port, worker: None }, rewrite: None, fragment_to: None } => Ok(port),
        Verdict { action: Action::Drop(reason), .. } => Err(reason),
        other => panic!("{other:?}, though it fits"),
    }
}
