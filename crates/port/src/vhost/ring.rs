//! What split and packed virtqueues have in common for the code that works on them: buffers are taken, looked at, given back, and
//! shown to the driver in batches.
//!
//! The driver may write anything at any time. Every value is read once and checked; a driver that breaks the rules of the
//! ring itself has it taken out of use ([`Broken`]), one that only describes a bad buffer loses the packet.

use std::fmt::Debug;
use std::sync::Arc;

use super::call::Call;
use super::dirty_log::DirtyLog;
use super::index::{Index, Size};
use super::memory::{Area, Memory};

/// In a packed ring's position: the wrap counter.
pub(crate) const WRAP: u16 = 1 << 15;

/// The device's side of a ring. Buffers are named by an index: that of the first descriptor in a split ring, the buffer's id
/// in a packed one.
///
/// Buffers that the device holds and those that it has used and not yet shown are never more than the ring has, whatever the
/// guest writes.
pub(crate) trait Ring: Sized + Debug + Send + 'static {
    /// `None`: a size that is none, or tables that are not memory.
    fn open(memory: &Arc<Memory>, spec: RingSpec) -> Option<Self>;

    /// Descriptors.
    fn size(&self) -> Size;

    /// What the ring and its buffers are in.
    fn memory(&self) -> &Memory;

    /// The next available buffer's place, as a front-end has it: with the wrap counter in bit 15 if the ring is packed.
    fn base(&self) -> u16;

    /// Buffers that an earlier life of this daemon has left behind, in the order in which they were taken.
    fn take_recovered(&mut self) -> Vec<Index>;

    /// The buffer that was taken last and can be left to the ring again, if there is one. In a split ring that is what the
    /// driver says, which may have changed since.
    fn last_taken(&self) -> Option<Index>;

    /// The [last](Self::last_taken) buffer was not taken after all.
    fn untake_last(&mut self, head: Index);

    /// Takes the next buffer.
    fn pop(&mut self) -> Result<Option<Index>, Broken>;

    /// Collects the pieces of a buffer that was taken into `out`; all of them are in the guest's memory.
    fn chain(&self, head: Index, want: Want, out: &mut Vec<Piece>) -> Walk;

    /// Gives a buffer back with `len` bytes written; the driver does not see it before [`show`](Self::show).
    fn push_used(&mut self, head: Index, len: u32);

    /// Whether used buffers wait to be shown.
    fn has_unshown(&self) -> bool;

    /// Shows the driver all used buffers at once and notifies it if it wants to know. Returns whether it was notified.
    fn show(&mut self) -> bool;

    /// Asks the driver to notify when it adds buffers. Returns whether there are some already: then it may not notify.
    fn ask_for_kicks(&mut self) -> Result<bool, Broken>;

    /// Asks the driver not to notify, since the caller polls anyway.
    fn ask_for_silence(&mut self);

    /// From now on, marks what it writes to the ring in `log`, or nothing.
    fn set_log(&mut self, log: Option<DirtyLog>);

    /// Bytes of this process that copies of descriptors take.
    fn descriptor_bytes(&self) -> usize;
}

/// What is wanted of a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    /// All pieces are to be written; otherwise all are to be read.
    pub(crate) writable: bool,
    /// Most bytes that it may have.
    pub(crate) limit: u32,
    /// Bytes that are enough: further descriptors are not looked at.
    pub(crate) enough: u32,
}

/// What looking at a buffer has brought.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk {
    /// Descriptors that were read, at least 1.
    pub(crate) descriptors: u32,
    /// Bytes of the pieces, or why it is not used.
    pub(crate) bytes: Result<u32, BadChain>,
}

/// Where a ring is, and what was agreed on.
#[derive(Debug)]
pub(crate) struct RingSpec {
    /// Descriptors, a power of two.
    pub(crate) size: u16,
    /// Address of the descriptor table or ring in the front-end's process.
    pub(crate) descriptors: u64,
    /// Of the available ring, or of the driver's event suppression structure.
    pub(crate) available: u64,
    /// Of the used ring, or of the device's event suppression structure.
    pub(crate) used: u64,
    /// The first available buffer to take; see [`Ring::base`].
    pub(crate) base: u16,
    /// `VIRTIO_F_EVENT_IDX`.
    pub(crate) event_idx: bool,
    /// Where to log what is written.
    pub(crate) log: Option<DirtyLog>,
    /// The guest address that stands for `used` in the log; `None`: its own.
    pub(crate) used_in_log: Option<u64>,
    /// Tells the driver of used buffers.
    pub(crate) call: Arc<Call>,
    /// Where to note what is in flight: as many bytes as the ring's format takes.
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
    #[error("its driver offers more buffers than the ring has")]
    AvailableIndex,
    #[error("its driver offers a descriptor that the ring does not have")]
    Head,
    #[error("its driver offers a buffer that it has not got back")]
    Twice,
    #[error("the file of its guest's memory was cut")]
    Memory,
    #[error("its driver goes on offering buffers that cannot be used")]
    BadBuffers,
    #[error("its driver offers a buffer of too many descriptors")]
    ChainLength,
    /// The device's own count was wrong: never seen.
    #[error("there are no records left of what is in flight")]
    Records,
}

/// What is wrong with one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BadChain {
    /// Its chain has no end, or a link out of the table.
    Link,
    /// An indirect table of impossible size, or within another one, or with something behind it.
    Indirect,
    /// To be written where it was to be read, or the other way round.
    Direction,
    /// Not in the guest's memory.
    Address,
    /// Longer than a packet can be.
    Length,
    /// More descriptors than a buffer may have.
    Pieces,
}
