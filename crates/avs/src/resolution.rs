//! Address resolution: ARP and neighbor discovery messages that are valid, and pass without being judged by rules.
//!
//! The switch replies to guests' requests itself, so such messages need to pass between guests in two cases only: a
//! request from a device behind a peer without this switch goes to the port that it asks about, and that guest's
//! reply goes back to the peer. These messages are limited in length, so they cannot carry anything else.

use std::net::{IpAddr, Ipv6Addr};

use bifrost_nic::{L3, Parsed};
use bifrost_wire::icmp::v6;
use bifrost_wire::protocol::ICMPV6;
use bifrost_wire::{arp, ipv6};

use crate::drop_reason::DropReason;
use crate::router;

/// ICMPv6 types (RFC 4861, section 4).
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;

/// Maximum length of a valid message, bytes: a target, and three options of 8 bytes, of which guests use a link-layer
/// address and a nonce (RFC 7527).
const MAX_LEN: usize = 24 + 3 * 8;
/// Maximum length of a packet with ARP, bytes: what fits into a frame of minimum size.
const MAX_ARP_LEN: usize = 46;

/// A valid neighbour message. All other router and neighbour discovery messages are rejected, or treated as ordinary
/// packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Solicitation(v6::Solicitation),
    Advertisement(v6::Advertisement),
}

/// Parses a packet's neighbour message, if it is one.
///
/// # Errors
/// [`DropReason::SpoofedNeighbour`] for messages that only routers send. [`DropReason::MalformedNeighbour`] for
/// truncated ICMPv6, and for a neighbour message that is invalid (RFC 4861, section 7.1), fragmented (RFC 6980), or
/// too long.
#[inline(always)]
pub(crate) fn message(head: &[u8], parsed: &Parsed) -> Result<Option<Message>, DropReason> {
    if parsed.kind != L3::V6 || parsed.protocol != ICMPV6 { Ok(None) } else { of_icmpv6(head, parsed) }
}

#[cold]
fn of_icmpv6(head: &[u8], parsed: &Parsed) -> Result<Option<Message>, DropReason> {
    if parsed.fragment.is_some_and(|fragment| fragment.offset != 0) {
        return Ok(None);
    }
    let end = head.len().min(parsed.end as usize);
    let bytes = head.get(usize::from(parsed.l4)..end).unwrap_or_default();
    let fixed = bytes.first_chunk::<{ v6::HEADER_LEN }>().ok_or(DropReason::MalformedNeighbour)?;
    let (kind, code) = (fixed[0], fixed[1]);
    match kind {
        router::ADVERTISEMENT | REDIRECT => Err(DropReason::SpoofedNeighbour),
        router::SOLICITATION | SOLICITATION | ADVERTISEMENT if parsed.is_fragment() => {
            Err(DropReason::MalformedNeighbour)
        }
        SOLICITATION | ADVERTISEMENT => {
            let len = parsed.end as usize - usize::from(parsed.l4);
            let hop_limit = head.get(usize::from(parsed.l3) + 7);
            if code != 0 || hop_limit != Some(&255) || len > MAX_LEN || len != bytes.len() {
                return Err(DropReason::MalformedNeighbour);
            }
            valid(bytes, parsed).map(Some).ok_or(DropReason::MalformedNeighbour)
        }
        _ => Ok(None),
    }
}

/// Parses a message of a neighbour type; `None` if it is not about a single unicast address, or has a wrong
/// destination.
fn valid(bytes: &[u8], parsed: &Parsed) -> Option<Message> {
    let IpAddr::V6(destination) = parsed.dst_ip else { return None };
    let found = match v6::Message::parse(bytes).ok()? {
        v6::Message::Solicitation(solicitation) => {
            let target = solicitation.target;
            // The solicited-node group, which contains the last three bytes of the address.
            let [.., a, b, c] = destination.octets();
            let group = v6::solicited_node(Ipv6Addr::from_octets([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c]));
            (destination == target || destination == group).then_some(())?;
            (!target.is_multicast()).then_some(Message::Solicitation(solicitation))
        }
        v6::Message::Advertisement(advertisement) => {
            let refused =
                advertisement.target.is_multicast() || (advertisement.solicited && destination.is_multicast());
            (!refused).then_some(Message::Advertisement(advertisement))
        }
        _ => None,
    };
    // The message must directly follow the fixed header: receivers ignore one after a fragment header (RFC 6980), and
    // no other extension header belongs there.
    found.filter(|_| usize::from(parsed.l4 - parsed.l3) == ipv6::HEADER_LEN)
}

/// Parses the ARP packet of a frame.
///
/// # Errors
/// [`DropReason::MalformedNeighbour`], also if the packet is longer than the padding of a minimum-size frame
/// explains.
pub(crate) fn arp(head: &[u8], parsed: &Parsed) -> Result<arp::Packet, DropReason> {
    if parsed.packet_len() > MAX_ARP_LEN {
        return Err(DropReason::MalformedNeighbour);
    }
    let body = head.get(usize::from(parsed.l3)..).unwrap_or_default();
    arp::Packet::parse(body).map_err(|_| DropReason::MalformedNeighbour)
}
