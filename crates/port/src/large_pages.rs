//! Memory for large tables, on pages of 2 MiB where the kernel supports them (transparent huge pages, `madvise(2)`).
//!
//! With a million flows, hardly any packet's record, session or index entry is cached. With 4 KiB pages each access
//! would also miss the TLB, and the page table walk the caches. Programs make [`LargePages`] their
//! `#[global_allocator]`.

// The allocator is a trait of `unsafe` methods; these forward all calls to the system's.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};

use rustix::mm::{Advice, madvise};

/// Minimum size of an allocation, bytes: two large pages, so that it contains at least one whole.
pub(crate) const LARGE: usize = 4 << 20;
/// Granularity of `madvise`, bytes.
const PAGE: usize = 4096;

/// The system's allocator, which advises the kernel to use large pages for large allocations.
#[derive(Debug)]
pub struct LargePages;

// SAFETY: every call is forwarded to `System` unchanged; the advice does not change the contents of memory.
unsafe impl GlobalAlloc for LargePages {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract is that of this method.
        advised(unsafe { System.alloc(layout) }, layout.size())
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        advised(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    #[inline]
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        advised(unsafe { System.realloc(at, layout, size) }, size)
    }
}

#[inline]
fn advised(at: *mut u8, size: usize) -> *mut u8 {
    if size >= LARGE && !at.is_null() {
        advise(at, size);
    }
    at
}

#[cold]
fn advise(at: *mut u8, size: usize) {
    let before = at.align_offset(PAGE);
    let whole = size.saturating_sub(before) / PAGE * PAGE;
    // SAFETY: these pages are inside memory of the caller, and the advice preserves their contents. A kernel without
    // large pages refuses it.
    let _ = unsafe { madvise(at.wrapping_add(before).cast(), whole, Advice::LinuxHugepage) };
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;
    use crate::smaps::field;

    #[global_allocator]
    static ALLOCATOR: LargePages = LargePages;

    #[test]
    fn large_memory_is_advised_and_small_is_not() {
        if !fs::exists("/sys/kernel/mm/transparent_hugepage/enabled").unwrap() {
            return;
        }
        let advised = |memory: &[u8]| field(memory, "VmFlags:").split_whitespace().any(|f| f == "hg");
        let zeroed = vec![0u8; 64 << 20];
        let mut grown: Vec<u8> = Vec::with_capacity(48 << 20);
        grown.resize(grown.capacity(), 7);
        grown.reserve_exact(48 << 20);
        grown.resize(grown.capacity(), 7);
        assert!(advised(&zeroed) && advised(&grown));
        assert!(zeroed.iter().all(|&b| b == 0) && grown.iter().all(|&b| b == 7));
        assert!(!advised(&vec![0u8; 1 << 20]));
    }
}
