//! Timestamps (PROTOCOL §2.3).

/// A timestamp: units of 64 ns on the monotonic clock of the host that wrote it, modulo 2^32 (it wraps about every
/// 274.9 s). Only differences mean anything; zero is a time like any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Tick(pub u32);

impl Tick {
    /// Length of one tick, ns.
    pub const NANOS: u64 = 64;

    /// The tick that `nanos` (ns of a monotonic clock) falls into.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self((nanos / Self::NANOS) as u32)
    }

    /// Nanoseconds from `earlier` to `self`, negative when `self` is before it; correct if the two are less than half a
    /// wrap (137.4 s) apart.
    #[must_use]
    pub const fn since(self, earlier: Self) -> i64 {
        (self.0.wrapping_sub(earlier.0) as i32 as i64) * Self::NANOS as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_survive_the_wrap() {
        let wrap = Tick::NANOS << 32;
        let before = Tick::from_nanos(wrap - 640);
        let after = Tick::from_nanos(wrap + 1280);
        assert_eq!(after, Tick(20));
        assert_eq!(after.since(before), 1920);
        assert_eq!(before.since(after), -1920);
        assert_eq!(before.since(before), 0);
    }

    #[test]
    fn fractions_of_a_tick_are_truncated() {
        assert_eq!(Tick::from_nanos(63), Tick(0));
        assert_eq!(Tick::from_nanos(64), Tick(1));
    }
}
