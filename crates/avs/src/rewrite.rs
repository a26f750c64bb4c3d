//! Header changes of a frame: Ethernet addresses, TTL, and the two ends of a conversation.
//!
//! This is the only place where headers of a tenant's frame are changed. Checksums are updated incrementally, not
//! recomputed (RFC 1624): damage stays visible, and the payload is not read.

use std::net::IpAddr;
use std::ops::Range;

use bifrost_nic::{L3, Parsed};
use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};
use bifrost_wire::{Mac, checksum, ipv4, ipv6, tcp, udp};

/// The header changes of one frame. They are applied to it, or to each frame that it is segmented or fragmented into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rewrite {
    destination: Mac,
    source: Mac,
    /// Offset of the IP header, bytes.
    l3: u16,
    v6: bool,
    /// Whether the frame is routed, so that its TTL decreases.
    hop: bool,
    translation: Option<Translation>,
}

/// One end of a TCP or UDP conversation. For an echo request and its reply, `port` is the identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Endpoint {
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
}

/// New ends of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Translation {
    pub(crate) source: Endpoint,
    pub(crate) destination: Endpoint,
    /// Whether ports, or the identifier of an echo request or reply, change as well. If not, any IP packet can be
    /// translated.
    with_ports: bool,
}

/// Protocols whose checksum covers the addresses: DCCP (RFC 4340, section 9.1) and UDP-Lite (RFC 3828, section 3.1).
const DCCP: u8 = 33;
const UDP_LITE: u8 = 136;

/// IPv6 fragment header (RFC 8200, section 4.5), and its length.
const FRAGMENT: u8 = 44;
const FRAGMENT_LEN: usize = 8;
/// Offsets of the checksum in an ICMP message, and of the identifier in an echo request or reply (RFC 792, RFC 4443).
const ICMP_CHECKSUM: Range<usize> = 2..4;
const ICMP_IDENTIFIER: Range<usize> = 4..6;
/// Offset of the quoted packet in an ICMP error.
const QUOTE_AT: usize = 8;
/// Maximum length of the quoted bytes that can change: an IPv4 header with all options, and the ports and checksum of
/// the transport header.
const MOST_QUOTED: usize = 80;

impl Rewrite {
    /// One routing hop: new Ethernet addresses, and a decremented TTL.
    pub(crate) fn hop(parsed: &Parsed, source: Mac, destination: Mac) -> Self {
        Rewrite { hop: true, ..Rewrite::link(parsed, source, destination) }
    }

    /// New Ethernet addresses.
    pub(crate) fn link(parsed: &Parsed, source: Mac, destination: Mac) -> Self {
        Rewrite { destination, source, l3: parsed.l3, v6: parsed.kind == L3::V6, hop: false, translation: None }
    }

    /// Changes the destination MAC address.
    pub(crate) fn send_to(&mut self, destination: Mac) {
        self.destination = destination;
    }

    /// Also changes the ends.
    pub(crate) fn translate(&mut self, translation: Translation) {
        self.translation = Some(translation);
    }

    /// Applies the changes to a frame. A frame that is too short, or of another address family, is left as it is.
    pub fn apply(&self, frame: &mut [u8]) {
        let l3 = usize::from(self.l3);
        let Some((link, packet)) = frame.split_at_mut_checked(l3) else { return };
        let hops = u8::from(self.hop);
        let ttl = if self.v6 {
            let header = packet.first_chunk_mut::<{ ipv6::HEADER_LEN }>();
            header.map(|ip| ipv6::set_hop_limit(ip, ip[7].saturating_sub(hops)))
        } else {
            let header = packet.first_chunk_mut::<{ ipv4::HEADER_LEN }>();
            header.map(|ip| ipv4::set_ttl(ip, ip[8].saturating_sub(hops)))
        };
        if let (Some(()), Some(macs)) = (ttl, link.first_chunk_mut::<12>()) {
            macs[..6].copy_from_slice(&self.destination.0);
            macs[6..].copy_from_slice(&self.source.0);
        }
        if let Some(translation) = &self.translation {
            translation.apply(packet, self.v6);
        }
    }

    /// The packet's headers after the change of its ends.
    pub(crate) fn view(&self, parsed: &Parsed) -> Parsed {
        match &self.translation {
            // The ends of an ICMP error are in the packet that it quotes.
            Some(translation) if !matches!(parsed.protocol, ICMP | ICMPV6) => translation.view(parsed),
            _ => *parsed,
        }
    }

    /// Whether the frame is routed, so that its TTL decreases.
    #[inline(always)]
    pub(crate) fn is_hop(&self) -> bool {
        self.hop
    }

    /// The destination MAC address after the change.
    pub fn destination(&self) -> Mac {
        self.destination
    }
}

impl Translation {
    /// A translation of addresses and ports.
    pub(crate) fn of_ends(source: Endpoint, destination: Endpoint) -> Translation {
        Translation { source, destination, with_ports: true }
    }

    /// A translation of addresses only.
    pub(crate) fn of_addresses(source: IpAddr, destination: IpAddr) -> Translation {
        let end = |address| Endpoint { address, port: 0 };
        Translation { source: end(source), destination: end(destination), with_ports: false }
    }

    /// Restores a translation of another switch.
    pub(crate) fn carried(source: Endpoint, destination: Endpoint, with_ports: bool) -> Self {
        Translation { source, destination, with_ports }
    }

    /// Whether ports change with the addresses.
    pub(crate) fn is_with_ports(&self) -> bool {
        self.with_ports
    }

    /// The packet's headers after the change. Not for ICMP errors, which may keep their source.
    pub(crate) fn view(&self, parsed: &Parsed) -> Parsed {
        let seen = Parsed { src_ip: self.source.address, dst_ip: self.destination.address, ..*parsed };
        if self.with_ports && matches!(parsed.protocol, TCP | UDP) {
            Parsed { src_port: self.source.port, dst_port: self.destination.port, ..seen }
        } else {
            seen
        }
    }

    /// Whether [`apply`](Self::apply) can translate the ports of a packet: it must be unfragmented TCP or UDP
    /// directly after the IP header.
    pub(crate) fn is_possible(parsed: &Parsed) -> bool {
        matches!(parsed.protocol, TCP | UDP) && Translation::is_behind_header(parsed)
    }

    /// Whether an IP packet is unfragmented, and its payload directly follows the fixed IP header or, in IPv4, its
    /// options.
    pub(crate) fn is_behind_header(parsed: &Parsed) -> bool {
        let plain = parsed.kind != L3::V6 || usize::from(parsed.l4 - parsed.l3) == ipv6::HEADER_LEN;
        plain && !parsed.is_fragment()
    }

    /// The translation with source and destination swapped, for packets in the other direction.
    pub(crate) fn reversed(self) -> Translation {
        Translation { source: self.destination, destination: self.source, ..self }
    }

    /// Translates a packet that starts with its IP header. A packet that is too short, or of another address family,
    /// is left as it is.
    #[cold]
    pub(crate) fn apply(&self, packet: &mut [u8], v6: bool) {
        let Some((protocol, l4)) = (if v6 { transport_v6(packet) } else { transport_v4(packet) }) else { return };
        match l4 {
            Some(l4) if is_error(packet, protocol, l4, v6) => self.apply_to_error(packet, l4, v6),
            _ => self.apply_to_ends(packet, protocol, l4, v6),
        }
    }

    /// Translates the ends of a packet. `l4`: offset of the transport header; later fragments have none.
    fn apply_to_ends(&self, packet: &mut [u8], protocol: u8, l4: Option<usize>, v6: bool) {
        let (source, destination) = (self.source.address, self.destination.address);
        let Some(changed) = Addresses::replace(packet, v6, source, destination) else { return };
        let Some(header) = l4.and_then(|l4| packet.get_mut(l4..)) else { return };
        match protocol {
            TCP => self.change_ports(header, tcp::CHECKSUM_OFFSET, &changed, false),
            UDP => self.change_ports(header, udp::CHECKSUM_OFFSET, &changed, true),
            // DCCP and UDP-Lite have the checksum at the same offset as UDP.
            DCCP | UDP_LITE => {
                let field = header.get_mut(udp::CHECKSUM_OFFSET..udp::CHECKSUM_OFFSET + 2);
                field.into_iter().for_each(|field| update(field, changed.before(), changed.after(), true));
            }
            ICMP if !v6 => self.change_identifier(header, None),
            ICMPV6 if v6 => self.change_identifier(header, Some(&changed)),
            _ => {}
        }
    }

    /// Translates the ports in a transport header, and updates its checksum for them and for the addresses. A quoted
    /// packet may be cut off before its checksum.
    fn change_ports(&self, header: &mut [u8], checksum_at: usize, addresses: &Addresses, is_udp: bool) {
        let [a, b] = self.source.port.to_be_bytes();
        let [c, d] = self.destination.port.to_be_bytes();
        let ports = [a, b, c, d];
        let old_ports = if self.with_ports { replace(header, &ports) } else { ports };
        let Some(field) = header.get_mut(checksum_at..checksum_at + 2) else { return };
        if is_udp && *field == [0, 0] {
            // The sender did not compute a checksum (RFC 768).
            return;
        }
        update(field, addresses.before(), addresses.after(), is_udp);
        update(field, &old_ports, &ports, is_udp);
    }

    /// Translates the identifier of an echo request or reply, and updates the checksum of any ICMP message.
    /// `addresses`: changed addresses that the checksum covers (RFC 4443, section 2.3).
    fn change_identifier(&self, message: &mut [u8], addresses: Option<&Addresses>) {
        let is_echo = matches!((message.first(), addresses), (Some(0 | 8), None) | (Some(128 | 129), Some(_)));
        let identifier = self.source.port.to_be_bytes();
        let mut old = identifier;
        if is_echo
            && self.with_ports
            && let Some(field) = message.get_mut(ICMP_IDENTIFIER)
        {
            old.copy_from_slice(field);
            field.copy_from_slice(&identifier);
        }
        let Some(field) = message.get_mut(ICMP_CHECKSUM) else { return };
        update(field, &old, &identifier, false);
        if let Some(addresses) = addresses {
            update(field, addresses.before(), addresses.after(), false);
        }
    }

    /// Translates an ICMP error and the packet that it quotes, which went the other way (RFC 5508, section 4.2). A
    /// router may have sent the error, so its source address changes only if it is the destination of the quoted
    /// packet.
    fn apply_to_error(&self, packet: &mut [u8], l4: usize, v6: bool) {
        let Some((header, message)) = packet.split_at_mut_checked(l4) else { return };
        let Some(quote) = message.get_mut(QUOTE_AT..) else { return };
        let at = Addresses::place(v6);
        let half = at.len() / 2;
        let (Some(outer), Some(inner)) = (header.get(at.clone()), quote.get(at)) else { return };
        let outer_source = if outer[..half] == inner[half..] { Some(self.source.address) } else { None };

        // The part of the quote that can change: its headers.
        let mut before = [0; MOST_QUOTED];
        let len = quote.len().min(MOST_QUOTED) & !1;
        before[..len].copy_from_slice(&quote[..len]);
        let quoted = if v6 { transport_v6(quote) } else { transport_v4(quote) };
        if let Some((protocol, l4)) = quoted {
            self.reversed().apply_to_ends(quote, protocol, l4, v6);
        }
        let mut after = [0; MOST_QUOTED];
        after[..len].copy_from_slice(&quote[..len]);

        let source = outer_source.or_else(|| Addresses::source(header, v6));
        let changed = source.and_then(|source| Addresses::replace(header, v6, source, self.destination.address));
        let Some(field) = message.get_mut(ICMP_CHECKSUM) else { return };
        update(field, &before[..len], &after[..len], false);
        if let Some(changed) = changed.filter(|_| v6) {
            // The pseudo header's checksum (RFC 4443, section 2.3).
            update(field, changed.before(), changed.after(), false);
        }
    }
}

/// The addresses of a packet, before and after a change.
struct Addresses {
    old: [u8; 32],
    new: [u8; 32],
    len: usize,
}

impl Addresses {
    /// Where the addresses are in an IP header, bytes.
    fn place(v6: bool) -> Range<usize> {
        if v6 { 8..40 } else { 12..20 }
    }

    /// The source address of a packet.
    fn source(header: &[u8], v6: bool) -> Option<IpAddr> {
        let bytes = header.get(Addresses::place(v6))?;
        if v6 {
            bytes.first_chunk::<16>().map(|bytes| IpAddr::from(*bytes))
        } else {
            bytes.first_chunk::<4>().map(|bytes| IpAddr::from(*bytes))
        }
    }

    /// Replaces the addresses, and updates the checksum of an IPv4 header. `None`: the packet is too short, or the
    /// addresses are of another family.
    fn replace(packet: &mut [u8], v6: bool, source: IpAddr, destination: IpAddr) -> Option<Addresses> {
        let mut new = [0; 32];
        match (v6, source, destination) {
            (false, IpAddr::V4(source), IpAddr::V4(destination)) => {
                new[..4].copy_from_slice(&source.octets());
                new[4..8].copy_from_slice(&destination.octets());
            }
            (true, IpAddr::V6(source), IpAddr::V6(destination)) => {
                new[..16].copy_from_slice(&source.octets());
                new[16..].copy_from_slice(&destination.octets());
            }
            _ => return None,
        }
        let field = packet.get_mut(Addresses::place(v6))?;
        let len = field.len();
        let mut old = [0; 32];
        old[..len].copy_from_slice(field);
        field.copy_from_slice(&new[..len]);
        let changed = Addresses { old, new, len };
        if !v6 {
            update(packet.get_mut(10..12)?, changed.before(), changed.after(), false);
        }
        Some(changed)
    }

    fn before(&self) -> &[u8] {
        &self.old[..self.len]
    }

    fn after(&self) -> &[u8] {
        &self.new[..self.len]
    }
}

/// Whether a packet is an ICMP message that quotes another packet.
fn is_error(packet: &[u8], protocol: u8, l4: usize, v6: bool) -> bool {
    match (protocol, packet.get(l4)) {
        (ICMP, Some(kind)) if !v6 => matches!(kind, 3..=5 | 11 | 12),
        (ICMPV6, Some(kind)) if v6 => *kind < 128,
        _ => false,
    }
}

/// The protocol of an IPv4 packet, and the offset of its transport header; later fragments have none.
fn transport_v4(packet: &[u8]) -> Option<(u8, Option<usize>)> {
    let header = packet.first_chunk::<{ ipv4::HEADER_LEN }>()?;
    let first = u16::from_be_bytes([header[6], header[7]]) & 0x1fff == 0;
    Some((header[9], first.then_some(usize::from(header[0] & 0xf) * 4)))
}

/// The same for an IPv6 packet without extension headers except a fragment header.
fn transport_v6(packet: &[u8]) -> Option<(u8, Option<usize>)> {
    let (header, rest) = packet.split_first_chunk::<{ ipv6::HEADER_LEN }>()?;
    if header[6] != FRAGMENT {
        return Some((header[6], Some(ipv6::HEADER_LEN)));
    }
    let fragment = rest.first_chunk::<FRAGMENT_LEN>()?;
    let first = u16::from_be_bytes([fragment[2], fragment[3]]) & 0xfff8 == 0;
    Some((fragment[0], first.then_some(ipv6::HEADER_LEN + FRAGMENT_LEN)))
}

/// Writes `new` and returns the old bytes.
fn replace<const N: usize>(bytes: &mut [u8], new: &[u8; N]) -> [u8; N] {
    let mut old = [0; N];
    if let Some(bytes) = bytes.first_chunk_mut() {
        old = *bytes;
        *bytes = *new;
    }
    old
}

/// Updates a checksum for changed 16-bit words. `is_udp`: 0 would mean "no checksum", so it is written as 0xffff.
fn update(field: &mut [u8], old: &[u8], new: &[u8], is_udp: bool) {
    let [a, b] = field else { return };
    let mut sum = u16::from_be_bytes([*a, *b]);
    for (old, new) in old.chunks_exact(2).zip(new.chunks_exact(2)) {
        sum = checksum::update_u16(sum, u16::from_be_bytes([old[0], old[1]]), u16::from_be_bytes([new[0], new[1]]));
    }
    if is_udp && sum == 0 {
        sum = 0xffff;
    }
    [*a, *b] = sum.to_be_bytes();
}
