//! ICMP errors about translated packets (RFC 5508, section 4): the quoted packet is translated back, so that its sender
//! recognises it.

use std::net::IpAddr;

use bifrost_nic::{L3, Parsed};
use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};
use bifrost_wire::{checksum, icmp, ipv4, ipv6};

use crate::rewrite::{self, End, Side};
use crate::session::Flow;
use crate::{DropReason, Packet};

/// Destination unreachable, time exceeded, parameter problem (RFC 792).
const V4_ERRORS: [u8; 3] = [3, 11, 12];
/// Destination unreachable, packet too big, time exceeded, parameter problem (RFC 4443).
const V6_ERRORS: std::ops::RangeInclusive<u8> = 1..=4;
/// Length of an ICMP header before the quoted packet, and minimum quoted length of a transport header (RFC 792).
const HEADER: usize = 8;

/// The packet that an error quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quoted {
    /// Offsets in the frame with the error.
    l3: usize,
    l4: usize,
    pub(crate) protocol: u8,
    pub(crate) source: End,
    pub(crate) destination: End,
}

impl Quoted {
    /// The flow of replies to the quoted packet.
    pub(crate) fn answers(&self, network: u32) -> Flow {
        Flow { network, protocol: self.protocol, source: self.destination, destination: self.source }
    }
}

/// Whether a packet is an ICMP error.
#[inline]
pub(crate) fn is_error(frame: &[u8], parsed: &Parsed) -> bool {
    let kind = || frame.get(usize::from(parsed.l4)).copied().unwrap_or(u8::MAX);
    match parsed.protocol {
        ICMP => V4_ERRORS.contains(&kind()),
        ICMPV6 => V6_ERRORS.contains(&kind()),
        _ => false,
    }
}

/// Parses the packet that an error quotes. The error must be complete, and its checksum valid: the quoted packet is
/// about to be changed, and a new checksum would hide damage.
#[cold]
pub(crate) fn read(packet: &Packet<'_>, parsed: &Parsed) -> Result<Quoted, DropReason> {
    let message = packet.bytes().get(usize::from(parsed.l4)..).ok_or(DropReason::NatProtocol)?;
    let is_valid = match (parsed.src_ip, parsed.dst_ip) {
        (IpAddr::V4(_), _) => icmp::v4::checksum_is_valid(message),
        (IpAddr::V6(source), IpAddr::V6(destination)) => icmp::v6::checksum_is_valid(message, source, destination),
        _ => false,
    };
    if packet.is_header_only() || parsed.is_fragment() || !is_valid {
        return Err(DropReason::NatProtocol);
    }
    let l3 = usize::from(parsed.l4) + HEADER;
    quoted(packet.bytes(), l3, parsed.kind).ok_or(DropReason::NatProtocol)
}

fn quoted(frame: &[u8], l3: usize, kind: L3) -> Option<Quoted> {
    let bytes = frame.get(l3..)?;
    let (source, destination, protocol, offset): (IpAddr, IpAddr, u8, usize) = if kind == L3::V4 {
        let header = ipv4::Header::parse_quoted(bytes).ok()?;
        let first = header.fragment_offset == 0;
        let offset = first.then_some(usize::from(header.header_len))?;
        (header.source.into(), header.destination.into(), header.protocol, offset)
    } else {
        let header = ipv6::Header::parse_quoted(bytes).ok()?;
        let transport = header.transport(bytes).ok()?;
        let offset = transport.fragment.is_none_or(|f| f.offset == 0).then_some(transport.offset)?;
        (header.source.into(), header.destination.into(), transport.protocol, offset)
    };
    let [a0, a1, b0, b1, c0, c1, ..] = *bytes.get(offset..)?.first_chunk::<HEADER>()?;
    let (first, second, identifier) =
        (u16::from_be_bytes([a0, a1]), u16::from_be_bytes([b0, b1]), u16::from_be_bytes([c0, c1]));
    let ports = match (protocol, a0) {
        (TCP | UDP, _) => (first, second),
        // As `rewrite::ends`: the identifier is on the requester's side.
        (ICMP, 8) | (ICMPV6, 128) => (identifier, 0),
        (ICMP, 0) | (ICMPV6, 129) => (0, identifier),
        _ => return None,
    };
    let end = |address, port| End { address, port };
    let (source, destination) = (end(source, ports.0), end(destination, ports.1));
    Some(Quoted { l3, l4: l3 + offset, protocol, source, destination })
}

/// Replaces the addresses and ports of the quoted packet, and updates the checksums that cover them, as far as they are
/// quoted.
#[cold]
pub(crate) fn translate(packet: &mut Packet<'_>, parsed: &Parsed, quoted: &Quoted, source: End, destination: End) {
    let as_parsed = Parsed {
        l3: quoted.l3 as u16,
        l4: quoted.l4 as u16,
        protocol: quoted.protocol,
        src_ip: quoted.source.address,
        dst_ip: quoted.destination.address,
        fragment: None,
        ..*parsed
    };
    let frame = packet.bytes_mut();
    for (side, was, new) in
        [(Side::Source, quoted.source, source), (Side::Destination, quoted.destination, destination)]
    {
        // An echo's identifier is on one side; the other side has none, and must not write there.
        if matches!(quoted.protocol, ICMP | ICMPV6) && was.port == 0 {
            rewrite::set_address(frame, &as_parsed, side, new.address);
        } else {
            rewrite::set_end(frame, &as_parsed, side, new);
        }
    }
    let pseudo = match (parsed.src_ip, parsed.dst_ip) {
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let len = frame.len().saturating_sub(usize::from(parsed.l4)) as u32;
            checksum::pseudo_v6(source, destination, ICMPV6, len)
        }
        _ => 0,
    };
    let Some(message) = frame.get_mut(usize::from(parsed.l4)..) else { return };
    let Some(field) = message.get_mut(2..4) else { return };
    field.fill(0);
    let sum = checksum::Sum::starting(pseudo).then(message).finish();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
}
