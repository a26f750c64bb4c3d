//! IPv6 headers and a bounded walk over extension headers (RFC 8200).

use core::net::Ipv6Addr;

use crate::{Malformed, checksum};

/// Length of the fixed header, bytes.
pub const HEADER_LEN: usize = 40;
/// Maximum number of extension headers walked. RFC 8200, section 4.1 allows at most seven in one packet.
pub const MAX_EXTENSIONS: usize = 8;

/// A fixed header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Length of everything after the fixed header, bytes.
    pub payload_len: u16,
    /// Next header: the extension header or transport protocol that follows.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address.
    pub source: Ipv6Addr,
    /// Destination address.
    pub destination: Ipv6Addr,
}

/// Where the transport header of a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Transport {
    /// Its protocol number; see [`crate::protocol`]. [`NO_NEXT_HEADER`] if nothing follows.
    pub protocol: u8,
    /// Its offset from the start of the packet, bytes: at most the packet's end. In a fragment, where its payload
    /// starts.
    pub offset: usize,
    /// The fragment header, if there is one.
    pub fragment: Option<Fragment>,
}

/// A fragment header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fragment {
    /// Fragment offset, bytes: a multiple of 8.
    pub offset: u16,
    /// More fragments follow.
    pub more: bool,
    /// Identification of the fragments of one packet.
    pub identification: u32,
}

/// Next header value: nothing follows (RFC 8200, section 4.7).
pub const NO_NEXT_HEADER: u8 = 59;

impl Header {
    /// The header of a packet with `payload_len` bytes behind it: hop limit 64, traffic class and flow label 0.
    #[must_use]
    pub const fn new(source: Ipv6Addr, destination: Ipv6Addr, next_header: u8, payload_len: u16) -> Self {
        Self { traffic_class: 0, flow_label: 0, payload_len, next_header, hop_limit: 64, source, destination }
    }

    /// Parses the fixed header at the start of `packet`, which may have padding behind its end.
    ///
    /// # Errors
    /// [`Malformed::Truncated`], [`Malformed::Version`]; [`Malformed::Length`] when the payload reaches beyond
    /// `packet`.
    pub fn parse(packet: &[u8]) -> Result<Self, Malformed> {
        let header = Self::parse_quoted(packet)?;
        if header.total_len() > packet.len() {
            return Err(Malformed::Length);
        }
        Ok(header)
    }

    /// As [`Header::parse`], but the payload may be truncated, as in packets that ICMPv6 errors quote.
    ///
    /// # Errors
    /// [`Malformed::Truncated`], [`Malformed::Version`].
    pub fn parse_quoted(packet: &[u8]) -> Result<Self, Malformed> {
        let b = packet.first_chunk::<HEADER_LEN>().ok_or(Malformed::Truncated)?;
        let first = u32::from_be_bytes([b[0], b[1], b[2], b[3]]);
        if first >> 28 != 6 {
            return Err(Malformed::Version);
        }
        Ok(Self {
            traffic_class: (first >> 20) as u8,
            flow_label: first & 0x000f_ffff,
            payload_len: u16::from_be_bytes([b[4], b[5]]),
            next_header: b[6],
            hop_limit: b[7],
            source: address(b, 8),
            destination: address(b, 24),
        })
    }

    /// Length of the whole packet, bytes.
    #[must_use]
    pub const fn total_len(&self) -> usize {
        HEADER_LEN + self.payload_len as usize
    }

    /// ECN codepoint, 0..=3 (RFC 3168).
    #[must_use]
    pub const fn ecn(&self) -> u8 {
        self.traffic_class & 3
    }

    /// The fixed header; only the low 20 bits of `flow_label` count.
    #[must_use]
    pub fn emit(&self) -> [u8; HEADER_LEN] {
        let first = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0x000f_ffff;
        let mut out = [0; HEADER_LEN];
        out[..4].copy_from_slice(&first.to_be_bytes());
        out[4..6].copy_from_slice(&self.payload_len.to_be_bytes());
        out[6] = self.next_header;
        out[7] = self.hop_limit;
        out[8..24].copy_from_slice(&self.source.octets());
        out[24..].copy_from_slice(&self.destination.octets());
        out
    }

    /// Walks the extension headers of `packet`, the packet that this header was parsed from. Stops at the first header
    /// that is not a hop-by-hop, routing, fragment, destination options or AH header, and at the payload of a fragment
    /// other than the first.
    ///
    /// # Errors
    /// - [`Malformed::Truncated`] if a header extends beyond the packet's end or beyond `packet`;
    /// - [`Malformed::Extensions`] for more than [`MAX_EXTENSIONS`];
    /// - [`Malformed::Fragment`] for a second fragment header, and for an extension header in the first fragment: other
    ///   fragments could overlap it and so change what the packet is. An atomic fragment (RFC 6946) is a whole packet
    ///   and may have them;
    /// - [`Malformed::SourceRoute`] for a routing header of type 0, 1 or 2 that lists further destinations (RFC 5095,
    ///   RFC 6275): the packet does not end where its header says. Other types are skipped: a node that processes them
    ///   sends a packet of its own.
    pub fn transport(&self, packet: &[u8]) -> Result<Transport, Malformed> {
        let packet = packet.get(..self.total_len()).unwrap_or(packet);
        let mut at = Transport { protocol: self.next_header, offset: HEADER_LEN, fragment: None };
        for _ in 0..=MAX_EXTENSIONS {
            let kind = at.protocol;
            if !matches!(kind, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION_OPTIONS | AUTHENTICATION) {
                return Ok(at);
            }
            if at.fragment.is_some_and(|f| f.more || kind == FRAGMENT) {
                return Err(Malformed::Fragment);
            }
            let bytes = packet.get(at.offset..).ok_or(Malformed::Truncated)?;
            // Every extension header is at least 8 bytes long.
            let b = bytes.first_chunk::<8>().ok_or(Malformed::Truncated)?;
            let len = match kind {
                FRAGMENT => 8,
                AUTHENTICATION => (usize::from(b[1]) + 2) * 4,
                _ => (usize::from(b[1]) + 1) * 8,
            };
            if len > bytes.len() {
                return Err(Malformed::Truncated);
            }
            if kind == ROUTING && b[2] <= MAX_SOURCE_ROUTE && b[3] != 0 {
                return Err(Malformed::SourceRoute);
            }
            at.protocol = b[0];
            at.offset += len;
            if kind == FRAGMENT {
                let field = u16::from_be_bytes([b[2], b[3]]);
                let identification = u32::from_be_bytes([b[4], b[5], b[6], b[7]]);
                at.fragment = Some(Fragment { offset: field & !7, more: field & 1 != 0, identification });
                if field & !7 != 0 {
                    return Ok(at);
                }
            }
        }
        Err(Malformed::Extensions)
    }

    /// Partial checksum of the pseudo header of a transport packet of `len` bytes.
    #[must_use]
    pub fn pseudo_sum(&self, protocol: u8, len: u32) -> u32 {
        checksum::pseudo_v6(self.source, self.destination, protocol, len)
    }
}

/// Changes the payload length in place.
pub fn set_payload_len(header: &mut [u8; HEADER_LEN], payload_len: u16) {
    header[4..6].copy_from_slice(&payload_len.to_be_bytes());
}

/// Changes the hop limit in place.
pub fn set_hop_limit(header: &mut [u8; HEADER_LEN], hop_limit: u8) {
    header[7] = hop_limit;
}

/// Changes the ECN codepoint (0..=3) in place.
pub fn set_ecn(header: &mut [u8; HEADER_LEN], ecn: u8) {
    header[1] = header[1] & !0x30 | (ecn & 3) << 4;
}

/// Changes the source address in place; the caller updates the transport checksum.
pub fn set_source(header: &mut [u8; HEADER_LEN], source: Ipv6Addr) {
    header[8..24].copy_from_slice(&source.octets());
}

/// Changes the destination address in place; the caller updates the transport checksum.
pub fn set_destination(header: &mut [u8; HEADER_LEN], destination: Ipv6Addr) {
    header[24..40].copy_from_slice(&destination.octets());
}

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
/// Routing headers up to this type list addresses to visit.
const MAX_SOURCE_ROUTE: u8 = 2;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;

/// `at` is 8 or 24.
fn address(header: &[u8; HEADER_LEN], at: usize) -> Ipv6Addr {
    let mut octets = [0; 16];
    octets.copy_from_slice(&header[at..at + 16]);
    Ipv6Addr::from(octets)
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::protocol;

    fn packet(next_header: u8, payload: &[u8]) -> Vec<u8> {
        let header = Header {
            traffic_class: 0xa1,
            flow_label: 0x54321,
            payload_len: payload.len() as u16,
            next_header,
            hop_limit: 64,
            source: "fd00::1".parse().unwrap(),
            destination: "fd00::2".parse().unwrap(),
        };
        let packet = [&header.emit()[..], payload].concat();
        assert_eq!(Header::parse(&packet), Ok(header));
        packet
    }

    fn transport(next_header: u8, payload: &[u8]) -> Result<Transport, Malformed> {
        let packet = packet(next_header, payload);
        Header::parse(&packet)?.transport(&packet)
    }

    #[test]
    fn walks() {
        let none = Transport { protocol: 6, offset: 40, fragment: None };
        assert_eq!(transport(6, &[0; 20]), Ok(none));
        let hop_then_routing = [&[43, 0, 0, 0, 0, 0, 0, 0][..], &[17, 1], &[0; 14], &[0; 8]].concat();
        assert_eq!(transport(0, &hop_then_routing), Ok(Transport { protocol: 17, offset: 64, ..none }));
        let authentication = [&[58, 4][..], &[0; 22]].concat();
        assert_eq!(transport(51, &authentication), Ok(Transport { protocol: protocol::ICMPV6, offset: 64, ..none }));
        assert_eq!(transport(NO_NEXT_HEADER, &[]).map(|t| t.protocol), Ok(NO_NEXT_HEADER));
    }

    #[test]
    fn fragments() {
        let first = [6, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0];
        let found = transport(44, &first).unwrap();
        assert_eq!(found.fragment, Some(Fragment { offset: 0, more: true, identification: 9 }));
        assert_eq!((found.protocol, found.offset), (6, 48));
        let options = [6, 0, 0, 0, 0, 0, 0, 0];
        for next in [0, 43, 44, 51, 60] {
            let first = [&[next, 0, 0, 1, 0, 0, 0, 9][..], &options].concat();
            assert_eq!(transport(44, &first), Err(Malformed::Fragment), "{next} in pieces");
        }
        // A whole packet with a fragment header may have options behind it, and no second fragment header.
        let atomic = [&[60, 0, 0, 0, 0, 0, 0, 9][..], &options].concat();
        let found = transport(44, &atomic).unwrap();
        assert_eq!((found.protocol, found.offset), (6, 56));
        let twice = [&[44, 0, 0, 0, 0, 0, 0, 9][..], &options].concat();
        assert_eq!(transport(44, &twice), Err(Malformed::Fragment));
        // After the header of a later fragment comes payload, not another header.
        let later = [60, 0, 0, 8, 0, 0, 0, 9, 255, 255];
        let found = transport(44, &later).unwrap();
        assert_eq!(found.fragment, Some(Fragment { offset: 8, more: false, identification: 9 }));
        assert_eq!((found.protocol, found.offset), (60, 48));
    }

    #[test]
    fn source_routes_are_refused() {
        let routing = |kind, left| transport(43, &[6, 0, kind, left, 0, 0, 0, 0]).map(|t| t.protocol);
        for kind in 0..=2 {
            assert_eq!(routing(kind, 1), Err(Malformed::SourceRoute), "type {kind}");
            assert_eq!(routing(kind, 0), Ok(6), "type {kind}, at its end");
        }
        assert_eq!(routing(4, 1), Ok(6));
    }

    #[test]
    fn refuses() {
        assert_eq!(transport(0, &[6, 1, 0, 0, 0, 0, 0, 0]), Err(Malformed::Truncated));
        assert_eq!(transport(0, &[6, 0, 0, 0, 0, 0, 0]), Err(Malformed::Truncated));
        let chain = [[60u8, 0, 0, 0, 0, 0, 0, 0]; 9].concat();
        assert_eq!(transport(60, &chain), Err(Malformed::Extensions));
        assert_eq!(transport(60, &chain[..64]), Err(Malformed::Truncated));
        let good = packet(6, &[1, 2]);
        for len in 0..40 {
            assert_eq!(Header::parse(&good[..len]), Err(Malformed::Truncated));
        }
        assert_eq!(Header::parse(&good[..41]), Err(Malformed::Length));
        let mut bad = good.clone();
        bad[0] = 0x45;
        assert_eq!(Header::parse(&bad), Err(Malformed::Version));
    }

    #[test]
    fn eight_extensions_are_walked() {
        let mut chain = [[60u8, 0, 0, 0, 0, 0, 0, 0]; 8].concat();
        chain[56] = 6;
        assert_eq!(transport(60, &chain).map(|t| (t.protocol, t.offset)), Ok((6, 104)));
    }

    #[test]
    fn setters() {
        let mut header = *packet(6, &[]).first_chunk::<HEADER_LEN>().unwrap();
        set_payload_len(&mut header, 9);
        set_hop_limit(&mut header, 3);
        set_ecn(&mut header, 2);
        set_source(&mut header, Ipv6Addr::LOCALHOST);
        set_destination(&mut header, Ipv6Addr::UNSPECIFIED);
        let parsed = Header::parse_quoted(&header).unwrap();
        let expected = Header {
            traffic_class: 0xa2,
            flow_label: 0x54321,
            payload_len: 9,
            next_header: 6,
            hop_limit: 3,
            source: Ipv6Addr::LOCALHOST,
            destination: Ipv6Addr::UNSPECIFIED,
        };
        assert_eq!(parsed, expected);
    }
}
