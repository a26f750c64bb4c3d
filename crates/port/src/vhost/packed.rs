//! A packed virtqueue, the device's side (virtio 1.3, section 2.8): one ring of descriptors with the driver's available
//! buffers and the device's used ones, distinguished by two flags and a wrap counter.
//!
//! Used descriptors overwrite ring entries in any order of buffers, so the descriptors of a taken buffer are kept here
//! by its id. The driver chooses the ids; here they must be below the ring's size, as with all known drivers.
//!
//! The device owns a descriptor from when it is taken until the driver was shown that it is used. The driver, or a
//! buffer that overlaps the ring and that the device itself writes, can make it look available before that;
//! [`Packed::room`] limits how many can be.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::arena::{Arena, List};
use super::call::Call;
use super::chain::{DESCRIPTOR, Descriptor, F_INDIRECT, F_NEXT, F_WRITE, Pieces, max_pieces};
use super::dirty_log::DirtyLog;
use super::index::{Index, Size, Table};
use super::memory::{Area, Memory};
use super::mutation::mutated;
use super::packed_inflight::PackedInflight;
use super::position::{F_AVAILABLE, F_USED, Position};
use super::ring::{BadChain, Broken, Piece, Ring, RingSpec, WRAP, Walk, Want};

/// Bit offsets in the descriptor's second half: id and flags.
const AT_ID: u32 = 32;
const AT_FLAGS: u32 = 48;

/// Event suppression structure (virtio 1.3, section 2.8.10): its length, bytes, and its flags.
const EVENT: usize = 4;
const ENABLE: u32 = 0;
const DISABLE: u32 = 1;
/// Notify when the descriptor in the other half is reached.
const AT_POSITION: u32 = 2;

/// A buffer that was taken and not returned; none if `count` is 0.
#[derive(Clone, Debug, Default)]
struct Taken {
    /// Descriptors in the ring.
    count: u16,
    /// Slot of its last descriptor, if it was taken in this life.
    last: Option<Index>,
    first: Descriptor,
    /// The other descriptors.
    rest: List,
}

/// The device's side of a packed ring.
#[derive(Debug)]
pub(crate) struct Packed {
    memory: Arc<Memory>,
    ring: Area,
    /// When to notify the driver.
    driver_event: Area,
    /// When the driver should notify the device.
    device_event: Area,
    call: Arc<Call>,
    inflight: Option<PackedInflight>,
    log: Option<DirtyLog>,
    /// Addresses of the ring and of the device's event suppression structure in the log.
    ring_in_log: u64,
    event_in_log: u64,
    recovered: Vec<Index>,
    size: Size,
    event_idx: bool,
    /// The next descriptor to take.
    available: Position,
    /// Position of the next used descriptor.
    used: Position,
    /// Position up to which the driver sees used descriptors.
    shown: Position,
    /// The used descriptor at `shown`, which is written last: the driver checks its flags first.
    unshown: Option<u64>,
    /// Descriptors of all buffers taken and not returned.
    held: u16,
    /// Descriptors of the used buffers between `shown` and `used`, which the driver does not own yet.
    unshown_count: u16,
    /// By id.
    buffers: Table<Taken>,
    /// Their descriptors except the first ones.
    rest: Arena,
    /// By slot: the buffer whose last descriptor was taken there.
    takers: Table<Option<Index>>,
    /// Whether the driver is asked for notifications.
    kicks: bool,
}

impl Packed {
    /// A descriptor of the ring and its id. Acquire: the buffer is read after the flags.
    #[inline]
    fn read(&self, slot: Index) -> (Descriptor, u16) {
        let at = slot.at(DESCRIPTOR);
        let rest = u64::from_le(self.ring.load(at + 8, Ordering::Acquire));
        let guest = u64::from_le(self.ring.load(at, Ordering::Relaxed));
        (Descriptor { guest, len: rest as u32, flags: (rest >> AT_FLAGS) as u16 }, (rest >> AT_ID) as u16)
    }

    /// Maximum number of descriptors that the driver can make available: those not owned by the device.
    #[inline]
    fn room(&self) -> u16 {
        let unshown = if mutated!(UnshownNotCounted) { 0 } else { self.unshown_count };
        self.size.get() - self.held - unshown
    }

    /// Restores the driver's flags of unfinished buffers: those of a batch that was written but never shown, and those
    /// that a front-end returned out of turn before they were taken. The latter then arrive as empty buffers, and
    /// return in their turn. Such descriptors may be anywhere in the ring, even behind the available ones. Used
    /// descriptors of the previous lap have the other wrap counter.
    fn scrub(&self) {
        let mut at = self.used;
        for _ in 0..self.size.get() {
            let place = at.slot.at(DESCRIPTOR) + 14;
            let flags = u16::from_le(self.ring.load(place, Ordering::Relaxed));
            if at.is_used(flags) {
                self.ring.store(place, (flags ^ F_USED).to_le(), Ordering::Relaxed);
            }
            at = at.after(1, self.size);
        }
    }

    /// Marks the descriptors from `old` up to `used`, which may have been written.
    #[cold]
    fn mark_used(&self, old: Position) {
        let Some(log) = &self.log else { return };
        let bytes = DESCRIPTOR as u64;
        let [from, to] = [old, self.used].map(|place| place.slot.at(DESCRIPTOR) as u64);
        if old.wrap == self.used.wrap {
            log.mark(self.ring_in_log + from, to - from);
        } else {
            log.mark(self.ring_in_log + from, bytes * u64::from(self.size.get()) - from);
            log.mark(self.ring_in_log, to);
        }
        log.tell();
    }

    /// Marks the device's event suppression structure.
    #[cold]
    fn mark_event(&self) {
        if let Some(log) = &self.log {
            log.mark(self.event_in_log, EVENT as u64);
        }
    }

    /// Whether the driver requests a notification of what was shown from `old` on.
    #[inline]
    fn is_notification_wanted(&self, old: Position) -> bool {
        let event = u32::from_le(self.driver_event.load(0, Ordering::Relaxed));
        match event >> 16 & 3 {
            DISABLE => false,
            AT_POSITION if self.event_idx => {
                let size = i32::from(self.size.get());
                let [new, old] = [self.used.slot, old.slot].map(|slot| i32::from(slot.get()));
                let old = old - if old >= new { size } else { 0 };
                let (slot, wrap) = (event as u16 & !WRAP, event as u16 & WRAP != 0);
                let event = i32::from(slot) - if wrap == self.used.wrap { 0 } else { size };
                (old..new).contains(&event)
            }
            _ => true,
        }
    }

    fn is_something_available(&self) -> bool {
        self.available.is_available(self.read(self.available.slot).0.flags)
    }

    /// Adds the pieces of a taken buffer, as far as they are needed.
    #[inline]
    fn walk(&self, buffer: &Taken, pieces: &mut Pieces<'_>) -> Result<(), BadChain> {
        if buffer.first.flags & F_INDIRECT == 0 {
            if pieces.add(buffer.first)? {
                return Ok(());
            }
            for descriptor in self.rest.iter(buffer.rest) {
                if pieces.add(descriptor)? {
                    return Ok(());
                }
            }
            return Ok(());
        }
        if buffer.count > 1 {
            return Err(BadChain::Indirect);
        }
        // All entries in order; only these two of their flags have a meaning.
        for i in 0..buffer.first.table_entries()? {
            let bits = buffer.first.table_entry(&self.memory, i as u16).ok_or(BadChain::Address)?;
            let flags = (bits >> (64 + AT_FLAGS)) as u16 & (F_WRITE | F_INDIRECT);
            if pieces.add(Descriptor { guest: bits as u64, len: (bits >> 64) as u32, flags })? {
                return Ok(());
            }
        }
        Ok(())
    }
}

impl Ring for Packed {
    fn open(memory: &Arc<Memory>, spec: RingSpec) -> Option<Packed> {
        let size = Size::new(spec.size)?;
        let mut base = Position::from_bits(spec.base, size)?;
        let area = |user, len, align| Memory::area(memory, user, len, align);
        let ring = area(spec.descriptors, DESCRIPTOR * usize::from(size.get()), 16)?;
        // User-mode Linux does not set the wrap counter; its ring is empty then.
        if spec.base == 0 && (0..DESCRIPTOR / 8).all(|i| ring.load::<u64>(8 * i, Ordering::Relaxed) == 0) {
            base = Position::START;
        }
        let mut inflight = spec.record.map(|area| PackedInflight::new(area, size));
        let found = inflight.as_mut().and_then(|inflight| inflight.recover(&ring, base));
        let used = found.as_ref().map_or(base, |found| found.used);
        let (mut buffers, mut rest) = (size.table(Taken::default()), Arena::new(size));
        let (mut recovered, mut held) = (Vec::new(), 0);
        for (id, chain) in found.map(|found| found.buffers).unwrap_or_default() {
            let Some((first, others)) = chain.split_first() else { continue };
            let mut list = List::default();
            // There is room: no record was counted twice.
            for descriptor in others {
                rest.push(&mut list, *descriptor);
            }
            let count = chain.len() as u16;
            held += count;
            buffers[id] = Taken { count, last: None, first: *first, rest: list };
            recovered.push(id);
        }
        let ring_in_log = memory.guest_address(spec.descriptors)?;
        let event_in_log = spec.used_in_log.or_else(|| memory.guest_address(spec.used))?;
        let packed = Packed {
            ring,
            driver_event: area(spec.available, EVENT, 4)?,
            device_event: area(spec.used, EVENT, 4)?,
            memory: Arc::clone(memory),
            call: spec.call,
            inflight,
            log: spec.log,
            ring_in_log,
            event_in_log,
            recovered,
            size,
            event_idx: spec.event_idx,
            // Each taken buffer was returned, or is in flight.
            available: used.after(held, size),
            used,
            shown: used,
            unshown: None,
            held,
            unshown_count: 0,
            buffers,
            rest,
            takers: size.table(None),
            kicks: true,
        };
        packed.scrub();
        // The previous owner of the ring may have suppressed notifications.
        packed.device_event.store(0, ENABLE << 16, Ordering::Relaxed);
        if let Some(log) = &packed.log {
            log.mark(ring_in_log, (DESCRIPTOR * usize::from(size.get())) as u64);
            packed.mark_event();
        }
        Some(packed)
    }

    #[inline]
    fn size(&self) -> Size {
        self.size
    }

    #[inline]
    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn base(&self) -> u16 {
        self.available.to_bits()
    }

    fn left_base(&self, _in_order: bool) -> Option<u16> {
        // Used descriptors overwrite the ring: only a record knows the others.
        self.inflight.as_ref().map(|_| self.base())
    }

    fn take_recovered(&mut self) -> Vec<Index> {
        std::mem::take(&mut self.recovered)
    }

    fn last_taken(&self) -> Option<Index> {
        let slot = self.available.before(1, self.size).slot;
        // No used descriptor has overwritten it: there are fewer of them than returned descriptors.
        self.takers[slot].filter(|id| self.buffers[*id].count > 0 && self.buffers[*id].last == Some(slot))
    }

    fn untake_last(&mut self, head: Index) {
        let Taken { count, rest, .. } = std::mem::take(&mut self.buffers[head]);
        if count == 0 {
            return;
        }
        self.rest.free(rest);
        self.held -= count;
        self.available = self.available.before(count, self.size);
        if let Some(inflight) = &mut self.inflight {
            inflight.untake(head);
        }
    }

    #[inline]
    fn pop(&mut self) -> Result<Option<Index>, Broken> {
        let (first, mut id) = self.read(self.available.slot);
        if !self.available.is_available(first.flags) {
            return Ok(None);
        }
        let room = self.room();
        if room == 0 {
            return Err(Broken::AvailableIndex);
        }
        let (mut count, mut last, mut flags, mut rest) = (1, self.available.slot, first.flags, List::default());
        // The driver makes the first descriptor available last. The chain's last one has the id.
        while flags & F_NEXT != 0 {
            if count == room {
                return Err(Broken::AvailableIndex);
            }
            if u32::from(count) == max_pieces() {
                return Err(Broken::ChainLength);
            }
            last = self.size.forward(last, 1).0;
            let (next, next_id) = self.read(last);
            if !self.rest.push(&mut rest, next) {
                return Err(Broken::Records);
            }
            (id, flags) = (next_id, next.flags);
            count += 1;
        }
        let id = self.size.check(id).ok_or(Broken::Head)?;
        let buffer = &mut self.buffers[id];
        if buffer.count != 0 {
            return Err(Broken::Twice);
        }
        if let Some(inflight) = &mut self.inflight {
            let chain = std::iter::once(first).chain(self.rest.iter(rest));
            inflight.take(id, count, chain).ok_or(Broken::Records)?;
        }
        *buffer = Taken { count, last: Some(last), first, rest };
        self.takers[last] = Some(id);
        self.held += count;
        self.available = self.available.after(count, self.size);
        Ok(Some(id))
    }

    #[inline]
    fn chain(&self, head: Index, want: Want, out: &mut Vec<Piece>) -> Walk {
        let mut pieces = Pieces::new(&self.memory, want, out);
        let buffer = &self.buffers[head];
        let outcome = if buffer.count > 0 { self.walk(buffer, &mut pieces) } else { Err(BadChain::Link) };
        pieces.end(outcome)
    }

    #[inline]
    fn push_used(&mut self, head: Index, len: u32) {
        let buffer = &mut self.buffers[head];
        let count = std::mem::take(&mut buffer.count);
        if count == 0 {
            return;
        }
        self.rest.free(std::mem::take(&mut buffer.rest));
        let written = if len > 0 { F_WRITE } else { 0 };
        let flags = if self.used.wrap { F_AVAILABLE | F_USED | written } else { written };
        let bits = u64::from(len) | u64::from(head.get()) << AT_ID | u64::from(flags) << AT_FLAGS;
        if self.used == self.shown && self.unshown.is_none() {
            self.unshown = Some(bits);
        } else {
            self.ring.store(self.used.slot.at(DESCRIPTOR) + 8, bits.to_le(), Ordering::Relaxed);
        }
        // Skip as many descriptors as the buffer had.
        self.used = self.used.after(count, self.size);
        self.held -= count;
        self.unshown_count += count;
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
        // Release: a reader that sees the batch's first descriptor used sees the others, and the buffers' contents.
        self.ring.store(self.shown.slot.at(DESCRIPTOR) + 8, bits.to_le(), Ordering::Release);
        if let Some(inflight) = &mut self.inflight {
            inflight.after_show();
        }
        let old = std::mem::replace(&mut self.shown, self.used);
        self.unshown_count = 0;
        if self.log.is_some() {
            self.mark_used(old);
        }
        // The driver enables notifications and then checks the ring; the order here is the reverse.
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
        if self.log.is_some() {
            self.mark_event();
        }
        Ok(self.is_something_available())
    }

    fn ask_for_silence(&mut self) {
        // With event indexes, no change is needed: the position of the last request has been passed, and nothing moves
        // it.
        if self.kicks && !self.event_idx {
            self.device_event.store(0, (DISABLE << 16).to_le(), Ordering::Relaxed);
            self.mark_event();
        }
        self.kicks = false;
    }

    fn set_log(&mut self, log: Option<DirtyLog>) {
        self.log = log;
    }

    fn descriptor_bytes(&self) -> usize {
        self.buffers.bytes() + self.rest.bytes() + self.takers.bytes()
    }
}
