//! Which sessions to look at when: a list for each second.

use super::list::{Links, List};
use super::state::Timeouts;

/// Seconds until the wheel has turned once: more than the longest timeout.
const SLOTS: usize = (Timeouts::ESTABLISHED_S as usize + 2).next_power_of_two();

/// The wheel. Time is in seconds, of any origin.
#[derive(Debug)]
pub(crate) struct Wheel {
    /// None until it is [started](Self::start_at).
    slots: Box<[List]>,
    /// What was due before this has been looked at.
    next_s: u32,
}

impl Wheel {
    pub(crate) fn new() -> Self {
        Wheel { slots: Box::default(), next_s: 0 }
    }

    /// Nothing is on the wheel: it may begin at any time.
    pub(crate) fn start_at(&mut self, now_s: u32) {
        if self.slots.is_empty() {
            self.slots = vec![List::EMPTY; SLOTS].into_boxed_slice();
        }
        self.next_s = self.next_s.max(now_s);
    }

    /// The slot of what is due at `at_s`: in the future, and less than a turn away.
    pub(crate) fn slot(&self, at_s: u32) -> u16 {
        let at_s = at_s.clamp(self.next_s, self.next_s + SLOTS as u32 - 1);
        (at_s as usize % SLOTS) as u16
    }

    pub(crate) fn list(&mut self, slot: u16) -> &mut List {
        &mut self.slots[usize::from(slot)]
    }

    /// Takes out one element that was due before `now_s`. After `None` nothing more is, and it is as late as `now_s`; or time has made a
    /// jump, and the wheel has turned once.
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
