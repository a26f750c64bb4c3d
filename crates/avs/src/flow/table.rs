//! Flow records in four-way sets, in an array of fixed size.

use std::fmt;
use std::hash::BuildHasher as _;

use bifrost_tables::prefetch;
use foldhash::fast::FixedState;

use super::key::Key;
use crate::ids::Direction;
use crate::limits::FlowLimits;
use crate::memory::Extent;
use crate::session::Handle;
use crate::verdict::Verdict;

/// Records per set.
const WAYS: usize = FlowLimits::SET as usize;
/// In a full set, one in 2^3 packets replaces another flow's record. If every packet did, more flows than there is
/// room for would write a record for each packet and never find one. This way existing records are found, and a flood
/// of new flows evicts few of them.
const ADMITTED_BITS: u32 = 3;
/// No record, or no session.
pub(crate) const NONE: u32 = u32::MAX;

/// The records of one direction. `T`: the verdict.
pub(crate) struct Flows<T = Verdict> {
    sets: Box<[Set]>,
    /// Grows on demand, so that only the memory of actual flows is touched.
    records: Vec<Record<T>>,
    /// Always odd.
    secret: u64,
    /// State of the generator that decides which packets get a slot in a full set.
    dice: u64,
}

/// The result of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inserted {
    /// The record was stored.
    Kept,
    /// Other flows occupy the set.
    Crowded,
    /// The table has no capacity.
    NoRoom,
}

/// A slot of a set: the flow hash is here, so that a miss does not touch other flows' records.
#[derive(Clone, Copy)]
struct Entry {
    flow_hash: u32,
    record: u32,
}

/// Aligned, so that no set spans two cache lines.
#[derive(Clone, Copy)]
#[repr(align(32))]
struct Set([Entry; WAYS]);

/// Identifies a record until the next insertion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordId(u32);

/// The decision about the packets of a flow. The order of the fields matters: what every packet reads is in the first
/// two cache lines.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Record<T = Verdict> {
    key: Key,
    /// The epoch of the configuration.
    epoch: u32,
    /// Largest IP packet for which the record holds, bytes.
    pub(crate) mtu: u16,
    pub(crate) touched: Touched,
    pub(crate) verdict: T,
}

/// The sessions that a packet belongs to: the sender's, the receiver's, and its connection through a load balancer or
/// NAT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Touched {
    // Not three handles: those would have padding.
    numbers: [u64; 3],
    indexes: [u32; 3],
    /// As seen from the client of the connection.
    direction: Direction,
}

const CONNECTION: usize = 2;

impl Touched {
    /// No session.
    pub(crate) const NONE: Touched = Touched { numbers: [0; 3], indexes: [NONE; 3], direction: Direction::Egress };

    /// Adds the session of the packet's sender (`end` 0) or receiver (1).
    pub(crate) fn add(&mut self, end: usize, session: Handle) {
        (self.numbers[end], self.indexes[end]) = (session.number, session.index);
    }

    /// Adds the packet's connection, and the packet's direction in it.
    pub(crate) fn add_connection(&mut self, connection: Handle, direction: Direction) {
        self.add(CONNECTION, connection);
        self.direction = direction;
    }

    /// Whether there is a connection.
    #[inline(always)]
    pub(crate) fn has_connection(&self) -> bool {
        self.indexes[CONNECTION] != NONE
    }

    /// The connection, and the packet's direction in it. Valid only if there [is](Self::has_connection) one.
    #[inline(always)]
    pub(crate) fn connection(&self) -> (Handle, Direction) {
        (Handle { index: self.indexes[CONNECTION], number: self.numbers[CONNECTION] }, self.direction)
    }

    /// The session of the sender (`end` 0) or receiver (1).
    #[inline(always)]
    pub(crate) fn of(&self, end: usize) -> Option<Handle> {
        let handle = Handle { index: self.indexes[end], number: self.numbers[end] };
        (handle.index != NONE).then_some(handle)
    }
}

impl<T: Copy> Flows<T> {
    /// An empty table with room for at most `records` records. `secret`: any random number.
    pub(crate) fn new(records: u32, secret: u64) -> Self {
        let sets = records as usize / WAYS;
        let empty = Entry { flow_hash: 0, record: NONE };
        Flows {
            sets: vec![Set([empty; WAYS]); sets].into_boxed_slice(),
            records: Vec::with_capacity(sets * WAYS),
            // A multiplier with bits in all positions, whatever the number is.
            secret: FixedState::with_seed(secret).hash_one(secret) | 1,
            dice: 0,
        }
    }

    /// Maximum number of records.
    pub(crate) fn capacity(&self) -> u32 {
        (self.sets.len() * WAYS) as u32
    }

    /// The record of a flow, if it is from this configuration.
    #[inline(always)]
    pub(crate) fn find(&self, key: &Key, flow_hash: u32, epoch: u32) -> Option<RecordId> {
        let Set(set) = self.sets.get(self.set(key, flow_hash))?;
        let known = set.iter().filter(|entry| entry.flow_hash == flow_hash);
        let mut records = known.filter_map(|entry| Some((entry.record, self.records.get(entry.record as usize)?)));
        records.find(|(_, record)| record.key.is(key) && record.epoch == epoch).map(|(id, _)| RecordId(id))
    }

    /// A record that was [found](Self::find).
    #[inline(always)]
    pub(crate) fn record(&self, RecordId(at): RecordId) -> &Record<T> {
        &self.records[at as usize]
    }

    /// Number of records in use.
    pub(crate) fn made(&self) -> usize {
        self.records.len()
    }

    /// Memory of the sets and records.
    pub(crate) fn memory(&self) -> [Extent; 2] {
        [Extent::scattered(&self.sets), Extent::filled(&self.records)]
    }

    /// Prefetches a flow's set.
    #[inline(always)]
    pub(crate) fn fetch_set(&self, key: &Key, flow_hash: u32) {
        if let Some(set) = self.sets.get(self.set(key, flow_hash)) {
            prefetch(set);
        }
    }

    /// The record that may belong to a flow, according to the flow hash in its set.
    #[inline(always)]
    pub(crate) fn candidate(&self, key: &Key, flow_hash: u32) -> u32 {
        let set = self.sets.get(self.set(key, flow_hash));
        let entry = set.and_then(|Set(set)| set.iter().find(|entry| entry.flow_hash == flow_hash));
        entry.map_or(NONE, |entry| entry.record)
    }

    /// The sessions that a candidate's packets belong to.
    #[inline(always)]
    pub(crate) fn sessions(&self, candidate: u32) -> [u32; 2] {
        let Some(record) = self.records.get(candidate as usize) else { return [NONE; 2] };
        let [sender, receiver, _] = record.touched.indexes;
        [sender, receiver]
    }

    /// Stores a record: in the slot of the flow's old record, or in a free slot. If the set is full of other flows,
    /// they usually stay.
    #[inline(never)]
    pub(crate) fn insert(
        &mut self,
        key: &Key,
        flow_hash: u32,
        epoch: u32,
        mtu: u16,
        touched: &Touched,
        verdict: T,
    ) -> Inserted {
        let place = self.set(key, flow_hash);
        let Some(Set(set)) = self.sets.get_mut(place) else { return Inserted::NoRoom };
        let record = Record { key: *key, epoch, mtu, touched: *touched, verdict };
        let records = &self.records;
        let own = |entry: &Entry| {
            entry.flow_hash == flow_hash && records.get(entry.record as usize).is_some_and(|r| r.key == *key)
        };
        let slot = set.iter().position(own).or_else(|| set.iter().position(|entry| entry.record == NONE));
        let slot = slot.or_else(|| {
            self.dice = self.dice.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(self.secret);
            (self.dice >> (64 - ADMITTED_BITS) == 0).then_some((self.dice >> 32) as usize % WAYS)
        });
        let Some(slot) = slot else { return Inserted::Crowded };
        let entry = &mut set[slot];
        entry.flow_hash = flow_hash;
        if entry.record == NONE {
            entry.record = self.records.len() as u32;
            // There is room: each slot allocates one record, once.
            self.records.push(record);
        } else if let Some(old) = self.records.get_mut(entry.record as usize) {
            *old = record;
        }
        Inserted::Kept
    }

    /// Invalidates the record of a flow, if there is one: the flow's addresses and ports now belong to another
    /// conversation.
    pub(crate) fn outdate(&mut self, key: &Key, flow_hash: u32) {
        let Some(Set(set)) = self.sets.get(self.set(key, flow_hash)) else { return };
        for entry in set.iter().filter(|entry| entry.flow_hash == flow_hash) {
            if let Some(record) = self.records.get_mut(entry.record as usize).filter(|record| record.key == *key) {
                // Assign it to an earlier configuration; its slot will be reused.
                record.epoch = record.epoch.wrapping_sub(1);
            }
        }
    }

    /// The set of a flow.
    #[inline(always)]
    fn set(&self, key: &Key, flow_hash: u32) -> usize {
        let spread = key.place(flow_hash).wrapping_mul(self.secret) >> 32;
        ((spread * self.sets.len() as u64) >> 32) as usize
    }
}

impl Flows {
    /// Prefetches all three cache lines of a [`candidate`](Self::candidate).
    #[inline(always)]
    pub(crate) fn fetch(&self, candidate: u32) {
        if let Some(record) = self.records.get(candidate as usize) {
            prefetch(&record.key);
            prefetch(&record.touched);
            prefetch(&record.verdict.rewrite);
        }
    }
}

impl<T> fmt::Debug for Flows<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flows").field("made", &self.records.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use bifrost_nic::parse;

    use super::super::key::Source;
    use super::*;
    use crate::ids::PortId;

    #[test]
    fn a_record_is_three_cache_lines() {
        assert_eq!(size_of::<Record>(), 192);
        assert_eq!(size_of::<Set>(), 32);
    }

    /// The key of a flow of port 0; `n` distinguishes flows.
    #[allow(clippy::unwrap_used)]
    fn key(n: u16) -> Key {
        let [a, b] = n.to_be_bytes();
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        frame.extend([0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1]);
        frame.extend([a, b, 0, 53, 0, 8, 0, 0]);
        Key::of(Source::Guest(PortId(0)), &parse(&frame, frame.len()).unwrap()).unwrap()
    }

    fn flows(records: u32) -> Flows<u16> {
        Flows::new(records, 1)
    }

    fn found(flows: &Flows<u16>, n: u16, flow_hash: u32, epoch: u32) -> Option<u16> {
        flows.find(&key(n), flow_hash, epoch).map(|id| flows.record(id).verdict)
    }

    #[test]
    fn flows_that_collide_share_a_set_and_nothing_else() {
        let mut f = flows(64);
        for n in 0..4 {
            f.insert(&key(n), 7, 0, 1500, &Touched::NONE, n);
        }
        assert_eq!([0, 1, 2, 3, 4].map(|n| found(&f, n, 7, 0)), [Some(0), Some(1), Some(2), Some(3), None]);
        let mut tries = 0;
        let flows = if cfg!(miri) { 12 } else { 1000 };
        for n in 4..flows {
            while f.insert(&key(n), 7, 0, 1500, &Touched::NONE, n) == Inserted::Crowded {
                assert_eq!(found(&f, n, 7, 0), None);
                tries += 1;
            }
            assert_eq!(found(&f, n, 7, 0), Some(n));
            assert_eq!((0..=n).filter(|&n| found(&f, n, 7, 0).is_some()).count(), WAYS);
        }
        assert_eq!(f.records.len(), WAYS, "new records reuse the slots");
        // Seven rejections for each stored record.
        assert!(cfg!(miri) || (5 * flows..9 * flows).contains(&tries), "{tries}");
    }

    #[test]
    fn an_overloaded_table_keeps_most_of_its_records() {
        let (room, flows) = if cfg!(miri) { (64, 256) } else { (1024, 16_384) };
        let mut f = super::Flows::new(room, 1);
        let mut hits = 0;
        for _ in 0..4 {
            for n in 0..flows {
                let hash = u32::from(n).wrapping_mul(0x9e37_79b1);
                if found(&f, n, hash, 0).is_some() {
                    hits += 1;
                } else {
                    f.insert(&key(n), hash, 0, 1500, &Touched::NONE, n);
                }
            }
        }
        // The flows come round-robin: with LRU replacement there would be no hits at all.
        assert!(hits > room / 2, "{hits}");
    }

    #[test]
    fn a_flow_has_one_record_and_it_ends_with_the_configuration() {
        let mut f = flows(4);
        f.insert(&key(1), 7, 0, 1500, &Touched::NONE, 10);
        f.insert(&key(1), 7, 0, 1500, &Touched::NONE, 11);
        assert_eq!((f.records.len(), found(&f, 1, 7, 0), found(&f, 1, 7, 1)), (1, Some(11), None));
        f.insert(&key(1), 7, 1, 1500, &Touched::NONE, 12);
        assert_eq!((f.records.len(), found(&f, 1, 7, 0), found(&f, 1, 7, 1)), (1, None, Some(12)));
    }

    #[test]
    fn an_outdated_record_is_reused_by_its_flow() {
        let mut f = flows(4);
        f.insert(&key(1), 7, 5, 1500, &Touched::NONE, 10);
        f.insert(&key(2), 7, 5, 1500, &Touched::NONE, 20);
        f.outdate(&key(1), 7);
        f.outdate(&key(3), 7);
        assert_eq!((found(&f, 1, 7, 5), found(&f, 2, 7, 5)), (None, Some(20)));
        f.insert(&key(1), 7, 5, 1500, &Touched::NONE, 11);
        assert_eq!((found(&f, 1, 7, 5), f.records.len()), (Some(11), 2));
    }

    #[test]
    fn a_table_never_exceeds_its_capacity() {
        for (records, room) in [(0, 0), (3, 0), (4, 4), if cfg!(miri) { (13, 12) } else { (1001, 1000) }] {
            let mut f = flows(records);
            assert_eq!(f.capacity(), room);
            let before = f.records.capacity();
            // If no flow mapped to a set, its slots would stay free.
            let flows = if cfg!(miri) { 5 * records as u16 } else { 5000 };
            for n in 0..flows {
                f.insert(&key(n), u32::from(n).wrapping_mul(0x9e37_79b1), 0, 1500, &Touched::NONE, n);
            }
            assert_eq!((f.records.len(), f.records.capacity()), (room as usize, before));
            let kept = (0..flows).filter(|&n| found(&f, n, u32::from(n).wrapping_mul(0x9e37_79b1), 0) == Some(n));
            assert_eq!(kept.count(), room as usize);
        }
    }

    #[test]
    fn many_flows_spread_over_the_sets() {
        let count = if cfg!(miri) { 100 } else { 1024 };
        let mut f = flows(4 * u32::from(count));
        for n in 0..count {
            f.insert(&key(n), u32::from(n).wrapping_mul(0x9e37_79b1), 0, 1500, &Touched::NONE, n);
        }
        // One flow per set of four on average: hardly any set overflows.
        let kept = (0..count).filter(|&n| found(&f, n, u32::from(n).wrapping_mul(0x9e37_79b1), 0).is_some()).count();
        assert!(kept >= usize::from(count) - usize::from(count) / 40, "{kept}");
    }
}
