//! Packets from the guest: their buffers stay in its memory until they are completed (delayed release).
//!
//! That requires a driver that does not touch a buffer in flight. Until the first retransmission has shown that, all
//! bytes of packets that may be sent again are copied here, too. If a driver turns out to reuse buffers early, its
//! packets are copied permanently (NSDI'26, section 7.1).
//!
//! Copying only the head of a packet when it is fetched is Triton's header-payload slicing (SIGCOMM'24, section 5.2).
//! Without slicing, the whole packet is copied when it is fetched.

use std::collections::VecDeque;

use bifrost_nic::{HEAD_LEN, MAX_FRAME_LEN, Offload, parse};
use bifrost_wire::virtio_net;

use super::counters::VhostCounters;
use super::credit::{self, Credit};
use super::index::{Index, Table};
use super::memory::Memory;
use super::moved::{Moved, Own};
use super::mutation::mutated;
use super::ring::{BadChain, Broken, Piece, Ring, Walk, Want};
use crate::guest::{TxFrame, TxHandle};

/// Length of the header before every frame, bytes (virtio 1.3, section 5.1.6).
pub(crate) const HEADER: usize = virtio_net::LEN;
/// Bytes of a packet copied when it is fetched: both headers.
const STRIDE: usize = HEADER + HEAD_LEN;
/// Maximum size of a spare buffer kept while packets stay in place, bytes: packets frozen nevertheless are single
/// frames.
const SPARE_BYTES: usize = 16 << 10;

/// Number of pieces for which a slot keeps memory between packets. Only long packets need more; one sixteenth of the
/// ring may hold such packets at a time.
const KEPT_PIECES: usize = 64;

/// Maximum packets moved out of a ring at a time.
const MOVED_AT_ONCE: u16 = 64;

/// Whether a guest's buffers can be read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Buffers {
    /// No retransmission so far: packets are copied.
    Unproven,
    /// They were unchanged: packets stay in place.
    InPlace,
    /// They had changed, or slicing is off: packets are copied permanently.
    Kept,
}

/// The transmit queue of one queue pair. A handle is the number of the packet's buffer, or one given out by `moved`.
///
/// Of a held packet it keeps the first [`HEAD_LEN`] bytes, on which all decisions depend, and the location of the rest.
/// The guest may write to the rest at any time.
#[derive(Debug)]
pub(crate) struct Transmit<R> {
    pub(crate) ring: R,
    /// By slot: the virtio header, and the frame's first bytes.
    heads: Table<[u8; STRIDE]>,
    packets: Table<Packet>,
    buffers: Buffers,
    /// Whether all but the head of a packet stays in place when it is fetched.
    slicing: bool,
    /// Spare buffers for packet copies: as many as were in use at once, and no large ones once packets stay in place.
    spare: Vec<Vec<u8>>,
    /// For comparisons.
    scratch: Vec<u8>,
    held: u16,
    /// Held packets with more than [`KEPT_PIECES`].
    long: u16,
    /// Work of this turn.
    work: u32,
    credit: Credit,
    /// Packets that an earlier life of this daemon fetched and did not complete: sent again, first.
    again: VecDeque<Index>,
    /// Set if buffers have to be returned in the order in which they were taken. When its back-end is gone, a front-end
    /// without an inflight record considers all buffers from the used index on as in flight, and QEMU then returns some
    /// of them itself.
    in_order: Option<InOrder>,
}

/// State for a ring that returns buffers in the order in which they were taken.
#[derive(Debug)]
struct InOrder {
    /// Taken buffers that have not been returned, oldest first.
    order: VecDeque<Index>,
    moved: Moved,
}

#[derive(Clone, Debug, Default)]
struct Packet {
    /// All bytes in the guest's memory, virtio header included.
    pieces: Vec<Piece>,
    /// Length of the frame, bytes.
    len: u32,
    /// The bytes behind the head, if copied here.
    rest: Option<Vec<u8>>,
    held: bool,
    /// Completed, and waiting for earlier ones to be returned.
    done: bool,
}

impl<R: Ring> Transmit<R> {
    pub(crate) fn new(mut ring: R, in_order: bool, slicing: bool) -> Self {
        let size = ring.size();
        Transmit {
            again: ring.take_recovered().into(),
            in_order: in_order
                .then(|| InOrder { order: VecDeque::with_capacity(usize::from(size.get())), moved: Moved::new(size) }),
            heads: size.table([0; STRIDE]),
            packets: size.table(Packet::default()),
            buffers: if slicing { Buffers::Unproven } else { Buffers::Kept },
            slicing,
            spare: Vec::new(),
            scratch: Vec::new(),
            held: 0,
            long: 0,
            work: 0,
            credit: Credit::new(size),
            ring,
        }
    }

    /// Fetches up to `max` packets. Returns whether more may be waiting; if not, the guest kicks for new ones.
    pub(crate) fn fetch(
        &mut self,
        max: usize,
        out: &mut Vec<TxFrame>,
        counters: &mut VhostCounters,
    ) -> Result<bool, Broken> {
        self.ring.ask_for_silence();
        self.work = 0;
        let most = credit::turn_work(max);
        for _ in 0..max {
            if self.work > most && !mutated!(WorkNotBounded) {
                return Ok(true);
            }
            let head = match self.again.pop_front().map_or_else(|| self.ring.pop(), |head| Ok(Some(head)))? {
                Some(head) => head,
                None if self.ring.ask_for_kicks()? => {
                    self.ring.ask_for_silence();
                    continue;
                }
                None => return Ok(false),
            };
            if let Some(frame) = self.take(head, counters)? {
                out.push(frame);
            }
        }
        Ok(true)
    }

    /// Reads one buffer's descriptors; bad buffers return at once.
    fn take(&mut self, head: Index, counters: &mut VhostCounters) -> Result<Option<TxFrame>, Broken> {
        let packet = &mut self.packets[head];
        if packet.held || packet.done {
            return Err(Broken::Twice);
        }
        if let Some(in_order) = &mut self.in_order {
            in_order.order.push_back(head);
        }
        let want = Want { writable: false, limit: (HEADER + MAX_FRAME_LEN) as u32, enough: u32::MAX };
        let Walk { descriptors, mut bytes } = self.ring.chain(head, want, &mut packet.pieces);
        let work = credit::buffer_work(descriptors);
        self.work = self.work.saturating_add(work);
        counters.tx_descriptors += u64::from(descriptors);
        let is_long = packet.pieces.len() > KEPT_PIECES && !mutated!(PiecesKept);
        if bytes.is_ok() && is_long && self.long > self.ring.size().get() / 16 {
            bytes = Err(BadChain::Pieces);
        }
        let len = match bytes {
            Ok(total) if total as usize >= HEADER => total - HEADER as u32,
            bad => {
                match bad {
                    Ok(_) => counters.tx_bad_buffer_packets += 1,
                    Err(bad) => counters.tx_bad_chain_packets[bad as usize] += 1,
                }
                self.give_back(head);
                return self.credit.spend(work).map(|()| None);
            }
        };
        packet.len = len;
        packet.rest = None;
        // The frame's first bytes are copied now and never read again: decisions about them stay valid.
        let bytes = &mut self.heads[head][..HEADER + (len as usize).min(HEAD_LEN)];
        if !gather(self.ring.memory(), &packet.pieces, 0, bytes) {
            return Ok(self.refuse(head, &mut counters.tx_bad_buffer_packets));
        }
        let Some((virtio, bytes)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
        let mut frame = TxFrame { handle: TxHandle(u32::from(head.get())), len, offload: Offload::default() };
        let virtio = virtio_net::Header::parse(virtio).unwrap_or_default();
        // A frame without offloads is not parsed here: the data path parses it anyway.
        if virtio.flags & virtio_net::F_NEEDS_CSUM != 0 || virtio.gso_type != virtio_net::GSO_NONE {
            match parse(bytes, len as usize).and_then(|parsed| Offload::from_virtio(virtio, &parsed, len as usize)) {
                Ok(offload) => frame.offload = offload,
                Err(reason) => return Ok(self.refuse(head, &mut counters.tx_malformed_packets[reason.index()])),
            }
        }
        if let Some(in_order) = &mut self.in_order {
            let Some(handle) = in_order.moved.name(head) else { return Ok(None) };
            frame.handle = TxHandle(handle);
        }
        packet.held = true;
        self.held += 1;
        self.long += u16::from(is_long);
        self.credit.earn();
        counters.tx_packets += 1;
        counters.tx_bytes += u64::from(len);
        if !self.slicing {
            self.keep(frame.handle);
        }
        Ok(Some(frame))
    }

    fn refuse(&mut self, head: Index, counter: &mut u64) -> Option<TxFrame> {
        *counter += 1;
        self.give_back(head);
        None
    }

    fn give_back(&mut self, head: Index) {
        let packet = &mut self.packets[head];
        if packet.pieces.capacity() > KEPT_PIECES && !mutated!(PiecesKept) {
            packet.pieces = Vec::new();
        }
        let Some(InOrder { order, .. }) = &mut self.in_order else { return self.ring.push_used(head, 0) };
        packet.done = true;
        while let Some(first) = order.front().copied()
            && std::mem::take(&mut self.packets[first].done)
        {
            order.pop_front();
            self.ring.push_used(first, 0);
        }
    }

    /// A held packet, and its slot.
    fn held(&self, handle: TxHandle) -> Option<(Index, &Packet)> {
        let slot = match &self.in_order {
            Some(in_order) => in_order.moved.slot(handle.0)?,
            None => self.ring.size().check_handle(handle.0)?,
        };
        Some((slot, &self.packets[slot])).filter(|(_, packet)| packet.held)
    }

    /// A packet that was moved out of the ring.
    fn own(&self, handle: TxHandle) -> Option<&Own> {
        self.in_order.as_ref()?.moved.own(handle.0)
    }

    pub(crate) fn head(&self, handle: TxHandle) -> &[u8] {
        match self.held(handle) {
            Some((slot, packet)) => &self.heads[slot][HEADER..][..(packet.len as usize).min(HEAD_LEN)],
            None => self.own(handle).map_or(&[], |own| &own.head),
        }
    }

    /// The bytes behind the head, if copied here.
    pub(crate) fn rest(&self, handle: TxHandle) -> &[u8] {
        match self.held(handle) {
            Some((_, packet)) => packet.rest.as_deref().unwrap_or_default(),
            None => self.own(handle).map_or(&[], |own| &own.rest),
        }
    }

    /// Appends bytes `from..to` of the frame.
    pub(crate) fn copy(&self, handle: TxHandle, from: usize, to: usize, out: &mut Vec<u8>) {
        let head = self.head(handle);
        if from < head.len() {
            out.extend_from_slice(&head[from..to.min(head.len())]);
        }
        let Some((_, packet)) = self.held(handle) else {
            return out.extend_from_slice(self.own(handle).map_or(&[], |own| own.behind_head(from, to)));
        };
        if let Some(rest) = &packet.rest {
            let (from, to) = (from.saturating_sub(head.len()), to.saturating_sub(head.len()).min(rest.len()));
            out.extend_from_slice(rest.get(from..to).unwrap_or_default());
            return;
        }
        let (from, to) = (from.max(head.len()) + HEADER, to.min(packet.len as usize) + HEADER);
        append(self.ring.memory(), &packet.pieces, from, to, out);
    }

    /// The packet may be sent more than once: copies all of it, unless the driver has shown that it does not reuse
    /// buffers early.
    pub(crate) fn keep(&mut self, handle: TxHandle) {
        if self.buffers != Buffers::InPlace {
            self.freeze(handle);
        }
    }

    /// Copies the whole packet: from now on the guest cannot change it.
    pub(crate) fn freeze(&mut self, handle: TxHandle) {
        let Some(slot) = self.held(handle).filter(|(_, packet)| packet.rest.is_none()).map(|(slot, _)| slot) else {
            return;
        };
        let packet = &mut self.packets[slot];
        let len = packet.len as usize;
        let behind = len.saturating_sub(HEAD_LEN);
        let mut rest = if behind > 0 { self.spare.pop().unwrap_or_default() } else { Vec::new() };
        rest.reserve(behind);
        append(self.ring.memory(), &packet.pieces, HEADER + len - behind, HEADER + len, &mut rest);
        // All pieces were found to be memory. If that is no longer true, zeros are kept.
        rest.resize(behind, 0);
        packet.rest = Some(rest);
    }

    /// Bytes of packets copied here.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let in_ring: u64 = self.packets.iter().filter_map(|p| p.rest.as_ref()).map(|rest| rest.len() as u64).sum();
        in_ring + self.in_order.as_ref().map_or(0, |in_order| in_order.moved.bytes())
    }

    /// Makes room in a ring that runs short and returns buffers in order: moves uncompleted packets out, oldest first,
    /// so that others no longer wait for them.
    pub(crate) fn relieve(&mut self, counters: &mut VhostCounters) {
        let size = self.ring.size().get();
        let Some(in_order) = &self.in_order else { return };
        if usize::from(size) - in_order.order.len() > usize::from(size) / 4 {
            return;
        }
        for _ in 0..MOVED_AT_ONCE.min(size / 2) {
            let Some(in_order) = self.in_order.as_mut().filter(|in_order| in_order.moved.has_room()) else { break };
            let Some(&slot) = in_order.order.front() else { break };
            let handle = in_order.moved.name_of(slot);
            self.freeze(TxHandle(handle));
            let packet = &mut self.packets[slot];
            if !packet.held {
                break;
            }
            let head = &self.heads[slot][HEADER..][..(packet.len as usize).min(HEAD_LEN)];
            if let Some(in_order) = &mut self.in_order {
                in_order.moved.put(handle, head, packet.rest.take().unwrap_or_default());
            }
            counters.tx_moved_packets += 1;
            self.leave(slot);
        }
    }

    /// Frees a packet's buffer.
    fn leave(&mut self, slot: Index) {
        let packet = &mut self.packets[slot];
        packet.held = false;
        self.held -= 1;
        self.long -= u16::from(packet.pieces.len() > KEPT_PIECES && !mutated!(PiecesKept));
        self.give_back(slot);
    }

    pub(crate) fn buffers(&self) -> Buffers {
        self.buffers
    }

    /// Compares a packet's copy with its buffer: all of it if it is copied here, its head otherwise. If only the head
    /// is known and has changed, the packet is not intact.
    pub(crate) fn is_intact(&mut self, handle: TxHandle, counters: &mut VhostCounters) -> bool {
        let Some(slot) = self.held(handle).map(|(slot, _)| slot) else { return true };
        let packet = &self.packets[slot];
        if self.buffers == Buffers::Kept && packet.rest.is_some() {
            return true;
        }
        let kept = (packet.len as usize).min(HEAD_LEN);
        let rest = packet.rest.as_deref();
        self.scratch.clear();
        self.scratch.resize(kept + rest.map_or(0, <[u8]>::len), 0);
        let same = gather(self.ring.memory(), &packet.pieces, HEADER, &mut self.scratch)
            && self.scratch[..kept] == self.heads[slot][HEADER..][..kept]
            && rest.is_none_or(|rest| self.scratch[kept..] == *rest);
        match (same, self.buffers) {
            (true, Buffers::Unproven) if rest.is_some() => {
                self.buffers = Buffers::InPlace;
                self.spare = Vec::new();
            }
            (true, _) => {}
            (false, _) => {
                counters.tx_reused_buffer_packets += 1;
                self.buffers = Buffers::Kept;
            }
        }
        same || rest.is_some()
    }

    /// Returns a buffer with the next [`Ring::show`].
    pub(crate) fn complete(&mut self, handle: TxHandle) {
        let slot = self.held(handle).map(|(slot, _)| slot);
        let moved = self.in_order.as_mut().and_then(|in_order| in_order.moved.free(handle.0));
        if let Some(rest) = moved {
            self.spare(rest);
        }
        let Some(slot) = slot else { return };
        if let Some(rest) = self.packets[slot].rest.take() {
            self.spare(rest);
        }
        self.leave(slot);
    }

    /// Keeps the memory of a copy for the next packet.
    fn spare(&mut self, mut rest: Vec<u8>) {
        if rest.capacity() > 0 && (self.buffers != Buffers::InPlace || rest.capacity() <= SPARE_BYTES) {
            rest.clear();
            self.spare.push(rest);
        }
    }

    /// Returns all buffers: the ring ends.
    pub(crate) fn complete_all(&mut self) {
        for handle in 0..self.capacity() {
            self.complete(TxHandle(handle));
        }
        while let Some(head) = self.again.pop_front() {
            self.ring.push_used(head, 0);
        }
        self.ring.show();
    }

    /// Leaves all buffers to another process, which continues at the returned position and fetches them again. `None`:
    /// nothing outside of this process would know them, so they must be returned.
    pub(crate) fn leave_all(&mut self) -> Option<u16> {
        self.ring.show();
        self.ring.left_base(self.in_order.is_some())
    }

    /// Whether a packet is in a buffer that [`leave_all`](Self::leave_all) leaves.
    pub(crate) fn stays(&self, handle: TxHandle) -> bool {
        self.held(handle).is_some() && self.ring.left_base(self.in_order.is_some()).is_some()
    }

    /// Maximum packets held at once.
    pub(crate) fn capacity(&self) -> u32 {
        self.in_order.as_ref().map_or(u32::from(self.ring.size().get()), |in_order| in_order.moved.handles())
    }

    pub(crate) fn free(&self) -> u32 {
        let in_ring = u32::from(self.ring.size().get() - self.held);
        self.in_order.as_ref().map_or(in_ring, |in_order| in_order.moved.free_handles())
    }

    /// Memory of this process for descriptors, bytes.
    pub(crate) fn descriptor_bytes(&self) -> usize {
        let pieces: usize = self.packets.iter().map(|packet| packet.pieces.capacity()).sum();
        size_of::<Piece>() * pieces + self.ring.descriptor_bytes()
    }
}

/// Appends bytes `from..to` of a buffer to `out`, as far as they exist.
fn append(memory: &Memory, pieces: &[Piece], mut from: usize, to: usize, out: &mut Vec<u8>) {
    let mut start = 0;
    for piece in pieces {
        let end = start + piece.len as usize;
        if from < end {
            let take = end.min(to).saturating_sub(from);
            if take == 0 {
                return;
            }
            memory.append(piece.guest + (from - start) as u64, take, out);
            from += take;
        }
        start = end;
    }
}

/// Reads from byte `from` of a buffer on; returns whether all of `out` was filled.
fn gather(memory: &Memory, pieces: &[Piece], from: usize, out: &mut [u8]) -> bool {
    let (mut from, mut done) = (from, 0);
    for piece in pieces {
        let len = piece.len as usize;
        if from >= len {
            from -= len;
            continue;
        }
        let take = (len - from).min(out.len() - done);
        if !memory.read(piece.guest + from as u64, &mut out[done..done + take]) {
            return false;
        }
        (done, from) = (done + take, 0);
        if done == out.len() {
            break;
        }
    }
    done == out.len()
}

#[cfg(test)]
mod tests {
    use bifrost_wire::virtio_net::Header;

    use super::*;
    use crate::vhost::mock::{Guest, Kind};
    use crate::vhost::split::Split;

    #[test]
    fn copy_buffers_are_reused_until_packets_stay_in_place() {
        for slicing in [false, true] {
            let mut guest = Guest::new(Kind { packed: false, size: 16, event_idx: true, mergeable: true });
            let ring = Split::open(&guest.memory, guest.tx.spec(0)).expect("a ring");
            let mut transmit = Transmit::new(ring, false, slicing);
            let mut counters = VhostCounters::default();
            let mut fetch = |transmit: &mut Transmit<Split>, len: usize| {
                guest.send(Header::default(), &vec![7; len], &[], false).expect("room");
                let mut frames = Vec::new();
                transmit.fetch(1, &mut frames, &mut VhostCounters::default()).expect("a ring");
                transmit.keep(frames[0].handle);
                frames[0].handle
            };
            let mut places = Vec::new();
            for len in [60_000, 100, 9000, 60_000] {
                let handle = fetch(&mut transmit, len);
                let slot = transmit.ring.size().check_handle(handle.0).expect("a slot");
                let rest = transmit.packets[slot].rest.as_ref().expect("it is kept");
                assert_eq!(rest.len(), len.saturating_sub(HEAD_LEN));
                places.extend((len > HEAD_LEN).then_some(rest.as_ptr()));
                transmit.complete(handle);
            }
            assert!(places.iter().all(|place| *place == places[0]) && transmit.spare.len() == 1, "{places:?}");
            let handle = fetch(&mut transmit, 5000);
            assert!(transmit.is_intact(handle, &mut counters));
            transmit.complete(handle);
            assert_eq!(transmit.spare.len(), usize::from(!slicing), "packets in place need none");
        }
    }
}
