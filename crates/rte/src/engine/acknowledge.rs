//! Acknowledgements at the sender: release, measure, detect (NSDI'26, 4.3 and appendix D).

use bifrost_wire::bifrost::{AckHeader, AckKind, Bitmap, DataHeader, PathId, Psn, Tick};

use super::{Arrival, Engine};
use crate::conn::{Active, Conn, State};
use crate::mutation::mutated;
use crate::output::{Output, PeerId};
use crate::path::Acked;
use crate::send_window::{Next, Record, Run};
use bifrost_transport::time::{Time, US};

/// Newly acknowledged packets, per path.
#[derive(Default)]
struct Progress {
    total: u16,
    /// Paths on which packets were acknowledged: bit i is path i.
    paths: u8,
    by_path: [u16; PathId::MAX],
    /// When the newest of these was sent.
    newest: [Tick; PathId::MAX],
    /// When the oldest of those packets that were sent only once was sent, and on which path.
    first: Option<(Tick, PathId)>,
}

impl Progress {
    /// A packet that was sent only once was acknowledged.
    #[inline(always)]
    fn note_first(&mut self, sent: Tick, path: PathId) {
        if self.first.is_none_or(|(first, _)| sent.since(first) < 0) {
            self.first = Some((sent, path));
        }
    }
}

/// Indices of the set bits, ascending.
#[inline(always)]
fn bits(mut mask: u8) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let first = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (first < u8::BITS).then_some(first as usize)
    })
}

/// Minimum room that any peer is assumed to have, packets.
const LEAST_ROOM: u16 = 4;

impl Engine {
    /// An acknowledgement arrived.
    pub fn on_ack(&mut self, now: Time, arrival: &Arrival, ack: &AckHeader, out: &mut Output) {
        let Some(index) = self.lookup(ack.cid) else {
            self.counters.unknown_cid_packets += 1;
            return;
        };
        if !self.fits(index, arrival) {
            return;
        }
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        if matches!(conn.state, State::Opening { .. } | State::Plain { .. }) {
            conn.heard = true;
            self.counters.stray_setup_packets += 1;
            return;
        }
        if conn.version != ack.version {
            self.counters.wrong_version_packets += 1;
            return;
        }
        let peer = conn.peer.0 as usize;
        if !self.peers[peer].as_ref().is_some_and(|p| p.has_path(ack.path)) {
            self.counters.unknown_path_packets += 1;
            return;
        }
        let next = conn.active.as_ref().map_or(conn.send_next, |a| a.send.next());
        if next.is_before(ack.base) && ack.kind == AckKind::Cumulative {
            self.counters.ack_invalid_packets += 1;
            return;
        }
        self.counters.acks_received_packets += 1;
        let (fabric, endpoint) = self.measure(now, arrival, ack, peer);
        if ack.probe {
            self.probe_returned(now, index, ack);
        }
        match ack.kind {
            AckKind::RateLimited | AckKind::NotTaken => self.on_refusals(now, index, ack),
            AckKind::Cumulative | AckKind::Selective => {
                let progress = self.release(now, index, ack, out);
                self.note_hold(now, peer, ack, &progress);
                self.learn(now, index, ack, &progress, fabric, endpoint);
                self.note_refusal(now, index, ack);
                if self.peers[peer].as_ref().is_some_and(|p| p.has_fallen) && (progress.total > 0 || ack.probe) {
                    self.recover_from_best_effort(now, PeerId(peer as u32));
                }
                self.detect_losses(now, index, out);
                self.settle(index, ack);
                self.flush_pending(now, index, out);
            }
        }
        self.share(now, PeerId(peer as u32), out);
        self.rearm_loss(now, index);
    }

    /// Splits the RTT into fabric and endpoint delay (NSDI'26, appendix D); returns both, ns, if plausible. The peer's
    /// intentional ACK delay is no sign of load, and does not count.
    #[inline(always)]
    fn measure(&mut self, now: Time, arrival: &Arrival, ack: &AckHeader, peer: usize) -> (Option<u64>, Option<u64>) {
        let Some(peer) = self.peers[peer].as_mut() else { return (None, None) };
        let remote = ack.sent.since(ack.nic_rx).max(0);
        let unintended = (remote as u64).saturating_sub(peer.ack_delay_ns());
        let before = peer.measured_of(ack.path);
        let Some(path) = peer.paths.get_mut(ack.path.index()) else { return (None, None) };
        let total = now.tick().since(ack.echo);
        let fabric = arrival.nic_rx.tick().since(ack.echo) - remote;
        let local = now.since(arrival.nic_rx);
        let known = path.fabric.is_known();
        let total = path.total.sample(now, total);
        // A packet whose ACK waited for the peer's ACK timer measures that timer, too; the fabric delay does not
        // include it.
        let fabric = total.and_then(|_| path.measured(now, fabric.max(1)));
        peer.on_measured(ack.path, before);
        if !known {
            peer.invalidate();
        }
        (fabric, total.map(|_| unintended + local))
    }

    /// Measures how long the peer held this ACK back, since the first packet that it acknowledges arrived: this time is
    /// estimated from when that packet was sent. If the ACK covers more packets than arrived since the previous ACK,
    /// that ACK was lost, and only the hold of the echoed packet counts.
    #[inline(always)]
    fn note_hold(&mut self, now: Time, peer: usize, ack: &AckHeader, progress: &Progress) {
        let Some(peer) = self.peers[peer].as_mut().filter(|_| !ack.probe) else { return };
        let mut held = ack.sent.since(ack.nic_rx).max(0);
        if let Some((sent, path)) = progress.first.filter(|_| progress.total <= ack.num_ack) {
            let one_way = |path: PathId| peer.paths[path.index()].fabric.smoothed_ns() as i64 / 2;
            held += (ack.echo.since(sent) + one_way(ack.path) - one_way(path)).max(0);
        }
        peer.on_held(now, held as u64);
    }

    /// Releases what the ACK acknowledges.
    fn release(&mut self, now: Time, index: u32, ack: &AckHeader, out: &mut Output) -> Progress {
        let mut progress = Progress::default();
        let Some(conn) = self.conns[index as usize].as_mut() else { return progress };
        let Conn { active: Some(active), peer, owner, .. } = conn else { return progress };
        let Some(peer) = self.peers[peer.0 as usize].as_mut() else { return progress };
        let (tick, next, una) = (now.tick(), active.send.next(), active.send.una());
        if ack.kind == AckKind::Cumulative && active.published.is_before(ack.base) {
            active.published = ack.base;
        }
        let Active { send, loss, .. } = &mut **active;
        let mut landed = [0u32; PathId::MAX];
        let base =
            if ack.kind == AckKind::Cumulative && !mutated!(self.config, AckBaseIgnored) { ack.base } else { una };
        let below = if mutated!(self.config, PsnWrapForgotten) {
            base.0.saturating_sub(una.0)
        } else {
            base.distance_from(una).max(0) as u32
        };
        let mut runs = ack.bitmap.runs().map(|(first, count)| {
            let first = ack.base.add(first as u32);
            (first, count.min(next.distance_from(first).max(0) as u32))
        });
        // These mutations need one packet at a time.
        let (leaks_handle, wrong_owner) = (mutated!(self.config, LeakHandle), mutated!(self.config, WrongOwner));
        let mut named = Some((una, below));
        while let Some((first, count)) = named {
            let (mut at, end) = (first, first.add(count));
            while at != end {
                let psn = at;
                let next = match leaks_handle || wrong_owner {
                    false => send.finish_run(&mut self.send_pool, psn, end.distance_from(psn) as u32),
                    true => Next::Other,
                };
                match next {
                    Next::Done(count) => {
                        at = psn.add(count);
                        continue;
                    }
                    Next::Run(Run { path, records, newest }) => {
                        at = psn.add(records.len() as u32);
                        landed[path.index()] += records.len() as u32;
                        progress.total += records.len() as u16;
                        progress.paths |= 1 << path.get();
                        progress.by_path[path.index()] += records.len() as u16;
                        progress.newest[path.index()] = newest;
                        progress.note_first(records[0].sent, path);
                        loss.note_acked(newest);
                        out.release.extend(records.iter().map(|record| (*owner, record.handle)));
                        continue;
                    }
                    Next::Other => at = psn.next(),
                }
                // The ACK of a packet that was sent once says something about its path. That of a retransmitted packet
                // does only if it echoes the last transmission: otherwise an earlier one may have arrived, on another
                // path, late but not lost.
                let echoed = ack.psn == psn;
                let timely = |before: &Record| !before.is_retransmitted() || echoed && ack.echo == before.sent;
                // Its arrival shows when the network last delivered; that its path did, only if the ACK names the path.
                let clear = |before: &Record| {
                    !before.is_retransmitted() || timely(before) && (!before.is_copied() || ack.path == before.path())
                };
                let Some((before, in_flight)) = send.finish(&mut self.send_pool, psn, clear) else { continue };
                let path = before.path().index();
                let leaks = before.is_retransmitted() && mutated!(self.config, InFlightLeaks);
                landed[path] += u32::from(in_flight && !leaks);
                progress.paths |= 1 << path;
                progress.total += 1;
                if clear(&before) {
                    progress.by_path[path] += 1;
                    progress.newest[path] = before.sent;
                }
                if !before.is_retransmitted() {
                    progress.note_first(before.sent, before.path());
                }
                if timely(&before) {
                    loss.note_acked(before.sent);
                } else {
                    let rtt = peer.paths[path].total.smoothed_ns();
                    let age = tick.since(before.sent).max(0) as u64;
                    if echoed || age < rtt / 2 {
                        self.counters.spurious_packets += 1;
                        peer.paths[ack.path.index()].congestion(|cc| cc.on_spurious(now));
                        // A probe sent because an ACK was lost was not premature.
                        if echoed || loss.probes == 0 {
                            loss.be_patient(now, rtt);
                        }
                    }
                }
                let every_64th = psn.0 % 64 == 7;
                if every_64th && leaks_handle {
                    continue;
                }
                let owner = if every_64th && wrong_owner { !*owner } else { *owner };
                out.release.push((owner, before.handle));
            }
            named = if ack.bitmap.is_empty() { None } else { runs.next() };
        }
        if progress.by_path[ack.path.index()] == 0 {
            // A retransmitted packet, or a copy of it, arrived on this path.
            peer.paths[ack.path.index()].hear(now, ack.echo);
        }
        if progress.total == 0 {
            return progress;
        }
        let hold = peer.timing().hold;
        for i in bits(progress.paths) {
            let Some(path) = peer.paths.get_mut(i) else { continue };
            path.on_done(landed[i]);
            if progress.by_path[i] > 0 {
                path.on_arrivals(now, progress.by_path[i]);
                path.latest_ns = (tick.since(progress.newest[i]).max(0) as u64).saturating_sub(hold);
            }
        }
        send.advance(&mut self.send_pool);
        loss.last_progress = now;
        loss.heard = now;
        loss.probes = 0;
        progress
    }

    /// Feeds congestion control and the connection's window.
    fn learn(
        &mut self,
        now: Time,
        index: u32,
        ack: &AckHeader,
        progress: &Progress,
        fabric: Option<u64>,
        endpoint: Option<u64>,
    ) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(active) = conn.active.as_mut() else { return };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_mut() else { return };
        let blocked = std::mem::take(&mut active.blocked);
        let measured = if fabric.is_some() { 1 << ack.path.get() } else { 0 };
        for i in bits(progress.paths | measured) {
            let Some(path) = peer.paths.get_mut(i) else { continue };
            let packets = progress.by_path[i];
            let measured = i == ack.path.index();
            if packets == 0 && !(measured && fabric.is_some()) {
                continue;
            }
            // The ACK does not say which of the packets carried a mark.
            let marked = u32::from(ack.num_ece) * u32::from(packets) / u32::from(progress.total.max(1));
            let measured = |delay: Option<u64>| delay.filter(|_| measured);
            path.on_acked(
                now,
                &Acked {
                    packets,
                    marked: marked.min(u32::from(packets)) as u16,
                    fabric_ns: measured(fabric),
                    endpoint_ns: measured(endpoint),
                    hops: ack.hops,
                },
            );
        }
        // The window of a connection that fills it, with everything acknowledged in time, grows (NSDI'26, 7.4: at most
        // to the size of the ring).
        if progress.total > 0 && active.room < u16::MAX {
            active.room = active.room.saturating_add(progress.total / 8 + 1);
            if active.room >= conn.window {
                active.room = u16::MAX;
            }
        }
        if blocked && progress.total > 0 && conn.window < self.config.max_window {
            conn.window = conn.window.saturating_add(progress.total).min(self.config.max_window);
        }
    }

    /// The packet that the ACK echoes has arrived, but is not present: the peer has not taken it.
    #[inline(always)]
    fn note_refusal(&mut self, now: Time, index: u32, ack: &AckHeader) {
        let bit = ack.psn.distance_from(ack.base);
        let clear = |bit: i32| (0..Bitmap::MAX_BITS as i32).contains(&bit) && !ack.bitmap.bit(bit as usize);
        if ack.probe || !clear(bit) {
            return;
        }
        let Some(active) = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut()) else { return };
        let named = |record: &Record| record.sent == ack.echo;
        if active.send.record(&self.send_pool, ack.psn).as_ref().is_some_and(named) {
            self.refused(now, index, ack, std::iter::once(ack.psn));
        }
    }

    /// The peer reports packets that it received but did not take.
    fn on_refusals(&mut self, now: Time, index: u32, ack: &AckHeader) {
        if !mutated!(self.config, RefusalsIgnored) {
            self.refused(now, index, ack, ack.bitmap.iter().map(|bit| ack.base.add(bit as u32)));
        }
    }

    /// Packets arrived that the peer did not take: their paths have delivered them. They are retransmitted by the loss
    /// rules, but no path is blamed. Until the peer takes more again, fewer packets of this connection are outstanding.
    fn refused(&mut self, now: Time, index: u32, ack: &AckHeader, psns: impl Iterator<Item = Psn>) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(active) = conn.active.as_mut() else { return };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_mut() else { return };
        let mut refused = 0;
        for psn in psns {
            let Some(record) = active.send.land(&mut self.send_pool, psn) else { continue };
            refused += 1;
            peer.paths[record.path().index()].on_done(1);
            // Of a retransmitted packet, it is known which transmission arrived only if the ACK echoes it.
            let arrived_on = match record.is_retransmitted() {
                false => Some(record.path()),
                true => (psn == ack.psn && record.sent == ack.echo).then_some(ack.path),
            };
            if let Some(path) = arrived_on {
                peer.paths[path.index()].on_arrivals(now, 1);
            }
        }
        self.counters.refused_packets += refused;
        if refused == 0 || now.since(active.refused_at) < peer.rtt().map_or(0, |(rtt, _)| rtt) {
            return;
        }
        active.refused_at = now;
        let out = active.send.span().min(u32::from(active.room)) as u16;
        active.room = (out / 2).max(LEAST_ROOM);
    }

    /// After an ACK: is a SKIP still owed?
    #[inline(always)]
    fn settle(&mut self, index: u32, ack: &AckHeader) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(active) = conn.active.as_mut() else { return };
        if ack.kind == AckKind::Cumulative && active.skip.is_some_and(|s| !ack.base.is_before(s.past)) {
            active.skip = None;
        }
    }

    /// The peer answers again: all its connections that fell back to best effort become reliable again, not only the
    /// one that was answered. Each soon tells the receiver where to continue, because it may hold packets behind those
    /// that were given up.
    #[cold]
    #[inline(never)]
    fn recover_from_best_effort(&mut self, now: Time, id: PeerId) {
        let Some(peer) = self.peers[id.0 as usize].as_mut() else { return };
        if !std::mem::take(&mut peer.has_fallen) || mutated!(self.config, BestEffortForEver) {
            return;
        }
        // All paths are suspect; only those that answer are of use.
        peer.select(&self.config, now);
        for index in 0..self.places() {
            let Some(conn) = self.conns[index as usize].as_mut() else { continue };
            if conn.peer == id && conn.state == State::BestEffort {
                conn.state = State::Open;
                self.counters.recovered_connections += 1;
                self.arm(index, now.after(US));
            }
        }
    }

    /// A header for a packet without a frame.
    pub(super) fn bare_header(conn: &Conn, path: PathId, psn: Psn, now: Time) -> DataHeader {
        DataHeader {
            version: conn.version,
            cc: bifrost_wire::bifrost::cc::NONE,
            probe: false,
            ack_now: true,
            from_responder: conn.responder,
            ecn: false,
            retransmit: false,
            path,
            distance: 0,
            psn,
            cid: conn.peer_cid,
            timestamp: now.tick(),
        }
    }
}
