//! The sessions of one switch.

use std::hash::BuildHasher as _;
use std::hint::black_box;

use foldhash::fast::FixedState;
use hashbrown::HashTable;

use super::key::Key;
use super::list::{Links, List, NONE};
use super::state::{Event, State};
use super::wheel::Wheel;
use super::{Direction, SessionCounters, SessionLimits};

/// Sessions whose time may have come that are looked at in one go, at most.
const EXPIRIES: usize = 256;

/// What would be done to sessions before a question about them is answered.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    /// They end.
    ended: Vec<u32>,
    /// One begins at each of these ports.
    begun: Vec<u16>,
    /// They may be evicted no longer.
    kept: Vec<u32>,
    /// They may be from now on, as the last ones of their port.
    freed: Vec<u32>,
}

impl Planned {
    /// Nothing.
    pub(crate) const NOTHING: Planned =
        Planned { ended: Vec::new(), begun: Vec::new(), kept: Vec::new(), freed: Vec::new() };

    /// A session ends.
    pub(crate) fn end(&mut self, index: u32) {
        self.ended.push(index);
    }
}

/// Names a session, and no other one for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) index: u32,
    /// The how manyeth it was to begin.
    pub(crate) number: u64,
}

/// There is no room for another session, and none that may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// The sessions.
#[derive(Debug)]
pub(crate) struct Sessions {
    limits: SessionLimits,
    counters: SessionCounters,
    hasher: FixedState,
    index: HashTable<u32>,
    slab: Vec<Session>,
    free: List,
    /// By port number.
    ports: Vec<Account>,
    wheel: Wheel,
    /// Seconds of 2^30 ns.
    now_s: u32,
    generation: u64,
}

#[derive(Clone, Copy, Debug)]
struct Session {
    key: Key,
    /// As of its [`Handle`]; 0 once it has ended.
    number: u64,
    /// On the wheel, or on the free list.
    due: Links,
    /// Among those of its port that may be evicted.
    idle: Links,
    /// The rules that allow it.
    epoch: u32,
    seen_s: u32,
    slot: u16,
    state: State,
    origin: Direction,
}

/// The sessions of a port.
#[derive(Clone, Copy, Debug)]
struct Account {
    count: u32,
    /// Those that may go when there is no room, the oldest first.
    evictable: List,
}

fn due(session: &mut Session) -> &mut Links {
    &mut session.due
}

fn idle(session: &mut Session) -> &mut Links {
    &mut session.idle
}

impl Sessions {
    /// None. `seed`: of the hash, secret, for keys come from tenants.
    pub(crate) fn new(limits: SessionLimits, seed: u64) -> Self {
        Sessions {
            limits,
            counters: SessionCounters::default(),
            hasher: FixedState::with_seed(seed),
            index: HashTable::new(),
            slab: Vec::new(),
            free: List::EMPTY,
            ports: Vec::new(),
            wheel: Wheel::new(),
            now_s: 0,
            generation: 1,
        }
    }

    /// As long as it is the same, time has not gone on, and no session has begun, ended or come to another state. Never 0.
    #[inline(always)]
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    pub(crate) fn counters(&self) -> &SessionCounters {
        &self.counters
    }

    /// There is another configuration.
    pub(crate) fn set_limits(&mut self, limits: SessionLimits) {
        self.limits = limits;
        self.generation += 1;
    }

    /// Time has come to `now_ns`; what has had no packets for too long ends, some at a time.
    pub(crate) fn advance(&mut self, now_ns: u64) {
        let now_s = (now_ns >> 30) as u32;
        self.now_s = self.now_s.max(now_s);
        self.generation += 1;
        if self.counters.current == 0 {
            return;
        }
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

    /// The session of that name, `after` something.
    #[inline(always)]
    pub(crate) fn find_after(&self, key: &Key, after: &Planned) -> Option<u32> {
        self.find(key).filter(|index| !after.ended.contains(index))
    }

    /// The session of that name.
    pub(crate) fn find(&self, key: &Key) -> Option<u32> {
        self.index.find(self.hasher.hash_one(key), |&i| self.slab[i as usize].key == *key).copied()
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

    /// Reads what a packet of a session needs of it, if there is one at that place.
    #[inline(always)]
    pub(crate) fn fetch(&self, index: u32) {
        if let Some(session) = self.slab.get(index as usize) {
            black_box((session.number, session.seen_s));
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

    /// Whether the rules of `epoch` allow it, as far as is known.
    pub(crate) fn is_of(&self, index: u32, epoch: u32) -> bool {
        self.slab[index as usize].epoch == epoch
    }

    /// Whether a packet begins a new conversation under the name of one that is over.
    pub(crate) fn begins_anew(&self, index: u32, event: Event) -> bool {
        self.slab[index as usize].state.begins_anew(event)
    }

    /// A packet of session `index`, which the rules of `epoch` allow.
    pub(crate) fn touch(&mut self, index: u32, direction: Direction, event: Event, epoch: u32) {
        let now_s = self.now_s;
        let session = &mut self.slab[index as usize];
        session.epoch = epoch;
        session.seen_s = now_s;
        let (before, after) = (session.state, session.state.after(event, direction == session.origin));
        if before != after {
            self.change(index, before, after);
        }
    }

    /// Begins a session with this packet.
    ///
    /// # Errors
    /// [`Full`]: nothing has changed.
    pub(crate) fn insert(&mut self, key: Key, origin: Direction, event: Event, epoch: u32) -> Result<(), Full> {
        let port = usize::from(key.vnic);
        if self.ports.len() <= port {
            self.ports.resize(port + 1, Account { count: 0, evictable: List::EMPTY });
        }
        if let Some((_, Some(index))) = self.goes(port, &Planned::NOTHING)? {
            self.counters.evicted += 1;
            self.remove(index);
        }
        if self.counters.current == 0 {
            self.wheel.start_at(self.now_s);
        }
        let state = State::first(event);
        let session = Session {
            key,
            number: self.counters.created + 1,
            due: Links::UNLINKED,
            idle: Links::UNLINKED,
            epoch,
            seen_s: self.now_s,
            slot: 0,
            state,
            origin,
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
        let Sessions { index: table, slab, hasher, .. } = self;
        table.insert_unique(hasher.hash_one(key), index, |&i| hasher.hash_one(slab[i as usize].key));
        self.ports[port].count += 1;
        self.counters.current += 1;
        self.counters.created += 1;
        self.schedule(index, self.now_s + state.timeout_s());
        self.ports[port].evictable.push_back(&mut self.slab, index, idle);
        Ok(())
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

    /// Ends all sessions of a port whose number now means another vNIC.
    pub(crate) fn forget_port(&mut self, vnic: u16) {
        let of_port: Vec<u32> =
            self.index.iter().copied().filter(|&i| self.slab[i as usize].key.vnic == vnic).collect();
        of_port.into_iter().for_each(|index| self.remove(index));
    }

    /// What [`touch`](Self::touch) would do, kept in mind.
    pub(crate) fn plan_touch(&self, index: u32, direction: Direction, event: Event, plan: &mut Planned) {
        let Session { state, origin, .. } = self.slab[index as usize];
        match (state.may_be_evicted(), state.after(event, direction == origin).may_be_evicted()) {
            (true, false) => plan.kept.push(index),
            (false, true) => plan.freed.push(index),
            _ => {}
        }
    }

    /// What [`insert`](Self::insert) would do, kept in mind.
    ///
    /// # Errors
    /// There would be no room.
    pub(crate) fn plan_insert(&self, key: &Key, plan: &mut Planned) -> Result<(), Full> {
        match self.goes(usize::from(key.vnic), plan)? {
            Some((_, Some(index))) => plan.ended.push(index),
            // One that was to begin.
            Some((port, None)) => {
                if let Some(at) = plan.begun.iter().position(|p| usize::from(*p) == port) {
                    plan.begun.remove(at);
                }
            }
            None => {}
        }
        plan.begun.push(key.vnic);
        Ok(())
    }

    /// What has to go, `after` something, for another session of a port: the port that gives it, and which one of those there
    /// are now, if it is one of them. `None`: there is room.
    fn goes(&self, port: usize, after: &Planned) -> Result<Option<(usize, Option<u32>)>, Full> {
        let current = self.counters.current + after.begun.len() as u64 - after.ended.len() as u64;
        let giver = if self.count(port, after) >= self.limits.per_port {
            port
        } else if current >= u64::from(self.limits.total) {
            self.giver(port, after)
        } else {
            return Ok(None);
        };
        let index = self.oldest(giver, after);
        let may_give = index.is_some() || after.begun.iter().any(|p| usize::from(*p) == giver);
        if may_give { Ok(Some((giver, index))) } else { Err(Full) }
    }

    /// The port that has to give at the bound of all: its own, or the one that has most of those that may go.
    fn giver(&self, port: usize, after: &Planned) -> usize {
        let own = self.count(port, after);
        let may_give = |p: usize| self.oldest(p, after).is_some() || after.begun.iter().any(|b| usize::from(*b) == p);
        let ports = after.begun.iter().map(|p| usize::from(*p) + 1).fold(self.ports.len(), usize::max);
        let others = (0..ports).map(|p| (p, self.count(p, after))).filter(|(_, count)| *count > own);
        others.filter(|(p, _)| may_give(*p)).max_by_key(|(_, count)| *count).map_or(port, |(other, _)| other)
    }

    /// The sessions of a port.
    fn count(&self, port: usize, after: &Planned) -> u32 {
        let now = self.ports.get(port).map_or(0, |account| account.count);
        let ended = after.ended.iter().filter(|i| usize::from(self.slab[**i as usize].key.vnic) == port).count();
        now + after.begun.iter().filter(|p| usize::from(**p) == port).count() as u32 - ended as u32
    }

    /// The oldest session of a port that may be evicted.
    fn oldest(&self, port: usize, after: &Planned) -> Option<u32> {
        let mut index = self.ports.get(port)?.evictable.head;
        while after.ended.contains(&index) || after.kept.contains(&index) {
            index = self.slab[index as usize].idle.next;
        }
        let of_port = |index: &u32| usize::from(self.slab[*index as usize].key.vnic) == port;
        let freed = || after.freed.iter().copied().find(|index| of_port(index) && !after.ended.contains(index));
        if index == NONE { freed() } else { Some(index) }
    }

    fn change(&mut self, index: u32, before: State, after: State) {
        self.generation += 1;
        let session = &mut self.slab[index as usize];
        session.state = after;
        let (slot, port) = (session.slot, usize::from(session.key.vnic));
        match (before.may_be_evicted(), after.may_be_evicted()) {
            (true, false) => {
                self.ports[port].evictable.remove(&mut self.slab, index, idle);
                self.counters.established += 1;
            }
            (false, true) => {
                self.ports[port].evictable.push_back(&mut self.slab, index, idle);
                self.counters.established -= 1;
            }
            _ => {}
        }
        // One that is on the wheel too early is looked at and put back; too late, it would stay.
        if after.timeout_s() < before.timeout_s() {
            self.wheel.list(slot).remove(&mut self.slab, index, due);
            self.schedule(index, self.now_s + after.timeout_s());
        }
    }

    /// Room for as many sessions as there may be, at once: to grow by and by would be to hash all of them again and again, and each
    /// time all guests would wait. Only what is used of it takes memory, but for the index: about ten bytes a session.
    #[cold]
    fn make_room(&mut self) {
        let more = (self.limits.total as usize).saturating_sub(self.slab.len()).max(1);
        self.slab.reserve_exact(more);
        let Sessions { index: table, slab, hasher, .. } = self;
        table.reserve(more, |&i| hasher.hash_one(slab[i as usize].key));
    }

    fn schedule(&mut self, index: u32, at_s: u32) {
        let slot = self.wheel.slot(at_s);
        self.slab[index as usize].slot = slot;
        self.wheel.list(slot).push_back(&mut self.slab, index, due);
    }

    /// Ends a session that is not on the wheel.
    fn forget(&mut self, index: u32) {
        let Session { key, state, .. } = self.slab[index as usize];
        self.generation += 1;
        self.slab[index as usize].number = 0;
        let found = self.index.find_entry(self.hasher.hash_one(key), |&i| i == index);
        if let Ok(entry) = found {
            entry.remove();
        }
        let account = &mut self.ports[usize::from(key.vnic)];
        account.count -= 1;
        self.counters.current -= 1;
        if state.may_be_evicted() {
            account.evictable.remove(&mut self.slab, index, idle);
        } else {
            self.counters.established -= 1;
        }
        self.free.push_back(&mut self.slab, index, due);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use std::collections::HashMap;

    use bifrost_nic::parse;
    use bifrost_wire::tcp::Flags;

    use super::*;

    const S: u64 = 1 << 30;

    /// A key of port `vnic`; `n` tells conversations apart.
    fn key(vnic: u16, n: u32) -> Key {
        let [a, b, c, d] = n.to_be_bytes();
        // Ethernet, IPv4, UDP: from 10.a.b.c, port d.
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        frame.extend([0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, a, b, c, 10, 0, 0, 1]);
        frame.extend([0, d, 0, 53, 0, 8, 0, 0]);
        let parsed = parse(&frame, frame.len()).unwrap();
        Key::of(vnic, Direction::Egress, &frame, &parsed)
    }

    fn sessions(total: u32, per_port: u32) -> Sessions {
        let mut sessions = Sessions::new(SessionLimits { total, per_port }, 1);
        sessions.advance(1000 * S);
        sessions
    }

    #[test]
    fn the_oldest_that_is_not_established_makes_room_in_its_own_port() {
        let mut s = sessions(100, 3);
        for n in 0..3 {
            s.insert(key(1, n), Direction::Egress, Event::Datagram, 0).unwrap();
        }
        s.insert(key(2, 9), Direction::Egress, Event::Datagram, 0).unwrap();
        let first = s.find(&key(1, 0)).unwrap();
        s.touch(first, Direction::Ingress, Event::Datagram, 0);
        s.insert(key(1, 3), Direction::Egress, Event::Datagram, 0).unwrap();
        let there = |s: &Sessions| [0, 1, 2, 3].map(|n| s.find(&key(1, n)).is_some());
        assert_eq!(there(&s), [true, false, true, true], "the first is established, the second the oldest that is not");
        assert!(s.find(&key(2, 9)).is_some());
        for n in [2, 3] {
            let index = s.find(&key(1, n)).unwrap();
            s.touch(index, Direction::Ingress, Event::Datagram, 0);
        }
        assert_eq!(s.insert(key(1, 4), Direction::Egress, Event::Datagram, 0), Err(Full));
        assert_eq!(there(&s), [true, false, true, true]);
        assert_eq!((s.counters().current, s.counters().established, s.counters().evicted), (4, 3, 1));
    }

    #[test]
    fn room_is_made_once() {
        let mut s = sessions(500, 500);
        assert_eq!((s.slab.capacity(), s.index.capacity()), (0, 0), "none is needed yet");
        s.insert(key(1, 0), Direction::Egress, Event::Datagram, 0).unwrap();
        let room = |s: &Sessions| (s.slab.capacity(), s.index.capacity());
        let made = room(&s);
        (1..600).for_each(|n| s.insert(key(1, n), Direction::Egress, Event::Datagram, 0).unwrap());
        assert_eq!((room(&s), s.slab.len(), s.counters().current), (made, 500, 500));
        s.set_limits(SessionLimits { total: 5000, per_port: 5000 });
        (600..6000).for_each(|n| s.insert(key(1, n), Direction::Egress, Event::Datagram, 0).unwrap());
        assert_eq!((s.slab.len(), s.counters().current), (5000, 5000));
    }

    #[test]
    fn at_the_bound_of_all_the_port_with_most_gives() {
        let mut s = sessions(4, 4);
        for n in 0..4 {
            s.insert(key(1, n), Direction::Egress, Event::Datagram, 0).unwrap();
        }
        s.insert(key(2, 0), Direction::Egress, Event::Datagram, 0).unwrap();
        s.insert(key(2, 1), Direction::Egress, Event::Datagram, 0).unwrap();
        assert_eq!([0, 1, 2, 3].map(|n| s.find(&key(1, n)).is_some()), [false, false, true, true]);
        assert_eq!(s.counters().current, 4);
    }

    #[test]
    fn sessions_end_when_their_time_has_come_and_not_before() {
        let mut s = sessions(10, 10);
        let syn = Event::Tcp(Flags::SYN);
        s.insert(key(0, 0), Direction::Egress, syn, 0).unwrap();
        s.insert(key(0, 1), Direction::Egress, syn, 0).unwrap();
        s.insert(key(0, 2), Direction::Egress, Event::Icmp, 0).unwrap();
        let open = s.find(&key(0, 1)).unwrap();
        s.touch(open, Direction::Ingress, Event::Tcp(Flags::SYN.with(Flags::ACK)), 0);
        s.touch(open, Direction::Egress, Event::Tcp(Flags::ACK), 0);
        let there = |s: &Sessions| [0, 1, 2].map(|n| s.find(&key(0, n)).is_some());
        for (at_s, expected) in
            [(1059, [true; 3]), (1061, [true, true, false]), (1239, [true, true, false]), (1242, [false, true, false])]
        {
            s.advance(at_s * S);
            assert_eq!(there(&s), expected, "at {at_s} s");
        }
        // Each second is a step; two hours of them are too many for Miri.
        if cfg!(miri) {
            return;
        }
        // A packet keeps it; RST shortens its time.
        s.advance(5000 * S);
        s.touch(open, Direction::Egress, Event::Tcp(Flags::ACK), 0);
        s.advance((5000 + 7439) * S);
        assert_eq!(there(&s), [false, true, false]);
        s.touch(open, Direction::Egress, Event::Tcp(Flags::RST), 0);
        s.advance((5000 + 7439 + 242) * S);
        assert_eq!((there(&s), s.counters().current), ([false; 3], 0));
        // After a long sleep it begins anew.
        s.insert(key(0, 3), Direction::Egress, syn, 0).unwrap();
        s.advance(1_000_000 * S);
        s.advance(1_000_001 * S);
        assert_eq!((s.find(&key(0, 3)), s.counters().expired), (None, 4));
    }

    /// Random operations beside a map.
    #[test]
    fn it_holds_what_a_map_would() {
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..if cfg!(miri) { 1 } else { 4 } {
            let mut s = sessions(1000, 1000);
            let mut oracle: HashMap<Key, (State, Direction, u32)> = HashMap::new();
            let mut now_s = 1000;
            for _ in 0..if cfg!(miri) { 50 } else { 3000 } {
                if rng.u8(..) < 20 {
                    now_s += rng.u32(0..100);
                    s.advance(u64::from(now_s) * S);
                    // More than one call may be needed, never more than one for each session.
                    (0..8).for_each(|_| s.advance(u64::from(now_s) * S));
                    oracle.retain(|_, (state, _, seen_s)| *seen_s + state.timeout_s() >= now_s);
                }
                let key = key(rng.u16(0..3), rng.u32(0..60));
                let direction = if rng.bool() { Direction::Egress } else { Direction::Ingress };
                let flags = [Flags::SYN, Flags::ACK, Flags::FIN, Flags::RST, Flags::SYN.with(Flags::ACK)];
                let event = match rng.u8(0..3) {
                    0 => Event::Datagram,
                    1 => Event::Icmp,
                    _ => Event::Tcp(flags[rng.usize(0..flags.len())]),
                };
                match s.find(&key) {
                    Some(index) if rng.u8(0..20) == 0 => {
                        s.revoke(index);
                        oracle.remove(&key);
                    }
                    Some(index) => {
                        s.touch(index, direction, event, 0);
                        if let Some((state, origin, seen_s)) = oracle.get_mut(&key) {
                            *state = state.after(event, direction == *origin);
                            *seen_s = now_s;
                        }
                    }
                    None => {
                        s.insert(key, direction, event, 0).unwrap();
                        oracle.insert(key, (State::first(event), direction, now_s));
                    }
                }
                // On the second itself it may be there or not yet.
                let sure = oracle.iter().filter(|(_, (state, _, seen_s))| *seen_s + state.timeout_s() > now_s);
                for (key, (state, origin, _)) in sure {
                    let index = s.find(key).expect("the session of the oracle");
                    assert_eq!((s.slab[index as usize].state, s.origin(index)), (*state, *origin));
                }
                oracle.retain(|key, _| s.find(key).is_some());
                assert_eq!(oracle.len() as u64, s.counters().current);
                let established = oracle.values().filter(|(state, ..)| !state.may_be_evicted()).count();
                assert_eq!(established as u64, s.counters().established);
            }
            s.forget_port(0);
            s.forget_port(1);
            s.forget_port(2);
            assert_eq!((s.counters().current, s.counters().established, s.index.len()), (0, 0, 0));
        }
    }
}
