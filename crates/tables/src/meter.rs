//! A compact meter.

use crate::Rate;

/// Nanoseconds in a second.
const S: u64 = 1_000_000_000;

/// A [`TokenBucket`](crate::TokenBucket) without the values that many meters share or that the caller has anyway: rate
/// and burst are arguments. Four meters fit a cache line, for the large tables that every core keeps for itself.
///
/// The state is the time at which the bucket is full again (the *virtual scheduling* form of ATM's GCRA, ITU-T I.371,
/// annex A), without rounding. `now` is the time in ns on any monotonic clock; if it does go back, less passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meter {
    /// ns, and fractions of a nanosecond in units of 1/rate.
    full_at: u64,
    parts: u64,
}

impl Meter {
    /// Takes `amount` tokens if there are enough; otherwise none. Nothing passes with a rate of 0, nor an amount that
    /// takes the rate longer than the clock's range. The rate must be the same each time, because the unit of the
    /// fractions depends on it.
    #[inline]
    pub fn take(&mut self, rate: Rate, now: u64, amount: u64) -> bool {
        if rate.per_second == 0 {
            return false;
        }
        let (full_at, parts) = if self.full_at < now { (now, 0) } else { (self.full_at, self.parts) };
        let (ns, parts) = match amount.checked_mul(S).and_then(|more| more.checked_add(parts)) {
            Some(parts) => (Some(parts / rate.per_second), parts % rate.per_second),
            None => wide(amount, parts, rate.per_second),
        };
        let Some(full_at) = ns.and_then(|ns| full_at.checked_add(ns)) else { return false };
        let missing = u128::from(full_at - now) * u128::from(rate.per_second) + u128::from(parts);
        let passes = missing <= u128::from(rate.burst) * u128::from(S);
        if passes {
            *self = Meter { full_at, parts };
        }
        passes
    }
}

/// The time in which `amount` tokens arrive, plus `parts`: whole nanoseconds, if they fit, and the remaining parts.
#[cold]
fn wide(amount: u64, parts: u64, rate: u64) -> (Option<u64>, u64) {
    let all = u128::from(amount) * u128::from(S) + u128::from(parts);
    let (ns, parts) = (all / u128::from(rate), all % u128::from(rate));
    // The remainder is less than the rate.
    (u64::try_from(ns).ok(), parts as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::TokenBucket;

    proptest! {
        /// It passes exactly what a token bucket passes.
        #[test]
        fn is_a_token_bucket(
            per_second in prop_oneof![1..100u64, 1..20_000_000_000u64],
            burst in prop_oneof![0..100u64, 0..1u64 << 40],
            steps in proptest::collection::vec(
                (prop_oneof![0..10u64, 0..3_000_000_000u64], prop_oneof![0..200u64, 0..1u64 << 41]),
                1..200,
            ),
        ) {
            // An amount that takes longer than the clock's range does not pass.
            let burst = burst.min(per_second.saturating_mul(S));
            let rate = Rate { per_second, burst };
            let (mut meter, mut bucket) = (Meter::default(), TokenBucket::new(per_second, burst));
            let mut now = 0;
            for (pause, amount) in steps {
                now += pause;
                prop_assert_eq!(meter.take(rate, now, amount), bucket.take(now, amount));
            }
        }
    }

    #[test]
    fn the_ends_of_the_ranges() {
        let most = Rate { per_second: u64::MAX, burst: u64::MAX };
        let mut meter = Meter::default();
        assert!(meter.take(most, 0, u64::MAX) && !meter.take(most, 0, 1) && meter.take(most, S, u64::MAX));
        assert!(!Meter::default().take(Rate { per_second: 0, burst: 9 }, 5, 1));
        let slow = Rate { per_second: 1, burst: u64::MAX };
        assert!(Meter::default().take(slow, 0, 1 << 33) && !Meter::default().take(slow, 0, 1 << 35));
        assert_eq!(size_of::<Meter>(), 16);
    }
}
