//! A pair of guests that shares paths with an honest pair and spoils only its own packets: the honest pair must not
//! notice.

use bifrost_wire::bifrost::DataHeader;

use super::pair::{Misdeed, Rng, RogueView, World};
use super::*;
use crate::{Mutation, PathState};

type Spoil = fn(&mut Rng, &DataHeader, &RogueView) -> Misdeed;

/// Results of an honest pair.
#[derive(Debug)]
struct Service {
    packets: usize,
    p99_ns: u64,
    suspect_ms: u32,
    given_up: u64,
}

const WARM_UP_MS: u32 = 20;
const RUN_MS: u32 = 400;

/// Delay differences between paths, and within each, ns.
type Spread = (u64, u64);
/// Just enough that one path is the best.
const ALIKE: Spread = (US, 0);
/// So that ACKs are reordered.
const UNEQUAL: Spread = (15 * US, 10 * US);

/// An honest pair's stream for [`RUN_MS`], beside a rogue that offers `rogue` packets every 10 us.
fn service(spread: Spread, spoil: Option<Spoil>, rogue: u32, mutation: Option<Mutation>) -> Service {
    let config = Config { mutation, ..Config::default() };
    let mut w = World::new(17, 4, [config.clone(), config]);
    for (path, link) in w.links.iter_mut().flat_map(|links| links.iter_mut().enumerate()) {
        (link.delay_ns, link.jitter_ns) = (50 * US + path as u64 * spread.0, spread.1);
    }
    let mut suspect_ms = 0;
    let mut first = 0;
    for ms in 0..WARM_UP_MS + RUN_MS {
        if ms == WARM_UP_MS {
            w.rogue.misdeed = spoil;
            first = w.sides[1].guest.seen.len();
        }
        for i in 0..100 {
            w.offer(0, i % 20, 1);
            (0..rogue).for_each(|_| w.offer_rogue(1));
            w.run_for(10 * US);
        }
        suspect_ms += w.sides[0].engine.path_snapshots(w.now).filter(|p| p.state == PathState::Suspect).count() as u32;
    }
    let sent = &w.sides[0].guest.sent_at;
    let seen = &w.sides[1].guest.seen[first..];
    let mut latencies: Vec<u64> = seen.iter().map(|(f, s, at)| at.since(sent[&(*f, *s)])).collect();
    latencies.sort_unstable();
    let given_up =
        w.sides[0].engine.connection_snapshots(w.now).find(|c| c.owner == 7).map_or(0, |c| c.given_up_packets);
    let service = Service { packets: seen.len(), p99_ns: percentile(&latencies, 0.99), suspect_ms, given_up };
    assert_eq!(w.rogue.spoilt > 100, spoil.is_some(), "{} packets were spoiled", w.rogue.spoilt);
    // In all cases, nothing of the rogue's is held forever, or left in the paths' accounts.
    w.rogue.misdeed = None;
    w.run_for(500 * MS);
    w.assert_complete(0);
    assert_eq!(w.rogue.held(), 0, "buffers of the rogue never came back");
    assert!(w.sides[0].engine.path_snapshots(w.now).all(|p| p.in_flight_packets == 0), "paths are empty");
    service
}

/// The honest pair's throughput and P99 must stay within a tenth of its results alone.
fn nobody_else_notices(what: &str, spoil: Spoil, rogue: u32, mutation: Option<Mutation>) {
    for spread in [ALIKE, UNEQUAL] {
        let alone = service(spread, None, 0, None);
        let beside = service(spread, Some(spoil), rogue, mutation);
        assert!(beside.packets * 10 >= alone.packets * 9, "{what}: {beside:?}, alone {alone:?}");
        assert!(beside.p99_ns * 10 <= alone.p99_ns * 11, "{what}: {beside:?}, alone {alone:?}");
        assert_eq!((beside.suspect_ms, beside.given_up), (0, 0), "{what}: a path was abandoned: {beside:?}");
    }
}

fn share(rng: &mut Rng, share: f64, misdeed: Misdeed) -> Misdeed {
    if rng.chance(share) { misdeed } else { Misdeed::None }
}

pub(super) fn damage_on_the_best_path(mutation: Option<Mutation>) {
    let spoil: Spoil =
        |rng, h, view| if h.path == view.best { share(rng, 0.2, Misdeed::Damage) } else { Misdeed::None };
    nobody_else_notices("damage on the best path", spoil, 1, mutation);
}

#[test]
fn damage_to_own_packets_harms_nobody_else() {
    damage_on_the_best_path(None);
    let one: Spoil = |rng, h, _| if h.path.get() == 1 { share(rng, 0.2, Misdeed::Damage) } else { Misdeed::None };
    nobody_else_notices("damage on one path", one, 1, None);
    let first: Spoil = |rng, h, _| if h.retransmit { Misdeed::None } else { share(rng, 0.2, Misdeed::Damage) };
    nobody_else_notices("damage to first transmissions", first, 1, None);
    nobody_else_notices("damage on all paths", |rng, _, _| share(rng, 0.5, Misdeed::Damage), 1, None);
    nobody_else_notices("nothing is intact", |_, _, _| Misdeed::Damage, 1, None);
}

#[test]
fn a_guest_that_takes_little_or_nothing_harms_nobody_else() {
    nobody_else_notices("takes nothing", |_, _, _| Misdeed::NoBuffer, 1, None);
    nobody_else_notices("takes half", |rng, _, _| share(rng, 0.5, Misdeed::NoBuffer), 1, None);
    nobody_else_notices("takes nine in ten", |rng, _, _| share(rng, 0.1, Misdeed::NoBuffer), 1, None);
    // In turns of five milliseconds, synchronised with the best path.
    let turns: Spoil = |_, h, view| {
        let closed = (view.now.0 / (5 * MS)).is_multiple_of(2) && h.path == view.best;
        if closed { Misdeed::NoBuffer } else { Misdeed::None }
    };
    nobody_else_notices("takes in turns", turns, 1, None);
    // A guest that fills its windows with packets that its peer does not take.
    nobody_else_notices("takes nothing of a flood", |_, _, _| Misdeed::NoBuffer, 4, None);
}

#[test]
fn a_guest_with_a_limit_of_its_own_harms_nobody_else() {
    nobody_else_notices("limit: half", |rng, _, _| share(rng, 0.5, Misdeed::Limit), 1, None);
    nobody_else_notices("limit: all", |_, _, _| Misdeed::Limit, 1, None);
    nobody_else_notices("limit: half of a flood", |rng, _, _| share(rng, 0.5, Misdeed::Limit), 4, None);
    let best: Spoil = |rng, h, view| if h.path == view.best { share(rng, 0.3, Misdeed::Limit) } else { Misdeed::None };
    nobody_else_notices("limit: best path", best, 1, None);
}
