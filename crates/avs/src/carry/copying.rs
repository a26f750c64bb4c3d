//! Copying a switch's conversations to another process while packets flow.
//!
//! The old switch records which places of its tables change ([`Changes`](crate::changes::Changes)), and writes some
//! changed places at a time. Most places are written once. When packets have stopped, only the last changes are left,
//! so guests wait only for these.
//!
//! Each step first lists the copies that are outdated, and then adds copies. So the other switch always has a subset of
//! this one's current conversations, and no copy contradicts another one: keys and outside ends are unique.

use super::{
    CONNECTION_BYTES, CONNECTIONS_AT, CONNECTIONS_GONE, MAPPING_BYTES, MAPPINGS_AT, MAPPINGS_GONE, PLACE_BYTES,
    SESSION_BYTES, SESSIONS_AT, SESSIONS_GONE, UPPER_BYTES, begin, write_connection, write_mapping, write_session,
};
use crate::session::{Carried, Payload, Sessions};
use crate::switch::Switch;

/// Number of places whose age is read in one step.
const SCAN: u32 = 4096;

/// The order in which a switch's conversations are copied.
#[derive(Clone, Debug, Default)]
pub struct Copying {
    sessions: Order,
    connections: Order,
}

impl Copying {
    /// Sorts the places once their ages have been read. This takes time, so call it on a thread that carries no packets.
    pub fn sort(&mut self) {
        self.sessions.sort();
        self.connections.sort();
    }
}

/// Places in ascending order of the time of their last packet. The other switch evicts conversations in the order in
/// which it has received them, so those that are idle for longest come first.
#[derive(Clone, Debug, Default)]
struct Order {
    /// Time of the last packet, s, and place.
    by_age: Vec<(u32, u32)>,
    /// Number of places that have been read.
    scanned: u32,
    /// Whether all places have been read, and whether they have been sorted.
    is_complete: bool,
    is_sorted: bool,
    /// How many of `by_age` have been copied.
    copied: usize,
}

impl Order {
    fn sort(&mut self) {
        if self.is_complete && !self.is_sorted {
            self.by_age.sort_unstable();
            self.is_sorted = true;
        }
    }

    /// Copies up to `max` places. Returns none as long as the ages are incomplete.
    fn copy<T: Payload>(&mut self, table: &mut Sessions<T>, max: usize) -> Vec<(u32, Carried<T>)> {
        if !self.is_complete {
            let end = table.places().min(self.scanned.saturating_add(SCAN));
            let ages = (self.scanned..end).filter_map(|place| Some((table.at(place)?.seen_s, place)));
            self.by_age.extend(ages);
            self.scanned = end;
            self.is_complete = end == table.places();
            return Vec::new();
        }
        let mut copies = Vec::new();
        while copies.len() < max
            && let Some((_, place)) = self.by_age.get(self.copied)
        {
            self.copied += 1;
            copies.extend(table.copy(*place).map(|session| (*place, session)));
        }
        copies.extend(changed(table, max - copies.len()));
        copies
    }
}

impl Switch {
    /// Starts to copy all conversations to another process: from now on, this switch records which ones change.
    pub fn start_copying(&mut self) -> Copying {
        self.sessions.start_copying();
        self.connections.start_copying();
        self.mappings.start_copying();
        Copying::default()
    }

    /// No longer records changes. Copies in another process are useless then.
    pub fn stop_copying(&mut self) {
        self.sessions.stop_copying();
        self.connections.stop_copying();
        self.mappings.stop_copying();
    }

    /// Appends the next step to `out`, for [`take_over_copies`](Self::take_over_copies): all outdated copies, and up to
    /// `max` conversations and mappings each. Returns how many changed places are left. Call [`Copying::sort`] between
    /// steps.
    pub fn copy_some(&mut self, copying: &mut Copying, max: usize, out: &mut Vec<u8>) -> usize {
        self.write_outdated(out);
        let mappings = self.write_mappings(max, out);
        // Connections refer to mappings.
        let connections = if self.mappings.changes_left() == 0 {
            copying.connections.copy(&mut self.connections, max.saturating_sub(mappings))
        } else {
            Vec::new()
        };
        write_connections(out, &connections);
        let max = max.saturating_sub(mappings + connections.len());
        write_sessions(out, &copying.sessions.copy(&mut self.sessions, max));
        self.sessions.changes_left() + self.connections.changes_left() + self.mappings.changes_left()
    }

    /// Appends all remaining changes to `out`, for [`take_over_memory`](Self::take_over_memory). Packets must have
    /// stopped.
    pub fn copy_rest(&mut self, out: &mut Vec<u8>) {
        self.write_outdated(out);
        self.write_mappings(usize::MAX, out);
        write_connections(out, &changed(&mut self.connections, usize::MAX));
        write_sessions(out, &changed(&mut self.sessions, usize::MAX));
    }

    fn write_outdated(&mut self, out: &mut Vec<u8>) {
        self.leave_mappings();
        write_places(out, CONNECTIONS_GONE, &self.connections.take_outdated());
        write_places(out, MAPPINGS_GONE, &self.mappings.take_outdated());
        write_places(out, SESSIONS_GONE, &self.sessions.take_outdated());
    }

    /// Returns the number of mappings.
    fn write_mappings(&mut self, max: usize, out: &mut Vec<u8>) -> usize {
        let mappings = self.mappings.copy(max);
        begin(out, MAPPINGS_AT, PLACE_BYTES + MAPPING_BYTES + UPPER_BYTES, mappings.len());
        for (place, pair, is_in_force) in &mappings {
            out.extend(place.to_le_bytes());
            write_mapping(out, pair, *is_in_force);
        }
        mappings.len()
    }
}

/// Copies up to `max` of the first changed places.
fn changed<T: Payload>(table: &mut Sessions<T>, max: usize) -> Vec<(u32, Carried<T>)> {
    let places = table.changed(max);
    places.into_iter().filter_map(|place| Some((place, table.copy(place)?))).collect()
}

fn write_places(out: &mut Vec<u8>, kind: u16, places: &[u32]) {
    begin(out, kind, PLACE_BYTES, places.len());
    places.iter().for_each(|place| out.extend(place.to_le_bytes()));
}

fn write_sessions(out: &mut Vec<u8>, sessions: &[(u32, Carried<()>)]) {
    begin(out, SESSIONS_AT, PLACE_BYTES + SESSION_BYTES, sessions.len());
    for (place, session) in sessions {
        out.extend(place.to_le_bytes());
        write_session(out, session);
    }
}

fn write_connections(out: &mut Vec<u8>, connections: &[(u32, Carried<crate::service::Connection>)]) {
    begin(out, CONNECTIONS_AT, PLACE_BYTES + CONNECTION_BYTES + UPPER_BYTES, connections.len());
    for (place, connection) in connections {
        out.extend(place.to_le_bytes());
        write_session(out, connection);
        write_connection(out, &connection.payload, |mapping| mapping);
    }
}
