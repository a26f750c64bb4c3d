//! Returns free memory to the system.

#![allow(unsafe_code)]

/// Returns free memory that the allocator would keep: reading a configuration of very many routes takes ten times its
/// final size, in fragments between memory that stays in use. The allocator's arenas are locked one by one, so a thread
/// that allocates may wait while its arena is scanned; workers do not allocate for packets.
pub(crate) fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called at any time, by any thread (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}
