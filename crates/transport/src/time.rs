//! Time as an argument: nanoseconds of some monotonic clock that only the caller reads.

use bifrost_wire::bifrost::Tick;

/// A point in time, nanoseconds since an arbitrary origin, monotonic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// The far future: no deadline.
    pub const NEVER: Time = Time(u64::MAX);

    /// Nanoseconds from `earlier` to here, 0 if `earlier` is later.
    #[inline]
    pub fn since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// This time plus `nanos`.
    #[inline]
    pub fn after(self, nanos: u64) -> Time {
        Time(self.0.saturating_add(nanos))
    }

    /// As it goes on the wire (PROTOCOL.md, timestamps).
    #[inline]
    pub fn tick(self) -> Tick {
        Tick::from_nanos(self.0)
    }
}

/// One microsecond in nanoseconds.
pub const US: u64 = 1_000;
/// One millisecond in nanoseconds.
pub const MS: u64 = 1_000_000;
/// One second in nanoseconds.
pub const S: u64 = 1_000_000_000;
