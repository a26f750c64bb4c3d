//! Sending: admission, windows, path, PSN (NSDI'26, 4.1 and 5.2 "TX workflow").

use bifrost_wire::Mac;
use bifrost_wire::bifrost::{DataHeader, PathId};

use super::Engine;
use crate::config::Ordering;
use crate::conn::{Conn, Pair, Pending, State};
use crate::output::{DataOut, Output, PeerId};
use crate::pool::PAGE;
use crate::send_window::SEND_WINDOW;
use crate::time::Time;

/// Where a guest's packet goes: the switch's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Network identifier.
    pub vni: u32,
    /// The port that holds the buffer.
    pub owner: u16,
    /// The sending vNIC.
    pub local: Mac,
    /// The receiving vNIC.
    pub remote: Mac,
    /// The host that it lives on.
    pub peer: PeerId,
    /// How packets of this VNI become visible on this host.
    pub ordering: Ordering,
}

/// A guest's packet: metadata only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outbound {
    /// Names the buffer.
    pub handle: u32,
    /// Packets that it becomes on the wire, 1..=255.
    pub segments: u8,
    /// Hash of its flow.
    pub flow: u32,
}

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The engine holds it until it is acknowledged; each segment is released once.
    Accepted,
    /// It cannot be carried reliably: send it as plain VXLAN; the engine holds nothing.
    Plain,
    /// A window is closed. Keep it, stop fetching from this guest, and try again after ACKs or timeouts.
    Blocked,
}

impl Engine {
    /// Sends a guest's packet.
    pub fn transmit(&mut self, now: Time, to: &Destination, packet: Outbound, out: &mut Output) -> Admission {
        let pair = Pair { vni: to.vni, local: to.local, remote: to.remote };
        let index = match self.by_pair.get(&pair) {
            Some(&index) => index,
            None => {
                let Some(peer) = self.peers.get(usize::from(to.peer.0)).and_then(Option::as_ref) else {
                    self.counters.plain_packets += u64::from(packet.segments);
                    return Admission::Plain;
                };
                if now < peer.plain_until {
                    self.counters.plain_packets += u64::from(packet.segments);
                    return Admission::Plain;
                }
                match self.open(now, pair, to, out) {
                    Some(index) => index,
                    None => {
                        self.counters.plain_packets += u64::from(packet.segments);
                        return Admission::Plain;
                    }
                }
            }
        };
        let Some(conn) = self.conns[index as usize].as_mut() else { return Admission::Plain };
        conn.ordering = to.ordering;
        if conn.peer != to.peer {
            // The vNIC moved to another host: the old connection ends there.
            self.remove(index, out);
            return self.transmit(now, to, packet, out);
        }
        match conn.state {
            State::Open => {}
            State::Opening { background: false, .. } => {
                Self::activate(conn, &mut self.spare);
                let limit = usize::from(self.config.setup_queue_packets);
                let Some(active) = conn.active.as_mut() else { return Admission::Plain };
                let waiting: usize = active.pending.iter().map(|p| usize::from(p.count)).sum();
                if waiting > 0 && waiting + usize::from(packet.segments) > limit {
                    self.counters.blocked_packets += 1;
                    return Admission::Blocked;
                }
                active.pending.push_back(Pending {
                    handle: packet.handle,
                    first: 0,
                    count: packet.segments,
                    flow: Some(packet.flow),
                });
                return Admission::Accepted;
            }
            State::Plain { until } if now >= until => {
                self.reopen(now, index, true, out);
                self.counters.plain_packets += u64::from(packet.segments);
                return Admission::Plain;
            }
            State::BestEffort => {
                self.touch(now, index);
                self.counters.plain_packets += u64::from(packet.segments);
                return Admission::Plain;
            }
            State::Opening { .. } | State::Plain { .. } => {
                self.counters.plain_packets += u64::from(packet.segments);
                return Admission::Plain;
            }
        }
        let item = Pending { handle: packet.handle, first: 0, count: packet.segments, flow: Some(packet.flow) };
        let waiting = conn.active.as_ref().is_some_and(|a| !a.pending.is_empty());
        if waiting || !self.send(now, index, item, out) {
            self.counters.blocked_packets += 1;
            return Admission::Blocked;
        }
        self.after_sending(now, index);
        Admission::Accepted
    }

    /// Sends what waited for the connection to open, as far as the windows allow.
    pub(super) fn flush_pending(&mut self, now: Time, index: u32, out: &mut Output) {
        let mut sent = false;
        loop {
            let Some(conn) = self.conns[index as usize].as_mut() else { return };
            if !conn.is_open() {
                return;
            }
            let Some(item) = conn.active.as_ref().and_then(|a| a.pending.front().copied()) else { break };
            if !self.send(now, index, item, out) {
                break;
            }
            sent = true;
            if let Some(active) = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut()) {
                active.pending.pop_front();
            }
        }
        if sent {
            self.after_sending(now, index);
        }
    }

    /// Gives all segments of one buffer their PSNs and a common path; false when a window is closed.
    fn send(&mut self, now: Time, index: u32, item: Pending, out: &mut Output) -> bool {
        let Some(conn) = self.conns[index as usize].as_mut() else { return false };
        Self::activate(conn, &mut self.spare);
        let cc = match self.config.congestion_control {
            crate::config::CcKind::Swift => bifrost_wire::bifrost::cc::SWIFT,
            crate::config::CcKind::None => bifrost_wire::bifrost::cc::NONE,
        };
        let Conn { active: Some(active), peer, .. } = conn else { return false };
        let Some(peer) = self.peers[usize::from(peer.0)].as_mut() else { return false };
        let count = u32::from(item.count);
        let window = u32::from(conn.window.min(conn.peer_window)).min(SEND_WINDOW);
        let closed = active.send.span() + count > window && active.send.span() > 0;
        let no_pages = self.send_pool.available() < count / PAGE + 2;
        if closed || no_pages || active.send.span() + count > SEND_WINDOW {
            active.blocked = true;
            return false;
        }
        let Some(path) = active.spray.choose(peer, &self.config, now, u16::from(item.count)) else {
            active.blocked = true;
            return false;
        };
        let tick = now.tick();
        let una = active.send.una();
        if active.send.outstanding() == 0 {
            active.loss.heard = now;
        }
        for i in 0..item.count {
            let segment = item.first.wrapping_add(i);
            let psn = active.send.next();
            let distance = match item.flow {
                _ if !conn.version.has_distance() => 0,
                None => 0,
                Some(flow) if i == 0 => active.flows.distance(flow, psn, una),
                Some(flow) => {
                    active.flows.note(flow, psn);
                    1
                }
            };
            if active.send.push(&mut self.send_pool, item.handle, segment, path, tick, distance).is_none() {
                break; // cannot happen: pages and window were checked
            }
            let header = DataHeader {
                version: conn.version,
                cc,
                probe: false,
                ack_now: false,
                from_responder: conn.responder,
                ecn: true,
                retransmit: false,
                path,
                distance,
                psn,
                cid: conn.peer_cid,
                timestamp: tick,
            };
            out.data.push(DataOut {
                peer: conn.peer,
                vni: conn.pair.vni,
                owner: conn.owner,
                handle: item.handle,
                segment,
                header,
            });
        }
        peer.paths[path.index()].on_sent(now, count);
        conn.tx_packets += u64::from(count);
        self.counters.sent_packets += u64::from(count);
        true
    }

    /// Timers and observation after packets left.
    fn after_sending(&mut self, now: Time, index: u32) {
        if let Some(active) = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut()) {
            active.loss.last_event = now;
        }
        self.touch(now, index);
        self.rearm_loss(now, index);
    }

    /// Sends the record of `psn` again, on another path if there is one.
    pub(super) fn resend(
        &mut self,
        now: Time,
        index: u32,
        psn: bifrost_wire::bifrost::Psn,
        again: Again,
        out: &mut Output,
    ) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Conn { active: Some(active), peer: peer_id, .. } = conn else { return };
        let Some(peer) = self.peers[usize::from(peer_id.0)].as_mut() else { return };
        let Some(before) = active.send.record(&self.send_pool, psn) else { return };
        let path = peer.other_than(before.path());
        // A packet that was lost twice, or late already, goes out on two paths at once.
        let timeout = again == Again::Timeout;
        let copy = (again != Again::Lost || before.is_retransmitted()).then(|| second_path(peer, path)).flatten();
        let why = crate::send_window::Resend { timeout, copied: copy.is_some() };
        let tick = now.tick();
        active.send.resend(&mut self.send_pool, psn, path, tick, why);
        peer.paths[before.path().index()].on_done(1);
        peer.paths[path.index()].on_sent(now, 1);
        let header = DataHeader {
            version: conn.version,
            cc: peer.paths[path.index()].cc.wire_type(),
            probe: false,
            ack_now: true,
            from_responder: conn.responder,
            ecn: true,
            retransmit: true,
            path,
            distance: before.distance(),
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
        if let Some(path) = copy {
            out.data.push(DataOut { header: DataHeader { path, ..header }, ..data });
            self.counters.copied_packets += 1;
        }
    }
}

/// Why a packet is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// It was found lost while others arrive.
    Lost,
    /// Nothing is heard: it asks for an answer.
    Probe,
    /// Its RTO expired.
    Timeout,
}

fn second_path(peer: &crate::peer::Peer, first: PathId) -> Option<PathId> {
    let second = peer.other_than(first);
    (second != first).then_some(second)
}
