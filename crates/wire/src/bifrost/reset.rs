//! RESET: "I own no such connection" (PROTOCOL §3.4, §14.2).

use super::field::{byte, word};
use super::{Cid, PacketType, Refusal, Version};

/// A RESET packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reset {
    /// The identifier that its sender does not own: the Destination CID of the packet that it answers.
    pub unknown: Cid,
}

impl Reset {
    /// Length of the packet, bytes.
    pub const LEN: usize = 12;

    /// The packet. Its version is the oldest: its sender knows of no agreement.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0] = PacketType::Reset as u8;
        out[1] = byte(Version::OLDEST.number(), 0);
        out[4..8].copy_from_slice(&self.unknown.0.to_be_bytes());
        out
    }

    /// Reads a whole datagram; the type byte is the caller's.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let (fixed, rest) = bytes.split_first_chunk::<{ Self::LEN }>().ok_or(Refusal::ShortDatagram)?;
        // The layout is the same in all versions, so any but 0 will do.
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
