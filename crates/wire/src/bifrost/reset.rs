//! RESET: "I own no such connection" (PROTOCOL §3.4, §14.2).

use super::field::{byte, word};
use super::{Cid, PacketType, Refusal, Version};

/// A RESET packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reset {
    /// The unknown identifier: the Destination CID of the packet that this one answers.
    pub unknown: Cid,
}

impl Reset {
    /// Length of the packet, bytes.
    pub const LEN: usize = 12;

    /// The packet. Its version is the oldest, because none has been negotiated.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0] = PacketType::Reset as u8;
        out[1] = byte(Version::OLDEST.number(), 0);
        out[4..8].copy_from_slice(&self.unknown.0.to_be_bytes());
        out
    }

    /// Parses a whole datagram; the caller has checked the type byte.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let (fixed, rest) = bytes.split_first_chunk::<{ Self::LEN }>().ok_or(Refusal::ShortDatagram)?;
        // The layout is the same in all versions, so any version but 0 is accepted.
        if fixed[1] >> 4 == 0 {
            return Err(Refusal::Version);
        }
        let unknown = Cid(word(fixed, 4));
        if unknown.is_none() {
            return Err(Refusal::ZeroCid);
        }
        if !rest.is_empty() {
            return Err(Refusal::TrailingBytes);
        }
        Ok(Self { unknown })
    }
}
