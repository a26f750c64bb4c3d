//! A ring in shared memory.
//!
//! | byte | field |
//! |---|---|
//! | 0 | cookie, 4 bytes |
//! | 4 | flags, 2 bytes: [`NO_INTERRUPTS`] |
//! | 6 | head, 2 bytes: written by the client |
//! | 64 | tail, 2 bytes: written by the server |
//! | 128 | descriptors, 16 bytes each: flags (2), region (2), length (4), offset (4), metadata (4) |

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use crate::prefetch::{LINE, prefetch_to_write};
use crate::vhost::mapping::Mapping;

/// Bytes before the descriptors.
pub(super) const HEADER_LEN: usize = 128;
/// Length of a descriptor, bytes.
pub(super) const DESCRIPTOR_LEN: usize = 16;
/// First word of a ring.
pub(super) const COOKIE: u32 = 0x03e3_1f20;
/// Ring flag: the consumer polls and wants no interrupts.
const NO_INTERRUPTS: u16 = 1;
const FLAGS: usize = 4;
const HEAD: usize = 6;
const TAIL: usize = 64;

/// Descriptor flag: the packet continues in the next one.
pub(super) const NEXT: u16 = 1;

/// A fragment of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) flags: u16,
    pub(super) region: u16,
    pub(super) len: u32,
    pub(super) offset: u32,
}

/// Shared memory that another process may write at any time. Reads copy; offsets are checked.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    mapping: Arc<Mapping>,
}

impl Memory {
    pub(super) fn new(mapping: Mapping) -> Self {
        Memory { mapping: Arc::new(mapping) }
    }

    fn base(&self) -> (*mut u8, usize) {
        let (region, at) = (self.mapping.region(), self.mapping.at());
        (region.as_ptr().wrapping_add(at), region.size() - at)
    }

    /// Whether the file was truncated and some of the memory is lost.
    pub(super) fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// The address of `len` bytes at `offset`; `None` if they are not all inside.
    pub(super) fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let (base, size) = self.base();
        let fits = offset.checked_add(len).is_some_and(|end| end <= size);
        fits.then(|| NonNull::new(base.wrapping_add(offset))).flatten()
    }

    /// Copies bytes out. False if they are not all inside.
    #[must_use]
    pub(super) fn read(&self, offset: usize, to: &mut [u8]) -> bool {
        let Some(from) = self.at(offset, to.len()) else { return false };
        // SAFETY: `len` bytes inside the mapping, which lives as long as `self`; `to` is ours alone. The other process
        // may write there at the same time: the copy then has arbitrary contents, which is all that is promised, as for
        // the copies of vm-memory.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) };
        true
    }

    /// Copies bytes in. False if they do not all fit.
    #[must_use]
    pub(super) fn write(&self, offset: usize, from: &[u8]) -> bool {
        let Some(to) = self.at(offset, from.len()) else { return false };
        // SAFETY: as above, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) };
        true
    }
}

/// A ring at a fixed offset.
#[derive(Debug)]
pub(super) struct Ring {
    memory: Memory,
    offset: usize,
    entries: u16,
}

impl Ring {
    /// The ring of 2^`log2_entries` entries at `offset`; `None` if it is not aligned or not all inside the memory.
    pub(super) fn new(memory: Memory, offset: usize, log2_entries: u8) -> Option<Self> {
        let entries = 1u16.checked_shl(log2_entries.into()).filter(|n| *n <= 1 << 14)?;
        memory.at(offset, bytes(log2_entries)).filter(|at| at.as_ptr().addr().is_multiple_of(4))?;
        Some(Ring { memory, offset, entries })
    }

    pub(super) fn entries(&self) -> u16 {
        self.entries
    }

    /// Writes the cookie and zeroes the indexes.
    pub(super) fn initialise(&self) {
        let _ = self.memory.write(self.offset, &COOKIE.to_ne_bytes());
        for word in [FLAGS, HEAD, TAIL] {
            self.word(word).store(0, Ordering::Release);
        }
    }

    pub(super) fn has_cookie(&self) -> bool {
        let mut cookie = [0; 4];
        self.memory.read(self.offset, &mut cookie) && u32::from_ne_bytes(cookie) == COOKIE
    }

    fn word(&self, at: usize) -> &AtomicU16 {
        let (base, _) = self.memory.base();
        // SAFETY: inside the ring, which `new` found inside the mapping, which lives as long as `self`; aligned to 2,
        // as the ring is to 4. Both sides use atomic accesses; a peer that does not can only corrupt the value.
        unsafe { AtomicU16::from_ptr(base.wrapping_add(self.offset + at).cast()) }
    }

    pub(super) fn head(&self) -> u16 {
        self.word(HEAD).load(Ordering::Acquire)
    }

    pub(super) fn tail(&self) -> u16 {
        self.word(TAIL).load(Ordering::Acquire)
    }

    pub(super) fn set_head(&self, head: u16) {
        self.word(HEAD).store(head, Ordering::Release);
    }

    pub(super) fn set_tail(&self, tail: u16) {
        self.word(TAIL).store(tail, Ordering::Release);
    }

    /// The consumer sets whether it wants interrupts for new packets. After enabling them it must check the ring once
    /// more.
    pub(super) fn want_interrupts(&self, wanted: bool) {
        self.word(FLAGS).store(if wanted { 0 } else { NO_INTERRUPTS }, Ordering::Relaxed);
        if wanted {
            fence(Ordering::SeqCst);
        }
    }

    /// Whether the consumer wants an interrupt for what was just published.
    pub(super) fn wants_interrupts(&self) -> bool {
        fence(Ordering::SeqCst);
        self.word(FLAGS).load(Ordering::Relaxed) & NO_INTERRUPTS == 0
    }

    /// Prefetches `count` descriptors from `slot` on, for writing.
    pub(super) fn fetch_ahead(&self, slot: u16, count: u16) {
        let (base, _) = self.memory.base();
        let in_a_line = LINE / DESCRIPTOR_LEN;
        // The last one may be in a line that no step touches.
        let slots = (0..count).step_by(in_a_line).chain(count.checked_sub(1));
        slots.for_each(|n| prefetch_to_write(base.wrapping_add(self.descriptor_at(slot.wrapping_add(n)))));
    }

    fn descriptor_at(&self, slot: u16) -> usize {
        self.offset + HEADER_LEN + usize::from(slot & (self.entries - 1)) * DESCRIPTOR_LEN
    }

    /// A copy of a descriptor.
    pub(super) fn descriptor(&self, slot: u16) -> Descriptor {
        let mut b = [0; DESCRIPTOR_LEN];
        let _ = self.memory.read(self.descriptor_at(slot), &mut b);
        let [f0, f1, r0, r1, l0, l1, l2, l3, o0, o1, o2, o3, ..] = b;
        Descriptor {
            flags: u16::from_ne_bytes([f0, f1]),
            region: u16::from_ne_bytes([r0, r1]),
            len: u32::from_ne_bytes([l0, l1, l2, l3]),
            offset: u32::from_ne_bytes([o0, o1, o2, o3]),
        }
    }

    pub(super) fn set_descriptor(&self, slot: u16, descriptor: Descriptor) {
        let mut b = [0; DESCRIPTOR_LEN];
        b[..2].copy_from_slice(&descriptor.flags.to_ne_bytes());
        b[2..4].copy_from_slice(&descriptor.region.to_ne_bytes());
        b[4..8].copy_from_slice(&descriptor.len.to_ne_bytes());
        b[8..12].copy_from_slice(&descriptor.offset.to_ne_bytes());
        let _ = self.memory.write(self.descriptor_at(slot), &b);
    }
}

/// Bytes of a ring with 2^`log2_entries` entries.
pub(super) fn bytes(log2_entries: u8) -> usize {
    HEADER_LEN + (DESCRIPTOR_LEN << log2_entries)
}
