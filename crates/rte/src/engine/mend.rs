//! Recovery after a panic: removes the connection being processed, and rebuilds all state derived from the others.
//!
//! A panic unwinds from the middle of a call. The connection being processed may then be inconsistent, and so may every
//! index over connections. Other connections are consistent, because a call processes one at a time.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bifrost_wire::bifrost::Cid;

use super::Engine;
use crate::deadline::{Key, Timers};
use crate::output::Output;
use bifrost_transport::time::{MS, Time};

/// No connection is being processed.
pub(super) const NOBODY: u32 = u32::MAX;

impl Engine {
    /// Makes the engine usable after a panic in one of its calls, or while its caller handled their results. Drops the
    /// connection being processed by timers or acknowledgements, the one named by `cid`, and all of port `owner`. Peers
    /// learn of it by a RESET, or set up a connection themselves. Returns the port of the connection that was being
    /// processed, if there was one.
    ///
    /// Packets held by a dropped connection are sent as plain VXLAN or shown, unless it belongs to `owner`: these are
    /// discarded, also in `out`. Takes time proportional to the number of connections.
    pub fn mend(&mut self, now: Time, owner: Option<u32>, cid: Option<Cid>, out: &mut Output) -> Option<u32> {
        let at_work = std::mem::replace(&mut self.at_work, NOBODY);
        let at_work = cid.and_then(|cid| self.lookup(cid)).unwrap_or(at_work);
        let of_work = self.conn(at_work).map(|conn| conn.owner);
        for index in 0..self.conns.len() as u32 {
            let is_owners = |o: u32| owner == Some(o);
            if self.conn(index).is_some_and(|conn| index == at_work || is_owners(conn.owner)) {
                self.drop_suspect(index, out);
            }
        }
        if let Some(owner) = owner {
            Self::forget_owner(owner, out);
        }
        self.rebuild(now);
        of_work
    }

    /// Removes a connection in order if that is still possible, and otherwise abandons it.
    fn drop_suspect(&mut self, index: u32, out: &mut Output) {
        self.counters.faulted_connections += 1;
        // `remove` walks the connection's windows, which may be inconsistent.
        if catch_unwind(AssertUnwindSafe(|| self.remove(index, out))).is_ok() {
            return;
        }
        let Some(conn) = self.conns[index as usize].take() else { return };
        // Its pages are lost to the pool, which is bounded; its packets in flight per path are unknown. A count that is
        // briefly too low is better than a window that never opens again; it is exact once everything else has been
        // acknowledged.
        if let Some(peer) = self.peers.get_mut(conn.peer.0 as usize).and_then(Option::as_mut) {
            peer.paths.iter_mut().for_each(|path| path.in_flight = 0);
        }
    }

    /// Rebuilds every index, list and deadline from connections and peers.
    fn rebuild(&mut self, now: Time) {
        let count = self.conns.len() as u32;
        self.free.clear();
        self.free.extend((0..count).filter(|&index| self.conns[index as usize].is_none()));
        self.ack_ready.clear();
        self.stack.clear();
        self.by_peer_cid.clear();
        self.timers = Timers::beginning(now);
        for peer in self.peers.iter_mut().flatten() {
            peer.connections = 0;
            peer.waiting.clear();
            peer.share_armed = Time::NEVER;
        }
        // The first connection of a pair carries its traffic, and stays the first.
        let firsts = std::mem::take(&mut self.by_pair);
        let is_of = |index: u32, pair| self.conn(index).is_some_and(|conn| conn.pair == pair);
        self.by_pair = firsts.into_iter().filter(|&(pair, first)| is_of(first, pair)).collect();
        for index in 0..count {
            let Some(conn) = self.conns[index as usize].as_mut() else { continue };
            conn.twin = None;
            // A connection with waiting packets rejoins the others when its timer expires.
            if let Some(active) = conn.active.as_mut() {
                active.queued = false;
                if !active.pending.is_empty() {
                    conn.armed = conn.armed.min(now.after(MS));
                }
            }
            if conn.active.as_ref().is_some_and(|active| active.ack.queued) {
                self.ack_ready.push(index);
            }
            for at in [conn.armed, conn.superseded, conn.idle_armed].into_iter().filter(|at| *at != Time::NEVER) {
                self.timers.push(at, Key::Conn(index));
            }
            if !conn.peer_cid.is_none() {
                self.by_peer_cid.insert((conn.peer, conn.peer_cid), index);
            }
            if let Some(peer) = self.peers.get_mut(conn.peer.0 as usize).and_then(Option::as_mut) {
                peer.connections += 1;
            }
        }
        for index in 0..count {
            let Some(pair) = self.conn(index).map(|conn| conn.pair) else { continue };
            let first = *self.by_pair.entry(pair).or_insert(index);
            if first == index {
                continue;
            }
            let rest = self.conns[first as usize].as_mut().and_then(|conn| conn.twin.replace(index));
            if let Some(conn) = self.conns[index as usize].as_mut() {
                conn.twin = rest;
            }
        }
        for id in 0..self.peers.len() as u32 {
            let Some(peer) = self.peers[id as usize].as_mut() else { continue };
            let probes = peer.probe_conn.and_then(|index| self.conns.get(index as usize)?.as_ref());
            if probes.is_none_or(|conn| conn.peer.0 != id) {
                peer.probe_conn = None;
            }
            peer.invalidate();
            if peer.probe_timer_armed {
                self.timers.push(now.after(MS), Key::Peer(id));
            }
        }
    }
}
