//! A split virtqueue, the device's side (virtio 1.3, section 2.7): indexes, descriptors, used entries, notifications.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::call::Call;
use super::chain::{DESCRIPTOR, Descriptor, F_INDIRECT, F_NEXT, F_WRITE, Pieces};
use super::dirty_log::DirtyLog;
use super::index::{Index, Size};
use super::inflight::Inflight;
use super::memory::{Area, Memory};
use super::mutation::mutated;
use super::ring::{BadChain, Broken, Piece, Ring, RingSpec, Walk, Want};

/// How many buffers ahead to prefetch descriptors, and buffers.
const DESCRIPTORS_AHEAD: u16 = 12;
const BUFFERS_AHEAD: u16 = 6;
/// Bit offsets in the descriptor's second half: flags and next.
const AT_FLAGS: u32 = 32;
const AT_NEXT: u32 = 48;
/// Flag of the available ring: the driver wants no notifications.
const NO_INTERRUPT: u16 = 1;
/// Flag of the used ring: the device wants none.
const NO_NOTIFY: u16 = 1;

/// The device's side of a split ring.
#[derive(Debug)]
pub(crate) struct Split {
    memory: Arc<Memory>,
    descriptors: Area,
    available: Area,
    used: Area,
    call: Arc<Call>,
    inflight: Option<Inflight>,
    log: Option<DirtyLog>,
    /// Address of the used ring in the log.
    used_in_log: u64,
    /// Buffers taken by an earlier life of this daemon, in the order of taking.
    recovered: Vec<Index>,
    size: Size,
    event_idx: bool,
    /// The next available entry to take.
    next_available: u16,
    /// Index up to which available entries are known.
    seen_available: u16,
    /// Index of the next used entry.
    next_used: u16,
    /// Index up to which the driver sees used entries.
    shown_used: u16,
    /// By how much the available index is ahead of the used one when the device holds no buffers.
    ahead: u16,
    /// Whether the driver is asked for notifications.
    kicks: bool,
}

impl Split {
    /// Prefetches what the next calls need: another CPU wrote it last, and waiting for one line after the other would
    /// take longer than everything else.
    #[inline]
    fn warm_up(&self) {
        let left = self.seen_available.wrapping_sub(self.next_available);
        if left > DESCRIPTORS_AHEAD {
            let head = self.entry(self.next_available.wrapping_add(DESCRIPTORS_AHEAD));
            self.descriptors.prefetch(DESCRIPTOR * usize::from(head & (self.size.get() - 1)));
        }
        if left > BUFFERS_AHEAD
            && let Some((at, _)) = self.descriptor(self.entry(self.next_available.wrapping_add(BUFFERS_AHEAD)))
        {
            self.memory.prefetch(at.guest, at.flags & F_WRITE != 0);
        }
    }

    /// Checks the driver's index for buffers to take.
    fn look(&mut self) -> Result<bool, Broken> {
        // Acquire: the entries and descriptors up to this index are read after it.
        let index = u16::from_le(self.available.load(2, Ordering::Acquire));
        let there = index.wrapping_sub(self.next_available);
        // Buffers that the device holds, used or not, cannot be offered.
        let taken = self.next_available.wrapping_sub(self.shown_used).wrapping_sub(self.ahead);
        let taken = if mutated!(UnshownNotCounted) { 0 } else { taken };
        if u32::from(there) + u32::from(taken) > u32::from(self.size.get()) {
            return Err(Broken::AvailableIndex);
        }
        self.seen_available = index;
        Ok(there > 0)
    }

    #[inline]
    fn entry(&self, index: u16) -> u16 {
        u16::from_le(self.available.load(4 + 2 * usize::from(index & (self.size.get() - 1)), Ordering::Relaxed))
    }

    /// Adds the pieces of a buffer, as far as they are needed.
    #[inline]
    fn walk(&self, head: Index, pieces: &mut Pieces<'_>) -> Result<(), BadChain> {
        let first = self.descriptor(head.get()).ok_or(BadChain::Link)?;
        if first.0.flags & F_INDIRECT == 0 {
            return Self::follow(first, u32::from(self.size.get()), |i| self.descriptor(i), pieces);
        }
        if first.0.flags & F_NEXT != 0 {
            return Err(BadChain::Indirect);
        }
        let entries = first.0.table_entries()?;
        let entry = |i: u16| -> Option<(Descriptor, u16)> {
            let bits = (u32::from(i) < entries).then(|| first.0.table_entry(&self.memory, i))??;
            Some(halves(bits as u64, (bits >> 64) as u64))
        };
        Self::follow(entry(0).ok_or(BadChain::Address)?, entries, entry, pieces)
    }

    /// Follows a chain of at most `entries` descriptors.
    #[inline]
    fn follow(
        (mut at, mut next): (Descriptor, u16),
        entries: u32,
        table: impl Fn(u16) -> Option<(Descriptor, u16)>,
        pieces: &mut Pieces<'_>,
    ) -> Result<(), BadChain> {
        for _ in 0..entries {
            if pieces.add(at)? || at.flags & F_NEXT == 0 {
                return Ok(());
            }
            (at, next) = table(next).ok_or(BadChain::Link)?;
        }
        Err(BadChain::Link)
    }

    /// Marks the used entries `old..new` and the index, which were written.
    #[cold]
    fn mark_used(&self, old: u16, new: u16) {
        let Some(log) = &self.log else { return };
        let (size, count) = (u64::from(self.size.get()), u64::from(new.wrapping_sub(old)));
        let first = u64::from(old) % size;
        let here = count.min(size - first);
        let entries = self.used_in_log + 4;
        log.mark(entries + 8 * first, 8 * here);
        log.mark(entries, 8 * (count - here));
        self.mark_control();
        log.tell();
    }

    /// Marks the flags, index, or available event, which were written.
    #[cold]
    fn mark_control(&self) {
        if let Some(log) = &self.log {
            log.mark(self.used_in_log, 4);
            log.mark(self.used_in_log + 4 + 8 * u64::from(self.size.get()), 2);
        }
    }

    /// A descriptor and its successor.
    #[inline]
    fn descriptor(&self, index: u16) -> Option<(Descriptor, u16)> {
        let at = self.size.check(index)?.at(DESCRIPTOR);
        let guest = u64::from_le(self.descriptors.load(at, Ordering::Relaxed));
        Some(halves(guest, u64::from_le(self.descriptors.load(at + 8, Ordering::Relaxed))))
    }
}

/// Decodes a descriptor and its successor from its two halves.
#[inline]
fn halves(guest: u64, rest: u64) -> (Descriptor, u16) {
    (Descriptor { guest, len: rest as u32, flags: (rest >> AT_FLAGS) as u16 }, (rest >> AT_NEXT) as u16)
}

impl Ring for Split {
    fn open(memory: &Arc<Memory>, spec: RingSpec) -> Option<Split> {
        let size = Size::new(spec.size).filter(|size| size.get().is_power_of_two())?;
        let n = usize::from(size.get());
        let area = |user, len, align| Memory::area(memory, user, len, align);
        let used = area(spec.used, 6 + 8 * n, 4)?;
        let next_used = u16::from_le(used.load(2, Ordering::Acquire));
        // The previous owner of the ring may have suppressed notifications.
        used.store(0, 0u16, Ordering::Relaxed);
        let mut inflight = spec.record.map(|area| Inflight::new(area, size));
        let recovered = inflight.as_mut().map(|i| i.recover(next_used)).unwrap_or_default();
        let in_flight = recovered.len() as u16;
        // Buffers are taken in the ring's order: each taken one was returned, or is in flight.
        let base = if recovered.is_empty() { spec.base } else { next_used.wrapping_add(in_flight) };
        let used_in_log = spec.used_in_log.or_else(|| memory.guest_address(spec.used))?;
        used_in_log.checked_add(6 + 8 * n as u64)?;
        let split = Split {
            descriptors: area(spec.descriptors, DESCRIPTOR * n, 16)?,
            available: area(spec.available, 6 + 2 * n, 2)?,
            used,
            memory: Arc::clone(memory),
            call: spec.call,
            inflight,
            log: spec.log,
            used_in_log,
            recovered,
            size,
            event_idx: spec.event_idx,
            next_available: base,
            seen_available: base,
            next_used,
            shown_used: next_used,
            ahead: base.wrapping_sub(next_used).wrapping_sub(in_flight),
            kicks: true,
        };
        split.mark_control();
        Some(split)
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
        self.next_available
    }

    fn left_base(&self, in_order: bool) -> Option<u16> {
        // With a record, the buffers in flight are found there, and the base does not matter.
        (self.inflight.is_some() || in_order).then(|| self.shown_used.wrapping_add(self.ahead))
    }

    fn take_recovered(&mut self) -> Vec<Index> {
        std::mem::take(&mut self.recovered)
    }

    fn last_taken(&self) -> Option<Index> {
        self.size.check(self.entry(self.next_available.wrapping_sub(1)))
    }

    fn untake_last(&mut self, head: Index) {
        self.next_available = self.next_available.wrapping_sub(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.untake(head);
        }
    }

    #[inline]
    fn pop(&mut self) -> Result<Option<Index>, Broken> {
        if self.next_available == self.seen_available && !self.look()? {
            return Ok(None);
        }
        let head = self.size.check(self.entry(self.next_available)).ok_or(Broken::Head)?;
        self.warm_up();
        self.next_available = self.next_available.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.take(head);
        }
        Ok(Some(head))
    }

    #[inline]
    fn chain(&self, head: Index, want: Want, out: &mut Vec<Piece>) -> Walk {
        let mut pieces = Pieces::new(&self.memory, want, out);
        let outcome = self.walk(head, &mut pieces);
        pieces.end(outcome)
    }

    #[inline]
    fn push_used(&mut self, head: Index, len: u32) {
        let at = 4 + 8 * usize::from(self.next_used & (self.size.get() - 1));
        // Two halves: an entry is only aligned to 4 bytes.
        self.used.store(at, u32::from(head.get()).to_le(), Ordering::Relaxed);
        self.used.store(at + 4, len.to_le(), Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.put(head);
        }
    }

    fn has_unshown(&self) -> bool {
        self.next_used != self.shown_used
    }

    fn show(&mut self) -> bool {
        let (old, new) = (self.shown_used, self.next_used);
        if old == new {
            return false;
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.before_show();
        }
        // Release: a reader that sees the index sees the entries, and the buffers' contents.
        self.used.store(2, new.to_le(), Ordering::Release);
        if let Some(inflight) = &mut self.inflight {
            inflight.after_show(new);
        }
        self.shown_used = new;
        if self.log.is_some() {
            self.mark_used(old, new);
        }
        // The driver enables notifications and then checks the index; the order here is the reverse.
        fence(Ordering::SeqCst);
        let wanted = if self.event_idx {
            let event = u16::from_le(self.available.load(4 + 2 * usize::from(self.size.get()), Ordering::Relaxed));
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            u16::from_le(self.available.load(0, Ordering::Relaxed)) & NO_INTERRUPT == 0
        };
        if wanted {
            self.call.notify();
        }
        wanted
    }

    fn ask_for_kicks(&mut self) -> Result<bool, Broken> {
        if self.event_idx {
            self.used.store(4 + 8 * usize::from(self.size.get()), self.next_available.to_le(), Ordering::Relaxed);
        } else if !self.kicks {
            self.used.store(0, 0u16, Ordering::Relaxed);
        }
        self.kicks = true;
        fence(Ordering::SeqCst);
        if self.log.is_some() {
            self.mark_control();
        }
        self.look()
    }

    fn ask_for_silence(&mut self) {
        // With event indexes, no change is needed: the position of the last request has been passed, and nothing moves
        // it.
        if self.kicks && !self.event_idx {
            self.used.store(0, NO_NOTIFY.to_le(), Ordering::Relaxed);
            self.mark_control();
        }
        self.kicks = false;
    }

    fn set_log(&mut self, log: Option<DirtyLog>) {
        self.log = log;
    }

    /// They stay in the guest's memory.
    fn descriptor_bytes(&self) -> usize {
        0
    }
}
