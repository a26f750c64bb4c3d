//! Number arithmetic, every case up to a stated bound.

#![allow(missing_docs)]

use bifrost_wire::bifrost::{Bitmap, Psn, Tick};

/// All 2^32 differences between two PSNs: order and distance are those of integers, in either direction. The functions
/// depend only on the difference, which the next test shows.
#[test]
#[ignore = "seconds with optimisation, minutes without: make prove"]
fn every_difference() {
    let start = Psn(0x8000_0001);
    let mut difference = 0u32;
    loop {
        let other = start.add(difference);
        let signed = difference as i32;
        assert_eq!(other.distance_from(start), signed);
        assert_eq!(start.distance_from(other), signed.wrapping_neg());
        assert_eq!(start.is_before(other), signed > 0 || signed == i32::MIN);
        assert_eq!(other.is_before(start), signed < 0);
        assert_eq!(other.sub(difference), start);
        difference = difference.wrapping_add(1);
        if difference == 0 {
            return;
        }
    }
}

/// A window of 4,096 and more slides over the wrap, over the middle, and over every power of two: within it PSNs are
/// ordered as integers are. 66 starts, 4,200 offsets, 5 anchors each.
#[test]
fn a_window_is_ordered_wherever_it_lies() {
    let edges = (0..32).map(|bit| 1u32 << bit).chain([0]);
    let span = if cfg!(miri) { 70 } else { 4_200 };
    for start in edges.flat_map(|edge| [edge.wrapping_sub(span / 2), edge.wrapping_sub(1)]) {
        let base = Psn(start);
        for offset in 0..span {
            let psn = base.add(offset);
            assert_eq!(psn.0, start.wrapping_add(offset));
            assert_eq!(psn.next(), base.add(offset + 1));
            assert_eq!(psn.sub(offset), base);
            for anchor in [0, 1, span / 2, span - 1, offset] {
                let other = base.add(anchor);
                assert_eq!(psn.distance_from(other), offset as i32 - anchor as i32);
                assert_eq!(psn.is_before(other), offset < anchor);
            }
        }
    }
}

/// Timestamps around their wrap, every pair of 600 ticks: differences are those of the clock.
#[test]
fn ticks_wrap() {
    let ticks = if cfg!(miri) { 20 } else { 600 };
    let wrap = (1u64 << 32) * Tick::NANOS;
    let at = |tick: u64| Tick::from_nanos(wrap - ticks / 2 * Tick::NANOS + tick * Tick::NANOS);
    for a in 0..ticks {
        for b in 0..ticks {
            assert_eq!(at(a).since(at(b)), (a as i64 - b as i64) * Tick::NANOS as i64);
        }
    }
}

/// Every bit and every pair of bits of an ACK's bitmap, at all eight lengths: 256 + 32,640 bitmaps.
#[test]
fn every_pair_of_bits() {
    let step = if cfg!(miri) { 37 } else { 1 };
    for a in (0..256usize).step_by(step) {
        for b in (a..256).step_by(step) {
            let mut bitmap = Bitmap::empty();
            assert!(bitmap.set(b) && bitmap.set(a));
            assert_eq!(bitmap.words().len(), b / 32 + 1);
            let expected = if a == b { vec![a] } else { vec![a, b] };
            assert_eq!(bitmap.iter().collect::<Vec<_>>(), expected);
            for (w, word) in bitmap.words().iter().enumerate() {
                for i in 0..32 {
                    let bit = word >> (31 - i) & 1 == 1;
                    assert_eq!(bit, expected.contains(&(w * 32 + i)));
                    assert_eq!(bitmap.bit(w * 32 + i), bit);
                }
            }
        }
    }
}
