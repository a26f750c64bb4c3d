//! TCP headers (RFC 9293) and the options that matter to a switch (RFC 7323, 2018).

use crate::Malformed;

/// Length of a header without options, bytes.
pub const HEADER_LEN: usize = 20;
/// Length of the longest header, bytes.
pub const MAX_HEADER_LEN: usize = 60;
/// Offset of the checksum in the header, bytes.
pub const CHECKSUM_OFFSET: usize = 16;

/// The eight flag bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags(pub u8);

impl Flags {
    /// No more data.
    pub const FIN: Self = Self(0x01);
    /// Synchronise sequence numbers.
    pub const SYN: Self = Self(0x02);
    /// Reset the connection.
    pub const RST: Self = Self(0x04);
    /// Push.
    pub const PSH: Self = Self(0x08);
    /// The acknowledgment number is valid.
    pub const ACK: Self = Self(0x10);
    /// The urgent pointer is valid.
    pub const URG: Self = Self(0x20);
    /// ECN echo.
    pub const ECE: Self = Self(0x40);
    /// Congestion window reduced.
    pub const CWR: Self = Self(0x80);

    /// Whether all of `flags` are set.
    #[must_use]
    pub const fn contains(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Whether any of `flags` is set.
    #[must_use]
    pub const fn intersects(self, flags: Self) -> bool {
        self.0 & flags.0 != 0
    }

    /// The union of these flags and `flags`.
    #[must_use]
    pub const fn with(self, flags: Self) -> Self {
        Self(self.0 | flags.0)
    }

    /// These flags without `flags`.
    #[must_use]
    pub const fn without(self, flags: Self) -> Self {
        Self(self.0 & !flags.0)
    }
}

/// A header; its options are read by [`options`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// Source port.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgment number.
    pub acknowledgment: u32,
    /// Length of the header with its options, bytes: 20..=60. The payload starts here.
    pub header_len: u8,
    /// Flags.
    pub flags: Flags,
    /// Window, unscaled.
    pub window: u16,
    /// Checksum.
    pub checksum: u16,
    /// Urgent pointer.
    pub urgent: u16,
}

impl Header {
    /// Parses the header at the start of `segment`, which holds all its options.
    ///
    /// # Errors
    /// [`Malformed::Truncated`], [`Malformed::HeaderLength`].
    pub fn parse(segment: &[u8]) -> Result<Self, Malformed> {
        let b = segment.first_chunk::<HEADER_LEN>().ok_or(Malformed::Truncated)?;
        let header_len = (b[12] >> 4) * 4;
        if usize::from(header_len) < HEADER_LEN {
            return Err(Malformed::HeaderLength);
        }
        if usize::from(header_len) > segment.len() {
            return Err(Malformed::Truncated);
        }
        Ok(Self {
            source_port: u16::from_be_bytes([b[0], b[1]]),
            destination_port: u16::from_be_bytes([b[2], b[3]]),
            sequence: u32::from_be_bytes([b[4], b[5], b[6], b[7]]),
            acknowledgment: u32::from_be_bytes([b[8], b[9], b[10], b[11]]),
            header_len,
            flags: Flags(b[13]),
            window: u16::from_be_bytes([b[14], b[15]]),
            checksum: u16::from_be_bytes([b[16], b[17]]),
            urgent: u16::from_be_bytes([b[18], b[19]]),
        })
    }

    /// The header without options (`header_len` is ignored).
    #[must_use]
    pub fn emit(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[..2].copy_from_slice(&self.source_port.to_be_bytes());
        out[2..4].copy_from_slice(&self.destination_port.to_be_bytes());
        out[4..8].copy_from_slice(&self.sequence.to_be_bytes());
        out[8..12].copy_from_slice(&self.acknowledgment.to_be_bytes());
        out[12] = 0x50;
        out[13] = self.flags.0;
        out[14..16].copy_from_slice(&self.window.to_be_bytes());
        out[16..18].copy_from_slice(&self.checksum.to_be_bytes());
        out[18..].copy_from_slice(&self.urgent.to_be_bytes());
        out
    }
}

/// An option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TcpOption<'a> {
    /// Maximum segment size, bytes.
    MaximumSegmentSize(u16),
    /// Window scale, bits.
    WindowScale(u8),
    /// Selective acknowledgments are permitted.
    SackPermitted,
    /// Timestamps: value and echo reply.
    Timestamps {
        /// TSval.
        value: u32,
        /// TSecr.
        echo: u32,
    },
    /// Any other option, or one of the above with a wrong length: kind and data.
    Other(u8, &'a [u8]),
}

/// The options of the segment whose header `header` was parsed from the start of `segment`. Stops at the end of the
/// options, and at the first option whose length does not fit.
pub fn options<'a>(header: &Header, segment: &'a [u8]) -> impl Iterator<Item = TcpOption<'a>> + use<'a> {
    let mut rest = segment.get(HEADER_LEN..usize::from(header.header_len)).unwrap_or_default();
    core::iter::from_fn(move || {
        loop {
            let (&kind, behind) = rest.split_first()?;
            match kind {
                0 => return None,
                1 => rest = behind,
                _ => {
                    let len = usize::from(*behind.first()?);
                    let data = rest.get(2..len)?;
                    rest = &rest[len..];
                    return Some(option(kind, data));
                }
            }
        }
    })
}

/// TSval and TSecr of the segment whose header `header` was parsed from the start of `segment`.
#[must_use]
pub fn timestamps(header: &Header, segment: &[u8]) -> Option<(u32, u32)> {
    options(header, segment).find_map(|option| match option {
        TcpOption::Timestamps { value, echo } => Some((value, echo)),
        _ => None,
    })
}

/// Changes the sequence number in place.
pub fn set_sequence(header: &mut [u8; HEADER_LEN], sequence: u32) {
    header[4..8].copy_from_slice(&sequence.to_be_bytes());
}

/// Changes the acknowledgment number in place.
pub fn set_acknowledgment(header: &mut [u8; HEADER_LEN], acknowledgment: u32) {
    header[8..12].copy_from_slice(&acknowledgment.to_be_bytes());
}

/// Changes the flags in place.
pub fn set_flags(header: &mut [u8; HEADER_LEN], flags: Flags) {
    header[13] = flags.0;
}

/// Changes the checksum in place.
pub fn set_checksum(header: &mut [u8; HEADER_LEN], checksum: u16) {
    header[CHECKSUM_OFFSET..CHECKSUM_OFFSET + 2].copy_from_slice(&checksum.to_be_bytes());
}

fn option(kind: u8, data: &[u8]) -> TcpOption<'_> {
    match (kind, data) {
        (2, &[a, b]) => TcpOption::MaximumSegmentSize(u16::from_be_bytes([a, b])),
        (3, &[shift]) => TcpOption::WindowScale(shift),
        (4, []) => TcpOption::SackPermitted,
        (8, &[a, b, c, d, e, f, g, h]) => {
            TcpOption::Timestamps { value: u32::from_be_bytes([a, b, c, d]), echo: u32::from_be_bytes([e, f, g, h]) }
        }
        _ => TcpOption::Other(kind, data),
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    const HEADER: Header = Header {
        source_port: 6379,
        destination_port: 40000,
        sequence: 0x0102_0304,
        acknowledgment: 0x0506_0708,
        header_len: 20,
        flags: Flags(0x12),
        window: 512,
        checksum: 0xbeef,
        urgent: 7,
    };

    fn with_options(options: &[u8]) -> Vec<u8> {
        let mut segment = [&HEADER.emit()[..], options].concat();
        segment[12] = (5 + options.len() as u8 / 4) << 4;
        segment
    }

    fn read(bytes: &[u8]) -> Vec<TcpOption<'_>> {
        options(&Header::parse(bytes).unwrap(), bytes).collect()
    }

    #[test]
    fn round_trip() {
        let bytes = HEADER.emit();
        let parsed = Header::parse(&bytes).unwrap();
        assert_eq!(parsed, HEADER);
        assert!(parsed.flags.contains(Flags::SYN.with(Flags::ACK)));
        assert!(!parsed.flags.intersects(Flags::FIN.with(Flags::CWR)));
        assert_eq!(parsed.flags.without(Flags::SYN), Flags::ACK);
    }

    #[test]
    fn refuses() {
        let segment = with_options(&[1; 40]);
        for len in 0..60 {
            assert_eq!(Header::parse(&segment[..len]), Err(Malformed::Truncated), "{len}");
        }
        let mut bad = HEADER.emit();
        bad[12] = 0x4f;
        assert_eq!(Header::parse(&bad), Err(Malformed::HeaderLength));
    }

    #[test]
    fn linux_syn_options() {
        let bytes = with_options(&[2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, 9, 0, 0, 0, 3, 1, 3, 3, 7]);
        assert_eq!(
            read(&bytes),
            [
                TcpOption::MaximumSegmentSize(1460),
                TcpOption::SackPermitted,
                TcpOption::Timestamps { value: 9, echo: 3 },
                TcpOption::WindowScale(7)
            ]
        );
        assert_eq!(timestamps(&Header::parse(&bytes).unwrap(), &bytes), Some((9, 3)));
    }

    #[test]
    fn malformed_options_end_the_walk() {
        assert_eq!(read(&with_options(&[8, 0, 0, 0])), []);
        assert_eq!(read(&with_options(&[8, 1, 0, 0])), []);
        assert_eq!(read(&with_options(&[1, 1, 1, 8])), []);
        assert_eq!(read(&with_options(&[8, 10, 0, 0])), []);
        assert_eq!(read(&with_options(&[0, 4, 2, 0])), []);
        assert_eq!(read(&with_options(&[8, 3, 9, 0])), [TcpOption::Other(8, &[9])]);
    }

    #[test]
    fn setters() {
        let mut bytes = HEADER.emit();
        set_sequence(&mut bytes, 1);
        set_acknowledgment(&mut bytes, 2);
        set_flags(&mut bytes, Flags::PSH);
        set_checksum(&mut bytes, 3);
        let expected = Header { sequence: 1, acknowledgment: 2, flags: Flags::PSH, checksum: 3, ..HEADER };
        assert_eq!(Header::parse(&bytes), Ok(expected));
    }
}
