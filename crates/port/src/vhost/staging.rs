//! Receiving for a guest that takes merged segments (`VIRTIO_NET_F_GUEST_TSO4` and `6`, with mergeable buffers).
//!
//! Only when segments are shown is it known which of them form one packet, and a packet's payload must be contiguous in
//! its buffers. So frames for such a guest are placed here, as for a TAP device, and written to its memory when they
//! are shown. This costs one more copy, but the guest's kernel handles one packet instead of up to 64.

use std::collections::VecDeque;

use bifrost_nic::{Merged, Merger};

use super::counters::VhostCounters;
use super::receive::{Receive, Source};
use super::ring::Ring;
use crate::guest::{PlaceError, RxHandle};
use crate::pool::Pool;

/// Maximum number of frames placed and not shown.
const MOST_SLOTS: u32 = 4096;

/// Frames that arrived and are not in the guest's memory yet. A handle is a slot number.
#[derive(Debug)]
pub(super) struct Staging {
    slots: Pool,
    /// By slot, for slots ever used.
    placed: Vec<Placed>,
    merger: Merger,
    /// Frames for which the guest had no buffers when they were to be shown, oldest first. They are shown one by one.
    waiting: VecDeque<u32>,
    /// Scratch: slots that became free.
    done: Vec<u32>,
    max_frame: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Placed {
    len: u32,
    checksum_valid: bool,
    published: bool,
}

impl Staging {
    /// For a ring of this many buffers and frames of at most `max_frame` bytes.
    pub(super) fn new(buffers: u16, max_frame: usize) -> Self {
        Staging {
            slots: Pool::new(u32::from(buffers).min(MOST_SLOTS), max_frame.next_multiple_of(64)),
            placed: Vec::new(),
            merger: Merger::new(),
            waiting: VecDeque::new(),
            done: Vec::new(),
            max_frame,
        }
    }

    /// Stores a frame.
    pub(super) fn place(
        &mut self,
        frame: &[u8],
        checksum_valid: bool,
        counters: &mut VhostCounters,
    ) -> Result<RxHandle, PlaceError> {
        if frame.len() > self.max_frame {
            counters.rx_too_large_frames += 1;
            return Err(PlaceError::TooLarge);
        }
        let Some(slot) = self.slots.take() else {
            counters.rx_no_buffer_frames += 1;
            return Err(PlaceError::NoBuffer);
        };
        self.slots.bytes_mut(slot)[..frame.len()].copy_from_slice(frame);
        if self.placed.len() <= slot as usize {
            self.placed.resize(slot as usize + 1, Placed::default());
        }
        self.placed[slot as usize] = Placed { len: frame.len() as u32, checksum_valid, published: false };
        Ok(RxHandle(slot))
    }

    /// Shows a frame next, merged with earlier ones if they form one packet.
    pub(super) fn publish<R: Ring>(
        &mut self,
        handle: RxHandle,
        receive: &mut Receive<R>,
        counters: &mut VhostCounters,
    ) {
        let slot = handle.0;
        if !self.slots.is_taken(slot) || self.placed[slot as usize].published {
            return;
        }
        let Self { slots, placed, merger, waiting, done, .. } = self;
        let frame = &mut placed[slot as usize];
        frame.published = true;
        let (len, valid) = (frame.len as usize, frame.checksum_valid);
        merger.push(slot, &slots.bytes(slot)[..len], valid, &mut |packet| {
            show(&packet, slots, waiting, done, receive, counters);
        });
        self.free();
    }

    /// Ends a batch: shows all merged packets, and retries frames that wait for buffers.
    pub(super) fn flush<R: Ring>(&mut self, receive: &mut Receive<R>, counters: &mut VhostCounters) {
        let Self { slots, placed, merger, waiting, done, .. } = self;
        while let Some(&slot) = waiting.front() {
            let Placed { len, checksum_valid, .. } = placed[slot as usize];
            match receive.place(&slots.bytes(slot)[..len as usize], checksum_valid, counters) {
                Ok(handle) => receive.publish(handle, counters),
                Err(PlaceError::NoBuffer) => break,
                // The frame does not fit into the guest's buffers, which is already counted.
                Err(PlaceError::TooLarge) => {}
            }
            done.push(slot);
            waiting.pop_front();
        }
        merger.flush(&mut |packet| show(&packet, slots, waiting, done, receive, counters));
        self.free();
    }

    /// Discards a frame.
    pub(super) fn discard(&mut self, handle: RxHandle, counters: &mut VhostCounters) {
        let published = self.placed.get(handle.0 as usize).is_some_and(|placed| placed.published);
        if !published && self.slots.put(handle.0) {
            counters.rx_discarded_frames += 1;
        }
    }

    /// Whether frames wait for the guest's buffers.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Maximum number of frames placed and not shown.
    pub(super) fn capacity(&self) -> u32 {
        self.slots.capacity()
    }

    fn free(&mut self) {
        for slot in self.done.drain(..) {
            self.slots.put(slot);
        }
    }
}

/// Writes a packet to the guest's memory, or queues its frames until there are buffers, behind those that wait already.
fn show<R: Ring>(
    packet: &Merged<'_>,
    slots: &Pool,
    waiting: &mut VecDeque<u32>,
    done: &mut Vec<u32>,
    receive: &mut Receive<R>,
    counters: &mut VhostCounters,
) {
    let names = packet.parts.iter().map(|part| part.buffer);
    if waiting.is_empty() && write(packet, slots, receive, counters) {
        return done.extend(names);
    }
    // The ring may never have room for a whole large packet.
    counters.rx_deferred_frames += packet.parts.len() as u64;
    waiting.extend(names);
}

/// Whether the packet was written to the guest's memory.
fn write<R: Ring>(packet: &Merged<'_>, slots: &Pool, receive: &mut Receive<R>, counters: &mut VhostCounters) -> bool {
    let mut pieces = [&[][..]; 1 + Merger::MAX_PARTS];
    pieces[0] = packet.header;
    for (piece, part) in pieces[1..].iter_mut().zip(packet.parts) {
        *piece = &slots.bytes(part.buffer)[part.offset as usize..][..part.len as usize];
    }
    let frames = packet.parts.len();
    let Ok(handle) = receive.place_from(&Source::new(packet.virtio, &pieces[..=frames]), counters) else {
        return false;
    };
    if frames > 1 {
        counters.rx_merged_frames += frames as u64;
    }
    receive.publish(handle, counters);
    true
}

#[cfg(test)]
#[path = "staging_tests.rs"]
mod tests;
