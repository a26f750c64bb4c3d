//! Sending again: when a packet leaves once more, and on which paths.
//!
//! What a queue has dropped leaves when a path has room, and so does everything while all paths lose much or have windows below one
//! packet: repairs that leave at once would keep the queue full that has dropped them. Such a repair waits in the connection's list, ahead of what it
//! has not sent yet. Other repairs leave at once: waiting for damage, or to learn of a dead path, costs more than a few copies.

use bifrost_wire::bifrost::{DataHeader, PathId, Psn};

use super::Engine;
use super::share::Stop;
use crate::conn::Conn;
use crate::mutation::mutated;
use crate::output::{DataOut, Output};
use crate::peer::Peer;
use crate::send_window::Resend;
use bifrost_transport::time::Time;

/// Why a packet is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// It was found lost while others arrive.
    Lost,
    /// The same, and a queue has dropped it.
    Dropped,
    /// Nothing is heard: it asks for an answer.
    Probe,
    /// Its RTO expired.
    Timeout,
    /// The same, of a packet that the peer has received and not taken, and the next one is not to be longer.
    Refused,
}

impl Engine {
    /// Sends a packet again, on another path if there is one, or has it wait until congestion control lets it.
    pub(super) fn repair(&mut self, now: Time, index: u32, psn: Psn, again: Again, out: &mut Output) {
        if !self.resend(now, index, psn, again, out) {
            self.put_off(index, psn, again == Again::Timeout);
            self.stopped(now, index, Stop::Paths);
        }
    }

    /// Sends at most `most` of the repairs of a connection that wait. Returns how many, and whether others wait for the paths.
    pub(super) fn send_repairs(&mut self, now: Time, index: u32, most: u16, out: &mut Output) -> (u16, bool) {
        let mut sent = 0;
        while sent < most {
            let active = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut());
            let Some(psn) = active.and_then(|a| a.send.first_repair(&self.send_pool)) else { break };
            if !self.resend(now, index, psn, Again::Dropped, out) {
                return (sent, true);
            }
            sent += 1;
        }
        if sent > 0 {
            self.rearm_loss(now, index);
        }
        (sent, false)
    }

    /// Sends a packet again if congestion control lets it, and returns whether it has left.
    fn resend(&mut self, now: Time, index: u32, psn: Psn, again: Again, out: &mut Output) -> bool {
        let Some(conn) = self.conns[index as usize].as_mut() else { return true };
        let Conn { active: Some(active), peer: peer_id, .. } = conn else { return true };
        let Some(peer) = self.peers[usize::from(peer_id.0)].as_mut() else { return true };
        let Some(before) = active.send.record(&self.send_pool, psn) else { return true };
        let in_flight = active.send.is_in_flight(&self.send_pool, psn);
        let late = !matches!(again, Again::Lost | Again::Dropped);
        let full = peer.is_throttled() || peer.loses_everywhere();
        let gentle = again == Again::Dropped || full && again != Again::Refused;
        let asks = again == Again::Probe;
        let left = Time(now.0.saturating_sub(now.tick().since(before.sent).max(0) as u64));
        let other = peer.other_than(now, 1 << before.path().get(), left);
        let path = if gentle { gently(peer, now, before.path(), other, in_flight, asks) } else { Some(other) };
        let Some(path) = path else { return false };
        // It goes out on two paths at once, where congestion control would not rather have less: waiting for it once more
        // costs more than the few copies. What is late already goes out so in any case; and when two paths have not
        // helped, on all.
        let timeout = again == Again::Timeout;
        let mut copies = [None; PathId::MAX];
        if !in_flight || again == Again::Dropped {
            // Copies would meet a peer that has no room, or fill a queue that is full.
        } else if timeout && before.rtos() > 0 && !gentle {
            let others = peer.selected().iter().filter(|other| **other != path);
            others.zip(&mut copies).for_each(|(other, copy)| *copy = Some(*other));
        } else {
            let second = peer.other_than(now, 1 << path.get(), left);
            let fits = late && !gentle || peer.paths[second.index()].has_room(now);
            copies[0] = (second != path && fits).then_some(second);
        }
        let why = Resend { timeout, copied: copies[0].is_some(), postponed: false };
        let tick = now.tick();
        active.send.resend(&mut self.send_pool, psn, path, tick, why);
        peer.paths[before.path().index()].on_done(u32::from(in_flight));
        peer.paths[path.index()].on_sent(now, 1);
        if late && in_flight && active.room == u16::MAX {
            copies.into_iter().flatten().chain([path]).for_each(|asked| peer.paths[asked.index()].ask(now));
        }
        let header = DataHeader {
            version: conn.version,
            cc: peer.paths[path.index()].wire_type(),
            probe: false,
            ack_now: true,
            from_responder: conn.responder,
            ecn: true,
            retransmit: true,
            path,
            distance: if mutated!(self.config, RetransmissionDistance) { 1 } else { before.distance() },
            psn,
            cid: conn.peer_cid,
            timestamp: tick,
        };
        let data = DataOut {
            peer: conn.peer,
            vni: conn.pair.vni,
            owner: conn.owner,
            handle: before.handle,
            segment: before.segment,
            header,
        };
        out.data.push(data);
        conn.retransmitted_packets += 1;
        self.counters.retransmitted_packets += 1;
        for path in copies.into_iter().flatten() {
            out.data.push(DataOut { header: DataHeader { path, ..header }, ..data });
            self.counters.copied_packets += 1;
        }
        true
    }

    /// A packet waits to be sent again, and is in flight on no path.
    fn put_off(&mut self, index: u32, psn: Psn, timeout: bool) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Conn { active: Some(active), peer: peer_id, .. } = conn else { return };
        let Some(peer) = self.peers[usize::from(peer_id.0)].as_mut() else { return };
        if let Some(record) = active.send.put_off(&mut self.send_pool, psn, timeout) {
            peer.paths[record.path().index()].on_done(1);
        }
        self.counters.deferred_packets += 1;
    }
}

/// The path on which a packet that was lost on `own` leaves if windows count: `other`, if that has room; else a selected one that has.
/// `None` if it must wait. What `asks` for an answer needs no room, for what takes it may long be lost; but windows below one packet give
/// it its turn.
fn gently(peer: &Peer, now: Time, own: PathId, other: PathId, in_flight: bool, asks: bool) -> Option<PathId> {
    let path = |id: PathId| &peer.paths[id.index()];
    if other != own && (path(other).has_room(now) || asks && now >= path(other).pace_until) {
        return Some(other);
    }
    let others = peer.selected().iter().copied().filter(|id| *id != own && path(*id).has_room(now));
    // The place that it leaves is free.
    let has_room = || peer.selected().contains(&own) && path(own).has_room_without(now, u32::from(in_flight));
    others.min_by_key(|id| path(*id).in_flight).or_else(|| has_room().then_some(own))
}

#[cfg(test)]
mod tests {
    use bifrost_transport::cc::Loss;
    use bifrost_transport::time::{MS, US};

    use super::*;
    use crate::config::Config;

    /// The path for a packet that was lost on path 0, of two.
    fn choice(peer: &Peer, now: Time, asks: bool) -> Option<u8> {
        gently(peer, now, PathId::masked(0), PathId::masked(1), false, asks).map(PathId::get)
    }

    #[test]
    fn while_repairs_wait_a_probe_leaves_without_room_but_at_the_pace_of_a_window_below_one_packet() {
        let config = Config { spray_paths: 2, initial_window: 16, ..Config::default() };
        let mut peer = Peer::new(&config, 2);
        for path in &mut peer.paths {
            path.total.sample(Time(0), 100 * US as i64);
            path.on_sent(Time(0), 8);
        }
        let now = Time(MS);
        assert_eq!((choice(&peer, now, false), choice(&peer, now, true)), (None, Some(1)), "windows are full");
        peer.paths[0].on_done(1);
        assert_eq!(choice(&peer, now, false), Some(0), "its own has room");
        for path in &mut peer.paths {
            for ms in 2..4 {
                let (rtt_ns, base_delay_ns) = (100 * US, 50 * US);
                let sent = Time(ms * MS - US);
                let loss = Loss { sent, rtt_ns, base_delay_ns, queue_ns: 0, congestion: true, everywhere: true };
                path.congestion(|cc| cc.on_loss(Time(ms * MS), &loss));
            }
            assert_eq!(path.window(), 0.25);
            path.on_sent(Time(4 * MS), 1);
        }
        assert!(peer.is_throttled());
        let at = |us: u64| Time(4 * MS + us * US);
        assert_eq!((choice(&peer, at(399), true), choice(&peer, at(400), true)), (None, Some(1)), "four round trips");
        assert_eq!(choice(&peer, at(400), false), None, "what does not ask waits for the answer");
    }
}
