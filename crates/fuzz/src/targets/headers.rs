//! Every standard header: parsers handle any input without a panic, and emitting reverses parsing.

use std::net::Ipv6Addr;

use bifrost_wire::icmp::{v4, v6};
use bifrost_wire::{arp, checksum, ethernet, ipv4, ipv6, tcp, udp, virtio_net};

pub(crate) fn run(bytes: &[u8]) {
    link(bytes);
    network(bytes);
    transport(bytes);
    messages(bytes);
    sums(bytes);
}

fn link(bytes: &[u8]) {
    if let Ok(header) = ethernet::Header::parse(bytes) {
        let mut out = [0; ethernet::MAX_HEADER_LEN];
        let len = header.emit_into(&mut out);
        assert_eq!(len, header.header_len());
        assert_eq!(out[..len], bytes[..len]);
    }
    if let Ok(header) = virtio_net::Header::parse(bytes) {
        assert_eq!(header.emit(), bytes[..virtio_net::LEN]);
    }
    if let Ok(header) = virtio_net::Header::parse_short(bytes) {
        assert_eq!(header.emit_short(), bytes[..virtio_net::SHORT_LEN]);
    }
}

fn network(bytes: &[u8]) {
    if let Ok(header) = ipv4::Header::parse_quoted(bytes) {
        assert!((20..=60).contains(&header.header_len) && usize::from(header.header_len) <= bytes.len());
        assert!(header.total_len >= u16::from(header.header_len) && header.fragment_offset % 8 == 0);
        let out = header.emit();
        assert!(ipv4::checksum_is_valid(&out));
        if header.header_len == 20 {
            let again = ipv4::Header { checksum: u16::from_be_bytes([out[10], out[11]]), ..header };
            assert_eq!(ipv4::Header::parse_quoted(&out), Ok(again));
        }
        assert_eq!(ipv4::Header::parse(bytes).is_ok(), usize::from(header.total_len) <= bytes.len());
        rewrite_v4(bytes);
    }
    if let Ok(header) = ipv6::Header::parse_quoted(bytes) {
        assert_eq!(header.emit(), bytes[..ipv6::HEADER_LEN]);
        if let Ok(transport) = header.transport(bytes) {
            assert!((ipv6::HEADER_LEN..=header.total_len().min(bytes.len())).contains(&transport.offset));
        }
    }
    if let Ok(packet) = arp::Packet::parse(bytes) {
        assert_eq!(packet.emit(), bytes[..arp::LEN]);
        assert_eq!(
            arp::Packet::parse(&packet.reply(packet.sender_mac).emit()).map(|p| p.operation),
            Ok(arp::Operation::Reply)
        );
    }
}

/// Fields changed in place keep a valid checksum valid, and a wrong one wrong.
fn rewrite_v4(bytes: &[u8]) {
    let Some(mut header) = bytes.first_chunk::<{ ipv4::HEADER_LEN }>().copied() else { return };
    let valid = checksum::is_valid(&header);
    ipv4::set_ttl(&mut header, bytes[8].wrapping_sub(1));
    ipv4::set_total_len(&mut header, u16::from_be_bytes([bytes[3], bytes[2]]));
    ipv4::set_ecn(&mut header, bytes[1] & 3 ^ 1);
    assert_eq!(checksum::is_valid(&header), valid);
}

fn transport(bytes: &[u8]) {
    if let Ok(header) = tcp::Header::parse(bytes) {
        let out = header.emit();
        let len = usize::from(header.header_len);
        assert!((20..=60).contains(&len) && len <= bytes.len());
        if len == 20 && bytes[12] & 0x0f == 0 {
            assert_eq!(out, bytes[..20]);
        }
        // Bounded by the 40 bytes that options can have.
        assert!(tcp::options(&header, bytes).count() <= 40);
        let _ = tcp::timestamps(&header, bytes);
    }
    if let Ok(header) = udp::Header::parse(bytes) {
        assert_eq!(header.emit(), bytes[..8]);
        assert!((8..=bytes.len()).contains(&usize::from(header.len)));
    }
}

fn messages(bytes: &[u8]) {
    if let Ok(message) = v4::Message::parse(bytes) {
        let rest = &bytes[v4::HEADER_LEN..];
        let out = [&message.emit(rest)[..], rest].concat();
        assert!(v4::checksum_is_valid(&out));
        assert_eq!(v4::Message::parse(&out), Ok(message));
    }
    let (a, b) = (Ipv6Addr::LOCALHOST, Ipv6Addr::from(0xff02_u128 << 112 | 1));
    let emitted = match v6::Message::parse(bytes) {
        Ok(v6::Message::Solicitation(s)) => Some(s.emit(a, b)),
        Ok(v6::Message::Advertisement(s)) => Some(s.emit(a, b)),
        _ => None,
    };
    if let Some((out, len)) = emitted {
        assert!(v6::checksum_is_valid(&out[..len], a, b));
        assert_eq!(v6::Message::parse(&out[..len]), v6::Message::parse(bytes));
    }
}

/// The fast sums against RFC 1071 word by word.
fn sums(bytes: &[u8]) {
    let slow = |bytes: &[u8]| {
        let words = bytes.chunks(2).map(|pair| u64::from(pair[0]) << 8 | u64::from(pair.get(1).copied().unwrap_or(0)));
        let mut sum: u64 = words.sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    };
    assert_eq!(checksum::fold(checksum::sum(bytes)), slow(bytes));
    let mut copy = vec![0; bytes.len()];
    assert_eq!(checksum::fold(checksum::copy_and_sum(bytes, &mut copy)), slow(bytes));
    assert_eq!(copy, bytes);
    let (front, back) = bytes.split_at(bytes.len() / 3);
    assert_eq!(checksum::Sum::new().then(front).then(back).finish(), !slow(bytes));
}
