//! Explicit congestion notification between the inner and the outer IP header (RFC 6040).

use bifrost_wire::{ipv4, ipv6};

use crate::dscp;
use crate::parse::{L3, Parsed};

/// ECN codepoints (RFC 3168, section 5).
pub const NOT_ECT: u8 = 0;
/// ECT(1): ECN-capable, used by L4S, whose networks mark earlier than they drop (RFC 9331).
pub const ECT_1: u8 = 1;
/// ECT(0): ECN-capable.
pub const ECT_0: u8 = 2;
/// Congestion experienced.
pub const CE: u8 = 3;

/// The codepoint of a frame that was parsed as `parsed`; [`NOT_ECT`] if it is not IP. `head`: the bytes that were
/// parsed.
#[inline]
pub fn of(head: &[u8], parsed: &Parsed) -> u8 {
    dscp::class_of(head, parsed) & 3
}

/// The outer codepoint of a packet that is not carried reliably: a copy of the inner one (RFC 6040, section 4.1, normal
/// mode).
#[inline]
pub fn outer_of_plain(inner: u8) -> u8 {
    inner & 3
}

/// The outer codepoint of a packet that the transport carries. The transport itself responds to marks, so its datagrams
/// are ECN-capable whatever the guest uses. An earlier mark is not copied, so that marks tell only about this path (RFC
/// 3168, section 9.1.1, full functionality). A guest that asks for L4S gets it.
#[inline]
pub fn outer_of_reliable(inner: u8) -> u8 {
    if inner == ECT_1 { ECT_1 } else { ECT_0 }
}

/// The codepoint of a frame after decapsulation (RFC 6040, figure 4); `None`: drop the frame, because it met congestion
/// and its sender would not learn that otherwise.
#[inline]
pub fn decapsulate(inner: u8, outer: u8) -> Option<u8> {
    match (inner, outer) {
        (NOT_ECT, CE) => None,
        (ECT_0, ECT_1) => Some(ECT_1),
        (ECT_0 | ECT_1, CE) => Some(CE),
        _ => Some(inner),
    }
}

/// Changes the codepoint of a frame that was parsed as `parsed`, and updates IPv4's header checksum incrementally (RFC
/// 1624), so a damaged header stays invalid. Frames that are not IP are unchanged.
pub fn set(frame: &mut [u8], parsed: &Parsed, ecn: u8) {
    let Some(packet) = frame.get_mut(usize::from(parsed.l3)..) else { return };
    match parsed.kind {
        L3::V4 => {
            if let Some(header) = packet.first_chunk_mut() {
                ipv4::set_ecn(header, ecn);
            }
        }
        L3::V6 => {
            if let Some(header) = packet.first_chunk_mut() {
                ipv6::set_ecn(header, ecn);
            }
        }
        L3::Arp | L3::Other => {}
    }
}
