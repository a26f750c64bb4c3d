//! Limits how fast a front-end may keep its port's thread, and through it a worker, busy.

use std::time::{Duration, Instant};

/// Burst size, in messages: more than a front-end with 16 queue pairs and 64 memory regions sends when it starts.
const BURST: u32 = 4096;

/// A token bucket that admits everything, and returns how long to wait afterwards.
#[derive(Debug)]
pub(super) struct Pace {
    /// Interval between messages at the average rate.
    interval: Duration,
    /// When everything admitted so far would have been due at the average rate.
    due: Instant,
}

impl Pace {
    /// `rate`: average messages per second; 0: no limit.
    pub(super) fn new(rate: u32, now: Instant) -> Pace {
        Pace { interval: Duration::from_secs(1).checked_div(rate).unwrap_or_default(), due: now }
    }

    /// Admits work that costs `messages` messages. Returns how long to wait before the next one.
    pub(super) fn spend(&mut self, messages: u32, now: Instant) -> Duration {
        self.due = self.due.max(now) + self.interval * messages;
        (self.due - now).saturating_sub(self.interval * BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let mut now = Instant::now();
        let mut pace = Pace::new(1000, now);
        for i in 0..BURST {
            assert_eq!(pace.spend(1, now), Duration::ZERO, "message {i}");
        }
        let start = now;
        for _ in 0..2000 {
            now += pace.spend(1, now);
        }
        assert_eq!(now - start, Duration::from_secs(2));
        assert_eq!(pace.spend(50, now), Duration::from_millis(50));
        now += Duration::from_secs(3600);
        assert_eq!(pace.spend(BURST, now), Duration::ZERO, "no more credit accumulates");
        assert_eq!(pace.spend(1, now), Duration::from_millis(1));
        let mut free = Pace::new(0, now);
        assert!((0..10_000_000).all(|_| free.spend(50, now).is_zero()));
    }
}
