//! Packets of a guest that wait for a window, in one queue per destination.
//!
//! A closed window stops only the guest's packets to that destination. The price is that the guest itself is no longer
//! stopped: what it continues to send to that destination is fetched, queued, and dropped once the queue is full. A
//! queue is full when it holds as many of the guest's buffers as are free (dynamic thresholds, Choudhury and Hahne,
//! 1998): one destination may hold half of them, two a third each, and some are always left for a destination that is
//! not blocked.
//!
//! A guest that talks to a single destination would only lose by that. It is stopped before its queue is full, as long
//! as the queue moves: its packets wait in its ring or its kernel, and none is dropped. Now and then some are fetched
//! nevertheless, to see whether one is for another destination.
//!
//! With a [bound](Waiting::set_bound), all packets to other hosts wait here until it is their port's turn on the link
//! ([egress](crate::egress)), and those of the first [`Band`] go first. A queue is then one of a destination and a
//! band, and the packets of a band are limited in bytes.

use std::collections::VecDeque;

use bifrost_nic::dscp::Band;
use bifrost_port::TxFrame;
use bifrost_rte::Time;
use bifrost_wire::Mac;
use foldhash::fast::RandomState;
use hashbrown::HashMap;

use crate::departure::Departure;

/// Maximum number of destinations for which packets of one guest may wait at once.
const MOST_DESTINATIONS: usize = 256;
/// Bytes that one queue sends per turn, plus at most one packet.
const QUANTUM: u32 = 64 << 10;
/// A queue of this many bytes stops a guest that sends to no other destination, as does a queue without room for a
/// fetch.
const HOLD_BYTES: u64 = 1 << 20;
/// About that many bytes, in the smallest packets that count as large.
const HOLD_PACKETS: usize = 128;
/// Maximum duration of such a stop, while there is room for more than a fetch.
const HOLD_NS: u64 = 5_000_000;
/// Maximum packets of one fetch.
const FETCH: usize = 128;
/// A queue moves if [`HOLD_BYTES`] or [`HOLD_PACKETS`] leave it in this time. A queue that does not move is no reason
/// to stop its guest: packets without room are dropped then.
const PACE_NS: u64 = 1_000_000_000;
/// How long a guest that has sent to another destination is not stopped.
const COMPANY_NS: u64 = 1_000_000_000;

/// How long a guest that has sent packets of several bands is not stopped: those of the first band must not wait in the
/// guest's own queue.
const CLASSES_NS: u64 = 60_000_000_000;
/// A queue has no room for a fetch if it has none for the largest packet, bytes.
const LARGEST: u64 = 64 << 10;

/// Capacity that an empty queue keeps.
const KEPT_PLACES: usize = 2 * HOLD_PACKETS;

/// Free buffers of a guest, which limit the size of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Packets longer than this need a large buffer.
    pub(crate) small_bytes: u32,
    /// Free buffers of any kind.
    pub(crate) packets: u32,
    /// Free large buffers.
    pub(crate) large: u32,
}

/// There is no room for a packet in its queue, or for another queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// Bands for which all destinations were found closed, as far as they were tried: their numbers, by band.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Closed([usize; BANDS]);

const BANDS: usize = Band::ALL.len();

/// A connection, as the switch identifies it, or a peer; and a band.
type Key = (u32, u32, Mac, Mac, Band);

#[derive(Debug)]
struct Queue {
    departure: Departure,
    band: Band,
    frames: VecDeque<TxFrame>,
    bytes: u64,
    large: u32,
    /// Bytes sent in this turn of the queue.
    served: u32,
}

/// A stop of a guest.
#[derive(Clone, Copy, Debug)]
struct Hold {
    /// When packets were last fetched.
    fetched: Time,
    /// When [`HOLD_BYTES`] or [`HOLD_PACKETS`] had last left the queue.
    moved: Time,
    /// What has left since then.
    packets: usize,
    bytes: u64,
}

/// The queues of one guest.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// Queues in use are in `bands` and `places`; the others are empty.
    queues: Vec<Queue>,
    bands: [Destinations; BANDS],
    unused: Vec<u16>,
    places: HashMap<Key, u16, RandomState>,
    packets: usize,
    /// Maximum bytes of a band, if all packets wait.
    bound: Option<u64>,
    /// Whether packets may have to wait: some do, or all must.
    is_in_use: bool,
    /// Set while the only queue is long enough to stop the guest.
    hold: Option<Hold>,
    /// When the guest last sent to another destination than the one for which its packets wait.
    company: Option<Time>,
    /// When the guest last sent a packet of another band than most.
    classes: Option<Time>,
}

/// The queues of a band.
#[derive(Debug, Default)]
struct Destinations {
    /// Queues with packets, the next to be served first.
    order: VecDeque<u16>,
    bytes: u64,
}

impl Waiting {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// Makes all packets wait, in bands of at most `bound` bytes each, or only those for which a window is closed.
    pub(crate) fn set_bound(&mut self, bound: Option<u64>) {
        self.bound = bound;
        self.is_in_use = self.packets > 0 || bound.is_some();
    }

    /// Maximum bytes of a band, if all packets wait.
    pub(crate) fn bound(&self) -> Option<u64> {
        self.bound
    }

    /// Packets that wait.
    pub(crate) fn packets(&self) -> usize {
        self.packets
    }

    /// Destinations for which packets wait.
    pub(crate) fn destinations(&self) -> usize {
        self.places.len()
    }

    /// Whether a packet must wait: all do, or it is behind others to the same destination.
    pub(crate) fn must_wait(&self, departure: &Departure) -> bool {
        self.is_in_use && (self.bound.is_some() || self.has(departure))
    }

    /// Whether packets to the same destination wait.
    fn has(&self, departure: &Departure) -> bool {
        departure.reliably.is_some() && Band::ALL.iter().any(|band| self.places.contains_key(&key(departure, *band)))
    }

    /// Queues a packet behind those to the same destination, in the same band.
    ///
    /// # Errors
    /// There is no room for it, or it need not wait; the caller drops it.
    pub(crate) fn push(
        &mut self,
        now: Time,
        frame: TxFrame,
        (departure, band): (Departure, Band),
        room: Room,
    ) -> Result<(), Full> {
        // Without a bound, a packet that is not carried reliably never waits.
        if departure.reliably.is_none() && self.bound.is_none() {
            return Err(Full);
        }
        if band != Band::Normal {
            self.classes = Some(now);
        }
        let key = key(&departure, band);
        let in_band = self.bands[band.index()].bytes;
        // A guest that is stopped before its queue is full waits, whatever it has fetched.
        let is_only = self.is_alone(now) && self.places.contains_key(&key);
        if self.bound.is_some_and(|bound| in_band > 0 && in_band + u64::from(frame.len) > bound) && !is_only {
            return Err(Full);
        }
        let place = match self.places.get(&key) {
            Some(&place) => place,
            None => self.open(key, departure)?,
        };
        if self.destinations() > 1 {
            self.company = Some(now);
        }
        // A guest that is stopped before its queue is full has not fetched more than it may hold.
        let is_bounded = !self.is_alone(now);
        let queue = &mut self.queues[usize::from(place)];
        let large = frame.len > room.small_bytes;
        if is_bounded
            && !queue.frames.is_empty()
            && (queue.frames.len() >= room.packets as usize || large && queue.large >= room.large)
        {
            return Err(Full);
        }
        queue.frames.push_back(frame);
        queue.bytes += u64::from(frame.len);
        queue.large += u32::from(large);
        self.bands[band.index()].bytes += u64::from(frame.len);
        self.packets += 1;
        self.is_in_use = true;
        if self.hold.is_none() && (self.is_long() || self.is_nearly_full(room)) {
            self.hold = Some(Hold { fetched: now, moved: now, packets: 0, bytes: 0 });
        }
        Ok(())
    }

    fn open(&mut self, key: Key, departure: Departure) -> Result<u16, Full> {
        let place = match self.unused.pop() {
            Some(place) => {
                let queue = &mut self.queues[usize::from(place)];
                (queue.departure, queue.band) = (departure, key.4);
                place
            }
            None if self.queues.len() < MOST_DESTINATIONS => {
                let (frames, band) = (VecDeque::new(), key.4);
                self.queues.push(Queue { departure, band, frames, bytes: 0, large: 0, served: 0 });
                (self.queues.len() - 1) as u16
            }
            None => return Err(Full),
        };
        self.places.insert(key, place);
        self.bands[key.4.index()].order.push_back(place);
        Ok(place)
    }

    /// The packet whose turn it is, and its band: of the first band with a destination that is not `closed`.
    pub(crate) fn front(&self, closed: &Closed) -> Option<(Band, TxFrame, Departure)> {
        let is_open = |band: &Band| closed.0[band.index()] < self.bands[band.index()].order.len();
        let band = Band::ALL.into_iter().find(is_open)?;
        let queue = self.queues.get(usize::from(*self.bands[band.index()].order.front()?))?;
        Some((band, *queue.frames.front()?, queue.departure))
    }

    /// The packet whose turn it was in its band no longer waits.
    pub(crate) fn pop(&mut self, now: Time, band: Band, room: Room) {
        let of = &mut self.bands[band.index()];
        let Some(&place) = of.order.front() else { return };
        let queue = &mut self.queues[usize::from(place)];
        let Some(frame) = queue.frames.pop_front() else { return };
        self.packets -= 1;
        of.bytes -= u64::from(frame.len);
        queue.bytes -= u64::from(frame.len);
        queue.large -= u32::from(frame.len > room.small_bytes);
        queue.served += frame.len;
        if let Some(hold) = &mut self.hold {
            (hold.packets, hold.bytes) = (hold.packets + 1, hold.bytes + u64::from(frame.len));
            if hold.packets >= HOLD_PACKETS || hold.bytes >= HOLD_BYTES {
                *hold = Hold { moved: now, packets: 0, bytes: 0, ..*hold };
            }
        }
        if queue.frames.is_empty() {
            self.close_front(band);
        } else if queue.served >= QUANTUM {
            self.rotate(band);
        }
        self.is_in_use = self.packets > 0 || self.bound.is_some();
        if !self.is_long() && !self.is_nearly_full(room) {
            self.hold = None;
        }
    }

    /// The window of the destination whose turn it is in a band is closed: moves on to the next one.
    pub(crate) fn skip(&mut self, band: Band, closed: &mut Closed) {
        closed.0[band.index()] += 1;
        self.rotate(band);
    }

    /// Moves on to the next queue of a band.
    fn rotate(&mut self, band: Band) {
        let order = &mut self.bands[band.index()].order;
        if let Some(place) = order.pop_front() {
            self.queues[usize::from(place)].served = 0;
            order.push_back(place);
        }
    }

    fn close_front(&mut self, band: Band) {
        let Some(place) = self.bands[band.index()].order.pop_front() else { return };
        let queue = &mut self.queues[usize::from(place)];
        (queue.bytes, queue.large, queue.served) = (0, 0, 0);
        if queue.frames.capacity() > KEPT_PLACES {
            queue.frames = VecDeque::new();
        }
        let key = key(&queue.departure, band);
        self.places.remove(&key);
        self.unused.push(place);
    }

    /// The guest has sent a packet that does not wait; `to`: its destination vNIC.
    pub(crate) fn passed(&mut self, now: Time, to: Mac) {
        let waits_for = self.front(&Closed::default()).and_then(|(.., departure)| departure.reliably);
        if self.destinations() > 1 || waits_for.is_some_and(|of| of.remote != to) {
            self.company = Some(now);
        }
    }

    /// Packets of the guest were fetched, for any destination.
    pub(crate) fn fetched(&mut self, now: Time) {
        if let Some(hold) = &mut self.hold {
            hold.fetched = now;
        }
    }

    /// Until when the guest is stopped, if it is; the stop may end earlier.
    pub(crate) fn held_until(&self, now: Time, room: Room) -> Option<Time> {
        let hold = self.hold.filter(|_| self.destinations() == 1)?;
        let stands_still = hold.moved.after(PACE_NS);
        let until = if self.is_nearly_full(room) { stands_still } else { hold.fetched.after(HOLD_NS) };
        Some(until).filter(|until| self.is_alone(now) && now < *until)
    }

    /// Whether the guest is only fetched from to see whether it has packets of another band.
    pub(crate) fn is_probed(&self, now: Time) -> bool {
        self.bound.is_some() && self.hold.is_some() && self.is_alone(now)
    }

    /// Whether the guest talks to a single destination, and its queue moves.
    fn is_alone(&self, now: Time) -> bool {
        self.destinations() == 1
            && self.company.is_none_or(|at| now.since(at) > COMPANY_NS)
            && self.classes.is_none_or(|at| now.since(at) > CLASSES_NS)
            && self.hold.is_none_or(|hold| now < hold.moved.after(PACE_NS))
    }

    /// Removes the packets that wait for the `chosen` destinations, oldest of each first.
    pub(crate) fn take(&mut self, chosen: impl Fn(&Departure) -> bool, mut each: impl FnMut(TxFrame)) {
        for band in Band::ALL {
            for _ in 0..self.bands[band.index()].order.len() {
                let Some(&place) = self.bands[band.index()].order.front() else { break };
                let queue = &mut self.queues[usize::from(place)];
                if !chosen(&queue.departure) {
                    self.rotate(band);
                    continue;
                }
                self.packets -= queue.frames.len();
                self.bands[band.index()].bytes -= queue.bytes;
                queue.frames.drain(..).for_each(&mut each);
                self.close_front(band);
            }
        }
        self.is_in_use = self.packets > 0 || self.bound.is_some();
        if !self.is_long() {
            self.hold = None;
        }
    }

    /// All waiting packets, band by band and destination by destination, oldest of each first.
    pub(crate) fn frames(&self) -> impl Iterator<Item = &TxFrame> {
        let places = self.bands.iter().flat_map(|band| &band.order);
        places.filter_map(|place| self.queues.get(usize::from(*place))).flat_map(|queue| &queue.frames)
    }

    /// The only queue, if there is exactly one.
    fn only(&self) -> Option<&Queue> {
        let mut places = self.bands.iter().flat_map(|band| &band.order);
        let place = places.next().filter(|_| self.destinations() == 1)?;
        self.queues.get(usize::from(*place))
    }

    /// Whether there is a single queue, and it is long enough to stop the guest.
    fn is_long(&self) -> bool {
        let long = self.bound.map_or(HOLD_BYTES, |bound| HOLD_BYTES.min(bound / 2));
        self.only().is_some_and(|queue| queue.bytes >= long)
    }

    /// Whether there is a single queue, and it may have no room for the packets of a fetch.
    fn is_nearly_full(&self, room: Room) -> bool {
        self.only().is_some_and(|queue| {
            queue.frames.len() + FETCH > room.packets as usize
                || queue.large + FETCH as u32 > room.large
                || self.bound.is_some_and(|bound| queue.bytes + LARGEST > bound && self.is_long())
        })
    }
}

fn key(departure: &Departure, band: Band) -> Key {
    let nobody = Mac([0; 6]);
    match departure.reliably {
        Some(to) => (to.vni, departure.peer, to.local, to.remote, band),
        None => (departure.vni, departure.peer, nobody, nobody, band),
    }
}

#[cfg(test)]
#[path = "waiting_tests.rs"]
mod tests;
