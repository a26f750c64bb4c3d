//! Packets larger than the path MTU, against a slow and simple reassembly.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use bifrost_nic::{Malformed, Offload, Segment, SegmentKind, Segments, TooLarge, copy_of};
use common::{Packet, naive_check, naive_checksum};
use proptest::prelude::*;

/// The offload that a guest requests with [`Packet::build_partial`]; `mss` 0: the checksum alone.
fn offload(p: &Packet, mss: u16) -> Offload {
    let kind = match (p.udp, p.v6) {
        (true, _) => SegmentKind::Udp,
        (false, true) => SegmentKind::TcpV6,
        (false, false) => SegmentKind::TcpV4,
    };
    let checksum = Some((p.l4() as u16, if p.udp { 6 } else { 16 }));
    Offload { checksum, segment: (mss > 0).then_some(Segment { mss, kind }) }
}

fn written(plan: &Segments, head: &[u8], tail: &[u8]) -> Vec<Vec<u8>> {
    let one = |index| {
        // Existing content of the buffer stays.
        let mut out = vec![7; 3];
        plan.write(index, |from, to, out| copy_of(head, tail, from, to, out), &mut out);
        assert_eq!(out[..3], [7; 3]);
        assert_eq!(out.len() - 3, plan.len(index));
        out.split_off(3)
    };
    (0..plan.count()).map(one).collect()
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// The first fragment's header, the payload so far, and its end.
type Pieces = (Vec<u8>, Vec<Option<u8>>, Option<usize>);

/// Reassembles IPv4 fragments by identification; each must fit `mtu`. Returns headers and payload of each packet, with
/// the first fragment's header rewritten for the whole packet.
fn reassembled(frames: &[Vec<u8>], l3: usize, mtu: u16) -> BTreeMap<u16, Vec<u8>> {
    let mut packets: BTreeMap<u16, Pieces> = BTreeMap::new();
    for frame in frames {
        let ip = &frame[l3..];
        assert!(ip.len() <= usize::from(mtu), "{} bytes of {mtu}", ip.len());
        assert_eq!(usize::from(word(ip, 2)), ip.len(), "total length");
        let header = usize::from(ip[0] & 15) * 4;
        assert_eq!(naive_checksum(&ip[..header]), 0, "header checksum");
        let (flags, id) = (word(ip, 6), word(ip, 4));
        assert_eq!(flags & 0xc000, 0, "a fragment with DF or a reserved flag");
        let (more, at) = (flags & 0x2000 != 0, usize::from(flags & 0x1fff) * 8);
        let payload = &ip[header..];
        assert!(!payload.is_empty() && (!more || payload.len() % 8 == 0), "{} bytes, more {more}", payload.len());
        let (first, bytes, end) = packets.entry(id).or_default();
        if at == 0 {
            *first = frame[..l3 + header].to_vec();
        }
        bytes.resize(bytes.len().max(at + payload.len()), None);
        for (to, from) in bytes[at..].iter_mut().zip(payload) {
            assert_eq!(to.replace(*from), None, "duplicate bytes");
        }
        if !more {
            assert_eq!(end.replace(at + payload.len()), None, "two last fragments");
        }
    }
    let whole = |(mut packet, bytes, end): Pieces| {
        assert_eq!(end, Some(bytes.len()), "the last fragment is the end");
        let header = packet.len() - l3;
        packet[l3 + 2..l3 + 4].copy_from_slice(&((header + bytes.len()) as u16).to_be_bytes());
        packet[l3 + 6..l3 + 8].fill(0);
        packet[l3 + 10..l3 + 12].fill(0);
        let sum = naive_checksum(&packet[l3..]);
        packet[l3 + 10..l3 + 12].copy_from_slice(&sum.to_be_bytes());
        packet.extend(bytes.into_iter().map(|b| b.expect("a hole")));
        packet
    };
    packets.into_iter().map(|(id, packet)| (id, whole(packet))).collect()
}

fn packet(df: bool) -> impl Strategy<Value = Packet> {
    (
        any::<(bool, u16, u32)>(),
        proptest::option::of(any::<u16>()),
        0usize..=10,
        proptest::collection::vec(any::<u8>(), 0..if cfg!(miri) { 900 } else { 9000 }),
    )
        .prop_map(move |((udp, id, seq), vlan, options, payload)| Packet {
            udp,
            id,
            seq,
            df,
            vlan,
            ip_options: vec![1; options * 4],
            payload,
            ..Packet::default()
        })
}

proptest! {
    #[test]
    fn fragments_reassemble_to_the_packet(
        p in packet(false), mtu in 100u16..3000, smaller in 80u16..1500, open in any::<bool>(), split in 0usize..9000,
    ) {
        let (frame, offload) =
            if open { (p.build_partial(), offload(&p, 0)) } else { (p.build(), Offload::default()) };
        let (head, tail) = frame.split_at((p.header_len() + split).min(frame.len()));
        let plan = Segments::plan_within(head, frame.len(), offload, mtu);
        let Ok(plan) = plan else {
            // A fragment of 80 bytes has a header of 60 and a payload of 16.
            prop_assert_eq!(plan, Err(TooLarge::Uncuttable));
            prop_assert!(frame.len() > 255 * 24);
            return Ok(());
        };
        let fits = frame.len() - p.l3() <= usize::from(mtu);
        prop_assert_eq!((fits, fits), (!plan.is_fragmented(), plan.count() == 1));
        let fragments = written(&plan, head, tail);
        let expected = BTreeMap::from([(p.id, p.build())]);
        prop_assert_eq!(&reassembled(&fragments, p.l3(), mtu), &expected);
        // A fragment may be too large for the next hop.
        let mut again = Vec::new();
        for fragment in &fragments {
            let Ok(plan) = Segments::plan_within(fragment, fragment.len(), Offload::default(), smaller) else {
                return Ok(());
            };
            again.extend(written(&plan, fragment, &[]));
        }
        prop_assert_eq!(&reassembled(&again, p.l3(), smaller.max(mtu.min(smaller))), &expected);
    }

    #[test]
    fn datagrams_of_uso_are_fragmented_each(p in packet(false), mss in 1000u16..3000, mtu in 500u16..4000) {
        let p = Packet { udp: true, ..p };
        let frame = p.build_partial();
        let plan = Segments::plan_within(&frame, frame.len(), offload(&p, mss), mtu).unwrap();
        let datagrams = Segments::plan(&frame, frame.len(), offload(&p, mss)).unwrap();
        let expected: BTreeMap<u16, Vec<u8>> =
            written(&datagrams, &frame, &[]).into_iter().map(|d| (word(&d, p.l3() + 4), d)).collect();
        prop_assert_eq!(reassembled(&written(&plan, &frame, &[]), p.l3(), mtu), expected);
    }

    #[test]
    fn tcp_becomes_smaller_segments(
        p in packet(true), v6 in any::<bool>(), df in any::<bool>(), mss in 500u16..9000, mtu in 500u16..4000,
    ) {
        let p = Packet { udp: false, v6, df, ip_options: vec![], ..p };
        let frame = p.build_partial();
        let plan = Segments::plan_within(&frame, frame.len(), offload(&p, mss), mtu).unwrap();
        let mut payload = Vec::new();
        for segment in written(&plan, &frame, &[]) {
            prop_assert!(segment.len() - p.l3() <= usize::from(mtu));
            let (seq, bytes) = naive_check(&segment);
            prop_assert_eq!(seq, p.seq.wrapping_add(payload.len() as u32));
            payload.extend_from_slice(bytes);
        }
        prop_assert_eq!(payload, p.payload);
    }

    #[test]
    fn no_offload_request_panics(
        p in packet(false), mtu in 0u16..3000, mss in any::<u16>(), checksum in any::<(u16, u16)>(),
        flags in any::<u16>(), options in proptest::collection::vec(any::<u8>(), 40),
        changed in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut frame = p.build_partial();
        let l3 = p.l3();
        frame[l3 + 6..l3 + 8].copy_from_slice(&flags.to_be_bytes());
        let own = p.ip_options.len();
        frame[l3 + 20..l3 + 20 + own].copy_from_slice(&options[..own]);
        let wild = Offload { checksum: Some((checksum.0 % 9100, checksum.1 % 100)), segment: None };
        for offload in [offload(&p, mss), offload(&p, 0), wild] {
            let Ok(plan) = Segments::plan_within(&frame, frame.len(), offload, mtu) else { continue };
            let mut out = Vec::new();
            for i in 0..=plan.count() {
                out.clear();
                // The guest has changed its buffer meanwhile.
                plan.write(i, |from, to, out| copy_of(&changed, &[], from, to, out), &mut out);
                prop_assert_eq!(out.len(), plan.len(i));
                out.clear();
                plan.write(i, |from, to, out| copy_of(&frame, &[], from, to, out), &mut out);
                prop_assert_eq!(out.len(), plan.len(i));
                prop_assert!(out.len() <= usize::from(mtu) + l3);
            }
        }
    }
}

#[test]
fn packets_that_fit_and_packets_that_do_not() {
    let udp = |bytes: usize, df| Packet { udp: true, df, payload: vec![1; bytes], ..Packet::default() };
    let tcp = |bytes: usize, v6, df| Packet { v6, df, payload: vec![1; bytes], ..Packet::default() };
    type Case = (&'static str, Packet, u16, u16, Result<u16, TooLarge>);
    let refused = Err(TooLarge::DontFragment);
    let cases: &[Case] = &[
        ("just fits", udp(1472, true), 0, 1500, Ok(1)),
        ("one too many", udp(1473, true), 0, 1500, refused),
        ("the same without DF", udp(1473, false), 0, 1500, Ok(2)),
        ("IPv6", Packet { v6: true, ..udp(1453, false) }, 0, 1500, refused),
        ("TCP, one segment", tcp(3000, false, true), 0, 1500, refused),
        ("TCP, one segment, no DF", tcp(3000, false, false), 0, 1500, Ok(3)),
        ("TSO that fits", tcp(9000, false, true), 1460, 1500, Ok(7)),
        ("TSO of larger segments", tcp(9000, false, true), 8460, 1500, Ok(7)),
        ("TSO over IPv6", tcp(9000, true, false), 8440, 1500, Ok(7)),
        ("TSO of one segment", tcp(4000, false, true), 8460, 1500, Ok(3)),
        ("TSO with headers alone too large", tcp(4000, false, true), 1460, 40, refused),
        ("TSO with too many segments", tcp(9000, false, true), 1460, 70, refused),
        ("TSO with too many segments, no DF", tcp(9000, false, false), 1460, 70, Err(TooLarge::Uncuttable)),
        ("USO, DF", udp(9000, true), 2000, 1500, refused),
        ("USO over IPv6", Packet { v6: true, ..udp(9000, false) }, 2000, 1500, refused),
        ("USO that fits", udp(9000, true), 1400, 1500, Ok(7)),
        ("USO in fragments: 4 of two, and one", udp(9000, false), 2000, 1500, Ok(9)),
        ("too many fragments", udp(9000, false), 0, 52, Err(TooLarge::Uncuttable)),
        ("no room for 8 bytes", udp(9000, false), 0, 27, Err(TooLarge::Uncuttable)),
        ("the largest packet", udp(65_535 - 28, false), 0, 576, Ok(119)),
    ];
    for (name, p, mss, mtu, expected) in cases {
        let frame = p.build_partial();
        let got = Segments::plan_within(&frame, frame.len(), offload(p, *mss), *mtu);
        assert_eq!(got.map(|plan| plan.count()), *expected, "{name}");
    }
}

#[test]
fn odd_frames() {
    // A fragment that would end beyond the maximum packet length cannot be fragmented.
    let mut beyond = Packet { udp: true, df: false, payload: vec![1; 3000], ..Packet::default() }.build();
    beyond[20..22].copy_from_slice(&0x1ffeu16.to_be_bytes());
    let got = Segments::plan_within(&beyond, beyond.len(), Offload::default(), 1500);
    assert_eq!(got, Err(TooLarge::Malformed(Malformed::FragmentLength)));
    // Bytes behind the packet are removed, with or without DF.
    let p = Packet { payload: vec![1; 100], ..Packet::default() };
    let padded = [p.build(), vec![0; 3000]].concat();
    let plan = Segments::plan_within(&padded, padded.len(), Offload::default(), 1500).unwrap();
    assert_eq!(written(&plan, &padded, &[]), [p.build()]);
    // Not IP, but large.
    let mut other = vec![2; 2000];
    other[12..14].copy_from_slice(&[0x88, 0xcc]);
    assert_eq!(Segments::plan_within(&other, other.len(), Offload::default(), 1500), Err(TooLarge::Uncuttable));
    assert!(Segments::plan_within(&other, other.len(), Offload::default(), 1986).is_ok());
    assert_eq!(
        Segments::plan_within(&other[..10], 10, Offload::default(), 1500),
        Err(TooLarge::Malformed(Malformed::EthernetTruncated))
    );
}

#[test]
fn options_without_the_copied_flag_are_only_in_the_first_fragment() {
    // Record route (RFC 791, section 3.1), then router alert (RFC 2113), which has the copied flag.
    let ip_options = vec![7, 7, 4, 0, 0, 0, 0, 148, 4, 0, 0, 0];
    let p =
        Packet { udp: true, df: false, ip_options: ip_options.clone(), payload: vec![1; 3000], ..Packet::default() };
    let frame = p.build();
    let plan = Segments::plan_within(&frame, frame.len(), Offload::default(), 1500).unwrap();
    let fragments = written(&plan, &frame, &[]);
    assert_eq!(fragments.len(), 3);
    assert_eq!(fragments[0][34..46], ip_options);
    for later in &fragments[1..] {
        assert_eq!(later[34..46], [1, 1, 1, 1, 1, 1, 1, 148, 4, 0, 0, 0]);
    }
}

#[test]
fn the_first_fragment_has_the_whole_transport_header() {
    // A TCP header of 60 bytes, and MTUs that leave 56 and 64 bytes after the IP header of a fragment.
    let p = Packet { df: false, tcp_options: vec![1; 40], payload: vec![1; 3000], ..Packet::default() };
    let frame = p.build();
    let plan = |mtu| Segments::plan_within(&frame, frame.len(), Offload::default(), mtu);
    assert_eq!(plan(20 + 56 + 7), Err(TooLarge::Uncuttable));
    let fragments = written(&plan(20 + 64).unwrap(), &frame, &[]);
    let first = bifrost_nic::parse(&fragments[0], fragments[0].len()).unwrap();
    assert_eq!(first.as_whole(&fragments[0]).unwrap().parsed.payload, 34 + 60);
    // Splitting a first fragment does not make it smaller than that either.
    let again = Segments::plan_within(&fragments[0], fragments[0].len(), Offload::default(), 20 + 56);
    assert_eq!(again, Err(TooLarge::Uncuttable));
}
