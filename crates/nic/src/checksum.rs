//! Transport checksums: is what arrived what was sent?

use crate::parse::{ICMPV6, L3, Parsed, TCP, UDP};

/// What is known about the transport checksum of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// It is there and right.
    Valid,
    /// It is there and wrong: bytes were changed on the way.
    Invalid,
    /// There is none to be checked: a fragment, another protocol, UDP sent without.
    None,
}

/// Checks the transport checksum (TCP, UDP, ICMPv6) of a complete frame that [`parse`](crate::parse) took apart.
/// A frame that is shorter than it was when parsed is [`Checksum::Invalid`].
pub fn transport_checksum(frame: &[u8], parsed: &Parsed) -> Checksum {
    let field = match (parsed.kind, parsed.protocol) {
        (L3::V4 | L3::V6, TCP) => 16,
        (L3::V4 | L3::V6, UDP) => 6,
        (L3::V6, ICMPV6) => 2,
        _ => return Checksum::None,
    };
    if parsed.is_fragment {
        return Checksum::None;
    }
    let (l3, l4) = (usize::from(parsed.l3), usize::from(parsed.l4));
    let Some(mut segment) = frame.get(l4..parsed.end as usize) else { return Checksum::Invalid };
    if parsed.protocol == UDP {
        let Some(len) = segment.get(4..6).map(|b| usize::from(u16::from_be_bytes([b[0], b[1]]))) else {
            return Checksum::Invalid;
        };
        let Some(datagram) = segment.get(..len) else { return Checksum::Invalid };
        segment = datagram;
    }
    match segment.get(field..field + 2) {
        None => return Checksum::Invalid,
        // Zero means "not computed" (RFC 768). IPv6 allows that to tunnels only (RFC 6935), which the guest must judge.
        Some([0, 0]) if parsed.protocol == UDP => return Checksum::None,
        Some(_) => {}
    }
    let addresses = if parsed.kind == L3::V6 { frame.get(l3 + 8..l3 + 40) } else { frame.get(l3 + 12..l3 + 20) };
    let Some(addresses) = addresses else { return Checksum::Invalid };
    let sum = pseudo(addresses, parsed.protocol, segment.len()) + sum(segment);
    if finish(sum) == 0 { Checksum::Valid } else { Checksum::Invalid }
}

/// Whether nothing speaks against the frame: `true` unless [`transport_checksum`] finds a wrong checksum, so also for
/// fragments and for UDP without one.
pub fn verify_transport_checksum(frame: &[u8], parsed: &Parsed) -> bool {
    transport_checksum(frame, parsed) != Checksum::Invalid
}

/// Ones' complement sum of big-endian words (RFC 1071), not yet complemented; an odd last byte is padded.
pub(crate) fn sum(bytes: &[u8]) -> u32 {
    // Byte order does not matter until the end, so four bytes at a time in the machine's order: this vectorises.
    let (words, rest) = bytes.as_chunks::<4>();
    let mut acc: u64 = words.iter().map(|w| u64::from(u32::from_ne_bytes(*w))).sum();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    acc += u64::from(u32::from_ne_bytes(last));
    acc = (acc & 0xffff_ffff) + (acc >> 32);
    acc = (acc & 0xffff) + (acc >> 16 & 0xffff) + (acc >> 32);
    acc = (acc & 0xffff) + (acc >> 16);
    acc = (acc & 0xffff) + (acc >> 16);
    u32::from(u16::from_be(acc as u16))
}

/// Sum of the pseudo header (RFC 9293, 3.1; RFC 8200, 8.1): both addresses, protocol, length of the transport header
/// and payload in bytes, at most 65535.
pub(crate) fn pseudo(addresses: &[u8], protocol: u8, len: usize) -> u32 {
    sum(addresses) + u32::from(protocol) + len as u32
}

/// Folds a sum and complements it: the value of the checksum field, or 0 when the summed area held a right one.
pub(crate) fn finish(sum: u32) -> u16 {
    !fold(sum)
}

/// Folds a sum to 16 bits.
pub(crate) fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}
