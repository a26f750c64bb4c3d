//! How long a thread runs before others have their turn.
//!
//! Linux's scheduler (EEVDF, 6.6) lets of those that are owed time run the one whose slice ends first, and a thread that yields gives
//! up the rest of its slice: some milliseconds, for which it has less than its share afterwards, so that each thread that it wakes
//! takes the processor at once. A short slice is a small debt. It changes nobody's share.

use std::io;
use std::mem::size_of;

/// `struct sched_attr` of `linux/sched/types.h`, in its first form.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

/// Asks for slices of `ns` for the calling thread. Linux takes 100 us to 100 ms, from 6.12 on, and ignores it before. A thread of a
/// real-time policy, or of the idle one, is left alone.
///
/// # Errors
/// The kernel refuses, or a sandbox does.
pub fn set_slice(ns: u64) -> io::Result<()> {
    let mut attributes = attributes()?;
    if !attributes.has_slices() {
        return Ok(());
    }
    attributes.runtime_ns = ns;
    // SAFETY: the kernel reads a struct of the size that is in it.
    check(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) })
}

impl Attributes {
    /// Whether a thread with this policy may choose its slices.
    fn has_slices(&self) -> bool {
        [libc::SCHED_OTHER, libc::SCHED_BATCH].contains(&(self.policy as libc::c_int))
    }
}

/// The calling thread's.
fn attributes() -> io::Result<Attributes> {
    let mut attributes = Attributes::default();
    let size = size_of::<Attributes>() as libc::c_uint;
    // SAFETY: the kernel writes at most `size` bytes to the struct, all values of which are valid.
    check(unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) })?;
    Ok(attributes)
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gets_the_slice_and_keeps_all_else() {
        let other = std::thread::spawn(|| {
            let before = attributes().expect("asking");
            set_slice(200_000).expect("a slice");
            (before, attributes().expect("asking"))
        });
        let (before, after) = other.join().expect("thread");
        assert_eq!((before.policy, before.nice), (after.policy, after.nice));
        // Kernels that know no slices do not tell one.
        let is_set = before.has_slices() && before.runtime_ns != 0;
        let expected = if is_set { 200_000 } else { before.runtime_ns };
        assert_eq!(after.runtime_ns, expected, "{before:?}");
    }
}
