//! ICMP errors about packets that cannot be forwarded: which packets may cause one, and its content.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_wire::protocol::{ICMP, ICMPV6};
use bifrost_wire::{checksum, icmp, ipv4, ipv6};

use crate::{L3, Parsed};

/// Maximum length of packets with an ICMP error (RFC 1812, section 4.3.2.3; RFC 4443, section 2.4 c).
const MAX_V4_ERROR: usize = 576;
const MAX_V6_ERROR: usize = 1280;
const HOP_LIMIT: u8 = 64;
/// Time exceeded in transit.
const V4_TIME_EXCEEDED: u8 = 11;
const V6_TIME_EXCEEDED: u8 = 3;

/// The error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcmpError {
    /// Time exceeded: the hop limit is used up.
    HopLimit,
    /// Packet too big: the next hop's MTU, bytes of an IP packet.
    TooLarge(u16),
}

/// Whether an ICMP error may be sent about an IP packet. Never about an ICMP error, to a multicast or broadcast
/// address, if an address is not that of a single host, or for a later fragment (RFC 1122, section 3.2.2; RFC 4443,
/// section 2.4 e, which does not exclude later fragments).
pub fn may_be_answered(head: &[u8], parsed: &Parsed) -> bool {
    let single = |addr: IpAddr| match addr {
        IpAddr::V4(a) => !(a.is_unspecified() || a.is_multicast() || a.is_broadcast() || a.is_loopback()),
        IpAddr::V6(a) => !(a.is_unspecified() || a.is_multicast() || a.is_loopback()),
    };
    let unicast = !parsed.dst_mac.is_multicast() && single(parsed.src_ip) && single(parsed.dst_ip);
    let kind = head.get(usize::from(parsed.l4)).copied();
    let about = match (parsed.kind, parsed.protocol) {
        // Destination unreachable, source quench, redirect, time exceeded, parameter problem.
        (L3::V4, ICMP) => !matches!(kind, None | Some(3..=5 | 11 | 12)),
        // Errors, redirect, and neighbour discovery, which may go to another port than its address suggests.
        (L3::V6, ICMPV6) => !matches!(kind, None | Some(0..=127 | 133..=137)),
        (L3::V4 | L3::V6, _) => true,
        _ => false,
    };
    let field = head.get(usize::from(parsed.l3) + 6..usize::from(parsed.l3) + 8);
    let later = parsed.kind == L3::V4 && field.is_none_or(|f| u16::from_be_bytes([f[0], f[1]]) & 0x1fff != 0);
    unicast && about && !later
}

/// Appends an IP packet with an error about the packet that starts with `quoted`. Returns `None` and appends nothing if
/// source and destination are of different families.
pub fn write(error: IcmpError, source: IpAddr, destination: IpAddr, quoted: &[u8], out: &mut Vec<u8>) -> Option<()> {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let quoted = &quoted[..quoted.len().min(MAX_V4_ERROR - ipv4::HEADER_LEN - icmp::v4::HEADER_LEN)];
            let message = match error {
                IcmpError::HopLimit => icmp::v4::Message::Other { kind: V4_TIME_EXCEEDED, code: 0 },
                IcmpError::TooLarge(mtu) => icmp::v4::Message::FragmentationNeeded { mtu },
            };
            out.extend_from_slice(&v4_header(source, destination, icmp::v4::HEADER_LEN + quoted.len()).emit());
            out.extend_from_slice(&message.emit(quoted));
            out.extend_from_slice(quoted);
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let quoted = &quoted[..quoted.len().min(MAX_V6_ERROR - ipv6::HEADER_LEN - icmp::v6::HEADER_LEN)];
            let message = match error {
                IcmpError::HopLimit => time_exceeded_v6(quoted, source, destination),
                IcmpError::TooLarge(mtu) => {
                    // RFC 8200, section 5: every link has at least this MTU.
                    icmp::v6::emit_packet_too_big(u32::from(mtu.max(1280)), quoted, source, destination)
                }
            };
            let len = (message.len() + quoted.len()) as u16;
            out.extend_from_slice(&ipv6::Header::new(source, destination, ICMPV6, len).emit());
            out.extend_from_slice(&message);
            out.extend_from_slice(quoted);
        }
        _ => return None,
    }
    Some(())
}

fn time_exceeded_v6(quoted: &[u8], source: Ipv6Addr, destination: Ipv6Addr) -> [u8; icmp::v6::HEADER_LEN] {
    let mut out = [V6_TIME_EXCEEDED, 0, 0, 0, 0, 0, 0, 0];
    let pseudo = checksum::pseudo_v6(source, destination, ICMPV6, (out.len() + quoted.len()) as u32);
    let sum = checksum::Sum::starting(pseudo).then(&out).then(quoted).finish();
    out[2..4].copy_from_slice(&sum.to_be_bytes());
    out
}

fn v4_header(source: Ipv4Addr, destination: Ipv4Addr, payload: usize) -> ipv4::Header {
    ipv4::Header {
        // Internetwork control (RFC 1812, section 4.3.2.5).
        traffic_class: 0xc0,
        ttl: HOP_LIMIT,
        ..ipv4::Header::new(source, destination, ICMP, payload as u16)
    }
}
