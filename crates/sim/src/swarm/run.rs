//! Runs a world with all checkers.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::draw::scenario;
use crate::checkers;
use crate::scenario::Scenario;
use crate::violation::{Kind, Violation};
use crate::world::World;

/// Number of events after which a run is considered endless; the largest have less than two million.
const MOST_EVENTS: u64 = 20_000_000;
/// Virtual time between two checks of this limit, ns.
const LOOK_NS: u64 = 100_000_000;

/// Results of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The first violation; `None`: all is well.
    pub violation: Option<Violation>,
    /// A hash of all events.
    pub hash: u64,
    /// Number of events.
    pub events: u64,
    /// Guests' packets: number sent, and number of those that the transport need not deliver.
    pub packets: (u64, u64),
}

/// Runs the world of a seed.
pub fn run(seed: u64) -> Outcome {
    run_scenario(&scenario(seed), seed, |_| ())
}

/// Runs a scenario up to its first violation. A panic counts as a violation.
pub fn run_scenario(scenario: &Scenario, seed: u64, adjust: impl FnOnce(&mut bifrost_rte::Config)) -> Outcome {
    let mut at = 0;
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut world = match World::with(scenario, seed, adjust) {
            Ok(world) => world,
            Err(error) => return failed(0, format!("the scenario is invalid: {error}")),
        };
        checkers::watch(&mut world);
        world.stop_at_violation();
        while !world.run_until(at + LOOK_NS) {
            at = world.now();
            if world.statistics().events > MOST_EVENTS {
                return failed(at, format!("{MOST_EVENTS} events and no end"));
            }
        }
        let first = world.violations.first().cloned();
        let unfinished = world.done_at().is_none().then(|| world.undone());
        Outcome {
            violation: first.or(unfinished.map(|detail| Violation {
                at_ns: world.now(),
                kind: Kind::NoProgress,
                detail,
            })),
            hash: world.event_hash(),
            events: world.statistics().events,
            packets: (world.flows().totals().0, world.flows().exempt),
        }
    }));
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_string()));
        failed(at, format!("panic: {}", text.unwrap_or_default()))
    })
}

fn failed(at_ns: u64, detail: String) -> Outcome {
    let violation = Some(Violation { at_ns, kind: Kind::Other("run"), detail });
    Outcome { violation, hash: 0, events: 0, packets: (0, 0) }
}
