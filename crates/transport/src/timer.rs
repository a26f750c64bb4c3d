//! Deadlines of many owners, such as connections and peers: the next few milliseconds in order, all others in coarse slots.
//!
//! What is due soon lies in a heap. What is due later lies unordered in the slot of a wheel, and moves to the heap when
//! that slot's time begins. So a deadline far away, as every idle connection has one, is set in constant time and makes no
//! other one dearer. Deletion is lazy: an owner keeps one armed deadline, knows superseded ones, and moving one later costs
//! nothing, since the early wake-up arms it again.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::time::Time;

/// A slot's length, as a power of two, ns: 4.2 ms.
const SLOT_BITS: u32 = 22;
/// Slots of the wheel: 17 s. What is due later goes round again.
const SLOTS: u64 = 4096;

/// No entry.
const NONE: u32 = u32::MAX;

/// An entry of a slot's list, or of the list of free ones.
#[derive(Clone, Copy, Debug)]
struct Entry<K> {
    at: Time,
    key: K,
    next: u32,
}

/// All deadlines. `K` says whose they are; of those that are due at the same time, the smaller comes first.
#[derive(Debug)]
pub struct Timers<K> {
    /// What is due in the current slot, or overdue.
    soon: BinaryHeap<Reverse<(Time, K)>>,
    /// Number of the current slot since the beginning of time; everything in the wheel is later.
    current: u64,
    /// First entry of each slot, by slot number modulo [`SLOTS`].
    heads: Box<[u32]>,
    /// Which slots have one, a bit each.
    occupied: [u64; SLOTS as usize / 64],
    entries: Vec<Entry<K>>,
    free: u32,
    later: usize,
    /// When the first of the wheel's entries is due, or, if that is beyond its reach, to be placed again.
    first_later: Time,
}

impl<K: Copy + Ord> Default for Timers<K> {
    fn default() -> Self {
        Timers {
            soon: BinaryHeap::new(),
            current: 0,
            heads: vec![NONE; SLOTS as usize].into(),
            occupied: [0; SLOTS as usize / 64],
            entries: Vec::new(),
            free: NONE,
            later: 0,
            first_later: Time::NEVER,
        }
    }
}

impl<K: Copy + Ord> Timers<K> {
    /// No deadlines; all that are pushed are from about `now` on.
    pub fn beginning(now: Time) -> Self {
        Timers { current: slot_of(now), ..Timers::default() }
    }

    /// Adds a deadline. Earlier ones of the same owner remain.
    pub fn push(&mut self, at: Time, key: K) {
        if slot_of(at) <= self.current {
            self.soon.push(Reverse((at, key)));
        } else {
            self.push_later(at, key);
        }
    }

    /// The next entry that is due; it may be stale, which its owner knows.
    pub fn pop_due(&mut self, now: Time) -> Option<(Time, K)> {
        if self.current < slot_of(now) {
            self.turn(slot_of(now));
        }
        match self.soon.peek() {
            Some(Reverse((at, _))) if *at <= now => self.soon.pop().map(|Reverse(entry)| entry),
            _ => None,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entries, stale ones included.
    pub fn len(&self) -> usize {
        self.soon.len() + self.later
    }

    /// When the next entry is due. Earlier if that is more than 17 s away.
    pub fn next(&self) -> Option<Time> {
        let soon = self.soon.peek().map(|Reverse((at, _))| *at);
        soon.or_else(|| (self.later > 0).then_some(self.first_later))
    }

    fn push_later(&mut self, at: Time, key: K) {
        let slot = slot_of(at).min(self.current + SLOTS - 1);
        self.first_later = self.first_later.min(look_at(slot, at));
        let slot = (slot % SLOTS) as usize;
        let entry = Entry { at, key, next: self.heads[slot] };
        let index = self.free;
        if let Some(place) = self.entries.get_mut(index as usize) {
            self.free = place.next;
            *place = entry;
            self.heads[slot] = index;
        } else {
            self.heads[slot] = self.entries.len() as u32;
            self.entries.push(entry);
        }
        self.occupied[slot / 64] |= 1 << (slot % 64);
        self.later += 1;
    }

    /// The slot `to` begins: what lies in it, and in those before it, is due soon. At most once round the wheel.
    fn turn(&mut self, to: u64) {
        let steps = (to - self.current).min(SLOTS);
        let from = self.current + 1;
        self.current = to;
        for slot in from..from + steps {
            let slot = (slot % SLOTS) as usize;
            let mut index = std::mem::replace(&mut self.heads[slot], NONE);
            self.occupied[slot / 64] &= !(1 << (slot % 64));
            while let Some(&Entry { at, key, next }) = self.entries.get(index as usize) {
                self.entries[index as usize].next = self.free;
                self.free = index;
                self.later -= 1;
                // It may have been further away than the wheel reaches.
                self.push(at, key);
                index = next;
            }
        }
        // Searched again only when it has gone, since its slot may be long.
        if slot_of(self.first_later) <= to {
            self.first_later = self.first_occupied().map_or(Time::NEVER, |slot| self.first_of(slot));
        }
    }

    /// When an occupied slot must be looked at.
    fn first_of(&self, slot: u64) -> Time {
        let mut first = Time::NEVER;
        let mut index = self.heads[(slot % SLOTS) as usize];
        while let Some(entry) = self.entries.get(index as usize) {
            first = first.min(look_at(slot, entry.at));
            index = entry.next;
        }
        first
    }

    /// Number of the first slot of the wheel in which there is anything.
    fn first_occupied(&self) -> Option<u64> {
        let first = (self.current + 1) % SLOTS;
        let (word, bit) = (first as usize / 64, first as u32 % 64);
        let words = self.occupied.len();
        // The first word twice: from `bit` on, and last what is before it.
        (0..=words).find_map(|i| {
            let at = (word + i) % words;
            let mask = if i == 0 { u64::MAX << bit } else { u64::MAX };
            let found = self.occupied[at] & mask;
            (found != 0).then(|| {
                let slot = at as u64 * 64 + u64::from(found.trailing_zeros());
                self.current + 1 + slot.wrapping_sub(first) % SLOTS
            })
        })
    }
}

/// When to look at an entry that lies in `slot`: when it is due, or, if the wheel did not reach as far, when the slot begins.
fn look_at(slot: u64, at: Time) -> Time {
    if slot_of(at) == slot { at } else { Time(slot << SLOT_BITS) }
}

fn slot_of(at: Time) -> u64 {
    at.0 >> SLOT_BITS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::{MS, S};

    #[test]
    fn everything_fires_in_order_and_no_earlier_than_due() {
        let mut seed = 1u64;
        let mut random = move || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            seed >> 33
        };
        let mut timers = Timers::default();
        let mut expected = std::collections::BTreeSet::new();
        let mut now = Time(5 * S);
        for round in 0..20_000u32 {
            let reach = [MS, 10 * MS, S, 60 * S, 3600 * S][random() as usize % 5];
            let entry = (now.after(random() % reach), round);
            timers.push(entry.0, entry.1);
            expected.insert(entry);
            if random() % 4 == 0 {
                now = now.after(random() % (if random() % 100 == 0 { 30 * S } else { 3 * MS }));
            }
            let next = timers.next().expect("at least one");
            assert!(next <= expected.first().expect("at least one").0, "never late");
            while let Some(entry) = timers.pop_due(now) {
                assert!(entry.0 <= now);
                assert_eq!(Some(entry), expected.pop_first(), "in order");
            }
            assert!(expected.first().is_none_or(|(at, _)| *at > now), "nothing is left behind");
            assert_eq!(timers.len(), expected.len());
        }
        while let Some(at) = timers.next() {
            now = now.max(at);
            while let Some(entry) = timers.pop_due(now) {
                assert_eq!(Some(entry), expected.pop_first());
            }
        }
        assert!(expected.is_empty());
    }

    #[test]
    fn the_next_deadline_is_known_as_far_as_the_wheel_reaches() {
        let mut timers = Timers::default();
        let at = Time(7 * S + 12_345);
        assert_eq!(timers.next(), None);
        timers.push(at.after(1), 2);
        timers.push(at, 1);
        assert_eq!(timers.next(), Some(at));
        assert_eq!(timers.pop_due(Time(6 * S)), None);
        assert_eq!(timers.next(), Some(at));
        assert_eq!(timers.pop_due(at), Some((at, 1)));
        assert_eq!(timers.pop_due(at), None);
        timers.push(Time(60 * S), 3);
        assert_eq!(timers.pop_due(at.after(1)), Some((at.after(1), 2)));
        let mut looks = 0;
        while let Some(next) = timers.next() {
            looks += 1;
            timers.pop_due(next);
        }
        assert!(looks <= 5, "{looks} looks");
    }
}
