//! The NIC's clock relative to the software's (paper A.5). Arrival and departure times are by the NIC's clock, which is
//! slow to read on hardware. So `now` is the software's time, and this module estimates what the NIC's clock shows
//! then.

/// Minimum interval between comparisons of the clocks, ns.
const CHECK_EVERY_NS: u64 = 100_000;
/// Smaller errors are not corrected, ns.
const TOLERANCE_NS: i64 = 10_000;
/// A larger drift is a measurement error, parts per billion: crystals are within 100 ppm.
const DRIFT_MAX_PPB: i64 = 200_000;

/// The alignment of the two clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock {
    /// NIC minus software at the last correction, ns.
    offset: i64,
    /// Growth of the offset, parts per billion.
    drift_ppb: i64,
    corrected: u64,
    checked: Option<u64>,
    corrections: u64,
}

impl Clock {
    /// Whether [`Clock::check`] is due.
    #[must_use]
    pub fn wants_check(&self, now_ns: u64) -> bool {
        self.checked.is_none_or(|checked| now_ns.saturating_sub(checked) >= CHECK_EVERY_NS)
    }

    /// Compares with `nic_ns`, which the NIC's clock showed at `now_ns`.
    pub fn check(&mut self, now_ns: u64, nic_ns: u64) {
        let measured = nic_ns.wrapping_sub(now_ns) as i64;
        let first = self.checked.replace(now_ns).is_none();
        let error = measured.wrapping_sub(self.offset_at(now_ns));
        if !first && error.abs() <= TOLERANCE_NS {
            return;
        }
        let elapsed = now_ns.saturating_sub(self.corrected);
        if !first && elapsed > 0 {
            let ppb = i128::from(error) * 1_000_000_000 / i128::from(elapsed);
            // A step (a descheduled reader, or a NIC that was reset) is not drift.
            if ppb.abs() <= i128::from(DRIFT_MAX_PPB) {
                self.drift_ppb = (self.drift_ppb + ppb as i64).clamp(-DRIFT_MAX_PPB, DRIFT_MAX_PPB);
            }
        }
        self.offset = measured;
        self.corrected = now_ns;
        self.corrections += 1;
    }

    /// What the NIC's clock shows at `now_ns`.
    #[must_use]
    pub fn nic_ns(&self, now_ns: u64) -> u64 {
        now_ns.wrapping_add(self.offset_at(now_ns) as u64)
    }

    /// Number of corrections.
    #[must_use]
    pub fn corrections(&self) -> u64 {
        self.corrections
    }

    fn offset_at(&self, now_ns: u64) -> i64 {
        // Seconds and remainder separately, so that neither product overflows: this runs once per arrival.
        let elapsed = now_ns.saturating_sub(self.corrected);
        let (seconds, rest) = ((elapsed / BILLION) as i64, (elapsed % BILLION) as i64);
        let drift = seconds.wrapping_mul(self.drift_ppb) + rest * self.drift_ppb / BILLION as i64;
        self.offset.wrapping_add(drift)
    }
}

const BILLION: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    /// A NIC's clock that is 3 s ahead and drifts.
    fn nic(now: u64, ppm: i64) -> u64 {
        (now as i64 + 3_000_000_000 + now as i64 * ppm / 1_000_000) as u64
    }

    #[test]
    fn drift_is_learnt_and_corrections_become_rare() {
        for ppm in [-80, -5, 0, 50, 100] {
            let mut clock = Clock::default();
            let mut worst = 0;
            for step in 0..200_000u64 {
                let now = step * CHECK_EVERY_NS;
                if clock.wants_check(now) {
                    clock.check(now, nic(now, ppm));
                }
                worst = worst.max(clock.nic_ns(now).abs_diff(nic(now, ppm)));
            }
            assert!(worst <= TOLERANCE_NS as u64, "{ppm} ppm: {worst} ns");
            assert!(clock.corrections() <= 4, "{ppm} ppm: {} corrections in 20 s", clock.corrections());
        }
    }

    #[test]
    fn drift_agrees_with_wide_arithmetic() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..10_000 {
            let drift_ppb = random.i64(-DRIFT_MAX_PPB..=DRIFT_MAX_PPB);
            let clock = Clock { corrected: random.u64(..1 << 40), drift_ppb, ..Clock::default() };
            let now = random.u64(..) >> random.u32(..64);
            let elapsed = i128::from(now.saturating_sub(clock.corrected));
            assert_eq!(i128::from(clock.offset_at(now)), elapsed * i128::from(drift_ppb) / 1_000_000_000);
        }
    }

    #[test]
    fn a_step_is_followed_but_is_not_drift() {
        let mut clock = Clock::default();
        clock.check(0, 500);
        clock.check(1_000_000, 1_000_000 + 40_000_000);
        assert_eq!(clock.nic_ns(2_000_000), 42_000_000);
        assert!(!clock.wants_check(1_000_001) && clock.wants_check(1_100_000));
    }
}
