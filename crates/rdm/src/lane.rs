//! The queue pairs of a connection (RDM §7).

use crate::NEVER;

/// State of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaneState {
    Up,
    /// Reset at this end, which requests the same of the peer.
    Down {
        /// Number of our first packet once it is up.
        sequence: u32,
        next_try: u64,
        tries: u8,
    },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    pub(crate) state: LaneState,
    /// Generation of the last repair; 0: none.
    pub(crate) generation: u16,
    /// This end's response to the last request.
    pub(crate) answered: Option<u32>,
    /// When the NIC last reported a delivery on it, if it is reliable, ns.
    pub(crate) progress_ns: u64,
}

impl Lane {
    pub(crate) const UP: Self = Self { state: LaneState::Up, generation: 0, answered: None, progress_ns: 0 };

    pub(crate) fn is_up(&self) -> bool {
        self.state == LaneState::Up
    }

    pub(crate) fn deadline(&self) -> u64 {
        match self.state {
            LaneState::Up => NEVER,
            LaneState::Down { next_try, .. } => next_try,
        }
    }

    /// The generation of a repair that this end begins: odd for initiators, even for the other end, so the two are
    /// never equal.
    pub(crate) fn next_generation(&self, initiator: bool) -> u16 {
        let next = self.generation.wrapping_add(1);
        let next = if (next % 2 == 1) == initiator { next } else { next.wrapping_add(1) };
        if next == 0 { 2 } else { next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_grow_and_never_meet() {
        for initiator in [true, false] {
            for generation in [0, 1, 2, 7, 65_533, 65_534, 65_535] {
                let next = Lane { generation, ..Lane::UP }.next_generation(initiator);
                assert_eq!(next % 2 == 1, initiator, "{generation}");
                assert_ne!(next, 0);
                assert!((next.wrapping_sub(generation) as i16) > 0, "{generation} {next}");
            }
        }
    }
}
