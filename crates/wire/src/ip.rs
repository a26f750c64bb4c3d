//! IP headers of either family, for writing tunnel headers.

use core::net::IpAddr;

use crate::ethernet::ethertype;
use crate::{ipv4, ipv6};

/// A header without options or extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// IPv4.
    V4(ipv4::Header),
    /// IPv6.
    V6(ipv6::Header),
}

impl Header {
    /// The header in front of `payload_len` bytes, as [`ipv4::Header::new`] and [`ipv6::Header::new`] make it. `None`
    /// if the packet would exceed the maximum length of an IP packet, or the addresses are of different families.
    #[must_use]
    #[inline(always)]
    pub fn new(source: IpAddr, destination: IpAddr, protocol: u8, payload_len: usize) -> Option<Self> {
        match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let total_len = u16::try_from(payload_len + ipv4::HEADER_LEN).ok()?;
                Some(Self::V4(ipv4::Header { total_len, ..ipv4::Header::new(source, destination, protocol, 0) }))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let payload_len = u16::try_from(payload_len).ok()?;
                Some(Self::V6(ipv6::Header::new(source, destination, protocol, payload_len)))
            }
            _ => None,
        }
    }
}

/// Length of the IP header of a packet to `address`, bytes.
#[must_use]
pub const fn header_len(address: IpAddr) -> usize {
    if address.is_ipv4() { ipv4::HEADER_LEN } else { ipv6::HEADER_LEN }
}

/// The EtherType of packets to `address`.
#[must_use]
pub const fn ethertype_of(address: IpAddr) -> u16 {
    if address.is_ipv4() { ethertype::IPV4 } else { ethertype::IPV6 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_both_families_and_their_bounds() {
        let [a, b, c, d]: [IpAddr; 4] =
            ["10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"].map(|text| text.parse().unwrap());
        let Some(Header::V4(v4)) = Header::new(a, b, 47, 65_515) else { panic!("IPv4") };
        assert_eq!((v4.total_len, v4.ttl, v4.protocol, v4.dont_fragment), (65_535, 64, 47, true));
        let Some(Header::V6(v6)) = Header::new(c, d, 47, 65_535) else { panic!("IPv6") };
        assert_eq!((v6.payload_len, v6.hop_limit, v6.next_header, v6.flow_label), (65_535, 64, 47, 0));
        assert_eq!((IpAddr::V6(v6.source), IpAddr::V6(v6.destination)), (c, d));
        assert_eq!([Header::new(a, b, 47, 65_516), Header::new(c, d, 47, 65_536)], [None; 2]);
        assert_eq!([Header::new(a, d, 47, 1), Header::new(c, b, 47, 1)], [None; 2]);
        assert_eq!([(header_len(a), ethertype_of(a)), (header_len(c), ethertype_of(c))], [(20, 0x800), (40, 0x86dd)]);
    }
}
