//! Translates many private endpoints to few addresses: SNAT to the Internet, and the source addresses that services
//! see.
//!
//! A session has an *inside* (packets as the tenant sees them) and an *outside* (packets after translation). All cores
//! of a pod share one [`Nat`]: packets of a session may arrive at any core, which finds the session in the shared
//! [table](Shared) without a lock. Sessions start and end under the lock of one of the *parts*; there are as many parts
//! as cores. Each part has a block of the ports of every address, so sessions of two parts never have the same outside.
//!
//! A mapping depends on address and port of both endpoints (RFC 4787, section 4.1, address and port-dependent): one
//! port serves many destinations. An inside address always gets the same outside address ("paired", RFC 4787, section
//! 4.1).

use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bifrost_tables::{ExactMap, exact_map};
use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::tcp;

use crate::DropReason;
use crate::rewrite::End;
use crate::session::{self, Flow};
use crate::shared::{SESSIONS_MAX, Shared, Side};

/// The network that does not belong to a VPC.
pub const INTERNET: u32 = u32::MAX;

/// The first port that is allocated.
const FIRST_PORT: u16 = 1024;
/// Ports to try for a session.
const TRIES: u16 = 32;
/// Sessions checked for expiry when one starts, and when there is no room.
const SWEEP: usize = 4;
const SWEEP_WHEN_FULL: usize = 64;
/// Number of locks for the session counts of VPCs.
const VPC_LOCKS: usize = 64;
/// With fewer sessions, prefetching costs more than it saves: they take less than 1 MB.
const MANY: u32 = 1 << 13;

/// Settings of a [`Nat`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NatConfig {
    /// Pools by number: the network where a pool's addresses are seen ([`INTERNET`] or a service's VNI), and the
    /// addresses.
    pub pools: Vec<(u32, Vec<IpAddr>)>,
    /// Number of parts: one for each core, 1 to 1,024.
    pub cores: u16,
    /// Maximum number of sessions of the pod, 1 to 16,777,216. A VPC gets at most half of them.
    pub sessions: u32,
    /// Secret seed of the hash tables, and of the choice of ports.
    pub seed: u64,
}

/// Sessions that start and end under one lock.
#[derive(Debug, Default)]
pub(crate) struct Part {
    /// Unordered: when a session ends, the last one moves to its position.
    pub(crate) sessions: Vec<Entry>,
    /// Position of the search for expired sessions.
    sweep: usize,
}

/// A session of a part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// The slots of both flows.
    pub(crate) inside: u32,
    pub(crate) outside: u32,
    /// When it started here, s; 0: it was imported from another pod.
    pub(crate) began_s: u32,
}

/// All sessions.
#[derive(Debug)]
pub struct Nat {
    pub(crate) config: NatConfig,
    pub(crate) shared: Shared,
    pub(crate) parts: Box<[Mutex<Part>]>,
    /// Number of sessions of each VPC that has any.
    vpcs: Box<[Mutex<ExactMap<u32, u32>>]>,
    /// Number of ports of each address that belong to a part.
    block: u16,
    hash: foldhash::fast::FixedState,
    /// Whether there are [`MANY`] sessions. Every packet reads it, so it is not in the cache line of `counts`, which
    /// each new session changes.
    many: AtomicBool,
    counts: Counts,
}

/// In a separate cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Counts {
    sessions: AtomicU32,
    /// The part that another core sweeps next.
    sweep: AtomicU32,
}

/// The state of a session that a packet implies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) now: u64,
    pub(crate) flow: Flow,
    /// For TCP.
    pub(crate) flags: tcp::Flags,
}

impl Seen {
    fn now_s(&self) -> u32 {
        (self.now / 1_000_000_000) as u32
    }

    fn marks(&self, side: Side) -> u8 {
        session::marks(self.flow.protocol, self.flags, side == Side::Inside)
    }

    /// Whether the packet may start a session.
    fn opens(&self) -> bool {
        match self.flow.protocol {
            TCP => self.flags.contains(tcp::Flags::SYN) && !self.flags.contains(tcp::Flags::ACK),
            UDP => true,
            // The identifier is on the requester's side.
            _ => self.flow.source.port != 0,
        }
    }
}

impl Nat {
    /// Creates a table without sessions. Numbers out of range are clamped. All memory for IPv4 sessions is allocated
    /// now: 256 to 512 bytes each.
    pub fn new(config: NatConfig) -> Self {
        let cores = config.cores.clamp(1, 1024);
        let config = NatConfig { cores, sessions: config.sessions.clamp(1, SESSIONS_MAX), ..config };
        Nat {
            shared: Shared::new(config.sessions, config.seed),
            parts: (0..cores).map(|_| Mutex::default()).collect(),
            vpcs: (0..VPC_LOCKS).map(|_| Mutex::new(exact_map(config.seed))).collect(),
            block: (u16::MAX - FIRST_PORT + 1) / cores,
            hash: foldhash::fast::FixedState::with_seed(config.seed),
            many: AtomicBool::new(false),
            counts: Counts::default(),
            config,
        }
    }

    /// Current number of sessions.
    pub fn len(&self) -> usize {
        self.counts.sessions.load(Relaxed) as usize
    }

    /// Whether there are no sessions.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether prefetching sessions saves time: few of them stay in the caches anyway.
    #[inline]
    pub(crate) fn are_many(&self) -> bool {
        self.many.load(Relaxed)
    }

    /// Prefetches a flow's slot. With few sessions, which stay in the caches anyway, it does nothing.
    #[inline]
    pub(crate) fn fetch_ahead(&self, flow: &Flow) {
        if self.are_many() {
            self.shared.fetch_ahead(flow);
        }
    }

    /// The translation of a packet from the outside, without recording the packet.
    #[inline]
    pub(crate) fn glance(&self, flow: &Flow) -> Option<Flow> {
        self.shared.look(Side::Outside, flow)
    }

    /// Translates a packet from the inside. It may start a session, from an address of `pool` to `target`, or to the
    /// packet's own destination.
    #[inline]
    pub(crate) fn outward(&self, seen: Seen, pool: u32, target: Option<End>) -> Result<Flow, DropReason> {
        let marks = seen.marks(Side::Inside);
        match self.shared.find(Side::Inside, &seen.flow, seen.now_s(), marks) {
            Some(outside) => Ok(outside),
            None => self.begin(seen, pool, target),
        }
    }

    /// The translation of a packet from the inside, and whether its session exists already; changes nothing.
    #[cold]
    pub(crate) fn foresee_outward(
        &self,
        seen: Seen,
        pool: u32,
        target: Option<End>,
    ) -> Result<(Flow, bool), DropReason> {
        match self.known_outward(&seen.flow) {
            Some(outside) => Ok((outside, true)),
            None => {
                let outside = self.choose(self.part_of(&seen.flow) as u16, seen, pool, target)?;
                if self.is_full(seen.flow.network) { Err(DropReason::NatFull) } else { Ok((outside, false)) }
            }
        }
    }

    /// Translates a packet from the outside.
    #[inline]
    pub(crate) fn inward(&self, seen: Seen) -> Result<Flow, DropReason> {
        let marks = seen.marks(Side::Outside);
        self.shared.find(Side::Outside, &seen.flow, seen.now_s(), marks).ok_or(DropReason::NatNoSession)
    }

    /// The translation of a packet from the inside if it belongs to a session. For packets quoted in errors, which do
    /// not refresh the session.
    #[cold]
    pub(crate) fn known_outward(&self, flow: &Flow) -> Option<Flow> {
        self.shared.look(Side::Inside, flow)
    }

    /// The same for a packet from the outside.
    #[cold]
    pub(crate) fn known_inward(&self, flow: &Flow) -> Option<Flow> {
        self.shared.look(Side::Outside, flow)
    }

    /// The part under whose lock a session from the inside starts.
    pub(crate) fn part_of(&self, flow: &Flow) -> usize {
        ((u128::from(self.hash.hash_one(flow)) * self.parts.len() as u128) >> 64) as usize
    }

    #[cold]
    fn begin(&self, seen: Seen, pool: u32, target: Option<End>) -> Result<Flow, DropReason> {
        // Before the lock, so that a flood of such packets does not hold it.
        if !seen.opens() {
            return Err(DropReason::NatNoSession);
        }
        let (flow, now_s) = (seen.flow, seen.now_s());
        let number = self.part_of(&flow);
        let mut part = lock(&self.parts[number]);
        // Another core may have started it meanwhile.
        if let Some(outside) = self.shared.find(Side::Inside, &flow, now_s, seen.marks(Side::Inside)) {
            return Ok(outside);
        }
        self.clear(&mut part, flow.network, now_s);
        let outside = self.choose(number as u16, seen, pool, target)?;
        self.start(&mut part, &flow, &outside, (now_s, seen.marks(Side::Inside)), now_s)?;
        Ok(outside)
    }

    /// Starts a session with these marks, whose last packet was seen at `seen_s`, s. The caller has checked that
    /// neither flow exists, and holds the locks that keep other cores from starting one.
    pub(crate) fn start(
        &self,
        part: &mut Part,
        flow: &Flow,
        outside: &Flow,
        (seen_s, marks): (u32, u8),
        began_s: u32,
    ) -> Result<(), DropReason> {
        self.reserve(flow.network)?;
        // Inserts the outside first, so that a reply finds it.
        let slots =
            self.shared.insert(Side::Outside, &outside.reversed(), &flow.reversed(), seen_s, 0).and_then(|there| {
                let here = self.shared.insert(Side::Inside, flow, outside, seen_s, marks);
                if here.is_none() {
                    self.shared.remove(there);
                }
                here.map(|here| (here, there))
            });
        let Some((inside, outside)) = slots else {
            self.release(flow.network);
            return Err(DropReason::NatFull);
        };
        part.sessions.push(Entry { inside, outside, began_s });
        Ok(())
    }

    /// The part whose block contains a port, if any.
    pub(crate) fn part_of_port(&self, port: u16) -> Option<usize> {
        let number = usize::from(port.checked_sub(FIRST_PORT)? / self.block);
        (number < self.parts.len()).then_some(number)
    }

    /// The translation of the session that this packet starts.
    fn choose(&self, number: u16, seen: Seen, pool: u32, target: Option<End>) -> Result<Flow, DropReason> {
        if !seen.opens() {
            return Err(DropReason::NatNoSession);
        }
        let flow = seen.flow;
        let (network, addresses) = self.config.pools.get(pool as usize).ok_or(DropReason::NoTranslation)?;
        let destination = target.unwrap_or(flow.destination);
        let like = || addresses.iter().copied().filter(|a| a.is_ipv4() == destination.address.is_ipv4());
        let choice = self.hash.hash_one((flow.network, flow.source.address)) as usize;
        let address = like().nth(choice % like().count().max(1)).ok_or(DropReason::NoTranslation)?;
        let first = self.hash.hash_one((flow, seen.now_s())) as u16 % self.block;
        let ports = (0..TRIES.min(self.block)).map(|n| FIRST_PORT + number * self.block + (first + n) % self.block);
        let outside = |port| {
            let source = End { address, port };
            Flow { network: *network, protocol: flow.protocol, source, destination }
        };
        ports.map(outside).find(|o| self.known_inward(&o.reversed()).is_none()).ok_or(DropReason::NatFull)
    }

    /// Whether the maximum number of sessions is reached, in total or in a VPC.
    fn is_full(&self, vpc: u32) -> bool {
        let of_vpc = lock(self.vpc(vpc)).get(&vpc).copied().unwrap_or(0);
        self.counts.sessions.load(Relaxed) >= self.config.sessions || of_vpc >= self.share()
    }

    /// Maximum number of sessions of a VPC.
    fn share(&self) -> u32 {
        (self.config.sessions / 2).max(1)
    }

    /// Counts a session that starts.
    fn reserve(&self, vpc: u32) -> Result<(), DropReason> {
        let mut vpcs = lock(self.vpc(vpc));
        let of_vpc = vpcs.get(&vpc).copied().unwrap_or(0);
        let sessions = self.counts.sessions.fetch_add(1, Relaxed);
        if of_vpc >= self.share() || sessions >= self.config.sessions {
            self.counts.sessions.fetch_sub(1, Relaxed);
            return Err(DropReason::NatFull);
        }
        vpcs.insert(vpc, of_vpc + 1);
        if sessions + 1 >= MANY && !self.many.load(Relaxed) {
            self.many.store(true, Relaxed);
        }
        Ok(())
    }

    /// Counts a session that has ended.
    fn release(&self, vpc: u32) {
        let mut vpcs = lock(self.vpc(vpc));
        if let Some(of_vpc) = vpcs.get_mut(&vpc) {
            *of_vpc -= 1;
            if *of_vpc == 0 {
                vpcs.remove(&vpc);
            }
        }
        // The flag is cleared only at half the threshold, so that it does not change with every session.
        if self.counts.sessions.fetch_sub(1, Relaxed) <= MANY / 2 && self.many.load(Relaxed) {
            self.many.store(false, Relaxed);
        }
    }

    fn vpc(&self, vpc: u32) -> &Mutex<ExactMap<u32, u32>> {
        &self.vpcs[vpc as usize % VPC_LOCKS]
    }

    /// Looks for expired sessions, in this part and in one that no core uses right now.
    fn make_room(&self, part: &mut Part, now_s: u32) {
        self.sweep(part, now_s, SWEEP_WHEN_FULL);
        let other = self.counts.sweep.fetch_add(1, Relaxed) as usize % self.parts.len();
        // This part is locked already; waiting for another one could deadlock.
        if let Ok(mut other) = self.parts[other].try_lock() {
            self.sweep(&mut other, now_s, SWEEP_WHEN_FULL);
        }
    }

    /// When the last packet of a session was seen, s, and the marks of all its packets. The caller holds the lock of
    /// the session's part.
    pub(crate) fn noted(&self, entry: Entry) -> (u32, u8) {
        let notes = [entry.inside, entry.outside].map(|slot| self.shared.note_at(slot));
        (notes[0].seconds().max(notes[1].seconds()), notes[0].marks() | notes[1].marks())
    }

    /// Makes room for a session of a VPC by ending expired ones.
    pub(crate) fn clear(&self, part: &mut Part, vpc: u32, now_s: u32) {
        self.sweep(part, now_s, SWEEP);
        if self.is_full(vpc) {
            self.make_room(part, now_s);
        }
    }

    /// Removes the expired sessions among the next `count`.
    fn sweep(&self, part: &mut Part, now_s: u32, count: usize) {
        for _ in 0..count.min(part.sessions.len()) {
            if part.sweep >= part.sessions.len() {
                part.sweep = 0;
            }
            let entry = part.sessions[part.sweep];
            let (seen_s, marks) = self.noted(entry);
            let Entry { inside, outside, .. } = entry;
            let flow = self.shared.flow_at(inside);
            if !session::is_over(flow.protocol, marks, seen_s, now_s) {
                part.sweep += 1;
                continue;
            }
            part.sessions.swap_remove(part.sweep);
            self.shared.remove(inside);
            self.shared.remove(outside);
            self.release(flow.network);
        }
    }
}

/// If another core panicked while it held the lock, the data is still valid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
