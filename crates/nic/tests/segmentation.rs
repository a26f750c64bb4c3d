//! Segmentation and checksum completion against slow and simple code.

#![allow(clippy::unwrap_used)]

mod common;

use bifrost_nic::{
    Checksum, Malformed, Offload, Segment, SegmentKind, Segments, copy_of, parse, transport_checksum,
    transport_checksum_of_parts,
};
use bifrost_wire::virtio_net;
use common::{Packet, naive_check};
use proptest::prelude::*;

fn virtio(p: &Packet, mss: u16) -> virtio_net::Header {
    let gso = match (p.udp, p.v6) {
        (true, _) => virtio_net::GSO_UDP_L4,
        (false, false) => virtio_net::GSO_TCPV4,
        (false, true) => virtio_net::GSO_TCPV6,
    };
    virtio_net::Header {
        flags: virtio_net::F_NEEDS_CSUM,
        gso_type: if mss == 0 { virtio_net::GSO_NONE } else { gso },
        hdr_len: p.header_len() as u16,
        gso_size: mss,
        csum_start: p.l4() as u16,
        csum_offset: if p.udp { 6 } else { 16 },
        num_buffers: 0,
    }
}

fn packet() -> impl Strategy<Value = Packet> {
    (
        any::<(bool, bool, u16, u32, u8, bool)>(),
        proptest::option::of(any::<u16>()),
        0usize..=10,
        0usize..=10,
        proptest::collection::vec(any::<u8>(), 0..if cfg!(miri) { 900 } else { 9000 }),
    )
        .prop_map(|((v6, udp, id, seq, flags, df), vlan, ip_options, tcp_options, payload)| Packet {
            v6,
            udp,
            id,
            seq,
            flags,
            df,
            vlan,
            ip_options: vec![1; ip_options * 4],
            tcp_options: vec![1; tcp_options * 4],
            payload,
            ..Packet::default()
        })
}

proptest! {
    #[test]
    fn segments_carry_the_payload_and_are_valid(p in packet(), mss in 40u16..3000, split in 0usize..9000) {
        let frame = p.build_partial();
        let parsed = parse(&frame, frame.len()).unwrap();
        let offload = Offload::from_virtio(virtio(&p, mss), &parsed, frame.len()).unwrap();
        let (head, tail) = frame.split_at((p.header_len() + split).min(frame.len()));
        let plan = Segments::plan(head, head.len() + tail.len(), offload).unwrap();
        let expected = p.payload.len().div_ceil(usize::from(mss)).max(1);
        prop_assert_eq!(usize::from(plan.count()), expected);
        let mut payload = Vec::new();
        for i in 0..plan.count() {
            // Existing content of the buffer stays.
            let mut out = vec![7; 3];
            plan.write(i, |from, to, out| copy_of(head, tail, from, to, out), &mut out);
            prop_assert_eq!(&out[..3], &[7; 3]);
            let segment = &out[3..];
            prop_assert_eq!(segment.len(), plan.len(i));
            let (seq, bytes) = naive_check(segment);
            let again = parse(segment, segment.len()).unwrap();
            prop_assert_eq!(transport_checksum(segment, &again), Checksum::Valid);
            prop_assert_eq!(again.flow_key(), parsed.flow_key());
            prop_assert_eq!(again.flow_hash, parsed.flow_hash);
            if !p.v6 {
                prop_assert_eq!(&segment[p.l3() + 4..p.l3() + 6], &p.id.wrapping_add(i).to_be_bytes());
            }
            if let Some(tcp) = again.tcp {
                prop_assert_eq!(seq, p.seq.wrapping_add(payload.len() as u32));
                let mut flags = p.flags;
                if i != 0 {
                    flags &= !0x80;
                }
                if i + 1 != plan.count() {
                    flags &= !0x09;
                }
                prop_assert_eq!(tcp.flags.0, flags);
            }
            payload.extend_from_slice(bytes);
        }
        prop_assert_eq!(payload, p.payload);
        prop_assert_eq!(plan.len(plan.count()), 0);
        let mut none = Vec::new();
        plan.write(plan.count(), |from, to, out| copy_of(head, tail, from, to, out), &mut none);
        prop_assert!(none.is_empty());
    }

    #[test]
    fn partial_checksums_are_completed(p in packet(), split in 0usize..9000) {
        let frame = p.build_partial();
        let parsed = parse(&frame, frame.len()).unwrap();
        let offload = Offload::from_virtio(virtio(&p, 0), &parsed, frame.len()).unwrap();
        let (head, tail) = frame.split_at(split.min(frame.len()));
        let plan = Segments::plan(head, head.len() + tail.len(), offload).unwrap();
        prop_assert_eq!(plan.count(), 1);
        let mut out = Vec::new();
        plan.write(0, |from, to, out| copy_of(head, tail, from, to, out), &mut out);
        prop_assert_eq!(out, p.build());
    }

    #[test]
    fn frames_without_offloads_are_unchanged(p in packet(), split in 0usize..9000) {
        let frame = p.build();
        let (head, tail) = frame.split_at(split.min(frame.len()));
        let plan = Segments::plan(head, head.len() + tail.len(), Offload::default()).unwrap();
        prop_assert_eq!((plan.count(), plan.len(0)), (1, frame.len()));
        let mut out = Vec::new();
        plan.write(0, |from, to, out| copy_of(head, tail, from, to, out), &mut out);
        prop_assert_eq!(&out, &frame);
        let parsed = parse(&frame, frame.len()).unwrap();
        prop_assert_eq!(transport_checksum(&frame, &parsed), Checksum::Valid);
        let (head, tail) = frame.split_at((p.l4() + 20 + split).min(frame.len()));
        prop_assert_eq!(transport_checksum_of_parts(head, tail, &parsed), Checksum::Valid);
    }

    #[test]
    fn a_changed_bit_is_found(p in packet(), at in 0usize..9000, bit in 0u8..8, split in 0usize..9000) {
        let mut frame = p.build();
        let parsed = parse(&frame, frame.len()).unwrap();
        let l4 = p.l4();
        let at = l4 + at % (frame.len() - l4);
        frame[at] ^= 1 << bit;
        let found = transport_checksum(&frame, &parsed);
        let (head, tail) = frame.split_at((l4 + 20 + split).min(frame.len()));
        prop_assert_eq!(transport_checksum_of_parts(head, tail, &parsed), found, "in two parts");
        // UDP: a changed length may move the payload's end, and a checksum may become "none".
        prop_assert!(found == Checksum::Invalid || (p.udp && (found == Checksum::None || at < l4 + 8)));
    }

    #[test]
    fn hostile_offloads_never_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        p in packet(),
        valid in any::<bool>(),
        hdr in any::<[u8; 12]>(),
        split in 0usize..9000,
        changed in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let frame = if valid { p.build_partial() } else { bytes };
        let hdr = virtio_net::Header::parse(&hdr).unwrap();
        let (head, tail) = frame.split_at(split.min(frame.len()));
        let wild = Offload {
            checksum: Some((hdr.csum_start, hdr.csum_offset)),
            segment: Some(Segment { mss: hdr.gso_size, kind: SegmentKind::TcpV4 }),
        };
        let checked = parse(&frame, frame.len()).and_then(|p| Offload::from_virtio(hdr, &p, frame.len()));
        for offload in [Some(wild), Some(Offload { segment: None, ..wild }), checked.ok()].into_iter().flatten() {
            if let Ok(plan) = Segments::plan(head, head.len() + tail.len(), offload) {
                let mut out = Vec::new();
                for i in 0..plan.count() {
                    plan.write(i, |from, to, out| copy_of(head, tail, from, to, out), &mut out);
                }
                // The guest changed its buffer after the plan was made.
                out.clear();
                plan.write(0, |from, to, out| copy_of(&changed, tail, from, to, out), &mut out);
                prop_assert_eq!(out.len(), plan.len(0));
            }
        }
    }
}

#[test]
fn offloads_that_do_not_fit_are_refused() {
    let tcp4 = Packet { payload: vec![1; 3000], ..Packet::default() };
    let tcp6 = Packet { v6: true, ..tcp4.clone() };
    let udp4 = Packet { udp: true, ..tcp4.clone() };
    let ok = |p: &Packet| virtio(p, 1000);
    let cases: &[(&str, &Packet, virtio_net::Header, Result<(), Malformed>)] = &[
        ("TSO4", &tcp4, ok(&tcp4), Ok(())),
        ("TSO6", &tcp6, ok(&tcp6), Ok(())),
        ("USO", &udp4, ok(&udp4), Ok(())),
        ("TSO with ECN", &tcp4, virtio_net::Header { gso_type: 0x81, ..ok(&tcp4) }, Ok(())),
        ("hdr_len is only a hint", &tcp4, virtio_net::Header { hdr_len: 60_000, ..ok(&tcp4) }, Ok(())),
        ("TSO4 of IPv6", &tcp6, virtio_net::Header { gso_type: 1, ..ok(&tcp6) }, Err(Malformed::GsoType)),
        ("TSO6 of IPv4", &tcp4, virtio_net::Header { gso_type: 4, ..ok(&tcp4) }, Err(Malformed::GsoType)),
        ("USO of TCP", &tcp4, virtio_net::Header { gso_type: 5, ..ok(&tcp4) }, Err(Malformed::GsoType)),
        ("TSO of UDP", &udp4, virtio_net::Header { gso_type: 1, ..ok(&udp4) }, Err(Malformed::GsoType)),
        ("UFO", &udp4, virtio_net::Header { gso_type: 3, ..ok(&udp4) }, Err(Malformed::GsoType)),
        ("ECN alone", &tcp4, virtio_net::Header { gso_type: 0x80, ..ok(&tcp4) }, Err(Malformed::GsoType)),
        ("USO with ECN", &udp4, virtio_net::Header { gso_type: 0x85, ..ok(&udp4) }, Err(Malformed::GsoType)),
        ("no segment size", &tcp4, virtio_net::Header { gso_size: 0, ..ok(&tcp4) }, Err(Malformed::GsoSize)),
        ("no partial checksum", &tcp4, virtio_net::Header { flags: 0, ..ok(&tcp4) }, Err(Malformed::GsoChecksum)),
        ("checksum elsewhere", &tcp4, virtio_net::Header { csum_start: 36, ..ok(&tcp4) }, Err(Malformed::GsoChecksum)),
        (
            "checksum outside",
            &tcp4,
            virtio_net::Header { csum_start: 3052, ..ok(&tcp4) },
            Err(Malformed::ChecksumRange),
        ),
        (
            "checksum far off",
            &tcp4,
            virtio_net::Header { csum_offset: 65_535, ..ok(&tcp4) },
            Err(Malformed::ChecksumRange),
        ),
        (
            "checksum in Ethernet",
            &tcp4,
            virtio_net::Header { csum_start: 0, ..ok(&tcp4) },
            Err(Malformed::ChecksumRange),
        ),
    ];
    for (name, p, hdr, expected) in cases {
        let frame = p.build_partial();
        let parsed = parse(&frame, frame.len()).unwrap();
        let got = Offload::from_virtio(*hdr, &parsed, frame.len());
        assert_eq!(got.map(|_| ()), *expected, "{name}");
    }
}

#[test]
fn a_partial_checksum_is_the_transports_or_in_the_payload() {
    let tcp = Packet { payload: vec![7; 100], ..Packet::default() };
    let udp = Packet { udp: true, ..tcp.clone() };
    // For a frame with Ethernet and IPv4 headers of 34 bytes: start, offset, whether it is allowed, and whether the
    // result is valid.
    let cases = [
        (&tcp, (34, 16), true, true),
        (&udp, (34, 6), true, true),
        (&tcp, (14, 12), false, false),
        (&tcp, (14, 36), false, false),
        (&tcp, (34, 0), false, false),
        (&udp, (34, 2), false, false),
        (&tcp, (36, 14), false, false),
        // A tunnel's, after the outer headers.
        (&udp, (42, 16), true, false),
        (&tcp, (34, 30), true, false),
    ];
    for (packet, (start, offset), allowed, right) in cases {
        let frame = packet.build_partial();
        let parsed = parse(&frame, frame.len()).unwrap();
        let header = virtio_net::Header {
            flags: virtio_net::F_NEEDS_CSUM,
            csum_start: start,
            csum_offset: offset,
            ..virtio_net::Header::default()
        };
        let got = Offload::from_virtio(header, &parsed, frame.len());
        assert_eq!(got.is_ok(), allowed, "{start}+{offset}: {got:?}");
        let is_right = |frame: &[u8], len| bifrost_nic::open_checksum_is_right(frame, len, &parsed, (start, offset));
        assert_eq!(is_right(&frame, frame.len()), right, "{start}+{offset}");
        // A sum that is not the pseudo header's, padding, truncated headers.
        let mut changed = frame.clone();
        changed[usize::from(parsed.l4) + if parsed.is_tcp() { 16 } else { 6 }] ^= 1;
        assert!(
            !is_right(&changed, frame.len())
                && !is_right(&frame, frame.len() + 1)
                && !is_right(&frame[..36], frame.len())
        );
        if right {
            let plan = Segments::plan(&frame, frame.len(), got.unwrap()).unwrap();
            let mut out = Vec::new();
            plan.write(0, |from, to, out| copy_of(&frame, &[], from, to, out), &mut out);
            assert_eq!(bifrost_nic::transport_checksum(&out, &parsed), bifrost_nic::Checksum::Valid);
        }
    }
}

#[test]
fn partial_checksums_cannot_change_filtered_fields() {
    let open = |frame: &[u8], csum_start, csum_offset| {
        let parsed = parse(frame, frame.len()).unwrap();
        let flags = virtio_net::F_NEEDS_CSUM;
        let header = virtio_net::Header { flags, csum_start, csum_offset, ..virtio_net::Header::default() };
        Offload::from_virtio(header, &parsed, frame.len()).map(|_| ())
    };
    let refused = Err(Malformed::ChecksumRange);
    // A first fragment: ports, the checksum itself, which covers other fragments too, payload. A later one.
    let mut fragment = Packet { udp: true, df: false, payload: vec![5; 64], ..Packet::default() }.build();
    fragment[20] = 0x20;
    for (start, offset) in [(34, 2), (34, 6), (42, 16)] {
        assert_eq!(open(&fragment, start, offset), refused, "{start}+{offset}");
    }
    fragment[21] = 3;
    assert_eq!(open(&fragment, 34, 2), refused);
    // An ICMP error: the position of its identifier, and ports of the packet that it quotes.
    let mut error = Packet { udp: true, payload: vec![0; 64], ..Packet::default() }.build();
    (error[23], error[34]) = (1, 3);
    for (start, offset) in [(34, 4), (42, 20), (62, 2)] {
        assert_eq!(open(&error, start, offset), refused, "{start}+{offset}");
    }
}

#[test]
fn the_largest_frames_and_too_many_segments() {
    let p = Packet { payload: vec![0xa5; 65_535 - 40], ..Packet::default() };
    let frame = p.build_partial();
    let parsed = parse(&frame[..256], frame.len()).unwrap();
    for (mss, expected) in [(1448, Ok(46)), (257, Ok(255)), (256, Err(Malformed::GsoSegments)), (65_535, Ok(1))] {
        let offload = Offload::from_virtio(virtio(&p, mss), &parsed, frame.len()).unwrap();
        let plan = Segments::plan(&frame[..54], frame.len(), offload);
        assert_eq!(plan.map(|s| s.count()), expected, "mss {mss}");
    }
    assert_eq!(Segments::plan(&[0; 70_000], 140_000, Offload::default()), Err(Malformed::FrameTooLong));
    let offload = Offload::from_virtio(virtio(&p, 1448), &parsed, frame.len()).unwrap();
    assert_eq!(Segments::plan(&frame[..53], frame.len(), offload), Err(Malformed::HeadTooShort));
}

#[test]
fn fragments_have_no_checksum_to_check() {
    // Header and payload are a multiple of 8 bytes, as in every fragment but the last.
    for (udp, payload) in [(false, 60), (true, 64)] {
        let mut frame = Packet { udp, payload: vec![5; payload], ..Packet::default() }.build();
        frame[20] = 0x20;
        frame[60] ^= 1;
        let parsed = parse(&frame, frame.len()).unwrap();
        assert_eq!(transport_checksum(&frame, &parsed), Checksum::None);
    }
}

#[test]
fn udp_checksum_of_zero_is_sent_as_ones_and_zero_means_none() {
    let mut p = Packet { udp: true, payload: vec![0, 0], ..Packet::default() };
    // Choose the payload so that the sum comes out as zero: all ones minus the sum of the rest.
    let plain = p.build();
    let at = p.checksum_at();
    p.payload = plain[at..at + 2].to_vec();
    let mut frame = p.build();
    assert_eq!(frame[at..at + 2], [0xff, 0xff]);
    let parsed = parse(&frame, frame.len()).unwrap();
    assert_eq!(transport_checksum(&frame, &parsed), Checksum::Valid);
    let partial = p.build_partial();
    let offload = Offload::from_virtio(virtio(&p, 0), &parsed, frame.len()).unwrap();
    let mut out = Vec::new();
    Segments::plan(&partial, partial.len(), offload).unwrap().write(
        0,
        |from, to, out| copy_of(&partial, &[], from, to, out),
        &mut out,
    );
    assert_eq!(out, frame);
    // The same when it leaves as one segment.
    let offload = Offload::from_virtio(virtio(&p, 1000), &parsed, frame.len()).unwrap();
    out.clear();
    Segments::plan(&partial, partial.len(), offload).unwrap().write(
        0,
        |from, to, out| copy_of(&partial, &[], from, to, out),
        &mut out,
    );
    assert_eq!(out, frame);
    // Bytes behind the datagram cannot be segmented with it.
    let mut trailing = partial.clone();
    trailing[39] -= 1;
    assert_eq!(Segments::plan(&trailing, trailing.len(), offload), Err(Malformed::UdpHeader));
    frame[at..at + 2].fill(0);
    assert_eq!(transport_checksum(&frame, &parsed), Checksum::None);
    assert!(bifrost_nic::verify_transport_checksum(&frame, &parsed));
}
