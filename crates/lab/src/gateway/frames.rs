//! Frames between hosts and a gateway.

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::UDP;
use bifrost_wire::{Mac, Vni, arp, ipv4, udp, vxlan};

/// The gateway's tunnel address.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
/// The gateway's MAC address.
pub const GATEWAY_MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
/// The tunnel address of the sending host.
pub const SENDER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 11);
/// The tunnel address of the receiving host.
pub const RECEIVER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 12);
/// The next hop to the Internet.
pub const PROVIDER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 253);
/// Bytes before the payload: Ethernet, IPv4, UDP, VXLAN, Ethernet, IPv4, UDP.
pub const HEADERS: usize = 92;

/// A UDP packet of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inner {
    /// The tenant's network.
    pub vni: u32,
    /// Its source address.
    pub source: Ipv4Addr,
    /// Its destination address.
    pub destination: Ipv4Addr,
    /// Source and destination port.
    pub ports: (u16, u16),
}

/// The MAC address of a host on the underlay network that is not the gateway.
pub fn mac_of(address: Ipv4Addr) -> Mac {
    Mac([2, 0, 0, 0, 0, address.octets()[3]])
}

/// The headers of a packet from [`SENDER`] to the gateway with `payload` bytes of payload.
///
/// # Errors
/// A VNI of more than 24 bits.
pub fn headers(inner: &Inner, payload: usize) -> Result<[u8; HEADERS]> {
    let vni = Vni::new(inner.vni).context("a VNI has 24 bits")?;
    let guest = Mac([2, 0, 0, 0, 1, 1]);
    let inner_ip = ip_udp(inner.source, inner.destination, inner.ports, payload);
    // Underlay networks hash the source port to spread flows.
    let outer_ip = ip_udp(SENDER, GATEWAY, (50_000 | inner.ports.0 & 0xfff, vxlan::UDP_PORT), HEADERS - 42 + payload);
    let mut bytes = [0; HEADERS];
    let parts: [&[u8]; 5] = [
        &ethernet::Header::new(GATEWAY_MAC, mac_of(SENDER), ethertype::IPV4).emit(),
        &outer_ip,
        &vxlan::emit(vni),
        &ethernet::Header::new(GATEWAY_MAC, guest, ethertype::IPV4).emit(),
        &inner_ip,
    ];
    let mut at = 0;
    for part in parts {
        bytes[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    Ok(bytes)
}

/// An IPv4 header, and a UDP header without checksum, for `payload` bytes.
fn ip_udp(source: Ipv4Addr, destination: Ipv4Addr, ports: (u16, u16), payload: usize) -> [u8; 28] {
    let len = (udp::HEADER_LEN + payload) as u16;
    let header = ipv4::Header::new(source, destination, UDP, len);
    let mut bytes = [0; 28];
    bytes[..20].copy_from_slice(&header.emit());
    bytes[20..]
        .copy_from_slice(&udp::Header { source_port: ports.0, destination_port: ports.1, len, checksum: 0 }.emit());
    bytes
}

/// The VNI, source port and payload of the inner packet in a VXLAN frame from the gateway.
pub fn read(frame: &[u8]) -> Option<(u32, u16, &[u8])> {
    const OUTER: usize = 42;
    const PORT: usize = OUTER + vxlan::HEADER_LEN + ethernet::HEADER_LEN + ipv4::HEADER_LEN;
    let is_vxlan = frame.get(12..14)? == ethertype::IPV4.to_be_bytes()
        && frame.get(23) == Some(&UDP)
        && frame.get(36..38)? == vxlan::UDP_PORT.to_be_bytes();
    if !is_vxlan {
        return None;
    }
    let (vni, _) = vxlan::parse(frame.get(OUTER..)?).ok()?;
    let port = frame.get(PORT..)?.first_chunk::<2>()?;
    Some((vni.get(), u16::from_be_bytes(*port), frame.get(HEADERS..)?))
}

/// The reply to an ARP request for an address that is not the gateway's.
pub fn arp_reply(frame: &[u8]) -> Option<Vec<u8>> {
    if frame.get(12..14)? != ethertype::ARP.to_be_bytes() {
        return None;
    }
    let request = arp::Packet::parse(frame.get(14..)?).ok()?;
    if request.operation != arp::Operation::Request || request.target_ip == GATEWAY {
        return None;
    }
    let mac = mac_of(request.target_ip);
    let header = ethernet::Header::new(request.sender_mac, mac, ethertype::ARP);
    Some([&header.emit()[..], &request.reply(mac).emit()].concat())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn frames_round_trip() {
        let (source, destination) = (Ipv4Addr::new(192, 168, 0, 1), Ipv4Addr::new(192, 168, 0, 2));
        let inner = Inner { vni: 7000, source, destination, ports: (77, 9) };
        let frame = [&headers(&inner, 5).unwrap()[..], b"hello"].concat();
        assert_eq!(read(&frame), Some((7000, 77, &b"hello"[..])));
        let total = u16::from_be_bytes([frame[16], frame[17]]);
        assert_eq!(usize::from(total) + 14, frame.len());
        assert_eq!(read(&frame[..90]), None);
        assert_eq!(arp_reply(&frame), None);
        assert!(headers(&Inner { vni: 1 << 24, ..inner }, 0).is_err());
    }
}
