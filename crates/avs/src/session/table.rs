//! The sessions of one switch.

use std::hash::BuildHasher as _;

use super::carry::Carried;
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
use bifrost_tables::prefetch;
use foldhash::fast::FixedState;

/// Sessions whose time may have come that are looked at in one go, at most.
const EXPIRIES: usize = 256;

/// What would be done to sessions before a question about them is answered.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    /// They end.
    ended: Vec<u32>,
}

impl Planned {
    /// Nothing.
    pub(crate) const NOTHING: Planned = Planned { ended: Vec::new() };

    /// A session ends.
    pub(crate) fn end(&mut self, index: u32) {
        self.ended.push(index);
    }
}

/// Names one session, and never another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) index: u32,
    /// Its position in the order in which sessions have begun, from 1.
    pub(crate) number: u64,
}

/// The bounds leave no room for any session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// What is kept with a session, beside what sessions are.
pub(crate) trait Payload: Copy + std::fmt::Debug {
    /// Another name under which the session is found.
    fn second_key(&self) -> Option<Key>;
    /// The mapping that the session holds.
    #[inline(always)]
    fn mapping(&self) -> Option<u32> {
        None
    }
}

/// Nothing.
impl Payload for () {
    #[inline(always)]
    fn second_key(&self) -> Option<Key> {
        None
    }
}

/// The sessions. `T`: what is kept with each.
#[derive(Debug)]
pub(crate) struct Sessions<T = ()> {
    limits: SessionLimits,
    counters: SessionCounters,
    /// Sessions that have begun: the number of the last one.
    begun: u64,
    hasher: FixedState,
    index: Index,
    /// By their second keys.
    second: Index,
    slab: Vec<Session<T>>,
    free: List,
    ranking: Ranking,
    /// By port number.
    ports: Vec<Account>,
    wheel: Wheel,
    /// Seconds of 2^30 ns.
    now_s: u32,
    generation: u64,
    /// Mappings of sessions that have ended.
    released: Vec<u32>,
    /// The places that changed since they were copied for another process; `None`: nothing is being copied.
    changes: Option<Box<Changes>>,
}

/// In this order: what is looked at of every packet lies in one line of a cache, mostly.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct Session<T> {
    /// As of its [`Handle`]; 0 once it has ended.
    number: u64,
    seen_s: u32,
    /// The rules that allow it.
    epoch: u32,
    state: State,
    /// When its remote end was heard of last, as of [`period`].
    heard: u8,
    origin: Direction,
    /// Its list in the queues.
    source: u8,
    slot: u16,
    /// The second in which an exchange was answered; the lower bits.
    answered_s: u16,
    /// On the wheel, or on the free list.
    due: Links,
    /// In its port's queues.
    idle: Links,
    key: Key,
    payload: T,
}

impl<T> Session<T> {
    /// Whether a packet changes nothing: as most do within a second.
    #[inline(always)]
    fn is_settled(&self, now_s: u32, direction: Direction, event: Event, epoch: u32) -> bool {
        let is_heard = direction == Direction::Egress || self.heard == period(now_s);
        self.seen_s == now_s && self.epoch == epoch && is_heard && self.state.stays_at(event)
    }

    fn place(&self) -> Place {
        Place { origin: self.origin, class: self.state.class(), source: self.source }
    }

    /// What another switch needs of it; `None`: it has ended.
    fn carried(&self) -> Option<Carried<T>>
    where
        T: Copy,
    {
        let Session { key, origin, state, seen_s, answered_s, heard, payload, .. } = *self;
        (self.number != 0).then_some(Carried { key, origin, state, seen_s, answered_s, heard, payload })
    }
}

/// What is remembered about a port.
#[derive(Debug, Default)]
struct Account {
    /// Made for its first session.
    queues: Option<Box<Queues>>,
    /// Its sessions that made room for others.
    evicted: [u64; Class::ALL.len()],
}

/// The quarter of a minute that second `now_s` is in, the lower bits. A session moves to the end of its list once in that time, not
/// with each packet. If it comes round, 68 minutes later, a session stays where it is, and that for one period.
#[inline(always)]
fn period(now_s: u32) -> u8 {
    (now_s >> 4) as u8
}

fn due<T>(session: &mut Session<T>) -> &mut Links {
    &mut session.due
}

fn idle<T>(session: &mut Session<T>) -> &mut Links {
    &mut session.idle
}

impl Sessions {
    /// Begins a session with this packet. `takes_place`: one of the same name has just ended, and leaves its room to this one.
    ///
    /// # Errors
    /// [`Full`]: nothing has changed.
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
    /// None. `seed`: of the hash, secret, for keys come from tenants.
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

    /// As long as it is the same, time has not gone on, and no session has begun, ended or come to another state. Never 0.
    #[inline(always)]
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Something else has happened that notes do not know of.
    pub(crate) fn outdate_notes(&mut self) {
        self.generation += 1;
    }

    pub(crate) fn counters(&self) -> &SessionCounters {
        &self.counters
    }

    /// The sessions that are there count as created, and no others.
    pub(crate) fn restart_counters(&mut self) {
        let SessionCounters { current, established, .. } = self.counters;
        self.counters = SessionCounters { current, established, created: current, ..SessionCounters::default() };
    }

    /// There is another configuration.
    pub(crate) fn set_limits(&mut self, limits: SessionLimits) {
        self.limits = limits;
        self.generation += 1;
    }

    /// Time has come to `now_ns`; what has had no packets for too long ends, some at a time.
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

    /// Seconds of 2^30 ns.
    pub(crate) fn now_s(&self) -> u32 {
        self.now_s
    }

    /// The session of that name, `after` something.
    #[inline(always)]
    pub(crate) fn find_after(&self, key: &Key, after: &Planned) -> Option<u32> {
        self.find(key).filter(|index| !after.ended.contains(index))
    }

    /// The session of that name.
    pub(crate) fn find(&self, key: &Key) -> Option<u32> {
        self.index.find(self.hasher.hash_one(key), |i| self.slab[i as usize].key == *key)
    }

    /// The session that has that name for its second one, `after` something.
    #[inline(always)]
    pub(crate) fn find_second_after(&self, key: &Key, after: &Planned) -> Option<u32> {
        let is_it = |i: u32| self.slab[i as usize].payload.second_key().is_some_and(|second| second == *key);
        let found = self.second.find(self.hasher.hash_one(key), is_it);
        found.filter(|index| !after.ended.contains(index))
    }

    /// Mappings of sessions that have ended since they were last taken from here; a mapping for each session.
    pub(crate) fn released(&mut self) -> &mut Vec<u32> {
        &mut self.released
    }

    /// What is kept with a session.
    pub(crate) fn payload(&self, index: u32) -> &T {
        &self.slab[index as usize].payload
    }

    /// A name that means this session alone.
    pub(crate) fn handle(&self, index: u32) -> Handle {
        Handle { index, number: self.slab[index as usize].number }
    }

    /// Whether a session has not ended.
    #[inline(always)]
    pub(crate) fn is_there(&self, Handle { index, number }: Handle) -> bool {
        self.slab.get(index as usize).is_some_and(|session| session.number == number)
    }

    /// Has what a packet of a session needs of it come into the caches, if there is one at that place.
    #[inline(always)]
    pub(crate) fn fetch(&self, index: u32) {
        if let Some(session) = self.slab.get(index as usize) {
            prefetch(&session.number);
            prefetch(&session.state);
        }
    }

    /// Which side's packet was the first.
    pub(crate) fn origin(&self, index: u32) -> Direction {
        self.slab[index as usize].origin
    }

    /// How far it has come, and for how many seconds it had no packet.
    pub(crate) fn standing(&self, index: u32) -> (State, u32) {
        let session = &self.slab[index as usize];
        (session.state, self.now_s.saturating_sub(session.seen_s))
    }

    /// The configuration whose rules allow it.
    pub(crate) fn epoch(&self, index: u32) -> u32 {
        self.slab[index as usize].epoch
    }

    /// Whether the rules of `epoch` allow it, as far as is known.
    pub(crate) fn is_of(&self, index: u32, epoch: u32) -> bool {
        self.epoch(index) == epoch
    }

    /// Whether a packet begins a new conversation under the name of one that is over.
    pub(crate) fn begins_anew(&self, index: u32, event: Event) -> bool {
        self.slab[index as usize].state.begins_anew(event)
    }

    /// A packet of session `index`, which the rules of `epoch` allow.
    #[inline(always)]
    pub(crate) fn touch(&mut self, index: u32, direction: Direction, event: Event, epoch: u32) {
        if !self.slab[index as usize].is_settled(self.now_s, direction, event, epoch) {
            self.step(index, direction, event, epoch);
        }
    }

    /// Whether a session is there, and a packet would change nothing about it.
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
        // Not by what the guest sends: it goes on for minutes when the other end has vanished.
        let is_heard = direction == Direction::Ingress && session.heard != period(now_s);
        if before != after {
            self.change(index, before, after);
        }
        if is_heard {
            self.renew(index);
        }
    }

    /// [`insert`](Self::insert) of a session with something.
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

    /// Adds a session of another switch, whose name is not known here, and returns its place. `None`: there is no room.
    pub(super) fn insert_carried(&mut self, session: &Carried<T>, epoch: u32) -> Option<u32> {
        // A time to come would keep it forever.
        let session = Carried { seen_s: session.seen_s.min(self.now_s), ..*session };
        self.add(&session, epoch, false).ok()
    }

    /// All sessions, in no particular order.
    pub(super) fn all(&self) -> impl Iterator<Item = Carried<T>> {
        self.slab.iter().filter_map(Session::carried)
    }

    /// Places that sessions may have; one stays at its place while it is there.
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

    /// Ends a session that the rules allow no longer.
    pub(crate) fn revoke(&mut self, index: u32) {
        self.counters.revoked += 1;
        self.remove(index);
    }

    /// Ends a session whose name another one takes.
    pub(crate) fn remove(&mut self, index: u32) {
        let session = self.slab[index as usize];
        self.wheel.list(session.slot).remove(&mut self.slab, index, due);
        self.forget(index);
    }

    /// Ends all sessions of a port whose number now means another vNIC, and forgets what was counted of it.
    pub(crate) fn forget_port(&mut self, port: PortId) {
        while let Some(index) = self.queues(port).and_then(|queues| queues.victim(None)) {
            self.remove(index);
        }
        if let Some(account) = self.ports.get_mut(port.place()) {
            *account = Account::default();
        }
    }

    /// Sessions of a port.
    pub(crate) fn of_port(&self, port: PortId) -> PortSessions {
        let evicted = self.ports.get(port.place()).map_or_else(Default::default, |account| account.evicted);
        PortSessions { current: self.ranking.count(port), evicted }
    }

    /// What was counted of a port is forgotten.
    pub(crate) fn forget_counters(&mut self, port: PortId) {
        if let Some(account) = self.ports.get_mut(port.place()) {
            account.evicted = Default::default();
        }
    }

    /// What [`insert`](Self::insert) would do, kept in mind. Only what comes first on a packet's way may be: the second insertion would
    /// not know of the first.
    ///
    /// # Errors
    /// There would be no room.
    pub(crate) fn plan_insert(&self, key: &Key, origin: Direction, plan: &mut Planned) -> Result<(), Full> {
        plan.ended.extend(self.evicted_for(key.port(), origin, self.source(key))?);
        Ok(())
    }

    /// Which session makes room for another one; `None`: there is room.
    fn evicted_for(&self, port: PortId, origin: Direction, source: u8) -> Result<Option<u32>, Full> {
        let SessionLimits { total, per_port } = self.limits;
        if total.min(per_port) == 0 {
            return Err(Full);
        }
        let own = self.ranking.count(port);
        let giver = if own >= per_port {
            port
        } else if self.counters.current >= u64::from(total) {
            // The port with most gives, so none that has no more than its share.
            self.ranking.largest().filter(|largest| self.ranking.count(*largest) > own).unwrap_or(port)
        } else {
            return Ok(None);
        };
        let newcomer = (giver == port).then_some((origin, source));
        Ok(self.queues(giver).and_then(|queues| queues.victim(newcomer)))
    }

    /// The list of a session's source.
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

    /// Does something to the queues that a session is in.
    fn requeue(&mut self, index: u32, change: impl FnOnce(&mut Queues, &mut [Session<T>], &Session<T>)) {
        let session = self.slab[index as usize];
        if let Some(queues) = &mut self.ports[session.key.port().place()].queues {
            change(queues, &mut self.slab, &session);
        }
    }

    /// The remote end of a session has been heard of.
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
        // One that is on the wheel too early is looked at and put back; too late, it would stay.
        if after.timeout_s() < before.timeout_s() {
            self.wheel.list(slot).remove(&mut self.slab, index, due);
            self.schedule(index, self.now_s + after.timeout_s());
        }
    }

    /// Room for as many sessions as there may be, at once: growing step by step would rehash all of them each time, and each
    /// time all guests would wait. Only what is used of it takes memory.
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
