//! Sessions in the form in which another switch takes them over: without their indexes and links.

use super::key::Key;
use super::state::State;
use super::table::{Handle, Payload, Sessions};
use crate::changes::Changes;
use crate::ids::Direction;

/// Everything that another switch needs to continue a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Carried<T> {
    pub(crate) key: Key,
    pub(crate) origin: Direction,
    pub(crate) state: State,
    /// Time of the last packet, s of the switch's time.
    pub(crate) seen_s: u32,
    pub(crate) answered_s: u16,
    pub(crate) heard: u8,
    pub(crate) payload: T,
}

/// States, indexed by their serialized number. A number never changes its meaning.
const STATES: [State; 10] = [
    State::Opening,
    State::Answered,
    State::Established,
    State::Closing { by_originator: false },
    State::Closing { by_originator: true },
    State::Closed,
    State::Asked,
    State::Exchange,
    State::Assured,
    State::Icmp,
];

impl State {
    /// Serialized number of the state.
    pub(crate) fn code(self) -> u8 {
        STATES.iter().position(|state| *state == self).unwrap_or(0) as u8
    }

    /// The state with this serialized number, if there is one.
    pub(crate) fn of_code(code: u8) -> Option<State> {
        STATES.get(usize::from(code)).copied()
    }
}

impl<T: Payload> Sessions<T> {
    /// All sessions. Those that are idle for longest come first, because the other switch evicts them first.
    pub(crate) fn carried(&self) -> Vec<Carried<T>> {
        let mut all: Vec<_> = self.all().collect();
        all.sort_by_key(|session| session.seen_s);
        all
    }

    /// Continues a session of another switch. `epoch` must not be that of the current configuration, so that the
    /// session's next packet is checked against the rules. Returns the session's place. `None`: there is no room, or a
    /// session with one of its keys exists.
    pub(crate) fn take_over(&mut self, session: &Carried<T>, epoch: u32) -> Option<u32> {
        let is_known = |key: &Key| self.find(key).is_some();
        let second = session.payload.second_key();
        let second_is_known =
            second.is_some_and(|second| self.find_second_after(&second, &super::Planned::NOTHING).is_some());
        if is_known(&session.key) || second_is_known { None } else { self.insert_carried(session, epoch) }
    }

    /// Removes a session that [`take_over`](Self::take_over) has added, as if it had never been there, unless it has
    /// ended.
    pub(crate) fn take_back(&mut self, handle: Handle) {
        if self.is_there(handle) {
            self.remove(handle.index);
        }
    }

    /// From now on, records which places change, for copies in another process. All places count as changed.
    pub(crate) fn start_copying(&mut self) {
        let all = Changes::of_all(self.places());
        *self.changes() = Some(Box::new(all));
    }

    /// No longer records changes.
    pub(crate) fn stop_copying(&mut self) {
        *self.changes() = None;
    }

    /// The places whose copies must be discarded.
    pub(crate) fn take_outdated(&mut self) -> Vec<u32> {
        self.changes().as_mut().map(|changes| changes.take_outdated()).unwrap_or_default()
    }

    /// The first changed places, at most `max`.
    pub(crate) fn changed(&mut self, max: usize) -> Vec<u32> {
        self.changes().as_ref().map(|changes| changes.changed().take(max).collect()).unwrap_or_default()
    }

    /// The number of changed places.
    pub(crate) fn changes_left(&mut self) -> usize {
        self.changes().as_ref().map_or(0, |changes| changes.left())
    }

    /// Copies a place if it has changed and a session is there.
    pub(crate) fn copy(&mut self, place: u32) -> Option<Carried<T>> {
        let session = self.at(place);
        let changes = self.changes().as_mut().filter(|changes| changes.is_changed(place))?;
        match session {
            Some(_) => changes.copied(place),
            None => changes.skip(place),
        }
        session
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_a_unique_number() {
        for (code, state) in (0..).zip(STATES) {
            assert_eq!((state.code(), State::of_code(code)), (code, Some(state)));
        }
        assert_eq!(State::of_code(STATES.len() as u8), None);
    }
}
