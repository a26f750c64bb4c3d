//! Queues frames for guests, and gives guests what has waited.

use std::collections::VecDeque;

use bifrost_nic::dscp::Band;
use bifrost_port::{GuestPort, PlaceError};
use bifrost_rte::Time;

use super::{RETRY_NS, RxQueue, TURN_FRAMES, Waiter};
use crate::capture::Note;
use crate::core::Core;
use crate::ports::Port;
use crate::refusal::Refusal;

impl<P: GuestPort> Port<P> {
    /// Makes frames beyond the receive limit wait, at most `bytes` in each band, or not. What waits is kept.
    pub(crate) fn set_rx_queue(&mut self, bytes: Option<usize>) {
        match (&mut self.rx_queue, bytes) {
            (Some(queue), Some(bytes)) => queue.bound = bytes,
            (none @ None, Some(bytes)) => *none = Some(Box::new(RxQueue::new(bytes))),
            // They leave without a limit.
            (Some(queue), None) => queue.bound = 0,
            (None, None) => {}
        }
    }

    /// Frames that wait for the guest.
    pub(crate) fn rx_queued(&self) -> u64 {
        self.rx_queue.as_ref().map_or(0, |queue| queue.bands.iter().map(VecDeque::len).sum::<usize>() as u64)
    }

    /// When frames that wait for the guest can be offered to it.
    pub(crate) fn next_queued(&self, now: Time) -> Option<Time> {
        let queue = self.rx_queue.as_ref()?;
        let (band, waiter) = queue.front()?;
        let limit = self.limits.rx.as_ref().map_or(0, |limit| limit.until(now, waiter.frame.len(), band));
        Some(now.after(limit).max(queue.retry))
    }
}

impl<P: GuestPort> Core<P> {
    /// Queues a frame that a limit holds back, or for which the guest has no buffer. Returns why it is dropped instead.
    #[cold]
    pub(crate) fn queue_for_guest(
        &mut self,
        owner: u32,
        frame: &[u8],
        checksum_valid: bool,
        refusal: Refusal,
    ) -> Result<(), Refusal> {
        if !matches!(refusal, Refusal::RateLimited | Refusal::NoBuffer) {
            return Err(refusal);
        }
        let now = self.now;
        let Some(queue) = self.port_mut(owner).and_then(|port| port.rx_queue.as_mut()) else { return Err(refusal) };
        if refusal == Refusal::NoBuffer && queue.is_stuck(now) {
            return Err(refusal);
        }
        if !queue.push(Band::of_frame(frame), frame, checksum_valid) {
            return Err(refusal);
        }
        if !std::mem::replace(&mut queue.is_listed, true) {
            self.rx_queued.push(owner);
        }
        self.counters.rx_queued_packets += 1;
        Ok(())
    }

    /// When frames that wait for guests can be offered to them.
    pub(crate) fn next_rx_queued(&self) -> Option<Time> {
        let port = |owner: &u32| self.ports.get(*owner as usize)?.as_ref()?.next_queued(self.now);
        self.rx_queued.iter().filter_map(port).min()
    }

    /// Gives guests frames that have waited. Returns whether there were any.
    #[cold]
    #[inline(never)]
    pub(crate) fn release_rx_queued<const SEEN: bool>(&mut self) -> bool {
        let mut busy = false;
        let mut at = 0;
        while let Some(&owner) = self.rx_queued.get(at) {
            for _ in 0..TURN_FRAMES {
                let now = self.now;
                let Some(port) = self.port_mut(owner).filter(|port| port.next_queued(now).is_some_and(|at| at <= now))
                else {
                    break;
                };
                let Some(queue) = &mut port.rx_queue else { break };
                let Some(band) = queue.front().map(|(band, _)| band) else { break };
                let Some(waiter) = queue.pop(band) else { break };
                busy = true;
                self.place_queued::<SEEN>(owner, band, waiter);
            }
            if self.port_mut(owner).is_some_and(|port| port.rx_queued() > 0) {
                at += 1;
                continue;
            }
            if let Some(queue) = self.port_mut(owner).and_then(|port| port.rx_queue.as_mut()) {
                queue.is_listed = false;
            }
            self.rx_queued.swap_remove(at);
        }
        busy
    }

    /// Places a frame that has waited, or puts it back.
    fn place_queued<const SEEN: bool>(&mut self, owner: u32, band: Band, waiter: Waiter) {
        let now = self.now;
        let Some(port) = self.port_mut(owner) else { return };
        let note = Note { port: Some(owner), vni: Some(port.vni.get()), ..Note::inwards("plain") };
        let len = waiter.frame.len();
        let placed = if port.slowness.rests(now) {
            Err(Refusal::SlowPort)
        } else {
            port.port.place(&waiter.frame, waiter.checksum_valid).map_err(|error| match error {
                PlaceError::NoBuffer => Refusal::NoBuffer,
                PlaceError::TooLarge => Refusal::TooLarge,
            })
        };
        if placed == Err(Refusal::NoBuffer)
            && let Some(queue) = &mut port.rx_queue
            && !queue.is_stuck(now)
        {
            queue.bytes[band.index()] += len;
            queue.bands[band.index()].push_front(waiter);
            queue.retry = now.after(RETRY_NS);
            return;
        }
        if let Some(limit) = &port.limits.rx {
            limit.charge(now, len as u64, 1);
        }
        self.counters.rx_released_packets += 1;
        match placed {
            Ok(handle) => {
                if let Some(queue) = self.port_mut(owner).and_then(|port| port.rx_queue.as_mut()) {
                    queue.stuck = None;
                }
                port_placed(self.ports[owner as usize].as_mut(), len);
                self.counters.guest_rx_packets += 1;
                if SEEN && let Some(capture) = &mut self.capture {
                    capture.placed(note, handle.0, &waiter.frame);
                }
                self.out.publish.push((owner, handle.0));
            }
            Err(refusal) => self.refuse::<SEEN>(refusal, Some(owner), None, note, &waiter.frame),
        }
    }

    /// Drops frames that wait for a port whose device is replaced or removed.
    pub(crate) fn drop_rx_queued(&mut self, owner: u32) {
        let Some(port) = self.port_mut(owner) else { return };
        let dropped = port.rx_queued();
        let Some(queue) = &mut port.rx_queue else { return };
        // The next turn takes it off the list.
        **queue = RxQueue { is_listed: queue.is_listed, ..RxQueue::new(queue.bound) };
        self.counters.rx_released_packets += dropped;
        self.counters.gone_packets += dropped;
    }
}

/// Counts a frame of `len` bytes that was placed.
fn port_placed<P>(port: Option<&mut Port<P>>, len: usize) {
    if let Some(port) = port {
        port.rx_packets += 1;
        port.rx_bytes += len as u64;
        port.hidden += 1;
    }
}
