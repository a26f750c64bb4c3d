//! Memory that is free goes back to the system.

#![allow(unsafe_code)]

/// Gives free memory back that the allocator would keep: to read a configuration of very many routes takes ten times what it is in the
/// end, in pieces that lie among those that stay. The allocator's arenas are locked one after the other, so a thread that allocates may wait
/// while its own is looked through; workers do not allocate for packets.
pub(crate) fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called at any time, by any thread (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}
