//! Makes the kernel provide memory before it is touched (`madvise(2)`, MADV_POPULATE_WRITE).
//!
//! The kernel clears a page when it is touched first. For a page of 2 MiB this takes from a tenth of a millisecond to
//! several milliseconds, in which a worker would serve no guest.

#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::mm::{Advice, madvise};

/// Bytes of a large page.
pub const LARGE_PAGE: usize = 2 << 20;
/// Granularity of `madvise`, bytes.
const PAGE: usize = 4096;
/// Added niceness of the thread: a worker that has packets comes first. Beside one that is always busy, it gets a seventh
/// of a CPU (`sched(7)`).
const NICER: i32 = 8;
/// Ranges that may wait for the thread.
const WAITING: usize = 256;

static LATER: OnceLock<SyncSender<Work>> = OnceLock::new();

/// Number of [`Pause`]s.
static PAUSES: Mutex<u32> = Mutex::new(0);
static RESUMED: Condvar = Condvar::new();

/// While this exists, the thread provides no memory. A thread that changes the address space, or that needs new memory
/// in a system call, otherwise waits for it.
#[derive(Debug)]
pub struct Pause(());

/// Stops the thread, at the latest after the large page that it is providing.
#[must_use]
pub fn pause() -> Pause {
    *PAUSES.lock().unwrap_or_else(PoisonError::into_inner) += 1;
    Pause(())
}

impl Drop for Pause {
    fn drop(&mut self) {
        *PAUSES.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        RESUMED.notify_all();
    }
}

/// Waits until there is no [`Pause`].
fn until_resumed() {
    let pauses = PAUSES.lock().unwrap_or_else(PoisonError::into_inner);
    drop(RESUMED.wait_while(pauses, |pauses| *pauses > 0));
}

/// What the thread does next.
enum Work {
    Provide(Range<usize>),
    /// Reports that everything before this is done.
    Report(SyncSender<()>),
}

/// Starts the thread that [`later`] needs, unless it runs. It runs until the process ends.
///
/// # Errors
/// No thread can be started.
pub fn start() -> io::Result<()> {
    if LATER.get().is_some() {
        return Ok(());
    }
    let (later, work) = sync_channel(WAITING);
    let provide = move || {
        // On Linux niceness is per thread. Raising it cannot fail.
        let _ = rustix::process::nice(NICER);
        for work in work {
            match work {
                Work::Provide(memory) => pages(memory).for_each(|page| {
                    until_resumed();
                    populate(page);
                }),
                Work::Report(done) => drop(done.try_send(())),
            }
        }
    };
    std::thread::Builder::new().name("memory".to_owned()).spawn(provide)?;
    // If another thread was faster, this one's ends.
    let _ = LATER.set(later);
    Ok(())
}

/// Has a thread provide the memory at these addresses soon. Returns false if too much is waiting already. Without the
/// thread, nothing happens, and the first thread that touches the memory waits.
pub fn later(memory: Range<usize>) -> bool {
    LATER.get().is_none_or(|later| later.try_send(Work::Provide(memory)).is_ok())
}

/// Waits until the thread has provided everything that it was asked for, at most this long. Meanwhile, other threads
/// that change the address space would wait for it, and threads that touch new memory for these.
pub fn wait(patience: Duration) -> bool {
    let Some(later) = LATER.get() else { return true };
    let (done, report) = sync_channel(1);
    later.send(Work::Report(done)).is_ok() && report.recv_timeout(patience).is_ok()
}

/// Provides the memory at these addresses. Contents do not change. Kernels before Linux 5.14 ignore it; so do all where
/// there is no writable memory, because its owner has returned it.
pub fn now(memory: Range<usize>) {
    pages(memory).for_each(populate);
}

/// One large page at a time, so that other threads can change the address space in between.
fn pages(memory: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut at = memory.start & !(PAGE - 1);
    let end = if memory.is_empty() { at } else { memory.end.next_multiple_of(PAGE) };
    std::iter::from_fn(move || {
        let from = at;
        at = (at + 1).next_multiple_of(LARGE_PAGE).min(end);
        (from < end).then_some(from..at)
    })
}

fn populate(pages: Range<usize>) {
    // SAFETY: this advice does not change contents, whatever is there.
    let _ = unsafe { madvise(std::ptr::without_provenance_mut(pages.start), pages.len(), Advice::LinuxPopulateWrite) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::smaps::resident_kib;

    #[test]
    fn provided_memory_is_resident_and_unchanged() {
        let mut memory = vec![0u8; 64 << 20];
        memory[10 << 20] = 7;
        let from = memory.as_ptr().addr();
        now(from + (8 << 20)..from + (24 << 20));
        let resident = resident_kib(&memory);
        // Large pages at both ends may be provided as a whole.
        assert!((16 << 10..=20 << 10).contains(&resident), "{resident} KiB");
        assert_eq!((memory[10 << 20], memory[20 << 20]), (7, 0));
        // Nothing is there, or nothing that can be written.
        now(0..1);
        now(now as fn(_) as usize..now as fn(_) as usize + 1);
    }

    #[test]
    fn a_thread_provides_memory_later() {
        start().expect("a thread");
        start().expect("the same thread");
        let memory = vec![0u8; 32 << 20];
        let from = memory.as_ptr().addr();
        assert!(later(from..from + (16 << 20)));
        assert!(wait(Duration::from_secs(10)));
        assert!(resident_kib(&memory) >= 16 << 10, "{} KiB", resident_kib(&memory));
    }

    #[test]
    fn nothing_is_provided_during_a_pause() {
        start().expect("a thread");
        let memory = vec![0u8; 32 << 20];
        let from = memory.as_ptr().addr();
        let paused = pause();
        // The page that it may be providing for another test.
        wait(Duration::from_millis(100));
        let before = resident_kib(&memory);
        assert!(later(from..from + (16 << 20)));
        assert!(!wait(Duration::from_millis(100)), "the thread was not stopped");
        assert_eq!(resident_kib(&memory), before);
        drop(paused);
        assert!(wait(Duration::from_secs(10)));
        assert!(resident_kib(&memory) >= 16 << 10, "{} KiB", resident_kib(&memory));
    }

    #[test]
    fn memory_is_provided_by_large_page() {
        const MIB: usize = 1 << 20;
        let of = |memory: Range<usize>| pages(memory).map(|page| (page.start, page.end)).collect::<Vec<_>>();
        assert_eq!(of(MIB + 5..MIB + 5), []);
        assert_eq!(of(MIB + 5..MIB + 6), [(MIB, MIB + PAGE)]);
        let end = 5 * MIB - 1;
        assert_eq!(of(MIB + 5..end), [(MIB, 2 * MIB), (2 * MIB, 4 * MIB), (4 * MIB, 5 * MIB)]);
    }
}
