//! RTO and other timeouts of loss detection (RFC 8985; NSDI'26, 4.3).

use crate::config::{COUNTED_RTOS, Config, GIVE_UP_PATHS};
use bifrost_transport::time::US;

/// Timeouts of loss detection, ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) rto: u64,
    /// Until the answer to a packet is overdue. `hold` of it is the peer's ACK delay, unless the packet requests an
    /// immediate ACK.
    pub(crate) tail_probe: u64,
    pub(crate) hold: u64,
    pub(crate) rack: u64,
}

/// Measurements of a peer, ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    pub(crate) rtt: u64,
    pub(crate) variance: u64,
    /// Longest time until the ACK of a packet that requests it at once, if known.
    pub(crate) answer: Option<u64>,
    /// Longest time that the peer delays ACKs.
    pub(crate) hold: u64,
}

/// Limits of the RTO, ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    initial: u64,
    floor: Option<u64>,
    /// Minimum of the adaptive floor.
    least: u64,
    ceiling: u64,
}

impl Limits {
    pub(crate) fn new(config: &Config) -> Self {
        // As many RTOs as can be counted must reach the give-up time: no packet is given up before it.
        let countable = |living_paths| config.give_up_ns(living_paths).div_ceil(COUNTED_RTOS);
        Limits {
            initial: config.initial_rto_ns,
            floor: config.rto_floor_ns.map(|floor| floor.max(countable(1))),
            // Half a millisecond: software hosts have scheduling noise of this size.
            least: (500 * US).max(countable(GIVE_UP_PATHS)).min(config.initial_rto_ns),
            ceiling: config.rto_ceiling_ns,
        }
    }
}

impl Timing {
    /// Before any measurement.
    pub(crate) fn unknown(limits: Limits) -> Self {
        Timing { rto: limits.initial, tail_probe: limits.initial, hold: 0, rack: limits.initial }
    }

    pub(crate) fn of(measured: Measured, limits: Limits) -> Self {
        let Measured { rtt, variance, answer, hold } = measured;
        let floor = limits.floor.unwrap_or((3 * rtt).clamp(limits.least, limits.initial));
        let rto = (rtt + (4 * variance).max(100 * US) + hold).clamp(floor, limits.ceiling.max(floor));
        let tail_probe = (answer.unwrap_or(2 * rtt) + hold).min(rto);
        Timing { rto, tail_probe, hold: hold.min(tail_probe), rack: rtt + (rtt / 4).max(variance).max(20 * US) }
    }

    /// The same for a connection that waits longer after spurious retransmissions.
    pub(crate) fn with_patience(self, patience: u64) -> Self {
        let Timing { rto, tail_probe, hold, rack } = self;
        Timing { rto: rto + patience, tail_probe: tail_probe + patience, hold, rack: rack + patience }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifrost_transport::time::MS;

    /// With any settings, the last RTO that can be counted ends after the give-up time.
    #[test]
    fn countable_rtos_reach_the_give_up_time() {
        for (floor, ceiling, give_up_rtos, initial) in
            [(None, 50, 3, 4), (Some(50), 50, 3, 4), (Some(100), 1, 4, 4), (None, 1, 7, 10_000), (Some(4000), 50, 0, 4)]
        {
            let config = Config {
                initial_rto_ns: initial * MS,
                rto_floor_ns: floor.map(|us: u64| us * US),
                rto_ceiling_ns: ceiling * MS,
                give_up_rtos,
                ..Config::default()
            };
            let measured = Measured { rtt: 20 * US, variance: US, answer: None, hold: 0 };
            let timing = Timing::of(measured, Limits::new(&config));
            let longest = timing.rto * COUNTED_RTOS;
            // A configured floor is kept, and may end the packet sooner with several paths that deliver.
            let living_paths = if floor.is_none() { GIVE_UP_PATHS } else { 1 };
            assert!(longest >= config.give_up_ns(living_paths), "{config:?}: {longest}");
        }
    }
}
