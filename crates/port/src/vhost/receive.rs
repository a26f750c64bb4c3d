//! What a guest receives: placed in its memory at once, in arrival order, and shown in another one ("in-place guest
//! reordering", NSDI'26, section 4.2).

use bifrost_wire::virtio_net;

use super::counters::VhostCounters;
use super::ring::{BadChain, Broken, Piece, Ring};
use super::transmit::HEADER;
use crate::guest::{PlaceError, RxHandle};

/// Longest receive buffer that is made use of.
const LIMIT: u32 = 1 << 20;
/// Ends the list of a packet's buffers.
const END: u16 = u16::MAX;

/// The receive queue of one queue pair. A handle is the number of the packet's first buffer.
#[derive(Debug)]
pub(crate) struct Receive<R> {
    pub(crate) ring: R,
    /// `VIRTIO_NET_F_MRG_RXBUF`: a packet may take several buffers.
    mergeable: bool,
    /// `VIRTIO_NET_F_GUEST_CSUM`: the guest takes our word for checksums.
    guest_checksum: bool,
    /// Longest frame, bytes.
    max_frame: usize,
    /// The headers of frames in one buffer, as bytes: without and with a verified checksum. Put together anew, their bytes
    /// would be read back while they are on their way to memory, behind all that was written before.
    headers: [[u8; HEADER]; 2],
    /// By number.
    buffers: Vec<Buffer>,
    /// Buffers that were taken and are not in use, oldest last.
    spare: Vec<u16>,
    /// Scratch: buffers and pieces of the packet that is being placed.
    taken: Vec<u16>,
    pieces: Vec<Piece>,
    broken: Option<Broken>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Buffer {
    /// The driver has it, or it waits in its ring.
    Drivers,
    /// It was taken and is empty.
    Spare,
    /// It has `len` bytes of a packet that goes on in buffer `next`; `first`: it starts there.
    Placed { len: u32, next: u16, first: bool },
}

impl<R: Ring> Receive<R> {
    pub(crate) fn new(ring: R, mergeable: bool, guest_checksum: bool, max_frame: usize) -> Self {
        let mut ring = ring;
        let size = usize::from(ring.size());
        let mut buffers = vec![Buffer::Drivers; size];
        let mut spare = Vec::with_capacity(size);
        // What was placed there was not acknowledged, and comes again.
        for head in ring.take_recovered().into_iter().rev() {
            buffers[usize::from(head)] = Buffer::Spare;
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
            broken: None,
            ring,
        }
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
        let (mut written, total) = (0, HEADER + frame.len());
        // A driver that offers bad buffers faster than they go back must not keep us here.
        let mut bad_buffers = 0;
        while written < total {
            let Some(head) = self.take(counters) else {
                self.give_back();
                counters.rx_no_buffer_frames += 1;
                return Err(PlaceError::NoBuffer);
            };
            self.taken.push(head);
            let room = match self.ring.chain(head, true, LIMIT, &mut self.pieces) {
                Ok(room) => room as usize,
                Err(bad) => {
                    // It goes back at once, empty, which drivers count as an error.
                    self.taken.pop();
                    self.return_bad(head, bad, counters);
                    bad_buffers += 1;
                    if bad_buffers > self.ring.size() {
                        self.give_back();
                        counters.rx_no_buffer_frames += 1;
                        return Err(PlaceError::NoBuffer);
                    }
                    continue;
                }
            };
            let last = written + room >= total;
            if (!self.mergeable && !last) || (written == 0 && room < HEADER) {
                self.give_back();
                counters.rx_too_large_frames += 1;
                return Err(PlaceError::TooLarge);
            }
            let len = room.min(total - written);
            let next = if last { END } else { 0 };
            self.buffers[usize::from(head)] = Buffer::Placed { len: len as u32, next, first: written == 0 };
            self.fill(written, len, frame);
            written += len;
        }
        self.link();
        let first = self.taken[0];
        if !self.write_header(first, checksum_valid && self.guest_checksum) {
            self.give_back();
            counters.rx_no_buffer_frames += 1;
            return Err(PlaceError::NoBuffer);
        }
        self.taken.clear();
        Ok(RxHandle(u32::from(first)))
    }

    /// Shows a packet next: all of its buffers, or none.
    pub(crate) fn publish(&mut self, handle: RxHandle, counters: &mut VhostCounters) {
        let Some(Buffer::Placed { first: true, .. }) = self.buffers.get(handle.0 as usize) else { return };
        let mut head = handle.0 as u16;
        let mut bytes = 0;
        while let Some(Buffer::Placed { len, next, .. }) = self.buffers.get(usize::from(head)).copied() {
            self.buffers[usize::from(head)] = Buffer::Drivers;
            self.ring.push_used(head, len);
            counters.rx_buffers += 1;
            bytes += u64::from(len);
            head = next;
        }
        counters.rx_packets += 1;
        counters.rx_bytes += bytes.saturating_sub(HEADER as u64);
    }

    /// Throws a packet away; its buffers are the next ones to be filled.
    pub(crate) fn discard(&mut self, handle: RxHandle, counters: &mut VhostCounters) {
        let Some(Buffer::Placed { first: true, .. }) = self.buffers.get(handle.0 as usize) else { return };
        counters.rx_discarded_frames += 1;
        let mut head = handle.0 as u16;
        while let Some(Buffer::Placed { next, .. }) = self.buffers.get(usize::from(head)).copied() {
            self.taken.push(head);
            head = next;
        }
        self.give_back();
    }

    /// The end of the ring: what was taken and not shown goes back, untaken as far as that can be said, empty otherwise.
    pub(crate) fn give_back_all(&mut self) {
        for _ in 0..self.ring.size() {
            let Some(head) = self.ring.last_taken() else { break };
            match self.buffers.get_mut(usize::from(head)) {
                Some(buffer) if *buffer != Buffer::Drivers => *buffer = Buffer::Drivers,
                _ => break,
            }
            self.ring.untake_last(head);
        }
        for head in 0..self.buffers.len() as u16 {
            if std::mem::replace(&mut self.buffers[usize::from(head)], Buffer::Drivers) != Buffer::Drivers {
                self.ring.push_used(head, 0);
            }
        }
        self.spare.clear();
        self.ring.show();
    }

    pub(crate) fn broken(&self) -> Option<Broken> {
        self.broken
    }

    /// Nothing more is placed. Whether something was until now.
    pub(crate) fn end(&mut self, broken: Broken) -> bool {
        self.spare.clear();
        self.broken.replace(broken).is_none()
    }

    /// The next empty buffer.
    fn take(&mut self, counters: &mut VhostCounters) -> Option<u16> {
        if let Some(head) = self.spare.pop() {
            return Some(head);
        }
        if self.broken.is_some() {
            return None;
        }
        let popped = match self.ring.pop() {
            Ok(Some(head)) if self.buffers[usize::from(head)] != Buffer::Drivers => Err(Broken::Twice),
            // Twice within this packet.
            Ok(Some(head)) if self.taken.contains(&head) => Err(Broken::Twice),
            other => other,
        };
        match popped {
            Ok(head) => head,
            Err(broken) => {
                counters.broken_rings += 1;
                self.broken = Some(broken);
                None
            }
        }
    }

    /// The buffers of the packet that was being placed are empty again.
    fn give_back(&mut self) {
        while let Some(head) = self.taken.pop() {
            self.buffers[usize::from(head)] = Buffer::Spare;
            self.spare.push(head);
        }
    }

    fn return_bad(&mut self, head: u16, bad: BadChain, counters: &mut VhostCounters) {
        self.buffers[usize::from(head)] = Buffer::Drivers;
        self.ring.push_used(head, 0);
        counters.rx_bad_chain_buffers[bad as usize] += 1;
    }

    /// Writes bytes `from..from + len` of header and frame to the pieces; the header is written last, when it is known.
    fn fill(&self, from: usize, len: usize, frame: &[u8]) {
        let (mut at, end) = (from, from + len);
        for piece in &self.pieces {
            let next = (at + piece.len as usize).min(end);
            let skip = HEADER.saturating_sub(at).min(next - at);
            if at + skip < next {
                self.ring.memory().write(piece.guest + skip as u64, &frame[at + skip - HEADER..next - HEADER]);
            }
            at = next;
        }
    }

    /// Names each buffer's successor.
    fn link(&mut self) {
        for pair in self.taken.windows(2) {
            if let Buffer::Placed { next, .. } = &mut self.buffers[usize::from(pair[0])] {
                *next = pair[1];
            }
        }
    }

    /// The header lies in the first buffer; its pieces are looked up again only if others came after.
    fn write_header(&mut self, first: u16, verified: bool) -> bool {
        let mut bytes = self.headers[usize::from(verified)];
        if self.taken.len() > 1 {
            if self.ring.chain(first, true, LIMIT, &mut self.pieces).is_err() {
                return false;
            }
            let flags = if verified { virtio_net::F_DATA_VALID } else { 0 };
            bytes = virtio_net::Header { flags, num_buffers: self.taken.len() as u16, ..Default::default() }.emit();
        } else if let [only] = &self.pieces[..] {
            return self.ring.memory().write(only.guest, &self.headers[usize::from(verified)]);
        }
        let mut done = 0;
        for piece in &self.pieces {
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
