//! Prefetch hints for memory that is shared with other writers: by address, because it holds no Rust values.

/// Length of a cache line, bytes.
pub(crate) const LINE: usize = 64;

/// Prefetches a line for writing, if the processor supports it.
#[inline]
pub(crate) fn prefetch_to_write(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint: it changes nothing, and an unmapped address is harmless. Processors without the instruction
    // execute it as a no-op.
    unsafe {
        // The intrinsic becomes a prefetch for reading unless the whole program is compiled for processors with this
        // instruction.
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

/// The same for a line that is only read.
#[inline]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint: it reads nothing, and an unmapped address is harmless.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
