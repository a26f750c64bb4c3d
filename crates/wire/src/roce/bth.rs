//! The base transport header (IBTA 9.2).

use super::DEFAULT_PARTITION;

/// A queue pair number, 24 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Qpn(u32);

impl Qpn {
    /// The largest number.
    pub const MAX: u32 = 0xff_ffff;

    /// A number; only its low 24 bits count.
    #[must_use]
    pub const fn new(number: u32) -> Self {
        Self(number & Self::MAX)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// A packet sequence number, 24 bits, which wraps (IBTA 9.7.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sequence(u32);

impl Sequence {
    /// A number; only its low 24 bits count.
    #[must_use]
    pub const fn new(number: u32) -> Self {
        Self(number & 0xff_ffff)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number `count` packets later.
    #[must_use]
    pub const fn plus(self, count: u32) -> Self {
        Self::new(self.0.wrapping_add(count))
    }

    /// Packets from `earlier` to here, -2^23..2^23: negative if `earlier` is later.
    #[must_use]
    pub const fn distance(self, earlier: Self) -> i32 {
        (self.0.wrapping_sub(earlier.0) << 8) as i32 >> 8
    }
}

/// A base transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bth {
    /// The opcode's byte; see [`super::Opcode::from_byte`].
    pub opcode: u8,
    /// The receiver must raise a solicited event.
    pub solicited: bool,
    /// Pad bytes behind the payload, 0..=3.
    pub pad: u8,
    /// The partition; [`DEFAULT_PARTITION`] for RoCE.
    pub partition: u16,
    /// The receiver's queue pair.
    pub destination: Qpn,
    /// The receiver must acknowledge. RC only.
    pub acknowledge: bool,
    /// The packet's number.
    pub sequence: Sequence,
}

impl Bth {
    /// Length of the header, bytes.
    pub const LEN: usize = 12;
    /// The byte that routers may change (FECN and BECN): the ICRC treats it as all ones (IBTA A17.3.3).
    pub const VARIANT_BYTE: usize = 4;

    /// Parses a header; `None` if its version is not 0.
    #[must_use]
    #[inline]
    pub fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        if bytes[1] & 0x0f != 0 {
            return None;
        }
        Some(Self {
            opcode: bytes[0],
            solicited: bytes[1] & 0x80 != 0,
            pad: bytes[1] >> 4 & 3,
            partition: u16::from_be_bytes([bytes[2], bytes[3]]),
            destination: Qpn(u32::from_be_bytes([0, bytes[5], bytes[6], bytes[7]])),
            acknowledge: bytes[8] & 0x80 != 0,
            sequence: Sequence(u32::from_be_bytes([0, bytes[9], bytes[10], bytes[11]])),
        })
    }

    /// The encoded header. The migration bit is set, as in a queue pair in the migrated state (IBTA 17.2.8), the state
    /// without automatic path migration.
    #[must_use]
    #[inline]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let [p0, p1] = self.partition.to_be_bytes();
        let [_, q0, q1, q2] = self.destination.0.to_be_bytes();
        let [_, s0, s1, s2] = self.sequence.0.to_be_bytes();
        let flags = u8::from(self.solicited) << 7 | 0x40 | (self.pad & 3) << 4;
        [self.opcode, flags, p0, p1, 0, q0, q1, q2, u8::from(self.acknowledge) << 7, s0, s1, s2]
    }
}

impl Default for Bth {
    fn default() -> Self {
        Self {
            opcode: 0,
            solicited: false,
            pad: 0,
            partition: DEFAULT_PARTITION,
            destination: Qpn(0),
            acknowledge: false,
            sequence: Sequence(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_wrap() {
        let cases = [(5, 3, 2), (3, 5, -2), (0, 0xff_ffff, 1), (0xff_ffff, 0, -1), (0x80_0000, 0, -0x80_0000)];
        for (later, earlier, distance) in cases {
            assert_eq!(Sequence::new(later).distance(Sequence::new(earlier)), distance);
        }
        assert_eq!(Sequence::new(0xff_ffff).plus(2).get(), 1);
    }

    #[test]
    fn only_version_0_is_read() {
        let mut bytes = Bth { destination: Qpn::new(0x12_3456), ..Bth::default() }.emit();
        assert_eq!(Bth::parse(&bytes).map(|bth| bth.destination.get()), Some(0x12_3456));
        bytes[1] |= 1;
        assert_eq!(Bth::parse(&bytes), None);
    }
}
