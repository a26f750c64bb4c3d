//! The header of DATA, probe and SKIP packets (PROTOCOL §3.1, §3.5; NSDI'26 figure C2).

use super::field::{byte, word};
use super::{Cid, PacketType, PathId, Psn, Refusal, Tick, Version};

const PROBE: u8 = 0x80;
const ACK_NOW: u8 = 0x40;
const FROM_RESPONDER: u8 = 0x20;
const ECN: u8 = 0x10;
const RETRANSMIT: u8 = 0x08;

/// The header of a DATA packet, a path probe or a SKIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DataHeader {
    /// The negotiated version.
    pub version: Version,
    /// CC Type, 4 bits: the sender's congestion control; see [`super::cc`].
    pub cc: u8,
    /// `se`: a path probe, outside the sequence and without a frame.
    pub probe: bool,
    /// `ack`: the receiver must acknowledge at once.
    pub ack_now: bool,
    /// `dir`: sent by the side that accepted the connection, not the one that requested it.
    pub from_responder: bool,
    /// `ece`: the outer packet was sent ECN-capable.
    pub ecn: bool,
    /// `ret`: a retransmission.
    pub retransmit: bool,
    /// The path that the packet was sent on.
    pub path: PathId,
    /// Flow distance, PSNs (PROTOCOL §8.2): 0 = publish after everything before, 1..=254 = after the packet that far
    /// back, 255 = after everything up to 255 back. Always 0 in version 1.
    pub distance: u8,
    /// PSN of the packet; in a SKIP, the first PSN after those given up.
    pub psn: Psn,
    /// The receiver's connection identifier; never [`Cid::NONE`] in a parsed header.
    pub cid: Cid,
    /// When the packet was sent, sender's clock (t1).
    pub timestamp: Tick,
}

impl DataHeader {
    /// Length of the header, bytes.
    pub const LEN: usize = 16;

    /// The header of a DATA packet or (with `probe`) of a probe.
    #[must_use]
    #[inline]
    pub fn emit(&self) -> [u8; Self::LEN] {
        self.emit_as(PacketType::Data)
    }

    /// The whole SKIP packet.
    #[must_use]
    pub fn emit_skip(&self) -> [u8; Self::LEN] {
        self.emit_as(PacketType::Skip)
    }

    /// Parses the fields that DATA and SKIP share; the caller has checked the type byte.
    #[inline]
    pub(super) fn parse(bytes: &[u8; Self::LEN]) -> Result<Self, Refusal> {
        let version = Version::try_from(bytes[1] >> 4)?;
        let flags = bytes[2];
        let cid = Cid(word(bytes, 8));
        if cid.is_none() {
            return Err(Refusal::ZeroCid);
        }
        Ok(Self {
            version,
            cc: bytes[1] & 0x0f,
            probe: flags & PROBE != 0,
            ack_now: flags & ACK_NOW != 0,
            from_responder: flags & FROM_RESPONDER != 0,
            ecn: flags & ECN != 0,
            retransmit: flags & RETRANSMIT != 0,
            path: PathId::masked(flags),
            distance: if version.has_distance() { bytes[3] } else { 0 },
            psn: Psn(word(bytes, 4)),
            cid,
            timestamp: Tick(word(bytes, 12)),
        })
    }

    #[inline]
    fn emit_as(&self, kind: PacketType) -> [u8; Self::LEN] {
        // Multiplication avoids a branch.
        let flag = |set: bool, bit: u8| u8::from(set) * bit;
        let flags = flag(self.probe, PROBE)
            | flag(self.ack_now, ACK_NOW)
            | flag(self.from_responder, FROM_RESPONDER)
            | flag(self.ecn, ECN)
            | flag(self.retransmit, RETRANSMIT)
            | self.path.get();
        let distance = if self.version.has_distance() { self.distance } else { 0 };
        let mut out = [0; Self::LEN];
        out[..4].copy_from_slice(&[kind as u8, byte(self.version.number(), self.cc), flags, distance]);
        out[4..8].copy_from_slice(&self.psn.0.to_be_bytes());
        out[8..12].copy_from_slice(&self.cid.0.to_be_bytes());
        out[12..].copy_from_slice(&self.timestamp.0.to_be_bytes());
        out
    }
}
