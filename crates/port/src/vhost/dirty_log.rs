//! The log of pages that this process writes in a guest's memory, for a front-end that moves the guest to another host
//! (vhost-user, "Migration"): one bit for each 4 KiB of guest addresses, in memory that the front-end has shared.
//!
//! The front-end reads and clears bits at any time, and copies the pages that they name. So a bit is set after the write
//! that it stands for, with an atomic operation that nothing before it passes.

use std::fs::File;
use std::sync::Arc;

use super::call::Call;
use super::memory::{Area, Memory, MemoryError, RegionSpec};
use super::mutation::mutated;

/// Bytes of guest addresses that one bit stands for (vhost-user: `VHOST_LOG_PAGE`).
pub const LOG_PAGE: u64 = 4096;
/// Bytes of guest addresses that one byte of a log stands for.
const LOG_BYTE: u64 = 8 * LOG_PAGE;
/// Largest log, bytes: for guest addresses of 48 bits.
pub(super) const MAX_BYTES: u64 = 8 << 30;

/// A front-end's log. Copies are the same log.
#[derive(Clone, Debug)]
pub struct DirtyLog(Arc<Log>);

#[derive(Debug)]
struct Log {
    bits: Area,
    /// At least 1.
    bytes: u64,
    /// Who is told that there is something new, if anybody is.
    call: Arc<Call>,
}

impl DirtyLog {
    /// The log of `bytes` bytes at `offset` in `file`, which is shared memory.
    ///
    /// # Errors
    /// The file is shorter, or cannot be mapped. The caller has checked that `bytes` is 1 to [`MAX_BYTES`].
    pub(super) fn open(file: File, offset: u64, bytes: u64, call: &Arc<Call>) -> Result<DirtyLog, MemoryError> {
        let mut memory = Memory::default();
        memory.add(RegionSpec { guest: 0, user: 0, size: bytes, offset, file })?;
        let bits = Memory::area(&Arc::new(memory), 0, bytes as usize, 1);
        let bits = bits.ok_or(MemoryError::Region { guest: 0, size: bytes, problem: "it is not one area" })?;
        Ok(DirtyLog(Arc::new(Log { bits, bytes, call: Arc::clone(call) })))
    }

    /// Marks the pages of `len` bytes at `guest`, which were written before. Those behind the end of the log are left out: the
    /// front-end asked for no more.
    #[inline]
    pub(super) fn mark(&self, guest: u64, len: u64) {
        if len == 0 || mutated!(NothingMarked) {
            return;
        }
        let (start, end) = (guest, guest.saturating_add(len - 1));
        let byte_of = |guest: u64| guest / LOG_BYTE;
        for byte in byte_of(start)..=byte_of(end).min(self.0.bytes - 1) {
            let from = if byte == byte_of(start) { start / LOG_PAGE % 8 } else { 0 };
            let to = if byte == byte_of(end) { end / LOG_PAGE % 8 } else { 7 };
            self.0.bits.set_bits(byte as usize, 0xff << from & 0xff >> (7 - to));
        }
    }

    /// Tells the front-end that pages were marked, if it has asked for that. Never blocks.
    pub(super) fn tell(&self) {
        self.0.call.notify();
    }

    /// Whether it has a bit for each page of `memory`.
    pub(super) fn covers(bytes: u64, memory: &Memory) -> bool {
        bytes.checked_mul(LOG_BYTE).is_none_or(|end| memory.end() <= end)
    }
}

#[cfg(test)]
#[path = "dirty_log_tests.rs"]
mod tests;
