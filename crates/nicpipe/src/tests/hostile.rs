use bifrost_plb::{TRAILER_LEN, Trailer};
use proptest::prelude::*;

use super::world::*;
use crate::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A pod returns arbitrary bytes: at most as many bytes leave as it returned, and no buffer is lost.
    #[test]
    fn a_pod_returns_arbitrary_bytes(
        returns in proptest::collection::vec(
            (any::<u32>(), proptest::option::of(0u32..2000), 0u8..10, 0u16..8, any::<[bool; 2]>(), 0usize..2100, any::<bool>()),
            0..200,
        ),
    ) {
        let mut world = World::new(PodConfig { header_only_from: Some(200), ..config(2) });
        let mut arrived = 0;
        for (number, (psn, payload, queue, pod, [drop, unordered], len, own)) in returns.into_iter().enumerate() {
            arrived += usize::from(world.arrive(&packet(1, 2, number as u32, 300)).is_ok());
            let trailer = Trailer { psn: if own { psn % 64 } else { psn }, payload, pod, queue, drop, unordered };
            let mut bytes = vec![0x11; len];
            bytes.extend_from_slice(&trailer.emit());
            let before = world.left.len();
            world.give_back(&bytes);
            prop_assert!(world.left.len() <= before + 1);
            world.pass(1000);
        }
        world.pass(1_000_000);
        prop_assert!(world.left.iter().all(|frame| frame.len() >= 18 && frame[12..16] == [0x81, 0, 0, VLAN as u8]));
        prop_assert_eq!(world.pod().free_buffers(), 2 * 256 + 1);
        let counters = *world.pod().counters();
        prop_assert!(counters.sent_packets <= counters.returned_packets);
        prop_assert!(arrived > 0 || counters.arrived_packets == 0);
    }

    /// Frames from the wire, damaged.
    #[test]
    fn whatever_arrives(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        header_only in any::<bool>(),
    ) {
        let mut frame = packet(1, 2, 3, 400);
        for (place, value) in damage {
            let place = place.index(frame.len());
            frame[place] = value;
        }
        frame.truncate(cut.index(frame.len() + 1));
        let mut world = World::new(PodConfig { header_only_from: header_only.then_some(1), ..config(2) });
        let taken = world.arrive(&frame).is_ok();
        let priority = world.priority.len();
        world.pass(10_000);
        prop_assert_eq!(world.left.len() + priority, usize::from(taken));
        // The output equals the input, without padding.
        prop_assert!(world.left.iter().all(|left| frame.starts_with(left)));
    }
}

#[test]
pub(super) fn packets_too_short_to_be_frames_do_not_leave() {
    for len in 0..TRAILER_LEN + 14 {
        let mut world = World::new(config(1));
        world.arrive(&packet(1, 2, 3, 10)).unwrap();
        let trailer = Trailer { psn: 0, payload: None, pod: 5, queue: 0, drop: false, unordered: true };
        let bytes = [&vec![0; len.saturating_sub(TRAILER_LEN)], &trailer.emit()[..]].concat();
        world.give_back(&bytes[bytes.len() - len.min(bytes.len())..]);
        assert_eq!((world.left.len(), world.pod().counters().returned_bad_packets), (0, 1), "{len}");
    }
}
