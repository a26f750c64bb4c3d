//! The send window: 16 bytes for each packet in flight, and per path the order in which packets left.
//!
//! Packets that left on one path arrive in order, so each path keeps its outstanding packets as a list in sending
//! order. The acknowledgement of one makes everything before it in the list a loss (PROTOCOL.md, loss rules).

use bifrost_wire::bifrost::{PathId, Psn, Tick};

use crate::pool::{PAGE, Page, Pages, Pool};

/// Largest number of PSNs between the oldest unacknowledged and the next one.
pub(crate) const SEND_WINDOW: u32 = 4096;

const NONE: u16 = u16::MAX;

/// Metadata of one packet in flight (NSDI'26, 6.1.4: 16 bytes).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Record {
    /// The guest's buffer.
    pub(crate) handle: u32,
    /// When it was last sent.
    pub(crate) sent: Tick,
    links: Links,
    /// Its place among the packets of its path.
    order: u16,
    /// Which segment of the buffer.
    pub(crate) segment: u8,
    flags: u8,
}

/// Neighbours in the list of a path and the flow distance, in 4 bytes: 12 bits for each neighbour as PSN modulo the
/// window, a link to oneself meaning none, and 8 for the distance.
#[derive(Clone, Copy, Debug, Default)]
struct Links(u32);

impl Links {
    fn new(own: u16, prev: u16, next: u16, distance: u8) -> Self {
        let or_own = |link: u16| u32::from(if link == NONE { own } else { link }) & 0xfff;
        Links(or_own(prev) << 20 | or_own(next) << 8 | u32::from(distance))
    }

    fn prev(self, own: u16) -> u16 {
        let link = (self.0 >> 20) as u16;
        if link == own { NONE } else { link }
    }

    fn next(self, own: u16) -> u16 {
        let link = (self.0 >> 8) as u16 & 0xfff;
        if link == own { NONE } else { link }
    }

    fn distance(self) -> u8 {
        self.0 as u8
    }
}

const PATH_MASK: u8 = 0b0000_0111;
const RTO_SHIFT: u8 = 3;
const RTO_MASK: u8 = 0b0011_1000;
const RETRANSMITTED: u8 = 0b0100_0000;
const COPIED: u8 = 0b1000_0000;

impl Record {
    /// Distance to its flow predecessor (PROTOCOL.md, flow distance).
    pub(crate) fn distance(&self) -> u8 {
        self.links.distance()
    }

    /// The path it was last sent on.
    pub(crate) fn path(&self) -> PathId {
        PathId::masked(self.flags & PATH_MASK)
    }

    /// How many RTOs it has seen, 0..=7.
    pub(crate) fn rtos(&self) -> u8 {
        (self.flags & RTO_MASK) >> RTO_SHIFT
    }

    /// Whether it was sent more than once: its acknowledgement says little about its path.
    pub(crate) fn is_retransmitted(&self) -> bool {
        self.flags & RETRANSMITTED != 0
    }

    /// Whether copies are under way on several paths.
    pub(crate) fn is_copied(&self) -> bool {
        self.flags & COPIED != 0
    }
}

/// 64 packets of a send window.
#[derive(Debug)]
pub(crate) struct SendPage {
    /// Acknowledged or given up.
    done: u64,
    records: [Record; PAGE as usize],
}

impl Default for SendPage {
    fn default() -> Self {
        SendPage { done: 0, records: [Record::default(); PAGE as usize] }
    }
}

impl Page for SendPage {
    fn reset(&mut self) {
        self.done = 0;
    }
}

/// Outstanding packets of one path in sending order.
#[derive(Clone, Copy, Debug)]
struct PathList {
    head: u16,
    tail: u16,
    next_order: u16,
    /// One past the highest order acknowledged, and whether there is one that has not been acted upon.
    acked_order: u16,
    progressed: bool,
}

const EMPTY_LIST: PathList = PathList { head: NONE, tail: NONE, next_order: 0, acked_order: 0, progressed: false };

/// One direction's send window.
#[derive(Debug)]
pub(crate) struct SendWindow {
    una: Psn,
    next: Psn,
    outstanding: u16,
    pages: Pages,
    paths: [PathList; PathId::MAX],
}

impl SendWindow {
    pub(crate) fn new(first: Psn) -> Self {
        SendWindow {
            una: first,
            next: first,
            outstanding: 0,
            pages: Pages::default(),
            paths: [EMPTY_LIST; PathId::MAX],
        }
    }

    /// Oldest PSN that is neither acknowledged nor given up.
    pub(crate) fn una(&self) -> Psn {
        self.una
    }

    /// The PSN that the next packet gets.
    pub(crate) fn next(&self) -> Psn {
        self.next
    }

    /// Packets in flight.
    pub(crate) fn outstanding(&self) -> u16 {
        self.outstanding
    }

    /// PSNs between the oldest outstanding and the next.
    pub(crate) fn span(&self) -> u32 {
        self.next.distance_from(self.una) as u32
    }

    /// Adds a packet at the end, sent now on `path`. `None` when the pool is empty or the window full.
    pub(crate) fn push(
        &mut self,
        pool: &mut Pool<SendPage>,
        handle: u32,
        segment: u8,
        path: PathId,
        sent: Tick,
        distance: u8,
    ) -> Option<Psn> {
        if self.span() >= SEND_WINDOW {
            return None;
        }
        let psn = self.next;
        let (id, i) = self.pages.find_or_make(pool, psn.0, self.una.0)?;
        pool.page_mut(id).records[i] =
            Record { handle, sent, links: Links(u32::from(distance)), order: 0, segment, flags: path.index() as u8 };
        self.next = psn.next();
        self.outstanding += 1;
        self.append(pool, psn, path);
        Some(psn)
    }

    /// The record of an outstanding packet, `None` if `psn` is outside or done.
    pub(crate) fn record(&self, pool: &Pool<SendPage>, psn: Psn) -> Option<Record> {
        let (id, i) = self.locate(psn)?;
        let page = pool.page(id);
        (page.done >> i & 1 == 0).then(|| page.records[i])
    }

    /// Marks an outstanding packet as acknowledged (or given up) and returns its record. `progress`: it says that its
    /// path has delivered everything that left before it.
    pub(crate) fn finish(&mut self, pool: &mut Pool<SendPage>, psn: Psn, progress: bool) -> Option<Record> {
        let (id, i) = self.locate(psn)?;
        if pool.page(id).done >> i & 1 == 1 {
            return None;
        }
        let record = pool.page(id).records[i];
        self.unlink(pool, psn, &record);
        pool.page_mut(id).done |= 1 << i;
        self.outstanding -= 1;
        if progress {
            let list = &mut self.paths[record.path().index()];
            let past = record.order.wrapping_add(1);
            if (past.wrapping_sub(list.acked_order) as i16) > 0 {
                list.acked_order = past;
                list.progressed = true;
            }
        }
        Some(record)
    }

    /// Sends an outstanding packet again: it goes to the end of `path`'s list. Returns its record as it was before.
    pub(crate) fn resend(
        &mut self,
        pool: &mut Pool<SendPage>,
        psn: Psn,
        path: PathId,
        sent: Tick,
        why: Resend,
    ) -> Option<Record> {
        let record = self.record(pool, psn)?;
        self.unlink(pool, psn, &record);
        let (id, i) = self.locate(psn)?;
        let slot = &mut pool.page_mut(id).records[i];
        slot.sent = sent;
        let rtos = if why.timeout { (record.rtos() + 1).min(7) } else { record.rtos() };
        slot.flags = path.index() as u8 | rtos << RTO_SHIFT | RETRANSMITTED | if why.copied { COPIED } else { 0 };
        self.append(pool, psn, path);
        Some(record)
    }

    /// The outstanding packet of `path` that left first.
    pub(crate) fn oldest_on(&self, pool: &Pool<SendPage>, path: PathId) -> Option<(Psn, Record)> {
        let head = self.paths[path.index()].head;
        if head == NONE {
            return None;
        }
        let psn = self.psn_of(head);
        self.record(pool, psn).map(|record| (psn, record))
    }

    /// The oldest packet of `path` if a packet that left later on the same path is known to have arrived.
    pub(crate) fn overtaken_on(&self, pool: &Pool<SendPage>, path: PathId) -> Option<(Psn, Record)> {
        let list = &self.paths[path.index()];
        if !list.progressed {
            return None;
        }
        let (psn, record) = self.oldest_on(pool, path)?;
        ((record.order.wrapping_sub(list.acked_order) as i16) < 0).then_some((psn, record))
    }

    /// The outstanding packet with the highest PSN.
    pub(crate) fn last(&self, pool: &Pool<SendPage>) -> Option<(Psn, Record)> {
        let mut psn = self.next;
        while psn != self.una {
            psn = psn.sub(1);
            if let Some(record) = self.record(pool, psn) {
                return Some((psn, record));
            }
        }
        None
    }

    /// Moves `una` over everything that is done and gives back pages.
    pub(crate) fn advance(&mut self, pool: &mut Pool<SendPage>) {
        if self.outstanding == 0 {
            self.una = self.next;
            self.pages.clear(pool);
            self.paths = self.paths.map(|list| PathList { head: NONE, tail: NONE, progressed: false, ..list });
            return;
        }
        let before = self.una;
        while let Some((id, i)) = self.locate(self.una) {
            let done = pool.page(id).done >> i;
            let run = done.trailing_ones();
            if run == 0 {
                break;
            }
            let step = run.min(PAGE - i as u32);
            self.una = self.una.add(step);
            if self.next.is_before(self.una) {
                self.una = self.next;
            }
        }
        if before.0 / PAGE != self.una.0 / PAGE {
            self.pages.release_below(pool, self.una.0);
        }
    }

    /// Takes out everything that is outstanding, oldest PSN first.
    pub(crate) fn drain(&mut self, pool: &mut Pool<SendPage>, mut out: impl FnMut(Psn, Record)) {
        let mut psn = self.una;
        while psn != self.next {
            if let Some(record) = self.record(pool, psn) {
                out(psn, record);
            }
            psn = psn.next();
        }
        self.pages.clear(pool);
        self.paths = [EMPTY_LIST; PathId::MAX];
        self.outstanding = 0;
        self.una = self.next;
    }

    fn locate(&self, psn: Psn) -> Option<(u32, usize)> {
        if psn.is_before(self.una) || !psn.is_before(self.next) {
            return None;
        }
        self.pages.find(psn.0)
    }

    fn psn_of(&self, index: u16) -> Psn {
        let ahead = u32::from(index).wrapping_sub(self.una.0) % SEND_WINDOW;
        self.una.add(ahead)
    }

    fn append(&mut self, pool: &mut Pool<SendPage>, psn: Psn, path: PathId) {
        let own = index_of(psn);
        let list = self.paths[path.index()];
        if list.tail != NONE
            && let Some((id, i)) = self.locate(self.psn_of(list.tail))
        {
            let links = &mut pool.page_mut(id).records[i].links;
            *links = Links::new(list.tail, links.prev(list.tail), own, links.distance());
        }
        if let Some((id, i)) = self.locate(psn) {
            let record = &mut pool.page_mut(id).records[i];
            record.order = list.next_order;
            record.links = Links::new(own, list.tail, NONE, record.links.distance());
        }
        let list = &mut self.paths[path.index()];
        list.next_order = list.next_order.wrapping_add(1);
        list.tail = own;
        if list.head == NONE {
            list.head = own;
        }
    }

    fn unlink(&mut self, pool: &mut Pool<SendPage>, psn: Psn, record: &Record) {
        let own = index_of(psn);
        let (prev, next) = (record.links.prev(own), record.links.next(own));
        let path = record.path().index();
        if prev == NONE {
            self.paths[path].head = next;
        } else if let Some((id, i)) = self.locate(self.psn_of(prev)) {
            let links = &mut pool.page_mut(id).records[i].links;
            *links = Links::new(prev, links.prev(prev), next, links.distance());
        }
        if next == NONE {
            self.paths[path].tail = prev;
        } else if let Some((id, i)) = self.locate(self.psn_of(next)) {
            let links = &mut pool.page_mut(id).records[i].links;
            *links = Links::new(next, prev, links.next(next), links.distance());
        }
    }
}

fn index_of(psn: Psn) -> u16 {
    (psn.0 % SEND_WINDOW) as u16
}

/// Why a packet is sent again.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Resend {
    /// Its RTO expired.
    pub(crate) timeout: bool,
    /// A second copy goes out on yet another path.
    pub(crate) copied: bool,
}

const _: () = assert!(size_of::<Record>() == 16);

#[cfg(test)]
mod tests;
