//! ICMP for IPv4 (RFC 792, 1191).

use crate::{Malformed, checksum};

/// Length of the header that all messages share, bytes.
pub const HEADER_LEN: usize = 8;

/// A message, as far as a switch needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// Echo request.
    EchoRequest {
        /// Identifier.
        identifier: u16,
        /// Sequence number.
        sequence: u16,
    },
    /// Echo reply.
    EchoReply {
        /// Identifier.
        identifier: u16,
        /// Sequence number.
        sequence: u16,
    },
    /// Destination unreachable: fragmentation needed and DF set. The packet that was too big is quoted.
    FragmentationNeeded {
        /// MTU of the next hop, bytes; 0 from routers older than RFC 1191.
        mtu: u16,
    },
    /// Any other message.
    Other {
        /// Type.
        kind: u8,
        /// Code.
        code: u8,
    },
}

impl Message {
    /// Parses the header at the start of `bytes`; echo data or the quoted packet starts at [`HEADER_LEN`]. The checksum
    /// is not verified; see [`checksum_is_valid`].
    ///
    /// # Errors
    /// [`Malformed::Truncated`].
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let b = bytes.first_chunk::<HEADER_LEN>().ok_or(Malformed::Truncated)?;
        let (high, low) = (u16::from_be_bytes([b[4], b[5]]), u16::from_be_bytes([b[6], b[7]]));
        Ok(match (b[0], b[1]) {
            (ECHO_REQUEST, 0) => Self::EchoRequest { identifier: high, sequence: low },
            (ECHO_REPLY, 0) => Self::EchoReply { identifier: high, sequence: low },
            (UNREACHABLE, FRAGMENTATION_NEEDED) => Self::FragmentationNeeded { mtu: low },
            (kind, code) => Self::Other { kind, code },
        })
    }

    /// The header, with the checksum over it and `rest`, the bytes that follow. [`Message::Other`] has zeros in the
    /// four type-specific bytes.
    #[must_use]
    pub fn emit(&self, rest: &[u8]) -> [u8; HEADER_LEN] {
        let (kind, code, high, low) = match *self {
            Self::EchoRequest { identifier, sequence } => (ECHO_REQUEST, 0, identifier, sequence),
            Self::EchoReply { identifier, sequence } => (ECHO_REPLY, 0, identifier, sequence),
            Self::FragmentationNeeded { mtu } => (UNREACHABLE, FRAGMENTATION_NEEDED, 0, mtu),
            Self::Other { kind, code } => (kind, code, 0, 0),
        };
        let mut out = [kind, code, 0, 0, 0, 0, 0, 0];
        out[4..6].copy_from_slice(&high.to_be_bytes());
        out[6..].copy_from_slice(&low.to_be_bytes());
        let checksum = checksum::Sum::new().then(&out).then(rest).finish();
        out[2..4].copy_from_slice(&checksum.to_be_bytes());
        out
    }
}

/// Whether the checksum of a whole message is valid.
#[must_use]
pub fn checksum_is_valid(message: &[u8]) -> bool {
    checksum::is_valid(message)
}

const ECHO_REPLY: u8 = 0;
const UNREACHABLE: u8 = 3;
const FRAGMENTATION_NEEDED: u8 = 4;
const ECHO_REQUEST: u8 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips() {
        let messages = [
            Message::EchoRequest { identifier: 0x1234, sequence: 1 },
            Message::EchoReply { identifier: 0x1234, sequence: 1 },
            Message::FragmentationNeeded { mtu: 1400 },
            Message::Other { kind: 3, code: 1 },
        ];
        for message in messages {
            let bytes = [&message.emit(b"odd")[..], b"odd"].concat();
            assert!(checksum_is_valid(&bytes), "{message:?}");
            assert_eq!(Message::parse(&bytes), Ok(message));
        }
    }

    #[test]
    fn layout() {
        assert_eq!(Message::FragmentationNeeded { mtu: 0x0578 }.emit(&[]), [3, 4, 0xf7, 0x83, 0, 0, 5, 0x78]);
        for len in 0..8 {
            assert_eq!(Message::parse(&[0; 8][..len]), Err(Malformed::Truncated));
        }
    }
}
