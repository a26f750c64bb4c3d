//! Copies of another switch's conversations, which this switch takes over when the other one has stopped.

use super::{
    CONNECTIONS_AT, CONNECTIONS_GONE, CarryError, Fields, MAPPINGS_AT, MAPPINGS_GONE, SESSIONS_AT, SESSIONS_GONE,
};
use crate::copies::{Copies, Copy, TakenOver, add, discard, entry};
use crate::switch::Switch;

/// Maximum number of places of a table; more than the largest configurable table has.
const PLACES_MAX: u32 = 1 << 21;

impl Switch {
    /// Takes over one step of [`copy_some`](Self::copy_some). [`take_over_memory`](Self::take_over_memory) with
    /// [`copy_rest`](Self::copy_rest) follows; until then, this switch must not carry packets.
    ///
    /// # Errors
    /// The bytes are not what a switch of this or a neighbouring release writes. Records before the error are taken
    /// over.
    pub fn take_over_copies(&mut self, now_ns: u64, bytes: &[u8]) -> Result<(), CarryError> {
        self.advance(now_ns);
        let epoch = self.epoch.wrapping_sub(1);
        let (mut mappings, mut taken) = (Vec::new(), TakenOver::default());
        self.read_memory(bytes, epoch, &mut mappings, &mut taken)
    }

    /// The copies are complete: they become this switch's conversations. Adds the mappings that the copies hold to
    /// `mappings`.
    pub(super) fn finish_copies(&mut self, copies: Copies, mappings: &mut Vec<Option<u32>>) -> TakenOver {
        mappings.extend(copies.mappings.into_iter().map(|copy| match copy {
            Copy::At(mapping) => Some(mapping),
            _ => None,
        }));
        // Fewer workers have room for fewer sessions: what came later has evicted these.
        let evicted = self.sessions.counters().evicted + self.connections.counters().evicted;
        let evicted = evicted.min(copies.taken.sessions);
        // Outdated copies do not count as created.
        self.sessions.restart_counters();
        self.connections.restart_counters();
        self.mappings.restart_counters();
        let TakenOver { sessions, mappings, left_out } = copies.taken;
        TakenOver { sessions: sessions - evicted, mappings, left_out: left_out + evicted }
    }

    /// Reads a record of a section with copies.
    pub(super) fn read_copy(&mut self, kind: u16, fields: &mut Fields<'_>, epoch: u32) {
        let Some(place) = fields.u32().filter(|place| *place < PLACES_MAX) else { return };
        let mut copies = self.copies.take().unwrap_or_default();
        let Copies { sessions, connections, mappings, taken } = &mut *copies;
        match kind {
            CONNECTIONS_GONE => {
                discard(entry(connections, place), &mut self.connections, taken);
                self.leave_mappings();
            }
            MAPPINGS_GONE => match std::mem::replace(entry(mappings, place), Copy::No) {
                Copy::At(mapping) => {
                    taken.mappings -= 1;
                    if !self.mappings.withdraw(mapping) {
                        self.mappings.leave(mapping);
                    }
                }
                Copy::LeftOut => taken.left_out -= 1,
                Copy::No => {}
            },
            SESSIONS_GONE => discard(entry(sessions, place), &mut self.sessions, taken),
            // A place has one copy: the other switch lists the former one as outdated first.
            MAPPINGS_AT if *entry(mappings, place) == Copy::No => {
                let mapping = self.read_mapping(fields, epoch);
                add(entry(mappings, place), mapping, &mut taken.mappings, &mut taken.left_out);
            }
            CONNECTIONS_AT if *entry(connections, place) == Copy::No => {
                let mapping_at = |place: u32| match mappings.get(place as usize) {
                    Some(Copy::At(mapping)) => Some(*mapping),
                    _ => None,
                };
                let at = self.read_connection(fields, epoch, mapping_at);
                let handle = at.map(|at| self.connections.handle(at));
                add(entry(connections, place), handle, &mut taken.sessions, &mut taken.left_out);
            }
            SESSIONS_AT if *entry(sessions, place) == Copy::No => {
                let handle = self.read_session(fields, epoch).map(|at| self.sessions.handle(at));
                add(entry(sessions, place), handle, &mut taken.sessions, &mut taken.left_out);
            }
            _ => taken.left_out += 1,
        }
        self.copies = Some(copies);
    }
}
