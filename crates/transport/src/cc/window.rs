//! The arithmetic of windows that follow delay (Swift, SIGCOMM'20, 3.1), whatever they count: packets or bytes.

/// A window that has grown by `additive` a round trip: `acknowledged` of it were delivered. Below 1 there is no fraction of
/// a window, and each counts whole.
#[inline]
#[must_use]
pub fn grown(window: f32, additive: f32, acknowledged: f32) -> f32 {
    if window >= 1.0 { window + additive * acknowledged / window } else { window + additive * acknowledged }
}

/// What is left of a window, 0..=1, when a delay exceeds its target: `beta` is how much of the excess is answered,
/// `max_decrease` the largest decrease at once.
#[inline]
#[must_use]
pub fn kept_share(delay_ns: u64, target_ns: u64, beta: f32, max_decrease: f32) -> f32 {
    let excess = delay_ns.saturating_sub(target_ns) as f32 / delay_ns.max(1) as f32;
    (1.0 - beta * excess).max(1.0 - max_decrease)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_of_acknowledgements_is_one_increase() {
        let mut window = 10.0;
        for _ in 0..10 {
            window = grown(window, 2.0, 1.0);
        }
        assert!((11.7..=12.0).contains(&window), "{window}");
        assert_eq!(grown(0.25, 1.0, 0.5), 0.75, "below 1");
    }

    #[test]
    fn what_is_kept_follows_the_excess_within_bounds() {
        let kept = |delay, target| kept_share(delay, target, 0.8, 0.5);
        assert_eq!(kept(100, 100), 1.0);
        assert_eq!(kept(50, 100), 1.0, "below the target");
        assert!((kept(100, 75) - 0.8).abs() < 1e-6);
        assert_eq!(kept(10_000, 100), 0.5, "the largest decrease");
        assert_eq!(kept(0, 0), 1.0);
    }
}
