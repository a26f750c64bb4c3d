//! The session table of a switch.

use std::hash::BuildHasher as _;

use super::carry::Carried;
use super::entry::{Session, due, idle, period};
use super::index::Index;
use super::key::Key;
use super::list::{Links, List, NONE};
use super::queue::{Place, Queues};
use super::rank::Ranking;
use super::state::{Class, Event, State};
use super::wheel::Wheel;
use super::{PortSessions, SessionCounters};
use crate::changes::Changes;
use crate::ids::{Direction, PortId};
use crate::limits::SessionLimits;
use crate::memory::Extent;
use bifrost_tables::prefetch;
use foldhash::fast::FixedState;

/// Maximum number of sessions that one call checks for expiry.
const EXPIRIES: usize = 256;

/// Changes to sessions that are decided but not yet carried out. Lookups take them into account.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    /// Indexes of the sessions that will end.
    ended: Vec<u32>,
}

impl Planned {
    /// No changes.
    pub(crate) const NOTHING: Planned = Planned { ended: Vec::new() };

    /// Plans the end of a session.
    pub(crate) fn end(&mut self, index: u32) {
        self.ended.push(index);
    }
}

/// Identifies one session. A later session at the same index has another handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) index: u32,
    /// Serial number of the session, from 1.
    pub(crate) number: u64,
}

/// A limit of 0 allows no sessions at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// Data that a table stores with each session.
pub(crate) trait Payload: Copy + std::fmt::Debug {
    /// A second key of the session.
    fn second_key(&self) -> Option<Key>;
    /// The NAT mapping that the session holds.
    #[inline(always)]
    fn mapping(&self) -> Option<u32> {
        None
    }
}

impl Payload for () {
    #[inline(always)]
    fn second_key(&self) -> Option<Key> {
        None
    }
}

/// The session table. `T`: data stored with each session.
#[derive(Debug)]
pub(crate) struct Sessions<T = ()> {
    limits: SessionLimits,
    counters: SessionCounters,
    /// Serial number of the latest session.
    begun: u64,
    hasher: FixedState,
    index: Index,
    /// Index by second key.
    second: Index,
    slab: Vec<Session<T>>,
    free: List,
    ranking: Ranking,
    /// Indexed by port number.
    ports: Vec<Account>,
    wheel: Wheel,
    /// Seconds of 2^30 ns.
    now_s: u32,
    generation: u64,
    /// Mappings of ended sessions, one entry per session.
    released: Vec<u32>,
    /// Places that changed since they were copied for another process; `None`: nothing is being copied.
    changes: Option<Box<Changes>>,
}

/// The sessions and counters of a port.
#[derive(Debug, Default)]
struct Account {
    /// `None` until the port has had a session.
    queues: Option<Box<Queues>>,
    /// Evicted sessions of the port, by class.
    evicted: [u64; Class::ALL.len()],
}

impl Sessions {
    /// Inserts a session that begins with this packet. `takes_place`: the session replaces one with the same key that
    /// has just ended, so it evicts none.
    ///
    /// # Errors
    /// [`Full`]: the table is unchanged.
    pub(crate) fn insert(
        &mut self,
        key: Key,
        origin: Direction,
        event: Event,
        epoch: u32,
        takes_place: bool,
    ) -> Result<(), Full> {
        self.insert_with(key, origin, event, epoch, takes_place, ())
    }
}

impl<T: Payload> Sessions<T> {
    /// Creates an empty table. `seed`: secret seed of the hash, because tenants choose the keys.
    pub(crate) fn new(limits: SessionLimits, seed: u64) -> Self {
        Sessions {
            limits,
            counters: SessionCounters::default(),
            begun: 0,
            hasher: FixedState::with_seed(seed),
            index: Index::default(),
            second: Index::default(),
            slab: Vec::new(),
            free: List::EMPTY,
            ranking: Ranking::default(),
            ports: Vec::new(),
            wheel: Wheel::new(),
            now_s: 0,
            generation: 1,
            released: Vec::new(),
            changes: None,
        }
    }

    /// Changes whenever time advances, or a session begins, ends or changes its state. Never 0.
    #[inline(always)]
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Changes the [`generation`](Self::generation), because of an event outside this table that invalidates notes.
    pub(crate) fn outdate_notes(&mut self) {
        self.generation += 1;
    }

    pub(crate) fn counters(&self) -> &SessionCounters {
        &self.counters
    }

    /// Resets the counters, so that only the current sessions count as created.
    pub(crate) fn restart_counters(&mut self) {
        let SessionCounters { current, established, .. } = self.counters;
        self.counters = SessionCounters { current, established, created: current, ..SessionCounters::default() };
    }

    /// Sets the limits of a new configuration.
    pub(crate) fn set_limits(&mut self, limits: SessionLimits) {
        self.limits = limits;
        self.generation += 1;
    }

    /// Advances the time to `now_ns`, and expires idle sessions, at most [`EXPIRIES`] per call.
    #[inline(always)]
    pub(crate) fn advance(&mut self, now_ns: u64) {
        let now_s = (now_ns >> 30) as u32;
        self.now_s = self.now_s.max(now_s);
        self.generation += 1;
        if self.counters.current > 0 {
            self.expire();
        }
    }

    #[inline(never)]
    fn expire(&mut self) {
        for _ in 0..EXPIRIES {
            let Some(index) = self.wheel.pop(self.now_s, &mut self.slab, due) else { return };
            let session = &self.slab[index as usize];
            let at_s = session.seen_s.saturating_add(session.state.timeout_s());
            if at_s > self.now_s {
                self.schedule(index, at_s);
            } else {
                self.counters.expired += 1;
                self.forget(index);
            }
        }
    }

    /// Current time in seconds of 2^30 ns.
    pub(crate) fn now_s(&self) -> u32 {
        self.now_s
    }

    /// Looks up a session by its key, as if the changes of `after` had been carried out.
    #[inline(always)]
    pub(crate) fn find_after(&self, key: &Key, after: &Planned) -> Option<u32> {
        self.find(key).filter(|index| !after.ended.contains(index))
    }

    /// Looks up a session by its key.
    pub(crate) fn find(&self, key: &Key) -> Option<u32> {
        self.index.find(self.hasher.hash_one(key), |i| self.slab[i as usize].key == *key)
    }

    /// Looks up a session by its second key, as if the changes of `after` had been carried out.
    #[inline(always)]
    pub(crate) fn find_second_after(&self, key: &Key, after: &Planned) -> Option<u32> {
        let is_it = |i: u32| self.slab[i as usize].payload.second_key().is_some_and(|second| second == *key);
        let found = self.second.find(self.hasher.hash_one(key), is_it);
        found.filter(|index| !after.ended.contains(index))
    }

    /// Mappings of sessions that have ended, one entry per session. The caller removes the entries that it has
    /// processed.
    pub(crate) fn released(&mut self) -> &mut Vec<u32> {
        &mut self.released
    }

    /// The data stored with a session.
    pub(crate) fn payload(&self, index: u32) -> &T {
        &self.slab[index as usize].payload
    }

    /// A handle that identifies the session at `index`.
    pub(crate) fn handle(&self, index: u32) -> Handle {
        Handle { index, number: self.slab[index as usize].number }
    }

    /// Whether a session still exists.
    #[inline(always)]
    pub(crate) fn is_there(&self, Handle { index, number }: Handle) -> bool {
        self.slab.get(index as usize).is_some_and(|session| session.number == number)
    }

    /// Prefetches what a packet needs of the session at `index`, if there is one.
    #[inline(always)]
    pub(crate) fn fetch(&self, index: u32) {
        if let Some(session) = self.slab.get(index as usize) {
            prefetch(&session.number);
            prefetch(&session.state);
        }
    }

    /// Direction of the session's first packet.
    pub(crate) fn origin(&self, index: u32) -> Direction {
        self.slab[index as usize].origin
    }

    /// State of a session, and seconds since its last packet.
    pub(crate) fn standing(&self, index: u32) -> (State, u32) {
        let session = &self.slab[index as usize];
        (session.state, self.now_s.saturating_sub(session.seen_s))
    }

    /// The configuration whose rules allow a session.
    pub(crate) fn epoch(&self, index: u32) -> u32 {
        self.slab[index as usize].epoch
    }

    /// Whether the rules of `epoch` are known to allow a session.
    pub(crate) fn is_of(&self, index: u32, epoch: u32) -> bool {
        self.epoch(index) == epoch
    }

    /// Whether a packet begins a new conversation with the key of a closed one.
    pub(crate) fn begins_anew(&self, index: u32, event: Event) -> bool {
        self.slab[index as usize].state.begins_anew(event)
    }

    /// Updates session `index` with a packet that the rules of `epoch` allow.
    #[inline(always)]
    pub(crate) fn touch(&mut self, index: u32, direction: Direction, event: Event, epoch: u32) {
        if !self.slab[index as usize].is_settled(self.now_s, direction, event, epoch) {
            self.step(index, direction, event, epoch);
        }
    }

    /// Whether a session still exists, and a packet would change nothing about it.
    #[inline(always)]
    pub(crate) fn is_settled(&self, handle: Handle, direction: Direction, event: Event, epoch: u32) -> bool {
        self.slab.get(handle.index as usize).is_some_and(|session| {
            session.number == handle.number && session.is_settled(self.now_s, direction, event, epoch)
        })
    }

    #[inline(never)]
    fn step(&mut self, index: u32, direction: Direction, event: Event, epoch: u32) {
        let now_s = self.now_s;
        self.mark_changed(index);
        let session = &mut self.slab[index as usize];
        session.epoch = epoch;
        session.seen_s = now_s;
        let answered_s = (now_s as u16).wrapping_sub(session.answered_s);
        let (before, after) = (session.state, session.state.after(event, direction == session.origin, answered_s));
        // Packets from the guest do not count: a guest goes on sending for minutes after the remote end has vanished.
        let is_heard = direction == Direction::Ingress && session.heard != period(now_s);
        if before != after {
            self.change(index, before, after);
        }
        if is_heard {
            self.renew(index);
        }
    }

    /// [`insert`](Self::insert) with the data to store with the session.
    pub(crate) fn insert_with(
        &mut self,
        key: Key,
        origin: Direction,
        event: Event,
        epoch: u32,
        takes_place: bool,
        payload: T,
    ) -> Result<(), Full> {
        let (seen_s, heard) = (self.now_s, period(self.now_s));
        let state = State::first(event);
        let begun = Carried { key, origin, state, seen_s, answered_s: 0, heard, payload };
        self.add(&begun, epoch, takes_place).map(drop)
    }

    /// Adds a session of another switch, and returns its place. Its keys must not exist in this table. `None`: a limit
    /// of 0 allows no sessions.
    pub(super) fn insert_carried(&mut self, session: &Carried<T>, epoch: u32) -> Option<u32> {
        // A time in the future would keep the session forever.
        let session = Carried { seen_s: session.seen_s.min(self.now_s), ..*session };
        self.add(&session, epoch, false).ok()
    }

    /// All sessions, in no particular order.
    pub(super) fn all(&self) -> impl Iterator<Item = Carried<T>> {
        self.slab.iter().filter_map(Session::carried)
    }

    /// Number of places in the table. A session does not change its place.
    pub(crate) fn places(&self) -> u32 {
        self.slab.len() as u32
    }

    /// The session at a place, if there is one.
    pub(crate) fn at(&self, place: u32) -> Option<Carried<T>> {
        self.slab.get(place as usize)?.carried()
    }

    /// The places that changed since they were copied; `None`: nothing is being copied.
    pub(super) fn changes(&mut self) -> &mut Option<Box<Changes>> {
        &mut self.changes
    }

    #[inline(always)]
    fn mark_changed(&mut self, index: u32) {
        if let Some(changes) = &mut self.changes {
            changes.mark(index);
        }
    }

    #[inline(always)]
    fn add(&mut self, begun: &Carried<T>, epoch: u32, takes_place: bool) -> Result<u32, Full> {
        let Carried { key, origin, state, seen_s, answered_s, heard, payload } = *begun;
        let source = self.source(&key);
        let evicted = if takes_place { None } else { self.evicted_for(key.port(), origin, source)? };
        if let Some(index) = evicted {
            self.evict(index);
        }
        if self.counters.current == 0 {
            self.wheel.start_at(self.now_s);
        }
        self.begun += 1;
        let session = Session {
            key,
            payload,
            number: self.begun,
            due: Links::UNLINKED,
            idle: Links::UNLINKED,
            epoch,
            seen_s,
            slot: 0,
            answered_s,
            state,
            origin,
            source,
            heard,
        };
        let index = match self.free.head {
            NONE => {
                if self.slab.len() == self.slab.capacity() {
                    self.make_room();
                }
                self.slab.push(session);
                (self.slab.len() - 1) as u32
            }
            index => {
                self.free.remove(&mut self.slab, index, due);
                self.slab[index as usize] = session;
                index
            }
        };
        self.generation += 1;
        self.mark_changed(index);
        self.index.insert(self.hasher.hash_one(key), index);
        if let Some(key) = payload.second_key() {
            self.second.insert(self.hasher.hash_one(key), index);
        }
        self.counters.current += 1;
        self.counters.created += 1;
        self.counters.established += u64::from(state.is_established());
        self.schedule(index, seen_s + state.timeout_s());
        self.ranking.add(key.port());
        let account = self.account(key.port());
        let mut queues = account.queues.take().unwrap_or_else(Queues::new);
        queues.push(&mut self.slab, index, session.place(), idle);
        self.account(key.port()).queues = Some(queues);
        Ok(index)
    }

    /// Ends a session that the rules no longer allow.
    pub(crate) fn revoke(&mut self, index: u32) {
        self.counters.revoked += 1;
        self.remove(index);
    }

    /// Ends a session without counting a reason.
    pub(crate) fn remove(&mut self, index: u32) {
        let session = self.slab[index as usize];
        self.wheel.list(session.slot).remove(&mut self.slab, index, due);
        self.forget(index);
    }

    /// Ends all sessions of a port whose number now means another vNIC, and clears its counters.
    pub(crate) fn forget_port(&mut self, port: PortId) {
        while let Some(index) = self.queues(port).and_then(|queues| queues.victim(None)) {
            self.remove(index);
        }
        if let Some(account) = self.ports.get_mut(port.place()) {
            *account = Account::default();
        }
    }

    /// Counters of a port's sessions.
    pub(crate) fn of_port(&self, port: PortId) -> PortSessions {
        let evicted = self.ports.get(port.place()).map_or_else(Default::default, |account| account.evicted);
        PortSessions { current: self.ranking.count(port), evicted }
    }

    /// Clears the eviction counters of a port.
    pub(crate) fn forget_counters(&mut self, port: PortId) {
        if let Some(account) = self.ports.get_mut(port.place()) {
            account.evicted = Default::default();
        }
    }

    /// Plans the eviction that an [`insert`](Self::insert) would cause. Only the first insertion of a packet can be
    /// planned, because a second one would not take the first into account.
    ///
    /// # Errors
    /// [`Full`]: the insertion would fail.
    pub(crate) fn plan_insert(&self, key: &Key, origin: Direction, plan: &mut Planned) -> Result<(), Full> {
        plan.ended.extend(self.evicted_for(key.port(), origin, self.source(key))?);
        Ok(())
    }

    /// The session that a new one would evict; `None`: there is room.
    fn evicted_for(&self, port: PortId, origin: Direction, source: u8) -> Result<Option<u32>, Full> {
        let SessionLimits { total, per_port } = self.limits;
        if total.min(per_port) == 0 {
            return Err(Full);
        }
        let own = self.ranking.count(port);
        let giver = if own >= per_port {
            port
        } else if self.counters.current >= u64::from(total) {
            // The port with the most sessions gives one up, so a port that has no more than its share keeps all.
            self.ranking.largest().filter(|largest| self.ranking.count(*largest) > own).unwrap_or(port)
        } else {
            return Ok(None);
        };
        let newcomer = (giver == port).then_some((origin, source));
        Ok(self.queues(giver).and_then(|queues| queues.victim(newcomer)))
    }

    /// The number of the list of a session's source.
    pub(super) fn source(&self, key: &Key) -> u8 {
        Queues::source(self.hasher.hash_one(key.source()))
    }

    fn queues(&self, port: PortId) -> Option<&Queues> {
        self.ports.get(port.place())?.queues.as_deref()
    }

    fn account(&mut self, port: PortId) -> &mut Account {
        let at = port.place();
        if self.ports.len() <= at {
            self.ports.resize_with(at + 1, Account::default);
        }
        &mut self.ports[at]
    }

    #[cold]
    fn evict(&mut self, index: u32) {
        let session = &self.slab[index as usize];
        let (port, class) = (session.key.port(), session.state.class());
        self.counters.evicted += 1;
        self.account(port).evicted[class as usize] += 1;
        self.remove(index);
    }

    /// Applies `change` to the queues of a session's port.
    fn requeue(&mut self, index: u32, change: impl FnOnce(&mut Queues, &mut [Session<T>], &Session<T>)) {
        let session = self.slab[index as usize];
        if let Some(queues) = &mut self.ports[session.key.port().place()].queues {
            change(queues, &mut self.slab, &session);
        }
    }

    /// Notes a packet from the remote end: the session moves to the end of its list.
    #[inline(never)]
    fn renew(&mut self, index: u32) {
        self.slab[index as usize].heard = period(self.now_s);
        self.requeue(index, |queues, slab, session| queues.renew(slab, index, session.place(), idle));
    }

    #[inline(never)]
    fn change(&mut self, index: u32, before: State, after: State) {
        self.generation += 1;
        self.requeue(index, |queues, slab, session| {
            let from = session.place();
            let to = Place { class: after.class(), ..from };
            if to != from {
                queues.remove(slab, index, from, idle);
                queues.push(slab, index, to, idle);
            }
        });
        let session = &mut self.slab[index as usize];
        session.state = after;
        if after == State::Exchange {
            session.answered_s = self.now_s as u16;
        }
        let slot = session.slot;
        self.counters.established += u64::from(after.is_established());
        self.counters.established -= u64::from(before.is_established());
        // A session that is due too early is checked and rescheduled; one that is due too late would outlive its
        // timeout.
        if after.timeout_s() < before.timeout_s() {
            self.wheel.list(slot).remove(&mut self.slab, index, due);
            self.schedule(index, self.now_s + after.timeout_s());
        }
    }

    /// Allocates room now that the first session would allocate otherwise.
    pub(crate) fn make_first_room(&mut self) {
        if self.slab.capacity() == 0 {
            self.make_room();
        }
    }

    /// Memory of the sessions and of their indexes.
    pub(crate) fn memory(&self) -> [Extent; 5] {
        let ([heads, next], [second_heads, second_next]) = (self.index.memory(), self.second.memory());
        [Extent::filled(&self.slab), heads, next, second_heads, second_next]
    }

    /// Allocates room for the maximum number of sessions at once: each growth would rehash all sessions while all
    /// guests wait. Unused pages take no memory.
    #[cold]
    fn make_room(&mut self) {
        let Sessions { index, second, slab, hasher, limits, .. } = self;
        let total = (limits.total as usize).max(slab.len() + 1);
        slab.reserve_exact(total - slab.len());
        let present = (0..).zip(&*slab).filter(|(_, session)| session.number != 0);
        index.make_room(total, present.clone().map(|(at, session)| (hasher.hash_one(session.key), at)));
        if size_of::<T>() > 0 {
            let named = present.filter_map(|(at, session)| Some((hasher.hash_one(session.payload.second_key()?), at)));
            second.make_room(total, named);
        }
    }

    fn schedule(&mut self, index: u32, at_s: u32) {
        let slot = self.wheel.slot(at_s);
        self.slab[index as usize].slot = slot;
        self.wheel.list(slot).push_back(&mut self.slab, index, due);
    }

    /// Ends a session that is not on the wheel.
    fn forget(&mut self, index: u32) {
        let Session { key, state, payload, .. } = self.slab[index as usize];
        self.generation += 1;
        self.mark_changed(index);
        self.slab[index as usize].number = 0;
        self.released.extend(payload.mapping());
        self.index.remove(self.hasher.hash_one(key), index);
        if let Some(key) = payload.second_key() {
            self.second.remove(self.hasher.hash_one(key), index);
        }
        self.counters.current -= 1;
        self.counters.established -= u64::from(state.is_established());
        self.ranking.take(key.port());
        self.requeue(index, |queues, slab, session| queues.remove(slab, index, session.place(), idle));
        self.free.push_back(&mut self.slab, index, due);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests;
