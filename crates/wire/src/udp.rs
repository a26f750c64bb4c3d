//! UDP headers (RFC 768).

use crate::Malformed;

/// Length of a header, bytes.
pub const HEADER_LEN: usize = 8;
/// Offset of the checksum in the header, bytes.
pub const CHECKSUM_OFFSET: usize = 6;

/// A source port from the ephemeral range, 49152 to 65535 (RFC 6335, section 6), chosen by the low 14 of `bits`.
/// Networks spread flows by it.
#[must_use]
pub const fn ephemeral_port(bits: u16) -> u16 {
    0xc000 | bits
}

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// Source port.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// Length of header and payload, bytes; at least 8.
    pub len: u16,
    /// Checksum; 0 = none.
    pub checksum: u16,
}

impl Header {
    /// Parses the header at the start of `datagram`.
    ///
    /// # Errors
    /// [`Malformed::Truncated`]; [`Malformed::Length`] when `len` is below 8 or beyond `datagram`.
    pub fn parse(datagram: &[u8]) -> Result<Self, Malformed> {
        let b = datagram.first_chunk::<HEADER_LEN>().ok_or(Malformed::Truncated)?;
        let header = Self {
            source_port: u16::from_be_bytes([b[0], b[1]]),
            destination_port: u16::from_be_bytes([b[2], b[3]]),
            len: u16::from_be_bytes([b[4], b[5]]),
            checksum: u16::from_be_bytes([b[6], b[7]]),
        };
        if !(HEADER_LEN..=datagram.len()).contains(&usize::from(header.len)) {
            return Err(Malformed::Length);
        }
        Ok(header)
    }

    /// The header.
    #[must_use]
    pub fn emit(&self) -> [u8; HEADER_LEN] {
        let [s0, s1] = self.source_port.to_be_bytes();
        let [d0, d1] = self.destination_port.to_be_bytes();
        let [l0, l1] = self.len.to_be_bytes();
        let [c0, c1] = self.checksum.to_be_bytes();
        [s0, s1, d0, d1, l0, l1, c0, c1]
    }
}

/// Changes the length in place.
pub fn set_len(header: &mut [u8; HEADER_LEN], len: u16) {
    header[4..6].copy_from_slice(&len.to_be_bytes());
}

/// Changes the checksum in place.
pub fn set_checksum(header: &mut [u8; HEADER_LEN], checksum: u16) {
    header[CHECKSUM_OFFSET..].copy_from_slice(&checksum.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_refusals() {
        let header = Header { source_port: 0x1234, destination_port: 53, len: 10, checksum: 0xabcd };
        let datagram = [&header.emit()[..], &[1, 2]].concat();
        assert_eq!(datagram, [0x12, 0x34, 0, 53, 0, 10, 0xab, 0xcd, 1, 2]);
        assert_eq!(Header::parse(&datagram), Ok(header));
        for len in 0..8 {
            assert_eq!(Header::parse(&datagram[..len]), Err(Malformed::Truncated));
        }
        assert_eq!(Header::parse(&datagram[..9]), Err(Malformed::Length));
        let mut short = header.emit();
        set_len(&mut short, 7);
        assert_eq!(Header::parse(&short), Err(Malformed::Length));
        set_len(&mut short, 8);
        set_checksum(&mut short, 5);
        assert_eq!(Header::parse(&short), Ok(Header { len: 8, checksum: 5, ..header }));
    }
}
