//! Memory for large tables, on pages of 2 MiB where the kernel supports them (transparent huge pages, `madvise(2)`).
//!
//! With a million flows, hardly any packet's record, session or index entry is cached. With 4 KiB pages each access
//! would also miss the TLB, and the page table walk the caches. Programs make [`LargePages`] their
//! `#[global_allocator]`.
//!
//! Large allocations are mappings of their own. The C library also maps them, but only until the first one is freed:
//! then it keeps up to 32 MiB for reuse (`mallopt(3)`, M_MMAP_THRESHOLD), and clears all of it when zeroed memory is
//! asked for. The kernel clears pages when they are touched, and a port touches few of its buffers.

// The allocator is a trait of `unsafe` methods.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;

use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap, munmap};

/// Minimum size of an allocation, bytes: two large pages, so that it contains at least one whole.
pub(crate) const LARGE: usize = 4 << 20;
/// Granularity of mappings and of `madvise`, bytes.
const PAGE: usize = 4096;

/// The system's allocator, except that large allocations are mappings on large pages.
#[derive(Debug)]
pub struct LargePages;

/// Whether an allocation is a mapping. Its owner returns it with the same layout.
#[inline]
fn is_mapped(layout: Layout) -> bool {
    layout.size() >= LARGE && layout.align() <= PAGE
}

// SAFETY: each allocation is either `System`'s, or a mapping of at least its size, which only `is_mapped` decides. New
// memory is uninitialised or zero, `realloc` preserves contents, and advice does not change them.
unsafe impl GlobalAlloc for LargePages {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_mapped(layout) {
            return map(layout.size());
        }
        // SAFETY: the caller's contract is that of this method.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_mapped(layout) {
            return map(layout.size());
        }
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if is_mapped(layout) {
            // SAFETY: the mapping of this allocation, which its owner no longer uses.
            let _ = unsafe { munmap(at.cast(), layout.size()) };
            return;
        }
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's contract: `size` is valid for this alignment.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (is_mapped(layout), is_mapped(new)) {
            // SAFETY: as above.
            (false, false) => unsafe { System.realloc(at, layout, size) },
            // SAFETY: the caller's contract.
            (was_mapped, is_mapped) => unsafe { self.change(at, layout, new, was_mapped && is_mapped) },
        }
    }
}

impl LargePages {
    /// Changes the size of an allocation that is a mapping, or becomes one; `in_place`: both are.
    ///
    /// # Safety
    /// As for `realloc`.
    #[cold]
    unsafe fn change(&self, at: *mut u8, old: Layout, new: Layout, in_place: bool) -> *mut u8 {
        if in_place {
            // SAFETY: the mapping of this allocation; its owner uses the returned address from now on.
            let moved = unsafe { mremap(at.cast(), old.size(), new.size(), MremapFlags::MAYMOVE) };
            // The kernel refuses if parts have different advice.
            if let Ok(moved) = moved {
                advise(moved.cast(), new.size(), Advice::LinuxHugepage);
                return moved.cast();
            }
        }
        // SAFETY: a new allocation does not overlap with the old one, which has the bytes that are copied, and is
        // returned once.
        unsafe {
            let moved = self.alloc(new);
            if !moved.is_null() {
                moved.copy_from_nonoverlapping(at, old.size().min(new.size()));
                self.dealloc(at, old);
            }
            moved
        }
    }
}

/// Maps zeroed memory; null if the kernel has none.
#[cold]
fn map(size: usize) -> *mut u8 {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let mapped = unsafe { mmap_anonymous(null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
    let Ok(at) = mapped else { return null_mut() };
    advise(at.cast(), size, Advice::LinuxHugepage);
    at.cast()
}

/// Advises the kernel to use small pages for memory that is part of a large allocation.
pub(crate) fn keep_small(memory: &mut [u8]) {
    advise(memory.as_mut_ptr(), memory.len(), Advice::LinuxNoHugepage);
}

#[cold]
fn advise(at: *mut u8, size: usize, advice: Advice) {
    let before = at.align_offset(PAGE);
    let whole = size.saturating_sub(before) / PAGE * PAGE;
    // SAFETY: these pages are inside memory of the caller, and both kinds of advice preserve their contents. A kernel
    // without large pages refuses them; then the pages are small anyway.
    let _ = unsafe { madvise(at.wrapping_add(before).cast(), whole, advice) };
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;
    use crate::smaps::{field, resident_kib};

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
        grown.truncate(4 << 20);
        keep_small(&mut grown);
        assert!(!field(&grown, "VmFlags:").contains("hg"), "the first part alone");
        grown.reserve_exact(64 << 20);
        assert!(grown.iter().all(|&b| b == 7), "moved although its parts have different advice");
    }

    #[test]
    fn memory_keeps_its_contents_when_its_size_changes() {
        let mut bytes: Vec<u8> = (0..=255).collect();
        for size in [LARGE - 1, LARGE, 3 * LARGE + 5, 2 * LARGE, LARGE, LARGE - 1, 300] {
            bytes.resize(size, 9);
            bytes.shrink_to_fit();
            assert!(bytes.iter().zip(0..=255).all(|(&there, put)| there == put), "{size} bytes");
            assert!(bytes[256..].iter().all(|&b| b == 9), "{size} bytes");
        }
    }

    #[test]
    fn zeroed_memory_is_the_kernels_also_after_large_memory_was_freed() {
        const SIZE: usize = 24 << 20;
        for _ in 0..3 {
            let mut memory = vec![0u8; SIZE];
            assert!(resident_kib(&memory) < 4 << 10, "{} KiB", resident_kib(&memory));
            memory.fill(1);
        }
    }
}
