//! Packets that the gateway sends itself: ICMP errors, ARP replies, neighbour advertisements.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_nic::{L3, Parsed};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::{ICMP, ICMPV6};
use bifrost_wire::{Mac, arp, checksum, icmp, ipv4, ipv6};

/// Longest packets with an ICMP error (RFC 1812, section 4.3.2.3; RFC 4443, section 2.4 c).
const MAX_V4_ERROR: usize = 576;
const MAX_V6_ERROR: usize = 1280;
const HOP_LIMIT: u8 = 64;
/// Neighbour discovery demands it (RFC 4861, section 7.1).
const ND_HOP_LIMIT: u8 = 255;

/// What an ICMP error says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Error {
    /// The hop limit is used up.
    HopLimit,
    /// Larger than this many bytes of an IP packet.
    TooLarge(u16),
}

/// Whether a packet may be answered with an error: RFC 1122, section 3.2.2; RFC 4443, section 2.4 e.
pub(crate) fn may_answer(frame: &[u8], parsed: &Parsed) -> bool {
    let unicast = |address: IpAddr| !address.is_multicast() && !address.is_unspecified() && !address.is_loopback();
    let first = parsed.fragment.is_none_or(|f| f.offset == 0);
    let kind = frame.get(usize::from(parsed.l4)).copied();
    let is_error = match parsed.protocol {
        ICMP => !matches!(kind, Some(0 | 8 | 13 | 14)),
        ICMPV6 => kind.is_none_or(|kind| kind < 128),
        _ => false,
    };
    first && !is_error && unicast(parsed.src_ip) && parsed.src_ip != IpAddr::V4(Ipv4Addr::BROADCAST)
}

/// Whether a packet that is too large may be cut on its way: its sender then learns nothing.
pub(crate) fn may_fragment(frame: &[u8], parsed: &Parsed) -> bool {
    parsed.kind == L3::V4 && frame.get(usize::from(parsed.l3) + 6).is_some_and(|flags| flags & 0x40 == 0)
}

/// Writes an IP packet with an error about the packet that begins `quoted`; returns its length, 0 without room, or for mixed families.
pub(crate) fn write_error(error: Error, source: IpAddr, destination: IpAddr, quoted: &[u8], out: &mut [u8]) -> usize {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let quoted = &quoted[..quoted.len().min(MAX_V4_ERROR - ipv4::HEADER_LEN - icmp::v4::HEADER_LEN)];
            let message = match error {
                Error::HopLimit => icmp::v4::Message::Other { kind: 11, code: 0 },
                Error::TooLarge(mtu) => icmp::v4::Message::FragmentationNeeded { mtu },
            };
            let header = ipv4_header(source, destination, icmp::v4::HEADER_LEN + quoted.len());
            concat(out, &[&header.emit(), &message.emit(quoted), quoted])
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let quoted = &quoted[..quoted.len().min(MAX_V6_ERROR - ipv6::HEADER_LEN - icmp::v6::HEADER_LEN)];
            let message = match error {
                Error::HopLimit => time_exceeded_v6(quoted, source, destination),
                Error::TooLarge(mtu) => {
                    icmp::v6::emit_packet_too_big(u32::from(mtu.max(1280)), quoted, source, destination)
                }
            };
            let header = ipv6_header(source, destination, icmp::v6::HEADER_LEN + quoted.len(), HOP_LIMIT);
            concat(out, &[&header.emit(), &message, quoted])
        }
        _ => 0,
    }
}

/// The inner frame that answers an ARP request for one of the addresses.
pub(crate) fn arp_reply(frame: &[u8], parsed: &Parsed, mac: Mac, mine: &[IpAddr]) -> Option<Vec<u8>> {
    let request = arp::Packet::parse(frame.get(usize::from(parsed.l3)..)?).ok()?;
    let asked = request.operation == arp::Operation::Request && mine.contains(&IpAddr::V4(request.target_ip));
    asked.then(|| {
        let header = ethernet::Header::new(request.sender_mac, mac, ethertype::ARP);
        [&header.emit()[..], &request.reply(mac).emit()].concat()
    })
}

/// The inner frame that answers a neighbour solicitation for one of the addresses.
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
    let ip = ipv6_header(asked.target, to, len, ND_HOP_LIMIT);
    let header = ethernet::Header::new(parsed.src_mac, mac, ethertype::IPV6);
    Some([&header.emit()[..], &ip.emit(), &bytes[..len]].concat())
}

fn time_exceeded_v6(quoted: &[u8], source: Ipv6Addr, destination: Ipv6Addr) -> [u8; 8] {
    let mut out = [3, 0, 0, 0, 0, 0, 0, 0];
    let pseudo = checksum::pseudo_v6(source, destination, ICMPV6, (out.len() + quoted.len()) as u32);
    let sum = checksum::Sum::starting(pseudo).then(&out).then(quoted).finish();
    out[2..4].copy_from_slice(&sum.to_be_bytes());
    out
}

fn ipv4_header(source: Ipv4Addr, destination: Ipv4Addr, payload: usize) -> ipv4::Header {
    ipv4::Header {
        header_len: ipv4::HEADER_LEN as u8,
        traffic_class: 0xc0,
        total_len: (ipv4::HEADER_LEN + payload) as u16,
        identification: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        ttl: HOP_LIMIT,
        protocol: ICMP,
        checksum: 0,
        source,
        destination,
    }
}

fn ipv6_header(source: Ipv6Addr, destination: Ipv6Addr, payload: usize, hop_limit: u8) -> ipv6::Header {
    ipv6::Header {
        traffic_class: 0,
        flow_label: 0,
        payload_len: payload as u16,
        next_header: ICMPV6,
        hop_limit,
        source,
        destination,
    }
}

/// Writes parts one after the other; their length, or 0 without room.
fn concat(out: &mut [u8], parts: &[&[u8]]) -> usize {
    let mut at = 0;
    for part in parts {
        let Some(room) = out.get_mut(at..at + part.len()) else { return 0 };
        room.copy_from_slice(part);
        at += part.len();
    }
    at
}
