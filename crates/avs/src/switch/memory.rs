//! Where the switch's tables are in memory, so that another thread can provide it ([`crate::memory`]).

use super::Switch;
use crate::memory::Extent;

impl Switch {
    /// Allocates room that the first sessions, and the first connections of services, would allocate otherwise.
    pub fn make_first_room(&mut self) {
        self.sessions.make_first_room();
        if self.index.has_services() {
            self.connections.make_first_room();
        }
    }

    /// The memory that grows with sessions, connections and flow records.
    pub fn memory(&self) -> [Extent; Extent::OF_SWITCH] {
        let [sessions, heads, next, ..] = self.sessions.memory();
        let [connections, by_key, by_key_next, by_second, by_second_next] = self.connections.memory();
        let ([sets, records], [peers_sets, peers_records]) =
            (self.cache.from_guests.memory(), self.cache.from_peers.memory());
        [
            sessions,
            heads,
            next,
            connections,
            by_key,
            by_key_next,
            by_second,
            by_second_next,
            sets,
            records,
            peers_sets,
            peers_records,
        ]
    }
}
