//! Changes the headers of an inner packet, and updates its checksums (RFC 1624).

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use bifrost_nic::{L3, Parsed};
use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};
use bifrost_wire::{checksum, icmp, ipv4, ipv6, tcp, udp};

/// A new address and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct End {
    pub(crate) address: IpAddr,
    /// Or the identifier of an ICMP echo.
    pub(crate) port: u16,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::new(self.address, self.port).fmt(f)
    }
}

/// Side of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Destination,
}

/// Decrements the hop limit. The caller has checked that it is above 1.
pub(crate) fn decrement_hop_limit(frame: &mut [u8], parsed: &Parsed) {
    let Some(packet) = frame.get_mut(usize::from(parsed.l3)..) else { return };
    match parsed.kind {
        L3::V4 => {
            if let Some(header) = packet.first_chunk_mut::<{ ipv4::HEADER_LEN }>() {
                ipv4::set_ttl(header, header[8].saturating_sub(1));
            }
        }
        _ => {
            if let Some(header) = packet.first_chunk_mut::<{ ipv6::HEADER_LEN }>() {
                ipv6::set_hop_limit(header, header[7].saturating_sub(1));
            }
        }
    }
}

/// The hop limit; 0 if there is none.
pub(crate) fn hop_limit(frame: &[u8], parsed: &Parsed) -> u8 {
    let offset = if parsed.kind == L3::V4 { 8 } else { 7 };
    frame.get(usize::from(parsed.l3) + offset).copied().unwrap_or(0)
}

/// Replaces an address, and updates the checksums that cover it. Both addresses are of the packet's family; a later
/// fragment has no transport header.
pub(crate) fn set_address(frame: &mut [u8], parsed: &Parsed, side: Side, new: IpAddr) {
    let (l3, l4) = (usize::from(parsed.l3), usize::from(parsed.l4));
    let old = match side {
        Side::Source => parsed.src_ip,
        Side::Destination => parsed.dst_ip,
    };
    match (old, new) {
        (IpAddr::V4(old), IpAddr::V4(new)) => {
            let Some(header) = frame.get_mut(l3..).and_then(|p| p.first_chunk_mut()) else { return };
            match side {
                Side::Source => ipv4::set_source(header, new),
                Side::Destination => ipv4::set_destination(header, new),
            }
            fix(frame, l4, parsed, &old.octets(), &new.octets());
        }
        (IpAddr::V6(old), IpAddr::V6(new)) => {
            let Some(header) = frame.get_mut(l3..).and_then(|p| p.first_chunk_mut()) else { return };
            match side {
                Side::Source => ipv6::set_source(header, new),
                Side::Destination => ipv6::set_destination(header, new),
            }
            fix(frame, l4, parsed, &old.octets(), &new.octets());
        }
        _ => {}
    }
}

/// Replaces address and port of one side. For ICMP echo the port is the identifier. A later fragment has no port.
pub(crate) fn set_end(frame: &mut [u8], parsed: &Parsed, side: Side, new: End) {
    set_address(frame, parsed, side, new.address);
    if parsed.fragment.is_some_and(|fragment| fragment.offset > 0) {
        return;
    }
    let l4 = usize::from(parsed.l4);
    let offset = match (parsed.protocol, side) {
        (TCP | UDP, Side::Source) => 0,
        (TCP | UDP, Side::Destination) => 2,
        (ICMP | ICMPV6, _) => 4,
        _ => return,
    };
    let Some(field) = frame.get_mut(l4 + offset..).and_then(|b| b.first_chunk_mut::<2>()) else { return };
    let old = std::mem::replace(field, new.port.to_be_bytes());
    fix_transport(frame, l4, parsed.protocol, &old, &new.port.to_be_bytes());
}

/// Source and destination of a packet for translation: ports, or the identifier of an echo on the requester's side.
/// `None`: it cannot be translated.
pub(crate) fn ends(frame: &[u8], parsed: &Parsed) -> Option<(End, End)> {
    if parsed.is_fragment() {
        return None;
    }
    let end = |address, port| End { address, port };
    let (source, destination) = match parsed.protocol {
        TCP | UDP => (parsed.src_port, parsed.dst_port),
        ICMP => {
            let message = frame.get(usize::from(parsed.l4)..)?;
            match icmp::v4::Message::parse(message).ok()? {
                icmp::v4::Message::EchoRequest { identifier, .. } => (identifier, 0),
                icmp::v4::Message::EchoReply { identifier, .. } => (0, identifier),
                _ => return None,
            }
        }
        ICMPV6 => {
            let message = frame.get(usize::from(parsed.l4)..)?;
            match icmp::v6::Message::parse(message).ok()? {
                icmp::v6::Message::EchoRequest { identifier, .. } => (identifier, 0),
                icmp::v6::Message::EchoReply { identifier, .. } => (0, identifier),
                _ => return None,
            }
        }
        _ => return None,
    };
    Some((end(parsed.src_ip, source), end(parsed.dst_ip, destination)))
}

/// Updates the transport checksum for a change of the pseudo header.
fn fix(frame: &mut [u8], l4: usize, parsed: &Parsed, old: &[u8], new: &[u8]) {
    let first = parsed.fragment.is_none_or(|f| f.offset == 0);
    // ICMP for IPv4 has no pseudo header.
    if first && parsed.protocol != ICMP {
        fix_transport(frame, l4, parsed.protocol, old, new);
    }
}

fn fix_transport(frame: &mut [u8], l4: usize, protocol: u8, old: &[u8], new: &[u8]) {
    let offset = match protocol {
        TCP => tcp::CHECKSUM_OFFSET,
        UDP => udp::CHECKSUM_OFFSET,
        ICMP | ICMPV6 => 2,
        _ => return,
    };
    let Some(field) = frame.get_mut(l4 + offset..).and_then(|b| b.first_chunk_mut::<2>()) else { return };
    let was = u16::from_be_bytes(*field);
    // A UDP packet without a checksum stays without.
    if protocol == UDP && was == 0 {
        return;
    }
    let sum = checksum::update(was, old, new);
    *field = if protocol == UDP { checksum::udp_nonzero(sum) } else { sum }.to_be_bytes();
}
