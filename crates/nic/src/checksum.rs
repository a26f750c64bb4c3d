//! Verifies transport checksums.

use std::net::{IpAddr, Ipv6Addr};

use bifrost_wire::protocol::{ICMPV6, TCP, UDP};
use bifrost_wire::{checksum, tcp, udp};

use crate::parse::{L3, Parsed};

/// State of a frame's transport checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// Present and valid.
    Valid,
    /// Present and wrong: bytes changed in flight.
    Invalid,
    /// Nothing to verify: a fragment, another protocol, or UDP without a checksum.
    None,
}

/// Verifies the transport checksum (TCP, UDP, ICMPv6) of a complete frame that [`parse`](crate::parse) parsed. A frame
/// that is shorter than when it was parsed is [`Checksum::Invalid`].
pub fn transport_checksum(frame: &[u8], parsed: &Parsed) -> Checksum {
    transport_checksum_of_parts(frame, &[], parsed)
}

/// The same for a frame in two parts: `head`, which contains all headers, and `tail` after it.
#[inline]
pub fn transport_checksum_of_parts(head: &[u8], tail: &[u8], parsed: &Parsed) -> Checksum {
    let Some(field) = field(parsed) else { return Checksum::None };
    let (l4, end) = (usize::from(parsed.l4), parsed.end as usize);
    if end < l4 || end > head.len() + tail.len() {
        return Checksum::Invalid;
    }
    let Some(header) = head.get(l4..) else { return Checksum::Invalid };
    let word = |at: usize| header.get(at..at + 2).map(|b| u16::from_be_bytes([b[0], b[1]]));
    let mut len = end - l4;
    if parsed.protocol == UDP {
        match word(4).map(usize::from) {
            Some(said) if said <= len => len = said,
            _ => return Checksum::Invalid,
        }
    }
    match word(field) {
        // Zero means "not computed" (RFC 768). IPv6 allows that only for tunnels (RFC 6935); the guest decides about
        // it.
        Some(0) if parsed.protocol == UDP && field + 2 <= len => return Checksum::None,
        Some(_) if field + 2 <= len => {}
        _ => return Checksum::Invalid,
    }
    let (first, second) = (&header[..len.min(header.len())], &tail[..len.saturating_sub(header.len())]);
    let behind = match (second.is_empty(), first.len() % 2) {
        (true, _) => 0,
        (false, 0) => checksum::sum(second),
        // After an odd number of bytes every word is shifted by one byte (RFC 1071, section 2 (B)).
        (false, _) => u32::from((checksum::sum(second) as u16).swap_bytes()),
    };
    let sum = pseudo(parsed.src_ip, parsed.dst_ip, parsed.protocol, len) + checksum::sum(first) + behind;
    if checksum::fold(sum) == 0xffff { Checksum::Valid } else { Checksum::Invalid }
}

/// Whether a partial checksum that a guest left at `start` and `offset` ([`Offload::checksum`](crate::Offload)) will be
/// valid when completed: it is the transport's own, and its field holds the sum of the pseudo header (virtio 1.3,
/// 5.1.6.2.1). `head` is the start of a frame of `len` bytes, with at least all headers. `true` as well if no receiver
/// will verify it.
pub fn open_checksum_is_right(head: &[u8], len: usize, parsed: &Parsed, (start, offset): (u16, u16)) -> bool {
    let Some(field) = field(parsed) else { return true };
    let segment = (parsed.end as usize).saturating_sub(usize::from(parsed.l4));
    let Some(header) = head.get(usize::from(parsed.l4)..) else { return false };
    let word = |at: usize| header.get(at..at + 2).map(|b| u16::from_be_bytes([b[0], b[1]]));
    // Bytes behind the packet are summed, too; and a receiver uses the datagram's own length.
    let whole = len == parsed.end as usize && (parsed.protocol != UDP || word(4).map(usize::from) == Some(segment));
    let sum = checksum::fold(pseudo(parsed.src_ip, parsed.dst_ip, parsed.protocol, segment));
    let same = word(field).is_some_and(|open| open == sum || (open == 0 && sum == 0xffff));
    whole && same && (start, usize::from(offset)) == (parsed.l4, field)
}

/// Offset of the checksum field in the transport header, if the protocol has one.
pub(crate) fn field(parsed: &Parsed) -> Option<usize> {
    match (parsed.kind, parsed.protocol) {
        _ if parsed.is_fragment() => None,
        (L3::V4 | L3::V6, TCP) => Some(tcp::CHECKSUM_OFFSET),
        (L3::V4 | L3::V6, UDP) => Some(udp::CHECKSUM_OFFSET),
        (L3::V6, ICMPV6) => Some(2),
        _ => None,
    }
}

/// `true` unless [`transport_checksum`] finds a wrong checksum, so also for fragments and for UDP without one.
pub fn verify_transport_checksum(frame: &[u8], parsed: &Parsed) -> bool {
    transport_checksum(frame, parsed) != Checksum::Invalid
}

/// Partial sum of the pseudo header of a packet; `len` is the length of transport header and payload, bytes.
pub(crate) fn pseudo(src: IpAddr, dst: IpAddr, protocol: u8, len: usize) -> u32 {
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => checksum::pseudo_v4(src, dst, protocol, len as u32),
        (src, dst) => checksum::pseudo_v6(to_v6(src), to_v6(dst), protocol, len as u32),
    }
}

fn to_v6(addr: IpAddr) -> Ipv6Addr {
    match addr {
        // Unreachable: both addresses of a packet are of one family.
        IpAddr::V4(addr) => addr.to_ipv6_mapped(),
        IpAddr::V6(addr) => addr,
    }
}
