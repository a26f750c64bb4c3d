//! Outer headers that the transport writes, and a parser for those that a pod writes.

use std::net::IpAddr;

use bifrost_wire::ethernet::ethertype;
use bifrost_wire::protocol::UDP;
use bifrost_wire::{checksum, ip, ipv4, ipv6, udp, vxlan};

/// Both MAC addresses, and the VLAN tag if there is one: the start of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Link {
    bytes: [u8; 16],
    len: u8,
}

impl Link {
    /// From the bytes before the EtherType of a frame that leaves. `None` if the length is wrong.
    pub(super) fn of_leaving(macs: &[u8], tag: &[u8]) -> Option<Self> {
        let mut link = Link { bytes: [0; 16], len: (macs.len() + tag.len()) as u8 };
        link.bytes.get_mut(..macs.len()).filter(|_| macs.len() == 12)?.copy_from_slice(macs);
        link.bytes.get_mut(12..12 + tag.len())?.copy_from_slice(tag);
        Some(link)
    }

    /// The reverse of the link of a frame that arrived.
    pub(super) fn back_from(frame: &[u8], tagged: bool) -> Option<Self> {
        let (to, from) = (frame.get(..6)?, frame.get(6..12)?);
        let tag = if tagged { frame.get(12..16)? } else { &[] };
        // A multicast source cannot be answered.
        let is_group = from.first().is_none_or(|first| first & 1 != 0) || to.first().is_none_or(|first| first & 1 != 0);
        let mut macs = [0; 12];
        macs[..6].copy_from_slice(from);
        macs[6..].copy_from_slice(to);
        Self::of_leaving(&macs, tag).filter(|_| !is_group)
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// The endpoints of a datagram.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) source_port: u16,
    pub(super) destination_port: u16,
    pub(super) ecn: u8,
    /// Whether the UDP checksum is computed; without it, it is 0 (RFC 7348, section 5; RFC 6935 for IPv6).
    pub(super) is_summed: bool,
}

/// Bytes from the start of the IP header to the end of the UDP header.
pub(super) fn ip_udp_len(address: IpAddr) -> usize {
    udp::HEADER_LEN + ip::header_len(address)
}

/// Appends all headers and `head` to `frame`; `tail` is the rest that the caller sends. Appends nothing if that is too
/// long, or the families differ.
pub(super) fn write(frame: &mut Vec<u8>, link: &Link, ends: &Ends, head: &[u8], tail: &[u8]) -> Option<()> {
    let len = u16::try_from(udp::HEADER_LEN + head.len() + tail.len()).ok()?;
    frame.extend_from_slice(link.bytes());
    let pseudo = match ip::Header::new(ends.source, ends.destination, UDP, len.into())? {
        ip::Header::V4(header) => {
            frame.extend_from_slice(&ethertype::IPV4.to_be_bytes());
            frame.extend_from_slice(&ipv4::Header { traffic_class: ends.ecn, ..header }.emit());
            header.pseudo_sum()
        }
        ip::Header::V6(header) => {
            frame.extend_from_slice(&ethertype::IPV6.to_be_bytes());
            frame.extend_from_slice(&ipv6::Header { traffic_class: ends.ecn, ..header }.emit());
            header.pseudo_sum(UDP, len.into())
        }
    };
    let Ends { source_port, destination_port, .. } = *ends;
    let mut header = udp::Header { source_port, destination_port, len, checksum: 0 };
    if ends.is_summed {
        let sum = checksum::Sum::starting(pseudo).then(&header.emit()).then(head).then(tail);
        header.checksum = checksum::udp_nonzero(sum.finish());
    }
    frame.extend_from_slice(&header.emit());
    frame.extend_from_slice(head);
    Some(())
}

/// A VXLAN packet that a pod sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tunnelled {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) vni: u32,
    /// Start of the inner frame.
    pub(super) inner: usize,
    /// Length of the inner frame, bytes.
    pub(super) len: usize,
}

/// Parses a frame after its MAC addresses and tag; `more` bytes of it are stored elsewhere.
pub(super) fn tunnelled(rest: &[u8], more: usize) -> Option<Tunnelled> {
    const ETHERTYPE: usize = 2;
    let kind = u16::from_be_bytes([*rest.first()?, *rest.get(1)?]);
    let packet = rest.get(ETHERTYPE..)?;
    let (source, destination, l4) = match kind {
        ethertype::IPV4 => {
            let header = ipv4::Header::parse_quoted(packet).ok()?;
            if header.protocol != UDP || header.is_fragment() {
                return None;
            }
            (IpAddr::V4(header.source), IpAddr::V4(header.destination), usize::from(header.header_len))
        }
        ethertype::IPV6 => {
            let header = ipv6::Header::parse_quoted(packet).ok()?;
            if header.next_header != UDP {
                return None;
            }
            (IpAddr::V6(header.source), IpAddr::V6(header.destination), ipv6::HEADER_LEN)
        }
        _ => return None,
    };
    let udp_bytes = packet.get(l4..l4 + udp::HEADER_LEN)?;
    let (port, len) =
        (u16::from_be_bytes([udp_bytes[2], udp_bytes[3]]), u16::from_be_bytes([udp_bytes[4], udp_bytes[5]]));
    if port != vxlan::UDP_PORT {
        return None;
    }
    let payload = packet.get(l4 + udp::HEADER_LEN..)?;
    let (vni, _) = vxlan::parse(payload).ok()?;
    let len = usize::from(len).checked_sub(udp::HEADER_LEN + vxlan::HEADER_LEN)?;
    let inner = ETHERTYPE + l4 + udp::HEADER_LEN + vxlan::HEADER_LEN;
    (rest.len().checked_sub(inner)? + more >= len).then_some(Tunnelled {
        source,
        destination,
        vni: vni.get(),
        inner,
        len,
    })
}
