//! The router that guests find by themselves: what they ask it, and what it says (RFC 4861, sections 4.1, 4.2 and 6).

use std::net::{IpAddr, Ipv6Addr};

use bifrost_nic::Parsed;
use bifrost_wire::icmp::v6;
use bifrost_wire::{Mac, ipv6};

use crate::dns;
use crate::drop_reason::DropReason;
use crate::tables::{GATEWAY_MAC, Ipv6Lease, Lease};

/// ICMPv6 types (RFC 4861, section 4).
pub(crate) const SOLICITATION: u8 = 133;
pub(crate) const ADVERTISEMENT: u8 = 134;
/// Longest solicitation, bytes: with a link-layer address and a few options that nobody knows yet.
const MAX_LEN: usize = 8 + 8 * 8;
/// Hop limit that guests are to begin with.
const HOP_LIMIT: u8 = 64;
/// Addresses are had by DHCPv6 (RFC 4861, section 4.2).
const MANAGED: u8 = 0x80;
/// A subnet's other addresses are reached without a router; none is made of its prefix (RFC 4861, section 4.6.2).
const ON_LINK: u8 = 0x80;
/// The smallest MTU of IPv6, bytes.
const LEAST_MTU: u16 = 1280;

/// Options (RFC 4861, section 4.6; RFC 8106, sections 5.1 and 5.2).
mod option {
    pub(super) const SOURCE_MAC: u8 = 1;
    pub(super) const PREFIX: u8 = 3;
    pub(super) const MTU: u8 = 5;
    pub(super) const DNS: u8 = 25;
    pub(super) const SEARCH: u8 = 31;
}

/// Whether a packet of the guest with the MAC address `mac` is a valid router solicitation (RFC 4861, section 6.1.1). Its checksum is not
/// verified, like that of all that a guest asks its own host.
///
/// # Errors
/// [`DropReason::MalformedNeighbour`]: it is none, is longer than one has to be, or is not all there; [`DropReason::SpoofedNeighbour`]: it
/// names another MAC address.
pub(crate) fn check_solicitation(head: &[u8], parsed: &Parsed, mac: Mac) -> Result<(), DropReason> {
    let message = head.get(usize::from(parsed.l4)..parsed.end as usize).ok_or(DropReason::MalformedNeighbour)?;
    let has_options = usize::from(parsed.l4 - parsed.l3) != ipv6::HEADER_LEN;
    let hop_limit = head.get(usize::from(parsed.l3) + 7);
    if has_options || parsed.is_fragment() || hop_limit != Some(&255) || message.len() > MAX_LEN {
        return Err(DropReason::MalformedNeighbour);
    }
    let Ok(v6::Message::RouterSolicitation { source_mac }) = v6::Message::parse(message) else {
        return Err(DropReason::MalformedNeighbour);
    };
    match (source_mac, parsed.src_ip) {
        (Some(_), IpAddr::V6(source)) if source.is_unspecified() => Err(DropReason::MalformedNeighbour),
        (Some(other), _) if other != mac => Err(DropReason::SpoofedNeighbour),
        _ => Ok(()),
    }
}

/// What the router says to the guest of a lease, ICMPv6 without a checksum. Without a lease: that it is a router no longer (RFC 4861,
/// section 6.2.5).
pub(crate) fn advertisement(lease: Option<&Ipv6Lease>, out: &mut Vec<u8>) {
    let lifetime = lease.map_or(0, Ipv6Lease::router_lifetime_s);
    let [high, low] = lifetime.to_be_bytes();
    let flags = if lease.is_some() { MANAGED } else { 0 };
    // Reachable and retransmission times are not specified.
    out.extend([ADVERTISEMENT, 0, 0, 0, HOP_LIMIT, flags, high, low, 0, 0, 0, 0, 0, 0, 0, 0]);
    out.extend([option::SOURCE_MAC, 1]);
    out.extend(GATEWAY_MAC.0);
    let Some(lease) = lease else { return };
    if lease.mtu >= LEAST_MTU {
        out.extend([option::MTU, 1, 0, 0]);
        out.extend(u32::from(lease.mtu).to_be_bytes());
    }
    let lifetime = u32::from(lifetime).to_be_bytes();
    // Nobody else is in the subnet of a single address; the whole of IPv6 is not on the link, whatever the guest's prefix says.
    for (prefix, len) in lease.subnets().filter(|(_, len)| (1..128).contains(len)) {
        out.extend([option::PREFIX, 4, len, ON_LINK]);
        // Valid, and preferred.
        out.extend([lifetime; 2].as_flattened());
        out.extend([0; 4]);
        out.extend(prefix.octets());
    }
    let servers: Vec<Ipv6Addr> = lease.dns.iter().copied().take(Lease::MAX_DNS).collect();
    if !servers.is_empty() {
        out.extend([option::DNS, 1 + 2 * servers.len() as u8, 0, 0]);
        out.extend(lifetime);
        out.extend(servers.iter().flat_map(|server| server.octets()));
    }
    if let Some(mut domain) = lease.domain.as_deref().and_then(dns::wire) {
        domain.resize(domain.len().next_multiple_of(8), 0);
        out.extend([option::SEARCH, 1 + (domain.len() / 8) as u8, 0, 0]);
        out.extend(lifetime);
        out.extend(domain);
    }
}
