//! The guest side of a port: fetch, complete, place, publish.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use bifrost_nic::Offload;

use crate::vhost::DirtyLog;

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
    /// The first bytes of a fetched packet: a head that holds at least all headers, and a tail that a port may have. Both
    /// belong to the port: the guest cannot change them any more.
    fn bytes(&self, handle: TxHandle) -> (&[u8], &[u8]);
    /// Appends bytes `from..to` of a fetched packet to `out`, as far as there are any. What is behind the head may lie in
    /// the guest's memory, and be different each time.
    fn copy(&self, handle: TxHandle, from: usize, to: usize, out: &mut Vec<u8>) {
        let (head, tail) = self.bytes(handle);
        bifrost_nic::copy_of(head, tail, from, to, out);
    }
    /// The packet may have to leave more than once. A port that cannot rely on what it would read later keeps a copy now.
    fn keep(&mut self, _handle: TxHandle) {}
    /// Appends a fetched packet as the guest's side has handed it over, for [`put_in_front`](Self::put_in_front) of the same kind of port in
    /// another process. Returns false if the port cannot.
    fn raw(&self, _handle: TxHandle, _out: &mut Vec<u8>) -> bool {
        false
    }
    /// Has [`fetch`](Self::fetch) bring this packet before everything that the guest has sent since, and behind those that were put there before. Returns
    /// false if the port cannot, or holds as many as it may.
    fn put_in_front(&mut self, _packet: Vec<u8>) -> bool {
        false
    }
    /// Makes sure that all bytes of a fetched packet belong to the port: from now on [`bytes`](Self::bytes) returns the whole
    /// packet and [`copy`](Self::copy) the same bytes each time. What was verified once then stays true.
    fn freeze(&mut self, _handle: TxHandle) {}
    /// Whether a packet that is to leave once more is still what it was. `false`: the guest has used its buffer for something
    /// else meanwhile, and nothing of it may leave.
    fn is_intact(&mut self, _handle: TxHandle) -> bool {
        true
    }
    /// Drops a fetched packet of which nothing has left; its buffer goes back to the guest.
    fn refuse(&mut self, handle: TxHandle) {
        self.complete(handle);
    }
    /// Gives a fetched packet's buffer back to the guest (delayed release: only once acknowledged).
    fn complete(&mut self, handle: TxHandle);
    /// Ends a batch of completions: the guest sees them now, with one notification.
    fn flush(&mut self) {}
    /// Packets wait for who knows how long. If others cannot be fetched meanwhile because buffers go back in the order in which they were
    /// taken, the port keeps the oldest packets itself, and gives their buffers back.
    fn relieve(&mut self) {}
    /// Copies a received frame into the next free receive buffer without showing it to the guest.
    /// `checksum_valid`: the transport checksum has been verified.
    fn place(&mut self, frame: &[u8], checksum_valid: bool) -> Result<RxHandle, PlaceError>;
    /// Makes a placed packet visible next; the port may merge it with packets published just before.
    fn publish(&mut self, handle: RxHandle);
    /// Throws a placed packet away unseen.
    fn discard(&mut self, handle: RxHandle);
    /// Ends a batch of publications: everything published becomes visible now, with one notification.
    fn notify(&mut self) -> io::Result<()>;
    /// Ends the port after a fault in it. Its state may be inconsistent from now on: nothing more is read from or written to the guest,
    /// not even when it is dropped, and what it holds does not go back. A port that has somebody at its other end tells them.
    fn abandon(&mut self) {}
    /// From now on marks each page of the guest's memory that it writes in `log`; `None`: no more. For ports whose guest can be
    /// moved while it runs.
    fn log_writes(&mut self, _log: Option<DirtyLog>) {}
    /// How many transmit packets can be held at once.
    fn tx_capacity(&self) -> u32;
    /// How many received packets can be placed and not yet visible at once.
    fn rx_capacity(&self) -> u32;
    /// How many packets one connection may have on their way to the guest, if its buffers bound that.
    fn receive_window(&self) -> u32 {
        u32::MAX
    }
    /// Free transmit buffers left before `fetch` stops.
    fn tx_free(&self) -> u32;
    /// The longest packet that needs no large buffer, bytes of the frame.
    fn tx_small_bytes(&self) -> u32 {
        u32::MAX
    }
    /// How many more packets longer than that can be fetched.
    fn tx_free_large(&self) -> u32 {
        self.tx_free()
    }
    /// Whether published packets wait because the guest's queue took no more: notify again soon.
    fn has_postponed(&self) -> bool {
        false
    }
    /// What the port counts itself, by name, units last; zero ones may be left out. Not for the hot path.
    fn counters(&self) -> Vec<(String, u64)> {
        Vec::new()
    }
    /// Who knows what the kernel counts of the device: asking it takes long, so that is for another thread.
    fn kernel_counters(&self) -> Option<Arc<dyn KernelCounters>> {
        None
    }
}

/// What the kernel counts of a device.
pub trait KernelCounters: std::fmt::Debug + Send + Sync {
    /// The counters by name, units last; none once the device is gone. System calls, some of them long.
    fn read(&self) -> Vec<(&'static str, u64)>;
}

/// A guest port that a thread can wait for.
pub trait PolledPort: GuestPort {
    /// What to wait on for transmit packets.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Whether the descriptor stays readable, and only its becoming so once more tells of packets.
    fn is_edge_triggered(&self) -> bool {
        false
    }
}

impl<T: GuestPort + ?Sized> GuestPort for Box<T> {
    fn fetch(&mut self, max: usize, out: &mut Vec<TxFrame>) -> io::Result<bool> {
        (**self).fetch(max, out)
    }

    fn bytes(&self, handle: TxHandle) -> (&[u8], &[u8]) {
        (**self).bytes(handle)
    }

    fn copy(&self, handle: TxHandle, from: usize, to: usize, out: &mut Vec<u8>) {
        (**self).copy(handle, from, to, out);
    }

    fn keep(&mut self, handle: TxHandle) {
        (**self).keep(handle);
    }

    fn raw(&self, handle: TxHandle, out: &mut Vec<u8>) -> bool {
        (**self).raw(handle, out)
    }

    fn put_in_front(&mut self, packet: Vec<u8>) -> bool {
        (**self).put_in_front(packet)
    }

    fn freeze(&mut self, handle: TxHandle) {
        (**self).freeze(handle);
    }

    fn is_intact(&mut self, handle: TxHandle) -> bool {
        (**self).is_intact(handle)
    }

    fn refuse(&mut self, handle: TxHandle) {
        (**self).refuse(handle);
    }

    fn complete(&mut self, handle: TxHandle) {
        (**self).complete(handle);
    }

    fn flush(&mut self) {
        (**self).flush();
    }

    fn relieve(&mut self) {
        (**self).relieve();
    }

    fn place(&mut self, frame: &[u8], checksum_valid: bool) -> Result<RxHandle, PlaceError> {
        (**self).place(frame, checksum_valid)
    }

    fn publish(&mut self, handle: RxHandle) {
        (**self).publish(handle);
    }

    fn discard(&mut self, handle: RxHandle) {
        (**self).discard(handle);
    }

    fn notify(&mut self) -> io::Result<()> {
        (**self).notify()
    }

    fn abandon(&mut self) {
        (**self).abandon();
    }

    fn log_writes(&mut self, log: Option<DirtyLog>) {
        (**self).log_writes(log);
    }

    fn tx_capacity(&self) -> u32 {
        (**self).tx_capacity()
    }

    fn rx_capacity(&self) -> u32 {
        (**self).rx_capacity()
    }

    fn receive_window(&self) -> u32 {
        (**self).receive_window()
    }

    fn tx_free(&self) -> u32 {
        (**self).tx_free()
    }

    fn tx_small_bytes(&self) -> u32 {
        (**self).tx_small_bytes()
    }

    fn tx_free_large(&self) -> u32 {
        (**self).tx_free_large()
    }

    fn has_postponed(&self) -> bool {
        (**self).has_postponed()
    }

    fn counters(&self) -> Vec<(String, u64)> {
        (**self).counters()
    }

    fn kernel_counters(&self) -> Option<Arc<dyn KernelCounters>> {
        (**self).kernel_counters()
    }
}

impl<T: PolledPort + ?Sized> PolledPort for Box<T> {
    fn fd(&self) -> BorrowedFd<'_> {
        (**self).fd()
    }

    fn is_edge_triggered(&self) -> bool {
        (**self).is_edge_triggered()
    }
}
