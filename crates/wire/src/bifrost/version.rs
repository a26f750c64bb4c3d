//! Protocol versions (PROTOCOL §5).

use super::Refusal;

/// A version of the protocol that this implementation speaks.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// The formats of the NSDI'26 paper, appendix C.
    V1 = 1,
    /// Version 1 with the flow distance in the data header's reserved byte.
    V2 = 2,
    /// Version 2, plus bundles: several packets in one datagram.
    V3 = 3,
    /// Version 3, plus ACKs that name packets that arrived but were not accepted.
    V4 = 4,
}

impl Version {
    /// The highest that this implementation speaks.
    pub const LATEST: Self = Self::V4;
    /// The lowest that this implementation accepts.
    pub const OLDEST: Self = Self::V1;

    /// The number in the 4-bit field.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Whether data packets carry the flow distance.
    #[must_use]
    pub const fn has_distance(self) -> bool {
        matches!(self, Self::V2 | Self::V3 | Self::V4)
    }

    /// Whether packets may come in [bundles](super::Bundle).
    #[must_use]
    pub const fn has_bundles(self) -> bool {
        matches!(self, Self::V3 | Self::V4)
    }

    /// Whether ACKs name packets that arrived but were [not accepted](super::AckKind::NotTaken).
    #[must_use]
    pub const fn has_refusals(self) -> bool {
        matches!(self, Self::V4)
    }
}

impl TryFrom<u8> for Version {
    type Error = Refusal;

    /// The version with this number, or [`Refusal::Version`].
    #[inline]
    fn try_from(number: u8) -> Result<Self, Refusal> {
        match number {
            1 => Ok(Self::V1),
            2 => Ok(Self::V2),
            3 => Ok(Self::V3),
            4 => Ok(Self::V4),
            _ => Err(Refusal::Version),
        }
    }
}
