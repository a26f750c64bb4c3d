//! To the underlay: segment, encapsulate, send, release.

use bifrost_nic::ecn::{self, NOT_ECT};
use bifrost_port::{GuestPort, LaneId, TxHandle, Underlay};
use bifrost_rte::{Control, ControlOut, DataOut, Output, PlainOut};
use bifrost_wire::bifrost::{self, Cid, DataHeader, Packet, PathId};
use bifrost_wire::{Vni, vxlan};

use crate::bundle::Encap;
use crate::capture::{self, Note, Stage};
use crate::core::Core;
use crate::delayed;
use crate::fault::Direction;
use crate::kept::Flow;
use crate::stage::Stage as At;

/// Result of sending a data packet.
enum Sent {
    /// It is in the batch.
    Left,
    /// Not retransmitted, because the guest has reused its buffer.
    Reused,
}

impl<P: GuestPort> Core<P> {
    /// Sends what the transport requested, and returns released buffers. Returns whether there was any work.
    pub(crate) fn emit<const SEEN: bool>(&mut self, underlay: &mut impl Underlay) -> bool {
        let busy = !self.out.is_empty() || !self.batch.is_empty();
        if !busy {
            return false;
        }
        let first = self.batch.len();
        let mut leaving = Leaving::of(self);
        if leaving.core.control_class != 0 {
            // With its own class it shares no datagram with data, and need not be sent last.
            leaving.send_control();
        }
        while let Some(data) = leaving.out.data.get(leaving.data) {
            leaving.data += 1;
            let core = &mut *leaving.core;
            let unsent = match core.send_data::<SEEN>(data) {
                Some(Sent::Left) => continue,
                Some(Sent::Reused) => &mut core.counters.reused_buffer_packets,
                None => &mut core.counters.gone_tx_packets,
            };
            *unsent += 1;
            // It was not lost on its path, and will never arrive.
            if core.engine.withdraw(core.now, data) {
                core.release(data.owner, data.handle);
            }
        }
        leaving.send_control();
        leaving.core.bundler.close();
        if !leaving.core.faults.is_empty() {
            leaving.core.work.at_shared(At::Loop);
            leaving.core.spoil_from(first);
        }
        while let Some(&plain) = leaving.out.plain.get(leaving.plain) {
            leaving.plain += 1;
            leaving.core.send_again_plain::<SEEN>(plain);
        }
        // The batch has copies of all bytes, so buffers can be returned before it is sent.
        while let Some(&(owner, handle)) = leaving.out.release.get(leaving.release) {
            leaving.release += 1;
            leaving.core.release(owner, handle);
        }
        drop(leaving);
        self.send_batch::<SEEN>(underlay);
        true
    }

    /// Sends a segment that the transport no longer tracks.
    fn send_again_plain<const SEEN: bool>(&mut self, plain: PlainOut) {
        self.work.at(At::Emit, plain.owner);
        let intact = self.port_mut(plain.owner).is_none_or(|p| p.port.is_intact(TxHandle(plain.handle)));
        if !intact {
            self.counters.reused_buffer_packets += 1;
            self.release(plain.owner, plain.handle);
        } else if let Some(peer) = self.peers.of_engine(plain.peer).map(|p| p.config.id) {
            self.send_plain::<SEEN>(peer, plain.vni, plain.owner, plain.handle, plain.segment, true);
        } else {
            self.counters.gone_tx_packets += 1;
            self.release(plain.owner, plain.handle);
        }
    }

    fn send_batch<const SEEN: bool>(&mut self, underlay: &mut impl Underlay) {
        let (packets, bytes) = (self.batch.len() as u64, self.batch.bytes() as u64);
        if SEEN && let Some(capture) = &mut self.capture {
            for (lane, class, payload) in self.batch.iter() {
                capture.leaving(lane, class, payload, &self.peers);
            }
        }
        self.work.at_shared(At::Send);
        if packets > 0 {
            underlay.send(&mut self.batch);
        }
        if let Some(egress) = &self.egress {
            egress.charge(self.now, packets, bytes);
        }
        self.counters.underlay_tx_packets += packets;
        self.counters.underlay_tx_bytes += bytes;
        self.work.at_shared(At::Loop);
    }

    /// Writes one data packet: VXLAN, BIFROST header, one segment of the guest's frame. `None`: its port, buffer or
    /// peer is gone.
    fn send_data<const SEEN: bool>(&mut self, data: &DataOut) -> Option<Sent> {
        self.work.at(At::Emit, data.owner);
        let vni = Vni::new(data.vni)?;
        let peer = self.peers.of_engine(data.peer)?;
        let (lane, id) = (peer.lane(data.header.path), peer.config.id);
        let (version, cid) = (Some(data.header.version), data.header.cid);
        let port = self.ports.get_mut(data.owner as usize)?.as_mut()?;
        if data.header.retransmit && !port.port.is_intact(TxHandle(data.handle)) {
            return Some(Sent::Reused);
        }
        let held = port.held.get(data.handle as usize)?.as_ref()?;
        let flow = held.flow;
        let ecn = if data.header.ecn { ecn::outer_of_reliable(held.class & 3) } else { NOT_ECT };
        let encap = Encap { lane, class: held.class & !3 | ecn, vni, cid, version };
        let frame_len = held.segments.len(u16::from(data.segment));
        let joined = self.bundler.push(&mut self.batch, encap, DataHeader::LEN + frame_len, |buffer| {
            buffer.extend_from_slice(&data.header.emit());
            let frame = buffer.len();
            let copy = |from, to, out: &mut Vec<u8>| port.port.copy(TxHandle(data.handle), from, to, out);
            held.segments.write(u16::from(data.segment), copy, buffer);
            if let Some(rewrite) = held.rewrite {
                rewrite.apply(&mut buffer[frame..]);
            }
        });
        if SEEN && let (Some(capture), Some(payload)) = (&mut self.capture, self.batch.last()) {
            let what = if data.header.retransmit { "sent again" } else { "sent" };
            let note = Note { peer: Some(id), flow: Some(flow), ..Note::outwards(what, data.owner) };
            let frame = &payload[payload.len() - frame_len.min(payload.len())..];
            capture.frame(Stage::Post, note.of_data(vni, &data.header), frame, frame.len());
        }
        self.counters.bundled_packets += u64::from(joined);
        Some(Sent::Left)
    }

    fn send_control(&mut self, control: &ControlOut) -> Option<()> {
        let vni = Vni::new(control.vni)?;
        let peer = self.peers.of_engine(control.peer)?;
        let (version, cid, len) = match &control.packet {
            Control::Ack(ack) => (Some(ack.version), ack.cid, ack.len()),
            Control::Probe(header) | Control::Skip(header) => (None, header.cid, DataHeader::LEN),
            // These may be for any worker of the peer.
            Control::Setup(_) | Control::Reset(_) => (None, Cid::NONE, 0),
        };
        let class = match &control.packet {
            Control::Ack(_) | Control::Setup(_) | Control::Reset(_) => self.control_class,
            // These measure how the path treats data.
            Control::Probe(_) | Control::Skip(_) => NOT_ECT,
        };
        let encap = Encap { lane: peer.lane(control.path), class, vni, cid, version };
        let joined = self.bundler.push(&mut self.batch, encap, len, |buffer| match &control.packet {
            Control::Ack(ack) => ack.emit(buffer),
            Control::Probe(header) => buffer.extend_from_slice(&header.emit()),
            Control::Skip(header) => buffer.extend_from_slice(&header.emit_skip()),
            Control::Setup(setup) => buffer.extend_from_slice(&setup.emit()),
            Control::Reset(reset) => buffer.extend_from_slice(&reset.emit()),
        });
        self.counters.bundled_packets += u64::from(joined);
        Some(())
    }

    /// Sends one segment as plain VXLAN and releases it. Keeps a copy if it was to be carried `reliably` and all paths
    /// have failed.
    pub(crate) fn send_plain<const SEEN: bool>(
        &mut self,
        peer: u32,
        vni: u32,
        owner: u32,
        handle: u32,
        segment: u8,
        reliably: bool,
    ) {
        let sent = self.write_plain::<SEEN>(peer, vni, owner, handle, segment);
        if let Some((path, lane, class)) = sent {
            self.counters.plain_tx_packets += 1;
            if reliably {
                self.keep_last(peer, owner, handle, class);
            }
            if !self.faults.is_empty() {
                self.spoil_last(peer, PathId::masked(path), lane, class);
            }
        } else {
            self.counters.gone_tx_packets += 1;
        }
        self.release(owner, handle);
    }

    /// Keeps a copy of the last frame of the batch, if all paths to its peer have failed.
    #[cold]
    fn keep_last(&mut self, peer: u32, owner: u32, handle: u32, class: u8) {
        if !self.is_silent(peer) {
            return;
        }
        let port = self.ports.get(owner as usize).and_then(Option::as_ref);
        let held = port.and_then(|port| port.held.get(handle as usize)?.as_ref());
        let (Some(held), Some(frame)) = (held, self.batch.last()) else { return };
        self.kept.keep(self.now, Flow { peer, owner, hash: held.flow }, class, frame);
        self.counters.kept_packets += 1;
    }

    /// Sends the kept frames of each peer that answers again, on a path that does.
    #[cold]
    #[inline(never)]
    pub(crate) fn send_kept<const SEEN: bool>(&mut self) {
        while let Some(id) = self.next_answering() {
            self.send_kept_for::<SEEN>(id);
        }
    }

    /// A peer that answers and has kept frames.
    fn next_answering(&self) -> Option<u32> {
        self.kept.peers().find(|id| !self.is_silent(*id))
    }

    /// Whether all paths to a peer have failed, and none has answered since.
    fn is_silent(&self, peer: u32) -> bool {
        let engine = self.peers.get(peer).and_then(|p| p.engine);
        engine.is_some_and(|id| self.engine.has_fallen(id))
    }

    fn send_kept_for<const SEEN: bool>(&mut self, id: u32) {
        let frames = self.kept.take(self.now, id);
        let Some(peer) = self.peers.get(id) else { return };
        let answering = peer.engine.and_then(|engine| self.engine.selected_paths(engine).first().copied());
        let path = answering.unwrap_or_default();
        let lane = peer.vxlan.get(path.index()).copied().unwrap_or(peer.vxlan[0]);
        self.work.at_shared(At::Emit);
        for frame in frames {
            self.batch.push(lane, frame.class, |buffer| buffer.extend_from_slice(&frame.bytes));
            self.counters.emitted_packets += 1;
            self.counters.plain_tx_packets += 1;
            self.counters.kept_tx_packets += 1;
            if SEEN && let Some(capture) = &mut self.capture {
                let note =
                    Note { peer: Some(id), path: Some(path.get()), ..Note::outwards("sent again", frame.flow.owner) };
                let inner = frame.bytes.get(vxlan::HEADER_LEN..).unwrap_or_default();
                capture.frame(Stage::Post, note, inner, inner.len());
            }
            if !self.faults.is_empty() {
                self.spoil_last(id, path, lane, frame.class);
            }
        }
    }

    /// Sends the switch's answer to the sender of a packet from `peer`, of the given flow.
    #[cold]
    pub(crate) fn send_answer<const SEEN: bool>(&mut self, peer: u32, vni: Vni, flow: u32) {
        let note = Note { peer: Some(peer), what: "the switch's answer", ..Note::default() };
        self.send_frame::<SEEN>(peer, (vni, flow, NOT_ECT), note, None);
    }

    /// Sends a frame that no guest of this host has sent, as plain VXLAN; `None`: the switch's answer. `class`: the
    /// outer traffic class. Returns whether the peer exists.
    #[cold]
    pub(crate) fn send_frame<const SEEN: bool>(
        &mut self,
        peer: u32,
        (vni, flow, class): (Vni, u32, u8),
        note: Note,
        frame: Option<&[u8]>,
    ) -> bool {
        let Some((path, lane, moved)) = self.peers.plain_lane(peer, flow, &mut self.engine, self.now) else {
            return false;
        };
        self.counters.on_plain_path(moved);
        let frame = frame.unwrap_or_else(|| self.switch.answer());
        self.batch.push(lane, class, |buffer| {
            buffer.extend_from_slice(&vxlan::emit(vni));
            buffer.extend_from_slice(frame);
        });
        self.counters.emitted_packets += 1;
        self.counters.plain_tx_packets += 1;
        if SEEN && let Some(capture) = &mut self.capture {
            let (vni, path) = (Some(vni.get()), Some(path));
            let note = Note { direction: capture::Direction::Out, vni, path, ..note };
            capture.frame(Stage::Post, note, frame, frame.len());
        }
        if !self.faults.is_empty() {
            self.spoil_last(peer, PathId::masked(path), lane, class);
        }
        true
    }

    /// One segment of a buffer is no longer needed.
    fn release(&mut self, owner: u32, handle: u32) {
        self.work.at(At::Release, owner);
        let Some(port) = self.port_mut(owner) else { return };
        port.release(handle);
        if !port.watched {
            // A guest whose buffers were all held can be fetched from again.
            self.watch(owner as usize);
        }
    }

    fn write_plain<const SEEN: bool>(
        &mut self,
        peer: u32,
        vni: u32,
        owner: u32,
        handle: u32,
        segment: u8,
    ) -> Option<(u8, LaneId, u8)> {
        self.work.at(At::Emit, owner);
        let vni = Vni::new(vni)?;
        let port = self.ports.get(owner as usize)?.as_ref()?;
        let held = port.held.get(handle as usize)?.as_ref()?;
        let (path, lane, moved) = self.peers.plain_lane(peer, held.flow, &mut self.engine, self.now)?;
        self.counters.on_plain_path(moved);
        let class = held.class;
        self.batch.push(lane, class, |buffer| {
            buffer.extend_from_slice(&vxlan::emit(vni));
            let frame = buffer.len();
            let copy = |from, to, out: &mut Vec<u8>| port.port.copy(TxHandle(handle), from, to, out);
            held.segments.write(u16::from(segment), copy, buffer);
            if let Some(rewrite) = held.rewrite {
                rewrite.apply(&mut buffer[frame..]);
            }
        });
        if SEEN && let (Some(capture), Some(payload)) = (&mut self.capture, self.batch.last()) {
            let (vni, path) = (Some(vni.get()), Some(path));
            let note = Note { peer: Some(peer), vni, path, ..Note::outwards("sent plain", owner) };
            let frame = &payload[vxlan::HEADER_LEN..];
            capture.frame(Stage::Post, note, frame, frame.len());
        }
        Some((path, lane, class))
    }

    /// Applies the paths' faults to the transport's datagrams from `first` on.
    #[cold]
    fn spoil_from(&mut self, first: usize) {
        for (lane, class, bytes) in self.batch.take_from(first) {
            self.batch.push(lane, class, |buffer| buffer.extend_from_slice(&bytes));
            if let Some((peer, path)) = self.peers.path_of(lane) {
                self.spoil_last(peer, path, lane, class);
            }
        }
    }

    /// Applies the path's faults to the datagram that was just added.
    fn spoil_last(&mut self, peer: u32, path: PathId, lane: LaneId, class: u8) {
        let fate = self.faults.on_path(peer, path.get(), Direction::Tx);
        if fate == Default::default() {
            return;
        }
        let Some(bytes) = self.batch.pop() else { return };
        if fate.drop {
            self.counters.fault_dropped_packets += 1;
            self.counters.fault_tx_dropped_packets += 1;
            self.see_spoilt(peer, path, &bytes);
            return;
        }
        if fate.corrupt.is_some() {
            // UDP's checksum detects any one flipped bit: the receiving kernel drops the datagram.
            self.counters.fault_corrupted_packets += 1;
            self.counters.fault_tx_corrupted_packets += 1;
            self.see_spoilt(peer, path, &bytes);
            return;
        }
        if fate.duplicate {
            self.counters.fault_duplicated_packets += 1;
            self.counters.fault_tx_duplicated_packets += 1;
            self.batch.push(lane, class, |buffer| buffer.extend_from_slice(&bytes));
        }
        if fate.delay_ns > 0 {
            self.counters.fault_delayed_packets += 1;
            self.counters.fault_tx_delayed_packets += 1;
            self.put_off(fate.delay_ns, delayed::Packet::Out { lane, class, bytes });
        } else {
            self.batch.push(lane, class, |buffer| buffer.extend_from_slice(&bytes));
        }
    }

    /// Shows a datagram to the capture that a fault drops or corrupts.
    #[cold]
    fn see_spoilt(&mut self, peer: u32, path: PathId, payload: &[u8]) {
        let Some(capture) = &mut self.capture else { return };
        let Ok((vni, inside)) = vxlan::parse(payload) else { return };
        let note =
            Note { peer: Some(peer), vni: Some(vni.get()), path: Some(path.get()), what: "fault", ..Note::default() };
        let mut see = |packet: &[u8]| match bifrost::parse_data_packet(packet) {
            Some((header, frame)) => capture.dropped(note.of_data(vni, &header), frame, frame.len()),
            None => capture.dropped(note, packet, packet.len()),
        };
        match bifrost::parse(inside) {
            Ok(Packet::Bundle(bundle)) => bundle.packets().for_each(see),
            _ => see(inside),
        }
    }
}

/// An [`Output`] that is being emitted, and the progress. When dropped, it returns the rest to the core: nothing,
/// unless a panic has occurred.
struct Leaving<'a, P> {
    core: &'a mut Core<P>,
    out: Output,
    data: usize,
    control: usize,
    plain: usize,
    release: usize,
}

impl<P: GuestPort> Leaving<'_, P> {
    /// Sends the transport's packets without a guest's data.
    fn send_control(&mut self) {
        while let Some(control) = self.out.control.get(self.control) {
            self.control += 1;
            self.core.work.at_shared(At::EmitControl);
            if self.core.send_control(control).is_none() {
                self.core.counters.gone_tx_packets += 1;
            }
        }
    }
}

impl<'a, P> Leaving<'a, P> {
    fn of(core: &'a mut Core<P>) -> Self {
        let out = std::mem::take(&mut core.out);
        core.counters.emitted_packets += packets(&out);
        Leaving { core, out, data: 0, control: 0, plain: 0, release: 0 }
    }
}

impl<P> Drop for Leaving<'_, P> {
    fn drop(&mut self) {
        let out = &mut self.out;
        out.data.drain(..self.data);
        out.control.drain(..self.control);
        out.plain.drain(..self.plain);
        out.release.drain(..self.release);
        self.core.counters.emitted_packets -= packets(out);
        self.core.out = std::mem::take(out);
    }
}

fn packets(out: &Output) -> u64 {
    (out.data.len() + out.control.len() + out.plain.len()) as u64
}
