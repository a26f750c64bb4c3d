//! From the underlay: decapsulate, transport, verify, place.

use bifrost_avs::{Action, DropReason, GATEWAY_MAC, PeerId as SwitchPeer, Rewrite, Verdict as SwitchVerdict};
use bifrost_nic::ecn::CE;
use bifrost_nic::{Checksum, Malformed, Offload, Parsed, Segments, copy_of, parse, transport_checksum};
use bifrost_port::{Datagram, GuestPort, PlaceError, Service};
use bifrost_rte::{Arrival, LocalVnic, Slot, Time, Verdict};
use bifrost_wire::bifrost::{self, Cid, DataHeader, Packet, Setup};
use bifrost_wire::{Mac, Vni, vxlan};

use crate::capture::{self, Note, Stage};
use crate::changes::{Changes, marks};
use crate::core::Core;
use crate::delayed;
use crate::fault::{Direction, corrupt};
use crate::lost::Lost;
use crate::refusal::Refusal;
use crate::rx_queue::admits;
use crate::siblings::StrayReset;
use crate::stage::Stage as At;

/// TTL that every host sends with; the difference to it is the number of hops.
const INITIAL_TTL: u8 = 64;

/// A datagram of a peer.
#[derive(Clone, Copy)]
struct Inbound<'a> {
    peer: u32,
    vni: Vni,
    datagram: &'a Datagram<'a>,
    /// The faults of the receiving port have already been applied.
    at_port: bool,
}

/// A data packet that its connection accepts.
struct Data<'a> {
    inbound: &'a Inbound<'a>,
    frame: &'a [u8],
    parsed: &'a Parsed,
    checksum: Checksum,
    owner: u32,
    slot: Slot,
}

impl Data<'_> {
    /// Changes of the frame: its ECN codepoint, and what the switch rewrites. A congestion mark on a packet of a guest
    /// without ECN is not lost: the sender's transport responds to it (PROTOCOL §13.2).
    #[inline(always)]
    fn changes(&self, rewrite: Option<Rewrite>) -> Changes {
        Changes { ecn: marks(self.frame, self.parsed, self.inbound.datagram.ecn).unwrap_or_default(), rewrite }
    }
}

/// The switch's decision about a data packet.
enum Judged {
    /// It is placed for the guest, possibly rewritten.
    Place(Option<Rewrite>),
    /// Nothing is left to do.
    Done,
}

impl<P: GuestPort> Core<P> {
    /// A datagram arrived.
    pub(crate) fn on_datagram<const SEEN: bool>(&mut self, datagram: &Datagram<'_>) {
        self.counters.underlay_rx_packets += 1;
        self.counters.underlay_rx_bytes += datagram.payload.len() as u64;
        self.work.at_shared(At::Arrival);
        if SEEN && let Some(capture) = &mut self.capture {
            capture.arrived(Stage::UnderlayRx, "received", datagram, &self.peers);
        }
        match self.siblings.owner_of(datagram, &self.switch) {
            Some(owner) => self.siblings.keep(owner, datagram),
            None => self.on_own_datagram::<SEEN>(datagram),
        }
    }

    /// A datagram that belongs to no other worker.
    pub(crate) fn on_own_datagram<const SEEN: bool>(&mut self, datagram: &Datagram<'_>) {
        let accepted = match self.peers.of_address(datagram.source.ip()) {
            None => Err(Lost::UnknownPeer),
            Some(peer) if self.faults.is_empty() => self.accept::<SEEN>(peer, datagram, false),
            Some(peer) => self.accept_with_faults::<SEEN>(peer, datagram),
        };
        if let Err(lost) = accepted {
            self.lose::<SEEN>(lost, datagram);
        }
    }

    /// Continues with packets that faults have delayed. Returns whether there were any.
    pub(crate) fn release_delayed<const SEEN: bool>(&mut self) -> bool {
        let mut busy = false;
        while let Some(packet) = self.delayed.pop(self.now) {
            busy = true;
            match packet {
                delayed::Packet::Out { lane, class, bytes } => {
                    self.counters.fault_tx_released_packets += 1;
                    self.batch.push(lane, class, |buffer| buffer.extend_from_slice(&bytes));
                }
                delayed::Packet::In { bytes, source, plain, ecn, ttl, at_port } => {
                    self.counters.fault_rx_released_packets += 1;
                    self.work.at_shared(At::Arrival);
                    let service = if plain { Service::Vxlan } else { Service::Bifrost };
                    let datagram = Datagram { payload: &bytes, source, service, ecn, ttl, rx_time_ns: self.now.0 };
                    match self.peers.of_address(source.ip()) {
                        Some(peer) => {
                            if let Err(lost) = self.accept::<SEEN>(peer, &datagram, at_port) {
                                self.lose::<SEEN>(lost, &datagram);
                            }
                        }
                        None => self.counters.gone_packets += 1,
                    }
                }
            }
        }
        busy
    }

    fn accept_with_faults<const SEEN: bool>(&mut self, peer: u32, datagram: &Datagram<'_>) -> Result<(), Lost> {
        let base = self.peers.get(peer).map_or(0, |p| p.config.source_port_base);
        let path = datagram.source.port().wrapping_sub(base).min(u16::from(u8::MAX)) as u8;
        let fate = self.faults.on_path(peer, path, Direction::Rx);
        if fate.drop {
            return Err(Lost::FaultDropped);
        }
        if fate.corrupt.is_some() {
            // UDP's checksum detects any single flipped bit, so the kernel would not have delivered the datagram.
            return Err(Lost::FaultCorrupted);
        }
        if fate.duplicate {
            self.counters.fault_duplicated_packets += 1;
            self.counters.fault_rx_duplicated_packets += 1;
            if let Err(lost) = self.accept::<SEEN>(peer, datagram, false) {
                self.lose::<SEEN>(lost, datagram);
            }
        }
        if fate.delay_ns == 0 {
            return self.accept::<SEEN>(peer, datagram, false);
        }
        self.counters.fault_delayed_packets += 1;
        self.counters.fault_rx_delayed_packets += 1;
        self.put_off(fate.delay_ns, delayed::Packet::copy_of(datagram));
        Ok(())
    }

    /// Delays a packet because of a fault.
    pub(crate) fn put_off(&mut self, delay_ns: u64, packet: delayed::Packet) {
        self.counters.fault_queued_packets += 1;
        if !self.delayed.push(self.now.after(delay_ns), packet) {
            self.counters.fault_overflow_packets += 1;
        }
    }

    /// `at_port`: the faults of the receiving port have already been applied.
    fn accept<const SEEN: bool>(&mut self, peer: u32, datagram: &Datagram<'_>, at_port: bool) -> Result<(), Lost> {
        let (vni, payload) = vxlan::parse(datagram.payload).map_err(|_| Lost::BadVxlan)?;
        let inbound = Inbound { peer, vni, datagram, at_port };
        match datagram.service {
            Service::Vxlan => self.on_plain::<SEEN>(&inbound, payload),
            Service::Bifrost => self.on_bifrost::<SEEN>(&inbound, payload)?,
        }
        Ok(())
    }

    fn on_bifrost<const SEEN: bool>(&mut self, inbound: &Inbound<'_>, payload: &[u8]) -> Result<(), Lost> {
        let &Inbound { peer, vni, datagram, .. } = inbound;
        let engine_peer = self.peers.get(peer).and_then(|p| p.engine).ok_or(Lost::UnknownPeer)?;
        let arrival = Arrival {
            peer: engine_peer,
            vni: vni.get(),
            nic_rx: Time(datagram.rx_time_ns),
            hops: INITIAL_TTL.saturating_sub(datagram.ttl).min(15),
            marked: datagram.ecn == CE,
        };
        if let Some((header, frame)) = bifrost::parse_data_packet(payload) {
            self.on_data::<SEEN>(inbound, &arrival, &header, frame);
            return Ok(());
        }
        let packet = bifrost::parse(payload).map_err(Lost::Refused)?;
        let Packet::Bundle(bundle) = packet else {
            self.on_packet::<SEEN>(inbound, &arrival, packet);
            return Ok(());
        };
        for (i, packet) in bundle.packets().enumerate() {
            self.counters.unbundled_packets += u64::from(i > 0);
            self.work.at_shared(At::Arrival);
            match bifrost::parse(packet) {
                Ok(packet) => self.on_packet::<SEEN>(inbound, &arrival, packet),
                Err(reason) => self.lose::<SEEN>(Lost::Refused(reason), datagram),
            }
        }
        Ok(())
    }

    /// A packet of the transport, alone or in a bundle.
    fn on_packet<const SEEN: bool>(&mut self, inbound: &Inbound<'_>, arrival: &Arrival, packet: Packet<'_>) {
        let (now, &Inbound { peer, vni, .. }) = (self.now, inbound);
        if let Packet::Data(header, frame) = packet {
            return self.on_data::<SEEN>(inbound, arrival, &header, frame);
        }
        self.counters.control_rx_packets += 1;
        self.work.cid = cid_of(&packet);
        self.work.at_shared(At::Control);
        match packet {
            Packet::Ack(ack) => self.engine.on_ack(now, arrival, &ack, &mut self.out),
            Packet::Probe(header) => self.engine.on_probe(now, arrival, &header, &mut self.out),
            Packet::Skip(header) => self.engine.on_skip(now, arrival, &header, &mut self.out),
            Packet::Setup(setup) => {
                let vnic = self.vnic_for(vni, peer, &setup);
                self.engine.on_setup(now, arrival, &setup, vnic, &mut self.out);
            }
            Packet::Reset(reset) => self.on_reset(StrayReset { peer, vni: vni.get(), reset, workers_left: u16::MAX }),
            // A bundle cannot contain another one, which its parser checks. Data is handled above.
            Packet::Bundle(_) | Packet::Data(..) => {}
        }
    }

    /// A data packet of the transport.
    #[inline]
    fn on_data<const SEEN: bool>(
        &mut self,
        inbound: &Inbound<'_>,
        arrival: &Arrival,
        header: &DataHeader,
        frame: &[u8],
    ) {
        // A packet that a fault drops never reaches the engine, as if it had not arrived.
        self.work.cid = header.cid;
        self.work.at_shared(At::Data);
        let parsed = parse(frame, frame.len());
        if !self.faults.is_empty() && !inbound.at_port && self.port_fault::<SEEN>(inbound, header, frame, &parsed) {
            return;
        }
        let is_overload = self.pressure.is_on() && !inbound.at_port && {
            let owner = self.engine.owner_of(header.cid);
            self.exceeds_share(owner, frame)
        };
        // The checksum of a packet that is not delivered does not matter.
        let checksum = match &parsed {
            Ok(parsed) if !is_overload => transport_checksum(frame, parsed),
            _ => Checksum::None,
        };
        let note = Note { peer: Some(inbound.peer), ..Note::inwards("").of_data(inbound.vni, header) };
        if SEEN
            && checksum != Checksum::Invalid
            && let Some(capture) = &mut self.capture
        {
            capture.frame(Stage::Pre, note.saying(capture::checked(checksum)), frame, frame.len());
        }
        let before = if SEEN { Some(*self.engine.counters()) } else { None };
        let verdict = self.engine.on_data(self.now, arrival, header, &mut self.out);
        let Verdict::Place { owner, slot } = verdict else {
            if checksum == Checksum::Invalid {
                return self.refuse::<SEEN>(Refusal::BadChecksum, None, None, note, frame);
            }
            self.counters.not_accepted_packets += 1;
            if SEEN && let Some(before) = before {
                let what = capture::verdict(&before, self.engine.counters());
                self.see_dropped::<SEEN>(note.saying(what), frame);
            }
            return;
        };
        let note = Note { port: Some(owner), ..note };
        let placed = if checksum == Checksum::Invalid {
            Err(Refusal::BadChecksum)
        } else {
            if SEEN && let Some(capture) = &mut self.capture {
                capture.frame(Stage::Rte, note.saying("new"), frame, frame.len());
            }
            match parsed {
                _ if is_overload => Err(Refusal::Overload),
                Err(reason) => Err(Refusal::Malformed(reason)),
                Ok(parsed) => {
                    let data = Data { inbound, frame, parsed: &parsed, checksum, owner, slot };
                    self.judge::<SEEN>(&data, note).and_then(|placed| match placed {
                        Judged::Place(rewrite) => self.place_data::<SEEN>(&data, rewrite, note),
                        Judged::Done => Ok(()),
                    })
                }
            }
        };
        if let Err(refusal) = placed {
            self.refuse::<SEEN>(refusal, Some(owner), Some(slot), note, frame);
        }
    }

    /// Finds the packet's port and checks whether the peer may send to it.
    #[inline(always)]
    fn judge<const SEEN: bool>(&mut self, data: &Data<'_>, note: Note) -> Result<Judged, Refusal> {
        let &Data { inbound, frame, parsed, owner, slot, .. } = data;
        self.work.at(At::Judge, owner);
        // PROTOCOL §16.2: a connection carries only frames between its two vNICs, or routed from one to the other.
        let between_vnics = self.engine.pair_of(slot).is_some_and(|pair| {
            parsed.dst_mac == pair.local && (parsed.src_mac == pair.remote || parsed.src_mac == GATEWAY_MAC)
        });
        let &SwitchVerdict { action, rewrite, fragment_to } =
            self.switch.from_underlay(inbound.vni, SwitchPeer(inbound.peer), frame, parsed);
        match action {
            Action::Deliver { port, .. } if port.0 == owner && between_vnics => {
                let Some(mtu) = fragment_to else {
                    if SEEN && let Some(capture) = &mut self.capture {
                        capture.frame(Stage::Avs, note.saying("to a port of this host"), frame, frame.len());
                    }
                    return Ok(Judged::Place(rewrite));
                };
                // One packet cannot be placed as several: the transport is done with it, and IP does not keep fragments
                // in order.
                self.engine.policy_dropped(self.now, slot, &mut self.out);
                self.with_changes(frame, parsed, data.changes(rewrite), |core, frame| {
                    core.deliver_fragments::<SEEN>(owner, frame, mtu);
                });
                Ok(Judged::Done)
            }
            Action::Deliver { .. } | Action::Forward { .. } | Action::Host | Action::Copy | Action::Ask { .. } => {
                Err(Refusal::WrongVnic)
            }
            Action::Answer { vni } => {
                let refusal = Refusal::Switch(DropReason::PathMtu);
                self.refuse::<SEEN>(refusal, Some(owner), Some(slot), note, frame);
                self.send_answer::<SEEN>(inbound.peer, vni, parsed.flow_hash);
                Ok(Judged::Done)
            }
            Action::Drop(reason) => Err(Refusal::Switch(reason)),
        }
    }

    /// Copies the frame into a receive buffer of the guest, not yet visible.
    #[inline(always)]
    fn place_data<const SEEN: bool>(
        &mut self,
        data: &Data<'_>,
        rewrite: Option<Rewrite>,
        note: Note,
    ) -> Result<(), Refusal> {
        let &Data { frame, parsed, checksum, owner, slot, .. } = data;
        let port = self.ports.get_mut(owner as usize).and_then(Option::as_mut).ok_or(Refusal::Gone)?;
        if port.is_short() && self.engine.must_wait(slot).is_some_and(|ahead| !port.may_wait(ahead)) {
            // The packets for which it waits need room, too; otherwise none of them could ever be published.
            return Err(Refusal::ReorderFull);
        }
        if port.limits.rx.as_ref().is_some_and(|limit| !admits(limit, port.rx_queue.as_deref(), self.now, frame)) {
            return Err(Refusal::RateLimited);
        }
        if port.slowness.rests(self.now) {
            return Err(Refusal::SlowPort);
        }
        self.work.at(At::Place, owner);
        let changes = data.changes(rewrite);
        let shown = if changes.is_none() { frame } else { changes.apply(&mut self.changed, frame, parsed) };
        let handle = port.port.place(shown, checksum == Checksum::Valid).map_err(|error| match error {
            PlaceError::NoBuffer => Refusal::NoGuestBuffer,
            PlaceError::TooLarge => Refusal::TooLarge,
        })?;
        self.work.at(At::Data, owner);
        port.hidden += 1;
        if SEEN && let Some(capture) = &mut self.capture {
            capture.placed(note.saying("shown to the guest"), handle.0, shown);
        }
        if !self.engine.placed(self.now, slot, handle.0, &mut self.out) {
            port.port.discard(handle);
            port.hidden -= 1;
            return Err(Refusal::NoPage);
        }
        port.rx_packets += 1;
        self.counters.guest_rx_packets += 1;
        port.rx_bytes += frame.len() as u64;
        Ok(())
    }

    /// A frame is not placed: counts it, tells the sender if the transport carried it, and shows it to a capture.
    #[cold]
    pub(crate) fn refuse<const SEEN: bool>(
        &mut self,
        refusal: Refusal,
        owner: Option<u32>,
        slot: Option<Slot>,
        note: Note,
        frame: &[u8],
    ) {
        let port = owner.and_then(|owner| self.ports.get_mut(owner as usize)).and_then(Option::as_mut);
        refusal.count(port, &mut self.counters);
        if let Some(slot) = slot {
            refusal.tell(self.now, slot, &mut self.engine, &mut self.out);
        }
        self.see_dropped::<SEEN>(Note { port: owner.or(note.port), ..note.saying(refusal.name()) }, frame);
    }

    /// Whether a frame exceeds its guest's share while this worker cannot keep up.
    #[cold]
    fn exceeds_share(&mut self, owner: Option<u32>, frame: &[u8]) -> bool {
        let port = owner.and_then(|owner| self.ports.get_mut(owner as usize)).and_then(Option::as_mut);
        port.is_some_and(|port| !self.pressure.admits(&mut port.load, frame.len()))
    }

    /// Applies the faults of a data packet's destination port. Returns whether the packet was taken, temporarily or for
    /// good.
    #[cold]
    fn port_fault<const SEEN: bool>(
        &mut self,
        inbound: &Inbound<'_>,
        header: &DataHeader,
        frame: &[u8],
        parsed: &Result<Parsed, Malformed>,
    ) -> bool {
        let &Inbound { vni, datagram, .. } = inbound;
        let Some(owner) = self.engine.owner_of(header.cid) else { return false };
        let fate = self.faults.at_port(owner, Direction::Rx);
        if fate.drop {
            let note = Note { peer: Some(inbound.peer), ..Note::inwards("").of_data(vni, header) };
            self.refuse::<SEEN>(Refusal::Fault, Some(owner), None, note, frame);
            return true;
        }
        let alone = || delayed::Packet::at_port(datagram, [&vxlan::emit(vni)[..], &header.emit(), frame].concat());
        if fate.duplicate {
            self.counters.fault_duplicated_packets += 1;
            self.put_off(0, alone());
        }
        if fate.delay_ns > 0 {
            self.counters.fault_delayed_packets += 1;
            self.counters.fault_rx_delayed_packets += 1;
            self.put_off(fate.delay_ns, alone());
            return true;
        }
        let Some(bit) = fate.corrupt else { return false };
        self.counters.fault_corrupted_packets += 1;
        self.scratch.clear();
        self.scratch.extend_from_slice(frame);
        corrupt(&mut self.scratch, bit);
        // Drops the packet if a receiver would notice: a frame that can no longer be parsed is as damaged as one with a
        // wrong checksum.
        let l4 = parsed.as_ref().map_or(0, |parsed| usize::from(parsed.l4));
        let noticed = match parse(&self.scratch, self.scratch.len()) {
            Ok(parsed) => transport_checksum(&self.scratch, &parsed) == Checksum::Invalid,
            Err(_) => true,
        } || self.scratch[..l4] != frame[..l4];
        if noticed {
            let note = Note { peer: Some(inbound.peer), ..Note::inwards("").of_data(vni, header) };
            self.refuse::<SEEN>(Refusal::BadChecksum, Some(owner), None, note, frame);
        }
        noticed
    }

    fn on_plain<const SEEN: bool>(&mut self, inbound: &Inbound<'_>, frame: &[u8]) {
        let note = Note { peer: Some(inbound.peer), vni: Some(inbound.vni.get()), ..Note::inwards("") };
        if let Err((refusal, owner)) = self.deliver_from_peer::<SEEN>(inbound, note, frame) {
            self.refuse::<SEEN>(refusal, owner, None, note, frame);
        }
    }

    /// Delivers plain VXLAN. An error names the destination port, if it is known.
    #[inline(always)]
    fn deliver_from_peer<const SEEN: bool>(
        &mut self,
        inbound: &Inbound<'_>,
        note: Note,
        frame: &[u8],
    ) -> Result<(), (Refusal, Option<u32>)> {
        let &Inbound { peer, vni, datagram, at_port } = inbound;
        if self.pressure.is_on()
            && !at_port
            && let Some(to) = frame.first_chunk()
            && let Some(&owner) = self.vnics.get(&(vni, Mac(*to)))
            && self.exceeds_share(Some(owner), frame)
        {
            return Err((Refusal::Overload, Some(owner)));
        }
        let parsed = parse(frame, frame.len()).map_err(|reason| (Refusal::Malformed(reason), None))?;
        if SEEN && let Some(capture) = &mut self.capture {
            capture.frame(Stage::Pre, note.saying("parsed"), frame, frame.len());
        }
        self.work.to = frame.first_chunk().map(|to| (vni, Mac(*to)));
        self.work.cid = Cid::NONE;
        self.work.at_shared(At::Judge);
        let mut sender = peer;
        if !self.moved.is_empty() {
            match self.follow::<SEEN>((peer, vni, datagram.ecn), note, frame, &parsed) {
                Some(host) => sender = host,
                None => return Ok(()),
            }
        }
        let &SwitchVerdict { action, rewrite, fragment_to } =
            self.switch.from_underlay(vni, SwitchPeer(sender), frame, &parsed);
        let port = match action {
            Action::Deliver { port, .. } => port,
            Action::Answer { vni } => {
                self.refuse::<SEEN>(Refusal::Switch(DropReason::PathMtu), None, None, note, frame);
                self.send_answer::<SEEN>(sender, vni, parsed.flow_hash);
                return Ok(());
            }
            // A peer's frame is never forwarded, except for guests that have moved.
            Action::Forward { .. } | Action::Host | Action::Copy | Action::Ask { .. } => {
                return Err((Refusal::WrongVnic, None));
            }
            Action::Drop(reason) => return Err((Refusal::Switch(reason), None)),
        };
        let note = Note { port: Some(port.0), ..note };
        if SEEN && let Some(capture) = &mut self.capture {
            capture.frame(Stage::Avs, note.saying("to a port of this host"), frame, frame.len());
        }
        if !self.faults.is_empty() && !at_port && self.plain_fault::<SEEN>(port.0, datagram, note, frame) {
            return Ok(());
        }
        let ecn = marks(frame, &parsed, datagram.ecn).ok_or((Refusal::MarkedNotEct, Some(port.0)))?;
        self.counters.plain_rx_packets += 1;
        let checksum = transport_checksum(frame, &parsed);
        if checksum == Checksum::Invalid {
            // Delivered nevertheless: on plain VXLAN the guest decides about it.
            self.counters.bad_plain_checksum_frames += 1;
        }
        self.with_changes(frame, &parsed, Changes { ecn, rewrite }, |core, frame| match fragment_to {
            None => core.deliver_plain::<SEEN>(port.0, frame, checksum == Checksum::Valid),
            Some(mtu) => core.deliver_fragments::<SEEN>(port.0, frame, mtu),
        });
        Ok(())
    }

    /// Applies the faults of the destination port of plain VXLAN. Returns whether the frame was taken, temporarily or
    /// for good.
    #[cold]
    fn plain_fault<const SEEN: bool>(&mut self, owner: u32, datagram: &Datagram<'_>, note: Note, frame: &[u8]) -> bool {
        let fate = self.faults.at_port(owner, Direction::Rx);
        if fate.drop {
            self.refuse::<SEEN>(Refusal::Fault, Some(owner), None, note, frame);
            return true;
        }
        if fate.delay_ns == 0 && !fate.duplicate && fate.corrupt.is_none() {
            return false;
        }
        self.counters.fault_delayed_packets += u64::from(fate.delay_ns > 0);
        self.counters.fault_duplicated_packets += u64::from(fate.duplicate);
        self.counters.fault_rx_delayed_packets += 1;
        for _ in 0..1 + usize::from(fate.duplicate) {
            let mut copy = delayed::Packet::at_port(datagram, datagram.payload.to_vec());
            if let (Some(bit), delayed::Packet::In { bytes, .. }) = (fate.corrupt, &mut copy) {
                self.counters.fault_corrupted_packets += 1;
                // Corrupts the frame, not the VXLAN header, because this fault is behind decapsulation.
                corrupt(&mut bytes[vxlan::HEADER_LEN..], bit);
            }
            self.put_off(fate.delay_ns, copy);
        }
        true
    }

    /// Places a frame in fragments that its guest accepts.
    #[cold]
    fn deliver_fragments<const SEEN: bool>(&mut self, owner: u32, frame: &[u8], mtu: u16) {
        // The switch has checked that it can be fragmented.
        let Ok(pieces) = Segments::plan_within(frame, frame.len(), Offload::default(), mtu) else { return };
        self.counters.fragmented_packets += 1;
        let mut piece = std::mem::take(&mut self.scratch);
        for index in 0..pieces.count() {
            self.counters.fragment_packets += 1;
            piece.clear();
            pieces.write(index, |from, to, out| copy_of(frame, &[], from, to, out), &mut piece);
            self.deliver_plain::<SEEN>(owner, &piece, false);
        }
        self.scratch = piece;
    }

    /// Shows a dropped frame to the capture.
    #[inline(always)]
    pub(crate) fn see_dropped<const SEEN: bool>(&mut self, note: Note, frame: &[u8]) {
        if SEEN && let Some(capture) = &mut self.capture {
            capture.dropped(note, frame, frame.len());
        }
    }

    /// The local vNIC that a peer's set-up names, if it exists here and the other vNIC belongs to the peer.
    fn vnic_for(&self, vni: Vni, peer: u32, setup: &Setup) -> Option<LocalVnic> {
        if !self.switch.is_at_peer(vni, setup.from, SwitchPeer(peer)) {
            return None;
        }
        let owner = *self.vnics.get(&(vni, setup.to))?;
        let port = self.ports.get(owner as usize)?.as_ref()?;
        Some(LocalVnic { owner, ordering: port.ordering, reliable: port.reliable })
    }
}

/// The connection to which a packet is addressed, if any.
fn cid_of(packet: &Packet<'_>) -> Cid {
    match packet {
        Packet::Data(header, _) | Packet::Probe(header) | Packet::Skip(header) => header.cid,
        Packet::Ack(ack) => ack.cid,
        Packet::Setup(_) | Packet::Reset(_) | Packet::Bundle(_) => Cid::NONE,
    }
}
