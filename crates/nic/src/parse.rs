//! The Pre-Processor's parser: parses a frame's headers once, for all later stages.

use std::net::{IpAddr, Ipv4Addr};

use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::{Mac, Malformed as Wire, arp, ipv4, ipv6, tcp, udp};

use crate::flow::{self, FlowKey};
use crate::malformed::Malformed;

/// Number of bytes at the start of a frame that contain every header the parser reads; see [`parse`].
pub const HEAD_LEN: usize = 256;

/// Maximum length of a frame: an Ethernet header, two tags, and the longest IP packet.
pub const MAX_FRAME_LEN: usize = ethernet::MAX_HEADER_LEN + ipv6::HEADER_LEN + 65_535;

/// Network-layer kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L3 {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
    /// ARP for IPv4 over Ethernet.
    Arp,
    /// Anything else.
    Other,
}

/// TCP fields of an unfragmented segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tcp {
    /// Sequence number of the first payload byte (or of SYN).
    pub seq: u32,
    /// Acknowledgment number.
    pub ack: u32,
    /// Flags.
    pub flags: tcp::Flags,
}

/// A fragment of an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Identification: the same for all fragments of a packet; 16 bits in IPv4.
    pub identification: u32,
    /// Fragment offset of its payload, from [`Parsed::l4`] to [`Parsed::end`], bytes: a multiple of 8.
    pub offset: u16,
    /// More fragments follow.
    pub more: bool,
}

/// The headers of a fragmented packet, from its first fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whole {
    /// As for an unfragmented packet, except that it ends where the fragment does.
    pub parsed: Parsed,
    /// Minimum payload of all fragments together, bytes: the transport header, or the UDP datagram.
    pub least_len: u16,
}

/// The parsed headers of a frame. All offsets are from the start of the frame and inside it: `l3 <= l4 <= payload <=
/// end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// EtherType after the tags, if any.
    pub ethertype: u16,
    /// VLAN identifier 0..=4095 of the outermost 802.1Q or 802.1ad tag; up to two tags are parsed.
    pub vlan: Option<u16>,
    /// Network-layer kind.
    pub kind: L3,
    /// Start of the network header, bytes.
    pub l3: u16,
    /// Start of the transport header, behind options and extension headers, bytes. `l3` when `kind` is not IP.
    pub l4: u16,
    /// Start of the payload behind a TCP or UDP header, bytes. `l4` for other protocols and for fragments.
    pub payload: u16,
    /// End of the IP packet, bytes: less than the frame's length when Ethernet padding follows.
    pub end: u32,
    /// Source address of the frame.
    pub src_mac: Mac,
    /// Destination address of the frame.
    pub dst_mac: Mac,
    /// Source address; ARP: the sender's protocol address; unspecified for [`L3::Other`].
    pub src_ip: IpAddr,
    /// Destination address; ARP: the target's protocol address; unspecified for [`L3::Other`].
    pub dst_ip: IpAddr,
    /// Transport protocol number after extension headers; 0 when `kind` is not IP. Ignore it in a later IPv6 fragment:
    /// the first one's holds (RFC 8200, section 4.5).
    pub protocol: u8,
    /// Set if the packet is a fragment, the first one included. Fragments have no ports and no TCP fields here:
    /// [`Self::as_whole`] reads those of the first.
    pub fragment: Option<Fragment>,
    /// Source port of unfragmented TCP or UDP, else 0.
    pub src_port: u16,
    /// Destination port of unfragmented TCP or UDP, else 0.
    pub dst_port: u16,
    /// TCP fields of an unfragmented segment.
    pub tcp: Option<Tcp>,
    /// Hash of [`Self::flow_key`] under seed 0; of both MAC addresses and the EtherType when `kind` is not IP.
    ///
    /// The same for every packet of a flow, so that order within a flow can be kept. Guests can make flows collide: use
    /// [`FlowKey::hash`] with a secret seed for tables that tenants share.
    pub flow_hash: u32,
}

impl Parsed {
    /// The state before anything after the link header is parsed.
    #[inline(always)]
    fn at_network_header(ethertype: u16, l3: u16, total_len: usize) -> Self {
        Parsed {
            ethertype,
            vlan: None,
            kind: L3::Other,
            l3,
            l4: l3,
            payload: l3,
            end: total_len as u32,
            src_mac: Mac([0; 6]),
            dst_mac: Mac([0; 6]),
            src_ip: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            dst_ip: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            protocol: 0,
            fragment: None,
            src_port: 0,
            dst_port: 0,
            tcp: None,
            flow_hash: 0,
        }
    }

    /// Bytes of the packet in the frame: from [`l3`](Self::l3) to [`end`](Self::end).
    #[inline(always)]
    pub fn packet_len(&self) -> usize {
        self.end as usize - usize::from(self.l3)
    }

    /// The flow that the frame belongs to. All fragments of an address pair and protocol are one flow, and so is
    /// everything that is not IP between the same addresses.
    pub fn flow_key(&self) -> FlowKey {
        FlowKey {
            src: self.src_ip,
            dst: self.dst_ip,
            src_port: self.src_port,
            dst_port: self.dst_port,
            protocol: self.protocol,
        }
    }

    /// The hash of [`flow_key`](Self::flow_key).
    #[inline]
    pub fn hash(&self, seed: u64) -> u32 {
        let Parsed { src_ip, dst_ip, src_port, dst_port, protocol, .. } = self;
        flow::hash((src_ip, dst_ip), (*src_port, *dst_port), *protocol, seed)
    }

    /// Whether the packet is a fragment, the first one included.
    #[inline(always)]
    pub fn is_fragment(&self) -> bool {
        self.fragment.is_some()
    }

    /// The headers of the packet that a first fragment starts. `head`: the bytes that were parsed. `None` for all other
    /// frames.
    pub fn as_whole(&self, head: &[u8]) -> Option<Whole> {
        self.fragment.filter(|fragment| fragment.offset == 0)?;
        let bytes = &head[..head.len().min(HEAD_LEN).min(self.end as usize)];
        let mut parsed = Parsed { fragment: None, ..*self };
        let header = transport(Head { bytes, end: self.end as usize }, &mut parsed).ok()?;
        Some(Whole { parsed, least_len: header.least_len })
    }

    /// Whether the frame carries IPv4 or IPv6.
    pub fn is_ip(&self) -> bool {
        matches!(self.kind, L3::V4 | L3::V6)
    }

    /// Whether the frame is an unfragmented TCP segment.
    pub fn is_tcp(&self) -> bool {
        self.tcp.is_some()
    }
}

/// Parses the headers of an Ethernet frame of `total_len` bytes. `frame` holds at least the first `min(total_len,
/// HEAD_LEN)` bytes of it; nothing after [`HEAD_LEN`] is read.
///
/// Neither the IPv4 header checksum nor any transport checksum is verified; see
/// [`transport_checksum`](crate::transport_checksum).
///
/// # Errors
/// The first reason why the headers are invalid.
pub fn parse(frame: &[u8], total_len: usize) -> Result<Parsed, Malformed> {
    if total_len > MAX_FRAME_LEN {
        return Err(Malformed::FrameTooLong);
    }
    let bytes = &frame[..frame.len().min(HEAD_LEN).min(total_len)];
    let mut head = Head { bytes, end: total_len };
    let eth = ethernet::Header::parse(bytes).map_err(|_| head.truncated(Malformed::EthernetTruncated))?;
    let vlan = eth.outer.map(|tag| tag.vid);
    let mut parsed = Parsed {
        vlan,
        src_mac: eth.source,
        dst_mac: eth.destination,
        ..Parsed::at_network_header(eth.ethertype, eth.header_len() as u16, total_len)
    };
    match eth.ethertype {
        ethertype::IPV4 => parse_ipv4(&mut head, &mut parsed)?,
        ethertype::IPV6 => parse_ipv6(&mut head, &mut parsed)?,
        ethertype::ARP => parse_arp(head, &mut parsed)?,
        _ => {}
    }
    if parsed.is_ip() {
        parse_transport(head, &mut parsed)?;
        parsed.flow_hash = parsed.hash(0);
    } else {
        parsed.flow_hash = flow::hash_macs(parsed.src_mac, parsed.dst_mac, eth.ethertype);
    }
    Ok(parsed)
}

/// Parses an IP packet without an Ethernet header, such as one in GRE: offsets are from its start, MAC addresses are 0.
/// Otherwise as [`parse`]; if `ethertype` is not IP, the result is [`L3::Other`].
///
/// # Errors
/// As [`parse`].
pub fn parse_packet(ethertype: u16, packet: &[u8]) -> Result<Parsed, Malformed> {
    if packet.len() > MAX_FRAME_LEN {
        return Err(Malformed::FrameTooLong);
    }
    let mut head = Head { bytes: &packet[..packet.len().min(HEAD_LEN)], end: packet.len() };
    let mut parsed = Parsed::at_network_header(ethertype, 0, packet.len());
    match ethertype {
        ethertype::IPV4 => parse_ipv4(&mut head, &mut parsed)?,
        ethertype::IPV6 => parse_ipv6(&mut head, &mut parsed)?,
        _ => return Ok(parsed),
    }
    parse_transport(head, &mut parsed)?;
    parsed.flow_hash = parsed.hash(0);
    Ok(parsed)
}

/// The bytes that may be read, and the end of the layer being parsed, which may be beyond these bytes if only the start
/// of a frame was given.
#[derive(Clone, Copy)]
struct Head<'a> {
    bytes: &'a [u8],
    end: usize,
}

impl<'a> Head<'a> {
    /// The available bytes of the layer that starts at `at`.
    fn from(self, at: u16) -> &'a [u8] {
        self.bytes.get(usize::from(at)..self.end.min(self.bytes.len())).unwrap_or_default()
    }

    /// The reason for a truncated header: the frame's fault, unless the caller gave only a part of it.
    fn truncated(self, reason: Malformed) -> Malformed {
        if self.bytes.len() < self.end { Malformed::HeadTooShort } else { reason }
    }
}

fn parse_arp(head: Head<'_>, parsed: &mut Parsed) -> Result<(), Malformed> {
    let packet = arp::Packet::parse(head.from(parsed.l3)).map_err(|e| match e {
        Wire::Truncated => head.truncated(Malformed::ArpTruncated),
        _ => Malformed::ArpKind,
    })?;
    parsed.kind = L3::Arp;
    parsed.src_ip = IpAddr::V4(packet.sender_ip);
    parsed.dst_ip = IpAddr::V4(packet.target_ip);
    Ok(())
}

fn parse_ipv4(head: &mut Head<'_>, parsed: &mut Parsed) -> Result<(), Malformed> {
    let ip = ipv4::Header::parse_quoted(head.from(parsed.l3)).map_err(|e| match e {
        Wire::Truncated => head.truncated(Malformed::Ipv4Truncated),
        Wire::Length => Malformed::Ipv4Length,
        _ => Malformed::Ipv4Header,
    })?;
    set_end(head, parsed, usize::from(ip.total_len), Malformed::Ipv4Length)?;
    parsed.kind = L3::V4;
    parsed.l4 = parsed.l3 + u16::from(ip.header_len);
    parsed.src_ip = IpAddr::V4(ip.source);
    parsed.dst_ip = IpAddr::V4(ip.destination);
    parsed.protocol = ip.protocol;
    if ip.is_fragment() {
        let (offset, more) = (ip.fragment_offset, ip.more_fragments);
        parsed.fragment = Some(Fragment { identification: u32::from(ip.identification), offset, more });
    }
    if usize::from(ip.header_len) > ipv4::HEADER_LEN {
        check_options(head.from(parsed.l3), parsed)?;
    }
    Ok(())
}

/// `packet` starts with an IPv4 header that ends at `l4` and has options.
#[cold]
fn check_options(packet: &[u8], parsed: &Parsed) -> Result<(), Malformed> {
    let header = packet.get(..usize::from(parsed.l4 - parsed.l3)).unwrap_or(packet);
    ipv4::check_options(header).map_err(|e| match e {
        Wire::SourceRoute => Malformed::SourceRoute,
        _ => Malformed::Ipv4Options,
    })
}

fn parse_ipv6(head: &mut Head<'_>, parsed: &mut Parsed) -> Result<(), Malformed> {
    let packet = head.from(parsed.l3);
    let ip = ipv6::Header::parse_quoted(packet).map_err(|e| match e {
        Wire::Truncated => head.truncated(Malformed::Ipv6Truncated),
        _ => Malformed::Ipv6Header,
    })?;
    set_end(head, parsed, ip.total_len(), Malformed::Ipv6Length)?;
    let transport = ip.transport(packet).map_err(|e| match e {
        Wire::Truncated => head.truncated(Malformed::Ipv6Extensions),
        Wire::Fragment => Malformed::FragmentExtensions,
        Wire::SourceRoute => Malformed::SourceRoute,
        _ => Malformed::Ipv6Extensions,
    })?;
    parsed.kind = L3::V6;
    // Small: the walk stays within the first HEAD_LEN bytes.
    parsed.l4 = parsed.l3 + transport.offset as u16;
    parsed.src_ip = IpAddr::V6(ip.source);
    parsed.dst_ip = IpAddr::V6(ip.destination);
    parsed.protocol = transport.protocol;
    // A fragment header without offset and "more" marks a whole packet (RFC 6946).
    parsed.fragment = transport.fragment.filter(|f| f.more || f.offset != 0).map(|f| Fragment {
        identification: f.identification,
        offset: f.offset,
        more: f.more,
    });
    Ok(())
}

/// Ends the layer after `len` bytes of IP packet, before any Ethernet padding.
fn set_end(head: &mut Head<'_>, parsed: &mut Parsed, len: usize, reason: Malformed) -> Result<(), Malformed> {
    let end = usize::from(parsed.l3) + len;
    if end > head.end {
        return Err(reason);
    }
    head.end = end;
    parsed.end = end as u32;
    Ok(())
}

fn parse_transport(head: Head<'_>, parsed: &mut Parsed) -> Result<(), Malformed> {
    if parsed.is_fragment() {
        parsed.payload = parsed.l4;
        return check_fragment(head, parsed);
    }
    let header = transport(head, parsed)?;
    // A datagram may be longer than the given bytes, so its length is checked against the layer instead.
    if parsed.protocol == UDP && usize::from(parsed.l4) + usize::from(header.least_len) > head.end {
        return Err(Malformed::UdpHeader);
    }
    Ok(())
}

/// Length of the transport header.
struct Lengths {
    header_len: u16,
    /// Length from the end of the IP headers.
    least_len: u16,
}

/// Parses the transport header of an unfragmented packet, or of a first fragment.
#[inline(always)]
fn transport(head: Head<'_>, parsed: &mut Parsed) -> Result<Lengths, Malformed> {
    let bytes = head.from(parsed.l4);
    let (header_len, least_len) = match parsed.protocol {
        TCP => {
            let tcp = tcp::Header::parse(bytes).map_err(|e| match e {
                Wire::Truncated => head.truncated(Malformed::TcpHeader),
                _ => Malformed::TcpHeader,
            })?;
            parsed.src_port = tcp.source_port;
            parsed.dst_port = tcp.destination_port;
            parsed.tcp = Some(Tcp { seq: tcp.sequence, ack: tcp.acknowledgment, flags: tcp.flags });
            (u16::from(tcp.header_len), u16::from(tcp.header_len))
        }
        UDP => {
            let udp = bytes.first_chunk::<{ udp::HEADER_LEN }>().ok_or(head.truncated(Malformed::UdpHeader))?;
            let len = u16::from_be_bytes([udp[4], udp[5]]);
            if usize::from(len) < udp::HEADER_LEN {
                return Err(Malformed::UdpHeader);
            }
            parsed.src_port = u16::from_be_bytes([udp[0], udp[1]]);
            parsed.dst_port = u16::from_be_bytes([udp[2], udp[3]]);
            (udp::HEADER_LEN as u16, len)
        }
        _ => (0, 0),
    };
    parsed.payload = parsed.l4 + header_len;
    Ok(Lengths { header_len, least_len })
}

/// Checks that a fragment is valid, and does not hide the transport header from filters.
#[cold]
fn check_fragment(head: Head<'_>, parsed: &Parsed) -> Result<(), Malformed> {
    let Some(fragment) = parsed.fragment else { return Ok(()) };
    let payload = parsed.end - u32::from(parsed.l4);
    let headers = match parsed.kind {
        // The total length includes the header; a packet's payload length excludes the fixed and the fragment header.
        L3::V4 => parsed.l4 - parsed.l3,
        _ => parsed.l4 - parsed.l3 - (ipv6::HEADER_LEN as u16 + 8),
    };
    let packet = u32::from(headers) + u32::from(fragment.offset) + payload;
    if payload == 0 || (fragment.more && !payload.is_multiple_of(8)) || packet > u32::from(u16::MAX) {
        return Err(Malformed::FragmentLength);
    }
    if fragment.offset != 0 {
        let inside = parsed.protocol == TCP && usize::from(fragment.offset) < tcp::HEADER_LEN;
        return if inside { Err(Malformed::TinyFragment) } else { Ok(()) };
    }
    // For other protocols 8 bytes are enough, which each first fragment has: ICMP's type, code and identifier.
    match transport(head, &mut parsed.clone()) {
        Ok(lengths) if u32::from(lengths.header_len) <= payload => Ok(()),
        Err(Malformed::HeadTooShort) => Err(Malformed::HeadTooShort),
        _ => Err(Malformed::TinyFragment),
    }
}
