//! Outer headers.

use std::net::IpAddr;

use bifrost_wire::protocol::{GRE, UDP};
use bifrost_wire::{Mac, Vni, ethernet, gre, ip, ipv4, ipv6, udp, vxlan};

use crate::{DropReason, Packet};

/// Source and destination of an outer packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outer {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    /// Hash of the inner flow: underlay networks spread flows by the source port.
    pub(crate) flow_hash: u32,
    pub(crate) ecn: u8,
}

/// Bytes that VXLAN adds to an inner IP packet within an outer IP packet: Ethernet, VXLAN, UDP, IP.
pub(crate) fn vxlan_overhead(outer: IpAddr) -> usize {
    ethernet::HEADER_LEN + vxlan::HEADER_LEN + udp::HEADER_LEN + ip::header_len(outer)
}

/// Bytes that GRE with a key adds.
pub(crate) fn gre_overhead(outer: IpAddr) -> usize {
    gre::HEADER_LEN + ip::header_len(outer)
}

/// Prepends VXLAN, UDP and IP to an inner frame. The UDP checksum is 0: RFC 7348, section 5; RFC 6935 for IPv6.
pub(crate) fn push_vxlan(packet: &mut Packet<'_>, vni: u32, outer: Outer) -> Result<(), DropReason> {
    packet.push(&vxlan::emit(Vni::new(vni).ok_or(DropReason::UnknownVni)?))?;
    let len = u16::try_from(packet.len() + udp::HEADER_LEN).map_err(|_| DropReason::TooLarge)?;
    let source_port = vxlan::source_port(outer.flow_hash);
    packet.push(&udp::Header { source_port, destination_port: vxlan::UDP_PORT, len, checksum: 0 }.emit())?;
    push_ip(packet, UDP, outer)
}

/// Prepends GRE and IP to an inner IP packet.
pub(crate) fn push_gre(packet: &mut Packet<'_>, header: gre::Header, outer: Outer) -> Result<(), DropReason> {
    packet.push(&header.emit())?;
    push_ip(packet, GRE, outer)
}

/// Prepends Ethernet.
pub(crate) fn push_ethernet(
    packet: &mut Packet<'_>,
    destination: Mac,
    source: Mac,
    ethertype: u16,
) -> Result<(), DropReason> {
    packet.push(&ethernet::Header::new(destination, source, ethertype).emit())
}

fn push_ip(packet: &mut Packet<'_>, protocol: u8, outer: Outer) -> Result<(), DropReason> {
    let Outer { source, destination, flow_hash, ecn } = outer;
    // Of one family: the gateway's address was chosen to match the other one.
    match ip::Header::new(source, destination, protocol, packet.len()).ok_or(DropReason::TooLarge)? {
        ip::Header::V4(header) => packet.push(&ipv4::Header { traffic_class: ecn, ..header }.emit()),
        ip::Header::V6(header) => {
            packet.push(&ipv6::Header { traffic_class: ecn, flow_label: flow_hash, ..header }.emit())
        }
    }
}
