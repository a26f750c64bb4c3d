use std::net::IpAddr;
use std::sync::{Arc, LazyLock};

use bifrost_nic::{Checksum, parse, transport_checksum};
use bifrost_tables::{ExactMap, exact_map};
use bifrost_wire::{Mac, tcp};
use proptest::prelude::*;

use super::build::*;
use crate::*;

/// Built only once, because the table of Internet routes is large.
static TABLES: LazyLock<Arc<Tables>> = LazyLock::new(|| Arc::new(tables()));

fn core() -> Core {
    Core::new(Arc::clone(&TABLES), Arc::new(nat()), 1, 3)
}

fn neighbours() -> ExactMap<IpAddr, Mac> {
    let mut map = exact_map(1);
    for address in [HOST_A, HOST_B, HOST_6, ISP, "fd00::fffe"] {
        map.insert(ip(address), mac_of(ip(address)));
    }
    map
}

/// Packets of every kind that the gateway forwards.
fn seeds() -> Vec<Vec<u8>> {
    let gre = [&[0x20, 0, 8, 0, 0, 0, 0, 77][..], &udp_packet(("10.60.0.5", 2), ("192.168.0.1", 1), b"in")].concat();
    let keepalive = packet(GATEWAY_6, "fd99::9", 47, 255, &[0x20, 0, 0, 0, 0, 0, 0, 77]);
    let keepalive = [&[0x20, 0, 0x86, 0xdd, 0, 0, 0, 77][..], &keepalive].concat();
    vec![
        tunnelled(HOST_A, VPC, &udp_packet(("192.168.0.1", 1), ("192.168.0.2", 2), b"payload")),
        tunnelled(HOST_A, VPC, &udp_packet(("fd10::1", 1), ("fd11::1", 2), b"payload")),
        tunnelled(HOST_A, VPC, &tcp_packet(("192.168.0.1", 1), ("192.168.0.253", 80), tcp::Flags::SYN)),
        tunnelled(HOST_A, VPC, &tcp_packet(("192.168.0.1", 1), ("198.51.100.1", 80), tcp::Flags::SYN)),
        tunnelled(HOST_B, VPC, &udp_packet(("192.168.0.2", 1), ("198.51.100.1", 80), b"eip")),
        tunnelled(HOST_A, VPC, &echo("192.168.0.1", "198.51.100.1", 8, 5)),
        link(&udp_packet(("198.51.100.1", 1), ("203.0.113.2", 80), b"in")),
        tunnelled(CUSTOMER, 7, &udp_packet(("10.50.1.1", 2), ("192.168.0.1", 1), b"in")),
        link(&packet("fd99::9", GATEWAY_6, 47, 60, &gre)),
        link(&packet("fd99::9", GATEWAY_6, 47, 60, &keepalive)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Random bytes, or a packet that was damaged in a few places or truncated: nothing panics, and the outer headers
    /// of sent packets are well-formed.
    #[test]
    fn hostile_packets(
        seed in 0usize..10,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
        cut in proptest::option::of(any::<prop::sample::Index>()),
        header_only in any::<bool>(),
        headroom in 0usize..=HEADROOM,
    ) {
        let mut frame = seeds().swap_remove(seed);
        for (index, value) in damage {
            let index = index.index(frame.len());
            frame[index] = value;
        }
        if let Some(cut) = cut {
            frame.truncate(cut.index(frame.len() + 1));
        }
        let mut buffer = vec![0; headroom];
        buffer.extend_from_slice(&frame);
        let end = buffer.len();
        let mut packet = match header_only {
            true => Packet::header_only(&mut buffer, headroom, end),
            false => Packet::new(&mut buffer, headroom, end),
        };
        let neighbours = neighbours();
        let verdict = core().process(Context { now: 1 << 40, neighbours: &neighbours }, &mut packet);
        if matches!(verdict, Verdict::Forward(_) | Verdict::Answer) {
            let claimed = if packet.is_header_only() { bifrost_nic::MAX_FRAME_LEN } else { packet.bytes().len() };
            let outer = parse(packet.bytes(), claimed);
            prop_assert!(outer.is_ok_and(|o| packet.is_header_only() || o.end as usize == packet.bytes().len()));
        }
    }

    /// A valid checksum stays valid and a wrong one wrong, however the packet is translated.
    #[test]
    fn checksums_hold(
        kind in 0usize..5,
        port in 1u16..,
        payload in proptest::collection::vec(any::<u8>(), 0..64),
        right in any::<bool>(),
    ) {
        let (host, source, destination) = [
            (HOST_A, "192.168.0.1", "192.168.0.2"),
            (HOST_A, "192.168.0.1", "198.51.100.1"),
            (HOST_B, "192.168.0.2", "198.51.100.1"),
            (HOST_A, "fd10::1", "fd11::1"),
            (HOST_B, "fd10::2", "2001:db8::1"),
        ][kind];
        let mut inner = udp_packet((source, port), (destination, port.wrapping_mul(3).max(1)), &payload);
        let l4 = if kind < 3 { 20 } else { 40 };
        if !right {
            // Not to 0, which would mean that there is no checksum.
            inner[l4 + 7] ^= if inner[l4 + 6] == 0 && inner[l4 + 7] == 0x55 { 0xaa } else { 0x55 };
        }
        let sent = link(&inner);
        let before = transport_checksum(&sent, &parse(&sent, sent.len()).unwrap());
        let frame = tunnelled(host, VPC, &inner);
        let mut buffer = [&[0; HEADROOM][..], &frame].concat();
        let end = buffer.len();
        let mut packet = Packet::new(&mut buffer, HEADROOM, end);
        let neighbours = neighbours();
        let verdict = core().process(Context { now: 1 << 40, neighbours: &neighbours }, &mut packet);
        prop_assert!(matches!(verdict, Verdict::Forward(_)), "{verdict:?}");
        let bytes = packet.bytes();
        let outer = parse(bytes, bytes.len()).unwrap();
        prop_assert_eq!(outer.end as usize, bytes.len());
        // A packet to the Internet may have the port of VXLAN, too.
        let inner_at = if outer.dst_ip != ip(destination) { usize::from(outer.payload) + 8 } else { 0 };
        let inner = &bytes[inner_at..];
        let after = transport_checksum(inner, &parse(inner, inner.len()).unwrap());
        prop_assert_eq!(after, before);
        prop_assert!((before == Checksum::Invalid) != right);
    }
}
