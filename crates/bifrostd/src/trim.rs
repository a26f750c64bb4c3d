//! Memory that is free goes back to the system.

#![allow(unsafe_code)]

/// Gives free memory back that the allocator would keep: to read a configuration of very many routes takes ten times what it is in the
/// end, in pieces that lie among those that stay. Threads that allocate meanwhile may wait for each other, but not for those with an
/// arena of their own, such as workers.
pub(crate) fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called at any time, by any thread (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}
