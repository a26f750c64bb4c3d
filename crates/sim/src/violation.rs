//! What must not happen, and did.

use serde::Serialize;

/// Violations kept; more are only counted.
const KEPT: usize = 50;

/// What kind of violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A packet never reached its guest.
    Lost,
    /// A packet reached its guest twice.
    Duplicate,
    /// A packet overtook another of its flow.
    Reordered,
    /// Something reached a guest that nobody sent so.
    Corrupted,
    /// A packet reached another guest than it was for.
    WrongGuest,
    /// A transmit buffer was given back before the packet was in the receiving guest's memory.
    ReleasedEarly,
    /// A handle was used as it must not be.
    Handle,
    /// Buffers were not given back.
    Leak,
    /// A workload is not done although time is up.
    NoProgress,
    /// A host looped without time going on.
    Livelock,
    /// A TCP stream has other bytes than were sent.
    Stream,
    /// A TCP connection ended early.
    Connection,
    /// Found by another checker.
    Other(&'static str),
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// When, ns.
    pub at_ns: u64,
    /// What kind.
    pub kind: Kind,
    /// What exactly.
    pub detail: String,
}

/// All of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Violations {
    kept: Vec<Violation>,
    count: u64,
}

impl Violations {
    /// Records one.
    pub fn add(&mut self, at_ns: u64, kind: Kind, detail: impl FnOnce() -> String) {
        self.count += 1;
        if self.kept.len() < KEPT {
            self.kept.push(Violation { at_ns, kind, detail: detail() });
        }
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Whether all is well.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The first one.
    pub fn first(&self) -> Option<&Violation> {
        self.kept.first()
    }

    /// Those that were kept: the first fifty.
    pub fn iter(&self) -> impl Iterator<Item = &Violation> {
        self.kept.iter()
    }
}
