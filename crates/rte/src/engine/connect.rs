//! Connection set-up, restart, refusal (NSDI'26, 5.2 "Connection establishment" and 5.3; PROTOCOL.md, set-up).

use bifrost_wire::bifrost::{Cid, PathId, RejectReason, Reset, Setup, SetupKind, Version};

use super::{Arrival, Destination, Engine, LocalVnic, mirrored};
use crate::conn::{Active, Pair, Pending, State};
use crate::mutation::mutated;
use crate::output::{Control, ControlOut, Output, PeerId};
use bifrost_transport::time::{S, Time, US};

impl Engine {
    /// Handles a REQUEST, RESPONSE or REJECT. `vnic`: the local vNIC that it names, if this host has it in that VNI.
    pub fn on_setup(&mut self, now: Time, arrival: &Arrival, setup: &Setup, vnic: Option<LocalVnic>, out: &mut Output) {
        if !self.peers.get(arrival.peer.0 as usize).is_some_and(Option::is_some) {
            self.counters.wrong_peer_packets += 1;
            return;
        }
        match setup.kind {
            SetupKind::Request { oldest } => self.on_request(now, arrival, setup, oldest, vnic, out),
            SetupKind::Response => self.on_response(now, arrival, setup, out),
            SetupKind::Reject(reason) => self.on_reject(now, arrival, setup, reason, out),
        }
    }

    /// Whether a connection of this engine addresses `peer` by `cid`: a RESET with it is for this engine.
    pub fn addresses_peer_by(&self, peer: PeerId, cid: Cid) -> bool {
        self.by_peer_cid.contains_key(&(peer, cid))
    }

    /// The peer does not know a CID by which it was addressed: its side of the connection is gone.
    pub fn on_reset(&mut self, now: Time, arrival: &Arrival, reset: &Reset, out: &mut Output) {
        let found = self.by_peer_cid.get(&(arrival.peer, reset.unknown)).copied();
        let usable = found.filter(|&i| {
            self.conn(i)
                .is_some_and(|c| c.pair.vni == arrival.vni && matches!(c.state, State::Open | State::BestEffort))
        });
        let Some(index) = usable else {
            self.counters.stray_setup_packets += 1;
            return;
        };
        self.counters.resets_received_packets += 1;
        self.counters.restarted_connections += 1;
        self.reopen(now, index, false, out);
    }

    /// Whether no connection carries the probes of a peer's paths, so that [`observe`](Self::observe) may set one up
    /// for that.
    #[inline]
    pub fn lacks_observer(&self, now: Time, peer: PeerId) -> bool {
        self.peer(peer).is_some_and(|peer| peer.probe_conn.is_none() && now >= peer.observe_at)
    }

    /// Sets up the connection of a pair without reliable traffic, for its probes, so that plain VXLAN also avoids a
    /// dead path. Nothing waits for it. Tries once per [`plain_retry_ns`](crate::Config::plain_retry_ns), whatever the
    /// outcome.
    #[cold]
    pub fn observe(&mut self, now: Time, to: &Destination, out: &mut Output) {
        let retry = self.config.plain_retry_ns;
        let Some(peer) = self.peers.get_mut(to.peer.0 as usize).and_then(Option::as_mut) else { return };
        peer.observe_at = now.after(retry);
        if now < peer.plain_until {
            return;
        }
        let pair = Pair { vni: to.vni, local: to.local, remote: to.remote };
        let known = self.by_pair.get(&pair).copied();
        match known.and_then(|index| Some((index, self.conn(index)?.state))) {
            None => drop(self.open(now, pair, to, out)),
            Some((index, State::Plain { until, .. })) if now >= until => self.reopen(now, index, true, out),
            Some((index, State::Open | State::BestEffort)) => self.touch(now, index),
            Some(_) => {}
        }
    }

    /// Creates the connection of a pair and sends the first REQUEST.
    pub(super) fn open(&mut self, now: Time, pair: Pair, to: &Destination, out: &mut Output) -> Option<u32> {
        let state = State::Opening { tries: 0, turn: self.attempt(to.peer), next: now, background: false };
        let index = self.create(now, pair, to.owner, to.peer, to.ordering, state)?;
        self.request(now, index, out);
        Some(index)
    }

    /// Sets a connection up again with everything that it still holds. `background`: traffic does not wait for it.
    pub(super) fn reopen(&mut self, now: Time, index: u32, background: bool, out: &mut Output) {
        self.start_over(index, out);
        let Some(turn) = self.conn(index).map(|c| c.peer).map(|peer| self.attempt(peer)) else { return };
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        conn.state = State::Opening { tries: 0, turn, next: now, background };
        conn.responder = false;
        let key = (conn.peer, std::mem::take(&mut conn.peer_cid));
        self.by_peer_cid.remove(&key);
        self.request(now, index, out);
    }

    /// The peer has accepted a REQUEST that seemed unanswered: resends it unchanged; traffic does not wait.
    pub(super) fn ask_again(&mut self, now: Time, index: u32, out: &mut Output) {
        let Some(turn) = self.conn(index).map(|c| c.peer).map(|peer| self.attempt(peer)) else { return };
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        conn.state = State::Opening { tries: 0, turn, next: now, background: true };
        self.request(now, index, out);
    }

    /// Retransmits the REQUEST, or concludes that the peer does not speak BIFROST.
    pub(super) fn opening_timeout(&mut self, now: Time, index: u32, out: &mut Output) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let State::Opening { tries, next, .. } = conn.state else { return };
        if now < next {
            self.arm(index, next);
        } else if tries < self.config.setup_tries {
            self.request(now, index, out);
        } else {
            self.counters.unanswered_connections += 1;
            let Some(peer) = self.conn(index).map(|c| c.peer) else { return };
            let until = now.after(self.plain_interval(peer));
            self.become_plain(now, index, until, out);
            let speaks = self.conn_slots().any(|c| c.peer == peer && c.is_open());
            if !speaks && let Some(peer) = self.peers[peer.0 as usize].as_mut() {
                peer.plain_until = until;
            }
        }
    }

    /// A peer that may be starting is retried soon, one that never answers with growing intervals.
    fn plain_interval(&mut self, peer: PeerId) -> u64 {
        let Some(peer) = self.peers[peer.0 as usize].as_mut() else { return self.config.plain_retry_ns };
        peer.unanswered = peer.unanswered.saturating_add(1);
        (S << peer.unanswered.min(16)).min(self.config.plain_retry_ns)
    }

    fn request(&mut self, now: Time, index: u32, out: &mut Output) {
        let initial = self.config.initial_rto_ns;
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let State::Opening { tries, turn, background, .. } = conn.state else { return };
        // Too early costs one small packet; too late delays everything that waits for the connection.
        let next = now.after((initial / 4) << tries.min(16));
        conn.state = State::Opening { tries: tries.saturating_add(1), turn, next, background };
        let kind = SetupKind::Request { oldest: Version::OLDEST.number() };
        let version = self.config.version_max;
        self.emit_setup(index, kind, version, u32::from(turn) + u32::from(tries), out);
        self.counters.requests_sent_packets += 1;
        self.arm(index, next);
    }

    /// `turn` selects the path, so that retransmissions use different ones.
    fn emit_setup(&self, index: u32, kind: SetupKind, version: u8, turn: u32, out: &mut Output) {
        let Some(conn) = self.conn(index) else { return };
        let Some(peer) = self.peers[conn.peer.0 as usize].as_ref() else { return };
        let path = peer.path_of_turn(turn);
        out.control.push(ControlOut {
            peer: conn.peer,
            vni: conn.pair.vni,
            path,
            packet: Control::Setup(Setup {
                kind,
                version,
                cc: bifrost_wire::bifrost::cc::SWIFT,
                worker: self.worker,
                local: conn.local_cid,
                destination: conn.peer_cid,
                to: conn.pair.remote,
                from: conn.pair.local,
                instance: self.instance,
                generation: conn.generation,
                window: self.receive_window(conn.owner),
                ack_delay_us: (self.ack_delay_max_ns() / US).min(u64::from(u16::MAX)) as u16,
            }),
        });
    }

    fn on_request(
        &mut self,
        now: Time,
        arrival: &Arrival,
        setup: &Setup,
        oldest: u8,
        vnic: Option<LocalVnic>,
        out: &mut Output,
    ) {
        let Some(vnic) = vnic else {
            self.counters.rejected_vnic_packets += 1;
            return self.reject(arrival, setup, RejectReason::UnknownVnic, out);
        };
        if !vnic.reliable {
            self.counters.rejected_policy_packets += 1;
            return self.reject(arrival, setup, RejectReason::Policy, out);
        }
        // The highest common version wins; no common one fails closed.
        let chosen = self.config.version_max.min(setup.version);
        let Some(version) = Version::try_from(chosen).ok().filter(|_| chosen >= oldest) else {
            self.counters.rejected_version_packets += 1;
            return self.reject(arrival, setup, RejectReason::Version, out);
        };
        if setup.local.is_none() {
            self.counters.stray_setup_packets += 1;
            return;
        }
        let pair = mirrored(arrival.vni, setup.to, setup.from);
        let epoch = (setup.instance, setup.generation);
        let existing =
            self.of_pair(&pair, setup.worker).filter(|&i| self.conn(i).is_some_and(|c| c.peer == arrival.peer));
        let opening = existing.and_then(|i| self.conn(i)).is_some_and(|c| matches!(c.state, State::Opening { .. }));
        let index = match existing {
            None => {
                let state = State::Plain { until: now, since_s: seconds(now) };
                match self.create(now, pair, vnic.owner, arrival.peer, vnic.ordering, state) {
                    Some(index) => index,
                    None => {
                        self.counters.rejected_resources_packets += 1;
                        return self.reject(arrival, setup, RejectReason::Resources, out);
                    }
                }
            }
            Some(index) => {
                let known = self.conn(index).and_then(|c| c.peer_epoch);
                let heard = self.conn(index).is_some_and(|c| c.heard);
                match known {
                    Some(known) if epoch == known && self.conn(index).is_some_and(|c| c.peer_cid == setup.local) => {
                        // Our RESPONSE was lost.
                        return self.respond(index, out);
                    }
                    Some(known) if epoch <= known => {
                        self.counters.stale_setup_packets += 1;
                        return;
                    }
                    // Both sides restart at once. The CID in our REQUEST must stay, or each side would address the
                    // other forever by a CID that is gone. No packet has arrived for it.
                    Some(known) if opening && !heard && known.0 == setup.instance => {}
                    Some(_) => {
                        self.counters.restarted_connections += 1;
                        // Packets of the old life may still be in flight to the old CID.
                        self.start_over(index, out);
                    }
                    // A former life of the peer has answered the seemingly unanswered REQUEST: packets that it sent
                    // then may still arrive.
                    None if heard => self.start_over(index, out),
                    // The peer may have known this side by the CID of an unanswered REQUEST, sent packets to it, and
                    // forgotten it since. Not sooner: REQUESTs that cross after both sides have timed out would each
                    // name a CID that is gone.
                    None if self.conn(index).is_some_and(|c| long_plain(&c.state, now)) => self.start_over(index, out),
                    None => {}
                }
                index
            }
        };
        if let Some(conn) = self.conns[index as usize].as_mut() {
            conn.owner = vnic.owner;
            conn.ordering = vnic.ordering;
            // In a simultaneous set-up the side with the smaller MAC counts as the initiator.
            conn.responder = !opening || conn.pair.remote.as_u64() < conn.pair.local.as_u64();
        }
        self.establish(now, index, setup, version);
        self.respond(index, out);
        self.flush_pending(now, index, out);
    }

    fn respond(&mut self, index: u32, out: &mut Output) {
        let Some(version) = self.conn(index).map(|c| c.version.number()) else { return };
        let Some(id) = self.conn(index).map(|c| c.peer) else { return };
        let Some(peer) = self.peers[id.0 as usize].as_mut() else { return };
        let turn = peer.answers;
        peer.answers = turn.wrapping_add(1);
        self.emit_setup(index, SetupKind::Response, version, turn.into(), out);
    }

    /// The first path of an attempt: not always the same one, which may be down.
    fn attempt(&mut self, peer: PeerId) -> u8 {
        let Some(peer) = self.peers[peer.0 as usize].as_mut() else { return 0 };
        let turn = peer.attempts;
        peer.attempts = turn.wrapping_add(1);
        turn
    }

    fn on_response(&mut self, now: Time, arrival: &Arrival, setup: &Setup, out: &mut Output) {
        let Some(index) = self.lookup(setup.destination) else {
            self.counters.stray_setup_packets += 1;
            return;
        };
        if !self.fits(index, arrival) {
            return;
        }
        let version = Version::try_from(setup.version).ok().filter(|v| v.number() <= self.config.version_max);
        // Accept it although it is late: the peer treats the connection as open since it answered.
        let asked = self.conn(index).is_some_and(|c| matches!(c.state, State::Opening { .. } | State::Plain { .. }));
        let (Some(version), true, false) = (version, asked, setup.local.is_none()) else {
            self.counters.stray_setup_packets += 1;
            return;
        };
        self.establish(now, index, setup, version);
        self.flush_pending(now, index, out);
    }

    fn on_reject(&mut self, now: Time, arrival: &Arrival, setup: &Setup, reason: RejectReason, out: &mut Output) {
        let Some(index) = self.lookup(setup.destination) else {
            self.counters.stray_setup_packets += 1;
            return;
        };
        if !self.fits(index, arrival) {
            return;
        }
        if !self.conn(index).is_some_and(|c| matches!(c.state, State::Opening { .. })) {
            self.counters.stray_setup_packets += 1;
            return;
        }
        self.counters.rejects_received_packets += 1;
        let until = now.after(self.plain_interval(arrival.peer));
        self.become_plain(now, index, until, out);
        if reason == RejectReason::Version
            && let Some(peer) = self.peers[arrival.peer.0 as usize].as_mut()
        {
            peer.plain_until = until;
        }
    }

    fn establish(&mut self, now: Time, index: u32, setup: &Setup, version: Version) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        conn.state = State::Open;
        conn.version = version;
        conn.peer_worker = Some(setup.worker);
        conn.peer_epoch = Some((setup.instance, setup.generation));
        conn.peer_window = setup.window.max(1);
        conn.window = self.config.initial_window;
        let key = (conn.peer, std::mem::replace(&mut conn.peer_cid, setup.local));
        let peer = conn.peer;
        self.by_peer_cid.remove(&key);
        self.by_peer_cid.insert((peer, setup.local), index);
        if let Some(peer) = self.peers[peer.0 as usize].as_mut() {
            peer.plain_until = Time(0);
            peer.unanswered = 0;
            peer.set_ack_delay(u64::from(setup.ack_delay_us) * US);
        }
        self.counters.opened_connections += 1;
        self.touch(now, index);
        self.arm_idle(index, now.after(self.config.idle_shrink_ns));
    }

    /// Restarts both PSN spaces under a new CID. Packets in flight are queued to be sent again; packets held for the
    /// guest are shown, because they were acknowledged.
    fn start_over(&mut self, index: u32, out: &mut Output) {
        let first = self.config.first_psn();
        let peer = self.conn(index).map(|c| c.peer.0 as usize);
        if let Some(peer) = peer.and_then(|peer| self.peers[peer].as_mut()) {
            peer.forget_probes_of(index);
        }
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let owner = conn.owner;
        if let Some(active) = conn.active.as_mut() {
            let mut waiting: std::collections::VecDeque<Pending> = std::collections::VecDeque::new();
            let mut flight = [0u32; PathId::MAX];
            self.counters.restarted_packets += u64::from(active.send.outstanding());
            active.send.drain(&mut self.send_pool, |record, in_flight| {
                flight[record.path().index()] += u32::from(in_flight);
                if mutated!(self.config, RestartForgetsSent) {
                    return;
                }
                waiting.push_back(Pending { handle: record.handle, first: record.segment, count: 1, flow: None });
            });
            waiting.append(&mut active.pending);
            active.recv.drain(&mut self.recv_pool, &mut |handle| {
                if !mutated!(self.config, RestartForgetsReceived) {
                    out.publish.push((owner, handle));
                }
            });
            let queued = active.ack.queued;
            active.reset(first, first);
            active.ack.queued = queued;
            active.pending = waiting;
            let peer = conn.peer;
            self.land(peer, flight);
        }
        let cid = self.cid_at(index);
        self.generation = self.generation.wrapping_add(1);
        if let Some(conn) = self.conns[index as usize].as_mut() {
            conn.local_cid = cid;
            conn.heard = false;
            // A peer that knows this CID no longer accepts a REQUEST with an older one.
            conn.generation = self.generation;
            conn.send_next = first;
            conn.recv_base = first;
        }
    }

    /// The pair's traffic is sent as plain VXLAN until `until`, starting with the waiting packets.
    fn become_plain(&mut self, now: Time, index: u32, until: Time, out: &mut Output) {
        self.surrender(index, out);
        let first = self.config.first_psn();
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        conn.state = State::Plain { until, since_s: seconds(now) };
        conn.send_next = first;
        conn.recv_base = first;
        if let Some(active) = conn.active.as_deref_mut() {
            let queued = active.ack.queued;
            Active::reset(active, first, first);
            active.ack.queued = queued;
        }
        self.arm(index, until);
    }

    fn reject(&mut self, arrival: &Arrival, setup: &Setup, reason: RejectReason, out: &mut Output) {
        let peer = self.peers.get(arrival.peer.0 as usize).and_then(Option::as_ref);
        out.control.push(ControlOut {
            peer: arrival.peer,
            vni: arrival.vni,
            path: peer.map_or(PathId::default(), |p| p.path_of_turn(0)),
            packet: Control::Setup(Setup {
                kind: SetupKind::Reject(reason),
                version: self.config.version_max,
                cc: 0,
                worker: self.worker,
                local: Cid::NONE,
                destination: setup.local,
                to: setup.from,
                from: setup.to,
                instance: self.instance,
                generation: 0,
                window: 0,
                ack_delay_us: 0,
            }),
        });
    }
}

fn seconds(now: Time) -> u32 {
    (now.0 / S) as u32
}

/// Whether the last REQUEST was sent at least a second ago.
fn long_plain(state: &State, now: Time) -> bool {
    matches!(state, State::Plain { since_s, .. } if seconds(now).wrapping_sub(*since_s) > 1)
}
