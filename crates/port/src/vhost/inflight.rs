//! The record of buffers in flight, in memory that the front-end keeps while the daemon restarts (vhost-user, "Inflight
//! I/O tracking", split virtqueues). It contains the buffers that the guest handed over and did not get back.

use std::sync::atomic::{Ordering, fence};

use super::index::{Index, Size};
use super::memory::Area;
use super::mutation::mutated;

/// Length of the header before the descriptors' records, bytes: features u64; version, number, last batch's head, used
/// index u16 each.
const HEADER: usize = 16;
/// Length of a record, bytes: in flight u8, padding, next in batch u16, counter u64.
const RECORD: usize = 16;
const VERSION: u16 = 1;
const AT_VERSION: usize = 8;
const AT_NUMBER: usize = 10;
const AT_BATCH: usize = 12;
const AT_USED: usize = 14;

/// The record of one ring.
#[derive(Debug)]
pub(crate) struct Inflight {
    area: Area,
    size: Size,
    /// Sequence number of the next buffer, in the order of taking.
    counter: u64,
    /// Used buffers of the current batch.
    batch: Vec<Index>,
}

/// Length of a ring's record, bytes.
pub(crate) fn bytes(size: u16) -> usize {
    (HEADER + RECORD * usize::from(size)).next_multiple_of(64)
}

/// The buffers of a record by sequence number, and the next number. Each number is read once, before any decision: the
/// front-end can change it meanwhile.
pub(super) fn in_order(buffers: impl Iterator<Item = Index>, number: impl Fn(Index) -> u64) -> (Vec<Index>, u64) {
    let mut numbered: Vec<(u64, Index)> = buffers.map(|buffer| (number(buffer), buffer)).collect();
    if mutated!(RecordSortedInPlace) {
        numbered.sort_by_key(|(_, buffer)| number(*buffer));
    } else {
        numbered.sort_by_key(|(number, _)| *number);
    }
    let next = numbered.last().map_or(0, |(last, _)| last.wrapping_add(1));
    (numbered.into_iter().map(|(_, buffer)| buffer).collect(), next)
}

impl Inflight {
    /// `area` has the [`bytes`] of a ring of `size`.
    pub(crate) fn new(area: Area, size: Size) -> Self {
        Inflight { area, size, counter: 0, batch: Vec::new() }
    }

    /// Buffers in flight of a previous life, in the order of taking; the driver got back all before `used`.
    pub(crate) fn recover(&mut self, used: u16) -> Vec<Index> {
        if self.get(AT_VERSION) != VERSION || self.get(AT_NUMBER) != self.size.get() {
            return self.renew(used);
        }
        // The previous life may have ended after it showed a batch and before it recorded that.
        let shown = used.wrapping_sub(self.get(AT_USED));
        if shown > self.size.get() {
            // The ring was restarted since.
            return self.renew(used);
        }
        let mut head = self.get(AT_BATCH);
        for _ in 0..shown {
            let Some(buffer) = self.size.check(head) else { break };
            self.mark(buffer, false);
            head = self.area.load(at(buffer) + 6, Ordering::Relaxed);
        }
        self.set(AT_USED, used);
        let is_flying = |head: &Index| self.area.load::<u8>(at(*head), Ordering::Relaxed) == 1;
        let number = |head: Index| self.area.load(at(head) + 8, Ordering::Relaxed);
        let (heads, counter) = in_order(self.size.indexes().filter(is_flying), number);
        self.counter = counter;
        heads
    }

    /// Clears all marks.
    fn renew(&mut self, used: u16) -> Vec<Index> {
        self.size.indexes().for_each(|head| self.mark(head, false));
        self.set(AT_NUMBER, self.size.get());
        self.set(AT_USED, used);
        self.set(AT_VERSION, VERSION);
        Vec::new()
    }

    /// Records that a buffer was taken.
    pub(crate) fn take(&mut self, head: Index) {
        self.area.store(at(head) + 8, self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.mark(head, true);
    }

    /// Undoes taking a buffer.
    pub(crate) fn untake(&mut self, head: Index) {
        self.mark(head, false);
    }

    /// Records a used buffer, to be shown with the next batch.
    pub(crate) fn put(&mut self, head: Index) {
        self.batch.push(head);
    }

    /// Records that the batch is about to be shown.
    pub(crate) fn before_show(&mut self) {
        for &head in &self.batch {
            self.area.store(at(head) + 6, self.get(AT_BATCH), Ordering::Relaxed);
            self.set(AT_BATCH, head.get());
        }
        // A kill happens between instructions: only the program order on this CPU matters.
        fence(Ordering::SeqCst);
    }

    /// Records that the batch was shown; the used index is `used` now.
    pub(crate) fn after_show(&mut self, used: u16) {
        fence(Ordering::SeqCst);
        for &head in &self.batch {
            self.mark(head, false);
        }
        self.batch.clear();
        fence(Ordering::SeqCst);
        self.set(AT_USED, used);
    }

    fn mark(&self, head: Index, flying: bool) {
        self.area.store(at(head), u8::from(flying), Ordering::Release);
    }

    fn get(&self, at: usize) -> u16 {
        self.area.load(at, Ordering::Relaxed)
    }

    fn set(&self, at: usize, value: u16) {
        self.area.store(at, value, Ordering::Release);
    }
}

/// Offset of a buffer's record.
fn at(head: Index) -> usize {
    HEADER + head.at(RECORD)
}
