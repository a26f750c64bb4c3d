//! ECN between inner and outer headers, with RFC 6040's tables as the oracle.

#![allow(clippy::unwrap_used)]

mod common;

use bifrost_nic::ecn::{self, CE, ECT_0, ECT_1, NOT_ECT};
use bifrost_nic::{Checksum, parse, transport_checksum};
use common::{Packet, naive_checksum};
use proptest::prelude::*;

/// RFC 6040, figure 4, by row (inner: Not-ECT, ECT(0), ECT(1), CE) and column (outer, the same).
const FIGURE_4: [[Option<u8>; 4]; 4] = [
    [Some(NOT_ECT), Some(NOT_ECT), Some(NOT_ECT), None],
    [Some(ECT_0), Some(ECT_0), Some(ECT_1), Some(CE)],
    [Some(ECT_1), Some(ECT_1), Some(ECT_1), Some(CE)],
    [Some(CE), Some(CE), Some(CE), Some(CE)],
];
const ORDER: [u8; 4] = [NOT_ECT, ECT_0, ECT_1, CE];

#[test]
fn decapsulation_is_figure_4() {
    for (inner, row) in ORDER.into_iter().zip(FIGURE_4) {
        for (outer, expected) in ORDER.into_iter().zip(row) {
            assert_eq!(ecn::decapsulate(inner, outer), expected, "inner {inner}, outer {outer}");
        }
    }
}

/// RFC 6040, figure 3: normal mode copies.
#[test]
fn plain_encapsulation_is_the_normal_mode() {
    for inner in ORDER {
        assert_eq!(ecn::outer_of_plain(inner), inner);
        // Without congestion, the codepoint is unchanged.
        assert_eq!(ecn::decapsulate(inner, ecn::outer_of_plain(inner)), Some(inner));
    }
}

#[test]
fn the_transport_is_ecn_capable_and_hides_nothing() {
    for inner in ORDER {
        let outer = ecn::outer_of_reliable(inner);
        assert!(outer == ECT_0 || outer == ECT_1, "marks of this path are distinguishable from earlier ones");
        assert_eq!(ecn::decapsulate(inner, outer), Some(inner));
        let behind_congestion = if inner == NOT_ECT { None } else { Some(CE) };
        assert_eq!(ecn::decapsulate(inner, CE), behind_congestion);
    }
}

fn packets() -> impl Strategy<Value = Packet> {
    (any::<(bool, bool, u8, bool)>(), prop::option::of(0..4096u16), prop::collection::vec(any::<u8>(), 0..200))
        .prop_map(|((v6, udp, tos, options), vlan, payload)| {
            let ip_options = if options && !v6 { vec![1, 1, 1, 0] } else { vec![] };
            Packet { v6, udp, tos, vlan, ip_options, payload, ..Packet::default() }
        })
}

proptest! {
    #[test]
    fn marking_a_frame_changes_only_the_mark_and_checksum(packet in packets(), ecn in 0..4u8) {
        let frame = packet.build();
        let before = parse(&frame, frame.len()).unwrap();
        prop_assert_eq!(ecn::of(&frame, &before), packet.tos & 3);
        let mut marked = frame.clone();
        ecn::set(&mut marked, &before, ecn);
        let expected = Packet { tos: packet.tos & !3 | ecn, ..packet.clone() }.build();
        prop_assert_eq!(&marked, &expected);
        let after = parse(&marked, marked.len()).unwrap();
        prop_assert_eq!((ecn::of(&marked, &after), after.flow_hash), (ecn, before.flow_hash));
        prop_assert_ne!(transport_checksum(&marked, &after), Checksum::Invalid);
    }

    /// A header that was damaged in flight stays invalid, so that its receiver refuses it.
    #[test]
    fn damage_stays_visible(packet in packets().prop_filter("IPv4", |p| !p.v6), bit in 0..160usize, ecn in 0..4u8) {
        let (mut frame, l3) = (packet.build(), packet.l3());
        let parsed = parse(&frame, frame.len()).unwrap();
        let header = l3..packet.l4();
        frame[l3 + bit / 8] ^= 1 << (bit % 8);
        ecn::set(&mut frame, &parsed, ecn);
        prop_assert_ne!(naive_checksum(&frame[header]), 0);
    }

    #[test]
    fn short_frames_and_other_protocols_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..80), len in 0..80usize, ecn: u8) {
        if let Ok(parsed) = parse(&bytes, bytes.len()) {
            let mut frame = bytes[..len.min(bytes.len())].to_vec();
            let _ = ecn::of(&frame, &parsed);
            ecn::set(&mut frame, &parsed, ecn);
        }
    }
}
