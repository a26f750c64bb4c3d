//! Frames for a guest beyond its receive limit, or without a buffer of the guest, that wait instead of being dropped.
//!
//! Only frames that nobody retransmits wait here: plain VXLAN, and frames of guests of this host. The transport keeps
//! what it carries at the sender. There is a queue for each [`Band`], and the first band goes first.

use std::collections::VecDeque;

use bifrost_nic::dscp::Band;
use bifrost_port::{GuestPort, PlaceError};
use bifrost_rte::Time;

use crate::capture::Note;
use crate::core::Core;
use crate::limits::Limit;
use crate::ports::Port;
use crate::refusal::Refusal;

/// Interval at which frames for a guest without buffers are offered again, ns.
const RETRY_NS: u64 = 200_000;
/// A guest that takes nothing for so long gets none of the frames that wait for buffers, ns.
const STUCK_NS: u64 = 100_000_000;
/// Frames for one port that leave the queues in a turn.
const TURN_FRAMES: usize = 256;

/// A frame that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    pub(crate) frame: Box<[u8]>,
    /// Its transport checksum was verified.
    pub(crate) checksum_valid: bool,
}

/// The queues of a port on a worker.
#[derive(Debug)]
pub(crate) struct RxQueue {
    bands: [VecDeque<Waiter>; Band::ALL.len()],
    bytes: [usize; Band::ALL.len()],
    /// Maximum bytes of a band.
    bound: usize,
    /// When its frames are offered again.
    retry: Time,
    /// Since when the guest has had no buffer.
    stuck: Option<Time>,
}

impl RxQueue {
    pub(crate) fn new(bound: usize) -> Self {
        RxQueue { bands: Default::default(), bytes: [0; Band::ALL.len()], bound, retry: Time(0), stuck: None }
    }

    /// Whether frames wait that go before a new one of this band.
    pub(crate) fn has_before(&self, band: Band) -> bool {
        self.bands[..=band.index()].iter().any(|waiters| !waiters.is_empty())
    }

    /// Queues a frame; returns false if its band is full.
    pub(crate) fn push(&mut self, band: Band, frame: &[u8], checksum_valid: bool) -> bool {
        let bytes = &mut self.bytes[band.index()];
        if self.bound == 0 || *bytes > 0 && *bytes + frame.len() > self.bound {
            return false;
        }
        *bytes += frame.len();
        self.bands[band.index()].push_back(Waiter { frame: frame.into(), checksum_valid });
        true
    }

    /// The frame whose turn it is.
    pub(crate) fn front(&self) -> Option<(Band, &Waiter)> {
        Band::ALL.into_iter().find_map(|band| Some((band, self.bands[band.index()].front()?)))
    }

    /// The guest has no buffer: offers frames again later. Returns whether that was so for too long.
    fn is_stuck(&mut self, now: Time) -> bool {
        self.retry = now.after(RETRY_NS);
        now.since(*self.stuck.get_or_insert(now)) >= STUCK_NS
    }

    /// The frame whose turn it was leaves.
    pub(crate) fn pop(&mut self, band: Band) -> Option<Waiter> {
        let waiter = self.bands[band.index()].pop_front()?;
        self.bytes[band.index()] -= waiter.frame.len();
        Some(waiter)
    }
}

/// Whether a limit lets a frame pass now; if so, it is charged. With a queue, frames keep their order in each band, and
/// those of the first band may use the limit's next burst ahead of time.
pub(crate) fn admits(limit: &Limit, queue: Option<&RxQueue>, now: Time, frame: &[u8]) -> bool {
    let Some(queue) = queue else { return limit.take(now, frame.len()) };
    let band = Band::of_frame(frame);
    if queue.has_before(band) {
        return false;
    }
    if band == Band::Priority { limit.take_ahead(now, frame.len()) } else { limit.take(now, frame.len()) }
}

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
        self.counters.rx_queued_packets += 1;
        self.has_rx_queued = true;
        Ok(())
    }

    /// When frames that wait for guests can be offered to them.
    pub(crate) fn next_rx_queued(&self) -> Option<Time> {
        if !self.has_rx_queued {
            return None;
        }
        self.ports.iter().flatten().filter_map(|port| port.next_queued(self.now)).min()
    }

    /// Gives guests frames that have waited. Returns whether there were any.
    #[cold]
    #[inline(never)]
    pub(crate) fn release_rx_queued<const SEEN: bool>(&mut self) -> bool {
        let mut busy = false;
        self.has_rx_queued = false;
        for owner in 0..self.ports.len() as u32 {
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
            self.has_rx_queued |= self.port_mut(owner).is_some_and(|port| port.rx_queued() > 0);
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
        **queue = RxQueue::new(queue.bound);
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

#[cfg(test)]
mod tests {
    use bifrost_wire::{Mac, ethernet, ipv4, ipv6, protocol};
    use proptest::prelude::*;

    use super::*;
    use crate::limits::{Limits, Rate};

    /// A UDP packet of a band with `payload` more bytes, and a number at its end.
    fn frame(v6: bool, band: Band, payload: usize, number: u8) -> Vec<u8> {
        let class = match band {
            Band::Priority => 46 << 2,
            Band::Normal => 0,
            Band::Background => 8 << 2,
        };
        let kind = if v6 { ethernet::ethertype::IPV6 } else { ethernet::ethertype::IPV4 };
        let mut frame = ethernet::Header::new(Mac([2; 6]), Mac([4; 6]), kind).emit().to_vec();
        if v6 {
            let [from, to] = [1, 2].map(|n| [0xfd00, 0, 0, 0, 0, 0, 0, n].into());
            let header = ipv6::Header::new(from, to, protocol::UDP, payload as u16);
            frame.extend_from_slice(&ipv6::Header { traffic_class: class, ..header }.emit());
        } else {
            let header = ipv4::Header::new([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), protocol::UDP, payload as u16);
            frame.extend_from_slice(&ipv4::Header { traffic_class: class, ..header }.emit());
        }
        frame.resize(frame.len() + payload, 0);
        frame.push(number);
        frame
    }

    fn band() -> impl Strategy<Value = Band> {
        prop::sample::select(Band::ALL.to_vec())
    }

    proptest! {
        /// Against one list of everything that waits.
        #[test]
        fn bands_go_in_order_and_are_bounded(
            steps in prop::collection::vec(prop::option::weighted(0.6, (band(), 0usize..600, any::<bool>())), 1..200),
        ) {
            let (mut queue, mut all) = (RxQueue::new(1000), Vec::<(Band, Vec<u8>)>::new());
            for (number, step) in (0..).zip(steps) {
                match step {
                    Some((band, payload, v6)) => {
                        let frame = frame(v6, band, payload, number);
                        let bytes: usize = all.iter().filter(|w| w.0 == band).map(|w| w.1.len()).sum();
                        let fits = bytes == 0 || bytes + frame.len() <= 1000;
                        prop_assert_eq!(queue.push(band, &frame, false), fits);
                        if fits {
                            all.push((band, frame));
                        }
                    }
                    None => {
                        all.sort_by_key(|w| w.0);
                        let first = (!all.is_empty()).then(|| all.remove(0));
                        let front = queue.front().map(|(band, _)| band);
                        let popped = front.and_then(|band| Some((band, queue.pop(band)?.frame.to_vec())));
                        prop_assert_eq!(popped, first);
                    }
                }
                for band in Band::ALL {
                    prop_assert_eq!(queue.has_before(band), all.iter().any(|w| w.0 <= band));
                }
                prop_assert_eq!(queue.front().is_none(), all.is_empty());
            }
        }
    }

    #[test]
    fn the_first_band_may_use_the_next_burst() {
        let limits = Limits::new(Rate::default(), Rate { bytes: None, packets: Some(1_000) });
        let limit = limits.rx.expect("a limit");
        let queue = RxQueue::new(1000);
        let normal = frame(false, Band::Normal, 10, 0);
        let urgent = frame(true, Band::Priority, 10, 0);
        let count = |frame: &[u8]| (0..100).filter(|_| admits(&limit, Some(&queue), Time(0), frame)).count();
        assert_eq!(count(&normal), 32, "a burst");
        assert_eq!(count(&urgent), 32, "another one");
        assert_eq!(count(&normal), 0);
    }

    #[test]
    fn nothing_overtakes_its_own_band() {
        let limits = Limits::new(Rate::default(), Rate { bytes: None, packets: Some(1_000) });
        let limit = limits.rx.expect("a limit");
        let mut queue = RxQueue::new(1000);
        let [urgent, normal, background] = Band::ALL.map(|band| frame(false, band, 10, 0));
        assert!(queue.push(Band::Normal, &normal, true));
        let admitted = [&urgent, &normal, &background].map(|frame| admits(&limit, Some(&queue), Time(0), frame));
        assert_eq!(admitted, [true, false, false]);
        assert!(admits(&limit, None, Time(0), &normal), "without a queue nothing waits");
    }
}
