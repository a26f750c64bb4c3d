//! One queue of a TAP device as a guest port.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bifrost_nic::{Malformed, Merger, Offload, parse};
use bifrost_wire::virtio_net;

use super::statistics::DeviceStatistics;
use super::writer::Writer;
use super::{DeviceId, TapCounters};
use crate::guest::{GuestPort, KernelCounters, PlaceError, PolledPort, RxHandle, TxFrame, TxHandle};
use crate::pool::Pool;

/// Length of a head buffer, bytes: virtio header and start of the frame. Most frames fit in it.
const HEAD_BYTES: usize = 2048;
/// Length of a spill buffer, bytes; head and spill together hold the largest frame.
const SPILL_BYTES: usize = 65_536;
/// Length of the virtio header on our devices: the short form, which keeps the IP header 8-byte aligned in a head
/// buffer.
pub(crate) const VIRTIO: usize = virtio_net::SHORT_LEN;
const NONE: u32 = u32::MAX;

/// Buffers of a queue. Untouched buffers use no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSizes {
    /// Packets from the guest that can be held at once (2 KiB each); default 16,384. Half of them may wait for a
    /// window, as the first packets of thousands of connections do; a connection may have 4096 in flight.
    pub heads: u32,
    /// How many of them may be large (64 KiB more each), not counting a spare that is always ready for reading; default
    /// 256.
    pub spills: u32,
    /// Frames for the guest that can be placed but not visible yet (one MTU each); default 4096.
    pub slots: u32,
}

/// One queue of a TAP device.
///
/// Packets from the guest are read straight into buffers that hold them until [`complete`](GuestPort::complete).
/// Packets for the guest are copied once, by [`place`](GuestPort::place), and merged without copying.
#[derive(Debug)]
pub struct TapQueue {
    fd: OwnedFd,
    heads: Pool,
    spills: Pool,
    /// The spill buffer for the next read.
    spare: Option<u32>,
    /// By head buffer, for buffers ever used.
    sent: Vec<Sent>,
    /// Packets that another process fetched from the device, with virtio headers. They are fetched before all others.
    in_front: VecDeque<Vec<u8>>,
    slots: Pool,
    placed: Vec<Placed>,
    merger: Merger,
    writer: Writer,
    counters: TapCounters,
    /// Statistics of the whole device; on its first queue only.
    pub(super) statistics: Option<Arc<DeviceStatistics>>,
    /// On its first queue only.
    pub(super) device: Option<DeviceId>,
}

/// A packet from the guest in a head buffer and, if it is large, a spill buffer.
#[derive(Clone, Copy, Debug)]
struct Sent {
    len: u32,
    spill: u32,
}

/// A frame for the guest.
#[derive(Clone, Copy, Debug, Default)]
struct Placed {
    len: u32,
    checksum_valid: bool,
    published: bool,
}

impl TapQueue {
    /// Wraps a TAP queue with non-blocking mode, `IFF_VNET_HDR` and 10-byte little-endian virtio headers. Frames for
    /// the guest may have `max_frame` bytes.
    pub(crate) fn new(fd: OwnedFd, sizes: PoolSizes, max_frame: usize) -> Self {
        let mut spills = Pool::new(sizes.spills.max(1), SPILL_BYTES);
        Self {
            fd,
            heads: Pool::new(sizes.heads, HEAD_BYTES),
            spare: spills.take(),
            spills,
            sent: Vec::new(),
            in_front: VecDeque::new(),
            slots: Pool::new(sizes.slots, max_frame.next_multiple_of(64)),
            placed: vec![Placed::default(); sizes.slots as usize],
            merger: Merger::new(),
            writer: Writer::default(),
            counters: TapCounters::default(),
            statistics: None,
            device: None,
        }
    }

    /// Counters since the queue was created.
    pub fn tap_counters(&self) -> &TapCounters {
        &self.counters
    }

    /// Its device; known to the device's first queue only, unless the kernel did not report it.
    pub fn device(&self) -> Option<DeviceId> {
        self.device
    }

    /// Reads one packet. `None`: nothing is waiting.
    fn read(&mut self, head: u32, spill: u32) -> io::Result<Option<usize>> {
        if let Some(packet) = self.in_front.pop_front() {
            let first = packet.len().min(HEAD_BYTES);
            let rest = (packet.len() - first).min(SPILL_BYTES);
            self.heads.bytes_mut(head)[..first].copy_from_slice(&packet[..first]);
            self.spills.bytes_mut(spill)[..rest].copy_from_slice(&packet[first..first + rest]);
            return Ok(Some(first + rest));
        }
        let mut buffers = [IoSliceMut::new(self.heads.bytes_mut(head)), IoSliceMut::new(self.spills.bytes_mut(spill))];
        loop {
            match rustix::io::readv(&self.fd, &mut buffers) {
                Ok(len) => return Ok(Some(len)),
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl GuestPort for TapQueue {
    /// One system call per packet. Stops early, and returns false, when no buffer is free: while
    /// [`tx_free`](Self::tx_free) is 0, waiting on [`fd`](PolledPort::fd) is useless.
    ///
    /// # Errors
    /// The device is gone (EBADFD): it was deleted inside the namespace.
    fn fetch(&mut self, max: usize, out: &mut Vec<TxFrame>) -> io::Result<bool> {
        for _ in 0..max {
            self.spare = self.spare.or_else(|| self.spills.take());
            let (Some(spill), Some(head)) = (self.spare, self.heads.take()) else {
                self.counters.tx_no_buffer_pauses += 1;
                return Ok(false);
            };
            let read = self.read(head, spill);
            let Ok(Some(total)) = read else {
                self.heads.put(head);
                return read.map(|_| false);
            };
            let len = total.saturating_sub(VIRTIO);
            let frame = &self.heads.bytes(head)[VIRTIO..total.clamp(VIRTIO, HEAD_BYTES)];
            match offload(self.heads.bytes(head), frame, len) {
                Ok(offload) => {
                    let large = total > HEAD_BYTES;
                    let sent = Sent { len: len as u32, spill: if large { spill } else { NONE } };
                    if self.sent.len() <= head as usize {
                        self.sent.resize(head as usize + 1, Sent { len: 0, spill: NONE });
                    }
                    self.sent[head as usize] = sent;
                    if large {
                        self.spare = None;
                    }
                    self.counters.tx_packets += 1;
                    self.counters.tx_bytes += len as u64;
                    self.counters.tx_large_packets += u64::from(large);
                    out.push(TxFrame { handle: TxHandle(head), len: len as u32, offload });
                }
                Err(reason) => {
                    self.heads.put(head);
                    self.counters.tx_malformed_packets[reason.index()] += 1;
                }
            }
        }
        Ok(true)
    }

    fn bytes(&self, handle: TxHandle) -> (&[u8], &[u8]) {
        let sent = self.sent[handle.0 as usize];
        let head = &self.heads.bytes(handle.0)[VIRTIO..];
        match (sent.len as usize).checked_sub(head.len()) {
            Some(tail) if tail > 0 && sent.spill != NONE => (head, &self.spills.bytes(sent.spill)[..tail]),
            _ => (&head[..(sent.len as usize).min(head.len())], &[]),
        }
    }

    fn raw(&self, handle: TxHandle, out: &mut Vec<u8>) -> bool {
        let (head, tail) = self.bytes(handle);
        out.extend_from_slice(&self.heads.bytes(handle.0)[..VIRTIO]);
        out.extend_from_slice(head);
        out.extend_from_slice(tail);
        true
    }

    fn put_in_front(&mut self, packet: Vec<u8>) -> bool {
        let fits = packet.len() <= HEAD_BYTES + SPILL_BYTES && self.in_front.len() < self.heads.capacity() as usize;
        if fits {
            self.in_front.push_back(packet);
        }
        fits
    }

    fn complete(&mut self, handle: TxHandle) {
        if self.heads.put(handle.0) {
            let spill = std::mem::replace(&mut self.sent[handle.0 as usize].spill, NONE);
            if spill != NONE {
                self.spills.put(spill);
            }
        }
    }

    fn place(&mut self, frame: &[u8], checksum_valid: bool) -> Result<RxHandle, PlaceError> {
        if frame.len() > self.slots.buffer_bytes() {
            self.counters.rx_too_large_frames += 1;
            return Err(PlaceError::TooLarge);
        }
        let Some(slot) = self.slots.take() else {
            self.counters.rx_no_buffer_frames += 1;
            return Err(PlaceError::NoBuffer);
        };
        self.slots.bytes_mut(slot)[..frame.len()].copy_from_slice(frame);
        self.placed[slot as usize] = Placed { len: frame.len() as u32, checksum_valid, published: false };
        Ok(RxHandle(slot))
    }

    /// Frames that complete a packet are written here, so that the guest can process them while more are published.
    fn publish(&mut self, handle: RxHandle) {
        let slot = handle.0;
        if !self.slots.is_taken(slot) || self.placed[slot as usize].published {
            return;
        }
        let Self { fd, slots, placed, merger, writer, counters, .. } = self;
        let frame = &mut placed[slot as usize];
        frame.published = true;
        // The merger reads a frame while finished packets, which hold other frames, are written and their buffers
        // freed.
        let (len, valid) = (frame.len as usize, frame.checksum_valid);
        let mut done = std::mem::take(&mut writer.done);
        merger.push(slot, &slots.bytes(slot)[..len], valid, &mut |packet| {
            writer.write(fd.as_fd(), slots, &packet, counters, &mut done);
        });
        free(slots, &mut done);
        writer.done = done;
    }

    fn discard(&mut self, handle: RxHandle) {
        let published = self.placed.get(handle.0 as usize).is_some_and(|p| p.published);
        if !published && self.slots.put(handle.0) {
            self.counters.rx_discarded_frames += 1;
        }
    }

    fn notify(&mut self) -> io::Result<()> {
        let Self { fd, slots, merger, writer, counters, .. } = self;
        let mut done = std::mem::take(&mut writer.done);
        merger.flush(&mut |packet| writer.write(fd.as_fd(), slots, &packet, counters, &mut done));
        writer.retry(fd.as_fd(), slots, counters, &mut done);
        free(slots, &mut done);
        writer.done = done;
        Ok(())
    }

    fn tx_capacity(&self) -> u32 {
        self.heads.capacity()
    }

    fn rx_capacity(&self) -> u32 {
        self.slots.capacity()
    }

    fn tx_free(&self) -> u32 {
        if self.spare.is_some() || self.spills.free() > 0 { self.heads.free() } else { 0 }
    }

    fn tx_small_bytes(&self) -> u32 {
        (HEAD_BYTES - VIRTIO) as u32
    }

    fn tx_free_large(&self) -> u32 {
        (self.spills.free() + u32::from(self.spare.is_some())).min(self.heads.free())
    }

    fn has_postponed(&self) -> bool {
        self.writer.has_waiting()
    }

    fn counters(&self) -> Vec<(String, u64)> {
        let own = self.counters.iter();
        let held = ("rx_held_frames".to_string(), u64::from(self.slots.capacity() - self.slots.free()));
        own.chain([held]).filter(|c| c.1 > 0).collect()
    }

    /// On the device's first queue only: the kernel counts for the whole device.
    fn kernel_counters(&self) -> Option<Arc<dyn KernelCounters>> {
        self.statistics.clone().map(|statistics| statistics as Arc<dyn KernelCounters>)
    }

    fn touched(&self) -> Vec<u32> {
        [&self.heads, &self.spills, &self.slots].map(Pool::touched).to_vec()
    }

    fn touch(&mut self, buffers: &[u32]) {
        for (pool, count) in [&mut self.heads, &mut self.spills, &mut self.slots].into_iter().zip(buffers) {
            pool.touch(*count);
        }
    }
}

impl PolledPort for TapQueue {
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Default for PoolSizes {
    fn default() -> Self {
        Self { heads: 16_384, spills: 256, slots: 4096 }
    }
}

/// The offloads that the virtio header of a frame of `len` bytes requests. Frames without offloads are not parsed here:
/// the data path parses them anyway.
fn offload(head: &[u8], frame: &[u8], len: usize) -> Result<Offload, Malformed> {
    let virtio = virtio_net::Header::parse_short(head).unwrap_or_default();
    if virtio.flags & virtio_net::F_NEEDS_CSUM == 0 && virtio.gso_type == virtio_net::GSO_NONE {
        return Ok(Offload::default());
    }
    Offload::from_virtio(virtio, &parse(frame, len)?, len)
}

fn free(slots: &mut Pool, done: &mut Vec<u32>) {
    for slot in done.drain(..) {
        slots.put(slot);
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
