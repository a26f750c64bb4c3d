//! Random choices.

use crate::rng::Rng;

/// Random choices.
pub(crate) trait Draw {
    /// True once in `n` times.
    fn one_in(&mut self, n: u64) -> bool;
    /// A number in `low..=high`.
    fn range(&mut self, low: u64, high: u64) -> u64;
    /// A number in `low..=high`, uniform in magnitude.
    fn scale(&mut self, low: u64, high: u64) -> u64;
    /// One of these.
    fn pick<T: Copy>(&mut self, of: &[T]) -> T;
}

impl Draw for Rng {
    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    fn scale(&mut self, low: u64, high: u64) -> u64 {
        let (a, b) = ((low as f64).ln(), (high as f64 + 1.0).ln());
        ((a + (b - a) * self.unit()).exp() as u64).clamp(low, high)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}
