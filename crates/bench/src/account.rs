//! A counting allocator: bytes and calls, charged to the current account.
//!
//! Only one thread may be measured, because the current account is a property of the process.

// `GlobalAlloc` has `unsafe` methods; these pass all calls on to the system's allocator.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// The owner of allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Account {
    /// Everything that does not belong to an engine.
    Other,
    /// The sending engine and its output.
    Sender,
    /// The receiving engine and its output.
    Receiver,
}

/// The allocations of an account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balance {
    /// Bytes in use, as requested.
    pub bytes: i64,
    /// Number of calls that allocated memory or enlarged an allocation.
    pub allocations: u64,
}

static CURRENT: AtomicUsize = AtomicUsize::new(0);
static BYTES: [AtomicI64; 3] = [const { AtomicI64::new(0) }; 3];
static ALLOCATIONS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

/// Charges allocations to `account` from now on.
pub fn charge(account: Account) {
    CURRENT.store(account as usize, Relaxed);
}

/// The balance of an account. All zero unless [`Counting`] is the program's allocator.
pub fn balance(account: Account) -> Balance {
    let i = account as usize;
    Balance { bytes: BYTES[i].load(Relaxed), allocations: ALLOCATIONS[i].load(Relaxed) }
}

fn add(bytes: i64, allocations: u64) {
    let i = CURRENT.load(Relaxed);
    BYTES[i].fetch_add(bytes, Relaxed);
    ALLOCATIONS[i].fetch_add(allocations, Relaxed);
}

/// The system's allocator with counting. Frees are credited to the current account, too, so an engine's memory must
/// be freed on its own account.
#[derive(Debug)]
pub struct Counting;

// SAFETY: every call is passed on to `System` unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as i64, 1);
        // SAFETY: the caller guarantees what `System` requires.
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
