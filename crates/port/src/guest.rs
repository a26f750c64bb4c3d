//! The guest's side of a port: fetch and complete, place and publish.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use bifrost_nic::Offload;

use crate::vhost::DirtyLog;

/// Handle of a packet that the guest sends. The port holds its bytes until [`GuestPort::complete`].
/// Always below [`GuestPort::tx_capacity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TxHandle(pub u32);

/// Handle of a received packet that is placed for the guest but not visible to it yet.
/// Always below [`GuestPort::rx_capacity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RxHandle(pub u32);

/// One fetched transmit packet.
#[derive(Clone, Copy, Debug)]
pub struct TxFrame {
    /// Names the packet until it is completed.
    pub handle: TxHandle,
    /// Length of the Ethernet frame, bytes, without any virtio header.
    pub len: u32,
    /// Offloads that the guest requests: checksum, segmentation.
    pub offload: Offload,
}

/// Why a received packet cannot be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaceError {
    /// The guest (or the port's pool) has no free receive buffer. The packet is not acknowledged; the sender
    /// retransmits it.
    NoBuffer,
    /// The frame is larger than any receive buffer.
    TooLarge,
}

/// A port towards a guest.
///
/// Order of calls for received packets: [`place`](Self::place) in arrival order; [`publish`](Self::publish) in the
/// order in which the guest must see them; [`notify`](Self::notify) once per batch.
pub trait GuestPort {
    /// Fetches up to `max` packets and appends them to `out`. Returns whether more may be waiting.
    fn fetch(&mut self, max: usize, out: &mut Vec<TxFrame>) -> io::Result<bool>;
    /// The first bytes of a fetched packet: a head with at least all headers, and a tail if the port has one. Both
    /// belong to the port: the guest can no longer change them.
    fn bytes(&self, handle: TxHandle) -> (&[u8], &[u8]);
    /// Appends bytes `from..to` of a fetched packet to `out`, as far as they exist. Bytes behind the head may be in
    /// guest memory, and may differ on each call.
    fn copy(&self, handle: TxHandle, from: usize, to: usize, out: &mut Vec<u8>) {
        let (head, tail) = self.bytes(handle);
        bifrost_nic::copy_of(head, tail, from, to, out);
    }
    /// The packet may have to be sent again. A port that cannot rely on rereading guest memory keeps a copy now.
    fn keep(&mut self, _handle: TxHandle) {}
    /// Whether a fetched packet stays with the guest when the port is handed over to another process, which fetches it
    /// again.
    fn stays(&self, _handle: TxHandle) -> bool {
        false
    }
    /// Appends a fetched packet as the guest handed it over, for [`put_in_front`](Self::put_in_front) of a port of the
    /// same kind in another process. Returns false if the port does not support this.
    fn raw(&self, _handle: TxHandle, _out: &mut Vec<u8>) -> bool {
        false
    }
    /// Makes [`fetch`](Self::fetch) return this packet before all newer packets of the guest, and after packets put in
    /// front earlier. Returns false if the port does not support this, or holds its maximum.
    fn put_in_front(&mut self, _packet: Vec<u8>) -> bool {
        false
    }
    /// Copies all bytes of a fetched packet into the port: from now on [`bytes`](Self::bytes) returns the whole packet,
    /// and [`copy`](Self::copy) the same bytes each time. Checks of its contents stay valid.
    fn freeze(&mut self, _handle: TxHandle) {}
    /// Whether a packet about to be sent again is unchanged. `false`: the guest has reused its buffer, and none of it
    /// may be sent.
    fn is_intact(&mut self, _handle: TxHandle) -> bool {
        true
    }
    /// Drops a fetched packet that has not been sent, not even in part; its buffer returns to the guest.
    fn refuse(&mut self, handle: TxHandle) {
        self.complete(handle);
    }
    /// Returns a fetched packet's buffer to the guest (delayed release: only once acknowledged).
    fn complete(&mut self, handle: TxHandle);
    /// Ends a batch of completions: the guest sees them now, with one notification.
    fn flush(&mut self) {}
    /// Fetched packets may wait for an unknown time. If buffers return in the order in which they were fetched and this
    /// blocks further fetches, the port copies the oldest packets and returns their buffers.
    fn relieve(&mut self) {}
    /// Copies a received frame into the next free receive buffer without showing it to the guest.
    /// `checksum_valid`: the transport checksum has been verified.
    fn place(&mut self, frame: &[u8], checksum_valid: bool) -> Result<RxHandle, PlaceError>;
    /// Makes a placed packet visible next; the port may merge it with packets published just before.
    fn publish(&mut self, handle: RxHandle);
    /// Drops a placed packet; the guest never sees it.
    fn discard(&mut self, handle: RxHandle);
    /// Ends a batch of publications: everything published becomes visible now, with one notification.
    fn notify(&mut self) -> io::Result<()>;
    /// Ends the port after a fault in it. Its state may be inconsistent: from now on it neither reads nor writes guest
    /// memory, not even when dropped, and returns no buffers. A port with a peer (a front-end) tells the peer.
    fn abandon(&mut self) {}
    /// From now on marks each page of guest memory that it writes in `log`; `None` stops logging. For ports whose guest
    /// can migrate while it runs.
    fn log_writes(&mut self, _log: Option<DirtyLog>) {}
    /// How many transmit packets can be held at once.
    fn tx_capacity(&self) -> u32;
    /// How many received packets can be placed and not yet visible at once.
    fn rx_capacity(&self) -> u32;
    /// Maximum packets in flight to the guest per connection, if the guest's buffers limit that.
    fn receive_window(&self) -> u32 {
        u32::MAX
    }
    /// Free transmit buffers left before `fetch` stops.
    fn tx_free(&self) -> u32;
    /// Longest frame that needs no large buffer, bytes.
    fn tx_small_bytes(&self) -> u32 {
        u32::MAX
    }
    /// How many more longer packets can be fetched.
    fn tx_free_large(&self) -> u32 {
        self.tx_free()
    }
    /// Whether published packets are waiting because the guest's queue was full: notify again soon.
    fn has_postponed(&self) -> bool {
        false
    }
    /// The port's own counters by name, units last; zero ones may be left out. Not for the hot path.
    fn counters(&self) -> Vec<(String, u64)> {
        Vec::new()
    }
    /// Access to the kernel's counters of the device. Reading them is slow, so another thread does it.
    fn kernel_counters(&self) -> Option<Arc<dyn KernelCounters>> {
        None
    }

    /// Numbers of buffers of each kind whose memory was ever in use, for [`touch`](Self::touch) of the port of another
    /// process that continues with the same guest.
    fn touched(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Touches the memory of as many buffers, so that the kernel provides it now and not while packets wait: a large
    /// page takes a good part of a millisecond. Unknown kinds and numbers beyond the port's are ignored.
    fn touch(&mut self, _buffers: &[u32]) {}
}

/// The kernel's counters of a device.
pub trait KernelCounters: std::fmt::Debug + Send + Sync {
    /// The counters by name, units last; empty once the device is gone. System calls, some of them slow.
    fn read(&self) -> Vec<(&'static str, u64)>;
}

/// A guest port that a thread can wait for.
pub trait PolledPort: GuestPort {
    /// Descriptor to wait on for transmit packets.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Whether the descriptor stays readable, so that only edges signal new packets.
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

    fn stays(&self, handle: TxHandle) -> bool {
        (**self).stays(handle)
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

    fn touched(&self) -> Vec<u32> {
        (**self).touched()
    }

    fn touch(&mut self, buffers: &[u32]) {
        (**self).touch(buffers);
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
