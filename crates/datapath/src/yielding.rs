//! When a worker yields its processor.
//!
//! Guests' threads on the same processor respond to published packets before more are published: otherwise packets that
//! arrive together are answered together, and hosts take turns waiting for each other. The scheduler would not do that
//! by itself, because it owes milliseconds to a worker that has slept. But a guest that computes without ever waiting
//! would take milliseconds each time. When one is found, the worker keeps the processor for a while.

/// A response to a turn's packets takes less time, ns.
const LONG_NS: u64 = 1_000_000;
/// After a long absence, the worker keeps its processor this many times as long: so it loses about 3 % of its time.
const KEPT: u64 = 32;

/// When to yield.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Yielding {
    not_before_ns: u64,
}

impl Yielding {
    /// Whether it is time to yield.
    pub(crate) fn is_due(self, now_ns: u64) -> bool {
        now_ns >= self.not_before_ns
    }

    /// The worker yielded from `from_ns` to `to_ns`.
    pub(crate) fn yielded(&mut self, from_ns: u64, to_ns: u64) {
        let away = to_ns.saturating_sub(from_ns);
        if away > LONG_NS {
            self.not_before_ns = to_ns.saturating_add(KEPT * away);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_yielded_to_guests_that_respond_but_not_to_those_that_compute() {
        let (mut yielding, mut now, mut away) = (Yielding::default(), 0, 0);
        // Turns of 50 us for a second; each time others want 300 us.
        let mut run = |yielding: &mut Yielding, wanted: u64| {
            (away, now) = (0, 0);
            while now < 1_000_000_000 {
                now += 50_000;
                if yielding.is_due(now) {
                    yielding.yielded(now, now + wanted);
                    (away, now) = (away + wanted, now + wanted);
                }
            }
            away
        };
        assert!(run(&mut yielding, 300_000) > 800_000_000);
        let lost = run(&mut yielding, 3_000_000);
        assert!((20_000_000..50_000_000).contains(&lost), "{lost}");
    }
}
