//! Acknowledgements at the sender: release, measure, detect (NSDI'26, 4.3 and appendix D).

use bifrost_wire::bifrost::{AckHeader, AckKind, DataHeader, PathId, Psn};

use super::{Arrival, Engine};
use crate::cc::AckSample;
use crate::conn::{Conn, State};
use crate::output::Output;
use crate::time::Time;

/// Packets newly acknowledged, per path, and how the paths did.
#[derive(Default)]
struct Progress {
    total: u16,
    by_path: [u16; PathId::MAX],
}

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
        let Some(conn) = self.conn(index) else { return };
        if matches!(conn.state, State::Opening { .. } | State::Plain { .. }) {
            self.counters.stray_setup_packets += 1;
            return;
        }
        if conn.version != ack.version {
            self.counters.wrong_version_packets += 1;
            return;
        }
        let peer = usize::from(conn.peer.0);
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
            AckKind::RateLimited => self.slow_down(now, index, ack),
            AckKind::Cumulative | AckKind::Selective => {
                let progress = self.release(now, index, ack, out);
                self.learn(now, index, ack, &progress, fabric, endpoint);
                if progress.total > 0 || ack.probe {
                    self.recover_from_best_effort(index);
                }
                self.detect_losses(now, index, out);
                self.settle(index, ack);
                self.flush_pending(now, index, out);
            }
        }
        self.rearm_loss(now, index);
    }

    /// Splits the RTT into fabric and endpoint delay (NSDI'26, appendix D); returns both, ns, if plausible.
    fn measure(&mut self, now: Time, arrival: &Arrival, ack: &AckHeader, peer: usize) -> (Option<u64>, Option<u64>) {
        let Some(path) = self.peers[peer].as_mut().and_then(|p| p.paths.get_mut(ack.path.index())) else {
            return (None, None);
        };
        let remote = ack.sent.since(ack.nic_rx).max(0);
        let total = now.tick().since(ack.echo);
        let fabric = arrival.nic_rx.tick().since(ack.echo) - remote;
        let local = now.since(arrival.nic_rx);
        let known = path.fabric.is_known();
        let total = path.total.sample(now, total);
        // A packet that waited on the way back for the peer's ACK timer has measured the timer too; fabric has not.
        let fabric = total.and_then(|_| path.fabric.sample(now, fabric.max(1)));
        if !known && let Some(p) = self.peers[peer].as_mut() {
            p.invalidate();
        }
        (fabric, total.map(|_| remote as u64 + local))
    }

    /// Releases what the ACK names.
    fn release(&mut self, now: Time, index: u32, ack: &AckHeader, out: &mut Output) -> Progress {
        let mut progress = Progress::default();
        let Some(conn) = self.conns[index as usize].as_mut() else { return progress };
        let Conn { active: Some(active), peer, owner, .. } = conn else { return progress };
        let Some(peer) = self.peers[usize::from(peer.0)].as_mut() else { return progress };
        let next = active.send.next();
        let mut finish = |psn: Psn, active: &mut crate::conn::Active| {
            let Some(before) = active.send.record(&self.send_pool, psn) else { return };
            let path = &mut peer.paths[before.path().index()];
            // A packet that was sent once tells about its path. One that was sent again does only if the ACK names the
            // very transmission: otherwise an earlier one may have arrived, on another path, late but not lost.
            let named = ack.psn == psn;
            let last_one = named && ack.echo == before.sent;
            // That it arrived says when the network last delivered; that its own path did only if the ACK names the path.
            let timely = !before.is_retransmitted() || last_one;
            let clear = timely && (!before.is_copied() || ack.path == before.path());
            let age = now.tick().since(before.sent).max(0) as u64;
            let too_soon = age < path.total.smoothed_ns() / 2;
            let spurious = before.is_retransmitted() && !last_one && (named || too_soon);
            if active.send.finish(&mut self.send_pool, psn, clear).is_none() {
                return;
            }
            path.on_done(1);
            progress.total += 1;
            if clear {
                path.on_arrival(now);
                progress.by_path[before.path().index()] += 1;
            }
            if timely && active.loss.newest_acked.is_none_or(|t| before.sent.since(t) > 0) {
                active.loss.newest_acked = Some(before.sent);
            }
            if spurious {
                self.counters.spurious_packets += 1;
                active.loss.be_patient(now, path.total.smoothed_ns());
            }
            out.release.push((*owner, before.handle));
        };
        if ack.kind == AckKind::Cumulative {
            let mut psn = active.send.una();
            while psn.is_before(ack.base) {
                finish(psn, active);
                psn = psn.next();
            }
        }
        for bit in ack.bitmap.iter() {
            let psn = ack.base.add(bit as u32);
            if psn.is_before(next) {
                finish(psn, active);
            }
        }
        if progress.total > 0 {
            active.send.advance(&mut self.send_pool);
            active.loss.last_event = now;
            active.loss.heard = now;
            active.loss.probed = false;
        }
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
        let Some(peer) = self.peers[usize::from(conn.peer.0)].as_mut() else { return };
        let blocked = std::mem::take(&mut active.blocked);
        for (i, path) in peer.paths.iter_mut().enumerate() {
            let packets = progress.by_path[i];
            let measured = i == ack.path.index();
            if packets == 0 && !(measured && fabric.is_some()) {
                continue;
            }
            let in_flight = path.in_flight as f32 + f32::from(packets);
            path.cc.on_ack(
                now,
                &AckSample {
                    packets: packets.max(1),
                    marked_packets: ack.num_ece,
                    fabric_delay_ns: fabric.filter(|_| measured),
                    endpoint_delay_ns: endpoint.filter(|_| measured),
                    base_delay_ns: path.fabric.min_ns(),
                    rtt_ns: path.total.smoothed_ns(),
                    hops: ack.hops,
                    window_limited: packets > 0 && in_flight >= path.cc.window() * 0.9,
                },
            );
        }
        // A connection that fills its window with everything acknowledged in time gets more (NSDI'26, 7.4: at most the ring).
        if blocked && progress.total > 0 && conn.window < self.config.max_window {
            conn.window = conn.window.saturating_add(progress.total).min(self.config.max_window);
        }
    }

    fn slow_down(&mut self, now: Time, index: u32, ack: &AckHeader) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(active) = conn.active.as_mut() else { return };
        let Some(peer) = self.peers[usize::from(conn.peer.0)].as_mut() else { return };
        for bit in ack.bitmap.iter() {
            if let Some(record) = active.send.record(&self.send_pool, ack.base.add(bit as u32)) {
                let path = &mut peer.paths[record.path().index()];
                path.cc.on_rate_limited(now, path.total.smoothed_ns());
            }
        }
    }

    /// After an ACK: is a SKIP still owed?
    fn settle(&mut self, index: u32, ack: &AckHeader) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(active) = conn.active.as_mut() else { return };
        if ack.kind == AckKind::Cumulative && active.skip.is_some_and(|s| !ack.base.is_before(s.past)) {
            active.skip = None;
        }
    }

    fn recover_from_best_effort(&mut self, index: u32) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        if conn.state == State::BestEffort {
            conn.state = State::Open;
            self.counters.recovered_connections += 1;
        }
    }

    /// A header for packets that carry no frame.
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
