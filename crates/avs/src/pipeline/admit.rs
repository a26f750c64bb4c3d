//! Stage: whether the sender may send this frame at all. It must use its own addresses.

use std::net::IpAddr;

use bifrost_nic::{L3, Parsed};
use bifrost_wire::protocol::{ICMPV6, UDP};

use super::route::is_routable;
use super::{Inbound, Outbound};
use crate::dhcpv6;
use crate::drop_reason::DropReason;
use crate::frame::Frame;
use crate::index::PortIndex;
use crate::location::{Location, Owner, VpcId};
use crate::mutation::mutated;
use crate::tables::GATEWAY_MAC;
use crate::vpc::link_local;

/// Checks that a guest uses its own addresses.
#[inline(always)]
pub(super) fn outbound(packet: &Outbound<'_>) -> Result<(), DropReason> {
    let (p, port) = (packet.frame.parsed, &packet.port.port);
    if p.src_mac != port.mac {
        return Err(DropReason::SpoofedMac);
    }
    if p.vlan.is_some() {
        return Err(DropReason::Vlan);
    }
    match p.kind {
        // The next stage checks it in full.
        L3::Arp => Ok(()),
        L3::Other => Err(DropReason::EtherType),
        L3::V6 if is_to_dhcpv6_client(packet.frame) && !mutated!(packet.index, DhcpServerUnseen) => {
            Err(DropReason::DhcpServer)
        }
        L3::V4 | L3::V6 if is_own(packet.port, p.src_ip) || has_no_address_yet(p) || is_routed(packet) => Ok(()),
        L3::V4 | L3::V6 => Err(DropReason::SpoofedIp),
    }
}

/// Whether a packet, or the first of its fragments, goes to a port to which only servers and relays send (RFC 7610).
#[inline(always)]
fn is_to_dhcpv6_client(frame: Frame<'_>) -> bool {
    let p = frame.parsed;
    p.protocol == UDP && (p.dst_port == dhcpv6::CLIENT_PORT || (p.is_fragment() && is_begun_to_client(frame)))
}

#[cold]
fn is_begun_to_client(frame: Frame<'_>) -> bool {
    let whole = frame.parsed.as_whole(frame.head);
    whole.is_some_and(|whole| whole.parsed.dst_port == dhcpv6::CLIENT_PORT)
}

/// Whether the guest of a port may use an address, alone or shared with others.
#[inline(always)]
pub(super) fn is_own(index: &PortIndex, addr: IpAddr) -> bool {
    let port = &index.port;
    port.addresses.contains(&addr) || addr == IpAddr::V6(link_local(port.mac)) || index.shared.contains(&addr)
}

/// Whether a packet comes from a network behind the guest, if it is a router: no other vNIC may have the source
/// address.
fn is_routed(packet: &Outbound<'_>) -> bool {
    let (port, from) = (&packet.port.port, packet.frame.parsed.src_ip);
    let at = |owner| matches!(owner, Owner::Vnic(hop) if hop.path.location() == Location::Local(port.id));
    !port.routed.is_empty() && is_routable(from) && packet.vpc.owner_by_route(from).is_some_and(at)
}

/// Whether a guest may send this before it has an address: DHCP, duplicate address detection, and joining the groups
/// for it.
fn has_no_address_yet(p: &Parsed) -> bool {
    let allowed = match p.kind {
        L3::V4 => p.protocol == UDP && (p.src_port, p.dst_port) == (68, 67),
        _ => p.protocol == ICMPV6,
    };
    p.src_ip.is_unspecified() && p.dst_mac.is_multicast() && allowed
}

/// Checks that the source is at the peer: by its MAC address, or by its route for packets that came through the
/// gateway. A source address that is known to be elsewhere is rejected even if the MAC address is right.
#[inline(always)]
pub(super) fn inbound(packet: &Inbound<'_>) -> Result<(), DropReason> {
    let p = packet.frame.parsed;
    if p.vlan.is_some() {
        return Err(DropReason::Vlan);
    }
    if p.kind == L3::Other {
        return Err(DropReason::EtherType);
    }
    let by_mac = packet.vpc.location(p.src_mac) == Some(Location::Remote(packet.peer));
    let by_address = is_at_peer(packet, p.src_ip)?;
    if by_mac || (p.src_mac == GATEWAY_MAC && by_address) { Ok(()) } else { may_be_learned(packet, by_address) }
}

/// Whether the sender may be a vNIC at the peer to which no route was learned yet. Its host has checked that it uses
/// its own addresses; here only what is known to be elsewhere is rejected.
#[cold]
fn may_be_learned(packet: &Inbound<'_>, by_address: bool) -> Result<(), DropReason> {
    let (p, vpc) = (packet.frame.parsed, packet.vpc);
    let by_mac = p.src_mac != GATEWAY_MAC && vpc.may_learn_vnic_at(p.src_mac, packet.peer);
    let routed = p.src_mac == GATEWAY_MAC && by_address;
    let is_link_local =
        p.src_ip.is_unspecified() || matches!(p.src_ip, IpAddr::V6(addr) if addr.is_unicast_link_local());
    if routed || (by_mac && (by_address || is_link_local)) { Ok(()) } else { Err(DropReason::WrongPeer) }
}

/// Whether an address is at the peer; `false` if it is unknown.
#[inline(always)]
pub(super) fn is_at_peer(packet: &Inbound<'_>, addr: IpAddr) -> Result<bool, DropReason> {
    match packet.vpc.owner(addr) {
        None => Ok(may_be_at_peer(packet, addr) || packet.vpc.may_learn_address_at(addr, packet.peer)),
        Some(Owner::Vnic(hop)) if hop.path.location() == Location::Remote(packet.peer) => Ok(true),
        Some(Owner::Vnic(_)) if may_be_at_peer(packet, addr) => Ok(true),
        Some(Owner::Outside(_)) if packet.vpc.may_learn_address_at(addr, packet.peer) => Ok(true),
        Some(Owner::Vnic(_) | Owner::Outside(_) | Owner::Own) => Err(DropReason::WrongPeer),
        Some(Owner::Peered(other)) => is_across_at_peer(packet, other, addr),
    }
}

/// Whether a vNIC at the peer shares an address with others. It may use the address, no matter which vNIC is known to
/// hold it.
#[cold]
fn may_be_at_peer(packet: &Inbound<'_>, addr: IpAddr) -> bool {
    let at = Some(Location::Remote(packet.peer));
    packet.vpc.has_shared() && packet.vpc.sharers(addr).any(|mac| packet.vpc.location(mac) == at)
}

/// Whether an address of another network, with a route to the destination, is at the peer. Such packets must come
/// through the gateway, because that network is not on the same link.
#[cold]
fn is_across_at_peer(packet: &Inbound<'_>, other: VpcId, addr: IpAddr) -> Result<bool, DropReason> {
    let p = packet.frame.parsed;
    let across = packet.index.across(packet.vpc, other, p.dst_ip, addr);
    let at_peer = match across {
        Some((hop, _)) => hop.path.location() == Location::Remote(packet.peer),
        None => packet.index.vpc_of(other).is_some_and(|of| {
            let is_unknown = of.owner_by_route(addr).is_none_or(|owner| matches!(owner, Owner::Outside(_)));
            is_unknown && packet.index.is_way(packet.vpc, of, p.dst_ip) && of.may_learn_address_at(addr, packet.peer)
        }),
    };
    if at_peer && p.src_mac == GATEWAY_MAC { Ok(true) } else { Err(DropReason::WrongPeer) }
}
