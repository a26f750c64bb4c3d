//! The tenant limiter: what tenants get alone, together, and when they share meters.
#![allow(clippy::unwrap_used)]

use bifrost_tables::{LimiterConfig, PreCheckFull, Rate, Ruling, Stage, TenantLimiter};
use proptest::prelude::*;

const S: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

fn rates(first: u64, second: u64) -> LimiterConfig {
    LimiterConfig { first: Rate::per_second(first), second: Rate::per_second(second), seed: 7, ..Default::default() }
}

/// Lets tenants send at their rates (packets per second) from `start` for `ns`; returns the packets passed per tenant.
fn run(limiter: &mut TenantLimiter, start: u64, ns: u64, tenants: &[(u32, u64)]) -> Vec<u64> {
    let mut next: Vec<u64> = tenants.iter().map(|_| start).collect();
    let mut passed = vec![0; tenants.len()];
    loop {
        let (i, &now) = next.iter().enumerate().min_by_key(|(_, at)| **at).unwrap();
        if now >= start + ns {
            return passed;
        }
        let (stage, tokens) = limiter.foresee(now, tenants[i].0);
        let ruling = limiter.admit(now, tenants[i].0, 1);
        assert_eq!(ruling, Ruling { passes: tokens > 0, stage }, "the prediction is right");
        passed[i] += u64::from(ruling.passes);
        next[i] = now + S / tenants[i].1;
    }
}

#[test]
fn a_burst_has_the_configured_length() {
    for (per_second, ns, burst) in [
        (8_000_000, 100_000, 800),
        (80_000, 10_000_000, 800),
        (80_000, 100_000, 32),
        (0, S, 32),
        (u64::MAX, u64::MAX, u64::MAX),
    ] {
        assert_eq!(Rate::with_burst(per_second, ns), Rate { per_second, burst });
    }
    assert_eq!(Rate::per_second(8_000_000).burst, 800);
}

#[test]
fn a_tenant_alone_gets_the_sum_of_both_stages() {
    let mut limiter = TenantLimiter::new(rates(8_000, 2_000));
    let passed = run(&mut limiter, S, S, &[(5, 34_000)]);
    // Plus both bursts of 32 packets.
    assert!((9_990..=10_064).contains(&passed[0]), "{passed:?}");
    assert_eq!(limiter.pre_checked().collect::<Vec<_>>(), [(5, false)], "found, and limited early");
    let before = limiter.counters().dropped_meter_packets;
    let passed = run(&mut limiter, 2 * S, S, &[(5, 34_000)]);
    assert!((9_990..=10_010).contains(&passed[0]), "the same in its own meter: {passed:?}");
    assert_eq!(limiter.counters().dropped_meter_packets, before);
}

#[test]
fn a_tenant_within_its_rate_loses_nothing_beside_a_heavy_one() {
    let mut limiter = TenantLimiter::new(rates(8_000, 2_000));
    let passed = run(&mut limiter, S, 2 * S, &[(1, 34_000), (2, 3_000), (3, 2_000), (4, 1_000)]);
    // 3,000 per second are one every 333,333 ns.
    assert_eq!(passed[1..], [6_001, 4_000, 2_000]);
}

/// A VNI that shares both stages with `vni`, found by trying: tenants do not know the seed.
fn collision(config: LimiterConfig, vni: u32) -> u32 {
    let candidates = (1..4000).map(|n| vni + n * config.color_entries);
    let shares_meter = |other: &u32| {
        let mut limiter = TenantLimiter::new(LimiterConfig { sample_drops: 1 << 30, sample_ns: u64::MAX, ..config });
        // Drains both of `vni`'s stages.
        while limiter.admit(1, vni, 1).passes {}
        let found: Vec<u32> = limiter.pre_checked().map(|(vni, _)| vni).collect();
        found.into_iter().for_each(|vni| assert!(limiter.forget(vni)));
        !limiter.admit(1, *other, 1).passes
    };
    candidates.into_iter().find(shares_meter).unwrap()
}

#[test]
fn a_collision_lasts_if_no_drop_is_sampled() {
    let config = LimiterConfig { meter_entries: 64, sample_drops: 0, ..rates(800, 200) };
    let mut limiter = TenantLimiter::new(config);
    let tenants = [(9, 34_000), (collision(config, 9), 97)];
    run(&mut limiter, S, S, &tenants);
    let passed = run(&mut limiter, 2 * S, S, &tenants);
    assert!(passed[1] < 50 && limiter.pre_checked().next().is_none(), "{passed:?}");
    assert_eq!(limiter.counters().sampled_packets, 0);
}

#[test]
fn a_collision_clears_within_a_second() {
    let config = LimiterConfig { meter_entries: 64, ..rates(800, 200) };
    let innocent = collision(config, 9);
    // At such low rates samples are rare: the number of drops alone would take half a second to cause one.
    let mut limiter = TenantLimiter::new(config);
    let heavy = (9, 3_400);
    run(&mut limiter, S, S, &[heavy, (innocent, 100)]);
    let passed = run(&mut limiter, 2 * S, S, &[heavy, (innocent, 100)]);
    assert_eq!(passed[1], 100);
    assert!((995..=1_005).contains(&passed[0]), "{passed:?}");
}

#[test]
fn the_seed_decides_which_tenants_share_a_meter() {
    let config = LimiterConfig { meter_entries: 64, ..rates(800, 200) };
    let other = collision(config, 9);
    let differs = (8..40).any(|seed| collision(LimiterConfig { seed, ..config }, 9) != other);
    assert!(differs);
}

#[test]
fn bypassed_tenants_are_not_limited() {
    let mut limiter = TenantLimiter::new(rates(1, 1));
    limiter.bypass(77).unwrap();
    assert!((0..1000).all(|_| limiter.admit(S, 77, 1000) == Ruling { passes: true, stage: Stage::Bypass }));
    assert!(limiter.forget(77) && !limiter.forget(77));
    assert!(!limiter.admit(S, 77, 1000).passes);
}

#[test]
fn pre_check_has_128_entries_and_keeps_those_in_use() {
    let config = LimiterConfig { keep_ns: S, ..rates(1_000, 1) };
    let mut limiter = TenantLimiter::new(config);
    for vni in 0..128 {
        limiter.limit_early(S, vni).unwrap();
    }
    assert_eq!(limiter.limit_early(S + S, 500), Err(PreCheckFull), "all have exceeded it within a second");
    // One of them exceeds its rate again, the others do not.
    while limiter.admit(2 * S, 60, 1).passes {}
    for vni in 500..627 {
        limiter.limit_early(2 * S + 1, vni).unwrap();
    }
    assert_eq!(limiter.limit_early(2 * S + 1, 700), Err(PreCheckFull));
    assert!(limiter.pre_checked().any(|(vni, _)| vni == 60));
    // Tenants that the operator exempts come first.
    for vni in 1000..1128 {
        limiter.bypass(vni).unwrap();
    }
    assert_eq!(limiter.bypass(2000), Err(PreCheckFull));
    assert_eq!(limiter.bypass(1000), Ok(()), "it exists already");
    assert_eq!(limiter.limit_early(u64::MAX, 2000), Err(PreCheckFull));
    assert!(limiter.pre_checked().count() == 128 && limiter.pre_checked().all(|(_, bypassed)| bypassed));
}

#[test]
fn a_million_tenants_take_two_megabytes() {
    let mut limiter = TenantLimiter::new(LimiterConfig::default());
    let before = limiter.bytes();
    for vni in 0..1_000_000 {
        limiter.admit(S + u64::from(vni), vni, 1);
    }
    assert_eq!(limiter.bytes(), before);
    assert!(before <= 2_000_000, "{before} bytes");
}

#[test]
fn extremes_do_no_harm() {
    let zero = Rate { per_second: 0, burst: 0 };
    let most = Rate { per_second: u64::MAX, burst: u64::MAX };
    for rate in [zero, most] {
        let mut limiter = TenantLimiter::new(LimiterConfig {
            color_entries: 0,
            meter_entries: u32::MAX,
            first: rate,
            second: rate,
            sample_drops: 0,
            sample_ns: 0,
            keep_ns: 0,
            seed: 0,
        });
        for now in [0, u64::MAX, 0, S] {
            for vni in [0, u32::MAX, 1 << 24] {
                limiter.admit(now, vni, 0);
                limiter.admit(now, vni, u64::MAX);
            }
        }
        assert!(limiter.pre_checked().count() <= 128);
    }
}

proptest! {
    /// With any traffic: a tenant gets at most the rates and bursts of the meters that may apply to it, and the
    /// counters match the decisions.
    #[test]
    fn no_tenant_gets_more_than_its_meters_allow(
        packets in prop::collection::vec((0u32..40, 1u64..5, 0u64..400_000), 1..800),
        entries in 1u32..8,
        seed: u64,
    ) {
        let config = LimiterConfig { color_entries: entries, meter_entries: entries, sample_drops: 8, seed, ..rates(40_000, 10_000) };
        let mut limiter = TenantLimiter::new(config);
        let (start, mut now) = (S, S);
        let mut passed = std::collections::HashMap::<u32, u64>::new();
        let mut rulings = [[0u64; 2]; 4];
        for &(vni, tokens, ns) in &packets {
            now += ns;
            let ruling = limiter.admit(now, vni, tokens);
            rulings[ruling.stage as usize][usize::from(ruling.passes)] += 1;
            if ruling.passes {
                *passed.entry(vni).or_default() += tokens;
            }
        }
        let c = *limiter.counters();
        prop_assert_eq!(rulings, [
            [0, c.bypass_packets],
            [c.dropped_pre_meter_packets, c.pre_meter_packets],
            [0, c.color_packets],
            [c.dropped_meter_packets, c.meter_packets],
        ]);
        let elapsed = now - start;
        for (vni, tokens) in passed {
            // Both stages until it is detected, then its own meter: their sum, and no additional burst.
            let most = 50_000 * elapsed / S + 64 + 1;
            prop_assert!(tokens <= most + 64, "{vni}: {tokens} of {most} in {} ms", elapsed / MS);
        }
    }
}
