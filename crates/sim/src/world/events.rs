//! Future events, in order.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};

use crate::packet::Parcel;

/// A future event.
#[derive(Debug)]
pub(super) enum Event {
    /// A packet reaches the end of its link.
    Arrive(Parcel),
    /// A host's loop runs a turn.
    Turn(u32),
    /// A light guest sends.
    Send(u32),
    /// A TCP guest is polled.
    Poll(u32),
    /// A fault begins or ends.
    Fault(u32),
    /// Routing checks a link that went down or came up.
    Route(u32),
}

#[derive(Debug)]
struct Entry {
    at: u64,
    order: u64,
    event: Event,
}

/// A slice of time is 2^13 ns: longer than most links, so that most new events are in this slice or the next.
const SLICE_SHIFT: u32 = 13;

/// All future events. Events at the same time happen in the order in which they were added.
///
/// Only near events are sorted: in a large world a million senders wait, and a heap of them all would miss the caches
/// at each step.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// Everything before the end of this slice.
    soon: BinaryHeap<Reverse<Entry>>,
    /// The first slice that is not in `soon`.
    next_slice: u64,
    /// By slice.
    later: BTreeMap<u64, Vec<Entry>>,
    /// An empty vector for reuse.
    spare: Vec<Entry>,
    order: u64,
}

impl Events {
    /// Adds an event.
    pub(super) fn add(&mut self, at: u64, event: Event) {
        self.order += 1;
        let entry = Entry { at, order: self.order, event };
        let slice = at >> SLICE_SHIFT;
        if slice < self.next_slice {
            self.soon.push(Reverse(entry));
        } else {
            self.later.entry(slice).or_insert_with(|| std::mem::take(&mut self.spare)).push(entry);
        }
    }

    /// Time of the next event.
    pub(super) fn next_at(&mut self) -> Option<u64> {
        if self.soon.is_empty()
            && let Some((slice, mut entries)) = self.later.pop_first()
        {
            self.next_slice = slice + 1;
            self.soon.extend(entries.drain(..).map(Reverse));
            self.spare = entries;
        }
        self.soon.peek().map(|Reverse(entry)| entry.at)
    }

    /// The next event, whose time [`next_at`](Self::next_at) has just returned.
    pub(super) fn pop(&mut self) -> Option<Event> {
        self.soon.pop().map(|Reverse(entry)| entry.event)
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn events_are_ordered() {
        let (mut events, mut rng, mut now, mut said) = (Events::default(), Rng::new(1), 0, 0u32);
        let mut waiting: Vec<(u64, u32)> = Vec::new();
        for _ in 0..20_000 {
            for _ in 0..rng.below(3) {
                let far = [1, 100, 10_000, 10_000_000][rng.below(4) as usize];
                let at = now + rng.below(far);
                events.add(at, Event::Send(said));
                waiting.push((at, said));
                said += 1;
            }
            let next = waiting.iter().copied().min();
            assert_eq!(events.next_at(), next.map(|n| n.0));
            if let Some((at, want)) = next
                && rng.below(3) > 0
            {
                assert!(matches!(events.pop(), Some(Event::Send(got)) if got == want));
                waiting.retain(|w| w.1 != want);
                now = at;
            }
        }
        assert!(said > 10_000);
    }
}
