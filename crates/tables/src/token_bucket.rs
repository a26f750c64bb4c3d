//! A token bucket.

/// Nanoseconds in a second. A token is divided into this many parts, so that a rate per second is exactly that number
/// of parts per nanosecond.
const PARTS: i128 = 1_000_000_000;

/// Passes a rate, and a burst above it: tokens (bytes, packets) flow in at the rate until the bucket is full, and what
/// passes takes its number of tokens.
///
/// In any interval of t seconds it passes at most burst + rate · t. If there is always demand, it passes no less than
/// the rate over long times: nothing is rounded. Any rate, burst and idle time is valid, without overflow. It reads no
/// clock: `now` is the time in ns on any clock. Time that stands still or goes back neither adds nor removes tokens;
/// the repeated time does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBucket {
    rate: u64,
    burst: u64,
    /// Parts of tokens; negative: debt.
    level: i128,
    /// The latest time seen.
    last: u64,
}

impl TokenBucket {
    /// A full bucket: `rate` tokens per second, of which at most `burst` are kept. With a rate of 0 only the first
    /// burst passes.
    pub fn new(rate: u64, burst: u64) -> Self {
        TokenBucket { rate, burst, level: i128::from(burst) * PARTS, last: 0 }
    }

    /// Takes `amount` tokens if there are enough; otherwise none. There are never more than the burst.
    pub fn take(&mut self, now: u64, amount: u64) -> bool {
        self.fill(now);
        let wanted = i128::from(amount) * PARTS;
        let enough = wanted <= self.level;
        if enough {
            self.level -= wanted;
        }
        enough
    }

    /// Takes `amount` tokens even if there are not enough, for packets that have passed already. Nothing else passes
    /// until the debt is paid.
    pub fn charge(&mut self, now: u64, amount: u64) {
        self.fill(now);
        self.level = self.level.saturating_sub(i128::from(amount) * PARTS);
    }

    /// Whole tokens available.
    pub fn available(&mut self, now: u64) -> u64 {
        self.fill(now);
        // At most the burst.
        (self.level.max(0) / PARTS) as u64
    }

    /// Whole tokens owed, rounded down.
    pub fn debt(&mut self, now: u64) -> u64 {
        self.fill(now);
        u64::try_from(self.level.min(0).unsigned_abs() / PARTS.unsigned_abs()).unwrap_or(u64::MAX)
    }

    /// Time until `amount` tokens are available if none are taken, ns, rounded up: 0 if they are available now,
    /// `u64::MAX` if they never will be.
    pub fn until(&mut self, now: u64, amount: u64) -> u64 {
        self.fill(now);
        let missing = i128::from(amount) * PARTS - self.level;
        if missing <= 0 {
            0
        } else if amount > self.burst || self.rate == 0 {
            u64::MAX
        } else {
            // Both are positive.
            u64::try_from(missing.unsigned_abs().div_ceil(u128::from(self.rate))).unwrap_or(u64::MAX)
        }
    }

    /// Changes rate and burst from `now` on. Tokens stay, up to the new burst.
    pub fn set_rate(&mut self, now: u64, rate: u64, burst: u64) {
        self.fill(now);
        (self.rate, self.burst) = (rate, burst);
        self.level = self.level.min(i128::from(burst) * PARTS);
    }

    /// Tokens per second, and the maximum kept.
    pub fn rate(&self) -> (u64, u64) {
        (self.rate, self.burst)
    }

    fn fill(&mut self, now: u64) {
        let elapsed = now.saturating_sub(self.last);
        if elapsed > 0 {
            self.last = now;
            let inflow = i128::try_from(u128::from(elapsed) * u128::from(self.rate)).unwrap_or(i128::MAX);
            self.level = self.level.saturating_add(inflow).min(i128::from(self.burst) * PARTS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn burst_then_rate() {
        let mut bucket = TokenBucket::new(1000, 10);
        let now = 5 * S;
        assert_eq!((0..20).filter(|_| bucket.take(now, 1)).count(), 10);
        assert_eq!(bucket.until(now, 1), 1_000_000);
        assert!(!bucket.take(now + 999_999, 1));
        assert!(bucket.take(now + 1_000_000, 1));
        assert_eq!(bucket.until(now + 1_000_000, 10), 10_000_000);
        assert_eq!(bucket.available(now + 3_500_000), 2);
        assert_eq!(bucket.available(now + S), 10, "no more than the burst is kept");
    }

    #[test]
    fn an_unreachable_amount_never_comes() {
        let mut bucket = TokenBucket::new(1000, 10);
        assert!(!bucket.take(S, 11));
        assert_eq!(bucket.until(S, 11), u64::MAX);
        assert_eq!(bucket.until(S, 10), 0);
        let mut closed = TokenBucket::new(0, 1);
        assert!(closed.take(S, 1));
        assert!(!closed.take(u64::MAX, 1));
        assert_eq!(closed.until(u64::MAX, 1), u64::MAX);
        assert_eq!(closed.until(u64::MAX, 0), 0);
    }

    #[test]
    fn extremes_do_not_overflow() {
        for (rate, burst) in [(50_000_000_000, 1 << 30), (1_000_000_000, 1), (u64::MAX, u64::MAX), (1, u64::MAX)] {
            let mut bucket = TokenBucket::new(rate, burst);
            for now in [0, 1, S, u64::MAX, 0, u64::MAX - 1, u64::MAX] {
                bucket.charge(now, u64::MAX);
                bucket.until(now, u64::MAX);
                bucket.take(now, u64::MAX);
                assert!(bucket.available(now) <= burst);
                bucket.set_rate(now, rate, burst);
            }
            let mut idle = TokenBucket::new(rate, burst);
            assert!(idle.take(1, burst) && idle.take(u64::MAX, 1), "{rate} {burst}");
        }
    }

    #[test]
    fn debt_is_paid_first() {
        let mut bucket = TokenBucket::new(1000, 10);
        bucket.charge(S, 110);
        assert_eq!((bucket.available(S), bucket.debt(S)), (0, 100));
        assert!(!bucket.take(S, 0), "nothing passes");
        assert_eq!(bucket.clone().debt(S + 99_999_999), 0, "part of a token");
        assert_eq!(bucket.until(S, 1), 101_000_000);
        assert!(bucket.take(S + 101_000_000, 1));
    }

    #[test]
    fn time_that_goes_back_is_harmless() {
        let mut bucket = TokenBucket::new(1000, 10);
        assert!(bucket.take(S, 10));
        assert!(!bucket.take(S - 500_000, 1));
        assert!(!bucket.take(S + 500_000, 1), "repeated time counts once");
        assert!(bucket.take(S + 1_000_000, 1));
    }

    #[test]
    fn another_rate_counts_from_now_on() {
        let mut bucket = TokenBucket::new(1000, 10);
        assert!(bucket.take(S, 10));
        bucket.set_rate(S + 5_000_000, 100, 20);
        assert_eq!(bucket.available(S + 5_000_000), 5, "at the old rate");
        assert_eq!(bucket.available(S + 15_000_000), 6, "at the new one");
        bucket.set_rate(S + 15_000_000, 100, 3);
        assert_eq!(bucket.available(S + 15_000_000), 3);
        assert_eq!(bucket.rate(), (100, 3));
    }
}
