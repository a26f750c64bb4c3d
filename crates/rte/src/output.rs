//! The actions that the engine requests from its caller. Handles are opaque here: only ports access buffers.

use bifrost_wire::bifrost::{AckHeader, DataHeader, PathId, Reset, Setup};

/// Index of a peer host, given out by [`Engine::add_peer`](crate::Engine::add_peer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u32);

/// A data packet to send: one segment of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct DataOut {
    /// The destination peer.
    pub peer: PeerId,
    /// Network identifier for the VXLAN header.
    pub vni: u32,
    /// The local port that holds the buffer.
    pub owner: u32,
    /// The buffer.
    pub handle: u32,
    /// Index of the segment in the buffer.
    pub segment: u8,
    /// The header; its `path` names the lane.
    pub header: DataHeader,
}

/// The contents of a packet without a guest's frame.
#[derive(Clone, Copy, Debug)]
pub enum Control {
    /// An acknowledgement.
    Ack(AckHeader),
    /// A path probe (the header alone).
    Probe(DataHeader),
    /// The sender gave up everything below the PSN.
    Skip(DataHeader),
    /// Connection set-up.
    Setup(Setup),
    /// Reports an unknown CID.
    Reset(Reset),
}

/// A control packet to send.
#[derive(Clone, Copy, Debug)]
pub struct ControlOut {
    /// The destination peer.
    pub peer: PeerId,
    /// Network identifier for the VXLAN header.
    pub vni: u32,
    /// The path that it leaves on. An answer has the number of the peer's path: if this host has fewer paths, the
    /// number modulo theirs counts.
    pub path: PathId,
    /// The contents.
    pub packet: Control,
}

/// One segment of a buffer to send as plain VXLAN; the engine no longer tracks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainOut {
    /// The destination peer.
    pub peer: PeerId,
    /// Network identifier.
    pub vni: u32,
    /// The local port that holds the buffer.
    pub owner: u32,
    /// The buffer.
    pub handle: u32,
    /// Index of the segment in the buffer.
    pub segment: u8,
}

/// All actions requested by calls of the engine. The caller executes them in this order: publish and notify, then
/// [`flush_acks`](crate::Engine::flush_acks), then data, plain and control packets, then releases; then clears it.
#[derive(Debug, Default)]
pub struct Output {
    /// Placed packets to make visible to the guest behind a port: (owner, handle), in this order.
    pub publish: Vec<(u32, u32)>,
    /// Data packets to send.
    pub data: Vec<DataOut>,
    /// Control packets to send.
    pub control: Vec<ControlOut>,
    /// Segments to send as plain VXLAN and release.
    pub plain: Vec<PlainOut>,
    /// Acknowledged segments: (owner, handle), once for each segment of the buffer.
    pub release: Vec<(u32, u32)>,
}

impl Output {
    /// Clears all actions, keeps the memory.
    pub fn clear(&mut self) {
        self.publish.clear();
        self.data.clear();
        self.control.clear();
        self.plain.clear();
        self.release.clear();
    }

    /// Whether there are no actions.
    pub fn is_empty(&self) -> bool {
        self.publish.is_empty()
            && self.data.is_empty()
            && self.control.is_empty()
            && self.plain.is_empty()
            && self.release.is_empty()
    }
}
