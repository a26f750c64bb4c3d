//! The engine: connections, peers, pools, and the calls that drive them. There is one file per concern; this one holds
//! the state and what all concerns share.

mod acknowledge;
mod connect;
mod mend;
mod receive;
mod recover;
mod resume;
mod send;
mod set_aside;
mod share;
mod timeout;

use bifrost_wire::Mac;
use bifrost_wire::bifrost::{Cid, PathId, Psn, Version};
use foldhash::fast::RandomState;
use hashbrown::HashMap;

use crate::config::{Config, Ordering};
use crate::conn::{Active, Conn, Pair, State};
use crate::counters::Counters;
use crate::deadline::{Key, Timers};
use crate::mutation::mutated;
use crate::output::{Output, PeerId, PlainOut};
use crate::peer::Peer;
use crate::recv_window::{RECEIVE_WINDOW, RecvPage};
use crate::send_window::SendPage;
use crate::turns::{Weight, Weights};
use bifrost_transport::pool::Pool;
use bifrost_transport::time::{MS, Time};

pub use receive::{Arrival, Slot, Verdict};
pub use send::{Admission, Destination, Outbound};

/// Bits of a CID's index that name the connection's place; the rest count reuses of that place.
const PLACE_BITS: u32 = 20;
const INDEX_MASK: u32 = Cid::MAX_INDEX;

/// A vNIC of this host, as far as connection set-up needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalVnic {
    /// The port to which it belongs.
    pub owner: u32,
    /// When its packets become visible.
    pub ordering: Ordering,
    /// Whether its VNI uses reliable transport at all.
    pub reliable: bool,
}

/// The reliable transport engine of one worker.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    /// When this daemon started, us since the epoch: a later start has a larger value.
    instance: u64,
    worker: u8,
    salt: u32,
    generation: u32,
    conns: Vec<Option<Conn>>,
    /// How often each place was reused, for CIDs.
    reuses: Vec<u8>,
    free: Vec<u32>,
    by_pair: HashMap<Pair, u32, RandomState>,
    /// The connection that sent last, if it still exists.
    last_sender: u32,
    by_peer_cid: HashMap<(PeerId, Cid), u32, RandomState>,
    peers: Vec<Option<Peer>>,
    /// By local port: the receive window that its connections announce, packets.
    receive_windows: Vec<u16>,
    /// How networks and ports share the paths of a peer.
    weights: Weights,
    send_pool: Pool<SendPage>,
    recv_pool: Pool<RecvPage>,
    /// Boxed, because they move between here and connections.
    #[allow(clippy::vec_box)]
    spare: Vec<Box<Active>>,
    timers: Timers,
    ack_ready: Vec<u32>,
    /// The connection that timers or acknowledgements are processing, for [`mend`](Self::mend).
    at_work: u32,
    stack: Vec<u32>,
    counters: Counters,
    reset_tokens: u32,
    reset_refill: Time,
}

impl Engine {
    /// An engine for worker `worker`. `instance`: start time of the daemon, us since the epoch. `salt`: any random
    /// number; it makes the CIDs of successive daemons differ.
    pub fn new(config: Config, worker: u8, instance: u64, salt: u32) -> Self {
        Engine {
            send_pool: Pool::new(config.max_pages),
            recv_pool: Pool::new(config.max_pages),
            config,
            instance,
            worker,
            salt: salt & INDEX_MASK,
            generation: 0,
            conns: Vec::new(),
            reuses: Vec::new(),
            free: Vec::new(),
            by_pair: HashMap::default(),
            last_sender: 0,
            by_peer_cid: HashMap::default(),
            peers: Vec::new(),
            receive_windows: Vec::new(),
            weights: Weights::default(),
            spare: Vec::new(),
            timers: Timers::default(),
            ack_ready: Vec::new(),
            at_work: mend::NOBODY,
            stack: Vec::new(),
            counters: Counters::default(),
            reset_tokens: RESETS_PER_REFILL,
            reset_refill: Time(0),
        }
    }

    /// Adds a peer host with `paths` paths (1..=8).
    pub fn add_peer(&mut self, paths: usize) -> PeerId {
        let peer = Some(Peer::new(&self.config, paths));
        match self.peers.iter().position(Option::is_none) {
            Some(free) => {
                self.peers[free] = peer;
                PeerId(free as u32)
            }
            None => {
                self.peers.push(peer);
                PeerId(self.peers.len() as u32 - 1)
            }
        }
    }

    /// Forgets a peer and its connections; the packets that they hold are sent as plain VXLAN.
    pub fn remove_peer(&mut self, peer: PeerId, out: &mut Output) {
        for index in 0..self.conns.len() as u32 {
            if self.conns[index as usize].as_ref().is_some_and(|c| c.peer == peer) {
                self.remove(index, out);
            }
        }
        if let Some(slot) = self.peers.get_mut(peer.0 as usize) {
            *slot = None;
        }
    }

    /// Sets the receive window that connections of a local port announce from the next set-up on, packets; clamped to
    /// 1..=4096, the protocol's maximum.
    pub fn set_receive_window(&mut self, owner: u32, packets: u32) {
        let at = owner as usize;
        if self.receive_windows.len() <= at {
            self.receive_windows.resize(at + 1, RECEIVE_WINDOW as u16);
        }
        self.receive_windows[at] = packets.clamp(1, RECEIVE_WINDOW) as u16;
    }

    fn receive_window(&self, owner: u32) -> u16 {
        self.receive_windows.get(owner as usize).copied().unwrap_or(RECEIVE_WINDOW as u16)
    }

    /// Sets a network's share of paths for which packets of several networks wait; 1 if never set.
    pub fn set_network_weight(&mut self, vni: u32, weight: Weight) {
        self.weights.set_network(vni, weight);
    }

    /// Sets a local port's share of what its network gets; 1 if never set.
    pub fn set_port_weight(&mut self, owner: u32, weight: Weight) {
        self.weights.set_port(owner, weight);
    }

    /// Forgets the connections of a local port that is removed together with its buffers.
    pub fn remove_owner(&mut self, owner: u32, out: &mut Output) {
        for index in 0..self.conns.len() as u32 {
            if self.conns[index as usize].as_ref().is_some_and(|c| c.owner == owner) {
                self.remove(index, out);
            }
        }
        Self::forget_owner(owner, out);
    }

    /// Drops all actions requested on behalf of a local port.
    fn forget_owner(owner: u32, out: &mut Output) {
        out.publish.retain(|p| p.0 != owner);
        out.release.retain(|p| p.0 != owner);
        out.plain.retain(|p| p.owner != owner);
        out.data.retain(|p| p.owner != owner);
    }

    /// Counters of what happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Connections that exist.
    pub fn connections(&self) -> usize {
        self.conns.len() - self.free.len()
    }

    /// Pages in use for sending and receiving, 64 packets each.
    pub fn pages_used(&self) -> (u32, u32) {
        (self.send_pool.used(), self.recv_pool.used())
    }

    /// The paths of a peer that are sprayed over now, best first; empty if the peer is unknown.
    pub fn selected_paths(&self, peer: PeerId) -> &[PathId] {
        self.peers.get(peer.0 as usize).and_then(Option::as_ref).map_or(&[], |p| p.selected())
    }

    /// Whether all paths to a peer have failed and none has answered since: then plain VXLAN packets to it are likely
    /// lost.
    pub fn has_fallen(&self, peer: PeerId) -> bool {
        self.peers.get(peer.0 as usize).and_then(Option::as_ref).is_some_and(|p| p.has_fallen)
    }

    /// Takes exactly these paths of a peer out of use, bit i for path i: they are no longer selected, unless all are
    /// out of use. Packets in flight on them complete, ACKs still take the path of the packets that they acknowledge,
    /// and probes continue.
    pub fn drain_paths(&mut self, now: Time, peer: PeerId, paths: u8) {
        let Some(of_peer) = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut) else { return };
        of_peer.drain(&self.config, now, paths);
        // Connections may be in the middle of a group.
        for active in self.conns.iter_mut().flatten().filter(|c| c.peer == peer).filter_map(|c| c.active.as_mut()) {
            PathId::all().filter(|path| of_peer.is_drained(*path)).for_each(|path| active.spray.leave(path));
        }
    }

    /// When [`on_timeout`](Self::on_timeout) must be called next, if at all.
    pub fn next_timeout(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Number of timer entries, superseded ones included.
    pub fn timers_pending(&self) -> usize {
        self.timers.len()
    }

    /// The local CID of a connection, for tests and displays.
    pub fn cid_of(&self, pair: Pair) -> Option<Cid> {
        self.by_pair.get(&pair).and_then(|&i| self.conns[i as usize].as_ref()).map(|c| c.local_cid)
    }

    /// State of a pair's connection.
    pub fn state_of(&self, pair: Pair) -> Option<State> {
        self.by_pair.get(&pair).and_then(|&i| self.conns[i as usize].as_ref()).map(|c| c.state)
    }

    /// Number of places for connections, taken or free.
    pub fn places(&self) -> u32 {
        self.conns.len() as u32
    }

    pub(crate) fn conn_slots(&self) -> impl Iterator<Item = &Conn> {
        self.conns.iter().flatten()
    }

    pub(crate) fn peer_slots(&self) -> impl Iterator<Item = (PeerId, &Peer)> {
        self.peers.iter().enumerate().filter_map(|(i, p)| p.as_ref().map(|p| (PeerId(i as u32), p)))
    }

    pub(crate) fn peer(&self, id: PeerId) -> Option<&Peer> {
        self.peers.get(id.0 as usize)?.as_ref()
    }

    pub(crate) fn conn(&self, index: u32) -> Option<&Conn> {
        self.conns.get(index as usize)?.as_ref()
    }

    /// The place that a CID of this engine names, if the connection there has exactly this CID.
    #[inline]
    fn lookup(&self, cid: Cid) -> Option<u32> {
        if cid.worker() != self.worker {
            return None;
        }
        let place = self.place_of(cid);
        let own = |c: &Conn| c.local_cid == cid || mutated!(self.config, StaleCidAccepted);
        self.conn(place).filter(|c| own(c)).map(|_| place)
    }

    /// The place that a CID of this engine names, whether taken or not.
    #[inline(always)]
    fn place_of(&self, cid: Cid) -> u32 {
        (cid.index() ^ self.salt) & ((1 << PLACE_BITS) - 1)
    }

    fn cid_at(&mut self, place: u32) -> Cid {
        let reuse = &mut self.reuses[place as usize];
        loop {
            *reuse = reuse.wrapping_add(1);
            let index = ((u32::from(*reuse) << PLACE_BITS) | place) & INDEX_MASK;
            let cid = Cid::new(self.worker, index ^ self.salt);
            if !cid.is_none() {
                return cid;
            }
        }
    }

    /// Creates a connection in state `state`; `None` if a limit is reached.
    fn create(
        &mut self,
        now: Time,
        pair: Pair,
        owner: u32,
        peer: PeerId,
        ordering: Ordering,
        state: State,
    ) -> Option<u32> {
        let of_peer = self.peers.get(peer.0 as usize)?.as_ref()?.connections;
        if of_peer >= self.config.max_connections_per_peer {
            return None;
        }
        let place = match self.free.pop() {
            Some(place) => place,
            None => {
                if self.conns.len() as u32 >= self.config.max_connections.min(1 << PLACE_BITS) {
                    return None;
                }
                self.conns.push(None);
                self.reuses.push(0);
                self.conns.len() as u32 - 1
            }
        };
        let local_cid = self.cid_at(place);
        self.generation = self.generation.wrapping_add(1);
        let twin = self.by_pair.get(&pair).copied();
        self.conns[place as usize] = Some(Conn {
            pair,
            owner,
            peer,
            peer_worker: None,
            state,
            version: Version::V1,
            responder: false,
            ordering,
            local_cid,
            heard: false,
            peer_cid: Cid::NONE,
            generation: self.generation,
            peer_epoch: None,
            window: self.config.initial_window,
            peer_window: u16::MAX,
            send_next: self.config.first_psn(),
            recv_base: self.config.first_psn(),
            active: None,
            last_activity: now,
            armed: Time::NEVER,
            superseded: Time::NEVER,
            idle_armed: Time::NEVER,
            twin: None,
            tx_packets: 0,
            rx_packets: 0,
            retransmitted_packets: 0,
            duplicate_packets: 0,
            given_up_packets: 0,
        });
        // The first connection of a pair carries its traffic; others (of other workers of the peer) follow in a list.
        match twin {
            None => {
                self.by_pair.insert(pair, place);
            }
            Some(first) => {
                let rest = self.conns[first as usize].as_mut().and_then(|c| c.twin.replace(place));
                if let Some(conn) = self.conns[place as usize].as_mut() {
                    conn.twin = rest;
                }
            }
        }
        if let Some(peer) = self.peers[peer.0 as usize].as_mut() {
            peer.connections += 1;
        }
        Some(place)
    }

    /// Forgets a connection. Packets that it has not finished sending leave as plain VXLAN; packets held for the guest
    /// become visible.
    fn remove(&mut self, index: u32, out: &mut Output) {
        self.surrender(index, out);
        self.deactivate(index);
        let Some(conn) = self.conns[index as usize].take() else { return };
        if self.by_pair.get(&conn.pair) == Some(&index) {
            match conn.twin {
                Some(next) => self.by_pair.insert(conn.pair, next),
                None => self.by_pair.remove(&conn.pair),
            };
        } else if let Some(&first) = self.by_pair.get(&conn.pair) {
            let mut at = Some(first);
            while let Some(i) = at {
                let Some(other) = self.conns[i as usize].as_mut() else { break };
                if other.twin == Some(index) {
                    other.twin = conn.twin;
                    break;
                }
                at = other.twin;
            }
        }
        self.by_peer_cid.remove(&(conn.peer, conn.peer_cid));
        if let Some(peer) = self.peers.get_mut(conn.peer.0 as usize).and_then(Option::as_mut) {
            peer.connections = peer.connections.saturating_sub(1);
            peer.forget_probes_of(index);
            peer.waiting.forget(conn.pair.vni, index);
        }
        self.free.push(index);
    }

    /// Sends everything that a connection has in flight or waiting as plain VXLAN, and publishes everything held for
    /// the guest.
    fn surrender(&mut self, index: u32, out: &mut Output) {
        self.surrender_sending(index, out);
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let owner = conn.owner;
        if let Some(active) = conn.active.as_mut() {
            active.recv.drain(&mut self.recv_pool, &mut |handle| out.publish.push((owner, handle)));
        }
    }

    /// Sends everything that a connection has in flight or waiting as plain VXLAN.
    fn surrender_sending(&mut self, index: u32, out: &mut Output) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(active) = conn.active.as_mut() else { return };
        let (owner, vni, peer) = (conn.owner, conn.pair.vni, conn.peer);
        let plain = |handle, segment| PlainOut { peer, vni, owner, handle, segment };
        let mut flight = [0u32; PathId::MAX];
        let given_up = u64::from(active.send.outstanding());
        self.counters.given_up_packets += given_up;
        conn.given_up_packets += given_up;
        active.send.drain(&mut self.send_pool, |record, in_flight| {
            flight[record.path().index()] += u32::from(in_flight);
            out.plain.push(plain(record.handle, record.segment));
        });
        for waiting in active.pending.drain(..).filter(|_| !mutated!(self.config, EndForgetsWaiting)) {
            self.counters.plain_packets += u64::from(waiting.count);
            out.plain.extend((0..waiting.count).map(|i| plain(waiting.handle, waiting.first.wrapping_add(i))));
        }
        self.land(peer, flight);
    }

    /// Packets of a connection are no longer in flight.
    fn land(&mut self, peer: PeerId, flight: [u32; PathId::MAX]) {
        if let Some(peer) = self.peers[peer.0 as usize].as_mut() {
            for (path, count) in peer.paths.iter_mut().zip(flight) {
                path.on_done(count);
            }
        }
    }

    /// Returns the traffic state of a quiet connection to the pool.
    fn deactivate(&mut self, index: u32) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(mut active) = conn.active.take() else { return };
        conn.send_next = active.send.next();
        conn.recv_base = active.recv.base();
        active.send.advance(&mut self.send_pool);
        active.reset(Psn(0), Psn(0));
        if self.spare.len() < 1024 {
            self.spare.push(active);
        }
    }

    /// Gives a connection traffic state if it has none.
    #[allow(clippy::vec_box)]
    #[inline]
    fn activate(conn: &mut Conn, spare: &mut Vec<Box<Active>>) {
        if conn.active.is_none() {
            conn.active = Some(Self::traffic_state(conn.send_next, conn.recv_base, spare));
        }
    }

    #[allow(clippy::vec_box)]
    #[cold]
    fn traffic_state(next: Psn, base: Psn, spare: &mut Vec<Box<Active>>) -> Box<Active> {
        match spare.pop() {
            Some(mut active) => {
                active.reset(next, base);
                active
            }
            None => Box::new(Active::new(next, base)),
        }
    }

    /// Arms a connection's timer for `at` unless it fires earlier anyway.
    fn arm(&mut self, index: u32, at: Time) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        if at >= conn.armed {
            return;
        }
        if conn.superseded <= at {
            // The deadline armed before a more urgent one is still queued. It is a little early, but saves a second
            // entry.
            conn.armed = std::mem::replace(&mut conn.superseded, Time::NEVER);
            return;
        }
        if conn.armed != Time::NEVER {
            conn.superseded = conn.armed;
        }
        conn.armed = at;
        self.timers.push(at, Key::Conn(index));
    }

    /// Arms the check of a connection's idleness, unless one is already pending.
    fn arm_idle(&mut self, index: u32, at: Time) {
        if let Some(conn) = self.conns[index as usize].as_mut()
            && conn.idle_armed == Time::NEVER
        {
            conn.idle_armed = at;
            self.timers.push(at, Key::Conn(index));
        }
    }

    /// Traffic on a connection keeps its peer's paths under observation.
    fn touch(&mut self, now: Time, index: u32) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        conn.last_activity = now;
        let leads = matches!(conn.state, State::Open | State::BestEffort);
        let id = conn.peer;
        let Some(peer) = self.peers[id.0 as usize].as_mut() else { return };
        if peer.touch(now, index, leads) {
            self.timers.push(now.after(MS), Key::Peer(id.0));
        }
    }

    /// A packet for a peer bypasses the engine as plain VXLAN. While such packets are sent, the peer's paths are probed
    /// by one of its connections, if there is one. See [`lacks_observer`](Self::lacks_observer).
    #[inline]
    pub fn note_plain(&mut self, now: Time, peer: PeerId) {
        if let Some(of_peer) = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut)
            && of_peer.touch(now, 0, false)
        {
            self.timers.push(now.after(MS), Key::Peer(peer.0));
        }
    }

    /// The connection of `pair` whose other end is worker `worker` of the peer, or is not known yet.
    fn of_pair(&self, pair: &Pair, worker: u8) -> Option<u32> {
        let mut at = self.by_pair.get(pair).copied();
        while let Some(index) = at {
            let conn = self.conn(index)?;
            if conn.peer_worker.is_none_or(|w| w == worker) {
                return Some(index);
            }
            at = conn.twin;
        }
        None
    }
}

/// Maximum RESETs per refill interval.
const RESETS_PER_REFILL: u32 = 32;

/// A pair as the peer sees it: mirrored.
pub(crate) fn mirrored(vni: u32, to: Mac, from: Mac) -> Pair {
    Pair { vni, local: to, remote: from }
}

#[cfg(test)]
mod tests;
