//! Builds the frames that the switch sends itself.

use std::net::{IpAddr, Ipv6Addr};

use bifrost_nic::{L3, Parsed};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::icmp::v6::Solicitation;
use bifrost_wire::protocol::{ICMP, ICMPV6, UDP};
use bifrost_wire::{Mac, arp, checksum, ipv4, ipv6, udp};

use crate::router;
use crate::tables::{GATEWAY_MAC, Ipv6Lease};
use crate::vpc::link_local;

/// All nodes on the link, and the MAC address of that group (RFC 4291, section 2.7.1; RFC 2464, section 7).
pub(crate) const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
pub(crate) const ALL_NODES_MAC: Mac = Mac([0x33, 0x33, 0, 0, 0, 1]);

/// An ARP reply: `mac` has the requested address.
pub(crate) fn arp_reply(request: &arp::Packet, mac: Mac, out: &mut Vec<u8>) {
    start(out, request.sender_mac, mac, ethertype::ARP);
    out.extend_from_slice(&request.reply(mac).emit());
}

/// The same for IPv6 (RFC 4861, section 7.2.4).
pub(crate) fn advertisement(solicitation: &Solicitation, mac: Mac, parsed: &Parsed, out: &mut Vec<u8>) {
    let (to, to_mac) = match parsed.src_ip {
        IpAddr::V6(src) if !src.is_unspecified() => (src, parsed.src_mac),
        // Duplicate address detection: the asker has no address yet.
        _ => (ALL_NODES, ALL_NODES_MAC),
    };
    let mut advertisement = solicitation.answer(mac, to == ALL_NODES);
    advertisement.router = mac == GATEWAY_MAC;
    let (body, len) = advertisement.emit(solicitation.target, to);
    start_v6(out, (to_mac, mac), (solicitation.target, to), ICMPV6, len, 255);
    out.extend_from_slice(&body[..len]);
}

/// A router advertisement to the guest of a lease, or of a lease that has ended. It goes to `asked`, the sender of a
/// solicitation, or to all nodes; there is only one behind a port.
pub(crate) fn router_advertisement(lease: Option<&Ipv6Lease>, asked: Option<(IpAddr, Mac)>, out: &mut Vec<u8>) {
    let (to, to_mac) = match asked {
        Some((IpAddr::V6(asker), mac)) if !asker.is_unspecified() => (asker, mac),
        _ => (ALL_NODES, ALL_NODES_MAC),
    };
    let mut body = Vec::new();
    router::advertisement(lease, &mut body);
    let source = link_local(GATEWAY_MAC);
    let pseudo = checksum::pseudo_v6(source, to, ICMPV6, body.len() as u32);
    let sum = checksum::Sum::starting(pseudo).then(&body).finish();
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    start_v6(out, (to_mac, GATEWAY_MAC), (source, to), ICMPV6, body.len(), 255);
    out.extend_from_slice(&body);
}

/// The gateway's reply to a ping. `None`: the packet is not a ping, is a fragment, has options or extension headers,
/// or is not complete in `head`.
pub(crate) fn echo_reply(head: &[u8], parsed: &Parsed, out: &mut Vec<u8>) -> Option<()> {
    let packet = head.get(usize::from(parsed.l3)..parsed.end as usize)?;
    let header_len = usize::from(parsed.l4 - parsed.l3);
    if parsed.is_fragment() {
        return None;
    }
    let (request, reply) = if parsed.kind == L3::V6 { (128, 129) } else { (8, 0) };
    let message = packet.get(header_len..)?;
    let fixed = message.first_chunk::<8>()?;
    if fixed[..2] != [request, 0] {
        return None;
    }
    match (parsed.kind, parsed.protocol, header_len) {
        (L3::V4, ICMP, ipv4::HEADER_LEN) => {
            let ip = ipv4::Header::parse(packet).ok()?;
            start(out, parsed.src_mac, GATEWAY_MAC, ethertype::IPV4);
            let ip = ipv4::Header { ttl: 64, source: ip.destination, destination: ip.source, ..ip };
            out.extend_from_slice(&ip.emit());
        }
        (L3::V6, ICMPV6, ipv6::HEADER_LEN) => {
            let ip = ipv6::Header::parse(packet).ok()?;
            start(out, parsed.src_mac, GATEWAY_MAC, ethertype::IPV6);
            let ip = ipv6::Header { hop_limit: 64, source: ip.destination, destination: ip.source, ..ip };
            out.extend_from_slice(&ip.emit());
        }
        _ => return None,
    }
    // Updated incrementally, so that a damaged request gives a damaged reply. Swapping the addresses does not change
    // the sum.
    let old = u16::from_be_bytes([fixed[2], fixed[3]]);
    let sum = checksum::update_u16(old, u16::from_be_bytes([request, 0]), u16::from_be_bytes([reply, 0]));
    out.extend_from_slice(&[reply, 0]);
    out.extend_from_slice(&sum.to_be_bytes());
    out.extend_from_slice(&message[4..]);
    Some(())
}

/// A UDP datagram from the gateway to a guest or, with IPv4, to the broadcast address. Both addresses are of one
/// family. `payload`: at most 65,507 bytes.
pub(crate) fn datagram(
    guest: Mac,
    ((source, source_port), (destination, destination_port)): ((IpAddr, u16), (IpAddr, u16)),
    payload: &[u8],
    out: &mut Vec<u8>,
) {
    let len = (udp::HEADER_LEN + payload.len()) as u16;
    let pseudo = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mac = if destination.is_broadcast() { Mac::BROADCAST } else { guest };
            start(out, mac, GATEWAY_MAC, ethertype::IPV4);
            out.extend_from_slice(&ipv4::Header::new(source, destination, UDP, len).emit());
            checksum::pseudo_v4(source, destination, UDP, u32::from(len))
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            start_v6(out, (guest, GATEWAY_MAC), (source, destination), UDP, usize::from(len), 64);
            checksum::pseudo_v6(source, destination, UDP, u32::from(len))
        }
        _ => return out.clear(),
    };
    let mut udp = udp::Header { source_port, destination_port, len, checksum: 0 }.emit();
    let sum = checksum::Sum::starting(pseudo).then(&udp).then(payload).finish();
    udp::set_checksum(&mut udp, checksum::udp_nonzero(sum));
    out.extend_from_slice(&udp);
    out.extend_from_slice(payload);
}

/// Starts a frame with an IPv6 packet of `len` bytes after its header. Note the order: the destination MAC address
/// comes first, but the source IP address.
pub(crate) fn start_v6(
    out: &mut Vec<u8>,
    (to_mac, from_mac): (Mac, Mac),
    (source, destination): (Ipv6Addr, Ipv6Addr),
    next_header: u8,
    len: usize,
    hop_limit: u8,
) {
    let ip = ipv6::Header { hop_limit, ..ipv6::Header::new(source, destination, next_header, len as u16) };
    start(out, to_mac, from_mac, ethertype::IPV6);
    out.extend_from_slice(&ip.emit());
}

/// Starts a frame with its Ethernet header.
pub(crate) fn start(out: &mut Vec<u8>, destination: Mac, source: Mac, ethertype: u16) {
    out.clear();
    out.extend_from_slice(&ethernet::Header::new(destination, source, ethertype).emit());
}
