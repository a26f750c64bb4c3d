//! The send window: 16 bytes per packet in flight, and the order of transmission on each path.
//!
//! Packets sent on one path arrive in order, so each path keeps its outstanding packets in a list in sending order.
//! When one is acknowledged, everything before it in the list is lost (PROTOCOL.md, loss rules).

use bifrost_wire::bifrost::{PathId, Psn, Tick};

use bifrost_transport::pool::{PAGE, Page, Pages, Pool};

/// Maximum number of PSNs between the oldest unacknowledged one and the next one.
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
    /// Its place in the sending order of its path.
    order: u16,
    /// Which segment of the buffer.
    pub(crate) segment: u8,
    flags: u8,
}

/// Neighbours in a path's list and the flow distance, in 4 bytes: 12 bits for each neighbour, as PSN modulo the window,
/// and 8 for the distance. The predecessor of the head is meaningless. The successor of the tail is the next PSN:
/// usually that packet is sent next on the path, and then nothing has to be written.
#[derive(Clone, Copy, Debug, Default)]
struct Links(u32);

impl Links {
    fn new(prev: u16, own: u16, distance: u8) -> Self {
        Links(u32::from(prev) << 20 | u32::from(behind(own)) << 8 | u32::from(distance))
    }

    fn prev(self) -> u16 {
        (self.0 >> 20) as u16
    }

    fn next(self) -> u16 {
        (self.0 >> 8) as u16 & 0xfff
    }

    fn distance(self) -> u8 {
        self.0 as u8
    }

    fn set_prev(&mut self, prev: u16) {
        self.0 = self.0 & 0x000f_ffff | u32::from(prev) << 20;
    }

    fn set_next(&mut self, next: u16) {
        self.0 = self.0 & 0xfff0_00ff | (u32::from(next) & 0xfff) << 8;
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

    /// Whether it was sent more than once: then its acknowledgement says little about its path.
    pub(crate) fn is_retransmitted(&self) -> bool {
        self.flags & RETRANSMITTED != 0
    }

    fn count_timeout(&mut self, timeout: bool) {
        let rtos = (self.rtos() + u8::from(timeout)).min(7);
        self.flags = self.flags & !RTO_MASK | rtos << RTO_SHIFT;
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
    /// Outstanding, but in flight on no path: the peer received it but did not take it, or it waits here until the peer
    /// has room.
    landed: u64,
    records: [Record; PAGE as usize],
}

impl Default for SendPage {
    fn default() -> Self {
        SendPage { done: 0, landed: 0, records: [Record::default(); PAGE as usize] }
    }
}

impl Page for SendPage {
    fn reset(&mut self) {
        (self.done, self.landed) = (0, 0);
    }
}

/// Outstanding packets of one path in sending order.
#[derive(Clone, Copy, Debug)]
struct PathList {
    head: u16,
    tail: u16,
    next_order: u16,
    /// One past the highest acknowledged order, and whether anything was acknowledged since the window was last empty.
    acked_order: u16,
    progressed: bool,
}

const EMPTY_LIST: PathList = PathList { head: NONE, tail: NONE, next_order: 0, acked_order: 0, progressed: false };

impl PathList {
    /// The packet with this place in the order has arrived on the path.
    #[inline]
    fn acknowledge(&mut self, order: u16) {
        let past = order.wrapping_add(1);
        if (past.wrapping_sub(self.acked_order) as i16) > 0 {
            self.acked_order = past;
            self.progressed = true;
        }
    }
}

/// Packets with consecutive PSNs, sent once and one after the other on one path, whose oldest packets they are.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    pub(crate) path: PathId,
    /// When the last of them was sent.
    pub(crate) newest: Tick,
    /// One per packet; not empty.
    pub(crate) records: &'a [Record],
}

/// What [`SendWindow::finish_run`] found at a PSN.
#[derive(Debug)]
pub(crate) enum Next<'a> {
    /// This many packets were already done, or are not in the window.
    Done(u32),
    /// Packets that are now done.
    Run(Run<'a>),
    /// An outstanding packet that is not part of a run.
    Other,
}

/// One direction's send window.
#[derive(Debug)]
pub(crate) struct SendWindow {
    una: Psn,
    next: Psn,
    outstanding: u16,
    /// Of these: in flight on no path.
    landed: u16,
    pages: Pages,
    /// The page of the last packet, while that packet is in the window.
    last_page: u32,
    paths: [PathList; PathId::MAX],
}

impl SendWindow {
    pub(crate) fn new(first: Psn) -> Self {
        SendWindow {
            una: first,
            next: first,
            outstanding: 0,
            landed: 0,
            pages: Pages::default(),
            last_page: 0,
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

    /// Outstanding packets that are in flight on no path.
    pub(crate) fn landed(&self) -> u16 {
        self.landed
    }

    /// PSNs from the oldest outstanding one up to the next one.
    pub(crate) fn span(&self) -> u32 {
        self.next.distance_from(self.una) as u32
    }

    /// Appends a packet sent now on `path`. `None` if the pool is empty or the window is full.
    #[inline(always)]
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
        let i = (psn.0 % PAGE) as usize;
        if i == 0 || self.outstanding == 0 {
            (self.last_page, _) = self.pages.find_or_make(pool, psn.0, self.una.0)?;
        }
        let id = self.last_page;
        let (order, prev) = self.append(pool, psn, path);
        pool.page_mut(id).records[i] = Record {
            handle,
            sent,
            links: Links::new(prev, index_of(psn), distance),
            order,
            segment,
            flags: path.index() as u8,
        };
        self.next = psn.next();
        self.outstanding += 1;
        Some(psn)
    }

    /// The record of an outstanding packet; `None` if `psn` is outside the window or done.
    #[inline]
    pub(crate) fn record(&self, pool: &Pool<SendPage>, psn: Psn) -> Option<Record> {
        let (id, i) = self.locate(psn)?;
        let page = pool.page(id);
        (page.done >> i & 1 == 0).then(|| page.records[i])
    }

    /// Whether an outstanding packet is in flight on its path, as far as is known.
    pub(crate) fn is_in_flight(&self, pool: &Pool<SendPage>, psn: Psn) -> bool {
        self.locate(psn).is_some_and(|(id, i)| (pool.page(id).done | pool.page(id).landed) >> i & 1 == 0)
    }

    /// A packet stays outstanding, but is no longer in flight. Returns its record; `None` if it was not in flight.
    pub(crate) fn land(&mut self, pool: &mut Pool<SendPage>, psn: Psn) -> Option<Record> {
        let (id, i) = self.locate(psn).filter(|_| self.is_in_flight(pool, psn))?;
        let page = pool.page_mut(id);
        page.landed |= 1 << i;
        self.landed += 1;
        Some(page.records[i])
    }

    /// Marks an outstanding packet as acknowledged (or given up). Returns its record, and whether it was in flight.
    /// `progress` says whether its last transmission has arrived on its path, so that earlier ones on that path are
    /// lost.
    #[inline]
    pub(crate) fn finish(
        &mut self,
        pool: &mut Pool<SendPage>,
        psn: Psn,
        progress: impl FnOnce(&Record) -> bool,
    ) -> Option<(Record, bool)> {
        let (id, i) = self.locate(psn)?;
        let page = pool.page_mut(id);
        if page.done >> i & 1 == 1 {
            return None;
        }
        page.done |= 1 << i;
        let in_flight = page.landed >> i & 1 == 0;
        let record = page.records[i];
        self.landed -= u16::from(!in_flight);
        self.unlink(pool, psn, &record);
        self.outstanding -= 1;
        if progress(&record) {
            self.paths[record.path().index()].acknowledge(record.order);
        }
        Some((record, in_flight))
    }

    /// Marks a [`Run`] that starts at `psn` as acknowledged, at most `most` packets, for little more than the cost of
    /// one. Other packets are left to [`finish`](Self::finish).
    #[inline]
    pub(crate) fn finish_run<'a>(&mut self, pool: &'a mut Pool<SendPage>, psn: Psn, most: u32) -> Next<'a> {
        let Some((id, i)) = self.locate(psn) else { return Next::Done(1) };
        let page = pool.page_mut(id);
        let most = most.min(self.next.distance_from(psn) as u32);
        let done = (page.done >> i).trailing_ones();
        if done > 0 {
            return Next::Done(done.min(most));
        }
        let first = page.records[i];
        let list = &mut self.paths[first.path().index()];
        if list.head != index_of(psn) || first.flags & !PATH_MASK != 0 {
            return Next::Other;
        }
        let in_flight = ((page.done | page.landed) >> i).trailing_zeros().min(PAGE - i as u32);
        let records = &page.records[i..][..most.min(in_flight) as usize];
        // A packet continues the run if its predecessor in the path's list is also its predecessor by PSN.
        let (mut count, mut tail) = (0, index_of(psn));
        for record in records {
            if count > 0 {
                if record.flags != first.flags || record.links.prev() != tail {
                    break;
                }
                tail += 1;
            }
            count += 1;
        }
        let Some((records, last)) = records.get(..count).and_then(|run| Some((run, run.last()?))) else {
            return Next::Other;
        };
        if list.tail == tail {
            (list.head, list.tail) = (NONE, NONE);
        } else {
            list.head = last.links.next();
        }
        list.acknowledge(last.order);
        self.outstanding -= count as u16;
        page.done |= u64::MAX >> (PAGE - count as u32) << i;
        Next::Run(Run { path: first.path(), newest: last.sent, records })
    }

    /// Sends an outstanding packet again, or defers that: moves it to the end of `path`'s list. Returns its previous
    /// record.
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
        let (order, prev) = self.append(pool, psn, path);
        let page = pool.page_mut(id);
        self.landed = self.landed - (page.landed >> i & 1) as u16 + u16::from(why.postponed);
        page.landed = page.landed & !(1 << i) | u64::from(why.postponed) << i;
        let slot = &mut page.records[i];
        slot.sent = sent;
        slot.order = order;
        slot.links.set_prev(prev);
        slot.links.set_next(behind(index_of(psn)));
        slot.count_timeout(why.timeout);
        slot.flags = path.index() as u8 | slot.flags & RTO_MASK | RETRANSMITTED | if why.copied { COPIED } else { 0 };
        Some(record)
    }

    /// The outstanding packet of `path` that was sent first.
    #[inline]
    pub(crate) fn oldest_on(&self, pool: &Pool<SendPage>, path: PathId) -> Option<(Psn, Record)> {
        let head = self.paths[path.index()].head;
        if head == NONE {
            return None;
        }
        let psn = self.psn_of(head);
        self.record(pool, psn).map(|record| (psn, record))
    }

    /// The outstanding packet with the lowest PSN.
    pub(crate) fn lowest(&self, pool: &Pool<SendPage>) -> Option<(Psn, Record)> {
        self.record(pool, self.una).map(|record| (self.una, record))
    }

    /// Whether a packet sent after `record`, the oldest on `path`, is known to have arrived on it.
    #[inline]
    pub(crate) fn is_overtaken_on(&self, path: PathId, record: &Record) -> bool {
        let list = &self.paths[path.index()];
        list.progressed && (record.order.wrapping_sub(list.acked_order) as i16) < 0
    }

    /// Moves `una` past everything that is done and releases pages.
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

    /// Removes all outstanding packets, lowest PSN first, and passes each to `out` with whether it was in flight.
    pub(crate) fn drain(&mut self, pool: &mut Pool<SendPage>, mut out: impl FnMut(Record, bool)) {
        let mut psn = self.una;
        while psn != self.next {
            if let Some(record) = self.record(pool, psn) {
                out(record, self.is_in_flight(pool, psn));
            }
            psn = psn.next();
        }
        self.pages.clear(pool);
        self.paths = [EMPTY_LIST; PathId::MAX];
        (self.outstanding, self.landed) = (0, 0);
        self.una = self.next;
    }

    #[inline]
    fn locate(&self, psn: Psn) -> Option<(u32, usize)> {
        if psn.0.wrapping_sub(self.una.0) >= self.span() {
            return None;
        }
        self.pages.find(psn.0)
    }

    fn psn_of(&self, index: u16) -> Psn {
        let ahead = u32::from(index).wrapping_sub(self.una.0) % SEND_WINDOW;
        self.una.add(ahead)
    }

    /// The links of the outstanding packet with this index.
    #[inline]
    fn links<'a>(&self, pool: &'a mut Pool<SendPage>, index: u16) -> Option<&'a mut Links> {
        let (id, i) = self.pages.find(self.psn_of(index).0)?;
        Some(&mut pool.page_mut(id).records[i].links)
    }

    /// Appends `psn` to `path`'s list. Returns its place in the order, and its predecessor.
    #[inline(always)]
    fn append(&mut self, pool: &mut Pool<SendPage>, psn: Psn, path: PathId) -> (u16, u16) {
        let own = index_of(psn);
        let list = &mut self.paths[path.index()];
        let (order, prev) = (list.next_order, list.tail);
        list.next_order = order.wrapping_add(1);
        list.tail = own;
        if prev == NONE {
            list.head = own;
        } else if behind(prev) != own
            && let Some(links) = self.links(pool, prev)
        {
            links.set_next(own);
        }
        (order, prev)
    }

    #[inline]
    fn unlink(&mut self, pool: &mut Pool<SendPage>, psn: Psn, record: &Record) {
        let own = index_of(psn);
        let list = &mut self.paths[record.path().index()];
        if list.head != own {
            self.unlink_behind_head(pool, own, record);
        } else if list.tail != own {
            list.head = record.links.next();
        } else {
            (list.head, list.tail) = (NONE, NONE);
        }
    }

    #[inline(never)]
    fn unlink_behind_head(&mut self, pool: &mut Pool<SendPage>, own: u16, record: &Record) {
        let (prev, next) = (record.links.prev(), record.links.next());
        let list = &mut self.paths[record.path().index()];
        let is_tail = list.tail == own;
        if is_tail {
            list.tail = prev;
        }
        if let Some(links) = self.links(pool, prev) {
            links.set_next(if is_tail { behind(prev) } else { next });
        }
        if is_tail {
            return;
        }
        if let Some(links) = self.links(pool, next) {
            links.set_prev(prev);
        }
    }
}

fn index_of(psn: Psn) -> u16 {
    (psn.0 % SEND_WINDOW) as u16
}

/// The index of the PSN after that of `index`.
#[inline(always)]
fn behind(index: u16) -> u16 {
    (index + 1) % SEND_WINDOW as u16
}

/// Why a packet is sent again.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Resend {
    /// Its RTO expired.
    pub(crate) timeout: bool,
    /// A second copy is sent on another path.
    pub(crate) copied: bool,
    /// It is not sent now, but waits as if it had been.
    pub(crate) postponed: bool,
}

const _: () = assert!(size_of::<Record>() == 16);

#[cfg(test)]
mod tests;
