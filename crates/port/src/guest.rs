//! The guest side of a port: fetch, complete, place, publish.

use std::io;
use std::os::fd::BorrowedFd;

use bifrost_nic::Offload;

/// Names a packet that the guest wants to send. The port keeps its bytes until [`GuestPort::complete`].
/// Always below [`GuestPort::tx_capacity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TxHandle(pub u32);

/// Names a received packet that was placed for the guest and is not yet visible to it.
/// Always below [`GuestPort::rx_capacity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RxHandle(pub u32);

/// One fetched transmit packet.
#[derive(Clone, Copy, Debug)]
pub struct TxFrame {
    /// Names the packet until it is completed.
    pub handle: TxHandle,
    /// Bytes of the Ethernet frame, without any virtio header.
    pub len: u32,
    /// What the guest left to be done: checksum, segmentation.
    pub offload: Offload,
}

/// Why a received packet could not be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaceError {
    /// The guest (or the port's pool) has no free receive buffer; the packet is not acknowledged and comes again.
    NoBuffer,
    /// The frame is larger than a receive buffer can be.
    TooLarge,
}

/// A port towards a guest.
///
/// The order of calls for received packets: [`place`](Self::place) on arrival, in arrival order;
/// [`publish`](Self::publish) in the order in which the guest shall see them; [`notify`](Self::notify) once per batch.
pub trait GuestPort {
    /// Fetches up to `max` packets into `out` (appending). Returns whether more may be waiting.
    fn fetch(&mut self, max: usize, out: &mut Vec<TxFrame>) -> io::Result<bool>;
    /// The bytes of a fetched packet: a head that holds at least all headers, and a tail (often empty).
    fn bytes(&self, handle: TxHandle) -> (&[u8], &[u8]);
    /// Gives a fetched packet's buffer back to the guest (delayed release: only once acknowledged).
    fn complete(&mut self, handle: TxHandle);
    /// Copies a received frame into the next free receive buffer without showing it to the guest.
    /// `checksum_valid`: the transport checksum has been verified.
    fn place(&mut self, frame: &[u8], checksum_valid: bool) -> Result<RxHandle, PlaceError>;
    /// Makes a placed packet visible next; the port may merge it with packets published just before.
    fn publish(&mut self, handle: RxHandle);
    /// Throws a placed packet away unseen.
    fn discard(&mut self, handle: RxHandle);
    /// Ends a batch of publications: everything published becomes visible now, with one notification.
    fn notify(&mut self) -> io::Result<()>;
    /// How many transmit packets can be held at once.
    fn tx_capacity(&self) -> u32;
    /// How many received packets can be placed and not yet visible at once.
    fn rx_capacity(&self) -> u32;
    /// Free transmit buffers left before `fetch` stops.
    fn tx_free(&self) -> u32;
    /// Whether published packets wait because the guest's queue took no more: notify again soon.
    fn has_postponed(&self) -> bool {
        false
    }
    /// What the port counts itself, by name, units last; zero ones may be left out. Not for the hot path.
    fn counters(&self) -> Vec<(String, u64)> {
        Vec::new()
    }
    /// What to wait on for transmit packets.
    fn fd(&self) -> BorrowedFd<'_>;
}
