//! Packet sequence numbers (PROTOCOL §6).

use core::fmt;

/// A packet sequence number: serial arithmetic modulo 2^32 (in the style of RFC 1982), so there is no total order and
/// no `Ord`. Two numbers compare meaningfully when they are less than 2^31 apart, which windows of at most 65,535
/// packets guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Psn(pub u32);

impl Psn {
    /// The number after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// The number `count` packets later.
    // Not `ops::Add`: a name makes it visible that the sum wraps.
    #[allow(clippy::should_implement_trait)]
    #[must_use]
    pub const fn add(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count))
    }

    /// The number `count` packets earlier.
    #[allow(clippy::should_implement_trait)]
    #[must_use]
    pub const fn sub(self, count: u32) -> Self {
        Self(self.0.wrapping_sub(count))
    }

    /// How many packets `self` is after `earlier`; negative when it is before.
    #[must_use]
    pub const fn distance_from(self, earlier: Self) -> i32 {
        self.0.wrapping_sub(earlier.0) as i32
    }

    /// Whether `self` comes before `other`; false if they are equal.
    #[must_use]
    pub const fn is_before(self, other: Self) -> bool {
        self.distance_from(other) < 0
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wraps() {
        let last = Psn(u32::MAX);
        assert_eq!(last.next(), Psn(0));
        assert_eq!(Psn(0).sub(1), last);
        assert_eq!(last.add(5), Psn(4));
        assert_eq!(Psn(4).distance_from(last), 5);
        assert_eq!(last.distance_from(Psn(4)), -5);
        assert!(last.is_before(Psn(0)));
        assert!(!Psn(0).is_before(last));
        assert!(!last.is_before(last));
    }

    #[test]
    fn half_the_space_apart() {
        assert!(Psn(0).is_before(Psn(i32::MAX as u32)));
        assert!(!Psn(i32::MAX as u32).is_before(Psn(0)));
    }
}
