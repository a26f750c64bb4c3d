//! Many private ends behind few addresses: SNAT to the Internet, and the addresses that services see.
//!
//! A session has an *inside* (as the tenant's packets look) and an *outside* (as they leave). All cores of a pod share one [`Nat`]: packets of a
//! session may come to any core. The sessions lie in as many parts as there are cores. Each part has a block of the ports of every address, so that
//! the port of a returning packet names its part; a lock guards a part, and is taken when a core sees a session for the first time. After that the core
//! finds it in a cache of its own ([`Cache`]), and the only shared word that it may write is the time of the session's last packet, every few seconds.
//!
//! A mapping depends on address and port of both ends (RFC 4787, section 4.1, address and port-dependent): a port serves many destinations. The
//! address that an inside address gets is always the same ("paired", RFC 4787, section 4.1).

use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bifrost_tables::{ExactMap, exact_map};
use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::tcp;

use crate::DropReason;
use crate::cache::Cache;
use crate::rewrite::End;
use crate::session::{Flow, Session};

/// The network that is not a VPC's.
pub const INTERNET: u32 = u32::MAX;

/// The first port that is given out.
const FIRST_PORT: u16 = 1024;
/// Ports that are tried for a session.
const TRIES: u16 = 32;
/// Sessions looked at for being over when one begins, and when there is no room.
const SWEEP: usize = 4;
const SWEEP_WHEN_FULL: usize = 64;

/// Settings of a [`Nat`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NatConfig {
    /// By number: the network where a pool's addresses are seen ([`INTERNET`] or a service's VNI), and the addresses.
    pub pools: Vec<(u32, Vec<IpAddr>)>,
    /// Parts: one for each core, 1 to 1,024.
    pub cores: u16,
    /// Sessions of a part at most. A VPC gets at most half of them.
    pub sessions_per_core: u32,
    /// Secret: of the hash tables, and of the choice of ports.
    pub seed: u64,
}

#[derive(Debug)]
struct Part {
    /// In no order.
    sessions: Vec<Arc<Session>>,
    /// Where the search for those that are over goes on.
    sweep: usize,
    by_inside: ExactMap<Flow, Arc<Session>>,
    /// By what comes back.
    by_outside: ExactMap<Flow, Arc<Session>>,
    by_vpc: ExactMap<u32, u32>,
}

/// All sessions.
#[derive(Debug)]
pub struct Nat {
    config: NatConfig,
    parts: Box<[Mutex<Part>]>,
    /// Ports of an address that belong to a part.
    block: u16,
    hash: foldhash::fast::FixedState,
}

/// What a packet of a session says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) now: u64,
    pub(crate) flow: Flow,
    /// Of TCP.
    pub(crate) flags: tcp::Flags,
}

impl Seen {
    fn now_s(&self) -> u32 {
        (self.now / 1_000_000_000) as u32
    }
}

impl Nat {
    /// Without sessions. Numbers out of range are brought into it.
    pub fn new(config: NatConfig) -> Self {
        let cores = config.cores.clamp(1, 1024);
        let part = || Part {
            sessions: Vec::new(),
            sweep: 0,
            by_inside: exact_map(config.seed),
            by_outside: exact_map(config.seed),
            by_vpc: exact_map(config.seed),
        };
        Nat {
            parts: (0..cores).map(|_| Mutex::new(part())).collect(),
            block: (u16::MAX - FIRST_PORT + 1) / cores,
            hash: foldhash::fast::FixedState::with_seed(config.seed),
            config,
        }
    }

    /// An empty cache for a core: with room for both sides of as many sessions as a part has.
    pub(crate) fn cache(&self, seed: u64) -> Cache {
        Cache::new(2 * self.config.sessions_per_core as usize, seed)
    }

    /// Sessions at present.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| lock(part).sessions.len()).sum()
    }

    /// Whether there is no session.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How a packet from the inside leaves. It may begin a session, from an address of `pool` to `target`, or where the packet goes.
    pub(crate) fn outward(
        &self,
        cache: &mut Cache,
        seen: Seen,
        pool: u32,
        target: Option<End>,
    ) -> Result<Flow, DropReason> {
        let flow = seen.flow;
        if let Some(outside) = cache.find(&flow, seen.now_s(), seen.flags, true) {
            return Ok(outside);
        }
        let part = self.part_of(&flow);
        let mut guard = lock(&self.parts[part]);
        let session = match guard.by_inside.get(&flow) {
            Some(session) => Arc::clone(session),
            None => self.begin(&mut guard, part as u16, seen, pool, target)?,
        };
        drop(guard);
        session.touch(seen.now_s(), seen.flags, true);
        cache.keep(flow, session.outside, &session, seen.now_s());
        Ok(session.outside)
    }

    /// How a packet from the inside would leave, and whether its session is there already; nothing changes.
    #[cold]
    pub(crate) fn foresee_outward(
        &self,
        seen: Seen,
        pool: u32,
        target: Option<End>,
    ) -> Result<(Flow, bool), DropReason> {
        let number = self.part_of(&seen.flow);
        let part = lock(&self.parts[number]);
        match part.by_inside.get(&seen.flow) {
            Some(session) => Ok((session.outside, true)),
            None => Ok((self.choose(&part, number as u16, seen, pool, target)?, false)),
        }
    }

    /// How a packet from the outside looks inside.
    pub(crate) fn inward(&self, cache: &mut Cache, seen: Seen) -> Result<Flow, DropReason> {
        if let Some(inside) = cache.find(&seen.flow, seen.now_s(), seen.flags, false) {
            return Ok(inside);
        }
        let session = self.by_outside(&seen.flow).ok_or(DropReason::NatNoSession)?;
        session.touch(seen.now_s(), seen.flags, false);
        let inside = session.inside.reversed();
        cache.keep(seen.flow, inside, &session, seen.now_s());
        Ok(inside)
    }

    /// How a packet from the inside leaves, if it is of a session; for what is said about such a packet, and does not belong to the session.
    #[cold]
    pub(crate) fn known_outward(&self, flow: &Flow) -> Option<Flow> {
        lock(&self.parts[self.part_of(flow)]).by_inside.get(flow).map(|session| session.outside)
    }

    /// The same of a packet from the outside.
    #[cold]
    pub(crate) fn known_inward(&self, flow: &Flow) -> Option<Flow> {
        self.by_outside(flow).map(|session| session.inside.reversed())
    }

    /// The session of a packet from the outside.
    fn by_outside(&self, flow: &Flow) -> Option<Arc<Session>> {
        let port = flow.destination.port.checked_sub(FIRST_PORT)?;
        let part = self.parts.get(usize::from(port / self.block))?;
        lock(part).by_outside.get(flow).map(Arc::clone)
    }

    fn part_of(&self, flow: &Flow) -> usize {
        ((u128::from(self.hash.hash_one(flow)) * self.parts.len() as u128) >> 64) as usize
    }

    #[cold]
    fn begin(
        &self,
        part: &mut Part,
        number: u16,
        seen: Seen,
        pool: u32,
        target: Option<End>,
    ) -> Result<Arc<Session>, DropReason> {
        let now_s = seen.now_s();
        part.sweep(now_s, SWEEP);
        if part.sessions.len() >= self.config.sessions_per_core as usize {
            part.sweep(now_s, SWEEP_WHEN_FULL);
        }
        let outside = self.choose(part, number, seen, pool, target)?;
        let session = Arc::new(Session::new(seen.flow, outside, now_s));
        part.sessions.push(Arc::clone(&session));
        part.by_inside.insert(seen.flow, Arc::clone(&session));
        part.by_outside.insert(outside.reversed(), Arc::clone(&session));
        *part.by_vpc.entry(seen.flow.network).or_insert(0) += 1;
        Ok(session)
    }

    /// How the packets of a session that begins with this one leave.
    fn choose(&self, part: &Part, number: u16, seen: Seen, pool: u32, target: Option<End>) -> Result<Flow, DropReason> {
        let flow = seen.flow;
        let opens = match flow.protocol {
            TCP => seen.flags.contains(tcp::Flags::SYN) && !seen.flags.contains(tcp::Flags::ACK),
            UDP => true,
            // The identifier is on the side of who asks.
            _ => flow.source.port != 0,
        };
        if !opens {
            return Err(DropReason::NatNoSession);
        }
        let (network, addresses) = self.config.pools.get(pool as usize).ok_or(DropReason::NoTranslation)?;
        let max = self.config.sessions_per_core as usize;
        let of_vpc = part.by_vpc.get(&flow.network).copied().unwrap_or(0) as usize;
        if part.sessions.len() >= max || of_vpc >= (max / 2).max(1) {
            return Err(DropReason::NatFull);
        }
        let destination = target.unwrap_or(flow.destination);
        let like: Vec<IpAddr> =
            addresses.iter().copied().filter(|a| a.is_ipv4() == destination.address.is_ipv4()).collect();
        let choice = self.hash.hash_one((flow.network, flow.source.address)) as usize;
        let address = *like.get(choice % like.len().max(1)).ok_or(DropReason::NoTranslation)?;
        let first = self.hash.hash_one((flow, seen.now_s())) as u16 % self.block;
        let ports = (0..TRIES.min(self.block)).map(|n| FIRST_PORT + number * self.block + (first + n) % self.block);
        let outside = |port| {
            let source = End { address, port };
            Flow { network: *network, protocol: flow.protocol, source, destination }
        };
        ports.map(outside).find(|o| !part.by_outside.contains_key(&o.reversed())).ok_or(DropReason::NatFull)
    }
}

impl Part {
    /// Removes those of the next `count` sessions that are over.
    fn sweep(&mut self, now_s: u32, count: usize) {
        for _ in 0..count.min(self.sessions.len()) {
            if self.sweep >= self.sessions.len() {
                self.sweep = 0;
            }
            if !self.sessions[self.sweep].is_over(now_s) {
                self.sweep += 1;
                continue;
            }
            let session = self.sessions.swap_remove(self.sweep);
            session.end();
            self.by_inside.remove(&session.inside);
            self.by_outside.remove(&session.outside.reversed());
            if let Some(count) = self.by_vpc.get_mut(&session.inside.network) {
                *count -= 1;
                if *count == 0 {
                    self.by_vpc.remove(&session.inside.network);
                }
            }
        }
    }
}

/// A panic of another core while it held the lock leaves maps that are valid one by one.
fn lock(part: &Mutex<Part>) -> MutexGuard<'_, Part> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}
