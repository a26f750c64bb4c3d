//! Outer headers.

use std::net::IpAddr;

use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::{GRE, UDP};
use bifrost_wire::{Mac, Vni, gre, ipv4, ipv6, udp, vxlan};

use crate::{DropReason, Packet};

const HOP_LIMIT: u8 = 64;

/// Between whom an outer packet goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outer {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    /// Hash of the inner flow: underlay networks spread flows by the source port.
    pub(crate) flow_hash: u32,
    pub(crate) ecn: u8,
}

/// Bytes that VXLAN adds to an inner IP packet, of an outer IP packet: Ethernet, VXLAN, UDP, IP.
pub(crate) fn vxlan_overhead(outer: IpAddr) -> usize {
    ethernet::HEADER_LEN + vxlan::HEADER_LEN + udp::HEADER_LEN + ip_len(outer)
}

/// Bytes that GRE with a key adds.
pub(crate) fn gre_overhead(outer: IpAddr) -> usize {
    gre::HEADER_LEN + ip_len(outer)
}

fn ip_len(address: IpAddr) -> usize {
    if address.is_ipv4() { ipv4::HEADER_LEN } else { ipv6::HEADER_LEN }
}

/// Puts VXLAN, UDP and IP in front of an inner frame. The UDP checksum is 0: RFC 7348, section 5; RFC 6935 for IPv6.
pub(crate) fn push_vxlan(packet: &mut Packet<'_>, vni: u32, outer: Outer) -> Result<(), DropReason> {
    packet.push(&vxlan::emit(Vni::new(vni).ok_or(DropReason::UnknownVni)?))?;
    let len = u16::try_from(packet.len() + udp::HEADER_LEN).map_err(|_| DropReason::TooLarge)?;
    // 49152 to 65535, the range of ephemeral ports.
    let source_port = 0xc000 | (outer.flow_hash >> 16) as u16 & 0x3fff;
    packet.push(&udp::Header { source_port, destination_port: vxlan::UDP_PORT, len, checksum: 0 }.emit())?;
    push_ip(packet, UDP, outer)
}

/// Puts GRE and IP in front of an inner IP packet.
pub(crate) fn push_gre(packet: &mut Packet<'_>, header: gre::Header, outer: Outer) -> Result<(), DropReason> {
    packet.push(&header.emit())?;
    push_ip(packet, GRE, outer)
}

/// Puts Ethernet in front.
pub(crate) fn push_ethernet(
    packet: &mut Packet<'_>,
    destination: Mac,
    source: Mac,
    ethertype: u16,
) -> Result<(), DropReason> {
    packet.push(&ethernet::Header::new(destination, source, ethertype).emit())
}

/// The EtherType of a family.
pub(crate) fn ethertype_of(address: IpAddr) -> u16 {
    if address.is_ipv4() { ethertype::IPV4 } else { ethertype::IPV6 }
}

fn push_ip(packet: &mut Packet<'_>, protocol: u8, outer: Outer) -> Result<(), DropReason> {
    match (outer.source, outer.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let total_len = u16::try_from(packet.len() + ipv4::HEADER_LEN).map_err(|_| DropReason::TooLarge)?;
            let header = ipv4::Header {
                traffic_class: outer.ecn,
                total_len,
                ttl: HOP_LIMIT,
                ..ipv4::Header::new(source, destination, protocol, 0)
            };
            packet.push(&header.emit())
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let payload_len = u16::try_from(packet.len()).map_err(|_| DropReason::TooLarge)?;
            let header = ipv6::Header {
                traffic_class: outer.ecn,
                flow_label: outer.flow_hash & 0xf_ffff,
                payload_len,
                next_header: protocol,
                hop_limit: HOP_LIMIT,
                source,
                destination,
            };
            packet.push(&header.emit())
        }
        _ => Err(DropReason::NoHost),
    }
}
