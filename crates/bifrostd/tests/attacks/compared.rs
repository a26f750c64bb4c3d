//! The comparison itself: it notices what it is there for.

use std::time::Duration;

use crate::common::tenants::{Attachment, BAR, PRIORITY_OF_WATCH, Tenants, hog};

/// Pairs of measurements: far fewer than a comparison that misses its bar may add.
const PAIRS: [usize; 1] = [3];

#[test]
fn delays_and_pauses_are_noticed() {
    let tenants = Tenants::new(Attachment::Tap);
    let calm = tenants.compare(&[3, 6, 12], |_, stop| vec![hog(stop, PRIORITY_OF_WATCH + 10, Duration::ZERO)]);
    println!("nothing: {calm}");
    assert!(calm.is_equal(), "{calm}");
    let delayed = tenants.compare(&PAIRS, |_, stop| vec![hog(stop, PRIORITY_OF_WATCH - 10, Duration::from_millis(8))]);
    println!("delays: {delayed}");
    assert!(delayed.ratio() > BAR, "{delayed}");
    // As if the kernel handled packets for that long.
    let paused = tenants.compare(&PAIRS, |_, stop| vec![hog(stop, PRIORITY_OF_WATCH + 10, Duration::from_millis(8))]);
    println!("pauses: {paused}");
    assert!(!paused.is_equal(), "{paused}");
}
