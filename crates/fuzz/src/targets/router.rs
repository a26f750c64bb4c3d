//! A guest sends router solicitations and DHCPv6 requests that are nearly valid, and messages that only routers and
//! servers may send: it gets its own addresses or none, no other guest receives its messages, and none believes them.

use std::net::{IpAddr, Ipv6Addr};

use bifrost_avs::{Action, GATEWAY_MAC, Ipv6Lease, Lease, PortId, Switch, Tables};
use bifrost_nic::{Checksum, L3, Offload, Parsed, parse, transport_checksum};
use bifrost_wire::protocol::{ICMPV6, UDP};
use bifrost_wire::{Mac, checksum, ethernet, icmp, ipv6, udp};

use super::frame;
use super::tables::{mac, plain_tables};
use crate::Input;

const OWN: [Ipv6Addr; 2] = [address(0, 1), address(1, 1)];
const ME: Ipv6Addr = link_local(1);
const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0x00bf, 0x00ff, 0xfe00, 1);
const SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
const ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
const ALL: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

const fn address(subnet: u16, n: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0, 0, subnet, 0, 0, 0, n)
}

/// Address of vNIC `n`.
const fn link_local(n: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0x00ff, 0xfe00, n)
}

pub(super) fn run(input: &mut Input<'_>) {
    let mut switch = Switch::build(&tables(input), 0).unwrap_or_else(|e| panic!("{e}"));
    let mut now_ns = 1 << 40;
    while !input.is_empty() {
        now_ns += u64::from(input.u8()) << 26;
        switch.advance(now_ns);
        for _ in 0..2 {
            let Some(port) = switch.advertise() else { break };
            assert_eq!(port, PortId(0), "no other port gets it");
            answered(switch.answer());
        }
        assert!(switch.next_advertisement_ns().is_none_or(|next_ns| next_ns > now_ns), "advertised twice to one port");
        let frame = frame(input);
        let Ok(parsed) = parse(&frame, frame.len()) else { continue };
        // A port may pass less than the whole frame, but never less than the headers.
        let unseen = input.pick(&[0, 0, 0, 1, 40]).min(frame.len() - usize::from(parsed.payload));
        // A first fragment's transport header counts as payload here.
        let unseen = if parsed.is_fragment() { 0 } else { unseen };
        let head = &frame[..frame.len() - unseen];
        match switch.from_guest(PortId(0), head, frame.len(), Offload::default(), &parsed).action {
            Action::Answer { .. } if is_question(&frame, &parsed) => answered(switch.answer()),
            Action::Answer { .. } | Action::Host | Action::Copy | Action::Ask { .. } | Action::Drop(_) => {}
            Action::Forward { .. } | Action::Deliver { .. } => {
                assert!(!parsed.dst_mac.is_multicast(), "other guests receive the request");
                assert!(!is_of_router(&frame, &parsed), "the guest can pretend to be a router or server");
            }
        }
    }
}

fn tables(input: &mut Input<'_>) -> Tables {
    let addresses = OWN.into_iter().map(|own| (own, input.pick(&[64, 0, 128, 200, 57])));
    let lease = Ipv6Lease {
        port: PortId(0),
        addresses: addresses.collect(),
        dns: vec![address(0, 53); input.below(Lease::MAX_DNS + 2)],
        domain: input.chance(128).then(|| "d".repeat(input.below(80))),
        mtu: input.pick(&[1500, 1280, 1279, 0, 65_535]),
        seconds: input.pick(&[3600, 60, 0, u32::MAX]),
        interval_s: input.pick(&[600, 4, 1800]),
    };
    #[cfg_attr(not(feature = "mutations"), allow(unused_mut))]
    let mut tables = Tables { ipv6_leases: vec![lease], ..plain_tables() };
    #[cfg(feature = "mutations")]
    {
        tables.mutation = super::tables::mutation();
    }
    tables
}

/// Whether a packet is a request to routers or servers. The switch may answer other packets that are too large.
fn is_question(frame: &[u8], parsed: &Parsed) -> bool {
    if !parsed.dst_ip.is_multicast() && parsed.dst_ip != IpAddr::V6(ROUTER) {
        return false;
    }
    let solicitation = parsed.protocol == ICMPV6 && frame.get(usize::from(parsed.l4)) == Some(&133);
    parsed.kind == L3::V6 && (solicitation || (parsed.protocol == UDP && parsed.dst_port == 547))
}

/// Whether a packet, or the first fragment of one, is a message that only routers and servers may send.
fn is_of_router(frame: &[u8], parsed: &Parsed) -> bool {
    if parsed.kind != L3::V6 || parsed.fragment.is_some_and(|fragment| fragment.offset != 0) {
        return false;
    }
    let kind = frame.get(usize::from(parsed.l4));
    let of_router = parsed.protocol == ICMPV6 && [Some(&134), Some(&137)].contains(&kind);
    let to = parsed.as_whole(frame).map_or(parsed.dst_port, |whole| whole.parsed.dst_port);
    of_router || (parsed.protocol == UDP && to == 546)
}

/// An answer to a request, or an unsolicited advertisement.
fn answered(answer: &[u8]) {
    let parsed = parse(answer, answer.len()).unwrap_or_else(|e| panic!("malformed answer: {e}"));
    assert_eq!((parsed.src_mac, parsed.src_ip), (GATEWAY_MAC, IpAddr::V6(ROUTER)));
    assert!(answer.len() <= 14 + 1280, "larger than the smallest MTU");
    let IpAddr::V6(to) = parsed.dst_ip else { panic!("of IPv4") };
    let to_all = (parsed.dst_mac, to) == (Mac([0x33, 0x33, 0, 0, 0, 1]), ALL);
    let own = [ME, OWN[0], OWN[1], address(0, 1)];
    assert!(to_all || (parsed.dst_mac == mac(1) && own.contains(&to)), "the answer goes to another guest");
    let message = &answer[usize::from(parsed.l4)..];
    if parsed.protocol == ICMPV6 {
        assert!(icmp::v6::checksum_is_valid(message, ROUTER, to));
        assert_eq!((message[0], answer[21]), (134, 255));
        options_of_router(&message[16..]);
    } else {
        assert_eq!(transport_checksum(answer, &parsed), Checksum::Valid);
        assert_eq!((parsed.src_port, parsed.dst_port, to_all), (547, 546, false));
        options_of_server(&message[12..]);
    }
}

fn options_of_router(mut rest: &[u8]) {
    while let [kind, units, ..] = rest {
        let option = &rest[..usize::from(*units) * 8];
        if *kind == 3 {
            assert_eq!(option[3], 0x80, "a guest may choose its own addresses");
        }
        rest = &rest[option.len()..];
    }
    assert!(rest.is_empty());
}

fn options_of_server(mut rest: &[u8]) {
    while let [a, b, c, d, data @ ..] = rest {
        let (kind, len) = (u16::from_be_bytes([*a, *b]), usize::from(u16::from_be_bytes([*c, *d])));
        let option = &data[..len];
        match kind {
            3 | 25 => options_of_server(&option[12..]),
            4 => options_of_server(&option[4..]),
            5 => {
                let given = option[16..24] != [0; 8];
                assert!(!given || OWN.iter().any(|own| own.octets() == option[..16]), "another guest's address");
            }
            _ => {}
        }
        rest = &data[len..];
    }
    assert!(rest.is_empty());
}

fn frame(input: &mut Input<'_>) -> Vec<u8> {
    let (protocol, ports, mut message) = match input.below(8) {
        0..4 => (UDP, Some((input.pick(&[546, 546, 1]), input.pick(&[547, 547, 547, 548]))), request(input)),
        4 => (ICMPV6, None, solicitation(input)),
        5 => {
            let kind = input.pick(&[134, 137, 133, 136]);
            (ICMPV6, None, [&[kind, 0, 0, 0, 64, 0x80, 7, 8][..], input.bytes(32)].concat())
        }
        6 => (UDP, Some((547, 546)), request(input)),
        _ => return frame::frame(input, 64),
    };
    for _ in 0..input.u8() / 100 {
        let at = usize::from(input.u16()) % message.len();
        message[at] = input.u8();
    }
    if input.chance(20) {
        message.truncate(usize::from(input.u16()) % message.len());
    }
    let source = input.pick(&[ME, ME, ME, OWN[0], Ipv6Addr::UNSPECIFIED]);
    let group = if protocol == UDP { SERVERS } else { ROUTERS };
    let destination = input.pick(&[group, link_local(2), ROUTER, ALL, address(0, 254), address(0, 3)]);
    let to = match destination.octets() {
        [0xff, .., a, b, c, d] => Mac([0x33, 0x33, a, b, c, d]),
        [0xfe, .., 2] => mac(2),
        _ => GATEWAY_MAC,
    };
    let payload = match ports {
        Some((source_port, destination_port)) => {
            let len = (udp::HEADER_LEN + message.len()) as u16;
            [&udp::Header { source_port, destination_port, len, checksum: 0 }.emit()[..], &message].concat()
        }
        None => message,
    };
    let next_header = if input.chance(20) { 44 } else { protocol };
    let fragment = [protocol, 0, 0, input.pick(&[0, 1, 8]), 0, 0, 0, 7];
    let payload = if next_header == 44 { [&fragment[..], &payload].concat() } else { payload };
    let ip = ipv6::Header {
        hop_limit: input.pick(&[255, 255, 255, 64]),
        ..ipv6::Header::new(source, destination, next_header, payload.len() as u16)
    };
    let mut all =
        [&ethernet::Header::new(to, mac(1), ethernet::ethertype::IPV6).emit()[..], &ip.emit(), &payload].concat();
    if next_header == ICMPV6 && payload.len() >= 4 {
        let sum = checksum::pseudo_v6(source, destination, ICMPV6, payload.len() as u32);
        let sum = checksum::Sum::starting(sum).then(&payload).finish();
        all[56..58].copy_from_slice(&sum.to_be_bytes());
    }
    all
}

fn solicitation(input: &mut Input<'_>) -> Vec<u8> {
    let mut message = vec![133, 0, 0, 0, 0, 0, 0, 0];
    for _ in 0..input.below(3) {
        message.extend([input.pick(&[1, 14, 2]), input.pick(&[1, 1, 1, 0, 2]), 2, 0, 0, 0, 0, input.pick(&[1, 1, 2])]);
    }
    message
}

fn request(input: &mut Input<'_>) -> Vec<u8> {
    let mut message = vec![input.pick(&[1, 3, 4, 5, 6, 8, 9, 11, 2, 7, 12, 0]), 1, 2, 3];
    let put = |message: &mut Vec<u8>, kind: u16, data: &[u8]| {
        message.extend(kind.to_be_bytes());
        message.extend((data.len() as u16).to_be_bytes());
        message.extend(data);
    };
    for _ in 0..input.below(6) {
        match input.below(8) {
            0 | 1 => put(&mut message, 1, &[0, 3, 0, 1, 2, 0, 0, 0, 0, 1]),
            2 => put(&mut message, 2, &[0, 3, 0, 1, 2, 0xbf, 0, 0, 0, input.pick(&[1, 1, 1, 2])]),
            3 | 4 => {
                let kind = input.pick(&[3, 3, 4, 25]);
                let mut data = vec![0; if kind == 4 { 4 } else { 12 }];
                for _ in 0..input.below(3) {
                    let named = input.pick(&[OWN[0], OWN[1], address(0, 2), address(9, 1)]);
                    put(&mut data, 5, &[&named.octets()[..], &[0; 8]].concat());
                }
                put(&mut message, kind, &data);
            }
            5 => put(&mut message, 6, &[0, 23, 0, 24, 0, 32]),
            6 => put(&mut message, 14, &[]),
            _ => {
                let (kind, len) = (u16::from(input.u8() % 40), input.below(140));
                put(&mut message, kind, input.bytes(len));
            }
        }
    }
    message
}
