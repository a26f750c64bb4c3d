//! A guest's packets that wait for a window, in one queue for each destination.
//!
//! A closed window holds up the packets to its own destination and nothing else of the guest. The price is that the guest is no longer
//! stopped: what it goes on sending to that destination is fetched, queued, and dropped once the queue is full. A queue is full when it
//! holds as many of the guest's buffers as are free (dynamic thresholds, Choudhury and Hahne, 1998): one destination may hold half of
//! them, two a third each, and some are always left for a destination that waits for nothing.
//!
//! A guest that talks with one destination alone loses by that, so it is stopped first, but never for longer than [`HOLD_NS`] at a time:
//! most windows open again sooner, and meanwhile its packets wait where they are, in its ring or its kernel.

use std::collections::VecDeque;

use bifrost_port::TxFrame;
use bifrost_rte::Time;
use bifrost_wire::Mac;
use foldhash::fast::RandomState;
use hashbrown::HashMap;

use crate::ports::Departure;

/// Destinations for which packets of one guest may wait at once.
const MOST_DESTINATIONS: usize = 256;
/// Bytes that one queue sends before it is the next one's turn, and one packet more at most.
const QUANTUM: u32 = 64 << 10;
/// A queue of this many packets stops a guest that sends to nobody else.
const HOLD_PACKETS: usize = 128;
/// Or of this many bytes.
const HOLD_BYTES: u64 = 1 << 20;
/// The longest such stop. It bounds how long a first packet to somebody else waits for a window that is not its own.
const HOLD_NS: u64 = 5_000_000;
/// How long a guest that has sent to somebody else is not stopped.
const COMPANY_NS: u64 = 1_000_000_000;

/// Places that an empty queue keeps.
const KEPT_PLACES: usize = 2 * HOLD_PACKETS;

/// Free buffers of a guest: what a queue may grow to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Packets longer than this need a large buffer.
    pub(crate) small_bytes: u32,
    /// Buffers of any kind.
    pub(crate) packets: u32,
    /// Large ones.
    pub(crate) large: u32,
}

/// There is no room for a packet in its queue, or none for its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// A connection, as the switch names it.
type Key = (u32, u16, Mac, Mac);

#[derive(Debug)]
struct Queue {
    departure: Departure,
    frames: VecDeque<TxFrame>,
    bytes: u64,
    large: u32,
    /// Bytes sent in this turn of the queue.
    served: u32,
}

/// The queues of one guest.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// Those in use are in `order` and `places`; the others are empty.
    queues: Vec<Queue>,
    /// Queues with packets, the next to be served first.
    order: VecDeque<u16>,
    unused: Vec<u16>,
    places: HashMap<Key, u16, RandomState>,
    packets: usize,
    /// When the only queue became long enough to stop the guest.
    held_since: Option<Time>,
    /// When the guest last sent to somebody who does not wait, or who waits beside others.
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

    /// Whether packets to the same destination wait: one more has to wait behind them.
    pub(crate) fn has(&self, departure: &Departure) -> bool {
        !self.is_empty() && key(departure).is_some_and(|key| self.places.contains_key(&key))
    }

    /// Puts a packet behind those to the same destination.
    ///
    /// # Errors
    /// There is no room for it; it is to be dropped.
    pub(crate) fn push(&mut self, now: Time, frame: TxFrame, departure: Departure, room: Room) -> Result<(), Full> {
        let key = key(&departure).ok_or(Full)?;
        let place = match self.places.get(&key) {
            Some(&place) => place,
            None => self.open(key, departure)?,
        };
        if self.order.len() > 1 {
            self.company = Some(now);
        }
        let queue = &mut self.queues[usize::from(place)];
        let large = frame.len > room.small_bytes;
        if !queue.frames.is_empty()
            && (queue.frames.len() >= room.packets as usize || large && queue.large >= room.large)
        {
            return Err(Full);
        }
        queue.frames.push_back(frame);
        queue.bytes += u64::from(frame.len);
        queue.large += u32::from(large);
        self.packets += 1;
        if self.held_since.is_none() && self.is_long() {
            self.held_since = Some(now);
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

    /// The packet whose turn it was does not wait any more.
    pub(crate) fn pop(&mut self, small_bytes: u32) {
        let Some(&place) = self.order.front() else { return };
        let queue = &mut self.queues[usize::from(place)];
        let Some(frame) = queue.frames.pop_front() else { return };
        self.packets -= 1;
        queue.bytes -= u64::from(frame.len);
        queue.large -= u32::from(frame.len > small_bytes);
        queue.served += frame.len;
        if queue.frames.is_empty() {
            self.close_front();
        } else if queue.served >= QUANTUM {
            self.rotate();
        }
        if !self.is_long() {
            self.held_since = None;
        }
    }

    /// It is the next queue's turn.
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

    /// The guest has sent something that does not wait.
    pub(crate) fn passed(&mut self, now: Time) {
        self.company = Some(now);
    }

    /// Until when the guest is stopped, if it is; that may be over.
    pub(crate) fn held_until(&self, now: Time) -> Option<Time> {
        let since = self.held_since.filter(|_| self.order.len() == 1)?;
        let alone = self.company.is_none_or(|at| now.since(at) > COMPANY_NS);
        Some(since.after(HOLD_NS)).filter(|until| alone && now < *until)
    }

    /// Takes out what the `chosen` destinations wait for, oldest of each first.
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
            self.held_since = None;
        }
    }

    /// Whether there is one queue, and enough in it to stop its guest.
    fn is_long(&self) -> bool {
        let Some(&place) = self.order.front().filter(|_| self.order.len() == 1) else { return false };
        let queue = &self.queues[usize::from(place)];
        queue.frames.len() >= HOLD_PACKETS || queue.bytes >= HOLD_BYTES
    }
}

/// What is not carried reliably waits for nothing.
fn key(departure: &Departure) -> Option<Key> {
    departure.reliably.map(|to| (to.vni, departure.peer, to.local, to.remote))
}

#[cfg(test)]
#[path = "waiting_tests.rs"]
mod tests;
