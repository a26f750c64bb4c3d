//! Timers: due work of connections and of peers' paths.

use bifrost_wire::bifrost::{AckHeader, PathId, Psn};

use super::Engine;
use super::mend::NOBODY;
use crate::conn::{Conn, State};
use crate::deadline::Key;
use crate::output::{Control, ControlOut, Output, PeerId};
use crate::path::Path;
use crate::peer::Peer;
use bifrost_transport::time::{MS, S, Time};

/// A peer without traffic for this long is not probed.
const PROBE_WHILE_ACTIVE_NS: u64 = S;
/// Interval at which a peer's probes are checked.
const PROBE_TICK_NS: u64 = 2 * MS;

impl Engine {
    /// Does all work that is due at `now`.
    pub fn on_timeout(&mut self, now: Time, out: &mut Output) {
        while let Some((at, key)) = self.timers.pop_due(now) {
            match key {
                Key::Conn(index) => {
                    let Some(conn) = self.conns.get_mut(index as usize).and_then(Option::as_mut) else { continue };
                    if conn.idle_armed == at {
                        conn.idle_armed = Time::NEVER;
                    } else if conn.armed != at {
                        if conn.superseded == at {
                            conn.superseded = Time::NEVER;
                        }
                        continue; // stale: the deadline was moved
                    }
                    if conn.armed == at {
                        conn.armed = Time::NEVER;
                    }
                    self.at_work = index;
                    self.conn_timeout(now, index, out);
                }
                Key::Peer(peer) => {
                    self.at_work = NOBODY;
                    self.peer_timeout(now, peer, out);
                }
                Key::Share(peer) => {
                    self.at_work = NOBODY;
                    self.share_timeout(now, at, peer, out);
                }
            }
        }
        self.at_work = NOBODY;
    }

    fn conn_timeout(&mut self, now: Time, index: u32, out: &mut Output) {
        if self.only_ack_due(now, index) {
            return;
        }
        if let Some(active) = self.conn(index).and_then(|c| c.active.as_ref()) {
            let (ack, loss, skip) = (active.ack.deadline, active.loss.deadline, active.skip);
            if ack <= now {
                self.ack_soon(index);
            }
            if self.conn(index).is_some_and(|c| c.is_open()) {
                // A blocked caller asks again; one that is gone does not keep the timer running.
                if let Some(active) = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut()) {
                    active.blocked = false;
                }
                if loss <= now {
                    self.loss_timeout(now, index, out);
                }
                if skip.is_some() {
                    self.skip_timeout(now, index, out);
                }
                self.flush_pending(now, index, out);
                if let Some(peer) = self.conn(index).map(|conn| conn.peer) {
                    self.share(now, peer, out);
                }
                self.rearm_loss(now, index);
            }
            // After anything due earlier: a deadline armed later needs no own entry.
            if ack > now && ack != Time::NEVER {
                self.arm(index, ack);
            }
        }
        let Some(conn) = self.conn(index) else { return };
        if let State::Opening { .. } = conn.state {
            self.opening_timeout(now, index, out);
            return;
        }
        let quiet = conn.active.as_ref().is_none_or(|a| a.is_quiet());
        let idle = now.since(conn.last_activity);
        // The connection that carries a peer's probes stays while plain VXLAN is sent there.
        let probes = |p: &Peer| p.probe_conn == Some(index) && now.since(p.last_active) < self.config.idle_reap_ns;
        let is_needed = quiet && self.peers[conn.peer.0 as usize].as_ref().is_some_and(probes);
        // Otherwise regardless of traffic: a peer that died leaves gaps with packets waiting behind them, and
        // unanswered SKIPs.
        if idle >= self.config.idle_reap_ns && !is_needed {
            self.counters.reaped_connections += 1;
            self.remove(index, out);
            return;
        }
        let shrink = conn.active.is_some() && quiet && idle >= self.config.idle_shrink_ns;
        let next = if conn.active.is_some() && !shrink {
            now.after(self.config.idle_shrink_ns)
        } else {
            let soonest = if is_needed { self.config.idle_shrink_ns } else { MS };
            conn.last_activity.after(self.config.idle_reap_ns).max(now.after(soonest))
        };
        if shrink {
            self.deactivate(index);
        }
        self.arm_idle(index, next);
    }

    /// Handles the usual expiry: an ACK is due, or nothing, because what the timer was armed for has happened. Returns
    /// false, and changes nothing, if there may be other work.
    #[inline(always)]
    fn only_ack_due(&mut self, now: Time, index: u32) -> bool {
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else { return false };
        let (is_open, idle) = (conn.is_open(), now.since(conn.last_activity));
        let Some(active) = conn.active.as_deref_mut() else { return false };
        let Some(Some(peer)) = self.peers.get(conn.peer.0 as usize) else { return false };
        let waits = !active.pending.is_empty() || !peer.waiting.is_empty() || active.skip.is_some();
        if !is_open
            || waits
            || active.send.outstanding() > 0
            || active.loss.deadline <= now
            || conn.idle_armed == Time::NEVER
            || idle >= self.config.idle_shrink_ns.min(self.config.idle_reap_ns)
        {
            return false;
        }
        active.blocked = false;
        active.loss.deadline = Time::NEVER;
        let ack = active.ack.deadline;
        if ack <= now {
            if !active.ack.queued {
                active.ack.queued = true;
                self.ack_ready.push(index);
            }
        } else if ack != Time::NEVER {
            self.arm(index, ack);
        }
        true
    }

    fn peer_timeout(&mut self, now: Time, id: u32, out: &mut Output) {
        self.share(now, PeerId(id), out);
        let Some(peer) = self.peers.get_mut(id as usize).and_then(Option::as_mut) else { return };
        self.counters.suspect_paths += std::mem::take(&mut peer.newly_suspect);
        // Plain VXLAN traffic while all paths fail keeps the probes running, because that is how the peer recovers. So
        // does a connection in best effort until it is forgotten: its receiver may hold packets behind a gap, and waits
        // to be told where to continue.
        let observed = if peer.has_fallen { self.config.idle_reap_ns } else { 0 }.max(PROBE_WHILE_ACTIVE_NS);
        if now.since(peer.last_active) > observed {
            peer.has_fallen = false;
            peer.probe_timer_armed = false;
            return;
        }
        let conn = peer.probe_conn.and_then(|i| self.conns[i as usize].as_ref());
        let conn = conn.filter(|c| matches!(c.state, State::Open | State::BestEffort) && c.peer.0 == id);
        let Some(conn) = conn else {
            peer.probe_conn = None;
            self.timers.push(now.after(PROBE_TICK_NS), Key::Peer(id));
            return;
        };
        let interval = self.config.probe_interval_ns;
        let mut changed = false;
        let last_arrival = peer.paths.iter().map(|path| path.last_arrival).max().unwrap_or(Time(0));
        for (i, path) in peer.paths.iter_mut().enumerate() {
            // While all paths are silent, the peer may not be scheduled: allow more time for its answer.
            let is_heard = |sent| last_arrival.since(sent) >= path.total.smoothed_ns() || !path.total.is_known();
            if let Some((_, sent)) = path.probe
                && now.since(sent) >= path.probe_timeout_ns()
                && (is_heard(sent) || now.since(sent) >= self.config.best_effort_after_ns)
            {
                self.counters.probes_lost_packets += 1;
                let trust = path.trust();
                self.counters.suspect_paths += u64::from(path.on_probe_lost(now));
                changed |= path.trust() != trust;
            }
            // Idle, on trial, closed, left for its queue, silent although packets were sent on it, or never measured,
            // because ACKs happened to echo packets of other paths.
            let silent = path.in_flight > 0 && now.since(path.last_arrival) >= PROBE_TICK_NS;
            let idle = now.since(path.last_sent) >= interval;
            let wanted = !path.is_open || path.is_asked() || idle || silent || path.is_left || !path.total.is_known();
            if path.probe.is_none() && wanted && now >= path.next_probe {
                self.counters.probes_sent_packets += 1;
                Self::probe(now, conn, path, PathId::masked(i as u8), interval, out);
            }
        }
        if changed {
            // Plain VXLAN uses the selection, too, but does not make one.
            peer.select(&self.config, now);
        }
        // Checked often only while something is in flight or on trial.
        let is_watched = |path: &Path| path.probe.is_some() || !path.is_open || path.is_asked() || path.is_left;
        let wait = if peer.paths.iter().any(is_watched) { PROBE_TICK_NS } else { (interval / 4).max(PROBE_TICK_NS) };
        self.timers.push(now.after(wait), Key::Peer(id));
    }

    /// Sends a probe on a path, using a connection's identity.
    pub(super) fn probe(now: Time, conn: &Conn, path: &mut Path, id: PathId, interval_ns: u64, out: &mut Output) {
        path.on_probe_sent(now, interval_ns);
        let mut header = Self::bare_header(conn, id, Psn(0), now);
        header.probe = true;
        let packet = Control::Probe(header);
        out.control.push(ControlOut { peer: conn.peer, vni: conn.pair.vni, path: id, packet });
    }

    /// Handles the answer to a probe.
    pub(super) fn probe_returned(&mut self, now: Time, index: u32, ack: &AckHeader) {
        let Some(conn) = self.conns[index as usize].as_ref() else { return };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_mut() else { return };
        let Some(path) = peer.paths.get_mut(ack.path.index()) else { return };
        // Late answers to earlier probes prove nothing new.
        if path.probe.is_none_or(|(tick, _)| tick != ack.echo) {
            return;
        }
        let trust = path.trust();
        self.counters.recovered_paths += u64::from(path.on_probe_returned(now));
        if path.trust() != trust {
            peer.select(&self.config, now);
        }
    }
}
