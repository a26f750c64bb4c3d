//! Router discovery: solicitations from guests, and advertisements to them (RFC 4861, sections 4.1, 4.2 and 6).

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
/// Maximum length of a solicitation, bytes: a link-layer address, and room for a few future options.
const MAX_LEN: usize = 8 + 8 * 8;
/// Initial hop limit of guests.
const HOP_LIMIT: u8 = 64;
/// M flag: addresses are available by DHCPv6 (RFC 4861, section 4.2).
const MANAGED: u8 = 0x80;
/// L flag: other addresses of the prefix are on-link. Without the A flag, guests do not derive addresses from it
/// (RFC 4861, section 4.6.2).
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

/// Checks that a packet from the guest with the MAC address `mac` is a valid router solicitation (RFC 4861,
/// section 6.1.1). Its checksum is not verified, as for all requests of guests to their own host.
///
/// # Errors
/// [`DropReason::MalformedNeighbour`]: it is not a valid one, is too long, or is truncated;
/// [`DropReason::SpoofedNeighbour`]: it contains another MAC address.
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

/// Appends a router advertisement for the guest of a lease, as ICMPv6 without a checksum. Without a lease it has
/// router lifetime 0: the router is no longer one (RFC 4861, section 6.2.5).
pub(crate) fn advertisement(lease: Option<&Ipv6Lease>, out: &mut Vec<u8>) {
    let lifetime = lease.map_or(0, Ipv6Lease::router_lifetime_s);
    let [high, low] = lifetime.to_be_bytes();
    let flags = if lease.is_some() { MANAGED } else { 0 };
    // Reachable time and retransmission timer are unspecified.
    out.extend([ADVERTISEMENT, 0, 0, 0, HOP_LIMIT, flags, high, low, 0, 0, 0, 0, 0, 0, 0, 0]);
    out.extend([option::SOURCE_MAC, 1]);
    out.extend(GATEWAY_MAC.0);
    let Some(lease) = lease else { return };
    if lease.mtu >= LEAST_MTU {
        out.extend([option::MTU, 1, 0, 0]);
        out.extend(u32::from(lease.mtu).to_be_bytes());
    }
    let lifetime = u32::from(lifetime).to_be_bytes();
    // A single-address prefix contains no other node, and the whole of IPv6 is not on-link, whatever the guest's
    // prefix length is.
    for (prefix, len) in lease.subnets().filter(|(_, len)| (1..128).contains(len)) {
        out.extend([option::PREFIX, 4, len, ON_LINK]);
        // Valid and preferred lifetime.
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
