//! Converts the kernel's receive timestamps (CLOCK_REALTIME) to the monotonic clock that timers and RTTs use.

use rustix::time::{ClockId, Timespec, clock_gettime};

/// Offset between the two clocks at one moment. Sample it once per batch: CLOCK_REALTIME may be stepped at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RealtimeOffset {
    monotonic_ns: u64,
    realtime_ns: u64,
}

impl RealtimeOffset {
    /// Reads both clocks (two vDSO calls).
    pub fn sample() -> Self {
        Self { monotonic_ns: monotonic_ns(), realtime_ns: nanoseconds(clock_gettime(ClockId::Realtime)) }
    }

    /// An offset from known readings, for tests and simulations, ns.
    pub const fn from_readings(monotonic_ns: u64, realtime_ns: u64) -> Self {
        Self { monotonic_ns, realtime_ns }
    }

    /// Arrival time of a datagram, monotonic clock, ns. Never later than the sample; the sample's own time if the
    /// kernel gave none (0), or if it is more than a second old (the clock was stepped in between).
    pub const fn to_monotonic(self, rx_time_ns: u64) -> u64 {
        const SANE_NS: u64 = 1_000_000_000;
        match self.realtime_ns.checked_sub(rx_time_ns) {
            Some(age) if age <= SANE_NS => self.monotonic_ns.saturating_sub(age),
            _ => self.monotonic_ns,
        }
    }
}

/// CLOCK_MONOTONIC, ns.
pub fn monotonic_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::Monotonic))
}

/// The time stamp counter, which runs at a constant rate whatever the processor's clock frequency; 0 on architectures
/// other than x86-64. Only differences between readings of one thread are meaningful.
#[inline]
pub fn cycles() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction reads a register that every x86-64 processor has.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// Processor time of the calling thread, ns. A system call.
pub fn thread_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::ThreadCPUTime))
}

fn nanoseconds(t: Timespec) -> u64 {
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receive_times_become_monotonic() {
        let at = RealtimeOffset::from_readings(5_000_000_000, 1_700_000_000_000_000_000);
        for (name, rx, want) in [
            ("a microsecond ago", 1_699_999_999_999_999_000, 4_999_999_000),
            ("now", 1_700_000_000_000_000_000, 5_000_000_000),
            ("the future: a stepped clock", 1_700_000_001_000_000_000, 5_000_000_000),
            ("long ago: a stepped clock", 1_600_000_000_000_000_000, 5_000_000_000),
            ("unknown", 0, 5_000_000_000),
        ] {
            assert_eq!(at.to_monotonic(rx), want, "{name}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn cycles_advance_with_time() {
        // The thread may be preempted between two readings, so the cycles cover a longer time.
        let before = cycles();
        let since = monotonic_ns();
        while monotonic_ns() - since < 1_000_000 {}
        let ns = monotonic_ns() - since;
        let passed = cycles() - before;
        assert!(passed >= ns / 2, "{passed} in {ns} ns: time stamp counters run at more than 0.5 GHz");
    }

    #[test]
    fn a_sample_is_current() {
        let before = monotonic_ns();
        let sample = RealtimeOffset::sample();
        assert!(sample.to_monotonic(0) >= before && sample.to_monotonic(0) <= monotonic_ns());
    }
}
