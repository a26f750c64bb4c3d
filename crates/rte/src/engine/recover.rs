//! Loss detection and recovery (PROTOCOL.md, loss rules; NSDI'26, 4.3 and 7.4).
//!
//! (a) A packet is lost when one that left later on the same path has arrived. (b) Across paths time decides: it is
//! lost when one that left later on any path has arrived and a round trip plus a reordering window has passed (RFC
//! 8985). (c) When nothing that left later has arrived, and the answer is overdue, a tail probe is sent. (d) Then the
//! RTO applies, doubling per packet. After three RTOs and the give-up time, the packet is sent as best effort, and the
//! receiver is told to continue without it. A packet that the peer received but did not take is kept while the peer
//! takes others.

use bifrost_wire::bifrost::{PathId, Psn};

use super::Engine;
use super::send::Again;
use crate::config::MAX_RTOS;
use crate::conn::{Active, Conn, LossState, Skip, State};
use crate::mutation::mutated;
use crate::output::{Control, ControlOut, DataOut, Output, PlainOut};
use crate::path::Trust;
use crate::peer::Peer;
use crate::send_window::{Record, Resend};
use crate::timing::Timing;
use bifrost_transport::time::{MS, Time, US};

/// Maximum packets retransmitted per expiry of the RTO.
const TIMEOUT_BURST: usize = 8;
/// Maximum tail probes without an acknowledgement between them.
const TAIL_PROBES: u8 = 4;

impl Engine {
    /// Detects losses by rules (a) and (b) and retransmits the packets.
    #[inline(always)]
    pub(super) fn detect_losses(&mut self, now: Time, index: u32, out: &mut Output) {
        let in_flight = |active: &Active| active.send.outstanding() > 0;
        if self.conn(index).and_then(|c| c.active.as_deref()).is_some_and(in_flight) {
            self.retransmit_losses(now, index, out);
        }
    }

    fn retransmit_losses(&mut self, now: Time, index: u32, out: &mut Output) {
        let Some(timing) = self.timing(now, index) else { return };
        let mut first = 0;
        // Bounded: every pass takes the head of a path's list; a retransmission on the same path ends the search there.
        while let Some((path, psn, record, why)) = self.find_loss(now, index, first, timing) {
            match why {
                Why::SamePath => self.counters.lost_same_path_packets += 1,
                Why::Time => {
                    self.counters.lost_by_time_packets += 1;
                    self.close_late(now, index, timing, out);
                }
                Why::Timeout => {}
            }
            if !self.postpone(now, index, psn, &record) {
                let again = match self.blame(now, index, psn, &record, why) {
                    true => Again::Dropped,
                    false => Again::Lost,
                };
                self.resend(now, index, psn, again, out);
            }
            let active = self.conn(index).and_then(|c| c.active.as_ref());
            let oldest = active.and_then(|a| a.send.oldest_on(&self.send_pool, path));
            first = path.index() + usize::from(oldest.is_some_and(|(oldest, _)| oldest == psn));
        }
    }

    /// Handles timers (b), (c), (d) of one connection.
    pub(super) fn loss_timeout(&mut self, now: Time, index: u32, out: &mut Output) {
        self.detect_losses(now, index, out);
        let Some(timing) = self.timing(now, index) else { return };
        let heard = self.conn(index).and_then(|c| c.active.as_ref()).map_or(now, |a| a.loss.heard);
        if now.since(heard) >= timing.rto {
            // Silence: a few of the oldest are retransmitted. Once one of them is acknowledged, rule (b) finds the
            // others.
            let mut expired = false;
            for _ in 0..TIMEOUT_BURST {
                let Some((psn, record)) = self.most_overdue(now, index, timing) else { break };
                expired = true;
                self.counters.timeout_packets += 1;
                let give_up_ns = self.config.give_up_ns(self.living_paths(index));
                self.close(now, index, psn, &record, timing, out);
                self.blame(now, index, psn, &record, Why::Timeout);
                // RTO, 2 RTO, 4 RTO: the total wait.
                let altogether = timing.rto.saturating_mul((2 << record.rtos()) - 1);
                let rtos = record.rtos() + 1;
                let refused_for = self.refused_for_ns(now, index, psn);
                let is_enough = rtos >= self.config.give_up_rtos;
                // If the peer has received the packet, its RTO stops doubling here, and timeouts are no longer counted.
                let is_at_ceiling = is_enough && timing.rto << rtos > self.config.rto_ceiling_ns;
                let is_due = is_enough && altogether >= give_up_ns || rtos > MAX_RTOS;
                let give_up = match refused_for {
                    None => is_due,
                    Some(ns) => (is_due || is_at_ceiling) && ns >= self.config.give_up_refused_ns(),
                } || mutated!(self.config, GiveUpAtOnce);
                if give_up && !mutated!(self.config, NeverGiveUp) {
                    self.give_up(now, index, psn, out);
                    if !self.conn(index).is_some_and(Conn::is_open) {
                        return;
                    }
                } else if !mutated!(self.config, TimeoutSendsNothing) {
                    let again = match refused_for.is_some() && is_at_ceiling {
                        true => Again::Refused,
                        false => Again::Timeout,
                    };
                    self.resend(now, index, psn, again, out);
                }
            }
            if expired && let Some(active) = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut()) {
                active.loss.heard = now;
            }
        }
        self.tail_probe(now, index, timing, out);
    }

    /// Paths to a connection's peer from which no answer is overdue.
    fn living_paths(&self, index: u32) -> usize {
        let peer = self.conn(index).and_then(|conn| self.peer(conn.peer));
        peer.map_or(0, |peer| peer.paths.iter().filter(|path| path.is_open).count())
    }

    /// If the peer received the packet's latest transmission but did not take it, or has no room for it yet: how long
    /// the peer has taken nothing, ns. Such a peer is alive, and may take the packet later.
    fn refused_for_ns(&self, now: Time, index: u32, psn: Psn) -> Option<u64> {
        let active = self.conn(index)?.active.as_deref()?;
        (!active.send.is_in_flight(&self.send_pool, psn)).then(|| now.since(active.loss.last_progress))
    }

    /// The outstanding packet whose RTO, doubled per timeout, expired first. If the one with the lowest PSN is overdue
    /// it comes first, because a receiver can take it even without room for packets that must wait.
    fn most_overdue(&self, now: Time, index: u32, timing: Timing) -> Option<(Psn, Record)> {
        let active = self.conn(index)?.active.as_ref()?;
        let overdue = |record: &Record| age(now, record).checked_sub(timing.rto << record.rtos());
        let lowest = active.send.lowest(&self.send_pool).filter(|(_, record)| overdue(record).is_some());
        let heads = || PathId::all().filter_map(|path| active.send.oldest_on(&self.send_pool, path));
        let longest = || heads().filter(|(_, r)| overdue(r).is_some()).max_by_key(|(_, r)| overdue(r));
        lowest.or_else(longest)
    }

    /// Arms the timer for the next possible event of the packets in flight.
    #[inline]
    pub(super) fn rearm_loss(&mut self, now: Time, index: u32) {
        let Some(active) = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut()) else { return };
        if active.send.outstanding() == 0 && (!active.blocked || active.queued) {
            if !(active.loss.deadline <= now && mutated!(self.config, LossTimerNotRearmed)) {
                active.loss.deadline = Time::NEVER;
            }
            return;
        }
        self.arm_loss(now, index);
    }

    /// [`rearm_loss`](Self::rearm_loss) of a connection with packets in flight, or one that is blocked.
    #[inline(never)]
    fn arm_loss(&mut self, now: Time, index: u32) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(active) = conn.active.as_deref_mut() else { return };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_ref() else { return };
        let mut timing = timing_of(now, active, peer);
        let mut at = Time::NEVER;
        if active.send.outstanding() > 0 {
            let soon = now.after(US);
            let may_expire = active.loss.heard.after(timing.rto).max(soon);
            let mut asks = true;
            if active.loss.probes > 0 {
                (asks, timing.tail_probe) = (may_ask_again(active, peer), timing.after_probe(peer));
            }
            let may_probe = timing.may_probe(&active.loss).max(soon);
            for i in 0..peer.paths.len() {
                let path = PathId::masked(i as u8);
                let Some((_, record)) = active.send.oldest_on(&self.send_pool, path) else { continue };
                let waited = age(now, &record);
                at = at.min(now.after((timing.rto << record.rtos()).saturating_sub(waited)).max(may_expire));
                if active.loss.newest_acked.is_some_and(|t| t.since(record.sent) > 0) {
                    at = at.min(now.after(timing.rack_on(peer, path).saturating_sub(waited)).max(soon));
                } else if asks {
                    at = at.min(now.after(timing.overdue(&record).saturating_sub(waited)).max(may_probe));
                }
            }
        }
        // A connection that is blocked by something other than the paths, and has nothing in flight that would resume
        // it: check again in about a round trip.
        if active.blocked && !active.queued && active.send.outstanding() == 0 {
            at = at.min(now.after(timing.rack.max(50 * US)));
        }
        if active.loss.deadline <= now && mutated!(self.config, LossTimerNotRearmed) {
            return;
        }
        active.loss.deadline = at;
        // While measured times fall, deadlines move earlier with every ACK: a timer that is only slightly late is kept.
        let soon_enough = at.after(at.since(now) / 16);
        if at != Time::NEVER && conn.armed > soon_enough {
            self.arm(index, at);
        }
    }

    /// Durations of a connection's timers.
    #[inline(always)]
    fn timing(&self, now: Time, index: u32) -> Option<Timing> {
        let conn = self.conn(index)?;
        let peer = self.peers[conn.peer.0 as usize].as_ref()?;
        Some(timing_of(now, conn.active.as_deref()?, peer))
    }

    /// The RTO of a connection, ns; 0 while it is idle.
    pub(crate) fn rto_ns(&self, now: Time, index: u32) -> u64 {
        self.timing(now, index).map_or(0, |t| t.rto)
    }

    /// A loss on a path numbered `first` or above.
    fn find_loss(&self, now: Time, index: u32, first: usize, timing: Timing) -> Option<(PathId, Psn, Record, Why)> {
        let conn = self.conn(index)?;
        let active = conn.active.as_deref()?;
        let peer = self.peers[conn.peer.0 as usize].as_ref()?;
        let newest = active.loss.newest_acked;
        (first..peer.paths.len()).find_map(|i| {
            let path = PathId::masked(i as u8);
            let (psn, record) = active.send.oldest_on(&self.send_pool, path)?;
            if active.send.is_overtaken_on(path, &record) {
                return Some((path, psn, record, Why::SamePath));
            }
            let later_arrived = newest.is_some_and(|t| t.since(record.sent) > 0);
            let waits = timing.rack_on(peer, path);
            (later_arrived && age(now, &record) >= waits).then_some((path, psn, record, Why::Time))
        })
    }

    /// Defers a lost packet if the peer has no room for it anyway; returns whether it did. The packet then counts as
    /// sent, so that its turn comes as if it were lost again, but uses no room on its path meanwhile.
    fn postpone(&mut self, now: Time, index: u32, psn: Psn, record: &Record) -> bool {
        let Some(conn) = self.conns[index as usize].as_mut() else { return false };
        let Some(active) = conn.active.as_mut() else { return false };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_mut() else { return false };
        if psn.distance_from(active.send.una()) < i32::from(active.room) {
            return false;
        }
        if active.send.land(&mut self.send_pool, psn).is_some() {
            peer.paths[record.path().index()].on_done(1);
        }
        let why = Resend { timeout: false, copied: record.is_copied(), postponed: true };
        active.send.resend(&mut self.send_pool, psn, record.path(), now.tick(), why);
        self.counters.deferred_packets += 1;
        true
    }

    /// Attributes a loss to the packet's path. Shared state must not depend on anything that a single guest can cause:
    /// packets that arrived and were not taken do not count, nor does a connection whose packets the peer has recently
    /// not all taken. The ACK that reports those may be late or lost, and a peer with an older version cannot report
    /// them; probes tell whether the path is at fault. Returns whether a queue dropped the packet.
    fn blame(&mut self, now: Time, index: u32, psn: Psn, record: &Record, why: Why) -> bool {
        let timeout = why == Why::Timeout;
        let Some(conn) = self.conns[index as usize].as_mut() else { return false };
        let Some(active) = conn.active.as_mut().filter(|a| a.send.is_in_flight(&self.send_pool, psn)) else {
            return false;
        };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_mut() else { return false };
        let Some(path) = peer.paths.get_mut(record.path().index()) else { return false };
        active.spray.leave(record.path());
        if active.room < u16::MAX && !mutated!(self.config, RefusalsIgnored) {
            path.next_probe = now;
            return false;
        }
        let rtt = path.total.smoothed_ns();
        path.lost_packets += 1;
        let sent_ago = age(now, record);
        if timeout {
            path.congestion(|cc| cc.on_timeout(now, rtt));
        } else if path.on_congestion_loss(now, sent_ago) {
            self.counters.congestion_lost_packets += 1;
            return true;
        }
        // Time alone proves nothing against a path: the peer may be asleep, or slow to process arrivals. It is proof if
        // other paths have delivered packets that left well after this path began to lose, or if a later packet of this
        // path has arrived. Otherwise a probe decides.
        let first = path.lost_since(record.sent);
        let newest = active.loss.newest_acked.map_or(0, |t| t.since(first));
        let proven = why == Why::SamePath || newest >= (rtt as i64).max(200 * US as i64);
        if !proven {
            path.next_probe = now;
            return false;
        }
        if path.on_loss(now, sent_ago, why == Why::SamePath) {
            self.counters.suspect_paths += 1;
            peer.invalidate();
            peer.refresh(&self.config, now);
        }
        false
    }

    /// The answer to a packet is overdue. Its path, and paths that were asked before and have not answered, carry
    /// nothing new until they are heard again, and are probed. Not if the peer received the packet and did not take it.
    fn close(&mut self, now: Time, index: u32, psn: Psn, record: &Record, timing: Timing, out: &mut Output) {
        let Some(conn) = self.conns[index as usize].as_ref() else { return };
        let in_flight = |a: &Active| a.room == u16::MAX && a.send.is_in_flight(&self.send_pool, psn);
        if !conn.active.as_deref().is_some_and(in_flight) {
            return;
        }
        let Some(peer) = self.peers[conn.peer.0 as usize].as_mut() else { return };
        let is_news = peer.paths[record.path().index()].close(now, age(now, record));
        if peer.close_overdue(now, timing.tail_probe - timing.hold) || is_news {
            peer.select(&self.config, now);
        }
        self.probe_closed(now, index, out);
    }

    /// Closes the paths whose oldest packet is late while packets that left after it have arrived.
    #[cold]
    fn close_late(&mut self, now: Time, index: u32, timing: Timing, out: &mut Output) {
        let Some(conn) = self.conns[index as usize].as_ref() else { return };
        let Some(active) = conn.active.as_deref().filter(|a| a.room == u16::MAX) else { return };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_mut() else { return };
        let Some(newest) = active.loss.newest_acked else { return };
        let mut is_news = false;
        for path in PathId::all().take(peer.paths.len()) {
            let Some((psn, record)) = active.send.oldest_on(&self.send_pool, path) else { continue };
            let late = newest.since(record.sent) > 0 && age(now, &record) >= timing.rack_on(peer, path);
            if late && active.send.is_in_flight(&self.send_pool, psn) {
                is_news |= peer.paths[path.index()].close(now, age(now, &record));
            }
        }
        if is_news {
            peer.select(&self.config, now);
        }
        self.probe_closed(now, index, out);
    }

    /// Probes the paths that have just been closed.
    fn probe_closed(&mut self, now: Time, index: u32, out: &mut Output) {
        let Some(conn) = self.conns[index as usize].as_ref() else { return };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_mut() else { return };
        for (i, path) in peer.paths.iter_mut().enumerate() {
            if path.trust() == Trust::Quiet && path.probe.is_none() && now >= path.next_probe {
                self.counters.probes_sent_packets += 1;
                Self::probe(now, conn, path, PathId::masked(i as u8), self.config.probe_interval_ns, out);
            }
        }
    }

    /// Rule (c): nothing that left later has arrived, and the answer to the oldest packet is overdue. It is
    /// retransmitted and requests an ACK, which shows by rule (b) what else is missing. If that is not answered either,
    /// it is sent on paths that have not been asked yet, until all have.
    fn tail_probe(&mut self, now: Time, index: u32, mut timing: Timing, out: &mut Output) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(active) = conn.active.as_mut() else { return };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_ref() else { return };
        if active.loss.probes > 0 {
            timing.tail_probe = timing.after_probe(peer);
        }
        if active.loss.probes > 0 && !may_ask_again(active, peer) || now < timing.may_probe(&active.loss) {
            return;
        }
        let overdue = |(_, record): &(Psn, Record)| {
            let later_arrived = active.loss.newest_acked.is_some_and(|t| t.since(record.sent) > 0);
            !later_arrived && age(now, record) >= timing.overdue(record)
        };
        let lowest = active.send.lowest(&self.send_pool).filter(overdue);
        let heads = || PathId::all().filter_map(|path| active.send.oldest_on(&self.send_pool, path));
        let oldest = || heads().filter(overdue).max_by_key(|(_, record)| age(now, record));
        let Some((psn, record)) = lowest.or_else(oldest) else { return };
        active.loss.probes += 1;
        active.loss.probed_at = now;
        active.loss.heard = now;
        self.counters.tail_probe_packets += 1;
        self.close(now, index, psn, &record, timing, out);
        self.resend(now, index, psn, Again::Probe, out);
    }

    /// Rule (d), third time: sends the packet once more as plain VXLAN, and tells the receiver to continue without it.
    fn give_up(&mut self, now: Time, index: u32, psn: Psn, out: &mut Output) {
        let is_refused = self.refused_for_ns(now, index, psn).is_some();
        let Some(record) = self.abandon(now, index, psn) else { return };
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_ref() else { return };
        self.counters.given_up_packets += 1;
        conn.given_up_packets += 1;
        out.plain.push(PlainOut {
            peer: conn.peer,
            vni: conn.pair.vni,
            owner: conn.owner,
            handle: record.handle,
            segment: record.segment,
        });
        let last_arrival = peer.paths.iter().map(|p| p.last_arrival).max().unwrap_or_default();
        // Arrivals after the packet's last transmission show that paths deliver, although little is sent meanwhile. A
        // refusal is an answer, even if it was the last one and is old.
        let silence_ns = self.config.best_effort_after_ns.max(age(now, &record));
        if !is_refused && now.since(last_arrival) >= silence_ns {
            self.fall_back(now, index, out);
        }
    }

    /// A packet cannot be sent because its contents are gone. It is given up at once, no path is blamed, and the
    /// receiver is told to continue without it. Returns whether the caller must release its segment, unless that was
    /// already done.
    pub fn withdraw(&mut self, now: Time, data: &DataOut) -> bool {
        let Some(index) = self.by_peer_cid.get(&(data.peer, data.header.cid)).copied() else { return false };
        let psn = data.header.psn;
        let same = |r: &Record| (r.handle, r.segment) == (data.handle, data.segment);
        let outstanding = |c: &Conn| {
            let record = c.active.as_ref().and_then(|a| a.send.record(&self.send_pool, psn));
            c.owner == data.owner && record.as_ref().is_some_and(same)
        };
        if !self.conn(index).is_some_and(outstanding) {
            return false;
        }
        self.counters.withdrawn_packets += 1;
        self.abandon(now, index, psn).is_some()
    }

    /// Ends tracking of a packet; the receiver is soon told to continue without it.
    fn abandon(&mut self, now: Time, index: u32, psn: Psn) -> Option<Record> {
        let conn = self.conns[index as usize].as_mut()?;
        let active = conn.active.as_mut()?;
        let peer = self.peers[conn.peer.0 as usize].as_mut()?;
        let (record, in_flight) = active.send.finish(&mut self.send_pool, psn, |_| false)?;
        peer.paths[record.path().index()].on_done(u32::from(in_flight));
        active.send.advance(&mut self.send_pool);
        let past = active.skip.map_or(psn.next(), |s| if s.past.is_before(psn.next()) { psn.next() } else { s.past });
        if !mutated!(self.config, GiveUpSilently) {
            active.skip = Some(Skip { past, next: now, tries: 0 });
        }
        self.arm(index, now.after(US));
        Some(record)
    }

    /// All paths are silent: best effort until a probe returns (NSDI'26, 7.2).
    fn fall_back(&mut self, now: Time, index: u32, out: &mut Output) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        conn.state = State::BestEffort;
        self.counters.best_effort_connections += 1;
        let Some(active) = conn.active.as_mut() else { return };
        let past = active.send.next();
        active.skip = Some(Skip { past, next: now.after(MS), tries: 0 });
        let peer_id = conn.peer;
        self.surrender_sending(index, out);
        if let Some(peer) = self.peers[peer_id.0 as usize].as_mut() {
            peer.paths.iter_mut().for_each(|path| self.counters.suspect_paths += u64::from(path.suspect(now)));
            peer.invalidate();
            peer.probe_conn = Some(index);
            peer.has_fallen = true;
        }
        self.touch(now, index);
    }

    /// Tells the receiver where to continue, repeatedly until it confirms.
    pub(super) fn skip_timeout(&mut self, now: Time, index: u32, out: &mut Output) {
        let Some(timing) = self.timing(now, index) else { return };
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        if conn.state != State::Open {
            return;
        }
        let Some(mut skip) = conn.active.as_ref().and_then(|a| a.skip) else { return };
        let Some(una) = conn.active.as_ref().map(|a| a.send.una()) else { return };
        if now < skip.next {
            self.arm(index, skip.next);
            return;
        }
        skip.next = now.after((timing.rto << skip.tries.min(6)).min(1000 * MS));
        // Use another path each time. A constant count would stay on one, which may be down.
        skip.tries = skip.tries.wrapping_add(1).max(1);
        let peer = self.peers[conn.peer.0 as usize].as_ref();
        let path = peer.map_or(PathId::default(), |p| p.path_of_turn(skip.tries - 1));
        let mut header = Self::bare_header(conn, path, una, now);
        header.retransmit = skip.tries > 1;
        out.control.push(ControlOut { peer: conn.peer, vni: conn.pair.vni, path, packet: Control::Skip(header) });
        self.counters.skips_sent_packets += 1;
        if let Some(active) = conn.active.as_mut() {
            active.skip = Some(skip);
        }
        self.arm(index, skip.next);
    }
}

impl Timing {
    /// Age at which a packet on `path` is lost if one that left later on another path has arrived, ns. Packets of one
    /// path arrive in order: while its queue grows, packets behind the one acknowledged last take longer than that one.
    fn rack_on(&self, peer: &Peer, path: PathId) -> u64 {
        match peer.paths.get(path.index()) {
            Some(path) if path.total.is_known() => self.rack.max(path.latest_ns + path.latest_ns / 4),
            // The path's delay is unknown yet.
            _ => self.rack.saturating_mul(3),
        }
    }

    /// Age at which an answer is overdue while a tail probe is in flight, ns: the path that it used may be dead, and
    /// the measurements of such paths old.
    #[cold]
    fn after_probe(&self, peer: &Peer) -> u64 {
        self.tail_probe.min(self.hold.saturating_add(peer.quickest_answer_ns()))
    }

    /// Age at which a packet's answer is overdue, ns.
    fn overdue(&self, record: &Record) -> u64 {
        if record.is_retransmitted() { self.tail_probe - self.hold } else { self.tail_probe }
    }

    /// Earliest time of a tail probe: after recent acknowledgements, delayed ones may follow, and the last probe's
    /// answer is waited for.
    fn may_probe(&self, loss: &LossState) -> Time {
        loss.last_progress.after(self.hold).max(loss.probed_at.after(self.tail_probe - self.hold))
    }
}

/// Whether another tail probe may be sent without an acknowledgement since the last: one that uses further paths.
#[cold]
fn may_ask_again(active: &Active, peer: &Peer) -> bool {
    let is_left = active.loss.probes < TAIL_PROBES && active.room == u16::MAX && active.send.landed() == 0;
    is_left && peer.has_unasked()
}

/// Durations of the timers of a connection to `peer`.
#[inline(always)]
fn timing_of(now: Time, active: &Active, peer: &Peer) -> Timing {
    peer.timing().with_patience(if peer.rtt().is_some() { active.loss.patience_ns(now) } else { 0 })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    SamePath,
    Time,
    Timeout,
}

fn age(now: Time, record: &Record) -> u64 {
    now.tick().since(record.sent).max(0) as u64
}
