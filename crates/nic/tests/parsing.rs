//! The parser: what it reads, what it refuses, and that no input makes it panic.

#![allow(clippy::unwrap_used)]

mod common;

use std::net::IpAddr;

use bifrost_nic::{FlowKey, L3, Malformed, parse};
use common::{Packet, SRC_MAC};
use proptest::prelude::*;

fn tcp() -> Packet {
    Packet { payload: b"hello".to_vec(), tcp_options: vec![1; 12], ..Packet::default() }
}

#[test]
fn reads_every_field() {
    for (v6, vlan) in [(false, None), (false, Some(7)), (true, None), (true, Some(0))] {
        let p = Packet { v6, vlan, flags: 0x18, ..tcp() };
        // Ethernet padding does not belong to a layer.
        let mut frame = p.build();
        let end = frame.len();
        frame.extend([0; 9]);
        let parsed = parse(&frame, frame.len()).unwrap();
        assert_eq!((parsed.vlan, parsed.kind), (vlan, if v6 { L3::V6 } else { L3::V4 }));
        assert_eq!(parsed.ethertype, if v6 { 0x86dd } else { 0x0800 });
        assert_eq!(
            (parsed.l3 as usize, parsed.l4 as usize, parsed.payload as usize, parsed.end as usize),
            (p.l3(), p.l4(), p.header_len(), end)
        );
        assert_eq!((parsed.src_mac.0, parsed.protocol), (SRC_MAC, 6));
        let src: IpAddr = if v6 { "fd00::1" } else { "10.0.0.1" }.parse().unwrap();
        let dst: IpAddr = if v6 { "fd00::2" } else { "10.0.0.2" }.parse().unwrap();
        assert_eq!(parsed.flow_key(), FlowKey { src, dst, src_port: 40_000, dst_port: 6379, protocol: 6 });
        let t = parsed.tcp.unwrap();
        assert_eq!((t.seq, t.ack, t.flags.0), (1000, 2000, 0x18));
    }
}

#[test]
fn reads_arp() {
    let mut frame = vec![0xff; 6];
    frame.extend(SRC_MAC);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(SRC_MAC);
    frame.extend([10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 10, 0, 0, 2]);
    let parsed = parse(&frame, frame.len()).unwrap();
    assert_eq!(parsed.kind, L3::Arp);
    assert_eq!((parsed.src_ip.to_string(), parsed.dst_ip.to_string()), ("10.0.0.1".into(), "10.0.0.2".into()));
    assert_eq!(parse(&frame[..41], 41), Err(Malformed::ArpTruncated));
    frame[15] = 6;
    assert_eq!(parse(&frame, frame.len()), Err(Malformed::ArpKind));
}

#[test]
fn walks_ipv6_extension_headers() {
    let p = Packet { v6: true, ..tcp() };
    let plain = p.build();
    let with = |first: u8, chain: &[u8]| {
        let mut f = plain.clone();
        f.splice(54..54, chain.iter().copied());
        f[20] = first;
        let len = (f.len() - 54) as u16;
        f[18..20].copy_from_slice(&len.to_be_bytes());
        f
    };
    // Hop-by-hop, then destination options of 16 bytes, then TCP.
    let two = [&[60, 0, 1, 4, 0, 0, 0, 0][..], &[6, 1], &[0; 14]].concat();
    let frame = with(0, &two);
    let parsed = parse(&frame, frame.len()).unwrap();
    assert_eq!((parsed.l4, parsed.protocol, parsed.src_port), (78, 6, 40_000));
    // An atomic fragment (RFC 6946) is a whole packet; a first fragment is not.
    let frame = with(44, &[6, 0, 0, 0, 0, 0, 0, 1]);
    let parsed = parse(&frame, frame.len()).unwrap();
    assert!(!parsed.is_fragment() && parsed.is_tcp());
    let mut frame = with(44, &[6, 0, 0, 1, 0, 0, 0, 1]);
    // The data of every fragment but the last is a multiple of 8 bytes (RFC 8200, 4.5).
    frame.truncate(54 + ((frame.len() - 54) & !7));
    frame[19] = (frame.len() - 54) as u8;
    let parsed = parse(&frame, frame.len()).unwrap();
    assert!(parsed.is_fragment() && !parsed.is_tcp());
    assert_eq!((parsed.protocol, parsed.src_port), (6, 0));
    let endless = [60, 0, 1, 4, 0, 0, 0, 0].repeat(9);
    let frame = with(60, &endless);
    assert_eq!(parse(&frame, frame.len()), Err(Malformed::Ipv6Extensions));
    let frame = with(60, &[6, 200, 0, 0, 0, 0, 0, 0]);
    assert_eq!(parse(&frame, frame.len()), Err(Malformed::Ipv6Extensions));
    let mut long = vec![6, 40];
    long.extend([0; 41 * 8 - 2]);
    let frame = with(60, &long);
    assert_eq!(parse(&frame, frame.len()), Err(Malformed::HeadTooShort), "after the first 256 bytes");
}

#[test]
fn refuses_with_the_right_reason() {
    type Case = (&'static str, fn() -> Packet, usize, &'static [(usize, u8)], Malformed);
    let v4: fn() -> Packet = tcp;
    let v6: fn() -> Packet = || Packet { v6: true, ..tcp() };
    let udp: fn() -> Packet = || Packet { udp: true, ..tcp() };
    let vlan: fn() -> Packet = || Packet { vlan: Some(1), ..tcp() };
    // Packet, length to truncate it to (0: whole), bytes to change, reason.
    let cases: &[Case] = &[
        ("Ethernet truncated", v4, 13, &[], Malformed::EthernetTruncated),
        ("tag truncated", vlan, 17, &[], Malformed::EthernetTruncated),
        ("IPv4 truncated", v4, 33, &[], Malformed::Ipv4Truncated),
        ("IPv4 version", v4, 0, &[(14, 0x65)], Malformed::Ipv4Header),
        ("IPv4 header length", v4, 0, &[(14, 0x44)], Malformed::Ipv4Header),
        ("IPv4 total below header", v4, 0, &[(17, 19), (16, 0)], Malformed::Ipv4Length),
        ("IPv4 total just beyond frame", v4, 0, &[(17, 58)], Malformed::Ipv4Length),
        ("IPv4 total beyond frame", v4, 0, &[(16, 1)], Malformed::Ipv4Length),
        ("IPv4 options beyond total", v4, 0, &[(14, 0x4e), (17, 52)], Malformed::Ipv4Length),
        ("IPv6 truncated", v6, 53, &[], Malformed::Ipv6Truncated),
        ("IPv6 version", v6, 0, &[(14, 0x40)], Malformed::Ipv6Header),
        ("IPv6 length", v6, 0, &[(18, 1)], Malformed::Ipv6Length),
        ("TCP truncated", v4, 0, &[(17, 39)], Malformed::TcpHeader),
        ("TCP offset small", v4, 0, &[(46, 0x40)], Malformed::TcpHeader),
        ("TCP offset beyond packet", v4, 0, &[(46, 0xf0)], Malformed::TcpHeader),
        ("UDP truncated", udp, 0, &[(17, 27)], Malformed::UdpHeader),
        ("UDP length small", udp, 0, &[(39, 7)], Malformed::UdpHeader),
        ("UDP length beyond packet", udp, 0, &[(39, 14)], Malformed::UdpHeader),
    ];
    for (name, packet, len, changes, reason) in cases {
        let mut frame = packet().build();
        for (at, value) in *changes {
            frame[*at] = *value;
        }
        if *len != 0 {
            frame.truncate(*len);
        }
        assert_eq!(parse(&frame, frame.len()), Err(*reason), "{name}");
    }
    assert_eq!(parse(&[0; 256], 100_000), Err(Malformed::FrameTooLong));
    let frame = tcp().build();
    assert_eq!(parse(&frame[..60], frame.len()), Err(Malformed::HeadTooShort));
}

#[test]
fn a_first_fragment_has_the_headers_of_the_packet() {
    let mut frame = Packet { udp: true, df: false, payload: vec![1; 64], ..Packet::default() }.build();
    frame[20] = 0x20;
    // Of the whole datagram.
    frame[38..40].copy_from_slice(&3000u16.to_be_bytes());
    let parsed = parse(&frame, frame.len()).unwrap();
    assert_eq!(parsed.fragment.map(|f| (f.offset, f.more)), Some((0, true)));
    let whole = parsed.as_whole(&frame).unwrap();
    assert_eq!((whole.parsed.src_port, whole.parsed.dst_port, whole.least_len), (40_000, 6379, 3000));
    assert!(!whole.parsed.is_fragment());
    frame[21] = 9;
    assert_eq!(parse(&frame, frame.len()).unwrap().as_whole(&frame), None, "a later one");
    frame[20..22].fill(0);
    frame[38..40].copy_from_slice(&72u16.to_be_bytes());
    assert_eq!(parse(&frame, frame.len()).unwrap().as_whole(&frame), None, "no fragment");
}

#[test]
fn fragments_that_hide_the_transport_header_are_refused() {
    let v4 = |udp, field: u16, payload: usize| {
        let mut f = Packet { udp, df: false, payload: vec![1; 200], ..Packet::default() }.build();
        f.truncate(34 + payload);
        f[16..18].copy_from_slice(&(20 + payload as u16).to_be_bytes());
        f[20..22].copy_from_slice(&field.to_be_bytes());
        f
    };
    let more = 0x2000;
    let protocol = |mut f: Vec<u8>, protocol| {
        f[23] = protocol;
        f
    };
    let tiny = Err(Malformed::TinyFragment);
    let length = Err(Malformed::FragmentLength);
    let cases = [
        ("TCP, all of the header", v4(false, more, 24), Ok(())),
        ("TCP without flags", v4(false, more, 8), tiny),
        ("TCP without urgent pointer", v4(false, more, 16), tiny),
        (
            "TCP with options in another fragment",
            {
                let mut f = v4(false, more, 24);
                f[46] = 0xf0;
                f
            },
            tiny,
        ),
        (
            "TCP with an invalid header",
            {
                let mut f = v4(false, more, 24);
                f[46] = 0x10;
                f
            },
            tiny,
        ),
        ("TCP over the flags", v4(false, 1, 40), tiny),
        ("TCP after the flags, over the header's end", v4(false, 2 | more, 40), tiny),
        ("TCP after the header", v4(false, 3 | more, 40), Ok(())),
        ("UDP, all of the header", v4(true, more, 8), Ok(())),
        ("UDP after the header", v4(true, 1, 40), Ok(())),
        ("a first fragment whose length is not a multiple of 8", v4(true, more, 20), length),
        ("a later one whose length is not a multiple of 8", v4(true, 1 | more, 20), length),
        ("the last one may be", v4(true, 1, 20), Ok(())),
        ("without payload", v4(true, 1, 0), length),
        ("without payload, the first", v4(true, more, 0), length),
        ("beyond the maximum length", v4(true, 0x1fff, 1), length),
        ("up to the maximum length", v4(true, 0x1ffd, 3), Ok(())),
        ("one byte further", v4(true, 0x1ffd, 4), length),
        ("ICMP", protocol(v4(true, more, 8), 1), Ok(())),
        ("a protocol without ports", protocol(v4(true, more, 8), 47), Ok(())),
    ];
    for (name, frame, expected) in cases {
        assert_eq!(parse(&frame, frame.len()).map(|_| ()), expected, "{name}");
    }
    // Fewer bytes than the header: the caller's fault.
    let frame = v4(false, more, 24);
    assert_eq!(parse(&frame[..50], frame.len()), Err(Malformed::HeadTooShort));
}

#[test]
fn source_routes_are_refused() {
    let with = |ip_options: &[u8]| {
        let frame = Packet { ip_options: ip_options.to_vec(), ..tcp() }.build();
        parse(&frame, frame.len()).map(|_| ())
    };
    assert_eq!(with(&[7, 7, 4, 0, 0, 0, 0, 0]), Ok(()), "record route");
    assert_eq!(with(&[131, 7, 4, 10, 0, 0, 9, 0]), Err(Malformed::SourceRoute));
    assert_eq!(with(&[1, 137, 7, 4, 10, 0, 0, 9]), Err(Malformed::SourceRoute));
    assert_eq!(with(&[7, 9, 4, 0, 0, 0, 0, 0]), Err(Malformed::Ipv4Options));
}

#[test]
fn fragments_of_a_datagram_are_one_flow() {
    let mut first = Packet { udp: true, df: false, payload: vec![1; 64], ..Packet::default() }.build();
    first[20] = 0x20;
    let mut second = first.clone();
    second[21] = 9;
    second[34..42].fill(0xee);
    let (a, b) = (parse(&first, first.len()).unwrap(), parse(&second, second.len()).unwrap());
    assert!(a.is_fragment() && b.is_fragment());
    assert_eq!(a.flow_hash, b.flow_hash);
    assert_eq!((a.src_port, b.src_port), (0, 0));
}

proptest! {
    #[test]
    fn parsing_any_bytes_does_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), extra in 0usize..70_000) {
        for total in [bytes.len(), bytes.len() + extra] {
            if let Ok(p) = parse(&bytes, total) {
                prop_assert!(p.l3 <= p.l4 && p.l4 <= p.payload && u32::from(p.payload) <= p.end && p.end as usize <= total);
            }
        }
    }

    #[test]
    fn damaged_frames_do_not_panic_and_the_head_is_enough(
        v6 in any::<bool>(), udp in any::<bool>(), payload in 0usize..600,
        flips in proptest::collection::vec((0usize..80, any::<u8>()), 0..4),
    ) {
        let mut frame = Packet { v6, udp, payload: vec![3; payload], ..tcp() }.build();
        for (at, value) in flips {
            if let Some(byte) = frame.get_mut(at) {
                *byte = value;
            }
        }
        let whole = parse(&frame, frame.len());
        prop_assert_eq!(parse(&frame[..frame.len().min(256)], frame.len()), whole);
        if let Ok(p) = whole {
            prop_assert!(p.l3 <= p.l4 && p.l4 <= p.payload && u32::from(p.payload) <= p.end && p.end as usize <= frame.len());
            bifrost_nic::verify_transport_checksum(&frame, &p);
        }
    }
}
