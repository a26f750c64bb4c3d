//! The open requests of a connection.

use crate::frame::GROUP_MAX;
use crate::token::GENERATION_MASK;

/// Maximum number of requests of a connection: NCCL has 32, of up to eight sends each.
const REQUESTS_MAX: usize = 256;

/// State of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum State {
    Free,
    /// Data remains to be copied from the application.
    Sending {
        data: *const u8,
        size: u64,
        offset: u64,
        group: u32,
        index: u8,
    },
    /// Waits for the data of `count` receives.
    Receiving {
        count: u8,
    },
    Done {
        sizes: [u64; GROUP_MAX],
        count: u8,
    },
}

#[derive(Debug)]
struct Slot {
    generation: u16,
    state: State,
}

/// The requests of a connection.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u8>,
}

impl Requests {
    /// Whether another request may be opened.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty() || self.slots.len() < REQUESTS_MAX
    }

    /// Opens a request, if possible. Returns its slot and generation.
    pub(crate) fn open(&mut self, state: State) -> Option<(u8, u16)> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < REQUESTS_MAX => {
                self.slots.push(Slot { generation: 0, state: State::Free });
                (self.slots.len() - 1) as u8
            }
            None => return None,
        };
        let entry = &mut self.slots[usize::from(slot)];
        entry.generation = (entry.generation + 1) & GENERATION_MASK;
        entry.state = state;
        Some((slot, entry.generation))
    }

    /// The state of a request, by its slot.
    pub(crate) fn state_mut(&mut self, slot: u8) -> Option<&mut State> {
        self.slots.get_mut(usize::from(slot)).map(|slot| &mut slot.state)
    }

    /// The state of an open request of this generation.
    pub(crate) fn get(&self, slot: u8, generation: u16) -> Option<State> {
        let slot = self.slots.get(usize::from(slot)).filter(|slot| slot.generation == generation)?;
        Some(slot.state).filter(|state| !matches!(state, State::Free))
    }

    /// Releases a request.
    pub(crate) fn close(&mut self, slot: u8) {
        if let Some(entry) = self.slots.get_mut(usize::from(slot)) {
            entry.state = State::Free;
            self.free.push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_reused_and_old_generations_are_invalid() {
        let mut requests = Requests::default();
        let opened: Vec<_> = std::iter::from_fn(|| requests.open(State::Receiving { count: 1 })).collect();
        assert_eq!(opened.len(), REQUESTS_MAX);
        assert!(!requests.has_room());
        let (slot, generation) = opened[77];
        assert!(requests.get(slot, generation).is_some() && requests.get(slot, generation + 1).is_none());
        requests.close(slot);
        assert!(requests.get(slot, generation).is_none() && requests.has_room());
        let again = requests.open(State::Receiving { count: 1 }).unwrap();
        assert!(again.0 == slot && again.1 != generation);
        assert!(requests.get(slot, generation).is_none());
    }
}
