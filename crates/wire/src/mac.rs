//! MAC-48 addresses.

use core::fmt;
use core::hash::{Hash, Hasher};
use core::str::FromStr;

/// A MAC-48 (EUI-48) address, in the order of the octets on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

/// As one number: a hash function has less to do than with a sequence of octets.
impl Hash for Mac {
    #[inline(always)]
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [a, b, c, d, e, f] = self.0;
        state.write_u64(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]));
    }
}

/// A string that is not a MAC address of the form `02:00:00:00:00:01` (or with `-`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a MAC address: expected six two-digit hexadecimal octets separated by ':' or '-'")]
pub struct ParseMacError;

impl Mac {
    /// The broadcast address.
    pub const BROADCAST: Self = Self([0xff; 6]);
    /// All zeros: "unknown" in ARP, never the address of an interface.
    pub const ZERO: Self = Self([0; 6]);

    /// The address of the distributed router of every VPC on every host: the source of frames that a host has routed.
    /// No vNIC may have it.
    pub const ROUTER: Self = Self([0x02, 0xbf, 0x00, 0x00, 0x00, 0x01]);

    /// The octets in wire order.
    #[must_use]
    pub const fn octets(self) -> [u8; 6] {
        self.0
    }

    /// Whether the group bit is set: multicast or broadcast (IEEE 802, I/G bit).
    #[must_use]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether this is the broadcast address.
    #[must_use]
    pub const fn is_broadcast(self) -> bool {
        self.as_u64() == 0xffff_ffff_ffff
    }

    /// Whether an interface can have this address: neither a group address nor all zeros.
    #[must_use]
    pub const fn is_unicast(self) -> bool {
        !self.is_multicast() && self.as_u64() != 0
    }

    /// The low 32 bits (the last four octets, big endian): a cheap key or hash input.
    #[must_use]
    pub const fn low32(self) -> u32 {
        u32::from_be_bytes([self.0[2], self.0[3], self.0[4], self.0[5]])
    }

    /// The address as a 48-bit number, first octet most significant.
    #[must_use]
    #[inline]
    pub const fn as_u64(self) -> u64 {
        let m = self.0;
        u64::from_be_bytes([0, 0, m[0], m[1], m[2], m[3], m[4], m[5]])
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Mac {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, ParseMacError> {
        let bytes: &[u8; 17] = text.as_bytes().try_into().map_err(|_| ParseMacError)?;
        let separator = bytes[2];
        if separator != b':' && separator != b'-' {
            return Err(ParseMacError);
        }
        let mut octets = [0; 6];
        for (i, octet) in octets.iter_mut().enumerate() {
            if i > 0 && bytes[i * 3 - 1] != separator {
                return Err(ParseMacError);
            }
            *octet = digit(bytes[i * 3])? << 4 | digit(bytes[i * 3 + 1])?;
        }
        Ok(Self(octets))
    }
}

impl From<[u8; 6]> for Mac {
    fn from(octets: [u8; 6]) -> Self {
        Self(octets)
    }
}

fn digit(byte: u8) -> Result<u8, ParseMacError> {
    match byte {
        b'0'..=b'9' => Ok(byte - b'0'),
        b'a'..=b'f' => Ok(byte - b'a' + 10),
        b'A'..=b'F' => Ok(byte - b'A' + 10),
        _ => Err(ParseMacError),
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn text_round_trip() {
        let mac = Mac([0x02, 0xab, 0, 0x10, 0xff, 0x7e]);
        assert_eq!(mac.to_string(), "02:ab:00:10:ff:7e");
        assert_eq!("02:ab:00:10:ff:7e".parse(), Ok(mac));
        assert_eq!("02-AB-00-10-FF-7E".parse(), Ok(mac));
    }

    #[test]
    fn refuses_other_text() {
        for text in [
            "",
            "02:ab:00:10:ff",
            "02:ab:00:10:ff:7e:",
            "02:ab-00:10:ff:7e",
            "02:ab:00:10:ff:7g",
            "0x:ab:00:10:ff:7e",
            "02.ab.00.10.ff.7e",
            "é2:ab:00:10:ff:7e",
        ] {
            assert_eq!(text.parse::<Mac>(), Err(ParseMacError), "{text:?}");
        }
    }

    #[test]
    fn kinds() {
        assert!(Mac::BROADCAST.is_broadcast() && Mac::BROADCAST.is_multicast() && !Mac::BROADCAST.is_unicast());
        assert!(!Mac::ZERO.is_unicast() && !Mac::ZERO.is_multicast());
        assert!(Mac([0x33, 0x33, 0, 0, 0, 1]).is_multicast());
        assert!(Mac([2, 0, 0, 0, 0, 1]).is_unicast());
        assert_eq!(Mac([1, 2, 3, 4, 5, 6]).low32(), 0x0304_0506);
        assert_eq!(Mac([1, 2, 3, 4, 5, 6]).as_u64(), 0x0102_0304_0506);
    }
}
