//! Waiting packets, and how networks and connections share the paths of a peer: in [turns](crate::turns). An ACK for
//! one connection opens paths for all of them. Without turns, the connection with the most packets in flight would get
//! the most ACKs, and thus all the room.

use super::Engine;
use super::send::Admission;
use crate::conn::{Conn, Pending};
use crate::deadline::Key;
use crate::output::{Output, PeerId};
use bifrost_transport::time::Time;

/// Maximum waiting segments of an open connection; with one more buffer its guest is blocked.
const WAITING: usize = 64;

/// Why sending of a buffer stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// All of it was sent.
    Done,
    /// The connection's own window is closed, or pages are exhausted.
    Connection,
    /// Congestion control has closed all paths.
    Paths,
    /// It is another connection's turn.
    Turn,
}

impl Engine {
    /// Queues a buffer behind others, of its connection or of others to the same peer, unless too many wait already.
    #[inline(never)]
    pub(super) fn wait(&mut self, now: Time, index: u32, item: Pending, out: &mut Output) -> Admission {
        self.flush_pending(now, index, out);
        let Some(conn) = self.conns[index as usize].as_mut() else { return Admission::Blocked };
        Self::activate(conn, &mut self.spare);
        let Some(active) = conn.active.as_mut() else { return Admission::Blocked };
        if active.waiting() >= WAITING {
            active.blocked = true;
            self.counters.blocked_packets += 1;
            self.come_back(now, index);
            return Admission::Blocked;
        }
        active.pending.push_back(item);
        self.flush_pending(now, index, out);
        Admission::Accepted
    }

    /// Queues the rest of a partly sent buffer.
    #[cold]
    pub(super) fn keep_rest(&mut self, now: Time, index: u32, item: Pending, stop: Stop) {
        if let Some(active) = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut()) {
            active.pending.push_front(item);
        }
        self.stopped(now, index, stop);
    }

    /// Sends waiting packets of an open connection, as far as the windows allow and no other connection waits for the
    /// same paths.
    #[inline]
    pub(super) fn flush_pending(&mut self, now: Time, index: u32, out: &mut Output) {
        let waits = |conn: &Conn| conn.active.as_ref().is_some_and(|a| !a.pending.is_empty() && !a.queued);
        if self.conn(index).is_some_and(waits) {
            self.send_pending(now, index, out);
        }
    }

    #[inline(never)]
    fn send_pending(&mut self, now: Time, index: u32, out: &mut Output) {
        let Some(conn) = self.conn(index).filter(|c| c.is_open()) else { return };
        let id = conn.peer;
        let others_wait = self.peers[id.0 as usize].as_ref().is_some_and(|p| !p.waiting.is_empty());
        if others_wait {
            self.stopped(now, index, Stop::Paths);
            self.share(now, id, out);
            return;
        }
        let (stop, _) = self.send_waiting(now, index, u16::MAX, out);
        self.stopped(now, index, stop);
    }

    /// Sends at most `most` waiting packets of a connection. Returns why it stopped, and how many were sent.
    fn send_waiting(&mut self, now: Time, index: u32, most: u16, out: &mut Output) -> (Stop, u16) {
        let mut left = most;
        loop {
            let active = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut());
            let Some(mut item) = active.and_then(|a| a.pending.pop_front()) else { return (Stop::Done, most - left) };
            let before = item.count;
            let stop = self.send(now, index, &mut item, left, out);
            left -= u16::from(before - item.count);
            if stop != Stop::Done {
                if let Some(active) = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut()) {
                    active.pending.push_front(item);
                }
                return (stop, most - left);
            }
        }
    }

    /// A connection with waiting packets cannot send: it joins those that wait for the same paths, or waits by itself.
    fn stopped(&mut self, now: Time, index: u32, stop: Stop) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let (id, vni) = (conn.peer, conn.pair.vni);
        let (Some(active), Some(peer)) = (conn.active.as_mut(), self.peers[id.0 as usize].as_mut()) else { return };
        match stop {
            Stop::Paths | Stop::Turn if !active.queued => {
                active.queued = true;
                peer.waiting.join(vni, index);
                self.open_by_time(now, id);
            }
            Stop::Connection => self.come_back(now, index),
            Stop::Paths | Stop::Turn | Stop::Done => {}
        }
    }

    /// The connection may have nothing in flight whose ACK or timer would resume it.
    fn come_back(&mut self, now: Time, index: u32) {
        if self.conn(index).and_then(|c| c.active.as_ref()).is_some_and(|a| a.send.outstanding() == 0) {
            self.rearm_loss(now, index);
        }
    }

    /// Shares the room on a peer's paths among the waiting connections, in turns.
    #[inline]
    pub(super) fn share(&mut self, now: Time, id: PeerId, out: &mut Output) {
        if self.peers[id.0 as usize].as_ref().is_some_and(|peer| !peer.waiting.is_empty()) {
            self.take_turns(now, id, out);
        }
    }

    #[inline(never)]
    fn take_turns(&mut self, now: Time, id: PeerId, out: &mut Output) {
        // Each pass sends packets, or removes a waiting connection.
        loop {
            let Some(peer) = self.peers[id.0 as usize].as_mut() else { return };
            let Some(index) = peer.waiting.current() else { return };
            let conn = self.conns.get_mut(index as usize).and_then(Option::as_mut).filter(|c| c.peer == id);
            let (is_open, owner) = conn.as_ref().map_or((false, 0), |c| (c.is_open(), c.owner));
            let Some(active) = conn.and_then(|c| c.active.as_mut()).filter(|a| a.queued) else {
                peer.waiting.leave(0);
                continue;
            };
            if !is_open {
                active.queued = false;
                peer.waiting.leave(0);
                continue;
            }
            let turn = u16::try_from(peer.waiting.allowed(&self.weights, owner)).unwrap_or(u16::MAX);
            let (stop, sent) = self.send_waiting(now, index, turn, out);
            let Some(peer) = self.peers[id.0 as usize].as_mut() else { return };
            let Some(active) = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut()) else { return };
            match stop {
                Stop::Paths | Stop::Turn => {
                    peer.waiting.sent(sent.into());
                    if stop == Stop::Paths {
                        break;
                    }
                }
                Stop::Done | Stop::Connection => {
                    active.queued = false;
                    peer.waiting.leave(sent.into());
                    if stop == Stop::Connection {
                        self.come_back(now, index);
                    }
                }
            }
        }
        self.open_by_time(now, id);
    }

    /// Paces windows below one packet: arms a timer for paths for which connections wait.
    fn open_by_time(&mut self, now: Time, id: PeerId) {
        let Some(peer) = self.peers[id.0 as usize].as_mut() else { return };
        let opens = peer.selected().iter().filter_map(|p| peer.paths[p.index()].opens_at()).min();
        if let Some(at) = opens.map(|at| at.max(now.after(1))).filter(|at| *at < peer.share_armed) {
            peer.share_armed = at;
            self.timers.push(at, Key::Share(id.0));
        }
    }

    /// The pacing time of a path has come.
    pub(super) fn share_timeout(&mut self, now: Time, at: Time, id: u32, out: &mut Output) {
        let Some(peer) = self.peers.get_mut(id as usize).and_then(Option::as_mut) else { return };
        if peer.share_armed == at {
            peer.share_armed = Time::NEVER;
            self.share(now, PeerId(id), out);
        }
    }
}
