//! Fixed-size buffers in one allocation, named by number.
//!
//! Large pages make a flow at full speed several percent faster, but the kernel clears a whole one for the first buffer
//! in it. So the first buffers, which suffice for a guest that sends little, are on small pages, and large pages are
//! provided before they are needed.
//!
//! The memory is a mapping of its own. The C library would take it from its heap once as large a pool was freed
//! (`mallopt(3)`, M_MMAP_THRESHOLD), and clear all of it when a port is added, although most guests use little of it.

use std::alloc::{Layout, handle_alloc_error};

use memmap2::{Advice, MmapMut};

use crate::large_pages::LARGE;
use crate::provide::{self, LARGE_PAGE};

/// The kernel provides memory in pages of at least this size, bytes.
const PAGE: usize = 4096;

/// Bytes of buffers on small pages.
const SMALL: usize = 256 << 10;

/// A pool that hands out free buffers last in, first out: the buffer used last is still cached, and memory is touched
/// only up to the pool's peak use.
#[derive(Debug)]
pub(crate) struct Pool {
    slab: MmapMut,
    /// Offset of the first buffer.
    start: usize,
    /// Address up to which memory has been provided, or need not be.
    provided_until: usize,
    buffer_bytes: usize,
    capacity: u32,
    /// Free buffers that were in use before.
    free: Vec<u32>,
    /// Whether each buffer is in use, for buffers ever taken.
    taken: Vec<bool>,
    /// Number of buffers whose memory was touched without being taken.
    touched: u32,
}

impl Pool {
    pub(crate) fn new(buffers: u32, buffer_bytes: usize) -> Self {
        let bytes = buffers as usize * buffer_bytes;
        let is_large = bytes >= LARGE;
        let slab = map(if is_large { bytes + LARGE_PAGE } else { bytes });
        let from = slab.as_ptr().addr();
        let (mut start, mut provided_until) = (0, from + bytes);
        if is_large {
            // The buffers on small pages end where a large page begins.
            start = (from + SMALL).next_multiple_of(LARGE_PAGE) - SMALL - from;
            // A kernel without large pages refuses both.
            let _ = slab.advise_range(Advice::NoHugePage, 0, start + SMALL);
            let _ = slab.advise_range(Advice::HugePage, start + SMALL, slab.len() - start - SMALL);
            provided_until = from + start + SMALL;
        }
        Self {
            slab,
            start,
            provided_until,
            buffer_bytes,
            capacity: buffers,
            free: Vec::new(),
            taken: Vec::new(),
            touched: 0,
        }
    }

    /// Takes a buffer; its contents are unspecified.
    pub(crate) fn take(&mut self) -> Option<u32> {
        if let Some(buffer) = self.free.pop() {
            self.taken[buffer as usize] = true;
            return Some(buffer);
        }
        let fresh = self.taken.len() as u32;
        (fresh < self.capacity).then(|| {
            self.taken.push(true);
            self.look_ahead(fresh);
            fresh
        })
    }

    /// Has memory provided if the buffers up to `fresh` use most of what there is: half of the small pages, and later
    /// all but half of a large page.
    fn look_ahead(&mut self, fresh: u32) {
        let begin = self.slab.as_ptr().addr() + self.start;
        let end = begin + self.capacity as usize * self.buffer_bytes;
        let used = begin + (fresh as usize + 1) * self.buffer_bytes;
        let ahead = if self.provided_until == begin + SMALL { SMALL / 2 } else { LARGE_PAGE / 2 };
        if self.provided_until < end && used + ahead > self.provided_until {
            let until = (self.provided_until + LARGE_PAGE).min(end);
            if provide::later(self.provided_until..until) {
                self.provided_until = until;
            }
        }
    }

    /// Returns a buffer to the pool. Returns whether it was taken: a second return does nothing.
    pub(crate) fn put(&mut self, buffer: u32) -> bool {
        let was_taken = self.is_taken(buffer);
        if was_taken {
            self.taken[buffer as usize] = false;
            self.free.push(buffer);
        }
        was_taken
    }

    pub(crate) fn is_taken(&self, buffer: u32) -> bool {
        self.taken.get(buffer as usize).copied().unwrap_or(false)
    }

    pub(crate) fn bytes(&self, buffer: u32) -> &[u8] {
        &self.slab[self.start + buffer as usize * self.buffer_bytes..][..self.buffer_bytes]
    }

    pub(crate) fn bytes_mut(&mut self, buffer: u32) -> &mut [u8] {
        &mut self.slab[self.start + buffer as usize * self.buffer_bytes..][..self.buffer_bytes]
    }

    /// Number of buffers that were ever in use, here or in the process whose number [`touch`](Self::touch) got.
    pub(crate) fn touched(&self) -> u32 {
        self.touched.max(self.taken.len() as u32)
    }

    /// Makes the kernel provide the memory of the first `buffers` buffers, or of all, now. Buffers must not be in use.
    pub(crate) fn touch(&mut self, buffers: u32) {
        let bytes = buffers.min(self.capacity) as usize * self.buffer_bytes;
        for page in self.slab[self.start..][..bytes].chunks_mut(PAGE) {
            page[0] = std::hint::black_box(0);
        }
        self.touched = self.touched.max(buffers.min(self.capacity));
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    pub(crate) fn free(&self) -> u32 {
        self.capacity - self.taken.len() as u32 + self.free.len() as u32
    }

    pub(crate) fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }
}

/// Maps zeroed memory, which the kernel provides when it is touched.
fn map(bytes: usize) -> MmapMut {
    let layout = || Layout::from_size_align(bytes, PAGE).unwrap_or(Layout::new::<()>());
    MmapMut::map_anon(bytes).unwrap_or_else(|_| handle_alloc_error(layout()))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::smaps::{field, resident_kib};

    #[test]
    fn buffers_are_distinct_and_reused_last_in_first_out() {
        let mut pool = Pool::new(3, 8);
        let all: Vec<u32> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(all, [0, 1, 2]);
        for &b in &all {
            pool.bytes_mut(b).fill(b as u8 + 1);
        }
        assert_eq!(pool.bytes(1), [2; 8]);
        assert!(pool.put(1) && !pool.put(1) && !pool.put(7), "a double return, or an unknown buffer");
        assert!(pool.put(0));
        assert_eq!((pool.free(), pool.take(), pool.take(), pool.take()), (2, Some(0), Some(1), None));
    }

    #[test]
    fn a_new_pool_uses_no_memory_although_large_ones_were_freed() {
        for _ in 0..3 {
            let mut pool = Pool::new(400, 64 << 10);
            assert!(resident_kib(&pool.slab) < 4 << 10, "{} KiB", resident_kib(&pool.slab));
            pool.touch(400);
            assert!(resident_kib(&pool.slab) >= 400 << 6);
        }
    }

    #[test]
    fn touched_memory_is_resident_and_counted() {
        let mut pool = Pool::new(2000, 64 << 10);
        assert_eq!((pool.take(), pool.touched()), (Some(0), 1));
        pool.put(0);
        let untouched = resident_kib(&pool.slab);
        pool.touch(1000);
        let touched = resident_kib(&pool.slab);
        assert!(untouched < 32_000 && touched >= 64_000, "{untouched} KiB, then {touched}");
        assert_eq!((pool.touched(), pool.take()), (1000, Some(0)));
        pool.touch(u32::MAX);
        assert_eq!(pool.touched(), 2000);
    }
    #[test]
    fn the_first_buffers_are_on_small_pages_and_the_next_are_there_in_time() {
        provide::start().expect("a thread");
        let mut pool = Pool::new(1000, 64 << 10);
        pool.take();
        assert!(field(pool.bytes(0), "VmFlags:").contains("nh") && field(pool.bytes(3), "VmFlags:").contains("nh"));
        let large = |pool: &Pool| resident_kib(&pool.slab[pool.start + SMALL..]);
        assert_eq!((large(&pool), pool.bytes(4).as_ptr().addr() % LARGE_PAGE), (0, 0));
        for (taken, wanted_mib) in [(3, 2), (20, 2), (21, 4), (53, 6)] {
            (pool.taken.len()..taken).for_each(|_| _ = pool.take());
            let deadline = Instant::now() + Duration::from_secs(10);
            while large(&pool) < wanted_mib << 10 {
                assert!(Instant::now() < deadline, "{taken} taken: {} KiB", large(&pool));
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(large(&pool), wanted_mib << 10, "{taken} taken");
        }
        (53..1000).for_each(|_| _ = pool.take());
        assert_eq!(pool.take(), None);
    }
}
