//! Session keys.

use crate::ids::{Direction, PortId};
use crate::rewrite::Endpoint;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU64;

use bifrost_nic::{L3, Parsed};
use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};
use bifrost_wire::{ipv4, ipv6};

/// A vNIC and the two ends of a conversation, the guest's first; the same for both directions.
///
/// A key consists of whole words that are built, compared and hashed in registers. A wide load of bytes that were just
/// written in smaller stores must wait for these stores (store forwarding fails), so lookups could not overlap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    local: [u64; 2],
    remote: [u64; 2],
    /// From the most significant bit: the vNIC's port (20 bits, [`PortId::LIMIT`]), local and remote port (16 each), the
    /// protocol (8), and the family (4), which is 4 or 6.
    rest: NonZeroU64,
}

impl PartialEq for Key {
    #[inline(always)]
    fn eq(&self, other: &Key) -> bool {
        let different = self.words().into_iter().zip(other.words()).fold(0, |different, (a, b)| different | (a ^ b));
        different == 0
    }
}

impl Eq for Key {}

impl Hash for Key {
    #[inline(always)]
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.words().into_iter().for_each(|word| state.write_u64(word));
    }
}

const V4: NonZeroU64 = NonZeroU64::new(4).unwrap();
const V6: NonZeroU64 = NonZeroU64::new(6).unwrap();

/// Where fields of a key's last word begin.
const VNIC_AT: u32 = 44;
const LOCAL_AT: u32 = 28;
const REMOTE_AT: u32 = 12;
const PROTOCOL_AT: u32 = 4;
const FAMILY_MASK: u64 = 0xf;

const _: () = assert!(PortId::LIMIT as u64 == 1 << (u64::BITS - VNIC_AT));

/// ICMP types (RFC 792, RFC 4443).
const V4_REPLY: u8 = 0;
const V4_REQUEST: u8 = 8;
const V6_REQUEST: u8 = 128;
const V6_REPLY: u8 = 129;
/// Offset of the quoted packet in an ICMP error, bytes.
const QUOTE_AT: usize = 8;
/// Least payload of the quoted packet, bytes.
const LEAST_QUOTED: usize = 8;

impl Key {
    /// The key of a packet's session. For a fragment, `parsed` must come from the first fragment
    /// ([`Parsed::as_whole`]). `head` holds the frame's headers. Echo requests and replies use their identifier as
    /// ports, other ICMP messages their type. Protocols without ports have one session per pair of addresses.
    #[inline(always)]
    pub(crate) fn of(port: PortId, direction: Direction, head: &[u8], parsed: &Parsed) -> Key {
        let ports = match parsed.protocol {
            ICMP | ICMPV6 => message(direction, head, parsed),
            _ => (parsed.src_port, parsed.dst_port),
        };
        Key::new(port, direction, (parsed.src_ip, parsed.dst_ip), ports, parsed.protocol)
    }

    #[inline(always)]
    fn new(port: PortId, direction: Direction, (src, dst): (IpAddr, IpAddr), ports: (u16, u16), protocol: u8) -> Key {
        let (src_port, dst_port) = ports;
        let ((local, local_port), (remote, remote_port)) = match direction {
            Direction::Egress => ((src, src_port), (dst, dst_port)),
            Direction::Ingress => ((dst, dst_port), (src, src_port)),
        };
        let ports = u64::from(local_port) << LOCAL_AT | u64::from(remote_port) << REMOTE_AT;
        let family = if src.is_ipv6() { V6 } else { V4 };
        let rest = family | (ports | u64::from(port.0) << VNIC_AT | u64::from(protocol) << PROTOCOL_AT);
        Key { local: words(local), remote: words(remote), rest }
    }

    #[inline(always)]
    fn words(&self) -> [u64; 5] {
        let ([a, b], [c, d]) = (self.local, self.remote);
        [a, b, c, d, self.rest.get()]
    }
}

impl Key {
    /// The key of the session between two ends, the guest's first.
    pub(crate) fn between(port: PortId, local: Endpoint, remote: Endpoint, protocol: u8) -> Key {
        let (addresses, ports) = ((local.address, remote.address), (local.port, remote.port));
        Key::new(port, Direction::Egress, addresses, ports, protocol)
    }

    /// The key as words, for another switch. The last word has a layout of its own, which never changes: from the most
    /// significant bit, local and remote port (16 bits each), the lower 16 bits of the vNIC's port, the protocol (8), the
    /// other bits of the vNIC's port (4), and the family (4).
    pub(crate) fn to_words(self) -> [u64; 5] {
        let [a, b, c, d, rest] = self.words();
        let (vnic, ports, protocol) = (rest >> VNIC_AT, rest >> REMOTE_AT & 0xffff_ffff, rest >> PROTOCOL_AT & 0xff);
        let rest = ports << 32 | (vnic & 0xffff) << 16 | protocol << 8 | vnic >> 16 << 4 | rest & FAMILY_MASK;
        [a, b, c, d, rest]
    }

    /// The key that these words encode; `None`: they encode none.
    pub(crate) fn of_words([a, b, c, d, words]: [u64; 5]) -> Option<Key> {
        let family = [V4, V6].into_iter().find(|family| family.get() == words & FAMILY_MASK)?;
        let (vnic, ports, protocol) = ((words >> 4 & 0xf) << 16 | words >> 16 & 0xffff, words >> 32, words >> 8 & 0xff);
        let rest = family | (vnic << VNIC_AT | ports << REMOTE_AT | protocol << PROTOCOL_AT);
        Some(Key { local: [a, b], remote: [c, d], rest })
    }

    /// The two ends, the guest's first.
    pub(crate) fn ends(&self) -> (Endpoint, Endpoint) {
        let address = |[high, low]: [u64; 2]| {
            let address = Ipv6Addr::from(u128::from(high) << 64 | u128::from(low));
            match address.to_ipv4_mapped().filter(|_| !self.is_v6()) {
                Some(address) => IpAddr::V4(address),
                None => IpAddr::V6(address),
            }
        };
        let rest = self.rest.get();
        let local = Endpoint { address: address(self.local), port: (rest >> LOCAL_AT) as u16 };
        (local, Endpoint { address: address(self.remote), port: (rest >> REMOTE_AT) as u16 })
    }

    /// The same conversation of another port.
    pub(crate) fn at_port(self, port: PortId) -> Key {
        // The family in the lowest bits keeps this from being zero.
        let rest = self.rest.get() & !(u64::MAX << VNIC_AT) | u64::from(port.0) << VNIC_AT;
        Key { rest: NonZeroU64::new(rest).unwrap_or(self.rest), ..self }
    }

    /// The vNIC's port.
    #[inline(always)]
    pub(crate) fn port(&self) -> PortId {
        PortId((self.rest.get() >> VNIC_AT) as u32)
    }

    /// The IP protocol.
    pub(crate) fn protocol(&self) -> u8 {
        (self.rest.get() >> PROTOCOL_AT) as u8
    }

    /// The remote source: whether it is IPv6, and the IPv4 address or the /64 prefix of the IPv6 address, because one
    /// host may have all addresses of a /64. Link-local addresses of a whole network have the same prefix, so there the
    /// interface identifier is the source.
    pub(crate) fn source(&self) -> (bool, u64) {
        let [prefix, interface] = self.remote;
        let is_link_local = prefix >> 54 == 0xfe80 >> 6;
        (self.is_v6(), if self.is_v6() && !is_link_local { prefix } else { interface })
    }

    fn is_v6(&self) -> bool {
        self.rest.get() & FAMILY_MASK == V6.get()
    }
}

/// An address as two words, the upper one first; an IPv4 address as an IPv4-mapped IPv6 address.
#[inline(always)]
fn words(addr: IpAddr) -> [u64; 2] {
    match addr {
        IpAddr::V4(a) => [0, 0xffff << 32 | u64::from(u32::from(a))],
        IpAddr::V6(a) => {
            let bits = u128::from(a);
            [(bits >> 64) as u64, bits as u64]
        }
    }
}

/// What an ICMP message has instead of ports. Echo requests and replies have their identifier. Other messages have
/// their type, replies that of their request, so that a message allows only its reply. Both directions give the same
/// key, and the two kinds never collide.
#[inline(never)]
fn message(direction: Direction, head: &[u8], parsed: &Parsed) -> (u16, u16) {
    if let Some((_, identifier)) = echo(head, parsed) {
        return (identifier, identifier);
    }
    let kind = head.get(usize::from(parsed.l4)).copied().unwrap_or(u8::MAX);
    let question = match (parsed.protocol, kind) {
        // Timestamp, information, address mask (RFC 792, RFC 950); node information (RFC 4620).
        (ICMP, 14 | 16 | 18) | (ICMPV6, 140) => kind - 1,
        _ => kind,
    };
    let question = u16::from(question);
    match direction {
        Direction::Egress => (question, !question),
        Direction::Ingress => (!question, question),
    }
}

/// Whether a packet is an echo request, and its identifier; `None`: it is neither an echo request nor a reply.
pub(crate) fn echo(head: &[u8], parsed: &Parsed) -> Option<(bool, u16)> {
    let (request, reply) = match (parsed.kind, parsed.protocol) {
        (L3::V4, ICMP) => (V4_REQUEST, V4_REPLY),
        (L3::V6, ICMPV6) => (V6_REQUEST, V6_REPLY),
        _ => return None,
    };
    let message = head.get(usize::from(parsed.l4)..head.len().min(parsed.end as usize))?;
    let message = message.first_chunk::<8>().filter(|_| !parsed.is_fragment())?;
    let kind = message[0];
    (kind == request || kind == reply).then(|| (kind == request, u16::from_be_bytes([message[4], message[5]])))
}

/// The packet that an ICMP error quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quote {
    /// The key of its session.
    pub(crate) key: Key,
    /// Its source address.
    pub(crate) source: IpAddr,
    /// Its destination address.
    pub(crate) destination: IpAddr,
}

/// `Some` if a packet is an ICMP error or a redirect, with the packet that it quotes (RFC 5508, section 4.1) if that is
/// valid. Fragments of errors are not reassembled: errors are short (RFC 1812, section 4.3.2.3; RFC 4443, section 2.4
/// c).
pub(crate) fn error(port: PortId, direction: Direction, head: &[u8], parsed: &Parsed) -> Option<Option<Quote>> {
    let message = head.get(usize::from(parsed.l4)..head.len().min(parsed.end as usize)).unwrap_or_default();
    let kind = message.first().copied().unwrap_or_default();
    let is_error = match (parsed.kind, parsed.protocol) {
        // Unreachable, source quench, redirect, time exceeded, parameter problem.
        (L3::V4, ICMP) => matches!(kind, 3..=5 | 11 | 12),
        (L3::V6, ICMPV6) => kind < 128,
        _ => false,
    };
    is_error.then(|| message.get(QUOTE_AT..).and_then(|quote| quoted(port, direction, kind, quote, parsed)))
}

fn quoted(port: PortId, direction: Direction, kind: u8, quote: &[u8], parsed: &Parsed) -> Option<Quote> {
    let ((source, destination), protocol, rest) = match parsed.kind {
        L3::V4 if matches!(kind, 3 | 11 | 12) => {
            let header = ipv4::Header::parse_quoted(quote).ok()?;
            // A first fragment has the ports, later ones do not.
            (header.fragment_offset == 0 && header.payload_len() >= LEAST_QUOTED as u16).then_some(())?;
            let rest = quote.get(usize::from(header.header_len)..)?;
            ((IpAddr::V4(header.source), IpAddr::V4(header.destination)), header.protocol, rest)
        }
        // Unreachable, too big, time exceeded, parameter problem. Extension headers of the quoted packet are not
        // skipped.
        L3::V6 if matches!(kind, 1..=4) => {
            let header = ipv6::Header::parse_quoted(quote).ok()?;
            (usize::from(header.payload_len) >= LEAST_QUOTED).then_some(())?;
            let rest = quote.get(ipv6::HEADER_LEN..)?;
            ((IpAddr::V6(header.source), IpAddr::V6(header.destination)), header.next_header, rest)
        }
        _ => return None,
    };
    // Errors quote at least 64 bits of the payload (RFC 792).
    let b = rest.first_chunk::<LEAST_QUOTED>()?;
    let ports = match (parsed.kind, protocol) {
        (_, TCP | UDP) => (u16::from_be_bytes([b[0], b[1]]), u16::from_be_bytes([b[2], b[3]])),
        (L3::V4, ICMP) if matches!(b[0], V4_REPLY | V4_REQUEST) => [u16::from_be_bytes([b[4], b[5]]); 2].into(),
        (L3::V6, ICMPV6) if matches!(b[0], V6_REPLY | V6_REQUEST) => [u16::from_be_bytes([b[4], b[5]]); 2].into(),
        (_, ICMP | ICMPV6) => return None,
        _ => (0, 0),
    };
    // The quoted packet went in the opposite direction.
    let key = Key::new(port, direction.opposite(), (source, destination), ports, protocol);
    Some(Quote { key, source, destination })
}
