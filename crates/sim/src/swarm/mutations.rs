//! Checks that the swarm detects deliberate mistakes of the engine.

use std::ops::Range;

use bifrost_rte::Mutation;

use super::draw::scenario;
use super::run::run_scenario;
use crate::violation::Violation;

/// How a mutation was detected.
#[derive(Clone, Debug)]
pub struct Notice {
    /// The first seed that detects it.
    pub seed: u64,
    /// The violation.
    pub violation: Violation,
}

/// The first of `seeds` whose world fails when the engine makes this mistake.
pub fn first_notice(mutation: Mutation, seeds: Range<u64>) -> Option<Notice> {
    seeds.into_iter().find_map(|seed| {
        let outcome = run_scenario(&scenario(seed), seed, |config| config.mutation = Some(mutation));
        outcome.violation.map(|violation| Notice { seed, violation })
    })
}
