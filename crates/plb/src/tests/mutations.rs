//! A property detects each deliberate mistake.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use super::properties::{against_the_oracle, calls, configs, flows_stay_in_order, steps};
use crate::{Config, Mutation};

/// Random cases until one fails.
const CASES: u32 = 20_000;

fn noticed(mutation: Option<Mutation>, cases: u32) -> Option<u32> {
    let mut runner = TestRunner::deterministic();
    let strategy = (configs(), calls(), steps());
    (0..cases).find(|_| {
        let (config, calls, steps) = strategy.new_tree(&mut runner).unwrap().current();
        let config = Config { mutation, ..config };
        let run = || {
            against_the_oracle(config, &calls);
            flows_stay_in_order(config, &steps);
        };
        catch_unwind(AssertUnwindSafe(run)).is_err()
    })
}

#[test]
fn every_mutation_is_detected() {
    assert_eq!(noticed(None, 200), None, "it fails without a mutation");
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let missed: Vec<Mutation> = Mutation::ALL.into_iter().filter(|m| noticed(Some(*m), CASES).is_none()).collect();
    std::panic::set_hook(hook);
    assert!(missed.is_empty(), "not detected: {missed:?}");
}
