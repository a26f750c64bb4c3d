//! A counting allocator: bytes and calls, charged to the account that is named at the time.
//!
//! Only one thread may be measured: the named account is the process's.

// The allocator is a trait of `unsafe` methods; these pass everything on to the system's.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Who pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Account {
    /// Whatever is not an engine's.
    Other,
    /// The sending engine and its output.
    Sender,
    /// The receiving engine and its output.
    Receiver,
}

/// What was allocated on an account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balance {
    /// Bytes in use, as they were asked for.
    pub bytes: i64,
    /// Calls that allocated, or enlarged an allocation, so far.
    pub allocations: u64,
}

static CURRENT: AtomicUsize = AtomicUsize::new(0);
static BYTES: [AtomicI64; 3] = [const { AtomicI64::new(0) }; 3];
static ALLOCATIONS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

/// From now on `account` pays.
pub fn charge(account: Account) {
    CURRENT.store(account as usize, Relaxed);
}

/// How an account stands. All zero unless [`Counting`] is the program's allocator.
pub fn balance(account: Account) -> Balance {
    let i = account as usize;
    Balance { bytes: BYTES[i].load(Relaxed), allocations: ALLOCATIONS[i].load(Relaxed) }
}

fn add(bytes: i64, allocations: u64) {
    let i = CURRENT.load(Relaxed);
    BYTES[i].fetch_add(bytes, Relaxed);
    ALLOCATIONS[i].fetch_add(allocations, Relaxed);
}

/// The system's allocator, counted. Frees are charged to the account in force, too, so an engine's memory must be freed
/// on its own account; in [`crate::round`] it is.
#[derive(Debug)]
pub struct Counting;

// SAFETY: every call is passed on to `System` unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as i64, 1);
        // SAFETY: the caller's promises are `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        add(-(layout.size() as i64), 0);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as i64, 1);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size as i64 - layout.size() as i64, 1);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}
