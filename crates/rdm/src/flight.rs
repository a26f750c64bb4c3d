//! Work requests that are posted and not yet settled.

use std::collections::VecDeque;

/// What was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A chunk, with its name in ACKs.
    Write(u32),
    /// A unit.
    Send,
    /// A request for a grant.
    Announce,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Open,
    Acknowledged,
    Lost,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Flight {
    pub(crate) message: u32,
    pub(crate) offset: u32,
    pub(crate) len: u32,
    pub(crate) kind: Kind,
    pub(crate) lane: u8,
    /// The NIC retransmits on this lane.
    pub(crate) reliable: bool,
    pub(crate) state: State,
    /// The NIC has not reported it as sent, so it may still read the buffer.
    pub(crate) in_nic: bool,
    /// When it was posted, ns.
    pub(crate) posted_ns: u64,
    /// When it left the NIC (T1), ns of the NIC's clock; 0: unknown.
    pub(crate) left_ns: u64,
}

impl Flight {
    /// Bytes of the window that it uses; headers count, too.
    pub(crate) fn cost(&self) -> u32 {
        self.len.max(Self::MIN_COST)
    }

    const MIN_COST: u32 = 64;

    /// Bytes of the NIC's queue that it uses.
    fn queued(&self) -> u32 {
        if self.reliable { 0 } else { self.cost() }
    }

    /// When it left the NIC, ns of the software's clock, which shows `now_ns` when the NIC's shows `nic_now_ns`.
    /// `None`: it may not have left.
    pub(crate) fn left_at(&self, now_ns: u64, nic_now_ns: u64) -> Option<u64> {
        let ago_ns = if self.left_ns > 0 { nic_now_ns.saturating_sub(self.left_ns) } else { u64::MAX };
        (!self.in_nic).then(|| now_ns.saturating_sub(ago_ns).max(self.posted_ns))
    }
}

/// All work requests of a connection, by global number.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    list: VecDeque<Flight>,
    /// Global number of the first.
    first: u64,
    open: u32,
    bytes: u32,
    /// Bytes on unreliable lanes that the NIC has not reported as sent.
    backlog: u32,
    /// Requests on reliable lanes that the NIC has not delivered.
    delivering: u32,
}

impl Flights {
    pub(crate) fn push(&mut self, flight: Flight) {
        self.open += 1;
        self.bytes += flight.cost();
        self.backlog += flight.queued();
        self.delivering += u32::from(flight.reliable);
        self.list.push_back(flight);
    }

    /// Global number of the next request.
    pub(crate) fn next_number(&self) -> u64 {
        self.first + self.list.len() as u64
    }

    pub(crate) fn first_number(&self) -> u64 {
        self.first
    }

    /// Requests that are neither acknowledged nor lost.
    pub(crate) fn open(&self) -> u32 {
        self.open
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Bytes in flight.
    pub(crate) fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Bytes that wait in the NIC. Reliable lanes are excluded: their completions report what the peer acknowledged,
    /// and show nothing about the NIC's queue.
    pub(crate) fn backlog(&self) -> u32 {
        self.backlog
    }

    /// The NIC no longer needs the buffer. Returns whether this is new.
    pub(crate) fn left_nic(&mut self, number: u64) -> bool {
        let Some(flight) = self.get_mut(number) else { return false };
        if !std::mem::replace(&mut flight.in_nic, false) {
            return false;
        }
        let (queued, reliable) = self.get(number).map_or((0, false), |flight| (flight.queued(), flight.reliable));
        self.backlog -= queued;
        self.delivering -= u32::from(reliable);
        true
    }

    pub(crate) fn get(&self, number: u64) -> Option<&Flight> {
        self.list.get(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut Flight> {
        self.list.get_mut(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }

    /// The unacknowledged chunk with this name. Acknowledgements arrive roughly in order, so the search begins with the
    /// oldest.
    pub(crate) fn find_write(&self, name: u32) -> Option<u64> {
        let is = |flight: &Flight| flight.kind == Kind::Write(name) && flight.state != State::Acknowledged;
        Some(self.first + self.list.iter().position(is)? as u64)
    }

    /// The oldest open request.
    pub(crate) fn oldest_open(&self) -> Option<u64> {
        Some(self.first + self.list.iter().position(|flight| flight.state == State::Open)? as u64)
    }

    /// The oldest open request on unreliable lanes.
    pub(crate) fn oldest_unreliable(&self) -> Option<&Flight> {
        self.list.iter().find(|flight| flight.state == State::Open && !flight.reliable)
    }

    /// The oldest request on reliable lanes that the NIC has not delivered.
    pub(crate) fn oldest_reliable(&self) -> Option<&Flight> {
        if self.delivering == 0 {
            return None;
        }
        self.list.iter().find(|flight| flight.in_nic && flight.reliable)
    }

    /// Whether the NIC may still hold a chunk that includes this unit.
    pub(crate) fn is_being_written(&self, message: u32, offset: u32) -> bool {
        let covers = |flight: &Flight| (flight.offset..flight.offset + flight.len).contains(&offset);
        let is = |flight: &&Flight| flight.in_nic && flight.message == message && matches!(flight.kind, Kind::Write(_));
        self.list.iter().filter(is).any(covers)
    }

    /// Open requests of a lane, oldest first.
    pub(crate) fn oldest_open_on(&self, lane: u8) -> impl Iterator<Item = &Flight> {
        self.list.iter().filter(move |flight| flight.state == State::Open && flight.lane == lane)
    }

    /// Open requests of a lane, newest first.
    pub(crate) fn open_on(&self, lane: u8) -> impl Iterator<Item = &Flight> {
        self.list.iter().rev().filter(move |flight| flight.state == State::Open && flight.lane == lane)
    }

    /// Settles a request. Returns it if it was not acknowledged before.
    pub(crate) fn settle(&mut self, number: u64, state: State) -> Option<Flight> {
        let flight = self.get_mut(number)?;
        let before = *flight;
        if before.state == State::Acknowledged || before.state == state {
            return None;
        }
        flight.state = state;
        if before.state == State::Open {
            self.open -= 1;
            self.bytes -= before.cost();
        }
        Some(before)
    }

    /// Removes settled requests from the front.
    pub(crate) fn trim(&mut self) {
        while self.list.front().is_some_and(|flight| flight.state != State::Open && !flight.in_nic) {
            self.list.pop_front();
            self.first += 1;
        }
    }

    /// Memory in use, bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.list.capacity() * size_of::<Flight>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flights(kinds: &[(Kind, u32, u32)]) -> Flights {
        let mut flights = Flights::default();
        for &(kind, offset, len) in kinds {
            let (message, lane, reliable, state) = (7, 3, true, State::Open);
            let (in_nic, posted_ns, left_ns) = (true, 0, 0);
            let flight = Flight { message, offset, len, kind, lane, reliable, state, in_nic, posted_ns, left_ns };
            flights.push(flight);
        }
        flights
    }

    #[test]
    fn a_unit_is_being_written_while_the_nic_has_a_chunk_with_it() {
        let mut flights = flights(&[(Kind::Write(1), 4096, 8192), (Kind::Send, 16384, 4096), (Kind::Announce, 0, 0)]);
        let written =
            |flights: &Flights| [0, 4095, 4096, 12287, 12288, 16384].map(|offset| flights.is_being_written(7, offset));
        assert_eq!(written(&flights), [false, false, true, true, false, false]);
        assert!(!flights.is_being_written(8, 4096));
        // The NIC may hold a request that is lost, or whose data arrived on another lane.
        flights.settle(0, State::Lost);
        assert_eq!(written(&flights), [false, false, true, true, false, false]);
        flights.settle(0, State::Acknowledged);
        assert!(flights.is_being_written(7, 4096));
        assert!(flights.left_nic(0));
        assert_eq!(written(&flights), [false; 6]);
    }
}
