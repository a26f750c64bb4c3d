//! GRE headers (RFC 2784) with a key (RFC 2890) and nothing else: checksums and sequence numbers are not supported.

use crate::Malformed;

/// Length of a header with a key, bytes.
pub const HEADER_LEN: usize = 8;

/// A header with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Distinguishes tunnels between the same addresses.
    pub key: u32,
    /// EtherType of the packet that follows.
    pub ethertype: u16,
}

impl Header {
    /// Splits the payload of an IP packet into a header and the packet that follows it.
    ///
    /// # Errors
    /// [`Malformed::Truncated`]; [`Malformed::Version`] for a version other than 0; [`Malformed::Kind`] without a key,
    /// or with other fields.
    pub fn parse(payload: &[u8]) -> Result<(Self, &[u8]), Malformed> {
        let (header, rest) = payload.split_first_chunk::<HEADER_LEN>().ok_or(Malformed::Truncated)?;
        let [f0, f1, e0, e1, key @ ..] = *header;
        match u16::from_be_bytes([f0, f1]) {
            FLAG_KEY => Ok((Header { key: u32::from_be_bytes(key), ethertype: u16::from_be_bytes([e0, e1]) }, rest)),
            flags if flags & VERSION != 0 => Err(Malformed::Version),
            _ => Err(Malformed::Kind),
        }
    }

    /// The encoded header.
    #[must_use]
    pub const fn emit(self) -> [u8; HEADER_LEN] {
        ((FLAG_KEY as u64) << 48 | (self.ethertype as u64) << 32 | self.key as u64).to_be_bytes()
    }
}

const FLAG_KEY: u16 = 0x2000;
const VERSION: u16 = 0x0007;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        let header = Header { key: 0x0102_0304, ethertype: 0x86dd };
        let bytes = header.emit();
        assert_eq!(bytes, [0x20, 0, 0x86, 0xdd, 1, 2, 3, 4]);
        let payload = [&bytes[..], b"packet"].concat();
        assert_eq!(Header::parse(&payload), Ok((header, &b"packet"[..])));
    }

    #[test]
    fn other_headers_are_refused() {
        let table: [(&[u8], Malformed); 5] = [
            (&[], Malformed::Truncated),
            (&[0x20, 0, 8, 0, 1, 2, 3], Malformed::Truncated),
            (&[0x20, 1, 8, 0, 0, 0, 0, 0], Malformed::Version),
            (&[0x00, 0, 8, 0, 0, 0, 0, 0], Malformed::Kind),
            // With a checksum, which sits where the key is expected.
            (&[0xa0, 0, 8, 0, 0, 0, 0, 0], Malformed::Kind),
        ];
        for (bytes, error) in table {
            assert_eq!(Header::parse(bytes), Err(error), "{bytes:?}");
        }
    }
}
