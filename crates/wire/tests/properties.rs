//! Properties of the transport's packets: parsing reverses emitting, and no input makes a parser panic.

#![allow(missing_docs, clippy::unwrap_used)]

use bifrost_wire::Mac;
use bifrost_wire::bifrost::{
    AckHeader, AckKind, Bitmap, Cid, DataHeader, Packet, PathId, Psn, Refusal, RejectReason, Reset, Setup, SetupKind,
    Tick, Version, bundle, parse,
};
use proptest::collection::vec;
use proptest::prelude::*;

fn version() -> impl Strategy<Value = Version> {
    prop_oneof![Just(Version::V1), Just(Version::V2), Just(Version::V3), Just(Version::V4)]
}

prop_compose! {
    fn data_header()(
        version in version(),
        cc in 0u8..16,
        [ack_now, from_responder, ecn, retransmit] in any::<[bool; 4]>(),
        path: u8,
        distance: u8,
        psn: u32,
        cid in 1u32..,
        timestamp: u32,
    ) -> DataHeader {
        DataHeader {
            version,
            cc,
            probe: false,
            ack_now,
            from_responder,
            ecn,
            retransmit,
            path: PathId::masked(path),
            distance: if version.has_distance() { distance } else { 0 },
            psn: Psn(psn),
            cid: Cid(cid),
            timestamp: Tick(timestamp),
        }
    }
}

prop_compose! {
    fn ack_header()(
        (version, probe) in (version(), any::<bool>()),
        (cc, path, hops) in (0u8..16, 0u8..8, 0u8..16),
        kind in 0usize..4,
        (psn, base) in any::<(u32, u32)>(),
        cid in 1u32..,
        [sent, echo, nic_rx] in any::<[u32; 3]>(),
        (num_ack, num_ece) in (0u16..2048, 0u16..2048),
        words in vec(any::<u32>(), 0..=8),
    ) -> AckHeader {
        AckHeader {
            version,
            cc,
            probe,
            path: PathId::masked(path),
            hops,
            kind: [AckKind::Cumulative, AckKind::Selective, AckKind::RateLimited, AckKind::NotTaken]
                [kind.min(if version.has_refusals() { 3 } else { 2 })],
            psn: Psn(psn),
            cid: Cid(cid),
            sent: Tick(sent),
            echo: Tick(echo),
            nic_rx: Tick(nic_rx),
            num_ack,
            num_ece,
            base: Psn(base),
            bitmap: Bitmap::from_words(&words).unwrap(),
        }
    }
}

fn mac() -> impl Strategy<Value = Mac> {
    any::<[u8; 6]>().prop_map(|mut octets| {
        octets[0] &= !1;
        Mac(octets)
    })
}

prop_compose! {
    fn setup()(
        (kind, oldest, reason, version) in (0u8..3, 1u8..16, 1u8..5, 1u8..16),
        cc in 0u8..16,
        worker: u8,
        (local, destination) in (1u32.., 1u32..),
        (to, from) in (mac(), mac()),
        instance: u64,
        generation: u32,
        window in 1u16..,
        ack_delay_us: u16,
    ) -> Setup {
        let (kind, version, local) = match kind {
            0 => (SetupKind::Request { oldest: oldest.min(version) }, version, local),
            1 => (SetupKind::Response, version.min(Version::LATEST.number()), local),
            _ => (SetupKind::Reject(RejectReason::try_from(reason).unwrap()), version, 0),
        };
        Setup {
            kind,
            version,
            cc,
            worker,
            local: Cid(local),
            destination: Cid(destination),
            to,
            from,
            instance,
            generation,
            window,
            ack_delay_us,
        }
    }
}

/// Bytes that look enough like a packet to get past the first checks.
fn almost_a_packet() -> impl Strategy<Value = Vec<u8>> {
    (0u8..10, 0u8..5, vec(any::<u8>(), 0..100)).prop_map(|(kind, version, rest)| {
        let mut bytes = vec![kind, version << 4];
        bytes.extend(rest);
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 3 } else { 2000 }))]

    #[test]
    fn data_round_trips(header in data_header(), frame in vec(any::<u8>(), 14..100)) {
        let bytes = [&header.emit()[..], &frame].concat();
        prop_assert_eq!(parse(&bytes), Ok(Packet::Data(header, &frame)));
        for len in 0..bytes.len() {
            let expected = match len {
                0..16 => Err(Refusal::ShortDatagram),
                16..30 => Err(Refusal::ShortFrame),
                _ => Ok(Packet::Data(header, &frame[..len - 16])),
            };
            prop_assert_eq!(parse(&bytes[..len]), expected);
        }
    }

    #[test]
    fn bundles_round_trip(first in data_header(), others in vec((data_header(), vec(any::<u8>(), 14..100)), 0..5)) {
        let worker = first.cid.0 & 0xff00_0000;
        let of = |header: DataHeader| DataHeader { cid: Cid(worker | header.cid.0 & 0x00ff_ffff | 1), ..header };
        let mut packets = vec![of(first).emit_skip().to_vec()];
        packets.extend(others.into_iter().map(|(header, frame)| [&of(header).emit()[..], &frame].concat()));
        let mut bytes = vec![1, 2, 3];
        bytes.extend_from_slice(&packets[0]);
        bundle::begin(&mut bytes, 3);
        packets[1..].iter().for_each(|packet| bundle::append(&mut bytes, |out| out.extend_from_slice(packet)));
        let Ok(Packet::Bundle(bundle)) = parse(&bytes[3..]) else { panic!("{:?}", parse(&bytes[3..])) };
        prop_assert!(bundle.packets().eq(packets.iter().map(Vec::as_slice)));
    }

    #[test]
    fn probe_and_skip_round_trip(header in data_header()) {
        let probe = DataHeader { probe: true, ..header };
        let (probe_bytes, skip_bytes) = (probe.emit(), header.emit_skip());
        prop_assert_eq!(parse(&probe_bytes), Ok(Packet::Probe(probe)));
        prop_assert_eq!(parse(&skip_bytes), Ok(Packet::Skip(header)));
        for len in 0..16 {
            prop_assert_eq!(parse(&probe_bytes[..len]), Err(Refusal::ShortDatagram));
            prop_assert_eq!(parse(&skip_bytes[..len]), Err(Refusal::ShortDatagram));
        }
    }

    #[test]
    fn ack_round_trips(ack in ack_header()) {
        let mut bytes = vec![];
        ack.emit(&mut bytes);
        prop_assert_eq!(bytes.len(), ack.len());
        let mut fixed = [0xaa; AckHeader::MAX_LEN];
        let len = ack.emit_into(&mut fixed);
        prop_assert_eq!(&fixed[..len], &bytes[..]);
        prop_assert!(fixed[len..].iter().all(|&byte| byte == 0xaa));
        prop_assert_eq!(parse(&bytes), Ok(Packet::Ack(ack)));
        for len in 0..bytes.len() {
            let expected = if len < 32 { Refusal::ShortDatagram } else { Refusal::BitmapTruncated };
            prop_assert_eq!(parse(&bytes[..len]), Err(expected));
        }
        bytes.push(0);
        prop_assert_eq!(parse(&bytes), Err(Refusal::TrailingBytes));
    }

    #[test]
    fn counts_saturate_when_sent(ack in ack_header(), num_ack: u16, num_ece: u16, hops: u8) {
        let mut bytes = vec![];
        AckHeader { num_ack, num_ece, hops, ..ack }.emit(&mut bytes);
        let sent = AckHeader { num_ack: num_ack.min(2047), num_ece: num_ece.min(2047), hops: hops.min(15), ..ack };
        prop_assert_eq!(parse(&bytes), Ok(Packet::Ack(sent)));
    }

    #[test]
    fn setup_round_trips(setup in setup()) {
        let bytes = setup.emit();
        prop_assert_eq!(parse(&bytes), Ok(Packet::Setup(setup)));
        for len in 0..bytes.len() {
            let expected = if len < 12 { Refusal::ShortDatagram } else { Refusal::BodyTruncated };
            prop_assert_eq!(parse(&bytes[..len]), Err(expected));
        }
    }

    #[test]
    fn reset_round_trips(unknown in 1u32..) {
        let reset = Reset { unknown: Cid(unknown) };
        let bytes = reset.emit();
        prop_assert_eq!(parse(&bytes), Ok(Packet::Reset(reset)));
        for len in 0..bytes.len() {
            prop_assert_eq!(parse(&bytes[..len]), Err(Refusal::ShortDatagram));
        }
    }

    /// Every accepted packet has the same meaning after it is emitted again.
    #[test]
    fn an_accepted_packet_survives_emitting(bytes in prop_oneof![vec(any::<u8>(), 0..100), almost_a_packet()]) {
        if let Ok(packet) = parse(&bytes) {
            let again = match packet {
                Packet::Data(header, frame) => [&header.emit()[..], frame].concat(),
                Packet::Probe(header) => header.emit().to_vec(),
                Packet::Skip(header) => header.emit_skip().to_vec(),
                Packet::Ack(ack) => {
                    let mut out = vec![];
                    ack.emit(&mut out);
                    out
                }
                Packet::Setup(setup) => setup.emit().to_vec(),
                Packet::Reset(reset) => reset.emit().to_vec(),
                Packet::Bundle(bundle) => {
                    let packets: Vec<_> = bundle.packets().collect();
                    let mut out = packets[0].to_vec();
                    bundle::begin(&mut out, 0);
                    packets[1..].iter().for_each(|packet| bundle::append(&mut out, |out| out.extend_from_slice(packet)));
                    out
                }
            };
            prop_assert_eq!(again.len(), bytes.len());
            prop_assert_eq!(parse(&again), Ok(packet));
        }
    }

    #[test]
    fn bitmap_agrees_with_a_set(bits in proptest::collection::btree_set(0usize..256, 0..64)) {
        let mut bitmap = Bitmap::empty();
        for &bit in &bits {
            prop_assert!(bitmap.set(bit));
        }
        prop_assert!(bitmap.iter().eq(bits.iter().copied()));
        prop_assert_eq!(bitmap.count_ones() as usize, bits.len());
        prop_assert_eq!(bitmap.len_bits(), bits.last().map_or(0, |last| (last / 32 + 1) * 32));
        for bit in 0..300 {
            prop_assert_eq!(bitmap.bit(bit), bits.contains(&bit));
        }
        prop_assert_eq!(Bitmap::from_words(bitmap.words()), Some(bitmap));
    }

    #[test]
    fn psn_arithmetic(start: u32, count in 0u32..0x8000_0000) {
        let (earlier, later) = (Psn(start), Psn(start).add(count));
        prop_assert_eq!(later.distance_from(earlier), count as i32);
        prop_assert_eq!(later.sub(count), earlier);
        prop_assert_eq!(earlier.is_before(later), count != 0);
        prop_assert!(!later.is_before(earlier));
    }

    #[test]
    fn tick_differences(start in 0u64..1 << 60, nanos in 0u64..137_000_000_000) {
        let (earlier, later) = (Tick::from_nanos(start), Tick::from_nanos(start + nanos));
        let error = later.since(earlier) - nanos as i64;
        prop_assert!(error.unsigned_abs() < Tick::NANOS, "{}", error);
        prop_assert_eq!(earlier.since(later), -later.since(earlier));
    }
}
