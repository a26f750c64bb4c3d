//! The record of buffers in flight of a packed ring (vhost-user, "Inflight I/O tracking", packed virtqueues). Used
//! descriptors overwrite those in the ring, and neither index is in memory that outlives a daemon, so the record
//! contains all of these.

use std::sync::atomic::Ordering;

use super::chain::{DESCRIPTOR, Descriptor};
use super::index::{Index, Size, Table};
use super::inflight::in_order;
use super::memory::Area;
use super::position::Position;

/// Length of the header before the descriptors' records, bytes: features u64; version, number, free head and the
/// previous one u16 each; used index and the previous one u16 each, their wrap counters u8 each; padding.
const HEADER: usize = 32;
const AT_LIST: usize = 8;
const AT_USED: usize = 16;
const VERSION: u16 = 1;
/// Length of a record, bytes: in flight u8, padding, next u16, last u16, number u16, counter u64, id u16, flags u16,
/// length u32, address u64. A buffer has a list with one record per descriptor; in flight, last, number and counter are
/// in the first one.
const RECORD: usize = 32;
const AT_COUNTER: usize = 8;
const AT_DESCRIPTOR: usize = 16;
const AT_ADDRESS: usize = 24;
/// End of the list of free records.
const NONE: u16 = u16::MAX;

/// The record of one ring.
#[derive(Debug)]
pub(crate) struct PackedInflight {
    area: Area,
    size: Size,
    /// Sequence number of the next buffer, in the order of taking.
    counter: u64,
    used: Position,
    /// By record: the next one of its list. A copy of the record's field, which the front-end could change.
    next: Table<Option<Index>>,
    /// Head of the list of free records.
    free: Option<Index>,
    /// By id: the first and last record of a buffer in flight.
    lists: Table<(Index, Index)>,
    /// First and last records of the used buffers of this batch. Lookup by id would be unsafe: a driver may offer an id
    /// again before it was shown that the buffer is used.
    batch: Vec<(Index, Index)>,
}

/// State of a previous life.
pub(super) struct Found {
    /// Position of its next used descriptor.
    pub(super) used: Position,
    /// Buffers in flight by id, in the order of taking; each has at least one descriptor.
    pub(super) buffers: Vec<(Index, Vec<Descriptor>)>,
}

/// A buffer in flight, according to its record.
struct Flying {
    id: Index,
    /// Its records, at least one.
    list: Vec<Index>,
    /// Its descriptors.
    chain: Vec<Descriptor>,
}

/// Length of a ring's record, bytes.
pub(crate) fn bytes(size: u16) -> usize {
    (HEADER + RECORD * usize::from(size)).next_multiple_of(64)
}

impl PackedInflight {
    /// `area` has the [`bytes`] of a ring of `size`.
    pub(crate) fn new(area: Area, size: Size) -> Self {
        PackedInflight {
            area,
            size,
            counter: 0,
            used: Position::START,
            next: size.table(None),
            free: None,
            lists: size.table((Index::ZERO, Index::ZERO)),
            batch: Vec::new(),
        }
    }

    /// Recovers the state of a previous life if the record belongs to this ring; otherwise starts a new record at
    /// `base`.
    pub(super) fn recover(&mut self, ring: &Area, base: Position) -> Option<Found> {
        let found = self.read(ring);
        let mut is_free = self.size.table(true);
        for buffer in found.iter().flat_map(|(_, buffers)| buffers) {
            for pair in buffer.list.windows(2) {
                self.next[pair[0]] = Some(pair[1]);
            }
            buffer.list.iter().for_each(|record| is_free[*record] = false);
            if let [first, ..] = buffer.list[..]
                && let [.., last] = buffer.list[..]
            {
                self.lists[buffer.id] = (first, last);
            }
        }
        self.used = found.as_ref().map_or(base, |found| found.0);
        self.write_used(self.used);
        self.free = None;
        for record in self.size.indexes().rev().filter(|record| is_free[*record]) {
            self.mark(record, false);
            self.link(record, self.free);
            self.free = Some(record);
        }
        self.write_free(self.free);
        let (used, buffers) = found?;
        Some(Found { used, buffers: buffers.into_iter().map(|b| (b.id, b.chain)).collect() })
    }

    /// The position of the next used descriptor, and the id, records and descriptors of each buffer in flight. `None`
    /// if this daemon cannot have written it.
    fn read(&mut self, ring: &Area) -> Option<(Position, Vec<Flying>)> {
        let [version, number, free, old_free] = self.halves(AT_LIST);
        let [used, old_used, wraps, _] = self.halves(AT_USED);
        if version != VERSION || number != self.size.get() {
            return None;
        }
        let new = Position { slot: self.size.check(used)?, wrap: wraps & 0xff != 0 };
        let old = Position { slot: self.size.check(old_used)?, wrap: wraps >> 8 != 0 };
        // The slot before was written by a driver once, unless the ring was restarted.
        let (behind, _) = self.size.back(old.slot, 1);
        if old != Position::START && descriptor(ring, behind) == (0, 0) {
            return None;
        }
        let mut used = old;
        // The batch's first descriptor was written last. Only the used flag is reliable: the driver may already have
        // offered the slot again.
        let flags = (descriptor(ring, old.slot).1 >> 48) as u16;
        if new != old && (flags >> 15 != 0) == old.wrap {
            used = new;
            let mut head = free;
            for _ in 0..self.size.get() {
                if head == old_free {
                    break;
                }
                let record = self.size.check(head)?;
                let [_, _, last, _] = self.halves(at(record));
                self.mark(record, false);
                head = self.halves(at(self.size.check(last)?))[1];
            }
        }
        let mut buffers: Vec<Option<Flying>> = self.buffers()?.into_iter().map(Some).collect();
        let mut of_id = self.size.table(None);
        for (place, buffer) in buffers.iter().flatten().enumerate() {
            of_id[buffer.id] = Some(place);
        }
        // A front-end may have returned buffers on its own; the driver reads the ring in order.
        let mut left = buffers.len();
        for _ in 0..self.size.get() {
            let rest = descriptor(ring, used.slot).1;
            let (id, flags) = ((rest >> 32) as u16, (rest >> 48) as u16);
            if !used.is_used(flags) {
                break;
            }
            let place = self.size.check(id).and_then(|id| of_id[id].take());
            let count = match place.and_then(|place: usize| buffers[place].take()) {
                Some(buffer) => {
                    left -= 1;
                    buffer.list.len() as u16
                }
                // We had not taken it, and its descriptor is overwritten. With an indirect table, as Linux uses, it had
                // one.
                None if left == 0 => 1,
                None => break,
            };
            used = used.after(count, self.size);
        }
        Some((used, buffers.into_iter().flatten().collect()))
    }

    /// Buffers marked as in flight, in the order of taking.
    fn buffers(&mut self) -> Option<Vec<Flying>> {
        let is_flying = |record: &Index| self.area.load::<u8>(at(*record), Ordering::Relaxed) == 1;
        let number = |record: Index| self.area.load(at(record) + AT_COUNTER, Ordering::Relaxed);
        let (heads, counter) = in_order(self.size.indexes().filter(is_flying), number);
        let (mut is_taken, mut ids, mut buffers) = (self.size.table(false), self.size.table(false), Vec::new());
        for head in heads {
            let count = self.halves(at(head))[3];
            let id = self.size.check(self.halves(at(head) + AT_DESCRIPTOR)[0])?;
            let (mut list, mut chain, mut next) = (Vec::new(), Vec::new(), head.get());
            for _ in 0..count {
                let record = self.size.check(next)?;
                if std::mem::replace(&mut is_taken[record], true) {
                    return None;
                }
                list.push(record);
                let [_, flags, len, high] = self.halves(at(record) + AT_DESCRIPTOR);
                let guest = self.area.load(at(record) + AT_ADDRESS, Ordering::Relaxed);
                chain.push(Descriptor { guest, len: u32::from(len) | u32::from(high) << 16, flags });
                next = self.halves(at(record))[1];
            }
            if list.is_empty() || std::mem::replace(&mut ids[id], true) {
                return None;
            }
            buffers.push(Flying { id, list, chain });
        }
        self.counter = counter;
        Some(buffers)
    }

    /// Records that a buffer of `count` descriptors was taken. `None`: too few free records, nothing was taken.
    #[inline]
    pub(super) fn take(&mut self, id: Index, count: u16, chain: impl Iterator<Item = Descriptor>) -> Option<()> {
        let head = self.free?;
        let (mut last, mut free) = (head, self.free);
        for descriptor in chain {
            last = free?;
            let bits = u64::from(id.get()) | u64::from(descriptor.flags) << 16 | u64::from(descriptor.len) << 32;
            self.area.store(at(last) + AT_DESCRIPTOR, bits, Ordering::Release);
            self.area.store(at(last) + AT_ADDRESS, descriptor.guest, Ordering::Release);
            free = self.next[last];
        }
        self.free = free;
        self.area.store(at(head) + AT_COUNTER, self.counter, Ordering::Release);
        self.counter = self.counter.wrapping_add(1);
        self.lists[id] = (head, last);
        self.write_free(self.free);
        let (next, last) = (u64::from(bits(self.next[head])), u64::from(last.get()));
        self.area.store(at(head), 1 | next << 16 | last << 32 | u64::from(count) << 48, Ordering::Release);
        Some(())
    }

    /// Undoes taking a buffer.
    pub(super) fn untake(&mut self, id: Index) {
        let (head, last) = self.lists[id];
        self.mark(head, false);
        self.link(last, self.free);
        self.free = Some(head);
        self.write_free(self.free);
    }

    /// Records a used buffer, to be shown with the next batch.
    pub(super) fn put(&mut self, id: Index) {
        self.batch.push(self.lists[id]);
    }

    /// Records that the batch is about to be shown; the used index will be `used`.
    pub(super) fn before_show(&mut self, used: Position) {
        let old = self.free;
        for i in 0..self.batch.len() {
            let (head, last) = self.batch[i];
            self.link(last, self.free);
            self.free = Some(head);
        }
        self.write_list(self.free, old);
        self.write_both_used(used, self.used);
        self.used = used;
    }

    /// Records that the batch was shown. All stores are releases: a kill happens between instructions, so their order
    /// matters.
    pub(super) fn after_show(&mut self) {
        while let Some((head, _)) = self.batch.pop() {
            self.mark(head, false);
        }
        self.write_free(self.free);
        self.write_used(self.used);
    }

    fn link(&mut self, record: Index, next: Option<Index>) {
        self.next[record] = next;
        self.area.store(at(record) + 2, bits(next), Ordering::Release);
    }

    fn mark(&self, head: Index, flying: bool) {
        self.area.store(at(head), u8::from(flying), Ordering::Release);
    }

    fn write_free(&self, free: Option<Index>) {
        self.write_list(free, free);
    }

    fn write_list(&self, free: Option<Index>, old: Option<Index>) {
        let [free, old] = [free, old].map(|record| u64::from(bits(record)));
        let list = u64::from(VERSION) | u64::from(self.size.get()) << 16 | free << 32 | old << 48;
        self.area.store(AT_LIST, list, Ordering::Release);
    }

    fn write_used(&self, used: Position) {
        self.write_both_used(used, used);
    }

    /// In one store: index and wrap counter are only valid together.
    fn write_both_used(&self, new: Position, old: Position) {
        let wraps = u64::from(new.wrap) | u64::from(old.wrap) << 8;
        let [new, old] = [new, old].map(|position| u64::from(position.slot.get()));
        self.area.store(AT_USED, new | old << 16 | wraps << 32, Ordering::Release);
    }

    /// Fields in a record's first eight bytes: in flight, next, last, number.
    fn halves(&self, at: usize) -> [u16; 4] {
        let bits: u64 = self.area.load(at, Ordering::Acquire);
        [0, 16, 32, 48].map(|shift| (bits >> shift) as u16)
    }
}

/// A list link in a record's format.
fn bits(next: Option<Index>) -> u16 {
    next.map_or(NONE, Index::get)
}

/// Offset of a descriptor's record.
fn at(record: Index) -> usize {
    HEADER + record.at(RECORD)
}

/// The two halves of a descriptor in the ring.
fn descriptor(ring: &Area, slot: Index) -> (u64, u64) {
    let at = slot.at(DESCRIPTOR);
    let load = |at| u64::from_le(ring.load(at, Ordering::Relaxed));
    (load(at), load(at + 8))
}
