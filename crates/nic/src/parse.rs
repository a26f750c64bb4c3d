//! The Pre-Processor's parser: one look at a frame's headers, everything later rooms need to know.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_wire::Mac;

use crate::flow::FlowKey;
use crate::malformed::Malformed;

/// Protocol number of TCP.
pub const TCP: u8 = 6;
/// Protocol number of UDP.
pub const UDP: u8 = 17;
/// Protocol number of ICMP over IPv4.
pub const ICMP: u8 = 1;
/// Next header value of ICMPv6.
pub const ICMPV6: u8 = 58;

/// Bytes at the start of a frame that hold every header the parser looks at; see [`parse`].
pub const HEAD_LEN: usize = 256;

/// Longest frame: an Ethernet header, two tags, and the longest IP packet.
pub const MAX_FRAME_LEN: usize = 14 + 8 + 40 + 65_535;

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
    /// The eight flag bits, CWR the highest, FIN the lowest.
    pub flags: u8,
}

impl Tcp {
    /// Flag: no more data.
    pub const FIN: u8 = 0x01;
    /// Flag: synchronise sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Flag: push.
    pub const PSH: u8 = 0x08;
    /// Flag: the acknowledgment number counts.
    pub const ACK: u8 = 0x10;
    /// Flag: congestion window reduced.
    pub const CWR: u8 = 0x80;
}

/// What the headers of a frame say. All offsets are from the start of the frame and lie inside it:
/// `l3 <= l4 <= payload <= end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// EtherType behind the tag, if there is one.
    pub ethertype: u16,
    /// VLAN identifier 0..=4095 of an 802.1Q or 802.1ad tag.
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
    /// Transport protocol number behind extension headers; 0 when `kind` is not IP.
    pub protocol: u8,
    /// Whether the packet is a fragment, the first one included. Fragments have no ports and no TCP fields here.
    pub is_fragment: bool,
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

    /// Whether the frame carries IPv4 or IPv6.
    pub fn is_ip(&self) -> bool {
        matches!(self.kind, L3::V4 | L3::V6)
    }

    /// Whether the frame is an unfragmented TCP segment.
    pub fn is_tcp(&self) -> bool {
        self.tcp.is_some()
    }
}

/// Parses the headers of an Ethernet frame of `total_len` bytes. `frame` holds at least the first
/// `min(total_len, HEAD_LEN)` bytes of it; nothing behind [`HEAD_LEN`] is looked at.
///
/// Neither the IPv4 header checksum nor any transport checksum is looked at; see
/// [`transport_checksum`](crate::transport_checksum).
///
/// # Errors
/// The first reason why the frame cannot be what its headers say it is.
pub fn parse(frame: &[u8], total_len: usize) -> Result<Parsed, Malformed> {
    if total_len > MAX_FRAME_LEN {
        return Err(Malformed::FrameTooLong);
    }
    let head = Head { bytes: &frame[..frame.len().min(HEAD_LEN).min(total_len)], end: total_len };
    let macs: [u8; 14] = head.array(0, Malformed::EthernetTruncated)?;
    let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, t0, t1] = macs;
    let mut ethertype = u16::from_be_bytes([t0, t1]);
    let mut vlan = None;
    let mut l3 = 14;
    if matches!(ethertype, 0x8100 | 0x88a8) {
        let [v0, v1, t0, t1] = head.array(l3, Malformed::EthernetTruncated)?;
        vlan = Some(u16::from_be_bytes([v0, v1]) & 0x0fff);
        ethertype = u16::from_be_bytes([t0, t1]);
        l3 += 4;
    }
    let mut parsed = Parsed {
        ethertype,
        vlan,
        kind: L3::Other,
        l3: l3 as u16,
        l4: l3 as u16,
        payload: l3 as u16,
        end: total_len as u32,
        src_mac: Mac([s0, s1, s2, s3, s4, s5]),
        dst_mac: Mac([d0, d1, d2, d3, d4, d5]),
        src_ip: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        dst_ip: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        protocol: 0,
        is_fragment: false,
        src_port: 0,
        dst_port: 0,
        tcp: None,
        flow_hash: 0,
    };
    match ethertype {
        0x0800 => ipv4(head, &mut parsed)?,
        0x86dd => ipv6(head, &mut parsed)?,
        0x0806 => arp(head, &mut parsed)?,
        _ => {}
    }
    parsed.flow_hash = if parsed.is_ip() {
        parsed.flow_key().hash(0)
    } else {
        crate::flow::hash_macs(parsed.src_mac.0, parsed.dst_mac.0, ethertype)
    };
    Ok(parsed)
}

/// The bytes that may be looked at, and where the layer being parsed ends.
#[derive(Clone, Copy)]
struct Head<'a> {
    bytes: &'a [u8],
    end: usize,
}

impl Head<'_> {
    /// `N` bytes at `at`; `reason` when the layer ends before them.
    fn array<const N: usize>(self, at: usize, reason: Malformed) -> Result<[u8; N], Malformed> {
        if at + N > self.end {
            return Err(reason);
        }
        self.bytes.get(at..).and_then(|b| b.first_chunk::<N>()).copied().ok_or(Malformed::HeadTooShort)
    }
}

fn arp(head: Head<'_>, parsed: &mut Parsed) -> Result<(), Malformed> {
    let packet: [u8; 28] = head.array(usize::from(parsed.l3), Malformed::ArpTruncated)?;
    // Hardware type 1, protocol type IPv4, address lengths 6 and 4 (RFC 826).
    if packet[..6] != [0, 1, 8, 0, 6, 4] {
        return Err(Malformed::ArpKind);
    }
    parsed.kind = L3::Arp;
    parsed.src_ip = IpAddr::V4(Ipv4Addr::new(packet[14], packet[15], packet[16], packet[17]));
    parsed.dst_ip = IpAddr::V4(Ipv4Addr::new(packet[24], packet[25], packet[26], packet[27]));
    Ok(())
}

fn ipv4(mut head: Head<'_>, parsed: &mut Parsed) -> Result<(), Malformed> {
    let l3 = usize::from(parsed.l3);
    let ip: [u8; 20] = head.array(l3, Malformed::Ipv4Truncated)?;
    let header_len = usize::from(ip[0] & 0x0f) * 4;
    if ip[0] >> 4 != 4 || header_len < 20 {
        return Err(Malformed::Ipv4Header);
    }
    let total = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
    if total < header_len || l3 + total > head.end {
        return Err(Malformed::Ipv4Length);
    }
    head.end = l3 + total;
    parsed.kind = L3::V4;
    parsed.end = head.end as u32;
    parsed.l4 = (l3 + header_len) as u16;
    parsed.src_ip = IpAddr::V4(Ipv4Addr::new(ip[12], ip[13], ip[14], ip[15]));
    parsed.dst_ip = IpAddr::V4(Ipv4Addr::new(ip[16], ip[17], ip[18], ip[19]));
    parsed.protocol = ip[9];
    // More fragments, or an offset.
    parsed.is_fragment = u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff != 0;
    transport(head, parsed)
}

/// Extension headers looked through before a packet is refused. RFC 8200, 4.1 orders at most seven.
const MAX_EXTENSIONS: usize = 8;

fn ipv6(mut head: Head<'_>, parsed: &mut Parsed) -> Result<(), Malformed> {
    let l3 = usize::from(parsed.l3);
    let ip: [u8; 40] = head.array(l3, Malformed::Ipv6Truncated)?;
    if ip[0] >> 4 != 6 {
        return Err(Malformed::Ipv6Header);
    }
    let end = l3 + 40 + usize::from(u16::from_be_bytes([ip[4], ip[5]]));
    if end > head.end {
        return Err(Malformed::Ipv6Length);
    }
    head.end = end;
    let mut next = ip[6];
    let mut at = l3 + 40;
    let mut extensions = 0;
    loop {
        // Hop-by-hop, routing, destination options: (len + 1) * 8; authentication: (len + 2) * 4; fragment: 8.
        let unit = match next {
            0 | 43 | 60 => (8, 1),
            51 => (4, 2),
            44 => (0, 0),
            _ => break,
        };
        extensions += 1;
        if extensions > MAX_EXTENSIONS {
            return Err(Malformed::Ipv6Extensions);
        }
        let ext: [u8; 8] = head.array(at, Malformed::Ipv6Extensions)?;
        let len = if next == 44 { 8 } else { (usize::from(ext[1]) + unit.1) * unit.0 };
        let offset_and_more = u16::from_be_bytes([ext[2], ext[3]]) & 0xfff9;
        let fragment = next == 44 && offset_and_more != 0;
        at += len;
        next = ext[0];
        if at > head.end {
            return Err(Malformed::Ipv6Extensions);
        }
        if fragment {
            parsed.is_fragment = true;
            // What follows is not a header unless the offset is 0, and then the rest of the chain may be missing.
            break;
        }
    }
    parsed.kind = L3::V6;
    parsed.end = head.end as u32;
    // Cannot exceed 16 bits: nothing behind HEAD_LEN was read, and one extension is at most 2 KiB.
    parsed.l4 = at as u16;
    let addr = |at: usize| {
        let mut octets = [0; 16];
        octets.copy_from_slice(&ip[at..at + 16]);
        IpAddr::V6(Ipv6Addr::from(octets))
    };
    parsed.src_ip = addr(8);
    parsed.dst_ip = addr(24);
    parsed.protocol = next;
    transport(head, parsed)
}

fn transport(head: Head<'_>, parsed: &mut Parsed) -> Result<(), Malformed> {
    parsed.payload = parsed.l4;
    if parsed.is_fragment {
        return Ok(());
    }
    let l4 = usize::from(parsed.l4);
    match parsed.protocol {
        TCP => {
            let tcp: [u8; 20] = head.array(l4, Malformed::TcpHeader)?;
            let header_len = usize::from(tcp[12] >> 4) * 4;
            if header_len < 20 || l4 + header_len > head.end {
                return Err(Malformed::TcpHeader);
            }
            if l4 + header_len > head.bytes.len() {
                return Err(Malformed::HeadTooShort);
            }
            parsed.payload = (l4 + header_len) as u16;
            ports(parsed, &tcp);
            parsed.tcp = Some(Tcp {
                seq: u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]),
                ack: u32::from_be_bytes([tcp[8], tcp[9], tcp[10], tcp[11]]),
                flags: tcp[13],
            });
        }
        UDP => {
            let udp: [u8; 8] = head.array(l4, Malformed::UdpHeader)?;
            let len = usize::from(u16::from_be_bytes([udp[4], udp[5]]));
            if len < 8 || l4 + len > head.end {
                return Err(Malformed::UdpHeader);
            }
            parsed.payload = (l4 + 8) as u16;
            ports(parsed, &udp);
        }
        _ => {}
    }
    Ok(())
}

fn ports(parsed: &mut Parsed, header: &[u8]) {
    parsed.src_port = u16::from_be_bytes([header[0], header[1]]);
    parsed.dst_port = u16::from_be_bytes([header[2], header[3]]);
}
