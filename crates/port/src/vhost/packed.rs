//! A packed virtqueue, the device's side (virtio 1.3, section 2.8): one ring of descriptors in which the driver's available
//! buffers and the device's used ones follow each other, told apart by two flags and by how often the ring has wrapped.
//!
//! Used descriptors overwrite the ring's entries in any order of buffers, so what a buffer consists of is kept here by its
//! id from the moment it is taken. Ids are the driver's choice; here they must be below the ring's size, as they are
//! with every driver known.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::chain::{DESCRIPTOR, Descriptor, F_INDIRECT, F_NEXT, F_WRITE, Pieces};
use super::memory::{Area, Memory};
use super::packed_inflight::PackedInflight;
use super::ring::{BadChain, Broken, Call, MAX_SIZE, Piece, Ring, RingSpec, WRAP};

const F_AVAILABLE: u16 = 1 << 7;
const F_USED: u16 = 1 << 15;

/// In the descriptor's second half: id and flags.
const AT_ID: u32 = 32;
const AT_FLAGS: u32 = 48;

/// Event suppression structure (virtio 1.3, section 2.8.10): bytes, and what its flags say.
const EVENT: usize = 4;
const ENABLE: u32 = 0;
const DISABLE: u32 = 1;
/// Notify when the descriptor named in the other half is reached.
const AT_POSITION: u32 = 2;

/// No descriptor.
const NONE: u16 = u16::MAX;

/// A place in the ring, and the wrap counter there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) slot: u16,
    pub(super) wrap: bool,
}

impl Position {
    /// Where a new ring begins.
    pub(super) const START: Position = Position { slot: 0, wrap: true };

    /// `count` descriptors further, at most once around.
    #[inline]
    pub(super) fn after(self, count: u16, size: u16) -> Position {
        let slot = self.slot + count;
        if slot < size { Position { slot, ..self } } else { Position { slot: slot - size, wrap: !self.wrap } }
    }

    /// Whether a descriptor here with these flags is a used one.
    pub(super) fn is_used(self, flags: u16) -> bool {
        (flags & F_AVAILABLE != 0) == self.wrap && (flags & F_USED != 0) == self.wrap
    }

    #[inline]
    fn is_available(self, flags: u16) -> bool {
        (flags & F_AVAILABLE != 0) == self.wrap && (flags & F_USED != 0) != self.wrap
    }

    /// As a front-end and the event suppression structures have it.
    #[inline]
    fn to_bits(self) -> u16 {
        self.slot | if self.wrap { WRAP } else { 0 }
    }

    fn from_bits(bits: u16) -> Position {
        Position { slot: bits & !WRAP, wrap: bits & WRAP != 0 }
    }
}

/// A buffer that was taken and has not been given back; none if `count` is 0.
#[derive(Clone, Debug, Default)]
struct Taken {
    /// Descriptors in the ring.
    count: u16,
    /// Where the last of them is, or [`NONE`].
    last: u16,
    first: Descriptor,
    /// The other descriptors.
    rest: Vec<Descriptor>,
}

/// The device's side of a packed ring.
#[derive(Debug)]
pub(crate) struct Packed {
    memory: Arc<Memory>,
    ring: Area,
    /// When the driver wants to be notified.
    driver_event: Area,
    /// When the device does.
    device_event: Area,
    call: Arc<Call>,
    inflight: Option<PackedInflight>,
    recovered: Vec<u16>,
    size: u16,
    event_idx: bool,
    /// The next descriptor to take.
    available: Position,
    /// Where the next used descriptor goes.
    used: Position,
    /// Up to where the driver sees used descriptors.
    shown: Position,
    /// The used descriptor at `shown`, which is written last: the driver goes by its flags.
    unshown: Option<u64>,
    /// Descriptors of all buffers that were taken and not given back.
    held: u16,
    /// By id.
    buffers: Vec<Taken>,
    /// By slot: the buffer whose last descriptor was taken there.
    takers: Vec<u16>,
    scratch: Vec<Descriptor>,
    /// The driver is asked for notifications.
    kicks: bool,
}

impl Packed {
    /// A descriptor of the ring and its id. Acquire: what it stands for is read after its flags.
    #[inline]
    fn read(&self, slot: u16) -> (Descriptor, u16) {
        let at = DESCRIPTOR * usize::from(slot);
        let rest = u64::from_le(self.ring.load(at + 8, Ordering::Acquire));
        let guest = u64::from_le(self.ring.load(at, Ordering::Relaxed));
        (Descriptor { guest, len: rest as u32, flags: (rest >> AT_FLAGS) as u16 }, (rest >> AT_ID) as u16)
    }

    /// The driver's flags of unfinished buffers back where a batch was being written that was never shown, and where a
    /// front-end gave back, out of turn, what was not yet taken: that comes as an empty buffer, and goes back in its turn.
    /// Such may lie anywhere, behind what is yet to be taken, too; used descriptors of the former lap have the other wrap counter.
    fn scrub(&self) {
        let mut at = self.used;
        for _ in 0..self.size {
            let place = DESCRIPTOR * usize::from(at.slot) + 14;
            let flags = u16::from_le(self.ring.load(place, Ordering::Relaxed));
            if at.is_used(flags) {
                self.ring.store(place, (flags ^ F_USED).to_le(), Ordering::Relaxed);
            }
            at = at.after(1, self.size);
        }
    }

    /// Whether the driver has asked to be notified of what was shown from `old` on.
    #[inline]
    fn is_notification_wanted(&self, old: Position) -> bool {
        let event = u32::from_le(self.driver_event.load(0, Ordering::Relaxed));
        match event >> 16 & 3 {
            DISABLE => false,
            AT_POSITION if self.event_idx => {
                let size = i32::from(self.size);
                let new = i32::from(self.used.slot);
                let old = i32::from(old.slot) - if i32::from(old.slot) >= new { size } else { 0 };
                let wanted = Position::from_bits(event as u16);
                let event = i32::from(wanted.slot) - if wanted.wrap == self.used.wrap { 0 } else { size };
                (old..new).contains(&event)
            }
            _ => true,
        }
    }

    fn is_something_available(&self) -> bool {
        self.available.is_available(self.read(self.available.slot).0.flags)
    }
}

impl Ring for Packed {
    fn open(memory: &Arc<Memory>, spec: RingSpec) -> Option<Packed> {
        let size = spec.size;
        let mut base = Position::from_bits(spec.base);
        if !(1..=MAX_SIZE).contains(&size) || base.slot >= size {
            return None;
        }
        let area = |user, len, align| Memory::area(memory, user, len, align);
        let ring = area(spec.descriptors, DESCRIPTOR * usize::from(size), 16)?;
        // User-mode Linux gives no wrap counter; nothing is in its ring when it does.
        if spec.base == 0 && (0..DESCRIPTOR / 8).all(|i| ring.load::<u64>(8 * i, Ordering::Relaxed) == 0) {
            base = Position::START;
        }
        let mut inflight = spec.record.map(|area| PackedInflight::new(area, size));
        let found = inflight.as_mut().and_then(|inflight| inflight.recover(&ring, base));
        let used = found.as_ref().map_or(base, |found| found.used);
        let (mut buffers, mut recovered, mut held) = (vec![Taken::default(); usize::from(size)], Vec::new(), 0);
        for (id, mut chain) in found.map(|found| found.buffers).unwrap_or_default() {
            let first = chain.remove(0);
            let count = chain.len() as u16 + 1;
            held += count;
            buffers[usize::from(id)] = Taken { count, last: NONE, first, rest: chain };
            recovered.push(id);
        }
        let packed = Packed {
            ring,
            driver_event: area(spec.available, EVENT, 4)?,
            device_event: area(spec.used, EVENT, 4)?,
            memory: Arc::clone(memory),
            call: spec.call,
            inflight,
            recovered,
            size,
            event_idx: spec.event_idx,
            // Each that was taken came back, or is in flight.
            available: used.after(held, size),
            used,
            shown: used,
            unshown: None,
            held,
            buffers,
            takers: vec![NONE; usize::from(size)],
            scratch: Vec::new(),
            kicks: true,
        };
        packed.scrub();
        // Whoever had the ring before may have asked for silence.
        packed.device_event.store(0, ENABLE << 16, Ordering::Relaxed);
        Some(packed)
    }

    #[inline]
    fn size(&self) -> u16 {
        self.size
    }

    #[inline]
    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn base(&self) -> u16 {
        self.available.to_bits()
    }

    fn take_recovered(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.recovered)
    }

    fn last_taken(&self) -> Option<u16> {
        let slot = if self.available.slot == 0 { self.size - 1 } else { self.available.slot - 1 };
        let id = self.takers[usize::from(slot)];
        // No used descriptor has overwritten it: there are fewer of them than descriptors that came back.
        self.buffers.get(usize::from(id)).filter(|b| b.count > 0 && b.last == slot).map(|_| id)
    }

    fn untake_last(&mut self, head: u16) {
        let Some(count) = self.buffers.get_mut(usize::from(head)).map(|b| std::mem::take(&mut b.count)) else { return };
        self.held -= count;
        let Position { slot, wrap } = self.available;
        self.available = if slot >= count {
            Position { slot: slot - count, wrap }
        } else {
            Position { slot: slot + (self.size - count), wrap: !wrap }
        };
        if let Some(inflight) = &mut self.inflight {
            inflight.untake(head);
        }
    }

    #[inline]
    fn pop(&mut self) -> Result<Option<u16>, Broken> {
        let (first, mut id) = self.read(self.available.slot);
        if !self.available.is_available(first.flags) {
            return Ok(None);
        }
        let room = self.size - self.held;
        let (mut count, mut last, mut flags) = (1, self.available.slot, first.flags);
        self.scratch.clear();
        // The driver makes the first descriptor available last. The chain's last one has its id.
        while flags & F_NEXT != 0 && count < room {
            last = if last + 1 == self.size { 0 } else { last + 1 };
            let (next, next_id) = self.read(last);
            self.scratch.push(next);
            (id, flags) = (next_id, next.flags);
            count += 1;
        }
        if room == 0 || flags & F_NEXT != 0 {
            return Err(Broken::AvailableIndex);
        }
        let buffer = self.buffers.get_mut(usize::from(id)).ok_or(Broken::Head)?;
        if buffer.count != 0 {
            return Err(Broken::Twice);
        }
        (buffer.count, buffer.last, buffer.first) = (count, last, first);
        std::mem::swap(&mut buffer.rest, &mut self.scratch);
        if let Some(inflight) = &mut self.inflight {
            inflight.take(id, first, &buffer.rest);
        }
        self.takers[usize::from(last)] = id;
        self.held += count;
        self.available = self.available.after(count, self.size);
        Ok(Some(id))
    }

    #[inline]
    fn chain(&self, head: u16, writable: bool, limit: u32, out: &mut Vec<Piece>) -> Result<u32, BadChain> {
        let mut pieces = Pieces::new(&self.memory, writable, limit, out);
        let buffer = self.buffers.get(usize::from(head)).filter(|b| b.count > 0).ok_or(BadChain::Link)?;
        if buffer.first.flags & F_INDIRECT == 0 {
            pieces.add(buffer.first)?;
            for descriptor in &buffer.rest {
                pieces.add(*descriptor)?;
            }
            return Ok(pieces.total());
        }
        if buffer.count > 1 {
            return Err(BadChain::Indirect);
        }
        // All entries, one after the other; of their flags, only these two mean something.
        for i in 0..buffer.first.table_entries()? {
            let bits = buffer.first.table_entry(&self.memory, i as u16).ok_or(BadChain::Address)?;
            let flags = (bits >> (64 + AT_FLAGS)) as u16 & (F_WRITE | F_INDIRECT);
            pieces.add(Descriptor { guest: bits as u64, len: (bits >> 64) as u32, flags })?;
        }
        Ok(pieces.total())
    }

    #[inline]
    fn push_used(&mut self, head: u16, len: u32) {
        let Some(buffer) = self.buffers.get_mut(usize::from(head)) else { return };
        let count = std::mem::take(&mut buffer.count);
        if count == 0 {
            return;
        }
        let written = if len > 0 { F_WRITE } else { 0 };
        let flags = if self.used.wrap { F_AVAILABLE | F_USED | written } else { written };
        let bits = u64::from(len) | u64::from(head) << AT_ID | u64::from(flags) << AT_FLAGS;
        if self.used == self.shown && self.unshown.is_none() {
            self.unshown = Some(bits);
        } else {
            self.ring.store(DESCRIPTOR * usize::from(self.used.slot) + 8, bits.to_le(), Ordering::Relaxed);
        }
        // As many are skipped as the buffer had.
        self.used = self.used.after(count, self.size);
        self.held -= count;
        if let Some(inflight) = &mut self.inflight {
            inflight.put(head);
        }
    }

    #[inline]
    fn has_unshown(&self) -> bool {
        self.unshown.is_some()
    }

    fn show(&mut self) -> bool {
        let Some(bits) = self.unshown.take() else { return false };
        if let Some(inflight) = &mut self.inflight {
            inflight.before_show(self.used);
        }
        // Release: whoever sees the batch's first descriptor used sees the others, and what was written to the buffers.
        self.ring.store(DESCRIPTOR * usize::from(self.shown.slot) + 8, bits.to_le(), Ordering::Release);
        if let Some(inflight) = &mut self.inflight {
            inflight.after_show();
        }
        let old = std::mem::replace(&mut self.shown, self.used);
        // The driver asks for notifications and then looks at the ring; here it is the other way round.
        fence(Ordering::SeqCst);
        let wanted = self.is_notification_wanted(old);
        if wanted {
            self.call.notify();
        }
        wanted
    }

    fn ask_for_kicks(&mut self) -> Result<bool, Broken> {
        if self.event_idx {
            let event = u32::from(self.available.to_bits()) | AT_POSITION << 16;
            self.device_event.store(0, event.to_le(), Ordering::Relaxed);
        } else if !self.kicks {
            self.device_event.store(0, (ENABLE << 16).to_le(), Ordering::Relaxed);
        }
        self.kicks = true;
        fence(Ordering::SeqCst);
        Ok(self.is_something_available())
    }

    fn ask_for_silence(&mut self) {
        // With event indexes, the one asked for last is enough: it lies behind, and nothing moves it.
        if self.kicks && !self.event_idx {
            self.device_event.store(0, (DISABLE << 16).to_le(), Ordering::Relaxed);
        }
        self.kicks = false;
    }
}
