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

use std::collections::VecDeque;

use bifrost_port::TxFrame;
use bifrost_rte::Time;
use bifrost_wire::Mac;
use foldhash::fast::RandomState;
use hashbrown::HashMap;

use crate::ports::Departure;

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

/// A connection, as the switch identifies it.
type Key = (u32, u32, Mac, Mac);

#[derive(Debug)]
struct Queue {
    departure: Departure,
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
    /// Queues in use are in `order` and `places`; the others are empty.
    queues: Vec<Queue>,
    /// Queues with packets, the next to be served first.
    order: VecDeque<u16>,
    unused: Vec<u16>,
    places: HashMap<Key, u16, RandomState>,
    packets: usize,
    /// Set while the only queue is long enough to stop the guest.
    hold: Option<Hold>,
    /// When the guest last sent to another destination than the one for which its packets wait.
    company: Option<Time>,
}

impl Waiting {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// Packets that wait.
    pub(crate) fn packets(&self) -> usize {
        self.packets
    }

    /// Destinations for which packets wait.
    pub(crate) fn destinations(&self) -> usize {
        self.order.len()
    }

    /// Whether packets to the same destination wait, so that another one must wait behind them.
    pub(crate) fn has(&self, departure: &Departure) -> bool {
        !self.is_empty() && key(departure).is_some_and(|key| self.places.contains_key(&key))
    }

    /// Queues a packet behind those to the same destination.
    ///
    /// # Errors
    /// There is no room for it; the caller drops it.
    pub(crate) fn push(&mut self, now: Time, frame: TxFrame, departure: Departure, room: Room) -> Result<(), Full> {
        let key = key(&departure).ok_or(Full)?;
        let place = match self.places.get(&key) {
            Some(&place) => place,
            None => self.open(key, departure)?,
        };
        if self.order.len() > 1 {
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
        self.packets += 1;
        if self.hold.is_none() && (self.is_long() || self.is_nearly_full(room)) {
            self.hold = Some(Hold { fetched: now, moved: now, packets: 0, bytes: 0 });
        }
        Ok(())
    }

    fn open(&mut self, key: Key, departure: Departure) -> Result<u16, Full> {
        let place = match self.unused.pop() {
            Some(place) => {
                self.queues[usize::from(place)].departure = departure;
                place
            }
            None if self.queues.len() < MOST_DESTINATIONS => {
                self.queues.push(Queue { departure, frames: VecDeque::new(), bytes: 0, large: 0, served: 0 });
                (self.queues.len() - 1) as u16
            }
            None => return Err(Full),
        };
        self.places.insert(key, place);
        self.order.push_back(place);
        Ok(place)
    }

    /// The packet whose turn it is.
    pub(crate) fn front(&self) -> Option<(TxFrame, Departure)> {
        let queue = self.queues.get(usize::from(*self.order.front()?))?;
        Some((*queue.frames.front()?, queue.departure))
    }

    /// The packet whose turn it was no longer waits.
    pub(crate) fn pop(&mut self, now: Time, room: Room) {
        let Some(&place) = self.order.front() else { return };
        let queue = &mut self.queues[usize::from(place)];
        let Some(frame) = queue.frames.pop_front() else { return };
        self.packets -= 1;
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
            self.close_front();
        } else if queue.served >= QUANTUM {
            self.rotate();
        }
        if !self.is_long() && !self.is_nearly_full(room) {
            self.hold = None;
        }
    }

    /// Moves on to the next queue.
    pub(crate) fn rotate(&mut self) {
        if let Some(place) = self.order.pop_front() {
            self.queues[usize::from(place)].served = 0;
            self.order.push_back(place);
        }
    }

    fn close_front(&mut self) {
        let Some(place) = self.order.pop_front() else { return };
        let queue = &mut self.queues[usize::from(place)];
        (queue.bytes, queue.large, queue.served) = (0, 0, 0);
        if queue.frames.capacity() > KEPT_PLACES {
            queue.frames = VecDeque::new();
        }
        if let Some(key) = key(&queue.departure) {
            self.places.remove(&key);
        }
        self.unused.push(place);
    }

    /// The guest has sent a packet that does not wait; `to`: its destination vNIC.
    pub(crate) fn passed(&mut self, now: Time, to: Mac) {
        let waits_for = self.front().and_then(|(_, departure)| departure.reliably).map(|to| to.remote);
        if self.order.len() > 1 || waits_for.is_some_and(|remote| remote != to) {
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
        let hold = self.hold.filter(|_| self.order.len() == 1)?;
        let stands_still = hold.moved.after(PACE_NS);
        let until = if self.is_nearly_full(room) { stands_still } else { hold.fetched.after(HOLD_NS) };
        Some(until).filter(|until| self.is_alone(now) && now < *until)
    }

    /// Whether the guest talks to a single destination, and its queue moves.
    fn is_alone(&self, now: Time) -> bool {
        self.order.len() == 1
            && self.company.is_none_or(|at| now.since(at) > COMPANY_NS)
            && self.hold.is_none_or(|hold| now < hold.moved.after(PACE_NS))
    }

    /// Removes the packets that wait for the `chosen` destinations, oldest of each first.
    pub(crate) fn take(&mut self, chosen: impl Fn(&Departure) -> bool, mut each: impl FnMut(TxFrame)) {
        for _ in 0..self.order.len() {
            let Some(&place) = self.order.front() else { break };
            let queue = &mut self.queues[usize::from(place)];
            if !chosen(&queue.departure) {
                self.rotate();
                continue;
            }
            self.packets -= queue.frames.len();
            queue.frames.drain(..).for_each(&mut each);
            self.close_front();
        }
        if !self.is_long() {
            self.hold = None;
        }
    }

    /// All waiting packets, destination by destination, oldest of each first.
    pub(crate) fn frames(&self) -> impl Iterator<Item = &TxFrame> {
        self.order.iter().filter_map(|place| self.queues.get(usize::from(*place))).flat_map(|queue| &queue.frames)
    }

    /// Whether there is a single queue, and it is long enough to stop the guest.
    fn is_long(&self) -> bool {
        let Some(&place) = self.order.front().filter(|_| self.order.len() == 1) else { return false };
        let queue = &self.queues[usize::from(place)];
        queue.bytes >= HOLD_BYTES
    }

    /// Whether there is a single queue, and it may have no room for the packets of a fetch.
    fn is_nearly_full(&self, room: Room) -> bool {
        let Some(&place) = self.order.front().filter(|_| self.order.len() == 1) else { return false };
        let queue = &self.queues[usize::from(place)];
        queue.frames.len() + FETCH > room.packets as usize || queue.large + FETCH as u32 > room.large
    }
}

/// A packet that is not carried reliably never waits.
fn key(departure: &Departure) -> Option<Key> {
    departure.reliably.map(|to| (to.vni, departure.peer, to.local, to.remote))
}

#[cfg(test)]
#[path = "waiting_tests.rs"]
mod tests;
