//! Violated invariants.

use serde::Serialize;

/// Maximum number of violations stored; more are only counted.
const KEPT: usize = 50;

/// Kind of a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A packet never reached its guest.
    Lost,
    /// A packet reached its guest twice.
    Duplicate,
    /// A packet overtook another of its flow.
    Reordered,
    /// A guest received a frame that nobody sent in that form.
    Corrupted,
    /// A packet reached another guest than its destination.
    WrongGuest,
    /// A transmit buffer was released before the packet was in the receiving guest's memory.
    ReleasedEarly,
    /// A handle was misused.
    Handle,
    /// Buffers were not released.
    Leak,
    /// A workload is not finished when time is up.
    NoProgress,
    /// A host looped without progress of time.
    Livelock,
    /// A TCP stream delivered bytes other than those sent.
    Stream,
    /// A TCP connection ended early.
    Connection,
    /// Found by a checker.
    Other(&'static str),
}

/// A violation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Time, ns.
    pub at_ns: u64,
    /// Kind.
    pub kind: Kind,
    /// Details.
    pub detail: String,
}

/// All violations of a run.
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

    /// Number of violations.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The first one.
    pub fn first(&self) -> Option<&Violation> {
        self.kept.first()
    }

    /// The stored ones: the first fifty.
    pub fn iter(&self) -> impl Iterator<Item = &Violation> {
        self.kept.iter()
    }
}
