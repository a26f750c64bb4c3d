//! Sending: admission, windows, paths, PSNs (NSDI'26, 4.1 and 5.2 "TX workflow").

use bifrost_wire::Mac;
use bifrost_wire::bifrost::{Cid, DataHeader, PathId, Psn, Version};

use super::Engine;
use super::share::Stop;
use crate::config::{CcKind, Config, Ordering};
use crate::conn::{Active, Conn, Pair, Pending, State};
use crate::deadline::Key;
use crate::mutation::mutated;
use crate::output::{DataOut, Output, PeerId};
use crate::send_window::{SEND_WINDOW, SendPage};
use bifrost_transport::pool::{PAGE, Pool};
use bifrost_transport::time::{MS, Time};

/// Where a guest's packet goes: the switch's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Network identifier.
    pub vni: u32,
    /// The port that holds the buffer.
    pub owner: u32,
    /// The sending vNIC.
    pub local: Mac,
    /// The receiving vNIC.
    pub remote: Mac,
    /// The host of the receiving vNIC.
    pub peer: PeerId,
    /// When packets of this VNI become visible on this host.
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

impl Destination {
    /// The two vNICs of the connection to this destination.
    pub(super) fn pair(&self) -> Pair {
        Pair { vni: self.vni, local: self.local, remote: self.remote }
    }
}

/// Result of [`Engine::transmit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The engine holds it until it is acknowledged; each segment is released once.
    Accepted,
    /// It cannot be carried reliably: send it as plain VXLAN; the engine does not hold it.
    Plain,
    /// A window is closed. Keep it, stop fetching from this guest, and try again after ACKs or timeouts.
    Blocked,
}

impl Engine {
    /// Sends a guest's packet.
    pub fn transmit(&mut self, now: Time, to: &Destination, packet: Outbound, out: &mut Output) -> Admission {
        // Packets come in bursts: check the connection that sent last before looking up the table.
        let is_last = self.conn(self.last_sender).is_some_and(|conn| conn.leads_to(to));
        if !is_last && !self.find_sender(to) {
            return self.transmit_unopened(now, to, packet, out);
        }
        if packet.segments == 1 && self.send_at_once(now, to.ordering, packet, out) {
            return Admission::Accepted;
        }
        self.transmit_open(now, self.last_sender, to.ordering, packet, out)
    }

    /// Sends a packet of one segment on the last sender's connection if nothing prevents it: nothing waits, all windows
    /// are open, and the path in use stays. Otherwise changes nothing and returns false.
    #[inline(always)]
    fn send_at_once(&mut self, now: Time, ordering: Ordering, packet: Outbound, out: &mut Output) -> bool {
        let index = self.last_sender;
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else { return false };
        let Some(active) = conn.active.as_deref_mut() else { return false };
        let Some(Some(peer)) = self.peers.get_mut(conn.peer.0 as usize) else { return false };
        let window = conn.window.min(conn.peer_window).min(active.room);
        let waits = !active.pending.is_empty() || !peer.waiting.is_empty();
        if waits
            || !peer.probe_timer_armed
            || active.send.span() >= u32::from(window).min(SEND_WINDOW)
            || self.send_pool.available() < 2
            || mutated!(self.config, ReleaseBeforeAck)
        {
            return false;
        }
        let Some(path) = active.spray.keep(peer, now, 1) else { return false };
        if active.send.outstanding() == 0 {
            (active.loss.heard, active.loss.last_progress) = (now, now);
        }
        conn.ordering = ordering;
        conn.tx_packets += 1;
        conn.last_activity = now;
        self.counters.sent_packets += 1;
        peer.touch(now, index, true);
        let header =
            data_header(conn.version, conn.responder, conn.peer_cid, &self.config, now, path, active.send.next());
        let (vni, owner) = (conn.pair.vni, conn.owner);
        let data = DataOut { peer: conn.peer, vni, owner, handle: packet.handle, segment: 0, header };
        leave(active, &mut self.send_pool, data, Some(packet.flow), out);
        if active.loss.deadline == Time::NEVER {
            self.rearm_loss(now, index);
        }
        true
    }

    /// Makes the open connection to a destination the last sender, if there is one.
    #[inline]
    fn find_sender(&mut self, to: &Destination) -> bool {
        let named = self.by_pair.get(&to.pair()).copied();
        let found = named.filter(|&index| self.conn(index).is_some_and(|conn| conn.leads_to(to)));
        self.last_sender = found.unwrap_or(self.last_sender);
        found.is_some()
    }

    #[inline(never)]
    fn transmit_open(
        &mut self,
        now: Time,
        index: u32,
        ordering: Ordering,
        packet: Outbound,
        out: &mut Output,
    ) -> Admission {
        let item = Pending { handle: packet.handle, first: 0, count: packet.segments, flow: Some(packet.flow) };
        match self.send_on_one_path(now, index, item, Turn::Free(ordering), out) {
            Ok(sent) if sent == u16::from(item.count) => Admission::Accepted,
            Err(Stop::Turn) => self.wait(now, index, item, out),
            first => {
                self.send_rest(now, index, item, first, out);
                Admission::Accepted
            }
        }
    }

    /// Continues with a buffer of which not everything could leave at once. What cannot leave now waits.
    #[inline(never)]
    fn send_rest(&mut self, now: Time, index: u32, mut item: Pending, first: Result<u16, Stop>, out: &mut Output) {
        let stop = match first {
            Ok(sent) => {
                item.advance(sent);
                self.send(now, index, &mut item, u16::MAX, out)
            }
            Err(stop) => stop,
        };
        if stop != Stop::Done {
            self.keep_rest(now, index, item, stop);
        }
    }

    /// Handles a packet whose pair has no open connection to its destination.
    #[cold]
    #[inline(never)]
    fn transmit_unopened(&mut self, now: Time, to: &Destination, packet: Outbound, out: &mut Output) -> Admission {
        let admission = self.admit_unopened(now, to, packet, out);
        if admission == Admission::Plain {
            self.counters.plain_packets += u64::from(packet.segments);
        }
        admission
    }

    fn admit_unopened(&mut self, now: Time, to: &Destination, packet: Outbound, out: &mut Output) -> Admission {
        let pair = to.pair();
        // The vNIC has moved to another host: connections to the old host end here.
        while let Some(&index) = self.by_pair.get(&pair)
            && self.conn(index).is_some_and(|c| c.peer != to.peer)
        {
            self.remove(index, out);
        }
        let index = match self.by_pair.get(&pair) {
            Some(&index) => index,
            None => {
                let peer = self.peers.get(to.peer.0 as usize).and_then(Option::as_ref);
                if peer.is_none_or(|peer| now < peer.plain_until) {
                    return Admission::Plain;
                }
                let Some(index) = self.open(now, pair, to, out) else { return Admission::Plain };
                index
            }
        };
        let Some(conn) = self.conns[index as usize].as_mut() else { return Admission::Plain };
        conn.ordering = to.ordering;
        match conn.state {
            // It was not the first in the list.
            State::Open => self.transmit(now, to, packet, out),
            State::Opening { background: false, .. } => {
                Self::activate(conn, &mut self.spare);
                let limit = usize::from(self.config.setup_queue_packets);
                let Some(active) = conn.active.as_mut() else { return Admission::Plain };
                let waiting = active.waiting();
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
                Admission::Accepted
            }
            State::Plain { until, .. } if now >= until => {
                self.reopen(now, index, true, out);
                Admission::Plain
            }
            State::BestEffort => {
                self.touch(now, index);
                Admission::Plain
            }
            State::Opening { .. } | State::Plain { .. } => Admission::Plain,
        }
    }

    /// Sends as many segments of one buffer of an open connection as the windows allow, at most `most`, and assigns
    /// their PSNs and paths. `item` then contains the rest.
    #[inline(never)]
    pub(super) fn send(&mut self, now: Time, index: u32, item: &mut Pending, most: u16, out: &mut Output) -> Stop {
        let mut left = most;
        while item.count > 0 {
            if left == 0 {
                return Stop::Turn;
            }
            match self.send_on_one_path(now, index, *item, Turn::Own(left), out) {
                Ok(sent) => {
                    item.advance(sent);
                    left -= sent;
                }
                Err(stop) => return stop,
            }
        }
        Stop::Done
    }

    /// Sends the first segments of `item`, as many as one path can take, and returns their number.
    #[inline(always)]
    fn send_on_one_path(
        &mut self,
        now: Time,
        index: u32,
        item: Pending,
        turn: Turn,
        out: &mut Output,
    ) -> Result<u16, Stop> {
        let Some(conn) = self.conns[index as usize].as_mut() else { return Err(Stop::Connection) };
        Self::activate(conn, &mut self.spare);
        let Some(active) = conn.active.as_deref_mut() else { return Err(Stop::Connection) };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_mut() else { return Err(Stop::Connection) };
        let most = match turn {
            Turn::Free(_) if !(active.pending.is_empty() && peer.waiting.is_empty()) => return Err(Stop::Turn),
            Turn::Free(ordering) => {
                conn.ordering = ordering;
                u32::MAX
            }
            Turn::Own(most) => u32::from(most),
        };
        let window = match mutated!(self.config, SendWindowIgnored) {
            true => SEND_WINDOW,
            false => u32::from(conn.window.min(conn.peer_window).min(active.room)).min(SEND_WINDOW),
        };
        let open = window.saturating_sub(active.send.span());
        let wanted = u32::from(item.count).min(most).min(open);
        if wanted == 0 || self.send_pool.available() < wanted / PAGE + 2 {
            active.blocked = true;
            return Err(Stop::Connection);
        }
        let Some((path, count)) = active.spray.take(peer, &self.config, now, wanted as u16) else {
            active.blocked = true;
            return Err(Stop::Paths);
        };
        if active.send.outstanding() == 0 {
            (active.loss.heard, active.loss.last_progress) = (now, now);
        }
        conn.tx_packets += u64::from(count);
        self.counters.sent_packets += u64::from(count);
        conn.last_activity = now;
        if peer.touch(now, index, true) {
            self.timers.push(now.after(MS), Key::Peer(conn.peer.0));
        }
        let header =
            data_header(conn.version, conn.responder, conn.peer_cid, &self.config, now, path, active.send.next());
        let (vni, owner) = (conn.pair.vni, conn.owner);
        let data = DataOut { peer: conn.peer, vni, owner, handle: item.handle, segment: item.first, header };
        leave(active, &mut self.send_pool, data, item.flow, out);
        if count > 1 {
            leave_rest(active, &mut self.send_pool, data, item.flow, count - 1, out);
        }
        if mutated!(self.config, ReleaseBeforeAck) {
            out.release.extend((0..count).map(|_| (conn.owner, item.handle)));
        }
        // More packets in flight only move the next event further away, and the armed timer checks again then.
        if active.loss.deadline == Time::NEVER {
            self.rearm_loss(now, index);
        }
        Ok(count)
    }

    /// Retransmits the packet `psn`, on another path if there is one.
    pub(super) fn resend(&mut self, now: Time, index: u32, psn: Psn, again: Again, out: &mut Output) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Conn { active: Some(active), peer: peer_id, .. } = conn else { return };
        let Some(peer) = self.peers[peer_id.0 as usize].as_mut() else { return };
        let Some(before) = active.send.record(&self.send_pool, psn) else { return };
        let in_flight = active.send.is_in_flight(&self.send_pool, psn);
        let left = Time(now.0.saturating_sub(now.tick().since(before.sent).max(0) as u64));
        let path = peer.other_than(now, 1 << before.path().get(), left);
        // Normally it is sent on two paths, the second one only if that has room: waiting once more would cost more
        // than a few copies. If its answer is overdue, the second copy does not need room. If a retransmission after a
        // timeout has failed as well, it is sent on all selected paths.
        let timeout = again == Again::Timeout;
        let late = !matches!(again, Again::Lost | Again::Dropped);
        let mut copies = [None; PathId::MAX];
        if !in_flight || again == Again::Dropped {
            // The peer has no room for copies, or they would fill a queue that is already full.
        } else if timeout && before.rtos() > 0 {
            let others = peer.selected().iter().filter(|other| **other != path);
            others.zip(&mut copies).for_each(|(other, copy)| *copy = Some(*other));
        } else {
            let second = peer.other_than(now, 1 << path.get(), left);
            copies[0] = (second != path && (late || peer.paths[second.index()].has_room(now))).then_some(second);
        }
        let why = crate::send_window::Resend { timeout, copied: copies[0].is_some(), postponed: false };
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
    }
}

/// The header of a packet that is sent for the first time, without flow distance.
#[inline(always)]
fn data_header(
    version: Version,
    from_responder: bool,
    cid: Cid,
    config: &Config,
    now: Time,
    path: PathId,
    psn: Psn,
) -> DataHeader {
    let cc = match config.congestion_control {
        CcKind::Swift => bifrost_wire::bifrost::cc::SWIFT,
        CcKind::None => bifrost_wire::bifrost::cc::NONE,
    };
    DataHeader {
        version,
        cc,
        probe: false,
        ack_now: false,
        from_responder,
        ecn: true,
        retransmit: false,
        path,
        distance: 0,
        psn,
        cid,
        timestamp: now.tick(),
    }
}

/// Sends the first segment of those that leave together; the PSN in its header is the next one.
#[inline(always)]
fn leave(active: &mut Active, pool: &mut Pool<SendPage>, mut data: DataOut, flow: Option<u32>, out: &mut Output) {
    let psn = data.header.psn;
    let header = &mut data.header;
    if header.version.has_distance() {
        match flow {
            Some(flow) => header.distance = active.flows.distance(flow, psn, active.published),
            None => active.flows.note_unknown(psn),
        }
    }
    // There is room: pages and window were checked.
    if active.send.push(pool, data.handle, data.segment, header.path, header.timestamp, header.distance).is_some() {
        out.data.push(data);
    }
}

/// Sends the segments of a buffer that leave after the first one, `data`.
#[inline(never)]
fn leave_rest(
    active: &mut Active,
    pool: &mut Pool<SendPage>,
    mut data: DataOut,
    flow: Option<u32>,
    count: u16,
    out: &mut Output,
) {
    for _ in 0..count {
        data.segment = data.segment.wrapping_add(1);
        let header = &mut data.header;
        header.psn = header.psn.next();
        header.distance = 0;
        if header.version.has_distance() {
            match flow {
                // Each one waits for its predecessor.
                Some(flow) => {
                    active.flows.note(flow, header.psn);
                    header.distance = 1;
                }
                None => active.flows.note_unknown(header.psn),
            }
        }
        let (path, timestamp, distance) = (header.path, header.timestamp, header.distance);
        if active.send.push(pool, data.handle, data.segment, path, timestamp, distance).is_none() {
            break; // cannot happen: pages and window were checked
        }
        out.data.push(data);
    }
}

/// Whether a connection may send at once.
#[derive(Clone, Copy, Debug)]
enum Turn {
    /// Only if none of its own packets wait, nor other connections to the same peer; with the publication order that
    /// the switch requests.
    Free(Ordering),
    /// It is its turn, for at most this many packets.
    Own(u16),
}

/// Why a packet is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// It was found to be lost while others arrived.
    Lost,
    /// The same, but a queue dropped it.
    Dropped,
    /// Nothing is heard: the packet requests an answer.
    Probe,
    /// Its RTO expired.
    Timeout,
    /// The same, but the peer received the packet and did not take it, and the next RTO must not be longer.
    Refused,
}
