//! Does the swarm notice deliberate mistakes of the engine?

use std::ops::Range;

use bifrost_rte::Mutation;

use super::draw::scenario;
use super::run::run_scenario;
use crate::violation::Violation;

/// What noticed a mutation.
#[derive(Clone, Debug)]
pub struct Notice {
    /// The first seed that does.
    pub seed: u64,
    /// How.
    pub violation: Violation,
}

/// The first of `seeds` whose world goes wrong when the engine makes this mistake.
pub fn first_notice(mutation: Mutation, seeds: Range<u64>) -> Option<Notice> {
    seeds.into_iter().find_map(|seed| {
        let outcome = run_scenario(&scenario(seed), seed, |config| config.mutation = Some(mutation));
        outcome.violation.map(|violation| Notice { seed, violation })
    })
}
