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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::tables::Tables;

    #[test]
    fn the_first_session_finds_room() {
        let mut switch = Switch::build(&Tables::default(), 1).unwrap();
        let reserved = |switch: &Switch| switch.memory().map(|extent| extent.reserved_bytes);
        assert_eq!(reserved(&switch), [0; Extent::OF_SWITCH]);
        switch.make_first_room();
        let [sessions, heads, next, rest @ ..] = switch.memory();
        assert!(sessions.used_bytes == 0 && sessions.reserved_bytes > 0 && next.reserved_bytes > 0);
        assert!(heads.used_bytes == heads.reserved_bytes && heads.used_bytes > 0);
        assert!(rest.iter().all(|extent| extent.reserved_bytes == 0), "there are no services and no flow records");
        // Once there is room, it stays where it is.
        switch.make_first_room();
        assert_eq!(switch.memory()[0], sessions);
    }
}
