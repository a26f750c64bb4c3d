//! The record of what is in flight in a packed ring (vhost-user, "Inflight I/O tracking", packed virtqueues). Used
//! descriptors overwrite the ring's, and neither index is in memory that outlives a daemon: all of that is in the record.

use std::sync::atomic::Ordering;

use super::chain::{DESCRIPTOR, Descriptor};
use super::memory::Area;
use super::packed::Position;

/// Bytes in front of the descriptors' records: features u64; version, number, free head and the one before u16 each; used
/// index and the one before u16 each, their wrap counters u8 each; padding.
const HEADER: usize = 32;
const AT_LIST: usize = 8;
const AT_USED: usize = 16;
const VERSION: u16 = 1;
/// Bytes of a record: in flight u8, padding, next u16, last u16, number u16, counter u64, id u16, flags u16, length u32,
/// address u64. A buffer has one for each descriptor, a list; in flight, last, number and counter are the first one's.
const RECORD: usize = 32;
const AT_COUNTER: usize = 8;
const AT_DESCRIPTOR: usize = 16;
const AT_ADDRESS: usize = 24;
/// Ends the list of free records.
const NONE: u16 = u16::MAX;

/// The record of one ring.
#[derive(Debug)]
pub(crate) struct PackedInflight {
    area: Area,
    size: u16,
    /// Numbers buffers in the order in which they were taken.
    counter: u64,
    used: Position,
    /// By record: the next one of its list; as in the record itself, which the front-end could change.
    next: Vec<u16>,
    /// The list of free records.
    free: u16,
    /// By id: the first and last record of a buffer in flight.
    lists: Vec<(u16, u16)>,
    /// Used buffers of this batch.
    batch: Vec<u16>,
}

/// What an earlier life has left.
pub(super) struct Found {
    /// Where its next used descriptor goes.
    pub(super) used: Position,
    /// Buffers in flight, by id, in the order in which they were taken; none of them without descriptors.
    pub(super) buffers: Vec<(u16, Vec<Descriptor>)>,
}

/// A buffer in flight, as a record has it.
struct Flying {
    id: u16,
    /// Its records.
    list: Vec<u16>,
    /// Its descriptors.
    chain: Vec<Descriptor>,
}

/// Bytes of the record of a ring.
pub(crate) fn bytes(size: u16) -> usize {
    (HEADER + RECORD * usize::from(size)).next_multiple_of(64)
}

impl PackedInflight {
    /// `area` has the [`bytes`] of a ring of `size`.
    pub(crate) fn new(area: Area, size: u16) -> Self {
        PackedInflight {
            area,
            size,
            counter: 0,
            used: Position::START,
            next: Vec::new(),
            free: NONE,
            lists: vec![(0, 0); usize::from(size)],
            batch: Vec::new(),
        }
    }

    /// What an earlier life has left, if the record is one of this ring; otherwise it is a new one that begins at `base`.
    pub(super) fn recover(&mut self, ring: &Area, base: Position) -> Option<Found> {
        let found = self.read(ring);
        let mut is_free = vec![true; usize::from(self.size)];
        let lists: Vec<(u16, Vec<u16>)> = match &found {
            Some((_, buffers)) => buffers.iter().map(|b| (b.id, b.list.clone())).collect(),
            None => Vec::new(),
        };
        self.next = vec![0; usize::from(self.size)];
        for (id, list) in &lists {
            for pair in list.windows(2) {
                self.next[usize::from(pair[0])] = pair[1];
            }
            for record in list {
                is_free[usize::from(*record)] = false;
            }
            self.lists[usize::from(*id)] = (list[0], list[list.len() - 1]);
        }
        self.used = found.as_ref().map_or(base, |found| found.0);
        self.write_used(self.used);
        self.free = NONE;
        for record in (0..self.size).rev().filter(|r| is_free[usize::from(*r)]) {
            self.mark(record, false);
            self.next[usize::from(record)] = self.free;
            self.area.store(at(record) + 2, self.free, Ordering::Release);
            self.free = record;
        }
        self.write_free(self.free);
        let (used, buffers) = found?;
        Some(Found { used, buffers: buffers.into_iter().map(|b| (b.id, b.chain)).collect() })
    }

    /// Where used descriptors go on, and of each buffer in flight its id, records and descriptors. `None`: nothing that
    /// this daemon could have written.
    fn read(&mut self, ring: &Area) -> Option<(Position, Vec<Flying>)> {
        let [version, number, free, old_free] = self.halves(AT_LIST);
        let [used, old_used, wraps, _] = self.halves(AT_USED);
        if version != VERSION || number != self.size || used >= self.size || old_used >= self.size {
            return None;
        }
        let new = Position { slot: used, wrap: wraps & 0xff != 0 };
        let old = Position { slot: old_used, wrap: wraps >> 8 != 0 };
        // What lies behind was a driver's once, unless the ring has started anew.
        let behind = if old.slot == 0 { self.size - 1 } else { old.slot - 1 };
        if old != Position::START && descriptor(ring, behind) == (0, 0) {
            return None;
        }
        let mut used = old;
        // The batch's first descriptor was its last to be written. Only the used flag tells: the buffer may be back already.
        let flags = (descriptor(ring, old.slot).1 >> 48) as u16;
        if new != old && (flags >> 15 != 0) == old.wrap {
            used = new;
            let mut head = free;
            for _ in 0..self.size {
                if head == old_free {
                    break;
                }
                let [_, _, last, _] = self.halves_of(head)?;
                self.mark(head, false);
                head = self.halves_of(last)?[1];
            }
        }
        let mut buffers = self.buffers()?;
        // A front-end may have given buffers back on its own; the driver sees what is next in the ring.
        for _ in 0..self.size {
            let rest = descriptor(ring, used.slot).1;
            let (id, flags) = ((rest >> 32) as u16, (rest >> 48) as u16);
            if !used.is_used(flags) {
                break;
            }
            let count = match buffers.iter().position(|b| b.id == id) {
                Some(i) => buffers.remove(i).list.len() as u16,
                // Nobody here had taken it. Its descriptor is gone: with an indirect table, as Linux has it, it was one.
                None if buffers.is_empty() => 1,
                None => break,
            };
            used = used.after(count, self.size);
        }
        Some((used, buffers))
    }

    /// Buffers that are marked as being in flight, in the order in which they were taken.
    fn buffers(&mut self) -> Option<Vec<Flying>> {
        let number = |head: &u16| self.area.load::<u64>(at(*head) + AT_COUNTER, Ordering::Relaxed);
        let flying = |head: &u16| self.area.load::<u8>(at(*head), Ordering::Relaxed) == 1;
        let mut heads: Vec<u16> = (0..self.size).filter(flying).collect();
        heads.sort_by_key(number);
        let counter = heads.last().map_or(0, |last| number(last).wrapping_add(1));
        let mut is_taken = vec![false; usize::from(self.size)];
        let (mut ids, mut buffers) = (is_taken.clone(), Vec::new());
        for head in heads {
            let count = self.halves_of(head)?[3];
            let [id, ..] = self.halves(at(head) + AT_DESCRIPTOR);
            let (mut list, mut chain, mut record) = (Vec::new(), Vec::new(), head);
            for _ in 0..count {
                let [_, next, ..] = self.halves_of(record)?;
                if std::mem::replace(&mut is_taken[usize::from(record)], true) {
                    return None;
                }
                list.push(record);
                let [_, flags, len, high] = self.halves(at(record) + AT_DESCRIPTOR);
                let guest = self.area.load(at(record) + AT_ADDRESS, Ordering::Relaxed);
                chain.push(Descriptor { guest, len: u32::from(len) | u32::from(high) << 16, flags });
                record = next;
            }
            if list.is_empty() || std::mem::replace(ids.get_mut(usize::from(id))?, true) {
                return None;
            }
            buffers.push(Flying { id, list, chain });
        }
        self.counter = counter;
        Some(buffers)
    }

    /// A buffer is taken.
    pub(super) fn take(&mut self, id: u16, first: Descriptor, rest: &[Descriptor]) {
        let head = self.free;
        let mut last = head;
        for descriptor in std::iter::once(&first).chain(rest) {
            last = self.free;
            let bits = u64::from(id) | u64::from(descriptor.flags) << 16 | u64::from(descriptor.len) << 32;
            self.area.store(at(last) + AT_DESCRIPTOR, bits, Ordering::Release);
            self.area.store(at(last) + AT_ADDRESS, descriptor.guest, Ordering::Release);
            self.free = self.next[usize::from(last)];
        }
        let count = rest.len() as u64 + 1;
        self.area.store(at(head) + AT_COUNTER, self.counter, Ordering::Release);
        self.counter += 1;
        self.lists[usize::from(id)] = (head, last);
        self.write_free(self.free);
        let next = u64::from(self.next[usize::from(head)]);
        self.area.store(at(head), 1 | next << 16 | u64::from(last) << 32 | count << 48, Ordering::Release);
    }

    /// A buffer was not taken after all.
    pub(super) fn untake(&mut self, id: u16) {
        let (head, last) = self.lists[usize::from(id)];
        self.mark(head, false);
        self.link(last, self.free);
        self.free = head;
        self.write_free(head);
    }

    /// A buffer is used, and shown with the next batch.
    pub(super) fn put(&mut self, id: u16) {
        self.batch.push(id);
    }

    /// The batch is about to be shown; the used index will be `used`.
    pub(super) fn before_show(&mut self, used: Position) {
        let old = self.free;
        for i in 0..self.batch.len() {
            let (head, last) = self.lists[usize::from(self.batch[i])];
            self.link(last, self.free);
            self.free = head;
        }
        self.write_list(self.free, old);
        self.write_both_used(used, self.used);
        self.used = used;
    }

    /// The batch was shown. All stores here are releases: a kill comes between instructions, and what counts is their order.
    pub(super) fn after_show(&mut self) {
        while let Some(id) = self.batch.pop() {
            self.mark(self.lists[usize::from(id)].0, false);
        }
        self.write_free(self.free);
        self.write_used(self.used);
    }

    fn link(&mut self, record: u16, next: u16) {
        self.next[usize::from(record)] = next;
        self.area.store(at(record) + 2, next, Ordering::Release);
    }

    fn mark(&self, head: u16, flying: bool) {
        self.area.store(at(head), u8::from(flying), Ordering::Release);
    }

    fn write_free(&self, free: u16) {
        self.write_list(free, free);
    }

    fn write_list(&self, free: u16, old: u16) {
        let bits = u64::from(VERSION) | u64::from(self.size) << 16 | u64::from(free) << 32 | u64::from(old) << 48;
        self.area.store(AT_LIST, bits, Ordering::Release);
    }

    fn write_used(&self, used: Position) {
        self.write_both_used(used, used);
    }

    /// In one store: index and wrap counter are of no use without each other.
    fn write_both_used(&self, new: Position, old: Position) {
        let wraps = u64::from(new.wrap) | u64::from(old.wrap) << 8;
        self.area.store(AT_USED, u64::from(new.slot) | u64::from(old.slot) << 16 | wraps << 32, Ordering::Release);
    }

    fn halves(&self, at: usize) -> [u16; 4] {
        let bits: u64 = self.area.load(at, Ordering::Acquire);
        [0, 16, 32, 48].map(|shift| (bits >> shift) as u16)
    }

    /// In flight, next, last, number; `None`: there is no such record.
    fn halves_of(&self, record: u16) -> Option<[u16; 4]> {
        (record < self.size).then(|| self.halves(at(record)))
    }
}

/// Where a descriptor's record is.
fn at(record: u16) -> usize {
    HEADER + RECORD * usize::from(record)
}

/// The two halves of a descriptor of the ring.
fn descriptor(ring: &Area, slot: u16) -> (u64, u64) {
    let at = DESCRIPTOR * usize::from(slot);
    let load = |at| u64::from_le(ring.load(at, Ordering::Relaxed));
    (load(at), load(at + 8))
}
