//! After a panic: finds the port that caused it, takes that port out of use, and makes everything else usable again.
//!
//! A turn that panics unwinds to its worker, which calls [`Core::recover`](crate::core::Core::recover). What a step may
//! leave half finished:
//!
//! * lists that a step processes (to publish, to emit, to unpack) record their progress; the next turn continues with
//!   the rest, without the item that panicked;
//! * the batch may end with half a datagram, which is cut off;
//! * the transport's connection being processed is dropped, and its indexes are rebuilt (`rte/src/engine/mend.rs`);
//! * the switch's notes and flow records, which can be rebuilt at any time, are forgotten;
//! * the port's device is not used any longer: it is set aside, and dropped by the caller that gives the port another
//!   one.

mod recover;

use bifrost_port::panics::Panic;
use bifrost_rte::Time;

use crate::stage::Stage;

/// Panics within [`WINDOW_NS`] during work on packets for a port, or on its connections, that the port may have; one
/// more takes it out of use.
const MAX_STRIKES: u32 = 4;
/// Panics within [`WINDOW_NS`] without a culprit that are tolerated; after one more the process should restart.
const MAX_UNOWNED: u32 = 10;
const WINDOW_NS: u64 = 10_000_000_000;

/// A fault that has taken a port out of use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortFault {
    /// The step in progress.
    pub stage: Stage,
    /// The panic's message and location.
    pub panic: Panic,
    /// When, on the worker's clock.
    pub at: Time,
}

/// What happens after a panic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Only the packet or connection being processed was dropped.
    Dropped,
    /// A port was taken out of use.
    PortOut(u32, PortFault),
    /// Panics recur without a culprit: the process must restart.
    Hopeless,
}

/// Panics in the current window.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Strikes {
    count: u32,
    since: Time,
}

impl Strikes {
    /// Counts one more. Returns whether there are now more than `max`.
    fn add(&mut self, now: Time, max: u32) -> bool {
        if now.since(self.since) > WINDOW_NS {
            *self = Strikes { count: 0, since: now };
        }
        self.count += 1;
        self.count > max
    }
}
