//! The part of a worker's state that other threads can read while it works: whether it makes progress, and its current
//! step.
//!
//! A step that never ends causes no panic, and no turn whose duration could be measured. So another thread must check.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bifrost_avs::PortId;

use crate::stage::Stage;

/// A worker that is in the same turn for this long is stuck.
const STUCK: Duration = Duration::from_secs(1);
/// Bits of a port's number in a step.
const PORT_BITS: u32 = 24;

const _: () = assert!(PortId::LIMIT < Pulse::NOBODY && Stage::ALL.len() < 1 << (u32::BITS - PORT_BITS));

/// Written by the worker, with plain stores, and read by others.
#[derive(Debug, Default)]
pub struct Pulse {
    /// Odd while the worker works; different in each turn.
    turn: AtomicU64,
    /// The stage in the upper 8 bits; the port in the others.
    step: AtomicU32,
}

impl Pulse {
    /// In place of a port: none, or one that is not known yet. No port has this number.
    pub(crate) const NOBODY: u32 = (1 << PORT_BITS) - 1;

    #[inline(always)]
    pub(crate) fn at(&self, stage: Stage, owner: u32) {
        self.step.store((stage as u32) << PORT_BITS | owner, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(crate) fn step(&self) -> (Stage, u32) {
        let step = self.step.load(Ordering::Relaxed);
        (Stage::ALL.get((step >> PORT_BITS) as usize).copied().unwrap_or_default(), step & Self::NOBODY)
    }

    /// The worker starts working.
    pub(crate) fn wake(&self) {
        self.turn.store((self.turn.load(Ordering::Relaxed) | 1) + 2, Ordering::Relaxed);
    }

    /// The worker waits.
    pub(crate) fn rest(&self) {
        self.turn.store(self.turn.load(Ordering::Relaxed) & !1, Ordering::Relaxed);
    }
}

/// Checks a worker's pulse from time to time.
#[derive(Debug, Default)]
pub struct PulseWatch {
    turn: u64,
    since: Option<Instant>,
    told: bool,
}

impl PulseWatch {
    /// Checks at `now`. Returns the stage and the port, if any, at which the worker is stuck; only once.
    pub fn look(&mut self, pulse: &Pulse, now: Instant) -> Option<(Stage, Option<u32>)> {
        let turn = pulse.turn.load(Ordering::Relaxed);
        if turn != self.turn || turn & 1 == 0 || self.since.is_none() {
            *self = PulseWatch { turn, since: Some(now), told: false };
            return None;
        }
        let is_stuck = self.since.is_some_and(|since| now.duration_since(since) >= STUCK);
        if !is_stuck || std::mem::replace(&mut self.told, true) {
            return None;
        }
        let (stage, owner) = pulse.step();
        Some((stage, (owner != Pulse::NOBODY).then_some(owner)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stuck_worker_is_reported_once_and_a_waiting_one_never() {
        let (pulse, mut watch) = (Pulse::default(), PulseWatch::default());
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(watch.look(&pulse, at(0)), None);
        assert_eq!(watch.look(&pulse, at(9000)), None, "it waits");
        pulse.wake();
        pulse.at(Stage::Place, 7);
        assert_eq!(watch.look(&pulse, at(9250)), None);
        pulse.wake();
        assert_eq!(watch.look(&pulse, at(10_240)), None, "another turn");
        assert_eq!(watch.look(&pulse, at(11_000)), None, "not yet");
        assert_eq!(watch.look(&pulse, at(11_250)), Some((Stage::Place, Some(7))));
        assert_eq!(watch.look(&pulse, at(12_000)), None, "told already");
        pulse.rest();
        pulse.wake();
        pulse.at(Stage::Timer, Pulse::NOBODY);
        assert_eq!(watch.look(&pulse, at(13_000)), None);
        assert_eq!(watch.look(&pulse, at(14_000)), Some((Stage::Timer, None)));
    }
}
