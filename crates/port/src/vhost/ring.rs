//! The common interface of split and packed virtqueues: buffers are taken, read or written, returned, and shown to the
//! driver in batches.
//!
//! The driver may write anything at any time. Every value is read once and checked. A driver that violates the ring
//! format has its ring taken out of use ([`Broken`]); one that only describes a bad buffer loses the packet.

use std::fmt::Debug;
use std::sync::Arc;

use super::call::Call;
use super::dirty_log::DirtyLog;
use super::index::{Index, Size};
use super::memory::{Area, Memory};

/// The wrap counter's bit in a packed ring's position.
pub(crate) const WRAP: u16 = 1 << 15;

/// The device's side of a ring. Buffers are identified by an index: that of the first descriptor in a split ring, the
/// buffer's id in a packed one.
///
/// The number of buffers that the device holds, or has used and not yet shown, never exceeds the ring's size, whatever
/// the guest writes.
pub(crate) trait Ring: Sized + Debug + Send + 'static {
    /// `None`: an invalid size, or tables that are not memory.
    fn open(memory: &Arc<Memory>, spec: RingSpec) -> Option<Self>;

    /// Number of descriptors.
    fn size(&self) -> Size;

    /// The memory that contains the ring and its buffers.
    fn memory(&self) -> &Memory;

    /// Position of the next available buffer in the front-end's format: with the wrap counter in bit 15 if the ring is
    /// packed.
    fn base(&self) -> u16;

    /// Buffers taken by an earlier life of this daemon, in the order of taking.
    fn take_recovered(&mut self) -> Vec<Index>;

    /// The buffer taken last, if it can be untaken. In a split ring the driver's entry determines it, which may have
    /// changed since.
    fn last_taken(&self) -> Option<Index>;

    /// Undoes taking the [last](Self::last_taken) buffer.
    fn untake_last(&mut self, head: Index);

    /// Takes the next buffer.
    fn pop(&mut self) -> Result<Option<Index>, Broken>;

    /// Collects the pieces of a taken buffer into `out`; all are in the guest's memory.
    fn chain(&self, head: Index, want: Want, out: &mut Vec<Piece>) -> Walk;

    /// Returns a buffer with `len` bytes written; the driver sees it after [`show`](Self::show).
    fn push_used(&mut self, head: Index, len: u32);

    /// Whether there are used buffers that are not shown.
    fn has_unshown(&self) -> bool;

    /// Shows the driver all used buffers at once, and notifies it if requested. Returns whether it was notified.
    fn show(&mut self) -> bool;

    /// Enables kicks. Returns whether there are available buffers already: for these the driver may not kick.
    fn ask_for_kicks(&mut self) -> Result<bool, Broken>;

    /// Disables kicks, because the caller polls.
    fn ask_for_silence(&mut self);

    /// The [`base`](Self::base) for another process that takes the buffers held here, too; `in_order`: buffers are
    /// returned in the order in which they were taken. `None`: it could not know which ones these are.
    fn left_base(&self, in_order: bool) -> Option<u16>;

    /// From now on, marks writes to the ring in `log`; `None` stops that.
    fn set_log(&mut self, log: Option<DirtyLog>);

    /// Memory of this process for copies of descriptors, bytes.
    fn descriptor_bytes(&self) -> usize;
}

/// Requirements on a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    /// Whether all pieces must be device-writable; otherwise all must be readable.
    pub(crate) writable: bool,
    /// Maximum length, bytes.
    pub(crate) limit: u32,
    /// Number of bytes needed: further descriptors are not read.
    pub(crate) enough: u32,
}

/// Result of reading a buffer's descriptors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk {
    /// Descriptors read, at least 1.
    pub(crate) descriptors: u32,
    /// Total length of the pieces, or why the buffer is rejected.
    pub(crate) bytes: Result<u32, BadChain>,
}

/// Addresses of a ring, and the negotiated features.
#[derive(Debug)]
pub(crate) struct RingSpec {
    /// Number of descriptors; a power of two unless the ring is packed.
    pub(crate) size: u16,
    /// Address of the descriptor table or ring in the front-end's process.
    pub(crate) descriptors: u64,
    /// Address of the available ring, or of the driver's event suppression structure.
    pub(crate) available: u64,
    /// Address of the used ring, or of the device's event suppression structure.
    pub(crate) used: u64,
    /// The first available buffer to take; see [`Ring::base`].
    pub(crate) base: u16,
    /// `VIRTIO_F_EVENT_IDX`.
    pub(crate) event_idx: bool,
    /// Log for written pages.
    pub(crate) log: Option<DirtyLog>,
    /// The guest address of `used` in the log; `None`: its own.
    pub(crate) used_in_log: Option<u64>,
    /// Notifies the driver of used buffers.
    pub(crate) call: Arc<Call>,
    /// Memory for the inflight record, of the length that the ring's format needs.
    pub(crate) record: Option<Area>,
}

/// A piece of a buffer in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) guest: u64,
    pub(crate) len: u32,
}

/// Why a ring is out of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    #[error("its driver offers more buffers than the ring can hold")]
    AvailableIndex,
    #[error("its driver offers a descriptor index beyond the ring's size")]
    Head,
    #[error("its driver offers a buffer that is in flight")]
    Twice,
    #[error("the file of its guest's memory was truncated")]
    Memory,
    #[error("its driver keeps offering invalid buffers")]
    BadBuffers,
    #[error("its driver offers a buffer with too many descriptors")]
    ChainLength,
    /// The device's own count was wrong: never observed.
    #[error("the inflight record has no free entries")]
    Records,
}

/// Why a buffer is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BadChain {
    /// Its chain is endless, or links outside the table.
    Link,
    /// An indirect table of impossible size, nested, or followed by another descriptor.
    Indirect,
    /// Device-writable where it must be readable, or the reverse.
    Direction,
    /// Not in the guest's memory.
    Address,
    /// Longer than the maximum packet.
    Length,
    /// Too many descriptors.
    Pieces,
}
