//! One queue pair of a vhost-user device as a guest port.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::counters::VhostCounters;
use super::dirty_log::DirtyLog;
use super::helper::Foreign;
use super::memory::Memory;
use super::packed::Packed;
use super::receive::Receive;
use super::ring::{Broken, Ring, RingSpec};
use super::split::Split;
use super::staging::Staging;
use super::transmit::{Buffers, Transmit};
use crate::guest::{GuestPort, PlaceError, PolledPort, RxHandle, TxFrame, TxHandle};

/// Parameters of a queue pair.
#[derive(Debug)]
pub(crate) struct QueueSpec {
    pub(crate) memory: Arc<Memory>,
    /// `VIRTIO_F_RING_PACKED`.
    pub(crate) packed: bool,
    pub(crate) receive: RingSpec,
    pub(crate) transmit: RingSpec,
    /// Eventfd that the guest writes after it has added packets.
    pub(crate) kick: Arc<OwnedFd>,
    /// Whether transmit buffers must be returned in the order in which they were taken.
    pub(crate) in_order: bool,
    /// Whether all but the head of a fetched packet stays in the guest's memory.
    pub(crate) slicing: bool,
    pub(crate) mergeable: bool,
    pub(crate) guest_checksum: bool,
    /// Whether the guest accepts merged segments.
    pub(crate) merged: bool,
    /// Longest frame for the guest, bytes.
    pub(crate) max_frame: usize,
    /// Log for written pages.
    pub(crate) log: Option<DirtyLog>,
    /// Where to report the ring ends.
    pub(crate) ends: Arc<Ends>,
}

/// Ring positions of a stopped queue pair.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    pub(crate) receive: AtomicU32,
    pub(crate) transmit: AtomicU32,
    /// Whether the queue was abandoned after a fault in it.
    faulted: AtomicBool,
    /// Whether unfinished packets stay in the transmit ring when the queue is dropped.
    leaves: AtomicBool,
    /// The front-end, to be disconnected on a fault.
    front_end: Option<Arc<Foreign>>,
}

impl Ends {
    /// For a queue whose front-end is connected by this socket.
    pub(crate) fn with(front_end: Option<Arc<Foreign>>) -> Self {
        Ends { front_end, ..Ends::default() }
    }

    /// Whether the queue was abandoned after a fault in it.
    pub(crate) fn has_faulted(&self) -> bool {
        self.faulted.load(Ordering::Acquire)
    }

    /// When the queue is dropped, unfinished packets stay in the transmit ring, for another process.
    pub(crate) fn leave(&self) {
        self.leaves.store(true, Ordering::Release);
    }

    fn fault(&self) {
        self.faulted.store(true, Ordering::Release);
        // Does not block. The port's thread sees the closed connection, and the front-end may reconnect.
        if let Some(front_end) = &self.front_end {
            let _ = rustix::net::shutdown(front_end, rustix::net::Shutdown::Both);
        }
    }
}

/// A guest's virtio network device, in the guest's own memory: one queue pair, or all that the driver uses.
///
/// Packets from the guest stay in place until [`complete`](GuestPort::complete); packets for the guest are written
/// there once, by [`place`](GuestPort::place). Dropping it returns all buffers to the guest.
pub trait GuestQueue: PolledPort + Send + Debug {
    /// Counters since the queue was started.
    fn vhost_counters(&self) -> VhostCounters;
    /// Bytes of packets kept outside of the guest's memory.
    fn kept_bytes(&self) -> u64;
    /// Memory of this process for descriptors of the guest's buffers, bytes.
    fn descriptor_bytes(&self) -> u64;
}

/// One or more queue pairs, with rings of either format.
pub type VhostQueue = Box<dyn GuestQueue>;

/// Opens a queue pair. `None`: a ring is invalid, or not in memory.
pub(crate) fn open(spec: QueueSpec) -> Option<VhostQueue> {
    if spec.packed { Some(Box::new(Queue::<Packed>::new(spec)?)) } else { Some(Box::new(Queue::<Split>::new(spec)?)) }
}

/// A queue's counters by name.
pub(crate) fn named(queue: &impl GuestQueue) -> Vec<(String, u64)> {
    let kept = [("tx_kept_bytes".to_string(), queue.kept_bytes())];
    queue.vhost_counters().iter().chain(kept).filter(|c| c.1 > 0).collect()
}

/// A queue pair over rings of one format.
#[derive(Debug)]
struct Queue<R: Ring> {
    receive: Receive<R>,
    /// Frames that wait to be merged with others, if the guest supports that.
    staging: Option<Staging>,
    transmit: Transmit<R>,
    kick: Arc<OwnedFd>,
    broken: Option<Broken>,
    counters: VhostCounters,
    ends: Arc<Ends>,
}

impl<R: Ring> Queue<R> {
    fn new(spec: QueueSpec) -> Option<Self> {
        let mut receive = R::open(&spec.memory, spec.receive)?;
        // The sender retransmits, so the device needs no notification of new buffers.
        receive.ask_for_silence();
        let merges = spec.merged && spec.mergeable && spec.guest_checksum;
        let buffers = receive.size().get();
        Some(Queue {
            staging: merges.then(|| Staging::new(buffers, spec.max_frame)),
            receive: Receive::new(receive, spec.mergeable, spec.guest_checksum, spec.max_frame, spec.log),
            transmit: Transmit::new(R::open(&spec.memory, spec.transmit)?, spec.in_order, spec.slicing),
            kick: spec.kick,
            broken: None,
            counters: VhostCounters::default(),
            ends: spec.ends,
        })
    }

    /// Logs once that the receive ring is out of use.
    fn tell_broken(&self, before: Option<Broken>) {
        if let (None, Some(broken)) = (before, self.receive.broken()) {
            tracing::warn!(%broken, "a guest's receive ring is out of use until its driver restarts it");
        }
    }

    /// Takes both rings out of use if the memory that contains them is lost.
    fn check_memory(&mut self) {
        if self.broken != Some(Broken::Memory) && self.transmit.ring.memory().is_lost() {
            tracing::warn!(broken = %Broken::Memory, "a guest's rings are out of use until its front-end reconnects");
            if self.broken.replace(Broken::Memory).is_none() {
                self.counters.broken(Broken::Memory);
            }
            if self.receive.end(Broken::Memory) {
                self.counters.broken(Broken::Memory);
            }
        }
    }
}

impl<R: Ring> GuestQueue for Queue<R> {
    fn vhost_counters(&self) -> VhostCounters {
        self.counters
    }

    fn kept_bytes(&self) -> u64 {
        self.transmit.kept_bytes()
    }

    fn descriptor_bytes(&self) -> u64 {
        (self.transmit.descriptor_bytes() + self.receive.descriptor_bytes()) as u64
    }
}

impl<R: Ring> Drop for Queue<R> {
    fn drop(&mut self) {
        if self.ends.has_faulted() {
            return;
        }
        if let Some(staging) = &mut self.staging {
            staging.flush(&mut self.receive, &mut self.counters);
        }
        let left = if self.ends.leaves.load(Ordering::Acquire) { self.transmit.leave_all() } else { None };
        let transmit = left.unwrap_or_else(|| {
            self.transmit.complete_all();
            self.transmit.ring.base()
        });
        self.receive.give_back_all();
        self.ends.transmit.store(u32::from(transmit), Ordering::Release);
        self.ends.receive.store(u32::from(self.receive.ring.base()), Ordering::Release);
    }
}

impl<R: Ring> GuestPort for Queue<R> {
    fn fetch(&mut self, max: usize, out: &mut Vec<TxFrame>) -> io::Result<bool> {
        self.check_memory();
        if self.broken.is_some() {
            return Ok(false);
        }
        let fetched = self.transmit.fetch(max, out, &mut self.counters);
        // Refused packets do not wait for others to complete.
        if self.transmit.ring.has_unshown() {
            self.flush();
        }
        fetched.or_else(|broken| {
            tracing::warn!(%broken, "a guest's transmit ring is out of use until its driver restarts it");
            self.counters.broken(broken);
            self.broken = Some(broken);
            Ok(false)
        })
    }

    fn bytes(&self, handle: TxHandle) -> (&[u8], &[u8]) {
        (self.transmit.head(handle), self.transmit.rest(handle))
    }

    fn copy(&self, handle: TxHandle, from: usize, to: usize, out: &mut Vec<u8>) {
        self.transmit.copy(handle, from, to, out);
    }

    fn keep(&mut self, handle: TxHandle) {
        self.transmit.keep(handle);
    }

    fn stays(&self, handle: TxHandle) -> bool {
        self.transmit.stays(handle)
    }

    fn freeze(&mut self, handle: TxHandle) {
        self.transmit.freeze(handle);
    }

    fn is_intact(&mut self, handle: TxHandle) -> bool {
        let before = self.transmit.buffers();
        let intact = self.transmit.is_intact(handle, &mut self.counters);
        match self.transmit.buffers() {
            now if now == before => {}
            Buffers::Kept => {
                tracing::warn!("a guest reused an in-flight TX buffer; packets are copied from now on")
            }
            _ => tracing::debug!("a guest does not reuse in-flight TX buffers; packets are no longer copied"),
        }
        intact
    }

    fn complete(&mut self, handle: TxHandle) {
        self.transmit.complete(handle);
    }

    fn flush(&mut self) {
        self.counters.tx_notifications += u64::from(self.transmit.ring.show());
    }

    fn place(&mut self, frame: &[u8], checksum_valid: bool) -> Result<RxHandle, PlaceError> {
        if let Some(staging) = &mut self.staging {
            return staging.place(frame, checksum_valid, &mut self.counters);
        }
        let was_broken = self.receive.broken();
        let placed = self.receive.place(frame, checksum_valid, &mut self.counters);
        self.tell_broken(was_broken);
        placed
    }

    fn publish(&mut self, handle: RxHandle) {
        let was_broken = self.receive.broken();
        match &mut self.staging {
            Some(staging) => staging.publish(handle, &mut self.receive, &mut self.counters),
            None => self.receive.publish(handle, &mut self.counters),
        }
        self.tell_broken(was_broken);
    }

    fn discard(&mut self, handle: RxHandle) {
        match &mut self.staging {
            Some(staging) => staging.discard(handle, &mut self.counters),
            None => self.receive.discard(handle, &mut self.counters),
        }
    }

    fn has_postponed(&self) -> bool {
        self.staging.as_ref().is_some_and(Staging::has_waiting)
    }

    fn notify(&mut self) -> io::Result<()> {
        self.check_memory();
        if let Some(staging) = &mut self.staging {
            let was_broken = self.receive.broken();
            staging.flush(&mut self.receive, &mut self.counters);
            self.tell_broken(was_broken);
        }
        self.counters.rx_notifications += u64::from(self.receive.ring.show());
        Ok(())
    }

    fn abandon(&mut self) {
        self.ends.transmit.store(u32::from(self.transmit.ring.base()), Ordering::Release);
        self.ends.receive.store(u32::from(self.receive.ring.base()), Ordering::Release);
        self.ends.fault();
    }

    fn relieve(&mut self) {
        self.transmit.relieve(&mut self.counters);
        if self.transmit.ring.has_unshown() {
            self.flush();
        }
    }

    fn log_writes(&mut self, log: Option<DirtyLog>) {
        self.transmit.ring.set_log(log.clone());
        self.receive.set_log(log);
    }

    fn tx_capacity(&self) -> u32 {
        self.transmit.capacity()
    }

    fn rx_capacity(&self) -> u32 {
        let buffers = u32::from(self.receive.ring.size().get());
        self.staging.as_ref().map_or(buffers, Staging::capacity)
    }

    /// Half of the ring, because the guest may yet have to offer the other half again. To its sender, a packet that
    /// finds no buffer looks lost.
    fn receive_window(&self) -> u32 {
        (self.rx_capacity() / 2).max(1)
    }

    fn tx_free(&self) -> u32 {
        self.transmit.free()
    }

    fn counters(&self) -> Vec<(String, u64)> {
        named(self)
    }
}

impl<R: Ring> PolledPort for Queue<R> {
    fn fd(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    /// The kick is an eventfd that is never read.
    fn is_edge_triggered(&self) -> bool {
        true
    }
}
