//! From the guest: fetch, parse, switch, transport.

use bifrost_avs::{Action, DHCP_SERVER_PORT, DHCPV6_SERVER_PORT, DNS_SERVER_PORT, PortId, Verdict};
use bifrost_nic::dscp::{self, Band};
use bifrost_nic::{
    Checksum, L3, Malformed, Parsed, Segments, TooLarge, open_checksum_is_right, parse, transport_checksum_of_parts,
};
use bifrost_port::{GuestPort, TxFrame, Underlay};
use bifrost_rte::{Admission, Destination, Ordering, Outbound, Time};

use crate::capture::{self, Note, Stage};
use crate::core::Core;
use crate::departure::Departure;
use crate::fault::Direction;
use crate::limits::{Allowance, Limit};
use crate::ports::{Held, Port};
use crate::stage::Stage as At;
use crate::unsent::Unsent;
use crate::waiting::{Closed, Full};

/// Bytes of one guest per turn, plus at most one packet: a packet may be 64 KB long, and be sent in hundreds of
/// segments.
const GUEST_BYTES: usize = 512 << 10;
/// Bytes waiting to be sent from which on the turn sends them before it continues.
const BATCH_BYTES: usize = 512 << 10;

/// Maximum length of a frame with a question to the switch, bytes.
const MAX_QUESTION: u32 = 1514;

/// Result of offering a packet to the transport.
pub(crate) enum Offered {
    Taken,
    /// A window is closed.
    Blocked,
}

impl<P: GuestPort> Core<P> {
    /// Fetches from every guest that may have something, within its budget.
    pub(crate) fn fetch_from_guests<const SEEN: bool>(&mut self, underlay: &mut impl Underlay) -> bool {
        let mut busy = false;
        if self.guests_wait {
            return false;
        }
        // Ports with the same peers share the windows of paths, so each turn starts with another port.
        let ports = self.ports.len();
        let first = self.counters.loops as usize % ports.max(1);
        for owner in (first..ports).chain(0..first) {
            busy |= self.fetch_from::<SEEN>(owner, underlay);
        }
        if self.egress.is_some() {
            busy |= self.send_in_turns::<SEEN>(underlay);
        }
        busy
    }

    /// Fetches a packet of a guest that is stopped, to see whether it is one of another band.
    #[cold]
    fn probe(&mut self, owner: usize) {
        let Some(port) = self.ports[owner].as_mut().filter(|port| port.readable && port.backlog.is_empty()) else {
            return;
        };
        if port.held_back_until.is_some_and(|at| at > self.now) {
            return;
        }
        self.frames.clear();
        // An error is found again by the next fetch.
        port.readable = port.port.fetch(1, &mut self.frames).unwrap_or(true);
        port.waiting.fetched(self.now);
        if let Some(limit) = &port.limits.tx {
            charge(limit, self.now, &self.frames);
        }
        port.outbound.fetched_packets += self.frames.len() as u64;
        port.backlog.extend(self.frames.drain(..));
    }

    fn fetch_from<const SEEN: bool>(&mut self, owner: usize, underlay: &mut impl Underlay) -> bool {
        let Some(port) = self.ports[owner].as_ref() else { return false };
        let has_none = !port.readable && port.backlog.is_empty() && port.waiting.is_empty();
        if port.failed || has_none || port.slowness.rests_until.is_some() {
            return false;
        }
        let mut bytes = 0;
        let mut busy = !port.waiting.is_empty() && self.send_waiting::<SEEN>(owner as u32, underlay, &mut bytes);
        let Some(port) = self.ports[owner].as_mut() else { return busy };
        let mut is_held = port.held_until(self.now).is_some();
        if !port.waiting.is_empty() && !is_held {
            self.work.at(At::Fetch, port.owner);
            port.port.relieve();
            if port.waiting.is_probed(self.now) {
                is_held = true;
                self.probe(owner);
            }
        }
        let Some(port) = self.ports[owner].as_mut() else { return busy };
        if port.readable && port.backlog.is_empty() && !is_held {
            let mut budget = port.budget.packets();
            if let Some(limit) = &port.limits.tx {
                if port.held_back_until.is_some_and(|at| at > self.now) {
                    return busy;
                }
                match limit.allowance(self.now) {
                    Allowance::Packets(packets) => budget = budget.min(packets),
                    Allowance::NotBefore(at) => {
                        // Packets wait where they are: in the guest's ring, or in its kernel.
                        port.held_back += u64::from(port.held_back_until.is_none());
                        port.held_back_until = Some(at);
                        self.watch(owner);
                        return busy;
                    }
                }
                port.held_back_until = None;
            }
            self.work.at(At::Fetch, port.owner);
            self.frames.clear();
            match port.port.fetch(budget, &mut self.frames) {
                Ok(more) => port.readable = more,
                Err(error) => {
                    port.failed = true;
                    self.counters.fetch_errors += 1;
                    tracing::error!(port = owner, %error, "a guest's device is gone; the port is out of use until a reload");
                }
            }
            port.budget.fetched(self.frames.len(), budget);
            port.waiting.fetched(self.now);
            if let Some(limit) = &port.limits.tx {
                charge(limit, self.now, &self.frames);
            }
            port.outbound.fetched_packets += self.frames.len() as u64;
            port.backlog.extend(self.frames.drain(..));
        }
        let mut parsed = std::mem::take(&mut self.parsed);
        'enough: while let Some(port) = self.ports[owner].as_mut().filter(|port| !port.backlog.is_empty()) {
            // One vector at a time: data for all of its packets is prefetched together.
            self.work.at(At::Switch, owner as u32);
            parsed.clear();
            let heads = port.backlog.iter().take(self.switch.vector());
            parsed.extend(heads.map(|frame| parse(port.port.bytes(frame.handle).0, frame.len as usize)));
            self.switch.fetch_ahead(PortId(owner as u32), parsed.iter().flatten());
            for parsed in &parsed {
                if bytes > GUEST_BYTES {
                    break 'enough;
                }
                let Some(port) = self.ports[owner].as_mut() else { break 'enough };
                let Some(frame) = port.backlog.pop_front() else { break };
                self.on_guest_frame::<SEEN>(owner as u32, frame, parsed);
                busy = true;
                self.emit_much::<SEEN>(underlay);
                bytes += frame.len as usize;
            }
        }
        if let Some(port) = self.ports[owner].as_mut() {
            port.unfinished = bytes > GUEST_BYTES && !(port.backlog.is_empty() && port.waiting.is_empty());
        }
        self.parsed = parsed;
        self.publish_now::<SEEN>();
        self.watch(owner);
        busy
    }

    /// Sends waiting packets as far as windows have opened, with the destinations taking turns. Returns whether any
    /// were sent; adds their length to `bytes`.
    fn send_waiting<const SEEN: bool>(&mut self, owner: u32, underlay: &mut impl Underlay, bytes: &mut usize) -> bool {
        let (mut busy, mut closed) = (false, Closed::default());
        while *bytes <= GUEST_BYTES
            && let Some(port) = self.port_mut(owner)
            && port.waiting.bound().is_none()
            && let Some((band, frame, departure)) = port.waiting.front(&closed)
        {
            match self.offer::<SEEN>(owner, frame.handle.0, departure) {
                Offered::Taken => {
                    (busy, closed) = (true, Closed::default());
                    *bytes += frame.len as usize;
                    if let Some(port) = self.ports[owner as usize].as_mut() {
                        let room = port.room();
                        port.waiting.pop(self.now, band, room);
                    }
                    self.emit_much::<SEEN>(underlay);
                }
                Offered::Blocked => {
                    if let Some(port) = self.port_mut(owner) {
                        port.waiting.skip(band, &mut closed);
                    }
                }
            }
        }
        busy
    }

    /// Sends in the middle of a turn if many bytes wait to be sent.
    pub(crate) fn emit_much<const SEEN: bool>(&mut self, underlay: &mut impl Underlay) {
        if self.out.data.len() * 1024 + self.batch.bytes() > BATCH_BYTES {
            self.publish_now::<SEEN>();
            self.emit::<SEEN>(underlay);
        }
    }

    /// Publishes frames for other ports of this host and answers of the switch. Once for everything that was fetched,
    /// because each time costs a notification and a cache line that the guest's processor polls.
    fn publish_now<const SEEN: bool>(&mut self) {
        if !self.out.publish.is_empty() {
            self.publish::<SEEN>();
        }
    }

    fn on_guest_frame<const SEEN: bool>(&mut self, owner: u32, frame: TxFrame, parsed: &Result<Parsed, Malformed>) {
        if let Err(reason) = self.switch_frame::<SEEN>(owner, frame, parsed) {
            self.drop_unsent::<SEEN>(owner, frame, reason);
        }
    }

    /// Asks the switch about a packet, and does what it says.
    #[inline(always)]
    fn switch_frame<const SEEN: bool>(
        &mut self,
        owner: u32,
        frame: TxFrame,
        parsed: &Result<Parsed, Malformed>,
    ) -> Result<(), Unsent> {
        self.work.at(At::Switch, owner);
        let Some(port) = self.ports[owner as usize].as_mut() else { return Ok(()) };
        let handle = frame.handle.0;
        if SEEN && let Some(capture) = &mut self.capture {
            capture.held(Stage::GuestTx, Note::outwards("fetched", owner), &port.port, frame.handle, frame.len);
        }
        let (head, _) = port.port.bytes(frame.handle);
        let is_in_part = head.len() < frame.len as usize;
        // Data that was just written in small pieces is used in place, here and below: a copy would read it in large
        // pieces, and wait until the small ones have reached the cache.
        let parsed = parsed.as_ref().map_err(|reason| Unsent::Malformed(*reason))?;
        port.tx_packets += 1;
        port.tx_bytes += u64::from(frame.len);
        if !self.faults.is_empty() && self.faults.at_port(owner, Direction::Tx).drop {
            return Err(Unsent::Fault);
        }
        if SEEN && let Some(capture) = &mut self.capture {
            let note = Note { vni: Some(port.vni.get()), ..Note::outwards("parsed", owner) };
            capture.held(Stage::Pre, note, &port.port, frame.handle, frame.len);
        }
        let is_question = matches!(parsed.dst_port, DHCP_SERVER_PORT | DHCPV6_SERVER_PORT | DNS_SERVER_PORT);
        let head = if is_in_part && is_question && frame.len <= MAX_QUESTION {
            // The switch answers it, so it needs the whole frame.
            self.scratch.clear();
            port.port.copy(frame.handle, 0, frame.len as usize, &mut self.scratch);
            &self.scratch
        } else {
            head
        };
        let verdict = self.switch.from_guest(PortId(owner), head, frame.len as usize, frame.offload, parsed);
        if SEEN && let Some(capture) = &mut self.capture {
            let peer = if let Action::Forward { peer, .. } = verdict.action { Some(peer.0) } else { None };
            let what = capture::action(&verdict.action);
            let note = Note { vni: Some(port.vni.get()), peer, ..Note::outwards(what, owner) };
            capture.held(Stage::Avs, note, &port.port, frame.handle, frame.len);
        }
        let &Verdict { action, rewrite, fragment_to } = verdict;
        match action {
            Action::Answer { .. } => {
                port.complete(frame.handle);
                self.answer::<SEEN>(owner);
                return Ok(());
            }
            Action::Host => {
                self.give_to_host(owner, frame);
                return Ok(());
            }
            Action::Copy => {
                self.copy_to_group::<SEEN>(owner, frame);
                return Ok(());
            }
            Action::Ask { vni, address } => {
                self.ask_route(owner, frame, (vni, address));
                return Ok(());
            }
            Action::Drop(reason) => return Err(Unsent::Switch(reason)),
            Action::Forward { .. } | Action::Deliver { .. } => {}
        }
        let segments = plan(head, frame, fragment_to);
        // By reference: a copy would be made in the hot path.
        let segments = segments.as_ref().map_err(|reason| Unsent::Unsegmentable(*reason))?;
        match action {
            Action::Forward { vni, peer, local, remote, reliable, ordering } => {
                let left = segments.count();
                let class = port.marking.outer(dscp::class_of(head, parsed), reliable);
                port.hold(handle, Held { segments: *segments, rewrite, flow: parsed.flow_hash, class, left });
                let mut reliable = reliable;
                if reliable {
                    port.port.keep(frame.handle);
                }
                if reliable && !checksum_can_be_right(port, parsed, frame) {
                    // The receiver would always refuse it as corrupted.
                    self.counters.bad_guest_checksum_frames += 1;
                    reliable = false;
                }
                let destination = self.peers.get(peer.0).and_then(|p| p.engine).map(|peer| Destination {
                    vni: vni.get(),
                    owner,
                    local,
                    remote,
                    peer,
                    ordering: ordering_of(ordering),
                });
                // A peer refuses connections of a network that is not the port's.
                if !reliable
                    && port.reliable
                    && vni == port.vni
                    && let Some(to) = &destination
                    && self.engine.lacks_observer(self.now, to.peer)
                {
                    self.engine.observe(self.now, to, &mut self.out);
                }
                let reliably = destination.filter(|_| reliable);
                if !port.waiting.is_empty() {
                    port.waiting.passed(self.now, remote);
                }
                self.hand_to_transport::<SEEN>(owner, frame, Departure { vni: vni.get(), peer: peer.0, reliably })?;
            }
            Action::Deliver { port: to, worker } => {
                port.outbound.local_packets += 1;
                if !port.waiting.is_empty() {
                    port.waiting.passed(self.now, parsed.dst_mac);
                }
                self.deliver_locally::<SEEN>(owner, frame, segments, (to.0, worker), rewrite.as_ref());
            }
            Action::Answer { .. } | Action::Host | Action::Copy | Action::Ask { .. } | Action::Drop(_) => {}
        }
        Ok(())
    }

    /// After the switch's decision: the transport takes the packet, or it is sent as plain VXLAN, or it waits for a
    /// window, behind packets that wait for the same one.
    fn hand_to_transport<const SEEN: bool>(
        &mut self,
        owner: u32,
        frame: TxFrame,
        departure: Departure,
    ) -> Result<(), Unsent> {
        let must_wait = self.ports[owner as usize].as_ref().is_some_and(|port| port.waiting.must_wait(&departure));
        if must_wait && self.egress.is_some() {
            return self.queue_for_link(owner, frame, departure);
        }
        if !must_wait && matches!(self.offer::<SEEN>(owner, frame.handle.0, departure), Offered::Taken) {
            return Ok(());
        }
        let Some(port) = self.ports[owner as usize].as_mut() else { return Ok(()) };
        let room = port.room();
        let pushed = port.waiting.push(self.now, frame, (departure, Band::Normal), room);
        pushed.map_err(|Full| Unsent::WindowFull(departure))
    }

    /// Offers a packet to the transport.
    pub(crate) fn offer<const SEEN: bool>(&mut self, owner: u32, handle: u32, departure: Departure) -> Offered {
        self.work.at(At::Transport, owner);
        let held = self.ports[owner as usize].as_ref().and_then(|p| p.held.get(handle as usize).copied().flatten());
        let Some(held) = held else { return Offered::Taken };
        let count = held.segments.count();
        let admission = departure.reliably.map_or(Admission::Plain, |to| {
            let packet = Outbound { handle, segments: count as u8, flow: held.flow };
            self.engine.transmit(self.now, &to, packet, &mut self.out)
        });
        if SEEN && let (Some(capture), Some(port)) = (&mut self.capture, self.ports[owner as usize].as_ref()) {
            let what = match admission {
                Admission::Accepted => "accepted",
                Admission::Plain => "plain VXLAN",
                Admission::Blocked => "waits for a window",
            };
            let (vni, peer) = (Some(departure.vni), Some(departure.peer));
            let note = Note { vni, peer, flow: Some(held.flow), ..Note::outwards(what, owner) };
            capture.held(
                Stage::Rte,
                note,
                &port.port,
                bifrost_port::TxHandle(handle),
                held.segments.frame_len() as u32,
            );
        }
        match admission {
            Admission::Accepted => {
                if let Some(port) = self.port_mut(owner) {
                    port.outbound.accepted_packets += 1;
                }
            }
            Admission::Plain => {
                if let Some(port) = self.port_mut(owner) {
                    port.outbound.plain_packets += 1;
                }
                for segment in 0..count {
                    self.counters.emitted_packets += 1;
                    let reliably = departure.reliably.is_some();
                    self.send_plain::<SEEN>(departure.peer, departure.vni, owner, handle, segment as u8, reliably);
                }
            }
            Admission::Blocked => return Offered::Blocked,
        }
        Offered::Taken
    }
}

/// How a frame is segmented; `fragment_to`: the path MTU, if the frame exceeds it.
#[inline(always)]
pub(crate) fn plan(head: &[u8], frame: TxFrame, fragment_to: Option<u16>) -> Result<Segments, Malformed> {
    let len = frame.len as usize;
    match fragment_to {
        None => Segments::plan(head, len, frame.offload),
        Some(mtu) => Segments::plan_within(head, len, frame.offload, mtu).map_err(|reason| match reason {
            TooLarge::Malformed(reason) => reason,
            // Cannot happen: the switch has checked that it can be fragmented.
            TooLarge::DontFragment | TooLarge::Uncuttable => Malformed::FrameTooLong,
        }),
    }
}

/// Charges fetched frames to a limit, each as the number of packets that it becomes.
fn charge(limit: &Limit, now: Time, frames: &[TxFrame]) {
    let (mut bytes, mut packets) = (0, 0);
    for frame in frames {
        bytes += u64::from(frame.len);
        packets += frame.offload.segment.map_or(1, |s| u64::from(frame.len.div_ceil(u32::from(s.mss).max(1))));
    }
    limit.charge(now, bytes, packets);
}

/// Whether a frame's transport checksum is still to be completed, or complete and right. A frame whose checksum was
/// verified is frozen: the verified bytes are those that are sent, and retransmitted.
fn checksum_can_be_right<P: GuestPort>(port: &mut Port<P>, parsed: &Parsed, frame: TxFrame) -> bool {
    if frame.offload.segment.is_some() || !matches!(parsed.kind, L3::V4 | L3::V6) {
        // Each segment gets its own checksum, of the bytes that are sent.
        return true;
    }
    let (head, tail) = port.port.bytes(frame.handle);
    if let Some(place) = frame.offload.checksum {
        // Completed when the frame is written, from the bytes that are sent.
        return open_checksum_is_right(head, frame.len as usize, parsed, place);
    }
    if head.len() + tail.len() == frame.len as usize {
        return transport_checksum_of_parts(head, tail, parsed) != Checksum::Invalid;
    }
    port.port.freeze(frame.handle);
    let (head, tail) = port.port.bytes(frame.handle);
    transport_checksum_of_parts(head, tail, parsed) != Checksum::Invalid
}

pub(crate) fn ordering_of(ordering: bifrost_avs::Ordering) -> Ordering {
    match ordering {
        bifrost_avs::Ordering::Flow => Ordering::Flow,
        bifrost_avs::Ordering::Strict => Ordering::Strict,
        bifrost_avs::Ordering::Off => Ordering::Off,
    }
}
