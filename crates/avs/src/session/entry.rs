//! An entry of the session table.

use super::carry::Carried;
use super::key::Key;
use super::list::Links;
use super::queue::Place;
use super::state::{Event, State};
use crate::ids::Direction;

/// The field order puts what every packet reads into one cache line in most cases.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub(super) struct Session<T> {
    /// Serial number as in its [`Handle`](super::Handle); 0 once the session has ended.
    pub(super) number: u64,
    pub(super) seen_s: u32,
    /// Configuration whose rules allow the session.
    pub(super) epoch: u32,
    pub(super) state: State,
    /// [`period`] of the last packet from the remote end; initially that of the first packet.
    pub(super) heard: u8,
    pub(super) origin: Direction,
    /// Its source's list in the queues.
    pub(super) source: u8,
    pub(super) slot: u16,
    /// Second in which an [`Exchange`](State::Exchange) was answered; lower 16 bits.
    pub(super) answered_s: u16,
    /// Links on the wheel, or on the free list.
    pub(super) due: Links,
    /// Links in its port's queues.
    pub(super) idle: Links,
    pub(super) key: Key,
    pub(super) payload: T,
}

impl<T> Session<T> {
    /// Whether a packet changes nothing, as is the case for most packets within a second.
    #[inline(always)]
    pub(super) fn is_settled(&self, now_s: u32, direction: Direction, event: Event, epoch: u32) -> bool {
        let is_heard = direction == Direction::Egress || self.heard == period(now_s);
        self.seen_s == now_s && self.epoch == epoch && is_heard && self.state.stays_at(event)
    }

    pub(super) fn place(&self) -> Place {
        Place { origin: self.origin, class: self.state.class(), source: self.source }
    }

    /// The session in the form in which another switch takes it over; `None`: it has ended.
    pub(super) fn carried(&self) -> Option<Carried<T>>
    where
        T: Copy,
    {
        let Session { key, origin, state, seen_s, answered_s, heard, payload, .. } = *self;
        (self.number != 0).then_some(Carried { key, origin, state, seen_s, answered_s, heard, payload })
    }
}

/// Number of the 16-second period that contains second `now_s`; lower 8 bits. A session moves to the end of its list at
/// most once per period, not with each packet. The number wraps after 68 minutes: a session that was last heard exactly
/// that long ago does not move for one period.
#[inline(always)]
pub(super) fn period(now_s: u32) -> u8 {
    (now_s >> 4) as u8
}

pub(super) fn due<T>(session: &mut Session<T>) -> &mut Links {
    &mut session.due
}

pub(super) fn idle<T>(session: &mut Session<T>) -> &mut Links {
    &mut session.idle
}
