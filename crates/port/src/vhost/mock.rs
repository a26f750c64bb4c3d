//! The driver's side, for tests: a guest that does as it is told, right or wrong.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use bifrost_wire::virtio_net::Header;
use rustix::event::{EventfdFlags, eventfd};

use super::inflight::{self, Inflight};
use super::memory::{Memory, RegionSpec};
use super::queue::{Ends, QueueSpec, VhostQueue};
use super::split::{Call, RingSpec};

/// Where the guest's memory starts for the guest, and for its front-end.
pub(super) const GUEST: u64 = 0x4000_0000;
pub(super) const USER: u64 = 0x7f00_0000_0000;
/// Bytes of memory.
pub(super) const MEMORY: u64 = 16 << 20;
pub(super) const F_NEXT: u16 = 1;
pub(super) const F_WRITE: u16 = 2;
pub(super) const F_INDIRECT: u16 = 4;

/// What a driver is to be like.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) size: u16,
    pub(super) event_idx: bool,
    pub(super) mergeable: bool,
}

/// A guest with one queue pair.
pub(super) struct Guest {
    pub(super) kind: Kind,
    pub(super) file: File,
    pub(super) memory: Arc<Memory>,
    pub(super) rx: Side,
    pub(super) tx: Side,
    pub(super) ends: Arc<Ends>,
    /// Whether the device has to give transmit buffers back in order.
    pub(super) in_order: bool,
    /// The next free byte for buffers.
    free: u64,
}

/// The driver's side of a ring.
pub(super) struct Side {
    memory: Arc<Memory>,
    pub(super) size: u16,
    event_idx: bool,
    /// Guest addresses.
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    pub(super) next_available: u16,
    pub(super) next_used: u16,
    free: VecDeque<u16>,
    /// Descriptors of each buffer that the device has.
    pub(super) chains: HashMap<u16, Vec<u16>>,
    pub(super) call: OwnedFd,
    notify: Arc<Call>,
    /// Whether the device is to note what is in flight.
    pub(super) inflight: bool,
}

impl Guest {
    pub(super) fn new(kind: Kind) -> Guest {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(MEMORY).expect("its size");
        let mut memory = Memory::default();
        let copy = file.try_clone().expect("another descriptor");
        memory.add(RegionSpec { guest: GUEST, user: USER, size: MEMORY, offset: 0, file: copy }).expect("memory");
        let memory = Arc::new(memory);
        let rx = Side::new(&memory, kind, GUEST);
        let tx = Side::new(&memory, kind, GUEST + (2 << 20));
        Guest { kind, file, rx, tx, memory, ends: Arc::new(Ends::default()), in_order: false, free: GUEST + (4 << 20) }
    }

    /// The device, from where the rings are.
    pub(super) fn queue(&self) -> VhostQueue {
        self.queue_from(self.rx_base(), self.tx_base())
    }

    fn rx_base(&self) -> u16 {
        self.rx.read16(self.rx.used + 2)
    }

    fn tx_base(&self) -> u16 {
        self.tx.read16(self.tx.used + 2)
    }

    pub(super) fn queue_from(&self, receive: u16, transmit: u16) -> VhostQueue {
        VhostQueue::new(QueueSpec {
            memory: Arc::clone(&self.memory),
            receive: self.rx.spec(receive),
            transmit: self.tx.spec(transmit),
            kick: Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("an eventfd")),
            in_order: self.in_order,
            mergeable: self.kind.mergeable,
            guest_checksum: true,
            max_frame: 9018,
            ends: Arc::clone(&self.ends),
        })
        .expect("rings are in memory")
    }

    /// Memory for a buffer; old buffers are overwritten sooner or later.
    pub(super) fn allocate(&mut self, len: u64) -> u64 {
        if self.free + len > GUEST + MEMORY {
            self.free = GUEST + (4 << 20);
        }
        let at = self.free;
        self.free += len.next_multiple_of(64);
        at
    }

    /// Sends a frame in pieces of these sizes; the rest is one more. Returns its head.
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
                let more = if i + 1 < chain.len() { F_NEXT } else { 0 };
                write_descriptor(&self.memory, table + 16 * i as u64, *at, *len, more, i as u16 + 1);
            }
            return self.tx.add(&[(table, 16 * chain.len() as u32)], F_INDIRECT);
        }
        self.tx.add(&chain, 0)
    }

    /// Adds receive buffers of these sizes until the ring is full; returns how many.
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

    /// Takes one whole received packet, as Linux does: the header's buffers, one after the other.
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

impl Side {
    fn new(memory: &Arc<Memory>, kind: Kind, at: u64) -> Side {
        let call = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("an eventfd");
        Side {
            memory: Arc::clone(memory),
            size: kind.size,
            event_idx: kind.event_idx,
            descriptors: at,
            available: at + (1 << 19),
            used: at + (1 << 20),
            next_available: 0,
            next_used: 0,
            free: (0..kind.size).collect(),
            chains: HashMap::new(),
            notify: {
                let notify = Call::default();
                notify.set(Some(call.try_clone().expect("another descriptor")));
                Arc::new(notify)
            },
            call,
            inflight: false,
        }
    }

    /// The record lies in the guest's memory here, which is as good as any other.
    fn open_inflight(&self) -> Inflight {
        let user = self.used + (1 << 19) - GUEST + USER;
        let area = Memory::area(&self.memory, user, inflight::bytes(self.size), 8).expect("memory");
        Inflight::new(area, self.size)
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
            call: Arc::clone(&self.notify),
            inflight: self.inflight.then(|| self.open_inflight()),
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
        for (i, (at, len)) in pieces.iter().enumerate() {
            let next = taken.get(i + 1).copied();
            let more = if next.is_some() { F_NEXT } else { 0 };
            self.descriptor(taken[i], *at, *len, flags | more, next.unwrap_or(0));
        }
        let head = taken[0];
        self.chains.insert(head, taken);
        self.offer(head);
        Some(head)
    }

    pub(super) fn descriptor(&self, index: u16, at: u64, len: u32, flags: u16, next: u16) {
        write_descriptor(&self.memory, self.descriptors + 16 * u64::from(index), at, len, flags, next);
    }

    /// Puts a head into the available ring, whatever it is.
    pub(super) fn offer(&mut self, head: u16) {
        self.write16(self.available + 4 + 2 * u64::from(self.next_available % self.size), head);
        self.next_available = self.next_available.wrapping_add(1);
        self.write16(self.available + 2, self.next_available);
    }

    /// Asks to be notified of the next used buffer.
    pub(super) fn arm(&self) {
        self.write16(self.available + 4 + 2 * u64::from(self.size), self.next_used);
        self.write16(self.available, 0);
    }

    /// Whether the device wants to be told of buffers added since `old`.
    pub(super) fn kick_wanted(&self, old: u16) -> bool {
        if self.event_idx {
            let event = self.read16(self.used + 4 + 8 * u64::from(self.size));
            self.next_available.wrapping_sub(event).wrapping_sub(1) < self.next_available.wrapping_sub(old)
        } else {
            self.read16(self.used) & 1 == 0
        }
    }

    /// Takes a used buffer back: its head and the bytes written.
    pub(super) fn reap(&mut self) -> Option<(u16, u32)> {
        if self.read16(self.used + 2) == self.next_used {
            return None;
        }
        let at = self.used + 4 + 8 * u64::from(self.next_used % self.size);
        let mut entry = [0; 8];
        assert!(self.memory.read(at, &mut entry));
        self.next_used = self.next_used.wrapping_add(1);
        let head = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]) as u16;
        let len = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        let descriptors = self.chains.remove(&head).expect("a used buffer was the device's");
        self.free.extend(descriptors);
        Some((head, len))
    }

    /// Takes a used buffer back with what was written to it.
    fn reap_bytes(&mut self) -> Option<Vec<u8>> {
        let chain = |this: &Self, head: u16| this.chains.get(&head).cloned().unwrap_or_default();
        let before: HashMap<u16, Vec<u16>> = self.chains.keys().map(|h| (*h, chain(self, *h))).collect();
        let (head, len) = self.reap()?;
        let mut out = Vec::new();
        for index in &before[&head] {
            let mut d = [0; 16];
            assert!(self.memory.read(self.descriptors + 16 * u64::from(*index), &mut d));
            let (at, size) = (u128::from_le_bytes(d) as u64, (u128::from_le_bytes(d) >> 64) as u32);
            let take = (len as usize - out.len()).min(size as usize);
            assert!(self.memory.append(at, take, &mut out));
        }
        Some(out)
    }

    /// Notifications since the last question.
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
