//! Properties of the standard headers and of the checksum, against naive oracles.

#![allow(missing_docs, clippy::unwrap_used)]

use std::net::{Ipv4Addr, Ipv6Addr};

use bifrost_wire::{Mac, Vni, arp, checksum, ethernet, icmp, ipv4, ipv6, protocol, tcp, udp, virtio_net, vxlan};
use proptest::collection::vec;
use proptest::prelude::*;

/// RFC 1071 word by word.
fn naive_sum(bytes: &[u8]) -> u16 {
    let mut sum = 0u64;
    for pair in bytes.chunks(2) {
        sum += u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// 0 and 0xffff are the same number in one's complement.
fn same(a: u16, b: u16) -> bool {
    a % 0xffff == b % 0xffff
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 3 } else { 1000 }))]

    #[test]
    fn sum_is_the_naive_sum(bytes in vec(any::<u8>(), 0..5000), skip in 0usize..9) {
        // From any alignment.
        let bytes = bytes.get(skip..).unwrap_or_default();
        prop_assert_eq!(checksum::fold(checksum::sum(bytes)), naive_sum(bytes));
        prop_assert!(checksum::sum(bytes) <= 0xffff);
        prop_assert_eq!(checksum::checksum(bytes), !naive_sum(bytes));
        let mut copy = vec![0; bytes.len() + 3];
        prop_assert_eq!(checksum::copy_and_sum(bytes, &mut copy), checksum::sum(bytes));
        prop_assert_eq!(&copy[..bytes.len()], bytes);
        let mut short = vec![0; bytes.len() / 2];
        prop_assert_eq!(checksum::copy_and_sum(bytes, &mut short), checksum::sum(&bytes[..bytes.len() / 2]));
        prop_assert_eq!(&short[..], &bytes[..bytes.len() / 2]);
    }

    #[test]
    fn sums_of_pieces_join(pieces in vec(vec(any::<u8>(), 0..100), 0..10)) {
        let whole = pieces.concat();
        let joined = pieces.iter().fold(checksum::Sum::new(), |sum, piece| sum.then(piece));
        prop_assert!(same(checksum::fold(joined.partial()), naive_sum(&whole)));
        prop_assert_eq!(joined.finish(), !checksum::fold(joined.partial()));
    }

    #[test]
    fn a_filled_in_checksum_is_valid_and_updates(
        mut bytes in vec(any::<u8>(), 4..200),
        at in 0usize..100,
        new in vec(any::<u8>(), 1..20),
    ) {
        bytes[..2].fill(0);
        let sum = checksum::checksum(&bytes);
        bytes[..2].copy_from_slice(&sum.to_be_bytes());
        prop_assert!(checksum::is_valid(&bytes));

        let at = 2 + at * 2 % (bytes.len() - 3) / 2 * 2;
        let len = new.len().min(bytes.len() - at);
        let updated = checksum::update(sum, &bytes[at..at + len], &new[..len]);
        bytes[at..at + len].copy_from_slice(&new[..len]);
        bytes[..2].copy_from_slice(&updated.to_be_bytes());
        prop_assert!(checksum::is_valid(&bytes));
    }

    #[test]
    fn updates_of_words(bytes: [u8; 8], new: u32) {
        // The word at 4..8 changes; a one at the start keeps the sum from being the ambiguous zero.
        let mut bytes = bytes;
        bytes[0] |= 1;
        let old = u32::from_be_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let before = checksum::checksum(&bytes);
        bytes[4..].copy_from_slice(&new.to_be_bytes());
        prop_assert_eq!(checksum::update_u32(before, old, new), checksum::checksum(&bytes));
        let halves = checksum::update_u16(before, (old >> 16) as u16, (new >> 16) as u16);
        prop_assert_eq!(checksum::update_u16(halves, old as u16, new as u16), checksum::checksum(&bytes));
    }

    #[test]
    fn pseudo_headers(source: [u8; 16], destination: [u8; 16], kind: u8, len: u16) {
        let (length, zero_kind) = (len.to_be_bytes(), [0, kind]);
        let v4 = [&source[..4], &destination[..4], &zero_kind, &length].concat();
        let [a, b, c, d, ..] = source;
        let [e, f, g, h, ..] = destination;
        let sum = checksum::pseudo_v4(Ipv4Addr::new(a, b, c, d), Ipv4Addr::new(e, f, g, h), kind, u32::from(len));
        prop_assert!(same(checksum::fold(sum), naive_sum(&v4)));
        let v6 = [&source[..], &destination, &[0, 0], &length, &[0, 0], &zero_kind].concat();
        let sum = checksum::pseudo_v6(Ipv6Addr::from(source), Ipv6Addr::from(destination), kind, u32::from(len));
        prop_assert!(same(checksum::fold(sum), naive_sum(&v6)));
    }

    #[test]
    fn no_bytes_make_a_parser_panic(bytes in vec(any::<u8>(), 0..200), first: u8) {
        let mut bytes = bytes;
        for set in [None, Some(0x45), Some(0x4f), Some(0x60), Some(135), Some(136), Some(first)] {
            if let (Some(set), Some(byte)) = (set, bytes.first_mut()) {
                *byte = set;
            }
            let _ = ethernet::Header::parse(&bytes);
            let _ = arp::Packet::parse(&bytes);
            if let Ok(header) = ipv4::Header::parse(&bytes) {
                prop_assert!(usize::from(header.header_len) <= usize::from(header.total_len));
                prop_assert!(usize::from(header.total_len) <= bytes.len());
            }
            if let Ok(header) = ipv6::Header::parse_quoted(&bytes)
                && let Ok(transport) = header.transport(&bytes)
            {
                prop_assert!(transport.offset <= bytes.len());
            }
            let _ = udp::Header::parse(&bytes);
            if let Ok(header) = tcp::Header::parse(&bytes) {
                prop_assert!(tcp::options(&header, &bytes).count() <= 20);
                let _ = tcp::timestamps(&header, &bytes[..20]);
            }
            let _ = icmp::v4::Message::parse(&bytes);
            let _ = icmp::v6::Message::parse(&bytes);
            let _ = vxlan::parse(&bytes);
            let _ = virtio_net::Header::parse(&bytes);
        }
    }

    /// Extension headers of hostile lengths, from a hop-by-hop header on.
    #[test]
    fn the_extension_walk_stays_inside(
        payload in vec(prop_oneof![3 => 0u8..3, 1 => Just(43u8), 1 => Just(44), 1 => Just(51), 1 => Just(60)], 0..200),
        cut in 0usize..300,
    ) {
        let header = ipv6::Header {
            traffic_class: 0,
            flow_label: 0,
            payload_len: payload.len() as u16,
            next_header: 0,
            hop_limit: 1,
            source: Ipv6Addr::LOCALHOST,
            destination: Ipv6Addr::LOCALHOST,
        };
        let packet = [&header.emit()[..], &payload].concat();
        let packet = &packet[..packet.len().min(40.max(cut))];
        if let Ok(transport) = header.transport(packet) {
            prop_assert!((48..=packet.len()).contains(&transport.offset));
        }
    }

    #[test]
    fn ethernet_and_vxlan_round_trip(
        [destination, source] in any::<[[u8; 6]; 2]>(),
        ethertype in any::<u16>().prop_filter("not a tag", |t| !matches!(t, 0x8100 | 0x88a8)),
        tags in vec((any::<bool>(), any::<u16>()), 0..=2),
        vni in 0u32..1 << 24,
    ) {
        let mut tags = tags.into_iter().map(|(service, control)| ethernet::Tag::from_control(service, control));
        let header = ethernet::Header {
            outer: tags.next(),
            inner: tags.next(),
            ..ethernet::Header::new(Mac(destination), Mac(source), ethertype)
        };
        let mut out = [0; ethernet::MAX_HEADER_LEN];
        let len = header.emit_into(&mut out);
        prop_assert_eq!(len, header.header_len());
        prop_assert_eq!(ethernet::Header::parse(&out[..len]), Ok(header));
        let vni = Vni::new(vni).unwrap();
        let vxlan_header = vxlan::emit(vni);
        prop_assert_eq!(vxlan::parse(&vxlan_header), Ok((vni, &[][..])));
    }

    #[test]
    fn ipv4_round_trips(addresses: [u32; 2], [length, id, fragment] in any::<[u16; 3]>(), [tos, ttl, kind] in any::<[u8; 3]>(), flags: [bool; 2]) {
        let header = ipv4::Header {
            header_len: 20,
            traffic_class: tos,
            total_len: length.max(20),
            identification: id,
            dont_fragment: flags[0],
            more_fragments: flags[1],
            fragment_offset: fragment & !7,
            ttl,
            protocol: kind,
            checksum: 0,
            source: Ipv4Addr::from(addresses[0]),
            destination: Ipv4Addr::from(addresses[1]),
        };
        let bytes = header.emit();
        prop_assert!(ipv4::checksum_is_valid(&bytes));
        let parsed = ipv4::Header::parse_quoted(&bytes).unwrap();
        prop_assert_eq!(parsed, ipv4::Header { checksum: parsed.checksum, ..header });
    }

    /// A UDP datagram whose checksum is computed from pieces verifies as a whole.
    #[test]
    fn a_udp_checksum_from_pieces(payload in vec(any::<u8>(), 0..100), [source, destination] in any::<[u32; 2]>()) {
        let (source, destination) = (Ipv4Addr::from(source), Ipv4Addr::from(destination));
        let len = (udp::HEADER_LEN + payload.len()) as u16;
        let pseudo = checksum::pseudo_v4(source, destination, protocol::UDP, u32::from(len));
        let mut header = udp::Header { source_port: 1, destination_port: 2, len, checksum: 0 }.emit();
        let sum = checksum::Sum::starting(pseudo).then(&header).then(&payload).finish();
        udp::set_checksum(&mut header, checksum::udp_nonzero(sum));
        let whole = [&source.octets()[..], &destination.octets(), &[0, 17], &len.to_be_bytes(), &header, &payload].concat();
        prop_assert_eq!(naive_sum(&whole), 0xffff);
    }
}
