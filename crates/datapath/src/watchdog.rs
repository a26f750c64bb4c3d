//! Finds ports that keep their worker busy, and limits them.
//!
//! A turn takes tens of microseconds. A guest that can make one of its packets cost milliseconds takes time from all
//! other guests of its worker. So a worker checks who uses its time, in three steps, of which the first costs nothing:
//!
//! * calm: the duration of each turn is known anyway. A turn of more than [`LONG_TURN_NS`] has one of two reasons: its
//!   own work, or the scheduler gave the processor to another thread.
//! * suspicious, for [`LOOK_NS`]: the thread's own processor time is read before and after each turn.
//! * close, for [`LOOK_NS`], after a turn that used this much processor time: every step is timed
//!   ([`Work::at`](crate::work::Work::at)) and charged to the port for which it is done.
//!
//! Steps are timed by the wall clock. So the time during which the thread was off the processor in a turn is subtracted
//! from each port's time: what remains was certainly used. The time that an honest port may need for its packets
//! ([`PACKET_NS`]) is subtracted, too. The rest is the port's excess.
//!
//! One excess proves nothing. The kernel charges interrupts, and pauses by a hypervisor, to the interrupted thread: up
//! to 25 ms at once on a virtual machine whose processors are overcommitted. So an excess is charged to a port only as
//! far as an earlier excess of the same port confirms it that has not yet been absorbed by the port's share of the
//! worker's time ([`Slowness::confirmed`]). Charged time is a debt, which decreases over time. Above [`BURST_NS`] of
//! debt, the port rests until the debt is paid.

mod turns;

use bifrost_rte::Time;

/// A longer turn is examined, and a port that takes longer in one turn is logged, ns.
pub const LONG_TURN_NS: u64 = 1_000_000;
/// Duration of each of the two levels of examination.
const LOOK_NS: u64 = 1_000_000_000;
/// What an honest port may need for a packet, ns: two copies of 64 KB, with a system call each.
const PACKET_NS: u64 = 40_000;
/// Debt that a port may have without consequences, ns.
const BURST_NS: u64 = 10_000_000;
/// The longest rest of a port.
const MAX_REST_NS: u64 = 1_000_000_000;
/// How often a port that keeps its worker busy is logged.
const LOG_EVERY_NS: u64 = 10_000_000_000;

/// Configuration of the watchdog.
#[derive(Clone, Copy, Debug)]
pub struct WatchdogConfig {
    /// Monotonic time, ns.
    pub clock: fn() -> u64,
    /// Processor time of this thread, ns.
    pub processor_time: fn() -> u64,
    /// Percentage of the worker's time that a port may use beyond what its packets need; 0: unlimited.
    pub share_percent: u8,
}

/// How closely a worker examines its turns.
#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    config: Option<WatchdogConfig>,
    suspicious_until: Time,
    close_until: Time,
    /// Processor time at the beginning of the turn.
    before_ns: Option<u64>,
    /// At least one port rests.
    pub(crate) any_rests: bool,
}

/// Time that a port has used beyond what its packets need.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slowness {
    debt_ns: u64,
    as_of: Time,
    /// The largest excess not absorbed yet, less what has been absorbed of it, ns, and the time at which this value
    /// held.
    witness_ns: u64,
    witness_as_of: Time,
    /// Packets of the port up to the last examination.
    packets: u64,
    named: Option<Time>,
    /// Until then, nothing is fetched from the port or placed for it.
    pub(crate) rests_until: Option<Time>,
    /// Turns in which the port kept the worker busy for more than [`LONG_TURN_NS`].
    pub(crate) slow_turns: u64,
    /// Time beyond what its packets need, ns.
    pub(crate) slow_ns: u64,
    /// How often it had to rest.
    pub(crate) rest_times: u64,
    /// Packets for the port that arrived while it rested.
    pub(crate) rest_packets: u64,
}

impl Slowness {
    /// Whether the port rests now.
    #[inline(always)]
    pub(crate) fn rests(&self, now: Time) -> bool {
        self.rests_until.is_some_and(|until| until > now)
    }

    /// How much of an excess is confirmed by an earlier one, ns. An excess that comes alone, or only as often as the
    /// share of the worker's time allows, is not confirmed, however long it is.
    fn confirmed(&mut self, now: Time, excess_ns: u64, share_percent: u8) -> u64 {
        let absorbed = now.since(self.witness_as_of) / 100 * u64::from(share_percent.clamp(1, 100));
        let witness = self.witness_ns.saturating_sub(absorbed);
        self.witness_as_of = now;
        self.witness_ns = witness.max(excess_ns);
        witness.min(excess_ns)
    }

    /// Adds `excess_ns` to the debt. Returns how long the port must rest, ns.
    fn owe(&mut self, now: Time, excess_ns: u64, share_percent: u8) -> u64 {
        let share = u64::from(share_percent.min(100));
        self.debt_ns = self.debt_ns.saturating_sub(now.since(self.as_of) / 100 * share) + excess_ns;
        self.as_of = now;
        self.slow_ns += excess_ns;
        match share {
            0 => 0,
            _ if self.debt_ns <= BURST_NS => 0,
            share => ((self.debt_ns - BURST_NS) * 100 / share).min(MAX_REST_NS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debt_decreases_with_time_and_a_small_debt_is_free() {
        let mut slowness = Slowness::default();
        assert_eq!(slowness.owe(Time(0), BURST_NS, 10), 0, "the burst is free");
        assert_eq!(slowness.owe(Time(0), 3_000_000, 10), 30_000_000, "ten times what is beyond that");
        assert_eq!(slowness.owe(Time(30_000_000), 0, 10), 0, "it has rested");
        assert_eq!(slowness.owe(Time(60_000_000), 3_000_000, 10), 0, "and paid a little more");
        assert_eq!(slowness.owe(Time(60_000_000), 1_000_000_000, 10), MAX_REST_NS);
        assert_eq!(Slowness::default().owe(Time(0), 1_000_000_000, 0), 0, "no share, no bound");
        // 5 ms each 100 ms is 5 %, which is always free.
        let mut steady = Slowness::default();
        assert!((0..1000u64).all(|n| steady.owe(Time(n * 100_000_000), 5_000_000, 10) == 0));
    }

    #[test]
    fn an_excess_counts_only_as_far_as_an_earlier_one_confirms_it() {
        const MS: u64 = 1_000_000;
        // (at ms, excess ms, confirmed ms), at a share of 10 %.
        let table: [&[(u64, u64, u64)]; 5] = [
            // A pause of the machine, then a short one while it is remembered, then one after it has been absorbed.
            &[(0, 25, 0), (100, 1, 1), (400, 25, 0)],
            // Pauses of any length that stay within the share.
            &[(0, 25, 0), (250, 25, 0), (500, 25, 0)],
            // A port that is slow in each turn: all but the first excess is charged, less what the share absorbs.
            &[(0, 10, 0), (10, 10, 9), (20, 10, 9)],
            // A port that becomes slower is charged for what it has shown before.
            &[(0, 2, 0), (10, 12, 1), (20, 12, 11)],
            // The larger excess is remembered.
            &[(0, 12, 0), (10, 2, 2), (20, 12, 10)],
        ];
        for events in table {
            let mut slowness = Slowness::default();
            for &(at, excess, confirmed) in events {
                assert_eq!(slowness.confirmed(Time(at * MS), excess * MS, 10), confirmed * MS, "{events:?} at {at} ms");
            }
        }
    }
}
