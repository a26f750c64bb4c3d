//! Writing packets to a TAP queue.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use bifrost_nic::{Merged, Merger, Part};
use bifrost_wire::virtio_net;
use rustix::io::Errno;

use super::TapCounters;
use crate::pool::Pool;

/// Maximum pieces of a packet: virtio header, new headers, frames.
const PIECES: usize = 2 + Merger::MAX_PARTS;

/// Writes merged packets, and keeps those that the kernel does not accept yet.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    /// Packets to be written before all others, oldest first. Bounded by the slots that they hold.
    waiting: VecDeque<Waiting>,
    /// Scratch: slots that became free.
    pub(crate) done: Vec<u32>,
}

#[derive(Debug)]
struct Waiting {
    virtio: virtio_net::Header,
    header: Vec<u8>,
    parts: Vec<Part>,
}

impl Writer {
    /// Writes a packet, or keeps it for [`Self::retry`]. Appends slots that are no longer needed to `done`.
    pub(crate) fn write(
        &mut self,
        fd: BorrowedFd<'_>,
        slots: &Pool,
        packet: &Merged<'_>,
        counters: &mut TapCounters,
        done: &mut Vec<u32>,
    ) {
        if self.waiting.is_empty() && write(fd, slots, packet.virtio, packet.header, packet.parts, counters) {
            done.extend(packet.parts.iter().map(|p| p.buffer));
            return;
        }
        // The kernel is out of memory or the queue is full: rare enough to allocate here.
        counters.rx_deferred_packets += 1;
        self.waiting.push_back(Waiting {
            virtio: packet.virtio,
            header: packet.header.to_vec(),
            parts: packet.parts.to_vec(),
        });
    }

    /// Whether packets were kept.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Writes kept packets as far as the kernel accepts them.
    pub(crate) fn retry(&mut self, fd: BorrowedFd<'_>, slots: &Pool, counters: &mut TapCounters, done: &mut Vec<u32>) {
        while let Some(packet) = self.waiting.front() {
            if !write(fd, slots, packet.virtio, &packet.header, &packet.parts, counters) {
                return;
            }
            done.extend(packet.parts.iter().map(|p| p.buffer));
            self.waiting.pop_front();
        }
    }
}

/// One packet, one system call. Returns whether the packet is done: false only if a retry may succeed.
fn write(
    fd: BorrowedFd<'_>,
    slots: &Pool,
    virtio: virtio_net::Header,
    header: &[u8],
    parts: &[Part],
    counters: &mut TapCounters,
) -> bool {
    let virtio = virtio.emit_short();
    let mut pieces = [IoSlice::new(&[]); PIECES];
    pieces[0] = IoSlice::new(&virtio);
    pieces[1] = IoSlice::new(header);
    for (piece, part) in pieces[2..].iter_mut().zip(parts) {
        *piece = IoSlice::new(&slots.bytes(part.buffer)[part.offset as usize..][..part.len as usize]);
    }
    let frames = parts.len() as u64;
    loop {
        let counter = match rustix::io::writev(fd, &pieces[..(2 + parts.len()).min(PIECES)]) {
            Ok(_) => {
                counters.rx_packets += 1;
                counters.rx_frames += frames;
                // A merged packet has one set of headers; each of its frames was received with its own.
                counters.rx_bytes += parts.iter().map(|p| u64::from(p.offset + p.len)).sum::<u64>();
                return true;
            }
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => return false,
            Err(Errno::IO | Errno::BADFD | Errno::BADF | Errno::NODEV) => &mut counters.rx_device_down_frames,
            Err(Errno::INVAL) => &mut counters.rx_refused_frames,
            Err(_) => &mut counters.rx_other_error_frames,
        };
        *counter += frames;
        return true;
    }
}
