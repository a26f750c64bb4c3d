//! The ACK packet (PROTOCOL §3.3; NSDI'26 figure C4).

use alloc::vec::Vec;

use super::field::{byte, word};
use super::{Bitmap, Cid, PacketType, PathId, Psn, Refusal, Tick, Version};

/// Meaning of the bitmap of an ACK (ACK Type).
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AckKind {
    /// Everything before the base is published; packets with set bits are in the guest's memory, or held for it.
    Cumulative = 0,
    /// Set bits as above; says nothing about packets before the base.
    Selective = 1,
    /// Packets with set bits were dropped by a rate limiter of the receiver: retransmit, and slow down.
    RateLimited = 2,
    /// Packets with set bits arrived but were not accepted, because there was no room or their content was damaged.
    /// Their paths are not at fault; retransmit once there is room. Since version 4.
    NotTaken = 3,
}

/// An ACK packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AckHeader {
    /// The negotiated version.
    pub version: Version,
    /// CC Type, 4 bits; see [`super::cc`].
    pub cc: u8,
    /// `se`: answers a path probe.
    pub probe: bool,
    /// The path of the packet whose timestamp is echoed.
    pub path: PathId,
    /// Hops that the echoed packet took, 0..=15 (15 = 15 or more).
    pub hops: u8,
    /// Meaning of the bitmap.
    pub kind: AckKind,
    /// PSN of the packet whose timestamp is echoed.
    pub psn: Psn,
    /// The receiver's connection identifier; never [`Cid::NONE`] in a parsed header.
    pub cid: Cid,
    /// When the ACK was sent, its sender's clock (t3).
    pub sent: Tick,
    /// The echoed timestamp, the receiver's own clock (t1).
    pub echo: Tick,
    /// When the echoed packet arrived, the ACK sender's clock (t2).
    pub nic_rx: Tick,
    /// Packets received since the previous ACK, 0..=2047 (saturates).
    pub num_ack: u16,
    /// How many of these were CE-marked, 0..=2047 (saturates).
    pub num_ece: u16,
    /// PSN_base: the PSN of bit 0.
    pub base: Psn,
    /// State of the PSNs from the base on.
    pub bitmap: Bitmap,
}

impl AckHeader {
    /// Length without any bitmap word, bytes.
    pub const FIXED_LEN: usize = 32;
    /// Length with eight bitmap words, bytes.
    pub const MAX_LEN: usize = Self::FIXED_LEN + 4 * Bitmap::MAX_WORDS;
    /// The largest value of the two 11-bit counts.
    pub const MAX_COUNT: u16 = 0x7ff;
    /// The largest hop count.
    pub const MAX_HOPS: u8 = 15;

    /// Length of the packet, bytes: a multiple of 4 from 32 to 64.
    #[allow(clippy::len_without_is_empty)]
    #[must_use]
    pub fn len(&self) -> usize {
        Self::FIXED_LEN + 4 * self.bitmap.words().len()
    }

    /// Appends the packet to `out`.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let mut packet = [0; Self::MAX_LEN];
        let len = self.emit_into(&mut packet);
        out.extend_from_slice(&packet[..len]);
    }

    /// Writes the packet to the start of `out` and returns its length. Counts and hops saturate.
    pub fn emit_into(&self, out: &mut [u8; Self::MAX_LEN]) -> usize {
        let words = self.bitmap.words();
        let counts = u32::from(self.num_ack.min(Self::MAX_COUNT)) << 21
            | u32::from(self.num_ece.min(Self::MAX_COUNT)) << 10
            | (words.len() as u32) << 6;
        let hops = self.hops.min(Self::MAX_HOPS);
        let first = [
            PacketType::Ack as u8,
            byte(self.version.number(), self.cc),
            u8::from(self.probe) << 7 | self.path.get() << 4 | hops,
            self.kind as u8,
        ];
        let fixed = [
            u32::from_be_bytes(first),
            self.psn.0,
            self.cid.0,
            self.sent.0,
            self.echo.0,
            self.nic_rx.0,
            counts,
            self.base.0,
        ];
        for (slot, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(fixed.iter().chain(words)) {
            *slot = value.to_be_bytes();
        }
        self.len()
    }

    /// Parses a whole datagram; the caller has checked the type byte.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let (fixed, rest) = bytes.split_first_chunk::<{ Self::FIXED_LEN }>().ok_or(Refusal::ShortDatagram)?;
        let version = Version::try_from(fixed[1] >> 4)?;
        let kind = match fixed[3] & 7 {
            0 => AckKind::Cumulative,
            1 => AckKind::Selective,
            2 => AckKind::RateLimited,
            3 if version.has_refusals() => AckKind::NotTaken,
            _ => return Err(Refusal::AckType),
        };
        let cid = Cid(word(fixed, 8));
        if cid.is_none() {
            return Err(Refusal::ZeroCid);
        }
        let counts = word(fixed, 24);
        let words = (counts >> 6 & 0x0f) as usize;
        if words > Bitmap::MAX_WORDS {
            return Err(Refusal::BitmapLength);
        }
        if rest.len() < 4 * words {
            return Err(Refusal::BitmapTruncated);
        }
        if rest.len() > 4 * words {
            return Err(Refusal::TrailingBytes);
        }
        Ok(Self {
            version,
            cc: fixed[1] & 0x0f,
            probe: fixed[2] & 0x80 != 0,
            path: PathId::masked(fixed[2] >> 4),
            hops: fixed[2] & 0x0f,
            kind,
            psn: Psn(word(fixed, 4)),
            cid,
            sent: Tick(word(fixed, 12)),
            echo: Tick(word(fixed, 16)),
            nic_rx: Tick(word(fixed, 20)),
            num_ack: (counts >> 21) as u16,
            num_ece: (counts >> 10) as u16 & Self::MAX_COUNT,
            base: Psn(word(fixed, 28)),
            bitmap: Bitmap::from_bytes(rest.as_chunks::<4>().0).ok_or(Refusal::BitmapLength)?,
        })
    }
}
