//! Receiving data: check, place, publish (NSDI'26, 4.2 and 5.2 "RX workflow").

use bifrost_wire::bifrost::{AckHeader, AckKind, Bitmap, Cid, DataHeader, Psn, Reset, Tick, Version};

use super::mend::NOBODY;
use super::{Engine, RESETS_PER_REFILL};
use crate::config::Ordering;
use crate::conn::{AckState, Conn, Echo, Pair, State};
use crate::deadline::Key;
use crate::mutation::mutated;
use crate::output::{Control, ControlOut, Output, PeerId};
use crate::recv_window::{Check, Placed, RECEIVE_WINDOW};
use bifrost_transport::time::{MS, Time, US};

/// Information from the outer packet.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The host that sent it.
    pub peer: PeerId,
    /// VNI of its VXLAN header.
    pub vni: u32,
    /// When the NIC (or the kernel) received it, by this host's monotonic clock.
    pub nic_rx: Time,
    /// Hops it took, 0..=15.
    pub hops: u8,
    /// It carries a congestion mark (ECN CE).
    pub marked: bool,
}

/// What to do with a data packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Place its frame behind port `owner` and report [`Engine::placed`], or report why that failed.
    Place {
        /// The port of the vNIC that the connection belongs to.
        owner: u32,
        /// Pass it back with the report.
        slot: Slot,
    },
    /// Nothing; the packet has been counted.
    Drop,
}

/// A data packet between [`Engine::on_data`] and [`Engine::placed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    conn: u32,
    psn: Psn,
    distance: u8,
    gap: bool,
}

/// Maximum packets of one connection that can be reported as not taken at a time.
const REFUSALS_MAX: usize = 1024;

impl Engine {
    /// A data packet arrived.
    pub fn on_data(&mut self, now: Time, arrival: &Arrival, header: &DataHeader, out: &mut Output) -> Verdict {
        // Usually it is the next packet of an open connection; then one look-up per structure is enough.
        let index = self.place_of(header.cid);
        if let Some(Some(conn)) = self.conns.get_mut(index as usize)
            && conn.expects(arrival, header)
            && let Some(active) = conn.active.as_deref_mut()
            && active.recv.is_next(header.psn)
            && let Some(Some(peer)) = self.peers.get_mut(conn.peer.0 as usize)
            && peer.probe_timer_armed
        {
            conn.last_activity = now;
            peer.touch(now, index, true);
            conn.rx_packets += 1;
            note_arrival(&mut active.ack, arrival, header);
            let slot = Slot { conn: index, psn: header.psn, distance: header.distance, gap: false };
            return Verdict::Place { owner: conn.owner, slot };
        }
        self.on_other_data(now, arrival, header, out)
    }

    /// A data packet that is not simply the next one.
    #[inline(never)]
    fn on_other_data(&mut self, now: Time, arrival: &Arrival, header: &DataHeader, out: &mut Output) -> Verdict {
        let Some(index) = self.addressed(now, arrival, header.cid, header, out) else { return Verdict::Drop };
        let Some(conn) = self.conns[index as usize].as_mut() else { return Verdict::Drop };
        Self::activate(conn, &mut self.spare);
        conn.rx_packets += 1;
        let owner = conn.owner;
        let Conn { active: Some(active), .. } = conn else { return Verdict::Drop };
        note_arrival(&mut active.ack, arrival, header);
        let check = match active.recv.check(&self.recv_pool, header.psn) {
            Check::Outside if mutated!(self.config, ReceiveWindowUnchecked) => Check::New,
            Check::Duplicate if mutated!(self.config, DuplicatesForgotten) => Check::New,
            check => check,
        };
        match check {
            Check::New => {
                let gap = header.psn != active.recv.end();
                if header.ack_now {
                    self.ack_soon(index);
                }
                Verdict::Place { owner, slot: Slot { conn: index, psn: header.psn, distance: header.distance, gap } }
            }
            Check::Duplicate => {
                self.counters.duplicate_packets += 1;
                conn.duplicate_packets += 1;
                active.ack.note(header.psn, active.recv.base());
                self.ack_soon(index);
                Verdict::Drop
            }
            Check::Outside => {
                self.counters.outside_window_packets += 1;
                // A sender that has given up packets may be ahead of the window until its SKIP arrives.
                let ahead = header.psn.distance_from(active.recv.base());
                if (0..2 * RECEIVE_WINDOW as i32).contains(&ahead) {
                    self.refuse(index, header.psn);
                }
                Verdict::Drop
            }
        }
    }

    /// The packet of `slot` is in guest memory (or in memory held for the guest) as `handle`. Returns false if it could
    /// not be taken after all; then the caller discards the handle.
    pub fn placed(&mut self, now: Time, slot: Slot, handle: u32, out: &mut Output) -> bool {
        // Usually it is the next packet, and its ACK is either not due or already queued.
        if let Some(Some(conn)) = self.conns.get_mut(slot.conn as usize)
            && let Some(active) = conn.active.as_deref_mut()
            && active.recv.is_next(slot.psn)
            && !slot.gap
            && (active.ack.queued || u32::from(active.ack.packets) + 1 < u32::from(self.config.ack_threshold))
        {
            active.recv.take_next();
            active.ack.near = true;
            active.ack.packets = active.ack.packets.saturating_add(1);
            let is_untimed = active.ack.deadline == Time::NEVER && active.ack.packets < self.config.ack_threshold;
            out.publish.push((conn.owner, handle));
            self.counters.received_packets += 1;
            if is_untimed {
                self.time_ack(now, slot.conn);
            }
            return true;
        }
        self.take(now, slot, Some(handle), out)
    }

    /// The packet is discarded by policy (ACL, security group): it counts as delivered (NSDI'26, 7.1).
    pub fn policy_dropped(&mut self, now: Time, slot: Slot, out: &mut Output) {
        self.counters.policy_dropped_packets += 1;
        self.take(now, slot, None, out);
    }

    /// The packet is discarded by a rate limit: the sender is told, slows down, and sends it again (NSDI'26, 7.1).
    pub fn rate_limited(&mut self, slot: Slot) {
        self.counters.rate_limited_packets += 1;
        let Some(active) = self.conns[slot.conn as usize].as_mut().and_then(|c| c.active.as_mut()) else { return };
        if active.ack.rate_limited.len() < REFUSALS_MAX {
            active.ack.rate_limited.push(slot.psn);
        }
        self.ack_soon(slot.conn);
    }

    /// The port of the vNIC that the connection belongs to, if there is one.
    pub fn owner_of(&self, cid: Cid) -> Option<u32> {
        self.conn(self.lookup(cid)?).map(|conn| conn.owner)
    }

    /// The two vNICs of the connection on which the packet of `slot` arrived; its frame must not have other addresses.
    pub fn pair_of(&self, slot: Slot) -> Option<Pair> {
        self.conn(slot.conn).map(|c| c.pair)
    }

    /// If the packet of `slot` would have to wait for others before the guest may see it: how many packets it is ahead
    /// of the first missing one.
    pub fn must_wait(&self, slot: Slot) -> Option<u32> {
        let conn = self.conn(slot.conn)?;
        conn.active.as_ref()?.recv.must_wait(&self.recv_pool, conn.ordering, slot.psn, slot.distance)
    }

    /// The packet could not be placed: the sender is told, and sends it again when it expects room.
    pub fn not_placed(&mut self, slot: Slot) {
        if mutated!(self.config, AckUnplaced) {
            self.take(Time(0), slot, None, &mut Output::default());
        }
        self.counters.no_guest_buffer_packets += 1;
        self.refuse(slot.conn, slot.psn);
    }

    /// The packet's frame is damaged although the datagram's checksum was right, so the network did not damage it. The
    /// sender is told, and sends it again, but blames no path.
    pub fn damaged(&mut self, slot: Slot) {
        self.counters.damaged_packets += 1;
        self.refuse(slot.conn, slot.psn);
    }

    /// The packet's port no longer exists here; the sender is told.
    pub fn gone(&mut self, slot: Slot) {
        self.refuse(slot.conn, slot.psn);
    }

    /// A packet arrived but is not taken: the next ACK reports it, if the version can express that.
    fn refuse(&mut self, index: u32, psn: Psn) {
        let Some(conn) = self.conns[index as usize].as_mut().filter(|c| c.version.has_refusals()) else { return };
        let Some(active) = conn.active.as_mut() else { return };
        if active.ack.not_taken.len() < REFUSALS_MAX {
            active.ack.not_taken.push(psn);
        }
        self.ack_soon(index);
    }

    /// A probe arrived: it is answered at once, on its path, or on another one if this host has fewer.
    pub fn on_probe(&mut self, now: Time, arrival: &Arrival, header: &DataHeader, out: &mut Output) {
        let Some(index) = self.addressed(now, arrival, header.cid, header, out) else { return };
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        if let Some(peer) = self.peers[conn.peer.0 as usize].as_mut().filter(|peer| peer.has_fallen) {
            let own = header.path.index() % peer.paths.len();
            peer.paths[own].hear_again(now);
        }
        let base = conn.active.as_ref().map_or(conn.recv_base, |a| a.recv.base());
        let ack = AckHeader {
            version: conn.version,
            cc: header.cc,
            probe: true,
            path: header.path,
            hops: arrival.hops,
            kind: AckKind::Cumulative,
            psn: header.psn,
            cid: conn.peer_cid,
            sent: now.tick(),
            echo: header.timestamp,
            nic_rx: arrival.nic_rx.tick(),
            num_ack: 0,
            num_ece: 0,
            base,
            bitmap: Bitmap::empty(),
        };
        out.control.push(ControlOut {
            peer: conn.peer,
            vni: conn.pair.vni,
            path: header.path,
            packet: Control::Ack(ack),
        });
        self.counters.acks_sent_packets += 1;
    }

    /// The sender gave up everything below the PSN.
    pub fn on_skip(&mut self, now: Time, arrival: &Arrival, header: &DataHeader, out: &mut Output) {
        let Some(index) = self.addressed(now, arrival, header.cid, header, out) else { return };
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        Self::activate(conn, &mut self.spare);
        let owner = conn.owner;
        let Conn { active: Some(active), .. } = conn else { return };
        note_arrival(&mut active.ack, arrival, header);
        active.ack.near = true;
        let publish = &mut out.publish;
        let skipped = active.recv.skip_to(&mut self.recv_pool, header.psn, &mut self.stack, &mut |h| {
            if !mutated!(self.config, SkipForgetsHeld) {
                publish.push((owner, h));
            }
        });
        if skipped {
            self.counters.skips_received_packets += 1;
        } else {
            self.counters.outside_window_packets += 1;
        }
        self.ack_soon(index);
    }

    /// Builds the ACKs that are due. Call it after publishing, because an ACK confirms that the guest's queue has the
    /// packets.
    #[inline]
    pub fn flush_acks(&mut self, now: Time, out: &mut Output) {
        if !self.ack_ready.is_empty() {
            self.acknowledge_ready(now, out);
        }
    }

    fn acknowledge_ready(&mut self, now: Time, out: &mut Output) {
        let mut ready = std::mem::take(&mut self.ack_ready);
        for index in ready.drain(..) {
            self.at_work = index;
            self.acknowledge(now, index, out);
        }
        self.at_work = NOBODY;
        self.ack_ready = ready;
    }

    /// The connection to which a packet of a peer belongs, if all checks pass.
    #[inline(always)]
    pub(super) fn addressed(
        &mut self,
        now: Time,
        arrival: &Arrival,
        cid: Cid,
        header: &DataHeader,
        out: &mut Output,
    ) -> Option<u32> {
        let Some(index) = self.lookup(cid) else {
            self.counters.unknown_cid_packets += 1;
            self.reset(now, arrival, cid, out);
            return None;
        };
        if !self.fits(index, arrival) {
            return None;
        }
        let conn = self.conns[index as usize].as_mut()?;
        match conn.state {
            State::Open | State::BestEffort => {}
            State::Opening { .. } => {
                // The RESPONSE is late or lost; the REQUEST will be repeated.
                conn.heard = true;
                self.counters.stray_setup_packets += 1;
                return None;
            }
            State::Plain { .. } => {
                // The peer considers the connection open because its RESPONSEs were lost. Without another REQUEST it
                // always would.
                conn.heard = true;
                self.counters.stray_setup_packets += 1;
                self.ask_again(now, index, out);
                return None;
            }
        }
        if conn.version != header.version {
            self.counters.wrong_version_packets += 1;
            return None;
        }
        let peer = self.peers[conn.peer.0 as usize].as_mut()?;
        // Probes alone keep nothing alive; otherwise two idle hosts would probe each other forever.
        if !header.probe {
            conn.last_activity = now;
            if peer.touch(now, index, true) {
                self.timers.push(now.after(MS), Key::Peer(conn.peer.0));
            }
        }
        Some(index)
    }

    /// Whether a packet's sender and VNI are the connection's.
    #[inline]
    pub(super) fn fits(&mut self, index: u32, arrival: &Arrival) -> bool {
        let Some(conn) = self.conn(index) else { return false };
        if conn.peer != arrival.peer {
            self.counters.wrong_peer_packets += 1;
            return false;
        }
        if conn.pair.vni != arrival.vni {
            self.counters.wrong_vni_packets += 1;
            return false;
        }
        true
    }

    /// Queues an ACK of a connection for this batch.
    pub(super) fn ack_soon(&mut self, index: u32) {
        let Some(active) = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut()) else { return };
        if !active.ack.queued {
            active.ack.queued = true;
            self.ack_ready.push(index);
        }
    }

    #[inline(never)]
    fn take(&mut self, now: Time, slot: Slot, handle: Option<u32>, out: &mut Output) -> bool {
        let threshold = self.config.ack_threshold;
        let Some(conn) = self.conns[slot.conn as usize].as_mut() else { return false };
        let (owner, ordering) = (conn.owner, conn.ordering);
        let Conn { active: Some(active), .. } = conn else { return false };
        let check = active.recv.check(&self.recv_pool, slot.psn);
        if check == Check::Duplicate && mutated!(self.config, DuplicatesForgotten) {
            out.publish.extend(handle.map(|h| (owner, h)));
            return true;
        }
        if check != Check::New && !mutated!(self.config, ReceiveWindowUnchecked) {
            self.counters.duplicate_packets += 1;
            return false;
        }
        let early = slot.psn.0 % 16 == 3 && mutated!(self.config, PublishEarly);
        let ordering = if early { Ordering::Off } else { ordering };
        let placed = Placed { psn: slot.psn, distance: slot.distance, handle };
        let base = active.recv.base();
        let show = &mut |handle| out.publish.push((owner, handle));
        let taken = active.recv.place(&mut self.recv_pool, ordering, placed, &mut self.stack, show);
        if !taken {
            self.counters.no_page_packets += 1;
            self.refuse(slot.conn, slot.psn);
            return false;
        }
        self.counters.received_packets += 1;
        active.ack.note(slot.psn, base);
        active.ack.packets = active.ack.packets.saturating_add(1);
        let due = active.ack.packets >= threshold || slot.gap;
        if slot.gap {
            self.counters.out_of_order_packets += 1;
        }
        if due && mutated!(self.config, AckBeforePublication) {
            self.acknowledge(now, slot.conn, out);
        } else if due {
            self.ack_soon(slot.conn);
        } else if active.ack.deadline == Time::NEVER {
            self.time_ack(now, slot.conn);
        }
        true
    }

    /// Arms the timer of an ACK that is not due yet.
    #[inline]
    fn time_ack(&mut self, now: Time, index: u32) {
        if mutated!(self.config, AckTimerNotArmed) {
            return;
        }
        let at = now.after(self.ack_delay_ns(index));
        if let Some(active) = self.conns[index as usize].as_mut().and_then(|c| c.active.as_mut()) {
            active.ack.deadline = at;
        }
        self.arm(index, at);
    }

    /// How long an ACK may wait: a fraction of the RTT, so that it never dominates the sender's timers.
    pub(super) fn ack_delay_ns(&self, index: u32) -> u64 {
        if let Some(fixed) = self.config.ack_delay_ns {
            return fixed;
        }
        let peer = self.conn(index).and_then(|c| self.peers[c.peer.0 as usize].as_ref());
        match peer.and_then(|p| p.rtt()) {
            Some((rtt, _)) => (rtt / 2).clamp(50 * US, self.ack_delay_max_ns()),
            None => 200 * US,
        }
    }

    /// The maximum ACK delay of this host, as announced to peers.
    pub(super) fn ack_delay_max_ns(&self) -> u64 {
        self.config.ack_delay_ns.unwrap_or(500 * US)
    }

    /// Acknowledges what has arrived since the last ACK, with at most as many ACKs as packets arrived, and only for the
    /// ranges of PSNs in which they arrived. If an ACK is lost, a retransmission requests its contents again.
    fn acknowledge(&mut self, now: Time, index: u32, out: &mut Output) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(active) = conn.active.as_mut() else { return };
        if !active.ack.fits_one() {
            return self.acknowledge_in_parts(now, index, out);
        }
        let (owed, echo) = (active.ack.counts(), active.ack.echo);
        active.ack.clear();
        let Some(echo) = echo.filter(|_| !conn.peer_cid.is_none()) else { return };
        let base = if mutated!(self.config, AckHoles) { active.recv.end() } else { active.recv.base() };
        let bits = if mutated!(self.config, AckBitsShifted) { base.next() } else { base };
        let bitmap = active.recv.bitmap(&self.recv_pool, bits);
        let ack = AckHeader { bitmap, ..header(now, conn.version, conn.peer_cid, &echo, owed, base) };
        let (peer, vni) = (conn.peer, conn.pair.vni);
        out.control.push(ControlOut { peer, vni, path: echo.path, packet: Control::Ack(ack) });
        self.counters.acks_sent_packets += 1;
    }

    /// The same if packets were not taken, or arrived more than 256 PSNs ahead: sends several ACKs.
    #[inline(never)]
    fn acknowledge_in_parts(&mut self, now: Time, index: u32, out: &mut Output) {
        let Some(conn) = self.conns[index as usize].as_mut() else { return };
        let Some(active) = conn.active.as_mut() else { return };
        let mut owed = std::mem::take(&mut active.ack);
        let Some(echo) = owed.echo else { return };
        if conn.peer_cid.is_none() {
            return;
        }
        let base = if mutated!(self.config, AckHoles) { active.recv.end() } else { active.recv.base() };
        let bits = if mutated!(self.config, AckBitsShifted) { base.next() } else { base };
        let far = owed.far_blocks(base, active.recv.end());
        // A cumulative ACK that echoes a packet without acknowledging it reports that packet as not taken.
        if (0..Bitmap::MAX_BITS as i32).contains(&echo.psn.distance_from(base)) {
            let before = owed.not_taken.len();
            owed.not_taken.retain(|psn| *psn != echo.psn);
            owed.near |= owed.not_taken.len() < before;
        }
        let nothing_else = owed.far == 0 && owed.not_taken.is_empty() && owed.rate_limited.is_empty();
        let mut ack = header(now, conn.version, conn.peer_cid, &echo, owed.counts(), base);
        let (peer, vni) = (conn.peer, conn.pair.vni);
        let mut tell = |ack: AckHeader| {
            out.control.push(ControlOut { peer, vni, path: echo.path, packet: Control::Ack(ack) });
            self.counters.acks_sent_packets += 1;
        };
        // Report first what was not taken; otherwise the sender would attribute a loss to the path.
        for (kind, psns) in [(AckKind::RateLimited, &mut owed.rate_limited), (AckKind::NotTaken, &mut owed.not_taken)] {
            while let Some(&first) = psns.first() {
                let mut bitmap = Bitmap::empty();
                psns.retain(|psn| {
                    let ahead = psn.distance_from(first);
                    !((0..Bitmap::MAX_BITS as i32).contains(&ahead) && bitmap.set(ahead as usize))
                });
                tell(AckHeader { kind, base: first, bitmap, num_ack: 0, num_ece: 0, ..ack });
            }
        }
        if owed.near || nothing_else {
            ack.bitmap = active.recv.bitmap(&self.recv_pool, bits);
            tell(ack);
            // Packets that arrived since the last ACK are counted only once.
            (ack.num_ack, ack.num_ece) = (0, 0);
        }
        ack.kind = AckKind::Selective;
        for from in far {
            (ack.base, ack.bitmap) = (from, active.recv.bitmap(&self.recv_pool, from));
            tell(ack);
            (ack.num_ack, ack.num_ece) = (0, 0);
        }
        // Reuse the memory.
        (active.ack.rate_limited, active.ack.not_taken) = (owed.rate_limited, owed.not_taken);
    }

    /// Tells a peer that a CID is unknown here; at most 32 times per millisecond.
    fn reset(&mut self, now: Time, arrival: &Arrival, cid: Cid, out: &mut Output) {
        if now >= self.reset_refill {
            self.reset_refill = now.after(MS);
            self.reset_tokens = RESETS_PER_REFILL;
        }
        let peer = self.peers.get(arrival.peer.0 as usize).and_then(Option::as_ref);
        let Some(peer) = peer.filter(|_| self.reset_tokens > 0 && !cid.is_none()) else {
            self.counters.resets_suppressed_packets += 1;
            return;
        };
        self.reset_tokens -= 1;
        self.counters.resets_sent_packets += 1;
        out.control.push(ControlOut {
            peer: arrival.peer,
            vni: arrival.vni,
            path: peer.path_of_turn(0),
            packet: Control::Reset(Reset { unknown: cid }),
        });
    }
}

/// A cumulative ACK without a bitmap, with the number of packets and of marks since the last one.
#[inline(always)]
fn header(now: Time, version: Version, cid: Cid, echo: &Echo, (packets, marked): (u16, u16), base: Psn) -> AckHeader {
    AckHeader {
        version,
        cc: bifrost_wire::bifrost::cc::NONE,
        probe: false,
        path: echo.path,
        hops: echo.hops,
        kind: AckKind::Cumulative,
        psn: echo.psn,
        cid,
        sent: now.tick(),
        echo: echo.timestamp,
        nic_rx: echo.nic_rx,
        num_ack: packets.min(2047),
        num_ece: marked.min(2047),
        base,
        bitmap: Bitmap::empty(),
    }
}

#[inline(always)]
fn note_arrival(ack: &mut AckState, arrival: &Arrival, header: &DataHeader) {
    if arrival.marked {
        ack.marked = ack.marked.saturating_add(1);
    }
    // The ACK echoes the newest transmission.
    let newer = ack.echo.is_none_or(|e: Echo| is_after(header.timestamp, e.timestamp));
    if newer {
        ack.echo = Some(Echo {
            psn: header.psn,
            path: header.path,
            timestamp: header.timestamp,
            nic_rx: arrival.nic_rx.tick(),
            hops: arrival.hops,
        });
    }
}

fn is_after(a: Tick, b: Tick) -> bool {
    a.since(b) >= 0
}
