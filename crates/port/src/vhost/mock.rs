//! The driver's side, for tests: a guest that follows or breaks the rules on command.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use bifrost_wire::virtio_net::Header;
use rustix::event::{EventfdFlags, eventfd};

use super::call::{Call, Target};
use super::dirty_log::DirtyLog;
use super::memory::{Area, Memory, RegionSpec};
use super::queue::{self, Ends, QueueSpec, VhostQueue};
use super::ring::{RingSpec, WRAP};
use super::{inflight, packed_inflight};
use crate::guest::{GuestPort, TxFrame};

/// Start of the guest's memory: guest address and front-end address.
pub(super) const GUEST: u64 = 0x4000_0000;
pub(super) const USER: u64 = 0x7f00_0000_0000;
/// Size of the memory, bytes.
pub(super) const MEMORY: u64 = 16 << 20;
pub(super) const F_NEXT: u16 = 1;
pub(super) const F_WRITE: u16 = 2;
pub(super) const F_INDIRECT: u16 = 4;
/// Flags of packed rings.
pub(super) const F_AVAILABLE: u16 = 1 << 7;
pub(super) const F_USED: u16 = 1 << 15;

/// Properties of a driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) packed: bool,
    pub(super) size: u16,
    pub(super) event_idx: bool,
    pub(super) mergeable: bool,
}

/// A guest, or one of its queue pairs.
pub(super) struct Guest {
    pub(super) kind: Kind,
    pub(super) file: File,
    pub(super) memory: Arc<Memory>,
    pub(super) rx: Side,
    pub(super) tx: Side,
    pub(super) ends: Arc<Ends>,
    /// Whether the device has to return transmit buffers in order.
    pub(super) in_order: bool,
    pub(super) merged: bool,
    /// Whether the device leaves all but the heads of packets in memory.
    pub(super) slicing: bool,
    /// Start of the buffers, and the next free byte.
    buffers: Range<u64>,
    free: u64,
}

/// The driver's side of a ring.
pub(super) struct Side {
    memory: Arc<Memory>,
    packed: bool,
    pub(super) size: u16,
    event_idx: bool,
    /// Guest addresses; in a packed ring, the last two are the driver's and the device's event suppression structures.
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    /// Number of entries since the ring was new; for a packed ring, of descriptors.
    pub(super) next_available: u16,
    pub(super) next_used: u16,
    free: VecDeque<u16>,
    /// Descriptors of each buffer that the device holds.
    pub(super) chains: HashMap<u16, Vec<u16>>,
    /// Addresses of these.
    pieces: HashMap<u16, Vec<(u64, u32)>>,
    /// Descriptors of all buffers ever offered.
    offered: Vec<u16>,
    pub(super) call: OwnedFd,
    notify: Arc<Call>,
    /// Whether the device records buffers in flight.
    pub(super) inflight: bool,
}

impl Guest {
    pub(super) fn new(kind: Kind) -> Guest {
        let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC);
        let file = File::from(memory.expect("a file"));
        file.set_len(MEMORY).expect("its size");
        let mut memory = Memory::default();
        let copy = file.try_clone().expect("another descriptor");
        memory.add(RegionSpec { guest: GUEST, user: USER, size: MEMORY, offset: 0, file: copy }).expect("memory");
        let memory = Arc::new(memory);
        let rx = Side::new(&memory, kind, GUEST);
        let tx = Side::new(&memory, kind, GUEST + (2 << 20));
        let buffers = GUEST + (4 << 20)..GUEST + MEMORY;
        let free = buffers.start;
        Guest {
            kind,
            file,
            rx,
            tx,
            memory,
            ends: Arc::default(),
            in_order: false,
            merged: false,
            slicing: true,
            buffers,
            free,
        }
    }

    /// Another queue pair of the same guest.
    pub(super) fn another_pair(&mut self, kind: Kind) -> Guest {
        const START: u64 = GUEST + (8 << 20);
        let buffers = START + (4 << 20)..self.buffers.end;
        self.buffers.end = START;
        Guest {
            kind,
            file: self.file.try_clone().expect("another descriptor"),
            rx: Side::new(&self.memory, kind, START),
            tx: Side::new(&self.memory, kind, START + (2 << 20)),
            memory: Arc::clone(&self.memory),
            ends: Arc::default(),
            in_order: self.in_order,
            merged: self.merged,
            slicing: self.slicing,
            free: buffers.start,
            buffers,
        }
    }

    /// The same guest in another memory to which all of its own was copied.
    pub(super) fn moved_to(self, there: Guest) -> Guest {
        let memory = there.memory;
        let of = |side: Side| Side { memory: Arc::clone(&memory), ..side };
        Guest { file: there.file, rx: of(self.rx), tx: of(self.tx), memory: Arc::clone(&memory), ..self }
    }

    /// Opens the device from the current ring positions.
    pub(super) fn queue(&self) -> VhostQueue {
        self.queue_from(self.rx.base(), self.tx.base())
    }

    pub(super) fn queue_from(&self, receive: u16, transmit: u16) -> VhostQueue {
        self.open(receive, transmit, None)
    }

    /// The same with logging.
    pub(super) fn logged_queue_from(&self, receive: u16, transmit: u16, log: DirtyLog) -> VhostQueue {
        self.open(receive, transmit, Some(log))
    }

    fn open(&self, receive: u16, transmit: u16, log: Option<DirtyLog>) -> VhostQueue {
        queue::open(QueueSpec {
            memory: Arc::clone(&self.memory),
            packed: self.kind.packed,
            receive: RingSpec { log: log.clone(), ..self.rx.spec(receive) },
            transmit: RingSpec { log: log.clone(), ..self.tx.spec(transmit) },
            kick: Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("an eventfd")),
            in_order: self.in_order,
            slicing: self.slicing,
            mergeable: self.kind.mergeable,
            guest_checksum: true,
            merged: self.merged,
            max_frame: 9018,
            log,
            ends: Arc::clone(&self.ends),
        })
        .expect("rings are in memory")
    }

    /// Kills the device: nothing that it does later is visible in rings and records.
    pub(super) fn kill(&self, queue: VhostQueue) {
        let areas =
            [&self.rx, &self.tx].map(|side| [side.descriptors, side.available, side.used, side.used + (1 << 19)]);
        let before = areas.map(|side| {
            side.map(|at| {
                let mut bytes = vec![0; 64 + 32 * usize::from(self.kind.size)];
                assert!(self.memory.read(at, &mut bytes));
                (at, bytes)
            })
        });
        drop(queue);
        for (at, bytes) in before.into_iter().flatten() {
            assert!(self.memory.write(at, &bytes));
        }
    }

    /// Allocates a buffer; old buffers are overwritten sooner or later.
    pub(super) fn allocate(&mut self, len: u64) -> u64 {
        if self.free + len > self.buffers.end {
            self.free = self.buffers.start;
        }
        let at = self.free;
        self.free += len.next_multiple_of(64);
        at
    }

    /// Sends a frame in pieces of these sizes, with the rest in one more. Returns its head.
    pub(super) fn send(&mut self, header: Header, frame: &[u8], cuts: &[usize], indirect: bool) -> Option<u16> {
        let bytes = [&header.emit()[..], frame].concat();
        let mut pieces = Vec::new();
        let mut rest = &bytes[..];
        for cut in cuts {
            let (piece, after) = rest.split_at((*cut).min(rest.len()));
            pieces.push(piece.to_vec());
            rest = after;
        }
        if !rest.is_empty() {
            pieces.push(rest.to_vec());
        }
        let mut chain = Vec::new();
        for piece in pieces {
            let at = self.allocate(piece.len() as u64);
            assert!(self.memory.write(at, &piece));
            chain.push((at, piece.len() as u32));
        }
        if indirect {
            let table = self.allocate(16 * chain.len() as u64);
            for (i, (at, len)) in chain.iter().enumerate() {
                // Tables of packed rings have ids and flags without meaning; those of split rings have flags and
                // successors.
                let more = if i + 1 < chain.len() { F_NEXT } else { 0 };
                let (third, fourth) = if self.kind.packed { (0xbeef, F_NEXT) } else { (more, i as u16 + 1) };
                write_descriptor(&self.memory, table + 16 * i as u64, *at, *len, third, fourth);
            }
            return self.tx.add(&[(table, 16 * chain.len() as u32)], F_INDIRECT);
        }
        self.tx.add(&chain, 0)
    }

    /// Adds receive buffers of these sizes until the ring is full; returns their number.
    pub(super) fn fill(&mut self, sizes: &[u32]) -> usize {
        let mut count = 0;
        for size in sizes {
            if self.rx.free.is_empty() {
                break;
            }
            let at = self.allocate(u64::from(*size));
            assert!(self.rx.add(&[(at, *size)], F_WRITE).is_some());
            count += 1;
        }
        count
    }

    /// Reads one whole received packet, as Linux does: the header's buffers in order.
    pub(super) fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let first = self.rx.reap_bytes()?;
        if first.is_empty() {
            return Some((Header::default(), Vec::new()));
        }
        let header = Header::parse(&first).expect("a header");
        let mut frame = first[12..].to_vec();
        for _ in 1..header.num_buffers {
            frame.extend(self.rx.reap_bytes().expect("all buffers of a packet are visible together"));
        }
        Some((header, frame))
    }
}

/// All packets that the driver sent.
pub(super) fn fetch(port: &mut impl GuestPort) -> Vec<TxFrame> {
    let mut out = Vec::new();
    while port.fetch(64, &mut out).expect("fetch") {}
    out
}

/// A packet's contents at the port.
pub(super) fn bytes(port: &impl GuestPort, frame: &TxFrame) -> Vec<u8> {
    let mut out = Vec::new();
    port.copy(frame.handle, 0, frame.len as usize, &mut out);
    out
}

impl Side {
    fn new(memory: &Arc<Memory>, kind: Kind, at: u64) -> Side {
        let call = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("an eventfd");
        Side {
            memory: Arc::clone(memory),
            packed: kind.packed,
            size: kind.size,
            event_idx: kind.event_idx,
            descriptors: at,
            available: at + (1 << 19),
            used: at + (1 << 20),
            next_available: 0,
            next_used: 0,
            free: (0..kind.size).collect(),
            chains: HashMap::new(),
            pieces: HashMap::new(),
            offered: Vec::new(),
            notify: {
                let notify = Call::default();
                notify.set(Some(Target::Counter(call.try_clone().expect("another descriptor"))));
                Arc::new(notify)
            },
            call,
            inflight: false,
        }
    }

    /// The record is in guest memory here, which works as well.
    fn record(&self) -> Area {
        let user = self.used + (1 << 19) - GUEST + USER;
        let bytes = if self.packed { packed_inflight::bytes(self.size) } else { inflight::bytes(self.size) };
        Memory::area(&self.memory, user, bytes, 8).expect("memory")
    }

    /// Position up to which the device has shown used buffers of a split ring, or the driver has read those of a packed
    /// one.
    fn base(&self) -> u16 {
        if self.packed { self.place(self.next_used) } else { self.read16(self.used + 2) }
    }

    /// Slot and wrap counter of descriptor `n` of a packed ring.
    pub(super) fn place(&self, n: u16) -> u16 {
        (n % self.size) | if (n / self.size).is_multiple_of(2) { WRAP } else { 0 }
    }

    /// Buffers that were offered but not taken by a device that stopped at `end`.
    pub(super) fn untaken(&self, end: u16) -> usize {
        if !self.packed {
            return usize::from(self.next_available.wrapping_sub(end));
        }
        let behind = (0..=self.size).find(|n| self.place(self.next_available.wrapping_sub(*n)) == end);
        let (mut descriptors, mut buffers) = (behind.expect("not further than the ring"), 0);
        while descriptors > 0 {
            buffers += 1;
            descriptors -= self.offered[self.offered.len() - buffers];
        }
        buffers
    }

    pub(super) fn spec(&self, base: u16) -> RingSpec {
        let user = |guest: u64| guest - GUEST + USER;
        RingSpec {
            size: self.size,
            descriptors: user(self.descriptors),
            available: user(self.available),
            used: user(self.used),
            base,
            event_idx: self.event_idx,
            log: None,
            used_in_log: None,
            call: Arc::clone(&self.notify),
            record: self.inflight.then(|| self.record()),
        }
    }

    pub(super) fn read16(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        assert!(self.memory.read(at, &mut bytes));
        u16::from_le_bytes(bytes)
    }

    pub(super) fn write16(&self, at: u64, value: u16) {
        assert!(self.memory.write(at, &value.to_le_bytes()));
    }

    /// Writes descriptors for a buffer and makes it available; `None`: too few are free.
    pub(super) fn add(&mut self, pieces: &[(u64, u32)], flags: u16) -> Option<u16> {
        if pieces.is_empty() || self.free.len() < pieces.len() {
            return None;
        }
        let taken: Vec<u16> = self.free.drain(..pieces.len()).collect();
        let head = taken[0];
        self.pieces.insert(head, pieces.to_vec());
        if self.packed {
            self.chains.insert(head, taken);
            self.add_packed(head, pieces, flags);
            return Some(head);
        }
        for (i, (at, len)) in pieces.iter().enumerate() {
            let next = taken.get(i + 1).copied();
            let more = if next.is_some() { F_NEXT } else { 0 };
            self.descriptor(taken[i], *at, *len, flags | more, next.unwrap_or(0));
        }
        self.chains.insert(head, taken);
        self.offer(head);
        Some(head)
    }

    /// Makes a buffer available in the next slots of a packed ring, its first descriptor last.
    pub(super) fn add_packed(&mut self, id: u16, pieces: &[(u64, u32)], flags: u16) {
        for (i, (at, len)) in pieces.iter().enumerate().rev() {
            let (slot, flag) = self.available_at(self.next_available.wrapping_add(i as u16));
            let (more, id) = if i + 1 < pieces.len() { (F_NEXT, 0xdead) } else { (0, id) };
            self.descriptor(slot, *at, *len, id, flags | more | flag);
        }
        self.next_available = self.next_available.wrapping_add(pieces.len() as u16);
        self.offered.push(pieces.len() as u16);
    }

    /// The slot of a packed ring's descriptor `n`, and its flags for available.
    pub(super) fn available_at(&self, n: u16) -> (u16, u16) {
        let place = self.place(n);
        (place & !WRAP, if place & WRAP == 0 { F_USED } else { F_AVAILABLE })
    }

    pub(super) fn descriptor(&self, index: u16, at: u64, len: u32, flags: u16, next: u16) {
        write_descriptor(&self.memory, self.descriptors + 16 * u64::from(index), at, len, flags, next);
    }

    /// Puts any head into the available ring.
    pub(super) fn offer(&mut self, head: u16) {
        self.write16(self.available + 4 + 2 * u64::from(self.next_available % self.size), head);
        self.next_available = self.next_available.wrapping_add(1);
        self.write16(self.available + 2, self.next_available);
    }

    /// Disables notifications.
    pub(super) fn silence(&self) {
        self.write16(if self.packed { self.available + 2 } else { self.available }, 1);
    }

    /// Requests a notification of the next used buffer.
    pub(super) fn arm(&self) {
        if self.packed {
            self.write16(self.available, self.place(self.next_used));
            return self.write16(self.available + 2, if self.event_idx { 2 } else { 0 });
        }
        self.write16(self.available + 4 + 2 * u64::from(self.size), self.next_used);
        self.write16(self.available, 0);
    }

    /// Whether the device requests a kick for buffers added since `old`.
    pub(super) fn kick_wanted(&self, old: u16) -> bool {
        if self.packed {
            let (event, flags) = (self.read16(self.used), self.read16(self.used + 2));
            let mut added = (0..self.next_available.wrapping_sub(old)).map(|i| self.place(old.wrapping_add(i)));
            return flags == 0 || flags == 2 && added.any(|place| place == event);
        }
        if self.event_idx {
            let event = self.read16(self.used + 4 + 8 * u64::from(self.size));
            self.next_available.wrapping_sub(event).wrapping_sub(1) < self.next_available.wrapping_sub(old)
        } else {
            self.read16(self.used) & 1 == 0
        }
    }

    /// Reads a used buffer: its head and the bytes written.
    pub(super) fn reap(&mut self) -> Option<(u16, u32)> {
        if self.packed {
            return self.reap_packed();
        }
        if self.read16(self.used + 2) == self.next_used {
            return None;
        }
        let at = self.used + 4 + 8 * u64::from(self.next_used % self.size);
        let mut entry = [0; 8];
        assert!(self.memory.read(at, &mut entry));
        self.next_used = self.next_used.wrapping_add(1);
        let head = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]) as u16;
        let len = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        let descriptors = self.chains.remove(&head).expect("the device held the used buffer");
        self.free.extend(descriptors);
        Some((head, len))
    }

    fn reap_packed(&mut self) -> Option<(u16, u32)> {
        let place = self.place(self.next_used);
        let mut entry = [0; 16];
        assert!(self.memory.read(self.descriptors + 16 * u64::from(place & !WRAP), &mut entry));
        let bits = u128::from_le_bytes(entry);
        let (len, head, flags) = ((bits >> 64) as u32, (bits >> 96) as u16, (bits >> 112) as u16);
        let is = |flag: u16| (flags & flag != 0) == (place & WRAP != 0);
        if !is(F_AVAILABLE) || !is(F_USED) {
            return None;
        }
        assert_eq!(flags & F_WRITE != 0, len > 0, "whether something was written");
        let descriptors = self.chains.remove(&head).expect("the device held the used buffer");
        self.next_used = self.next_used.wrapping_add(descriptors.len() as u16);
        self.free.extend(descriptors);
        Some((head, len))
    }

    /// Reads a used buffer with its contents.
    fn reap_bytes(&mut self) -> Option<Vec<u8>> {
        let (head, len) = self.reap()?;
        let mut out = Vec::new();
        for (at, size) in self.pieces[&head].clone() {
            let take = (len as usize - out.len()).min(size as usize);
            assert!(self.memory.append(at, take, &mut out));
        }
        Some(out)
    }

    /// Notifications since the last call.
    pub(super) fn calls(&self) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(&self.call, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }
}

impl Ends {
    pub(super) fn get(&self) -> (u32, u32) {
        let load = |n: &AtomicU32| n.load(std::sync::atomic::Ordering::Acquire);
        (load(&self.receive), load(&self.transmit))
    }
}

fn write_descriptor(memory: &Memory, at: u64, guest: u64, len: u32, flags: u16, next: u16) {
    let bits = u128::from(guest) | u128::from(len) << 64 | u128::from(flags) << 96 | u128::from(next) << 112;
    assert!(memory.write(at, &bits.to_le_bytes()));
}
