//! Mappings of a front-end's memory that survive their loss.
//!
//! Whoever shares memory can shorten its file at any time; the next access to what is gone raises SIGBUS, which would end the
//! process and with it the network of every other guest. While there are mappings a handler of that signal is installed: if
//! the address is in one of them, all of it is replaced by empty memory, and the mapping is marked as lost. Any other
//! SIGBUS goes to whoever handled it before.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use vm_memory::mmap::MmapRegionError;
use vm_memory::{FileOffset, MmapRegion};

/// Most mappings at a time, of all guests together.
const SLOTS: usize = 4096;

/// Where a mapping is. The handler reads this, so it is nothing but atomics; free while `start` is 0.
struct Slot {
    start: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

static TABLE: [Slot; SLOTS] =
    [const { Slot { start: AtomicUsize::new(0), len: AtomicUsize::new(0), lost: AtomicBool::new(false) } }; SLOTS];

/// A slot that is being filled in: no address.
const CLAIMED: usize = 1;

/// A file mapped from its start.
#[derive(Debug)]
pub(super) struct Mapping {
    slot: usize,
    region: MmapRegion,
}

impl Mapping {
    /// Maps `bytes` of `file`.
    ///
    /// # Errors
    /// The kernel's, or there are 4096 mappings already.
    pub(super) fn new(file: File, bytes: usize) -> io::Result<Mapping> {
        install()?;
        let free = |slot: &Slot| slot.start.compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let slot = TABLE.iter().position(free).ok_or_else(|| io::Error::other("too many mappings"))?;
        let region = MmapRegion::from_file(FileOffset::new(file, 0), bytes).map_err(|error| {
            TABLE[slot].start.store(0, Ordering::Release);
            match error {
                MmapRegionError::Mmap(error) => error,
                error => io::Error::other(error),
            }
        })?;
        TABLE[slot].lost.store(false, Ordering::Relaxed);
        TABLE[slot].len.store(bytes, Ordering::Relaxed);
        TABLE[slot].start.store(region.as_ptr().addr(), Ordering::Release);
        Ok(Mapping { slot, region })
    }

    pub(super) fn region(&self) -> &MmapRegion {
        &self.region
    }

    /// Whether its file has become too short, and some access noticed. What it held is gone.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        TABLE[self.slot].lost.load(Ordering::Relaxed)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before the addresses can become somebody else's.
        TABLE[self.slot].start.store(0, Ordering::Release);
    }
}

/// What was installed before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn install() -> io::Result<()> {
    static DONE: OnceLock<Option<i32>> = OnceLock::new();
    let failed = DONE.get_or_init(|| {
        // SAFETY: both structures are plain data for which zeros are valid; the handler does nothing that a signal
        // handler may not do. What was there before is known before the handler can be entered.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut before) == 0 {
                let _ = PREVIOUS.set(before);
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_bus_error as *const () as libc::sighandler_t;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                if libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) == 0 {
                    return None;
                }
            }
        }
        io::Error::last_os_error().raw_os_error()
    });
    failed.map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code)))
}

extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid structure, whose address is set for this signal.
    let at = unsafe { (*info).si_addr() }.addr();
    let hit = TABLE.iter().find(|slot| {
        let start = slot.start.load(Ordering::Acquire);
        start > CLAIMED && at.wrapping_sub(start) < slot.len.load(Ordering::Relaxed)
    });
    if let Some(slot) = hit {
        let (start, len) = (slot.start.load(Ordering::Relaxed), slot.len.load(Ordering::Relaxed));
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_FIXED | libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        // SAFETY: the addresses are those of a mapping that is in use, for the access that failed is one to it. It belongs
        // to `Mapping` alone, which gives out no references, only volatile and atomic accesses; they go on, on empty memory.
        let mapped = unsafe { libc::mmap(start as *mut c_void, len, protection, flags, -1, 0) };
        if mapped != libc::MAP_FAILED {
            slot.lost.store(true, Ordering::Relaxed);
            return;
        }
    }
    pass_on(signal, info, context);
}

/// Lets whoever was there before have the signal; if nobody was, the process ends with it, as it should.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.get();
    let handler = previous.map_or(libc::SIG_DFL, |action| action.sa_sigaction);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: back to the default action; the access is tried again on return, and fails for good.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    } else if previous.is_some_and(|action| action.sa_flags & libc::SA_SIGINFO != 0) {
        // SAFETY: with this flag the kernel was given a function of these arguments.
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: without it, a function of this one.
        let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, VolatileMemory};

    use super::*;

    #[test]
    fn a_file_that_is_cut_is_empty_memory_from_then_on() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 20).expect("its size");
        let mapping = Mapping::new(file.try_clone().expect("another descriptor"), 1 << 20).expect("a mapping");
        let other = tempfile::tempfile().expect("a file");
        other.set_len(4096).expect("its size");
        let other = Mapping::new(other, 4096).expect("a mapping");
        let word = |m: &Mapping, at: usize| m.region().as_volatile_slice().read_obj::<u64>(at).expect("inside");
        mapping.region().as_volatile_slice().write_obj(7u64, 0).expect("inside");
        mapping.region().as_volatile_slice().write_obj(8u64, 1 << 19).expect("inside");
        other.region().as_volatile_slice().write_obj(9u64, 0).expect("inside");
        file.set_len(4096).expect("shorter");
        assert_eq!((word(&mapping, 0), mapping.is_lost()), (7, false), "what is left is left");
        assert_eq!((word(&mapping, 1 << 19), mapping.is_lost()), (0, true));
        assert_eq!(word(&mapping, 0), 0, "all of it is gone");
        mapping.region().as_volatile_slice().write_obj(5u64, 1 << 19).expect("inside");
        assert_eq!(word(&mapping, 1 << 19), 5);
        assert_eq!((word(&other, 0), other.is_lost()), (9, false));
    }

    #[test]
    fn slots_are_used_again() {
        for _ in 0..2 * SLOTS {
            let file = tempfile::tempfile().expect("a file");
            file.set_len(4096).expect("its size");
            drop(Mapping::new(file, 4096).expect("a mapping"));
        }
        let file = tempfile::tempfile().expect("a file");
        assert!(Mapping::new(file, 0).is_err(), "nothing to map");
        let taken = TABLE.iter().filter(|slot| slot.start.load(Ordering::Relaxed) != 0).count();
        assert!(taken < 64, "{taken} slots are taken for the mappings of the other tests");
    }
}
