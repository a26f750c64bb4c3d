//! Shrinks a failing world.

use std::time::{Duration, Instant};

use super::draw::Description;
use super::run::run_world;
use crate::violation::Kind;

/// The smallest world found within `time` that fails in the same way with this seed.
pub fn shrink(description: &Description, seed: u64, kind: Kind, time: Duration) -> Description {
    let until = Instant::now() + time;
    let fails = |d: &Description| run_world(d, seed, &|_| ()).violation.is_some_and(|v| v.kind == kind);
    let mut best = description.clone();
    loop {
        let smaller = candidates(&best).into_iter().find(|candidate| Instant::now() < until && fails(candidate));
        match smaller {
            Some(smaller) => best = smaller,
            None => return best,
        }
    }
}

/// Smaller worlds, the largest reductions first.
fn candidates(description: &Description) -> Vec<Description> {
    let mut all = Vec::new();
    let mut with = |change: &dyn Fn(&mut Description)| {
        let mut smaller = description.clone();
        change(&mut smaller);
        if smaller != *description && !smaller.connections.is_empty() {
            all.push(smaller);
        }
    };
    (0..description.connections.len()).for_each(|at| with(&|d| drop(d.connections.remove(at))));
    (0..description.faults.len()).for_each(|at| {
        with(&|d| {
            d.faults.remove(at);
        })
    });
    with(&|d| d.loss = 0.0);
    with(&|d| d.duplicated = 0.0);
    with(&|d| d.held = 0.0);
    with(&|d| d.corrupted = 0.0);
    with(&|d| d.pause_bytes = None);
    with(&|d| d.keep_ns = 0);
    for at in 0..description.connections.len() {
        with(&|d| d.connections[at].switch_every_ns = 0);
        for way in 0..2 {
            let count = description.connections[at].sends[way].lens.len();
            with(&|d| d.connections[at].sends[way].lens.truncate(count / 2));
            with(&|d| drop(d.connections[at].sends[way].lens.drain(..count / 2)));
            with(&|d| d.connections[at].sends[way].lens.truncate(count.saturating_sub(1)));
            with(&|d| d.connections[at].sends[way].every_ns = 0);
            (0..count.min(8)).for_each(|n| with(&|d| d.connections[at].sends[way].lens[n] /= 2));
        }
    }
    all
}
