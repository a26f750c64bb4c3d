//! How many packets of one guest, or of the underlay, are fetched in one turn.
//!
//! What is fetched is sent at the end of the turn, and only then can the other host start. Fifty requests that are sent
//! together arrive together and are answered together, and while one host works on them the other one waits. So few are
//! fetched at a time. A guest whose queue has not become empty for many turns does not wait for answers: many of its
//! packets are fetched, so that they share the cost of a turn and of a system call. In both cases no guest delays
//! others for long.

use bifrost_avs::VECTOR;

/// Packets per turn of a flood.
const MANY: usize = 128;
/// Number of full turns that make a flood; a turn that empties the queue halves the count.
const FLOOD: u8 = 8;
/// Maximum of the count.
const MEMORY: u8 = 2 * FLOOD;

/// The budget of a guest, or of the underlay.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Budget {
    full_turns: u8,
}

impl Budget {
    /// How many packets may be fetched in this turn.
    pub(crate) fn packets(self) -> usize {
        if self.full_turns < FLOOD { VECTOR } else { MANY }
    }

    /// `count` packets were fetched with this budget.
    pub(crate) fn fetched(&mut self, count: usize, budget: usize) {
        self.full_turns = if count < budget { self.full_turns / 2 } else { (self.full_turns + 1).min(MEMORY) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of packets fetched in each turn from a queue with `queue` packets, to which `come` are added in each
    /// turn.
    fn turns(mut queue: usize, come: usize, turns: usize) -> Vec<usize> {
        let mut budget = Budget::default();
        let mut fetch = || {
            let fetched = queue.min(budget.packets());
            budget.fetched(fetched, budget.packets());
            queue = queue - fetched + come;
            fetched
        };
        (0..turns).map(|_| fetch()).collect()
    }

    #[test]
    fn a_burst_leaves_in_vectors_and_a_flood_in_long_runs() {
        assert_eq!(turns(50, 0, 5), [16, 16, 16, 2, 0]);
        assert_eq!(turns(10_000, 0, 10)[6..], [16, 16, 128, 128]);
    }

    #[test]
    fn bursts_never_become_a_flood() {
        let mut budget = Budget::default();
        for _ in 0..100 {
            for count in [16, 16, 16, 2] {
                assert_eq!(budget.packets(), 16);
                budget.fetched(count, 16);
            }
        }
    }

    #[test]
    fn a_flood_ends_when_the_queue_is_empty_for_some_turns() {
        let mut budget = Budget::default();
        (0..100).for_each(|_| budget.fetched(budget.packets(), budget.packets()));
        budget.fetched(3, 128);
        assert_eq!(budget.packets(), 128);
        budget.fetched(3, 128);
        assert_eq!(budget.packets(), 16);
    }
}
