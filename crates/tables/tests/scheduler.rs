//! The scheduler against a fluid model, and what it promises in every round.

use bifrost_tables::{Scheduler, TokenBucket, Turn};
use proptest::prelude::*;

/// Bytes per second.
const LINK: u64 = 10_000_000;
const MS: u64 = 1_000_000;
const SECONDS: u64 = 4;

#[derive(Clone, Debug)]
struct Sender {
    group: u32,
    weight: u8,
    /// Bytes per second.
    guarantee: u64,
    /// Bytes per second; it never sends more.
    demand: u64,
    packet: u64,
}

/// What each sender gets of a link without packets: first its guarantee, as far as it has demand, then shares of the rest
/// by weight of the groups and, in each, of the senders, as far as they have demand. Computed by filling.
fn fluid(senders: &[Sender], weights: &[u8]) -> Vec<f64> {
    let mut got: Vec<f64> = senders.iter().map(|s| s.guarantee.min(s.demand) as f64).collect();
    let mut rest = LINK as f64 - got.iter().sum::<f64>();
    while rest > 1.0 {
        let wants: Vec<usize> = (0..senders.len()).filter(|&i| got[i] + 1e-3 < senders[i].demand as f64).collect();
        if wants.is_empty() {
            break;
        }
        let groups: Vec<u32> = {
            let mut groups: Vec<u32> = wants.iter().map(|&i| senders[i].group).collect();
            groups.sort_unstable();
            groups.dedup();
            groups
        };
        let of_groups: f64 = groups.iter().map(|&g| f64::from(weights[g as usize])).sum();
        let share = |i: usize| {
            let group = senders[i].group;
            let of_group: f64 =
                wants.iter().filter(|&&j| senders[j].group == group).map(|&j| f64::from(senders[j].weight)).sum();
            f64::from(weights[group as usize]) / of_groups * f64::from(senders[i].weight) / of_group
        };
        let shares: Vec<(usize, f64)> = wants.iter().map(|&i| (i, share(i))).collect();
        // Until the first one has enough, or nothing is left.
        let step = shares.iter().map(|&(i, share)| (senders[i].demand as f64 - got[i]) / share).fold(rest, f64::min);
        for (i, share) in shares {
            got[i] += step * share;
        }
        rest -= step;
    }
    got
}

/// What each sender gets of the scheduler, bytes per second, and whether the link had tokens while somebody waited.
fn scheduled(senders: &[Sender], weights: &[u8], blocked: impl Fn(u64, usize) -> bool) -> (Vec<f64>, bool) {
    let mut link = TokenBucket::new(LINK, 20_000);
    let mut guarantees: Vec<TokenBucket> = senders.iter().map(|s| TokenBucket::new(s.guarantee, 10_000)).collect();
    let mut scheduler = Scheduler::default();
    for (i, s) in senders.iter().enumerate() {
        scheduler.set(i as u32, (s.group, weights[s.group as usize]), s.weight);
    }
    let (mut sent, mut wasted) = (vec![0u64; senders.len()], false);
    let mut start = vec![0u64; senders.len()];
    for step in 0..SECONDS * 2000 {
        let now = step * MS / 2 + 1;
        let mut left: Vec<u64> = senders
            .iter()
            .zip(&sent)
            .map(|(s, sent)| {
                (u128::from(s.demand) * u128::from(now) / 1_000_000_000) as u64
                    - (*sent).min((u128::from(s.demand) * u128::from(now) / 1_000_000_000) as u64)
            })
            .collect();
        for (i, s) in senders.iter().enumerate() {
            if left[i] >= s.packet {
                scheduler.join(i as u32);
            }
        }
        scheduler.begin(link.available(now), |i| guarantees[i as usize].available(now));
        let mut taken = 0;
        while let Some(turn) = scheduler.next() {
            let i = turn.member() as usize;
            if blocked(step, i) {
                scheduler.park(i as u32);
                continue;
            }
            let bytes = senders[i].packet;
            assert!(left[i] >= bytes, "a sender without packets has no turn");
            (left[i], sent[i], taken) = (left[i] - bytes, sent[i] + bytes, taken + bytes);
            scheduler.sent(turn, bytes);
            if left[i] < bytes {
                scheduler.leave(i as u32);
            }
        }
        wasted |=
            scheduler.has_tokens() && (0..senders.len()).any(|i| left[i] >= senders[i].packet && !blocked(step, i));
        link.charge(now, taken);
        scheduler.end(|i, used| guarantees[i as usize].charge(now, used));
        // The first quarter is left out: buckets are full then.
        if step == SECONDS * 500 {
            start.copy_from_slice(&sent);
        }
    }
    let seconds = SECONDS as f64 * 0.75;
    (sent.iter().zip(&start).map(|(sent, start)| (sent - start) as f64 / seconds).collect(), wasted)
}

fn sender() -> impl Strategy<Value = Sender> {
    let demand = prop_oneof![Just(3 * LINK), 0..LINK, Just(0)];
    let guarantee = prop_oneof![2 => Just(0), 1 => 0..LINK / 8];
    let packet = prop_oneof![Just(64u64), 64..1600u64, Just(9000)];
    (0..3u32, 1..5u8, guarantee, demand, packet).prop_map(|(group, weight, guarantee, demand, packet)| Sender {
        group,
        weight,
        guarantee,
        demand,
        packet,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn senders_get_what_a_fluid_would(
        senders in prop::collection::vec(sender(), 1..7),
        weights in prop::array::uniform3(1..6u8),
    ) {
        let (got, wasted) = scheduled(&senders, &weights, |_, _| false);
        prop_assert!(!wasted, "the link had tokens and somebody waited");
        let wanted = fluid(&senders, &weights);
        for (i, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            // A few packets, and 2 %.
            let margin = 0.02 * LINK as f64 + 4.0 * 9000.0;
            prop_assert!((got - wanted).abs() < margin, "{i}: {got} instead of {wanted} of {senders:?} {weights:?}");
        }
    }

    #[test]
    fn a_guarantee_holds_whoever_else_sends(
        senders in prop::collection::vec(sender(), 1..7),
        weights in prop::array::uniform3(1..6u8),
        guarantee in LINK / 50..LINK / 4,
    ) {
        let one = Sender { group: 0, weight: 1, guarantee, demand: 2 * LINK, packet: 1500 };
        let senders: Vec<Sender> = std::iter::once(one).chain(senders).collect();
        let (got, _) = scheduled(&senders, &weights, |_, _| false);
        prop_assert!(got[0] > guarantee as f64 * 0.98 - 3000.0, "{} of {guarantee}", got[0]);
        prop_assert!(got.iter().sum::<f64>() < LINK as f64 * 1.02, "the link's rate");
    }

    #[test]
    fn senders_that_cannot_send_now_delay_nobody(
        senders in prop::collection::vec(sender(), 2..7),
        weights in prop::array::uniform3(1..6u8),
        period in 2..9u64,
    ) {
        let blocked = |step: u64, i: usize| i.is_multiple_of(2) && step.is_multiple_of(period);
        let (_, wasted) = scheduled(&senders, &weights, blocked);
        prop_assert!(!wasted);
    }
}

#[test]
fn weights_divide_a_full_link() {
    let full = |group, weight| Sender { group, weight, guarantee: 0, demand: 2 * LINK, packet: 1500 };
    let (got, _) = scheduled(&[full(0, 1), full(1, 1), full(1, 3)], &[1, 3, 1], |_, _| false);
    let share = |bytes: f64| bytes / LINK as f64;
    for (got, wanted) in got.iter().zip([0.25, 0.1875, 0.5625]) {
        assert!((share(*got) - wanted).abs() < 0.01, "{got} instead of {wanted}");
    }
}

#[test]
fn a_guarantee_is_used_before_the_link_has_tokens() {
    let mut scheduler = Scheduler::default();
    for member in [1, 2] {
        scheduler.set(member, (0, 1), 1);
        scheduler.join(member);
    }
    let guarantee = |member| if member == 2 { 3000 } else { 0 };
    scheduler.begin(0, guarantee);
    assert_eq!(scheduler.next(), Some(Turn::Guaranteed(2)));
    scheduler.sent(Turn::Guaranteed(2), 2000);
    scheduler.sent(Turn::Guaranteed(2), 2000);
    assert_eq!(scheduler.next(), None, "the link is full, and the guarantee used up");
    let mut used = Vec::new();
    scheduler.end(|member, bytes| used.push((member, bytes)));
    assert_eq!(used, [(2, 4000)]);
    scheduler.begin(1000, |_| 0);
    let turn = scheduler.next().expect("the link has room");
    scheduler.sent(turn, 1500);
    assert_eq!(scheduler.next(), None);
    scheduler.end(|member, _| panic!("{member} has no guarantee now"));
}

#[test]
fn members_come_and_go() {
    let mut scheduler = Scheduler::default();
    scheduler.join(7);
    assert!(scheduler.is_idle(), "an unknown member does not wait");
    scheduler.set(7, (1, 1), 1);
    scheduler.set(8, (2, 1), 0);
    scheduler.join(7);
    scheduler.join(7);
    scheduler.join(8);
    assert_eq!(scheduler.waiting().count(), 2);
    // Another group, while it waits.
    scheduler.set(7, (2, 1), 1);
    scheduler.begin(10_000, |_| 0);
    scheduler.park(7);
    assert_eq!(scheduler.next(), Some(Turn::Shared(8)));
    scheduler.leave(8);
    assert_eq!(scheduler.next(), None);
    assert!(!scheduler.is_idle(), "one is parked");
    scheduler.end(|_, _| {});
    scheduler.begin(10_000, |_| 0);
    assert_eq!(scheduler.next(), Some(Turn::Shared(7)));
    scheduler.park(7);
    scheduler.remove(7);
    assert!(scheduler.is_idle());
    scheduler.sent(Turn::Shared(7), 100);
    scheduler.begin(10_000, |_| 0);
    assert_eq!(scheduler.next(), None);
}
