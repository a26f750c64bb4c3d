//! Timer wheel of sessions: a list for each second.

use super::list::{Links, List};
use super::state::Timeouts;

/// Number of slots of one second each; a full turn is longer than the longest timeout.
const SLOTS: usize = (Timeouts::ESTABLISHED_S as usize + 2).next_power_of_two();

/// The wheel. Time is in seconds from any origin.
#[derive(Debug)]
pub(crate) struct Wheel {
    /// Empty until the wheel is [started](Self::start_at).
    slots: Box<[List]>,
    /// All slots before this second have been processed.
    next_s: u32,
}

impl Wheel {
    pub(crate) fn new() -> Self {
        Wheel { slots: Box::default(), next_s: 0 }
    }

    /// Starts the empty wheel at `now_s`.
    pub(crate) fn start_at(&mut self, now_s: u32) {
        if self.slots.is_empty() {
            self.slots = vec![List::EMPTY; SLOTS].into_boxed_slice();
        }
        self.next_s = self.next_s.max(now_s);
    }

    /// The slot for an element that is due at `at_s`, clamped to the current turn.
    pub(crate) fn slot(&self, at_s: u32) -> u16 {
        let at_s = at_s.clamp(self.next_s, self.next_s + SLOTS as u32 - 1);
        (at_s as usize % SLOTS) as u16
    }

    pub(crate) fn list(&mut self, slot: u16) -> &mut List {
        &mut self.slots[usize::from(slot)]
    }

    /// Removes and returns one element that was due before `now_s`. `None`: there are no more, and the wheel has
    /// reached `now_s`; or the clock has jumped, and the wheel has made one full turn.
    pub(crate) fn pop<T>(&mut self, now_s: u32, items: &mut [T], links: fn(&mut T) -> &mut Links) -> Option<u32> {
        for _ in 0..SLOTS {
            if self.next_s >= now_s {
                break;
            }
            let list = &mut self.slots[self.next_s as usize % SLOTS];
            if list.head != super::list::NONE {
                let index = list.head;
                list.remove(items, index, links);
                return Some(index);
            }
            self.next_s += 1;
        }
        None
    }
}
