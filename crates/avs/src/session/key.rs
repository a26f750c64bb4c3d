//! What names a session.

use std::net::IpAddr;

use bifrost_nic::{L3, Parsed};
use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};
use bifrost_wire::{ipv4, ipv6};

use super::Direction;

/// A vNIC and the two ends of a conversation, the guest's first: the same for both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    local: [u8; 16],
    remote: [u8; 16],
    local_port: u16,
    remote_port: u16,
    /// The number of the vNIC's port.
    pub(crate) vnic: u16,
    protocol: u8,
    v6: bool,
}

/// ICMP types (RFC 792, RFC 4443).
const V4_REPLY: u8 = 0;
const V4_REQUEST: u8 = 8;
const V6_REQUEST: u8 = 128;
const V6_REPLY: u8 = 129;
/// Behind the header of an ICMP error: the packet that it is about.
const QUOTE_AT: usize = 8;

impl Key {
    /// The session of a packet. `head` holds the frame's headers. Echo requests and replies have their identifier for ports;
    /// other protocols without ports, and fragments, have one session for each pair of addresses.
    #[inline(always)]
    pub(crate) fn of(vnic: u16, direction: Direction, head: &[u8], parsed: &Parsed) -> Key {
        let ports = match echo(head, parsed) {
            Some((_, identifier)) => (identifier, identifier),
            None => (parsed.src_port, parsed.dst_port),
        };
        Key::new(vnic, direction, (parsed.src_ip, parsed.dst_ip), ports, parsed.protocol)
    }

    #[inline(always)]
    fn new(vnic: u16, direction: Direction, (src, dst): (IpAddr, IpAddr), ports: (u16, u16), protocol: u8) -> Key {
        let (src_port, dst_port) = ports;
        let ((local, local_port), (remote, remote_port)) = match direction {
            Direction::Egress => ((src, src_port), (dst, dst_port)),
            Direction::Ingress => ((dst, dst_port), (src, src_port)),
        };
        Key { local: bytes(local), remote: bytes(remote), local_port, remote_port, vnic, protocol, v6: src.is_ipv6() }
    }
}

impl Key {
    /// Who is at the other end: an IPv4 address, or the prefix of an IPv6 address, because one host may have all addresses of a
    /// /64. A link-local address is one host's: those of a whole network have the same prefix.
    pub(crate) fn source(&self) -> (bool, u64) {
        let [prefix, interface] =
            [&self.remote[..8], &self.remote[8..]].map(|half| half.iter().fold(0, |n, b| n << 8 | u64::from(*b)));
        let is_link_local = prefix >> 54 == 0xfe80 >> 6;
        (self.v6, if self.v6 && !is_link_local { prefix } else { interface })
    }
}

fn bytes(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(a) => a.to_ipv6_mapped().octets(),
        IpAddr::V6(a) => a.octets(),
    }
}

/// Whether a packet is an echo request, and its identifier; `None` when it is neither request nor reply.
pub(crate) fn echo(head: &[u8], parsed: &Parsed) -> Option<(bool, u16)> {
    let (request, reply) = match (parsed.kind, parsed.protocol) {
        (L3::V4, ICMP) => (V4_REQUEST, V4_REPLY),
        (L3::V6, ICMPV6) => (V6_REQUEST, V6_REPLY),
        _ => return None,
    };
    let message = (!parsed.is_fragment).then(|| head.get(usize::from(parsed.l4)..)?.first_chunk::<8>())??;
    let kind = message[0];
    (kind == request || kind == reply).then(|| (kind == request, u16::from_be_bytes([message[4], message[5]])))
}

/// The session that an ICMP error is about: of the packet that it quotes (RFC 5508, 4.1). `None` when the packet is no such
/// error, or its quote makes no sense.
pub(crate) fn related(vnic: u16, direction: Direction, head: &[u8], parsed: &Parsed) -> Option<Key> {
    if parsed.is_fragment {
        return None;
    }
    let message = head.get(usize::from(parsed.l4)..head.len().min(parsed.end as usize))?;
    let kind = *message.first()?;
    let quote = message.get(QUOTE_AT..)?;
    let (addresses, protocol, rest) = match (parsed.kind, parsed.protocol) {
        // Unreachable, time exceeded, parameter problem.
        (L3::V4, ICMP) if matches!(kind, 3 | 11 | 12) => {
            let header = quote.first_chunk::<{ ipv4::HEADER_LEN }>()?;
            let length = usize::from(header[0] & 15) * 4;
            // A later fragment has no ports to look at.
            let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0;
            if header[0] >> 4 != 4 || length < ipv4::HEADER_LEN || fragment {
                return None;
            }
            let address = |at: usize| header[at..at + 4].try_into().map(|a: [u8; 4]| IpAddr::from(a)).ok();
            ((address(12)?, address(16)?), header[9], quote.get(length..)?)
        }
        // Unreachable, too big, time exceeded, parameter problem. Quotes behind extension headers are not followed.
        (L3::V6, ICMPV6) if matches!(kind, 1..=4) => {
            let header = quote.first_chunk::<{ ipv6::HEADER_LEN }>()?;
            if header[0] >> 4 != 6 {
                return None;
            }
            let address = |at: usize| header[at..at + 16].try_into().map(|a: [u8; 16]| IpAddr::from(a)).ok();
            ((address(8)?, address(24)?), header[6], quote.get(ipv6::HEADER_LEN..)?)
        }
        _ => return None,
    };
    let ports = match protocol {
        TCP | UDP => {
            let b = rest.first_chunk::<4>()?;
            (u16::from_be_bytes([b[0], b[1]]), u16::from_be_bytes([b[2], b[3]]))
        }
        ICMP | ICMPV6 => {
            let b = rest.first_chunk::<8>()?;
            matches!(b[0], V4_REPLY | V4_REQUEST | V6_REQUEST | V6_REPLY).then_some(())?;
            let identifier = u16::from_be_bytes([b[4], b[5]]);
            (identifier, identifier)
        }
        _ => (0, 0),
    };
    // The packet that is quoted went the other way.
    let quoted = match direction {
        Direction::Egress => Direction::Ingress,
        Direction::Ingress => Direction::Egress,
    };
    Some(Key::new(vnic, quoted, addresses, ports, protocol))
}
