//! Deadlines of connections and peers: a heap with lazy deletion.
//!
//! A connection keeps one armed deadline. Moving it later costs nothing (the early wake-up re-arms), so the steady state
//! pushes a few entries per connection and RTT, and idle connections cost nothing until they are due.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::time::Time;

/// Whose deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    Conn(u32),
    Peer(u16),
}

/// All deadlines.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Time, Key)>>,
}

impl Timers {
    pub(crate) fn push(&mut self, at: Time, key: Key) {
        self.heap.push(Reverse((at, key)));
    }

    /// The next entry that is due; it may be stale, which its owner knows.
    pub(crate) fn pop_due(&mut self, now: Time) -> Option<(Time, Key)> {
        match self.heap.peek() {
            Some(Reverse((at, _))) if *at <= now => self.heap.pop().map(|Reverse(entry)| entry),
            _ => None,
        }
    }

    /// Entries, stale ones included.
    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    /// When the next entry is due.
    pub(crate) fn next(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }
}
