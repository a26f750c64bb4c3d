//! Packets as they pass the stages of a core, for operators: the diagnosis tools of the Triton paper (SIGCOMM'24,
//! section 8) find a lost packet by capturing it at every stage of the software.
//!
//! **A capture that is off costs nothing.** The code of a turn ([`Core::turn`](crate::core::Core::turn)) exists twice,
//! with and without the capture's hooks; the loop chooses once per turn, and the variant without has none of their
//! instructions. A capture that is on never waits: a worker copies into a [`Chunk`] of fixed size, which another thread
//! exchanges for an empty one between two turns; packets without room are counted.

mod control;
mod mirror;
mod outer;
mod record;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bifrost_avs::Action;
use bifrost_nic::{Checksum, HEAD_LEN, parse};
use bifrost_port::{Datagram, GuestPort, Service, TxHandle};
use bifrost_rte::Counters as RteCounters;
use bifrost_wire::bifrost::{self, DataHeader, Packet};
use bifrost_wire::{Mac, Vni, vxlan};
use foldhash::fast::RandomState;
use hashbrown::HashMap;

use crate::peers::Peers;

pub use bifrost_nic::capture::{Filter, FilterError, MAX_FILTER_LEN, Subject};
use mirror::Mirrors;
pub use mirror::{Copies, MAX_MIRRORS, MirrorSpec};
pub(crate) use outer::Outer;
pub use record::{Chunk, Direction, Note, Seen, Stage};

/// TTL that every host sends with.
const TTL: u8 = 64;
/// Maximum frames placed but not yet published that are remembered.
const MAX_UNSEEN: usize = 8192;

/// What to capture.
#[derive(Clone, Debug)]
pub struct CaptureConfig {
    /// At which stages.
    pub stages: Vec<Stage>,
    /// Which packets.
    pub filter: Filter,
    /// Only packets of this port.
    pub port: Option<u32>,
    /// Bytes kept of each packet.
    pub snaplen: u32,
    /// Room for packets until they are fetched, bytes.
    pub bytes: usize,
    /// The time, ns since the epoch, because a core reads no clock of its own.
    pub clock: fn() -> u64,
}

/// A placed frame: what is known about it, its length, and the bytes kept of it.
struct Unseen {
    note: Note,
    len: usize,
    bytes: Vec<u8>,
}

/// A capture that runs in one core, and the mirrors.
pub(crate) struct Capture {
    config: CaptureConfig,
    /// Whether a capture was started; otherwise there are only mirrors.
    is_on: bool,
    mirrors: Option<Box<Mirrors>>,
    stages: u16,
    /// The vNIC of the only port of interest.
    vnic: Option<(u32, Vni, Mac)>,
    chunk: Chunk,
    /// A frame that is not contiguous in its buffers.
    piece: Vec<u8>,
    /// Frames that are placed but not yet published: a port can no longer be asked for them.
    unseen: HashMap<(u32, u32), Unseen, RandomState>,
}

/// The switch's decision, in a few words.
pub(crate) const fn action(action: &Action) -> &'static str {
    match action {
        Action::Forward { reliable: true, .. } => "to another host, reliably",
        Action::Forward { .. } => "to another host, plain VXLAN",
        Action::Deliver { .. } => "to a port of this host",
        Action::Answer { .. } => "answered here",
        Action::Host => "to a service of this host's daemon",
        Action::Copy => "copied to each vNIC of a group",
        Action::Ask { .. } => "waits until the route is learned",
        Action::Drop(_) => "dropped",
    }
}

/// The result of verification, in a few words.
pub(crate) const fn checked(checksum: Checksum) -> &'static str {
    match checksum {
        Checksum::Valid => "checksum right",
        Checksum::Invalid => "checksum wrong",
        Checksum::None => "no checksum",
    }
}

/// The counter of the transport that has changed, which shows why it did not take a packet.
pub(crate) fn verdict(before: &RteCounters, after: &RteCounters) -> &'static str {
    // An ACK or RESET that is sent is a response to the packet, not what happened to it.
    let answers = ["acks_sent_packets", "resets_sent_packets", "resets_suppressed_packets", "received_packets"];
    let grown = before.iter().zip(after.iter()).filter(|((_, old), (_, new))| new > old).map(|((name, _), _)| name);
    grown.filter(|name| !answers.contains(name)).last().unwrap_or("not_accepted_packets")
}

impl Note {
    /// A packet towards a guest.
    pub(crate) fn inwards(what: &'static str) -> Self {
        Note { direction: Direction::In, what, ..Note::default() }
    }

    /// A packet from the guest of a port.
    pub(crate) fn outwards(what: &'static str, port: u32) -> Self {
        Note { direction: Direction::Out, what, port: Some(port), ..Note::default() }
    }

    /// The same with another description.
    pub(crate) fn saying(self, what: &'static str) -> Self {
        Note { what, ..self }
    }

    /// Adds the contents of a data packet's header.
    pub(crate) fn of_data(self, vni: Vni, header: &DataHeader) -> Self {
        Note {
            vni: Some(vni.get()),
            cid: Some(header.cid.0),
            psn: Some(header.psn.0),
            path: Some(header.path.get()),
            ..self
        }
    }
}

impl CaptureConfig {
    /// Captures no packet.
    fn nothing() -> Self {
        CaptureConfig { stages: Vec::new(), filter: Filter::default(), port: None, snaplen: 0, bytes: 0, clock: || 0 }
    }
}

impl Capture {
    fn new(config: CaptureConfig, mirrors: Option<Box<Mirrors>>) -> Self {
        Capture {
            is_on: false,
            mirrors,
            stages: config.stages.iter().fold(0, |bits, stage| bits | stage.bit()),
            vnic: None,
            chunk: Chunk::new(config.bytes),
            piece: Vec::new(),
            unseen: HashMap::default(),
            config,
        }
    }

    /// Captures a frame of `len` bytes; `frame` holds the first ones: at least all headers.
    pub(crate) fn frame(&mut self, stage: Stage, note: Note, frame: &[u8], len: usize) {
        if self.stages & stage.bit() != 0
            && let Some(note) = self.wanted(note, Some((frame, len)))
        {
            self.keep(stage, note, len, [&[], frame]);
        }
    }

    /// Captures a frame of a guest, of `len` bytes, that a port holds.
    pub(crate) fn held(&mut self, stage: Stage, note: Note, port: &impl GuestPort, handle: TxHandle, len: u32) {
        if stage == Stage::GuestTx
            && let (Some(mirrors), Some(owner)) = (&mut self.mirrors, note.port)
        {
            mirrors.fetched(owner, port, handle, len);
        }
        if self.stages & stage.bit() == 0 {
            return;
        }
        let mut piece = std::mem::take(&mut self.piece);
        piece.clear();
        let kept = (self.config.snaplen as usize).max(HEAD_LEN).min(len as usize);
        port.copy(handle, 0, kept, &mut piece);
        self.frame(stage, note, &piece, len as usize);
        self.piece = piece;
    }

    /// Captures a frame that is dropped for a reason.
    pub(crate) fn dropped(&mut self, note: Note, frame: &[u8], len: usize) {
        self.frame(Stage::Drop, note, frame, len);
    }

    /// Remembers a placed frame; it is captured when it is published.
    pub(crate) fn placed(&mut self, note: Note, handle: u32, frame: &[u8]) {
        if let (Some(mirrors), Some(port)) = (&mut self.mirrors, note.port) {
            mirrors.placed(port, handle, frame);
        }
        let Some(port) = note.port.filter(|_| self.stages & Stage::GuestRx.bit() != 0) else { return };
        self.unseen.remove(&(port, handle));
        if self.unseen.len() >= MAX_UNSEEN {
            return;
        }
        if let Some(note) = self.wanted(note, Some((frame, frame.len()))) {
            let kept = frame.len().min(self.config.snaplen as usize);
            let unseen = Unseen { note, len: frame.len(), bytes: frame[..kept].to_vec() };
            self.unseen.insert((port, handle), unseen);
        }
    }

    /// Captures a placed frame that is published to its guest.
    pub(crate) fn published(&mut self, port: u32, handle: u32) {
        if let Some(mirrors) = &mut self.mirrors {
            mirrors.published(port, handle);
        }
        if let Some(Unseen { note, len, bytes }) = self.unseen.remove(&(port, handle)) {
            self.keep(Stage::GuestRx, note, len, [&[], &bytes]);
        }
    }

    /// Captures a datagram that arrived.
    pub(crate) fn arrived(&mut self, stage: Stage, what: &'static str, datagram: &Datagram<'_>, peers: &Peers) {
        if self.stages & stage.bit() == 0 {
            return;
        }
        let plain = datagram.service == Service::Vxlan;
        let peer = peers.of_address(datagram.source.ip());
        let note = Note { peer, ..Note::inwards(what) };
        let Some(note) = self.wanted_datagram(note, datagram.payload, plain) else { return };
        let destination = peers.local_end(peer, datagram.source, plain);
        let payload = datagram.payload;
        let outer = Outer::new(datagram.source, destination, datagram.ecn, datagram.ttl, payload.len());
        self.keep(stage, note, outer.bytes().len() + payload.len(), [outer.bytes(), payload]);
    }

    /// Captures a datagram that is sent.
    pub(crate) fn leaving(&mut self, lane: bifrost_port::LaneId, class: u8, payload: &[u8], peers: &Peers) {
        if self.stages & Stage::UnderlayTx.bit() == 0 {
            return;
        }
        let Some((peer, plain, source, destination)) = peers.ends_of(lane) else { return };
        let note = Note { peer: Some(peer), ..Note::default() };
        let Some(note) = self.wanted_datagram(note, payload, plain) else { return };
        let outer = Outer::new(source, destination, class, TTL, payload.len());
        self.keep(Stage::UnderlayTx, note, outer.bytes().len() + payload.len(), [outer.bytes(), payload]);
    }

    /// The note with the contents of the headers, if the filter accepts the datagram.
    fn wanted_datagram(&self, note: Note, payload: &[u8], plain: bool) -> Option<Note> {
        let Ok((vni, inside)) = vxlan::parse(payload) else { return self.wanted(note, None) };
        let note = Note { vni: Some(vni.get()), ..note };
        if plain {
            return self.wanted(note, Some((inside, inside.len())));
        }
        match bifrost::parse(inside) {
            // A bundle counts as the first of its packets that the filter accepts.
            Ok(Packet::Bundle(bundle)) => bundle.packets().find_map(|packet| self.wanted_packet(note, vni, packet)),
            _ => self.wanted_packet(note, vni, inside),
        }
    }

    /// The same for one packet of the transport.
    fn wanted_packet(&self, note: Note, vni: Vni, packet: &[u8]) -> Option<Note> {
        match bifrost::parse(packet) {
            Ok(Packet::Data(header, frame)) => self.wanted(note.of_data(vni, &header), Some((frame, frame.len()))),
            Ok(Packet::Probe(header) | Packet::Skip(header)) => self.wanted(note.of_data(vni, &header), None),
            Ok(Packet::Ack(ack)) => {
                let (cid, psn) = (Some(ack.cid.0), Some(ack.psn.0));
                self.wanted(Note { cid, psn, path: Some(ack.path.get()), ..note }, None)
            }
            Ok(Packet::Setup(setup)) => self.wanted(Note { cid: Some(setup.local.0), ..note }, None),
            Ok(Packet::Reset(reset)) => self.wanted(Note { cid: Some(reset.unknown.0), ..note }, None),
            Ok(Packet::Bundle(_)) | Err(_) => self.wanted(note, None),
        }
    }

    /// The note with the frame's flow, if the filter accepts the frame.
    fn wanted(&self, note: Note, frame: Option<(&[u8], usize)>) -> Option<Note> {
        let parsed = frame.and_then(|(frame, len)| parse(frame, len).ok());
        let wanted = self.config.filter.passes(Subject { frame: parsed.as_ref(), vni: note.vni });
        let of_port = self.vnic.is_none_or(|(owner, vni, mac)| match note.port {
            Some(port) => port == owner,
            None => {
                note.vni == Some(vni.get()) && parsed.as_ref().is_some_and(|p| p.src_mac == mac || p.dst_mac == mac)
            }
        });
        (wanted && of_port).then(|| Note { flow: note.flow.or(parsed.map(|p| p.flow_hash)), ..note })
    }

    /// Keeps the first bytes of a packet of `len` bytes.
    fn keep(&mut self, stage: Stage, note: Note, len: usize, [first, second]: [&[u8]; 2]) {
        let snaplen = self.config.snaplen as usize;
        let first = &first[..first.len().min(snaplen)];
        let second = &second[..second.len().min(snaplen - first.len())];
        self.chunk.push((self.config.clock)(), Seen { stage, note }, len as u32, [first, second]);
    }
}

impl Peers {
    /// The peer of a lane, whether the lane is for plain VXLAN, and its two ends.
    fn ends_of(&self, lane: bifrost_port::LaneId) -> Option<(u32, bool, SocketAddr, SocketAddr)> {
        self.iter().find_map(|peer| {
            let bifrost = peer.bifrost.iter().position(|l| *l == lane).map(|path| (false, path));
            let (plain, path) = bifrost.or_else(|| Some((true, peer.vxlan.iter().position(|l| *l == lane)?)))?;
            let config = &peer.config;
            let (local, remote) = *config.paths.get(path)?;
            let source = SocketAddr::new(local, config.source_port_base.wrapping_add(path as u16));
            let port = if plain { config.vxlan_port } else { config.bifrost_port };
            Some((config.id, plain, source, SocketAddr::new(remote, port)))
        })
    }

    /// The address of this host to which a datagram was sent, as far as the peer's paths show; otherwise unspecified.
    fn local_end(&self, peer: Option<u32>, source: SocketAddr, plain: bool) -> SocketAddr {
        let config = peer.and_then(|peer| self.get(peer)).map(|peer| &peer.config);
        let path = config.and_then(|c| c.paths.iter().find(|(_, remote)| *remote == source.ip()));
        let none = match source.ip() {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let port = match (config, plain) {
            (Some(config), true) => config.vxlan_port,
            (Some(config), false) => config.bifrost_port,
            (None, true) => vxlan::UDP_PORT,
            (None, false) => bifrost::UDP_PORT,
        };
        SocketAddr::new(path.map_or(none, |(local, _)| *local), port)
    }
}
