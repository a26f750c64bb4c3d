//! A hint to the processor.
#![allow(unsafe_code)]

/// Prefetches the cache line that contains the start of `at`. Does not wait.
#[inline(always)]
pub fn prefetch<T>(at: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE, which the instruction needs, is part of x86-64. A prefetch has no architectural effect and never
    // faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(at).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Prefetches all cache lines of `at`.
#[inline(always)]
pub fn prefetch_whole<T>(at: &T) {
    const LINE: usize = 64;
    #[cfg(target_arch = "x86_64")]
    for offset in (0..size_of::<T>()).step_by(LINE).chain(size_of::<T>().checked_sub(1)) {
        // SAFETY: as in `prefetch`; the address is inside of `at`.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(at).cast::<i8>().wrapping_add(offset));
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, LINE);
}
