//! Packets that the gateway sends itself: ARP replies and neighbour advertisements.

use std::net::{IpAddr, Ipv6Addr};

use bifrost_nic::{L3, Parsed};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::ICMPV6;
use bifrost_wire::{Mac, arp, icmp, ipv6};

/// Neighbour discovery requires this hop limit (RFC 4861, section 7.1).
const ND_HOP_LIMIT: u8 = 255;

/// Whether a packet that is too large may be fragmented on its path: its sender then learns nothing.
pub(crate) fn may_fragment(frame: &[u8], parsed: &Parsed) -> bool {
    parsed.kind == L3::V4 && frame.get(usize::from(parsed.l3) + 6).is_some_and(|flags| flags & 0x40 == 0)
}

/// The inner frame of the reply to an ARP request for one of the addresses.
pub(crate) fn arp_reply(frame: &[u8], parsed: &Parsed, mac: Mac, mine: &[IpAddr]) -> Option<Vec<u8>> {
    let request = arp::Packet::parse(frame.get(usize::from(parsed.l3)..)?).ok()?;
    let asked = request.operation == arp::Operation::Request && mine.contains(&IpAddr::V4(request.target_ip));
    asked.then(|| {
        let header = ethernet::Header::new(request.sender_mac, mac, ethertype::ARP);
        [&header.emit()[..], &request.reply(mac).emit()].concat()
    })
}

/// The inner frame of the advertisement that answers a neighbour solicitation for one of the addresses.
pub(crate) fn advertisement(frame: &[u8], parsed: &Parsed, mac: Mac, mine: &[IpAddr]) -> Option<Vec<u8>> {
    let (IpAddr::V6(source), IpAddr::V6(destination)) = (parsed.src_ip, parsed.dst_ip) else { return None };
    let message = frame.get(usize::from(parsed.l4)..parsed.end as usize)?;
    let right = frame.get(usize::from(parsed.l3) + 7) == Some(&ND_HOP_LIMIT)
        && icmp::v6::checksum_is_valid(message, source, destination);
    let Ok(icmp::v6::Message::Solicitation(asked)) = icmp::v6::Message::parse(message) else { return None };
    if !right || !mine.contains(&IpAddr::V6(asked.target)) {
        return None;
    }
    let unspecified = source.is_unspecified();
    let to = if unspecified { Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1) } else { source };
    let (bytes, len) = asked.answer(mac, unspecified).emit(asked.target, to);
    let ip = ipv6_header(asked.target, to, len);
    let header = ethernet::Header::new(parsed.src_mac, mac, ethertype::IPV6);
    Some([&header.emit()[..], &ip.emit(), &bytes[..len]].concat())
}

fn ipv6_header(source: Ipv6Addr, destination: Ipv6Addr, payload: usize) -> ipv6::Header {
    ipv6::Header { hop_limit: ND_HOP_LIMIT, ..ipv6::Header::new(source, destination, ICMPV6, payload as u16) }
}
