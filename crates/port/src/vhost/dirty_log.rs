//! Dirty-page log: the pages that this process writes in a guest's memory, for a front-end that migrates the guest to
//! another host (vhost-user, "Migration"). One bit per 4 KiB of guest addresses, in memory shared by the front-end.
//!
//! The front-end reads and clears bits at any time, and copies the marked pages. So a bit is set after the write that
//! it stands for, with a release operation.

use std::fs::File;
use std::sync::Arc;

use super::call::Call;
use super::memory::{Area, Memory, MemoryError, Place, RegionSpec};
use super::mutation::mutated;

/// Bytes of guest addresses per bit (vhost-user: `VHOST_LOG_PAGE`).
pub const LOG_PAGE: u64 = 4096;
/// Bytes of guest addresses per byte of the log.
const LOG_BYTE: u64 = 8 * LOG_PAGE;
/// Maximum size of a log, bytes: for 48-bit guest addresses.
pub(super) const MAX_BYTES: u64 = 8 << 30;

/// A front-end's log. Clones share the same log.
#[derive(Clone, Debug)]
pub struct DirtyLog(Arc<Log>);

#[derive(Debug)]
struct Log {
    bits: Area,
    memory: Arc<Memory>,
    /// At least 1.
    bytes: u64,
    /// Notified of new marks, if there is a target.
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
        let memory = Arc::new(memory);
        let bits = Memory::area(&memory, 0, bytes as usize, 1);
        let bits = bits.ok_or(MemoryError::Region { guest: 0, size: bytes, problem: "it is not contiguous" })?;
        Ok(DirtyLog(Arc::new(Log { bits, memory, bytes, call: Arc::clone(call) })))
    }

    /// The log's size and offset in its file, for another process.
    pub(super) fn place(&self) -> Option<(Place, &File)> {
        self.0.memory.specs().next().map(|(place, _, file)| (place, file))
    }

    /// Marks the pages of `len` bytes at `guest`, which were written before. Pages beyond the end of the log are
    /// skipped: the front-end did not request them.
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

    /// Marks all pages of `memory`.
    pub(super) fn mark_all(&self, memory: &Memory) {
        memory.spans().for_each(|(guest, size)| self.mark(guest, size));
    }

    /// Notifies the front-end of new marks, if it requested that. Never blocks.
    pub(super) fn tell(&self) {
        self.0.call.notify();
    }

    /// Whether it covers all of `memory`.
    pub(super) fn covers(bytes: u64, memory: &Memory) -> bool {
        bytes.checked_mul(LOG_BYTE).is_none_or(|end| memory.end() <= end)
    }
}

#[cfg(test)]
#[path = "dirty_log_tests.rs"]
mod tests;
