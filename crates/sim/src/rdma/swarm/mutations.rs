//! Checks that the swarm detects deliberate mistakes of the message engine.

use std::ops::Range;

use bifrost_endpoint::Mutation;

use super::draw::describe;
use super::run::run_world;
use crate::swarm::mutations::Notice;

/// The first of `seeds` whose world fails when the engine makes this mistake.
pub fn first_notice(mutation: Mutation, seeds: Range<u64>) -> Option<Notice> {
    seeds.into_iter().find_map(|seed| {
        let outcome = run_world(&describe(seed), seed, &|config| config.mutation = Some(mutation));
        outcome.violation.map(|violation| Notice { seed, violation })
    })
}
