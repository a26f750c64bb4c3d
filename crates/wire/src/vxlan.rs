//! VXLAN headers (RFC 7348).

use core::fmt;

use crate::{Malformed, udp};

/// Length of a header, bytes.
pub const HEADER_LEN: usize = 8;
/// The UDP destination port of plain VXLAN.
pub const UDP_PORT: u16 = 4789;

/// A VXLAN network identifier: 24 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vni(u32);

/// A number that is not a VNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("VNI {0} is out of range: at most 16777215 (24 bits)")]
pub struct VniOutOfRange(pub u32);

impl Vni {
    /// The largest, 2^24 - 1.
    pub const MAX: Self = Self(0x00ff_ffff);

    /// The identifier `number`, or `None` above 24 bits.
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        if number <= Self::MAX.0 { Some(Self(number)) } else { None }
    }

    /// Its number, below 2^24.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Vni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TryFrom<u32> for Vni {
    type Error = VniOutOfRange;

    fn try_from(number: u32) -> Result<Self, VniOutOfRange> {
        Self::new(number).ok_or(VniOutOfRange(number))
    }
}

impl From<Vni> for u32 {
    fn from(vni: Vni) -> Self {
        vni.0
    }
}

/// The UDP source port of a flow's packets (RFC 7348, section 5).
#[must_use]
pub const fn source_port(flow_hash: u32) -> u16 {
    udp::ephemeral_port((flow_hash >> 16) as u16)
}

/// Splits a UDP payload into its VNI and the bytes after the VXLAN header. Reserved bits are ignored, as the RFC
/// requires.
///
/// # Errors
/// [`Malformed::Truncated`]; [`Malformed::VniFlag`] when the I flag is clear.
pub fn parse(payload: &[u8]) -> Result<(Vni, &[u8]), Malformed> {
    let (header, rest) = payload.split_first_chunk::<HEADER_LEN>().ok_or(Malformed::Truncated)?;
    if header[0] & FLAG_I == 0 {
        return Err(Malformed::VniFlag);
    }
    Ok((Vni(u32::from_be_bytes([0, header[4], header[5], header[6]])), rest))
}

/// The header for `vni`.
#[must_use]
pub const fn emit(vni: Vni) -> [u8; HEADER_LEN] {
    ((FLAG_I as u64) << 56 | (vni.0 as u64) << 8).to_be_bytes()
}

const FLAG_I: u8 = 0x08;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        let vni = Vni::new(0x01_0203).unwrap();
        let header = emit(vni);
        assert_eq!(header, [8, 0, 0, 0, 1, 2, 3, 0]);
        let payload = [&header[..], b"frame"].concat();
        assert_eq!(parse(&payload), Ok((vni, &b"frame"[..])));
    }

    #[test]
    fn reserved_bits_are_ignored() {
        assert_eq!(parse(&[0xff, 1, 2, 3, 0, 0, 7, 9]), Ok((Vni(7), &[][..])));
    }

    #[test]
    fn refuses() {
        assert_eq!(parse(&[0xf7, 0, 0, 0, 0, 0, 7, 0]), Err(Malformed::VniFlag));
        for len in 0..8 {
            assert_eq!(parse(&emit(Vni::MAX)[..len]), Err(Malformed::Truncated));
        }
        assert_eq!(Vni::new(1 << 24), None);
        assert_eq!(Vni::try_from(1 << 24), Err(VniOutOfRange(1 << 24)));
    }
}
