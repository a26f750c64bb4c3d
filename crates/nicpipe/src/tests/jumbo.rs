//! Jumbo frames: 8,500 bytes, as in *Albatross*, section 4.1.

use super::world::*;
use crate::*;

/// The longest frame of the device, and of the tests.
const LONGEST: usize = 9018;
const JUMBO: usize = 8500;
/// Bytes of a [`packet`] that are not payload.
const HEADERS: usize = 96;

/// Packets of ten flows, of 200 bytes to [`JUMBO`], with a worker for each core that takes different times.
fn exchange(header_only_from: Option<u16>) -> (World, Vec<Vec<u8>>) {
    let mut config = PodConfig { header_only_from, ..config(4) };
    config.balancer.payload_slots = 256;
    let mut world = World::with_longest(config, LONGEST);
    world.service = 100..8000;
    let mut sent = Vec::new();
    for number in 0..600u32 {
        let len = if number % 3 == 0 { 200 } else { JUMBO };
        let frame = packet(100, (number % 10) as u16, number, len - HEADERS);
        assert_eq!(frame.len(), len);
        while world.longest_ring() >= 4 {
            world.pass(1000);
        }
        world.arrive(&frame).unwrap();
        sent.push(frame);
        world.pass(500);
    }
    world.pass(200_000);
    (world, sent)
}

#[test]
pub(super) fn jumbo_frames_leave_unchanged_and_in_order() {
    for header_only_from in [None, Some(1024)] {
        let (mut world, sent) = exchange(header_only_from);
        assert_eq!((world.left.len(), world.reordered()), (sent.len(), 0), "{header_only_from:?}");
        for frame in &world.left {
            assert_eq!(frame, &sent[read(frame).1 as usize], "{header_only_from:?}");
        }
        let expected = if header_only_from.is_some() { 400 } else { 0 };
        assert_eq!(world.pod().counters().delivered_header_only_packets, expected);
        assert_eq!((world.pod().free_buffers(), world.pod().occupancy()), (2 * 256 + 1, (0, 0)));
    }
}

#[test]
pub(super) fn a_pod_with_short_buffers_gets_the_headers_of_jumbo_frames_only() {
    let jumbo = packet(100, 1, 7, JUMBO - HEADERS);
    let mut world = World::with_longest(PodConfig { header_only_from: Some(1024), ..config(1) }, LONGEST);
    world.buffer = 2048;
    world.arrive(&jumbo).unwrap();
    assert!(world.ring_of(0).next().unwrap().len() < 200);
    world.pass(10_000);
    assert_eq!(world.left, std::slice::from_ref(&jumbo));
    // A whole one does not fit. Its place is given up at once: the next packet does not wait for it.
    let mut world = World::with_longest(config(1), LONGEST);
    world.buffer = 2048;
    assert_eq!(world.arrive(&jumbo), Err(Refusal::TooLong));
    let short = packet(100, 1, 8, 64);
    world.arrive(&short).unwrap();
    world.pass(10_000);
    assert_eq!(world.left, [short]);
    assert_eq!((world.pod().counters().refused_too_long_packets, world.pod().occupancy()), (1, (0, 0)));
}

#[test]
pub(super) fn frames_longer_than_the_device_takes_are_refused() {
    let mut world = World::with_longest(config(1), LONGEST);
    assert!(world.arrive(&packet(1, 1, 1, LONGEST - HEADERS)).is_ok());
    assert_eq!(world.arrive(&packet(1, 1, 1, LONGEST - HEADERS + 1)), Err(Refusal::TooLong));
}
