//! Frames for a guest beyond its receive limit, or without a buffer of the guest, that wait instead of being dropped.
//!
//! Only frames that nobody retransmits wait here: plain VXLAN, and frames of guests of this host. The transport keeps
//! what it carries at the sender. There is a queue for each [`Band`], and the first band goes first.

mod release;

use std::collections::VecDeque;

use bifrost_nic::dscp::Band;
use bifrost_rte::Time;

use crate::limits::Limit;

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
    /// The core has the port in its list.
    is_listed: bool,
}

impl RxQueue {
    pub(crate) fn new(bound: usize) -> Self {
        RxQueue {
            bands: Default::default(),
            bytes: [0; Band::ALL.len()],
            bound,
            retry: Time(0),
            stuck: None,
            is_listed: false,
        }
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
