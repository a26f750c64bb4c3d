//! Guarantees of a token bucket for every interval.

use bifrost_tables::TokenBucket;
use proptest::prelude::*;

const S: u128 = 1_000_000_000;

fn rate() -> impl Strategy<Value = u64> {
    prop_oneof![1u64..100, 1_000u64..10_000_000, Just(1_000_000_000), Just(50_000_000_000)]
}

proptest! {
    #[test]
    fn no_interval_exceeds_burst_and_rate(
        rate in rate(),
        burst in 1u64..1_000_000,
        asks in prop::collection::vec((-2_000i64..20_000, 1u64..200_000, prop::bool::weighted(0.05)), 1..120),
    ) {
        let mut bucket = TokenBucket::new(rate, burst);
        let mut now = 1_000_000_000_000u64;
        let mut latest = 0;
        let mut passed: Vec<(u64, u64)> = Vec::new();
        for (step, amount, pause) in asks {
            now = now.saturating_add_signed(if pause { step * 100_000 } else { step });
            let wait = bucket.until(now, amount);
            let passes = bucket.take(now, amount);
            prop_assert_eq!(passes, wait == 0);
            latest = latest.max(now);
            if passes {
                passed.push((latest, amount));
            }
        }
        for (i, &(from, _)) in passed.iter().enumerate() {
            let mut sum = 0u128;
            for &(until, amount) in &passed[i..] {
                sum += u128::from(amount);
                let inflow = u128::from(until - from) * u128::from(rate);
                prop_assert!(sum * S <= u128::from(burst) * S + inflow, "{sum} from {from} until {until}");
            }
        }
    }

    #[test]
    fn constant_demand_gets_the_rate(rate in rate(), burst in 1000u64..100_000, part in 1u64..=90, rounds in 1u32..2000) {
        // A margin above the amount for the tokens of the nanosecond that a wait is rounded up by.
        let amount = (burst * part / 100).max(1);
        let mut bucket = TokenBucket::new(rate, burst);
        let start = 7_000_000_000u64;
        let (mut now, mut sum) = (start, 0u128);
        for _ in 0..rounds {
            let wait = bucket.until(now, amount);
            if wait > 0 {
                prop_assert!(!bucket.take(now + wait - 1, amount), "a nanosecond early");
            }
            now += wait;
            prop_assert!(bucket.take(now, amount), "at the predicted time");
            sum += u128::from(amount);
        }
        // All tokens have passed, except those still available: less than one amount, or the rest of the burst.
        let inflow = u128::from(now - start) * u128::from(rate);
        let left = u128::from(bucket.available(now)) + 1;
        prop_assert!((sum + left) * S >= u128::from(burst) * S + inflow, "{sum} in {} ns", now - start);
    }
}
