//! Round-trip times: smoothed, and the smallest of the last seconds.

use bifrost_transport::rtt::Smoothed;
use bifrost_transport::time::S;

/// An estimate of the round-trip time.
///
/// The minimum covers two periods. It does not expire after a fixed age as for frames
/// ([`bifrost_transport::rtt::Rtt`]), because a connection has one path, and its next sample may include a queue.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rtt {
    smoothed: Smoothed,
    /// Minimum of the previous period and of the current one.
    before: u64,
    current: u64,
    since: u64,
}

/// The minimum is kept for at least this time, ns.
const PERIOD_NS: u64 = 5 * S;

impl Rtt {
    /// Takes a sample, ns.
    pub fn sample(&mut self, now_ns: u64, rtt_ns: u64) {
        let rtt = rtt_ns.max(1);
        if !self.smoothed.is_known() {
            (self.before, self.current, self.since) = (u64::MAX, rtt, now_ns);
        } else if now_ns.saturating_sub(self.since) >= PERIOD_NS {
            self.before = self.current;
            self.current = rtt;
            self.since = now_ns;
        }
        self.smoothed.sample(rtt);
        self.current = self.current.min(rtt);
    }

    /// The smoothed time, ns; `None` before the first sample.
    #[must_use]
    pub fn smoothed_ns(&self) -> Option<u64> {
        self.smoothed.is_known().then(|| self.smoothed.ns())
    }

    /// The smallest of the last 5 to 10 s, ns; 0 before the first sample.
    #[must_use]
    pub fn base_ns(&self) -> u64 {
        self.before.min(self.current)
    }

    /// A time within which a response should arrive, ns: smoothed plus four deviations; `initial_ns` before the first
    /// sample.
    #[must_use]
    pub fn bound_ns(&self, initial_ns: u64) -> u64 {
        self.smoothed.bound_ns(initial_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_time_is_forgotten_after_two_periods() {
        let mut rtt = Rtt::default();
        assert_eq!((rtt.smoothed_ns(), rtt.base_ns(), rtt.bound_ns(7)), (None, 0, 7));
        rtt.sample(0, 50);
        for second in 1..=4 {
            rtt.sample(second * 1_000_000_000, 100);
        }
        assert_eq!(rtt.base_ns(), 50);
        for second in 5..=11 {
            rtt.sample(second * 1_000_000_000, 100);
        }
        assert_eq!(rtt.base_ns(), 100);
        assert!(rtt.smoothed_ns().is_some_and(|ns| (80..=100).contains(&ns)));
    }
}
