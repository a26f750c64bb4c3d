//! Hints to the processor about memory that somebody else writes, too: by address, for what lies there is not a value of ours.

/// Bytes that a processor fetches at once.
pub(crate) const LINE: usize = 64;

/// Has the processor fetch a line that is to be written into its cache, if it can be told to.
#[inline]
pub(crate) fn prefetch_to_write(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint: it changes nothing, and an address that is not mapped does no harm. Processors that do not know it take
    // it for no operation.
    unsafe {
        // The intrinsic becomes one for reading unless all of the program is for processors that know this one.
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

/// The same for a line that is only read.
#[inline]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint: it reads nothing, and an address that is not mapped does no harm.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
