//! Packets for the guest: placed in its memory at once, in arrival order, and shown in another order ("in-place guest
//! reordering", NSDI'26, section 4.2).

use bifrost_wire::virtio_net;

use super::counters::VhostCounters;
use super::credit::{self, Credit, PACKET_WORK};
use super::dirty_log::DirtyLog;
use super::index::{Index, Table};
use super::memory::Memory;
use super::mutation::mutated;
use super::ring::{BadChain, Broken, Piece, Ring, Want};
use super::transmit::HEADER;
use crate::guest::{PlaceError, RxHandle};

/// Maximum bytes used of a receive buffer.
const LIMIT: u32 = 1 << 20;

/// A packet that is not a single frame as received: its virtio header, and its bytes in pieces.
#[derive(Debug)]
pub(super) struct Source<'a> {
    virtio: virtio_net::Header,
    pieces: &'a [&'a [u8]],
    len: usize,
}

/// Contents of the virtio header.
#[derive(Clone, Copy)]
enum Head {
    /// For a single frame as received: only whether its checksum was verified.
    Frame {
        verified: bool,
    },
    Of(virtio_net::Header),
}

/// A source of bytes for receive buffers.
trait Bytes {
    fn len(&self) -> usize;
    /// Writes bytes `from..to` to the guest's memory.
    fn write(&self, memory: &Memory, at: u64, from: usize, to: usize);
}

impl Bytes for [u8] {
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }

    #[inline]
    fn write(&self, memory: &Memory, at: u64, from: usize, to: usize) {
        memory.write(at, &self[from..to]);
    }
}

impl<'a> Source<'a> {
    pub(super) fn new(virtio: virtio_net::Header, pieces: &'a [&'a [u8]]) -> Self {
        Source { virtio, len: pieces.iter().map(|piece| piece.len()).sum(), pieces }
    }
}

impl Bytes for Source<'_> {
    fn len(&self) -> usize {
        self.len
    }

    fn write(&self, memory: &Memory, mut at: u64, mut from: usize, to: usize) {
        let mut start = 0;
        for piece in self.pieces {
            let end = start + piece.len();
            if from < end && from < to {
                let part = &piece[from - start..to.min(end) - start];
                memory.write(at, part);
                (at, from) = (at + part.len() as u64, from + part.len());
            }
            start = end;
        }
    }
}

/// The receive queue of one queue pair. A handle is the number of the packet's first buffer.
#[derive(Debug)]
pub(crate) struct Receive<R> {
    pub(crate) ring: R,
    /// `VIRTIO_NET_F_MRG_RXBUF`: a packet may take several buffers.
    mergeable: bool,
    /// `VIRTIO_NET_F_GUEST_CSUM`: the guest trusts our checksum verification.
    guest_checksum: bool,
    /// Longest frame, bytes.
    max_frame: usize,
    /// Encoded headers of frames in one buffer: without and with a verified checksum. Building them each time would
    /// read the bytes back while their stores are still in the store buffer, behind all earlier ones.
    headers: [[u8; HEADER]; 2],
    buffers: Table<Buffer>,
    /// Taken, unused buffers, oldest last.
    spare: Vec<Index>,
    /// Scratch: buffers and pieces of the packet being placed, and the pieces of its first buffer that hold the header.
    taken: Vec<Index>,
    pieces: Vec<Piece>,
    header: Vec<Piece>,
    credit: Credit,
    broken: Option<Broken>,
    /// Log for written pages.
    log: Option<DirtyLog>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Buffer {
    /// Owned by the driver, or waiting in its ring.
    Drivers,
    /// Taken and empty.
    Spare,
    /// Holds `len` bytes of a packet that continues in buffer `next`; `first`: the packet starts here.
    Placed { len: u32, next: Option<Index>, first: bool },
}

impl<R: Ring> Receive<R> {
    pub(crate) fn new(ring: R, mergeable: bool, guest_checksum: bool, max_frame: usize, log: Option<DirtyLog>) -> Self {
        let mut ring = ring;
        let size = ring.size();
        let mut buffers = size.table(Buffer::Drivers);
        let mut spare = Vec::with_capacity(usize::from(size.get()));
        // Packets placed there were not acknowledged, and will be retransmitted.
        for head in ring.take_recovered().into_iter().rev() {
            buffers[head] = Buffer::Spare;
            spare.push(head);
        }
        Receive {
            mergeable,
            headers: [0, virtio_net::F_DATA_VALID]
                .map(|flags| virtio_net::Header { flags, num_buffers: 1, ..Default::default() }.emit()),
            guest_checksum,
            max_frame,
            buffers,
            spare,
            taken: Vec::with_capacity(64),
            pieces: Vec::with_capacity(64),
            header: Vec::with_capacity(HEADER),
            credit: Credit::new(size),
            broken: None,
            log,
            ring,
        }
    }

    /// From now on, marks written pages in `log`; `None` stops that.
    pub(crate) fn set_log(&mut self, log: Option<DirtyLog>) {
        self.ring.set_log(log.clone());
        self.log = log;
    }

    /// Writes a frame into the next free buffers.
    pub(crate) fn place(
        &mut self,
        frame: &[u8],
        checksum_valid: bool,
        counters: &mut VhostCounters,
    ) -> Result<RxHandle, PlaceError> {
        if frame.len() > self.max_frame {
            counters.rx_too_large_frames += 1;
            return Err(PlaceError::TooLarge);
        }
        self.place_bytes(frame, Head::Frame { verified: checksum_valid && self.guest_checksum }, counters)
    }

    /// Writes a merged packet into the next free buffers.
    pub(super) fn place_from(
        &mut self,
        source: &Source<'_>,
        counters: &mut VhostCounters,
    ) -> Result<RxHandle, PlaceError> {
        self.place_bytes(source, Head::Of(source.virtio), counters)
    }

    #[inline]
    fn place_bytes<B: Bytes + ?Sized>(
        &mut self,
        frame: &B,
        virtio: Head,
        counters: &mut VhostCounters,
    ) -> Result<RxHandle, PlaceError> {
        let (mut written, total) = (0, HEADER + frame.len());
        let (mut work, mut refused) = (0, false);
        while written < total {
            if work >= PACKET_WORK && !mutated!(WorkNotBounded) {
                // Bad buffers were returned; too many small ones never suffice.
                let error = if refused { PlaceError::NoBuffer } else { PlaceError::TooLarge };
                return Err(self.give_up(error, counters));
            }
            let Some(head) = self.take(counters) else { return Err(self.give_up(PlaceError::NoBuffer, counters)) };
            let want = Want { writable: true, limit: LIMIT, enough: (total - written) as u32 };
            let walk = self.ring.chain(head, want, &mut self.pieces);
            let cost = credit::buffer_work(walk.descriptors);
            work += cost;
            counters.rx_descriptors += u64::from(walk.descriptors);
            let room = match walk.bytes {
                Ok(room) => room as usize,
                Err(bad) => {
                    // Returned at once, empty, which drivers count as an error.
                    refused = true;
                    self.return_bad(head, bad, cost, counters);
                    continue;
                }
            };
            self.taken.push(head);
            let last = written + room >= total;
            if (!self.mergeable && !last) || (written == 0 && room < HEADER) {
                return Err(self.give_up(PlaceError::TooLarge, counters));
            }
            if written == 0 && !last {
                self.note_header();
            }
            let len = room.min(total - written);
            self.buffers[head] = Buffer::Placed { len: len as u32, next: None, first: written == 0 };
            self.fill(written, len, frame);
            if self.log.is_some() {
                self.mark(&self.pieces, len);
            }
            written += len;
        }
        self.link();
        let first = self.taken[0];
        if !self.write_header(virtio) {
            return Err(self.give_up(PlaceError::NoBuffer, counters));
        }
        if self.log.is_some() {
            // Marked again, because the header is written after the other pieces.
            self.mark(if self.taken.len() > 1 { &self.header } else { &self.pieces }, HEADER);
        }
        self.taken.clear();
        self.credit.earn();
        Ok(RxHandle(u32::from(first.get())))
    }

    /// Shows a packet next: all of its buffers, or none.
    pub(crate) fn publish(&mut self, handle: RxHandle, counters: &mut VhostCounters) {
        let mut at = self.first(handle);
        if at.is_none() {
            return;
        }
        let mut bytes = 0;
        while let Some(head) = at
            && let Buffer::Placed { len, next, .. } = self.buffers[head]
        {
            self.buffers[head] = Buffer::Drivers;
            self.ring.push_used(head, len);
            counters.rx_buffers += 1;
            bytes += u64::from(len);
            at = next;
        }
        counters.rx_packets += 1;
        counters.rx_bytes += bytes.saturating_sub(HEADER as u64);
    }

    /// Discards a packet; its buffers are filled next.
    pub(crate) fn discard(&mut self, handle: RxHandle, counters: &mut VhostCounters) {
        let mut at = self.first(handle);
        counters.rx_discarded_frames += u64::from(at.is_some());
        while let Some(head) = at
            && let Buffer::Placed { next, .. } = self.buffers[head]
        {
            self.taken.push(head);
            at = next;
        }
        self.give_back();
    }

    /// Ends the ring: taken buffers that were not shown are untaken as far as possible; the others are returned empty.
    pub(crate) fn give_back_all(&mut self) {
        for _ in 0..self.ring.size().get() {
            let Some(head) = self.ring.last_taken() else { break };
            if std::mem::replace(&mut self.buffers[head], Buffer::Drivers) == Buffer::Drivers {
                break;
            }
            self.ring.untake_last(head);
        }
        for head in self.ring.size().indexes() {
            if std::mem::replace(&mut self.buffers[head], Buffer::Drivers) != Buffer::Drivers {
                self.ring.push_used(head, 0);
            }
        }
        self.spare.clear();
        self.ring.show();
    }

    pub(crate) fn broken(&self) -> Option<Broken> {
        self.broken
    }

    /// Stops placing. Returns whether it was possible until now.
    pub(crate) fn end(&mut self, broken: Broken) -> bool {
        self.spare.clear();
        self.broken.replace(broken).is_none()
    }

    /// Memory of this process for descriptors, bytes.
    pub(crate) fn descriptor_bytes(&self) -> usize {
        size_of::<Piece>() * (self.pieces.capacity() + self.header.capacity()) + self.ring.descriptor_bytes()
    }

    /// The first buffer of a placed packet, if the handle is valid.
    fn first(&self, handle: RxHandle) -> Option<Index> {
        let head = self.ring.size().check_handle(handle.0)?;
        matches!(self.buffers[head], Buffer::Placed { first: true, .. }).then_some(head)
    }

    /// The next empty buffer.
    fn take(&mut self, counters: &mut VhostCounters) -> Option<Index> {
        if let Some(head) = self.spare.pop() {
            return Some(head);
        }
        if self.broken.is_some() {
            return None;
        }
        match self.ring.pop() {
            Ok(Some(head)) if self.buffers[head] == Buffer::Drivers => {
                self.buffers[head] = Buffer::Spare;
                return Some(head);
            }
            Ok(Some(_)) => self.out_of_use(Broken::Twice, counters),
            Ok(None) => {}
            Err(broken) => self.out_of_use(broken, counters),
        }
        None
    }

    fn out_of_use(&mut self, broken: Broken, counters: &mut VhostCounters) {
        if self.broken.is_none() {
            counters.broken(broken);
            self.broken = Some(broken);
        }
    }

    /// Fails to place a frame.
    fn give_up(&mut self, error: PlaceError, counters: &mut VhostCounters) -> PlaceError {
        self.give_back();
        match error {
            PlaceError::NoBuffer => counters.rx_no_buffer_frames += 1,
            PlaceError::TooLarge => counters.rx_too_large_frames += 1,
        }
        error
    }

    /// Makes the buffers of the packet being placed empty again.
    fn give_back(&mut self) {
        while let Some(head) = self.taken.pop() {
            self.buffers[head] = Buffer::Spare;
            self.spare.push(head);
        }
    }

    /// Returns a bad buffer that cost `work`.
    fn return_bad(&mut self, head: Index, bad: BadChain, work: u32, counters: &mut VhostCounters) {
        self.buffers[head] = Buffer::Drivers;
        self.ring.push_used(head, 0);
        counters.rx_bad_chain_buffers[bad as usize] += 1;
        if let Err(broken) = self.credit.spend(work) {
            self.out_of_use(broken, counters);
        }
    }

    /// Saves the header's pieces, before those of the next buffer overwrite them.
    fn note_header(&mut self) {
        self.header.clear();
        let mut bytes = 0;
        for piece in &self.pieces {
            if bytes >= HEADER as u32 {
                break;
            }
            self.header.push(*piece);
            bytes = bytes.saturating_add(piece.len);
        }
    }

    /// Writes bytes `from..from + len` of header and frame to the pieces; skips the header, which is written last, once
    /// it is known.
    #[inline]
    fn fill<B: Bytes + ?Sized>(&self, from: usize, len: usize, frame: &B) {
        let (mut at, end) = (from, from + len);
        for piece in &self.pieces {
            let next = (at + piece.len as usize).min(end);
            let skip = HEADER.saturating_sub(at).min(next - at);
            if at + skip < next {
                frame.write(self.ring.memory(), piece.guest + skip as u64, at + skip - HEADER, next - HEADER);
            }
            at = next;
        }
    }

    /// Marks the first `len` bytes of a buffer.
    #[cold]
    fn mark(&self, pieces: &[Piece], len: usize) {
        let (Some(log), mut left) = (&self.log, len as u64) else { return };
        for piece in pieces {
            let here = left.min(piece.len.into());
            log.mark(piece.guest, here);
            left -= here;
        }
    }

    /// Links each buffer to its successor.
    fn link(&mut self) {
        for pair in self.taken.windows(2) {
            if let Buffer::Placed { next, .. } = &mut self.buffers[pair[0]] {
                *next = Some(pair[1]);
            }
        }
    }

    /// The header is in the first buffer: its pieces were saved if others followed.
    fn write_header(&mut self, virtio: Head) -> bool {
        let several = self.taken.len() > 1;
        let virtio = match (virtio, &self.pieces[..]) {
            (Head::Frame { verified }, [only]) if !several => {
                return self.ring.memory().write(only.guest, &self.headers[usize::from(verified)]);
            }
            (Head::Frame { verified }, _) => {
                let flags = if verified { virtio_net::F_DATA_VALID } else { 0 };
                virtio_net::Header { flags, ..Default::default() }
            }
            (Head::Of(virtio), _) => virtio,
        };
        let bytes = virtio_net::Header { num_buffers: self.taken.len() as u16, ..virtio }.emit();
        let pieces = if several { &self.header } else { &self.pieces };
        let mut done = 0;
        for piece in pieces {
            let take = (piece.len as usize).min(HEADER - done);
            if !self.ring.memory().write(piece.guest, &bytes[done..done + take]) {
                return false;
            }
            done += take;
            if done == HEADER {
                return true;
            }
        }
        false
    }
}
