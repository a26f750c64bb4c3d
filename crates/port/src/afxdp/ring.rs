//! Rings shared with the kernel: one side produces, the other consumes, and each has an index.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::xdp::XdpRingOffset;

/// The kernel sleeps and needs a wakeup for new entries.
const NEED_WAKEUP: u32 = 1;

/// A mapped ring.
#[derive(Debug)]
struct Ring<T> {
    mapping: NonNull<u8>,
    len: usize,
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: Option<NonNull<AtomicU32>>,
    entries: NonNull<T>,
    mask: u32,
}

/// A ring with us as the producer.
#[derive(Debug)]
pub(crate) struct Producer<T> {
    ring: Ring<T>,
    /// Our index; published to the kernel by [`publish`](Self::publish).
    next: u32,
    /// The kernel's index when last read.
    consumed: u32,
}

/// A ring with us as the consumer.
#[derive(Debug)]
pub(crate) struct Consumer<T> {
    ring: Ring<T>,
    next: u32,
    /// The kernel's index when last read.
    produced: u32,
}

// SAFETY: the ring alone owns the mapping; its indexes are atomic, and only one side at a time accesses an entry.
unsafe impl<T: Send> Send for Ring<T> {}

impl<T: Copy> Ring<T> {
    /// Maps the ring of `entries` (a power of two) of `socket` at `page_offset`.
    fn map(socket: BorrowedFd<'_>, page_offset: u64, entries: u32, layout: &XdpRingOffset) -> io::Result<Self> {
        if !entries.is_power_of_two() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let len = layout.desc as usize + entries as usize * size_of::<T>();
        let inside = |offset: u64, bytes: usize| offset as usize + bytes <= len && offset.is_multiple_of(4);
        if !inside(layout.producer, 4)
            || !inside(layout.consumer, 4)
            || !(layout.desc as usize).is_multiple_of(align_of::<T>())
        {
            return Err(io::Error::other("the kernel describes an impossible ring"));
        }
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapping = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                socket,
                page_offset,
            )
        }?;
        let mapping = NonNull::new(mapping.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: inside the mapping of `len` bytes: checked above, or for the entries by the definition of `len`.
        let at = |offset: u64| unsafe { mapping.add(offset as usize) };
        Ok(Self {
            mapping,
            len,
            producer: at(layout.producer).cast(),
            consumer: at(layout.consumer).cast(),
            flags: layout.flags.filter(|&f| inside(f, 4)).map(|f| at(f).cast()),
            entries: at(layout.desc).cast(),
            mask: entries - 1,
        })
    }

    fn producer(&self) -> &AtomicU32 {
        // SAFETY: points into the mapping, which lives as long as `self`, at an aligned word that both sides access
        // atomically.
        unsafe { self.producer.as_ref() }
    }

    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.consumer.as_ref() }
    }

    fn flags(&self) -> u32 {
        // SAFETY: as above.
        self.flags.map_or(NEED_WAKEUP, |flags| unsafe { flags.as_ref() }.load(Ordering::Relaxed))
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours, and borrows from it borrow `self`.
        let _ = unsafe { munmap(self.mapping.as_ptr().cast(), self.len) };
    }
}

impl<T: Copy> Producer<T> {
    /// Maps a ring that the kernel reads.
    pub(crate) fn map(
        socket: BorrowedFd<'_>,
        page_offset: u64,
        entries: u32,
        layout: &XdpRingOffset,
    ) -> io::Result<Self> {
        Ok(Self { ring: Ring::map(socket, page_offset, entries, layout)?, next: 0, consumed: 0 })
    }

    /// Adds an entry; `false` if there is no room.
    pub(crate) fn push(&mut self, entry: T) -> bool {
        if self.next.wrapping_sub(self.consumed) > self.ring.mask {
            self.consumed = self.ring.consumer().load(Ordering::Acquire);
            if self.next.wrapping_sub(self.consumed) > self.ring.mask {
                return false;
            }
        }
        // SAFETY: the mask keeps the index inside the entries; the kernel is done with this one and does not read it
        // before it is published.
        unsafe { self.ring.entries.add((self.next & self.ring.mask) as usize).write(entry) };
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Publishes the added entries to the kernel.
    pub(crate) fn publish(&mut self) {
        self.ring.producer().store(self.next, Ordering::Release);
    }

    /// Entries that the kernel has not consumed yet.
    pub(crate) fn waiting(&self) -> u32 {
        self.next.wrapping_sub(self.ring.consumer().load(Ordering::Acquire))
    }

    /// Whether the kernel needs a wakeup.
    pub(crate) fn needs_wakeup(&self) -> bool {
        self.ring.flags() & NEED_WAKEUP != 0
    }
}

impl<T: Copy> Consumer<T> {
    /// Maps a ring that the kernel writes.
    pub(crate) fn map(
        socket: BorrowedFd<'_>,
        page_offset: u64,
        entries: u32,
        layout: &XdpRingOffset,
    ) -> io::Result<Self> {
        Ok(Self { ring: Ring::map(socket, page_offset, entries, layout)?, next: 0, produced: 0 })
    }

    /// The next entry.
    pub(crate) fn pop(&mut self) -> Option<T> {
        if self.next == self.produced {
            self.produced = self.ring.producer().load(Ordering::Acquire);
            if self.next == self.produced {
                return None;
            }
        }
        // SAFETY: the mask keeps the index inside the entries; the kernel wrote this one before it advanced its index,
        // and leaves it alone until ours has passed it.
        let entry = unsafe { self.ring.entries.add((self.next & self.ring.mask) as usize).read() };
        self.next = self.next.wrapping_add(1);
        Some(entry)
    }

    /// Whether the kernel has produced entries that were not read yet.
    pub(crate) fn has_more(&self) -> bool {
        self.next != self.ring.producer().load(Ordering::Acquire)
    }

    /// Returns the consumed entries to the kernel.
    pub(crate) fn release(&mut self) {
        self.ring.consumer().store(self.next, Ordering::Release);
    }
}
