//! Packets with correct checksums, and reading of their ends.

use std::net::IpAddr;

use bifrost_avs::Verdict;
use bifrost_nic::{Checksum, L3, Parsed, parse, transport_checksum};
use bifrost_wire::{Mac, checksum, ipv4};

use super::{ip, packet};

const ETHERNET: usize = 14;

/// A packet with correct checksums.
pub(crate) fn frame(macs: (Mac, Mac), from: (&str, u16), to: (&str, u16), tcp: Option<u8>) -> Vec<u8> {
    let mut body = [&from.1.to_be_bytes()[..], &to.1.to_be_bytes()].concat();
    let (protocol, at) = match tcp {
        Some(flags) => {
            body.extend([0, 0, 0, 7, 0, 0, 0, 9, 0x50, flags, 1, 0, 0, 0, 0, 0]);
            (6, 16)
        }
        None => {
            body.extend([0, 13, 0, 0]);
            (17, 6)
        }
    };
    body.extend(b"hello");
    let pseudo = match (ip(from.0), ip(to.0)) {
        (IpAddr::V4(s), IpAddr::V4(d)) => checksum::pseudo_v4(s, d, protocol, body.len() as u32),
        (IpAddr::V6(s), IpAddr::V6(d)) => checksum::pseudo_v6(s, d, protocol, body.len() as u32),
        _ => panic!("mixed families"),
    };
    let sum = checksum::finish(pseudo + checksum::sum(&body));
    body[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    packet(macs, from.0, to.0, 64, protocol, &body)
}

pub(crate) fn read(frame: &[u8]) -> Parsed {
    parse(frame, frame.len()).unwrap()
}

pub(crate) type Ends = ((IpAddr, u16), (IpAddr, u16));

pub(crate) fn ends(frame: &[u8]) -> Ends {
    let p = read(frame);
    ((p.src_ip, p.src_port), (p.dst_ip, p.dst_port))
}

pub(crate) fn at(address: &str, port: u16) -> (IpAddr, u16) {
    (ip(address), port)
}

/// The frame that leaves or is delivered. Checks its checksums, which are correct if those of `frame` are.
pub(crate) fn rewritten(frame: &[u8], verdict: &Verdict) -> Vec<u8> {
    let mut out = frame.to_vec();
    if let Some(rewrite) = verdict.rewrite {
        rewrite.apply(&mut out);
    }
    let parsed = read(&out);
    assert_eq!(transport_checksum(&out, &parsed), Checksum::Valid);
    if parsed.kind == L3::V4 {
        assert!(ipv4::checksum_is_valid(&out[ETHERNET..ETHERNET + 20]));
    }
    out
}

/// An ICMP error with a correct checksum that quotes the first `quoted` bytes of a packet.
pub(crate) fn error(macs: (Mac, Mac), src: &str, about: &[u8], quoted: usize) -> Vec<u8> {
    let quote = &about[ETHERNET..about.len().min(ETHERNET + quoted)];
    let to = read(about).src_ip;
    let v6 = to.is_ipv6();
    // "Fragmentation needed" and "packet too big".
    let mut body = if v6 { vec![2, 0, 0, 0, 0, 0, 5, 0] } else { vec![3, 4, 0, 0, 0, 0, 5, 0] };
    body.extend(quote);
    let (pseudo, protocol) = match (ip(src), to) {
        (IpAddr::V6(s), IpAddr::V6(d)) => (checksum::pseudo_v6(s, d, 58, body.len() as u32), 58),
        _ => (0, 1),
    };
    let sum = checksum::finish(pseudo + checksum::sum(&body));
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    packet(macs, src, &to.to_string(), 64, protocol, &body)
}

/// The frame whose packet an ICMP error quotes. Checks the checksums of the error and of all headers.
pub(crate) fn quoted(error: &[u8]) -> Vec<u8> {
    let p = read(error);
    let message = &error[usize::from(p.l4)..p.end as usize];
    let pseudo = match (p.src_ip, p.dst_ip) {
        (IpAddr::V6(s), IpAddr::V6(d)) => checksum::pseudo_v6(s, d, 58, message.len() as u32),
        _ => 0,
    };
    assert_eq!(checksum::finish(pseudo + checksum::sum(message)), 0, "the checksum of the error");
    if p.kind == L3::V4 {
        assert!(ipv4::checksum_is_valid(&error[ETHERNET..ETHERNET + 20]));
        assert!(ipv4::checksum_is_valid(&message[8..28]));
    }
    [&error[..ETHERNET], &message[8..]].concat()
}
