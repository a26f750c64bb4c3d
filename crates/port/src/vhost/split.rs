//! A split virtqueue, the device's side (virtio 1.3, section 2.7): indexes, descriptors, used entries, notifications.
//!
//! The driver may write anything at any time. Every value is read once and checked; a driver that breaks the rules of the
//! ring itself has it taken out of use ([`Broken`]), one that only describes a bad buffer loses the packet.

use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use super::inflight::Inflight;
use super::memory::{Area, Memory};

/// Largest ring (virtio 1.3, section 2.7).
pub(crate) const MAX_SIZE: u16 = 32_768;
/// Most pieces of a buffer, whatever the ring's size: no driver for network cards comes near.
const MAX_PIECES: usize = 1024;

/// Bytes of a descriptor: address u64, length u32, flags u16, next u16.
const DESCRIPTOR: usize = 16;
const F_NEXT: u16 = 1;
const F_WRITE: u16 = 2;
const F_INDIRECT: u16 = 4;
/// In the available ring: the driver wants no notifications.
const NO_INTERRUPT: u16 = 1;
/// In the used ring: the device wants none.
const NO_NOTIFY: u16 = 1;

/// Where a ring is, and what was agreed on.
#[derive(Debug)]
pub(crate) struct RingSpec {
    /// Descriptors, a power of two.
    pub(crate) size: u16,
    /// Address of the descriptor table in the front-end's process.
    pub(crate) descriptors: u64,
    /// Of the available ring.
    pub(crate) available: u64,
    /// Of the used ring.
    pub(crate) used: u64,
    /// The first available entry to take.
    pub(crate) base: u16,
    /// `VIRTIO_F_EVENT_IDX`.
    pub(crate) event_idx: bool,
    /// Tells the driver of used buffers.
    pub(crate) call: Arc<Call>,
    /// Where to note what is in flight.
    pub(crate) inflight: Option<Inflight>,
}

/// What tells the driver of used buffers; the front-end may replace it at any time.
#[derive(Debug, Default)]
pub(crate) struct Call(Mutex<Option<OwnedFd>>);

impl Call {
    pub(crate) fn set(&self, fd: Option<OwnedFd>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = fd;
    }

    /// A full pipe or counter has told the driver already: the result does not matter.
    pub(crate) fn notify(&self) {
        if let Some(fd) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }
}

/// A piece of a buffer in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) guest: u64,
    pub(crate) len: u32,
}

/// How the driver broke the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    #[error("its driver offers more buffers than the ring has")]
    AvailableIndex,
    #[error("its driver offers a descriptor that the ring does not have")]
    Head,
    #[error("its driver offers a buffer that it has not got back")]
    Twice,
    #[error("the file of its guest's memory was cut")]
    Memory,
}

/// What is wrong with one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BadChain {
    /// Its chain has no end, or a link out of the table.
    Link,
    /// An indirect table of impossible size, or within another one, or with something behind it.
    Indirect,
    /// To be written where it was to be read, or the other way round.
    Direction,
    /// Not in the guest's memory.
    Address,
    /// Longer than a packet can be.
    Length,
}

#[derive(Clone, Copy)]
struct Descriptor {
    guest: u64,
    len: u32,
    flags: u16,
    next: u16,
}

/// The device's side of a ring.
#[derive(Debug)]
pub(crate) struct Ring {
    memory: Arc<Memory>,
    descriptors: Area,
    available: Area,
    used: Area,
    call: Arc<Call>,
    inflight: Option<Inflight>,
    /// What an earlier life of this daemon had taken, in that order.
    recovered: Vec<u16>,
    size: u16,
    event_idx: bool,
    /// The next available entry to take.
    next_available: u16,
    /// Up to where available entries are known to be.
    seen_available: u16,
    /// Where the next used entry goes.
    next_used: u16,
    /// Up to where the driver sees used entries.
    shown_used: u16,
    /// The driver is asked for notifications.
    kicks: bool,
}

impl Ring {
    /// `None`: a size that is none, or tables that are not memory.
    pub(crate) fn new(memory: &Arc<Memory>, mut spec: RingSpec) -> Option<Ring> {
        if !spec.size.is_power_of_two() || spec.size > MAX_SIZE {
            return None;
        }
        let n = usize::from(spec.size);
        let area = |user, len, align| Memory::area(memory, user, len, align);
        let used = area(spec.used, 6 + 8 * n, 4)?;
        let next_used = u16::from_le(used.load(2, Ordering::Acquire));
        // Whoever had the ring before may have asked for silence.
        used.store(0, 0u16, Ordering::Relaxed);
        let recovered = spec.inflight.as_mut().map(|i| i.recover(next_used)).unwrap_or_default();
        // Buffers are taken in the ring's order: each that was taken came back, or is in flight.
        let base = if recovered.is_empty() { spec.base } else { next_used.wrapping_add(recovered.len() as u16) };
        Some(Ring {
            descriptors: area(spec.descriptors, DESCRIPTOR * n, 16)?,
            available: area(spec.available, 6 + 2 * n, 2)?,
            used,
            memory: Arc::clone(memory),
            call: spec.call,
            inflight: spec.inflight,
            recovered,
            size: spec.size,
            event_idx: spec.event_idx,
            next_available: base,
            seen_available: base,
            next_used,
            shown_used: next_used,
            kicks: true,
        })
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The next available entry that was not taken.
    pub(crate) fn base(&self) -> u16 {
        self.next_available
    }

    /// Buffers that an earlier life of this daemon has left behind, in the order in which they were taken.
    pub(crate) fn take_recovered(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.recovered)
    }

    /// The buffer that was taken last, by the available ring, which the driver may have changed since.
    pub(crate) fn last_taken(&self) -> u16 {
        self.entry(self.next_available.wrapping_sub(1))
    }

    /// The buffer that was taken last was not taken after all.
    pub(crate) fn untake_last(&mut self, head: u16) {
        self.next_available = self.next_available.wrapping_sub(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.untake(head);
        }
    }

    /// Takes the next buffer, by the descriptor that it starts with.
    #[inline]
    pub(crate) fn pop(&mut self) -> Result<Option<u16>, Broken> {
        if self.next_available == self.seen_available && !self.look()? {
            return Ok(None);
        }
        let head = self.entry(self.next_available);
        if head >= self.size {
            return Err(Broken::Head);
        }
        self.next_available = self.next_available.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.take(head);
        }
        Ok(Some(head))
    }

    /// Whether there is something to take, by the driver's index.
    fn look(&mut self) -> Result<bool, Broken> {
        // Acquire: the entries and descriptors that this index stands for are read after it.
        let index = u16::from_le(self.available.load(2, Ordering::Acquire));
        let there = index.wrapping_sub(self.next_available);
        if there > self.size {
            return Err(Broken::AvailableIndex);
        }
        self.seen_available = index;
        Ok(there > 0)
    }

    #[inline]
    fn entry(&self, index: u16) -> u16 {
        u16::from_le(self.available.load(4 + 2 * usize::from(index & (self.size - 1)), Ordering::Relaxed))
    }

    /// Collects the pieces of the buffer that starts at `head`, all of them `writable` or all not, all in the guest's
    /// memory, `limit` bytes at most. Returns the bytes.
    pub(crate) fn chain(&self, head: u16, writable: bool, limit: u32, out: &mut Vec<Piece>) -> Result<u32, BadChain> {
        out.clear();
        let first = self.descriptor(head).ok_or(BadChain::Link)?;
        if first.flags & F_INDIRECT == 0 {
            return self.collect(first, u32::from(self.size), |i| self.descriptor(i), writable, limit, out);
        }
        let entries = first.len / DESCRIPTOR as u32;
        if first.flags & F_NEXT != 0
            || !first.len.is_multiple_of(DESCRIPTOR as u32)
            || !(1..=u32::from(u16::MAX)).contains(&entries)
        {
            return Err(BadChain::Indirect);
        }
        let table = |i: u16| -> Option<Descriptor> {
            let at = first.guest.checked_add(u64::from(i) * DESCRIPTOR as u64)?;
            let mut bytes = [0; DESCRIPTOR];
            (u32::from(i) < entries && self.memory.read(at, &mut bytes)).then(|| Descriptor::parse(bytes))
        };
        let first = table(0).ok_or(BadChain::Address)?;
        self.collect(first, entries, table, writable, limit, out)
    }

    fn collect(
        &self,
        first: Descriptor,
        entries: u32,
        table: impl Fn(u16) -> Option<Descriptor>,
        writable: bool,
        limit: u32,
        out: &mut Vec<Piece>,
    ) -> Result<u32, BadChain> {
        let (mut at, mut total) = (first, 0u32);
        for _ in 0..entries.min(MAX_PIECES as u32) {
            if at.flags & F_INDIRECT != 0 {
                return Err(BadChain::Indirect);
            }
            if (at.flags & F_WRITE != 0) != writable {
                return Err(BadChain::Direction);
            }
            total = total.checked_add(at.len).filter(|t| *t <= limit).ok_or(BadChain::Length)?;
            if !self.memory.contains(at.guest, u64::from(at.len)) {
                return Err(BadChain::Address);
            }
            if at.len > 0 {
                out.push(Piece { guest: at.guest, len: at.len });
            }
            if at.flags & F_NEXT == 0 {
                return Ok(total);
            }
            at = table(at.next).ok_or(BadChain::Link)?;
        }
        Err(BadChain::Link)
    }

    #[inline]
    fn descriptor(&self, index: u16) -> Option<Descriptor> {
        if index >= self.size {
            return None;
        }
        let at = DESCRIPTOR * usize::from(index);
        let low = u64::from_le(self.descriptors.load(at, Ordering::Relaxed));
        let high = u64::from_le(self.descriptors.load(at + 8, Ordering::Relaxed));
        Some(Descriptor { guest: low, len: high as u32, flags: (high >> 32) as u16, next: (high >> 48) as u16 })
    }

    /// Adds a used entry, which the driver does not see before [`show`](Self::show).
    #[inline]
    pub(crate) fn push_used(&mut self, head: u16, len: u32) {
        let at = 4 + 8 * usize::from(self.next_used & (self.size - 1));
        // Two halves: an entry is only aligned to 4 bytes.
        self.used.store(at, u32::from(head).to_le(), Ordering::Relaxed);
        self.used.store(at + 4, len.to_le(), Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.put(head);
        }
    }

    /// Whether used entries wait to be shown.
    pub(crate) fn has_unshown(&self) -> bool {
        self.next_used != self.shown_used
    }

    /// Shows the driver all used entries at once and notifies it if it wants to know. Returns whether it was notified.
    pub(crate) fn show(&mut self) -> bool {
        let (old, new) = (self.shown_used, self.next_used);
        if old == new {
            return false;
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.before_show();
        }
        // Release: whoever sees the index sees the entries, and what was written to the buffers.
        self.used.store(2, new.to_le(), Ordering::Release);
        if let Some(inflight) = &mut self.inflight {
            inflight.after_show(new);
        }
        self.shown_used = new;
        // The driver asks for notifications and then looks at the index; here it is the other way round.
        fence(Ordering::SeqCst);
        let wanted = if self.event_idx {
            let event = u16::from_le(self.available.load(4 + 2 * usize::from(self.size), Ordering::Relaxed));
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            u16::from_le(self.available.load(0, Ordering::Relaxed)) & NO_INTERRUPT == 0
        };
        if wanted {
            self.call.notify();
        }
        wanted
    }

    /// Asks the driver to notify when it adds buffers. Returns whether there are some already: then it may not notify.
    pub(crate) fn ask_for_kicks(&mut self) -> Result<bool, Broken> {
        if self.event_idx {
            self.used.store(4 + 8 * usize::from(self.size), self.next_available.to_le(), Ordering::Relaxed);
        } else if !self.kicks {
            self.used.store(0, 0u16, Ordering::Relaxed);
        }
        self.kicks = true;
        fence(Ordering::SeqCst);
        self.look()
    }

    /// Asks the driver not to notify, for whoever looks anyway.
    pub(crate) fn ask_for_silence(&mut self) {
        // With event indexes, the one asked for last is enough: it lies behind, and nothing moves it.
        if self.kicks && !self.event_idx {
            self.used.store(0, NO_NOTIFY.to_le(), Ordering::Relaxed);
        }
        self.kicks = false;
    }
}

impl Descriptor {
    fn parse(bytes: [u8; DESCRIPTOR]) -> Self {
        let bits = u128::from_le_bytes(bytes);
        Descriptor {
            guest: bits as u64,
            len: (bits >> 64) as u32,
            flags: (bits >> 96) as u16,
            next: (bits >> 112) as u16,
        }
    }
}
