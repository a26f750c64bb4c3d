//! Several queue pairs of one device as one guest port.
//!
//! One worker serves all of them. A packet for the guest goes to the pair on which the guest last sent packets of the
//! same flow (virtio 1.3, section 5.1.6.5.6.1), so that each guest CPU gets its own flows.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bifrost_nic::{FlowKey, HEAD_LEN, parse};
use rustix::event::epoll;

use super::VhostCounters;
use super::dirty_log::DirtyLog;
use super::queue::{self, GuestQueue, VhostQueue};
use crate::guest::{GuestPort, PlaceError, PolledPort, RxHandle, TxFrame, TxHandle};

/// Number of flows, by hash, whose pair is remembered.
const CONVERSATIONS: usize = 4096;

/// The pairs that the driver has enabled: at least two.
///
/// A handle is the handle of the pair's queue, with the pair's number in the bits above.
#[derive(Debug)]
pub(crate) struct Pairs {
    queues: Vec<VhostQueue>,
    /// Bits of the queue's handle.
    shift: u32,
    /// The pair of each flow.
    steering: Box<[u8; CONVERSATIONS]>,
    /// The pair to poll first.
    turn: usize,
    /// Readable when any of the kicks is.
    kicks: OwnedFd,
}

impl Pairs {
    /// # Errors
    /// No file descriptor was available.
    pub(crate) fn new(queues: Vec<VhostQueue>) -> io::Result<Pairs> {
        let kicks = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (pair, queue) in queues.iter().enumerate() {
            let data = epoll::EventData::new_u64(pair as u64);
            epoll::add(&kicks, queue.fd(), data, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        }
        let largest = queues.iter().map(|q| q.tx_capacity().max(q.rx_capacity())).max().unwrap_or(1);
        // Until the guest has sent, flows are spread over the pairs.
        let steering = Box::new(std::array::from_fn(|slot| (slot % queues.len()) as u8));
        Ok(Pairs { shift: largest.next_power_of_two().trailing_zeros(), steering, turn: 0, kicks, queues })
    }

    fn split(&self, handle: u32) -> (usize, u32) {
        ((handle >> self.shift) as usize, handle & ((1 << self.shift) - 1))
    }

    fn join(&self, pair: usize, handle: u32) -> u32 {
        (pair as u32) << self.shift | handle
    }
}

/// The slot of a frame's flow, the same for both directions. Frames that cannot be parsed share one.
fn slot(head: &[u8], len: usize) -> usize {
    let Ok(parsed) = parse(head, len) else { return 0 };
    let there = parsed.flow_key();
    let back = FlowKey {
        src: there.dst,
        dst: there.src,
        src_port: there.dst_port,
        dst_port: there.src_port,
        protocol: there.protocol,
    };
    (there.hash(0) ^ back.hash(0)) as usize % CONVERSATIONS
}

impl GuestQueue for Pairs {
    fn vhost_counters(&self) -> VhostCounters {
        let mut all = VhostCounters::default();
        self.queues.iter().for_each(|queue| all.add(&queue.vhost_counters()));
        all
    }

    fn kept_bytes(&self) -> u64 {
        self.queues.iter().map(|queue| queue.kept_bytes()).sum()
    }

    fn descriptor_bytes(&self) -> u64 {
        self.queues.iter().map(|queue| queue.descriptor_bytes()).sum()
    }
}

impl GuestPort for Pairs {
    fn fetch(&mut self, max: usize, out: &mut Vec<TxFrame>) -> io::Result<bool> {
        let pairs = self.queues.len();
        self.turn = (self.turn + 1) % pairs;
        let mut more = false;
        for n in 0..pairs {
            let pair = (self.turn + n) % pairs;
            let first = out.len();
            more |= self.queues[pair].fetch((max / pairs).max(1), out)?;
            for frame in &mut out[first..] {
                let slot = slot(self.queues[pair].bytes(frame.handle).0, frame.len as usize);
                self.steering[slot] = pair as u8;
                frame.handle = TxHandle(self.join(pair, frame.handle.0));
            }
        }
        Ok(more)
    }

    fn bytes(&self, handle: TxHandle) -> (&[u8], &[u8]) {
        let (pair, handle) = self.split(handle.0);
        self.queues[pair].bytes(TxHandle(handle))
    }

    fn copy(&self, handle: TxHandle, from: usize, to: usize, out: &mut Vec<u8>) {
        let (pair, handle) = self.split(handle.0);
        self.queues[pair].copy(TxHandle(handle), from, to, out);
    }

    fn stays(&self, handle: TxHandle) -> bool {
        let (pair, handle) = self.split(handle.0);
        self.queues[pair].stays(TxHandle(handle))
    }

    fn keep(&mut self, handle: TxHandle) {
        let (pair, handle) = self.split(handle.0);
        self.queues[pair].keep(TxHandle(handle));
    }

    fn freeze(&mut self, handle: TxHandle) {
        let (pair, handle) = self.split(handle.0);
        self.queues[pair].freeze(TxHandle(handle));
    }

    fn is_intact(&mut self, handle: TxHandle) -> bool {
        let (pair, handle) = self.split(handle.0);
        self.queues[pair].is_intact(TxHandle(handle))
    }

    fn complete(&mut self, handle: TxHandle) {
        let (pair, handle) = self.split(handle.0);
        self.queues[pair].complete(TxHandle(handle));
    }

    fn flush(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.flush());
    }

    fn relieve(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.relieve());
    }

    fn place(&mut self, frame: &[u8], checksum_valid: bool) -> Result<RxHandle, PlaceError> {
        let pair = usize::from(self.steering[slot(&frame[..frame.len().min(HEAD_LEN)], frame.len())]);
        let placed = self.queues[pair].place(frame, checksum_valid)?;
        Ok(RxHandle(self.join(pair, placed.0)))
    }

    fn publish(&mut self, handle: RxHandle) {
        let (pair, handle) = self.split(handle.0);
        self.queues[pair].publish(RxHandle(handle));
    }

    fn discard(&mut self, handle: RxHandle) {
        let (pair, handle) = self.split(handle.0);
        self.queues[pair].discard(RxHandle(handle));
    }

    fn notify(&mut self) -> io::Result<()> {
        self.queues.iter_mut().try_for_each(|queue| queue.notify())
    }

    fn abandon(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.abandon());
    }

    fn log_writes(&mut self, log: Option<DirtyLog>) {
        self.queues.iter_mut().for_each(|queue| queue.log_writes(log.clone()));
    }

    fn tx_capacity(&self) -> u32 {
        (self.queues.len() as u32) << self.shift
    }

    fn rx_capacity(&self) -> u32 {
        (self.queues.len() as u32) << self.shift
    }

    /// The minimum over the pairs: all packets of a connection may go to one pair.
    fn receive_window(&self) -> u32 {
        self.queues.iter().map(|queue| queue.receive_window()).min().unwrap_or(1)
    }

    fn tx_free(&self) -> u32 {
        self.queues.iter().map(|queue| queue.tx_free()).sum()
    }

    fn has_postponed(&self) -> bool {
        self.queues.iter().any(|queue| queue.has_postponed())
    }

    fn counters(&self) -> Vec<(String, u64)> {
        queue::named(self)
    }
}

impl PolledPort for Pairs {
    fn fd(&self) -> BorrowedFd<'_> {
        self.kicks.as_fd()
    }

    /// As for the kicks: it is never read.
    fn is_edge_triggered(&self) -> bool {
        true
    }
}
