//! Stage: where a packet goes: by its MAC address or, if it is routed by the gateway, by its IP address.

use std::net::IpAddr;

use bifrost_wire::protocol::TCP;
use bifrost_wire::{Mac, Vni};

use super::{Inbound, Outbound, Stop, dhcp, dns, learn, metadata, router};
use crate::answer;
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::location::{Location, Owner, Path};
use crate::rewrite::Rewrite;
use crate::tables::{GATEWAY_MAC, Reliability};
use crate::verdict::{Action, Verdict};
use crate::vpc::is_host;

#[inline(always)]
pub(super) fn outbound(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let p = packet.frame.parsed;
    if packet.is_resolution {
        return to_who_asked(packet, effects);
    }
    if p.dst_mac.is_multicast() {
        return to_group(packet, effects);
    }
    if p.dst_mac == GATEWAY_MAC && packet.vpc.has_gateway() {
        return through_gateway(packet, effects);
    }
    switched(packet, is_reliable(packet), effects)
}

/// To a group: the frame is not forwarded, but it may be a message to a DHCP server or to routers.
#[cold]
fn to_group(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    dhcp::outbound(packet, effects)?;
    router::outbound(packet, effects)?;
    Err(group(packet.frame.parsed.dst_mac).into())
}

/// To the gateway itself.
#[cold]
fn to_gateway(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    dhcp::outbound(packet, effects)?;
    router::outbound(packet, effects)?;
    dns::outbound(packet, effects)?;
    metadata::outbound(packet, effects)?;
    let frame = packet.frame;
    answer::echo_reply(frame.head, frame.parsed, packet.answer).ok_or(DropReason::GatewayService)?;
    Err(Stop::Answer)
}

fn group(mac: Mac) -> DropReason {
    if mac.is_broadcast() { DropReason::Broadcast } else { DropReason::Multicast }
}

#[inline(always)]
fn is_reliable(packet: &Outbound<'_>) -> bool {
    match packet.vpc.reliability {
        Reliability::Tcp => packet.frame.parsed.protocol == TCP,
        Reliability::All => true,
        Reliability::Off => false,
    }
}

/// Forwards a packet unchanged to the vNIC with the destination MAC address.
#[inline(always)]
fn switched(packet: &mut Outbound<'_>, reliable: bool, effects: &mut impl Effects) -> Result<(), Stop> {
    let to = packet.frame.parsed.dst_mac;
    let path = match packet.vpc.path(to) {
        Some(path) => path,
        None => learn::path(packet, effects)?,
    };
    Ok(forward(packet, (packet.vpc.vni, to), path, None, reliable)?)
}

#[inline(always)]
fn forward(
    packet: &mut Outbound<'_>,
    (vni, remote): (Vni, Mac),
    path: Path,
    rewrite: Option<Rewrite>,
    reliable: bool,
) -> Result<(), DropReason> {
    let from = &packet.port.port;
    let action = match path.location() {
        Location::Local(port) if port == from.id && !is_hairpin(packet) => return Err(DropReason::Loop),
        // It stays with the worker that serves the port.
        Location::Local(port) if port == from.id => Action::Deliver { port, worker: None },
        Location::Local(port) => Action::Deliver { port, worker: packet.index.other_worker(port, from.mac) },
        Location::Remote(peer) => {
            Action::Forward { vni, peer, local: from.mac, remote, reliable, ordering: packet.vpc.ordering }
        }
    };
    packet.mtu = path.mtu;
    *packet.verdict = Verdict { action, rewrite, fragment_to: None };
    Ok(())
}

/// Whether a load balancer sends the packet back to its guest.
fn is_hairpin(packet: &Outbound<'_>) -> bool {
    packet.service.is_some_and(|balanced| balanced.is_hairpin())
}

/// Forwards a reply about the guest's own address to a vNIC on a network without this switch. Guests of this host did
/// not ask, because the switch replies to them itself.
#[cold]
fn to_who_asked(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    switched(packet, false, effects)?;
    if matches!(packet.verdict.action, Action::Deliver { .. }) { Err(DropReason::OwnAddress.into()) } else { Ok(()) }
}

/// A packet to the gateway's MAC address: for the gateway itself, or routed.
#[inline(always)]
fn through_gateway(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let frame = packet.frame;
    let p = frame.parsed;
    let owner = packet.vpc.owner_by_route(p.dst_ip);
    if matches!(owner, Some(Owner::Own)) && packet.vpc.is_gateway(p.dst_ip) {
        return to_gateway(packet, effects);
    }
    // The source is one of the guest's addresses, all of which are host addresses.
    if is_link_local(p.src_ip) || !is_routable(p.dst_ip) {
        return Err(DropReason::NotRoutable.into());
    }
    // If `head` did not contain the TTL, it would count as expired; the parser has read it, so this does not happen.
    if frame.time_to_live() <= 1 {
        return Err(DropReason::TtlExpired.into());
    }
    let hop = packet.index.next_hop_to(packet.vpc, owner, p.src_ip, p.dst_ip);
    let (hop, vpc) = match hop {
        Some(found) => found,
        None => return Err(learn::unrouted(packet, owner, effects)),
    };
    // The transport identifies a connection by two vNICs of one network.
    let reliable = vpc.vni == packet.vpc.vni && is_reliable(packet);
    let rewrite = Some(Rewrite::hop(p, GATEWAY_MAC, hop.mac));
    Ok(forward(packet, (vpc.vni, hop.mac), hop.path, rewrite, reliable)?)
}

/// Whether a router may forward packets from or to the address (RFC 4291, section 2.5; RFC 3927, section 7).
pub(super) fn is_routable(addr: IpAddr) -> bool {
    is_host(addr) && !is_link_local(addr)
}

fn is_link_local(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(a) => a.is_link_local(),
        IpAddr::V6(a) => a.is_unicast_link_local(),
    }
}

/// Delivers to the port that has the destination MAC address, or that a request asks about.
#[inline(always)]
pub(super) fn inbound(packet: &mut Inbound<'_>) -> Result<(), DropReason> {
    let port = match packet.port {
        Some(port) => port,
        None => {
            let to = packet.frame.parsed.dst_mac;
            if to.is_multicast() {
                return Err(group(to));
            }
            match packet.vpc.location(to) {
                Some(Location::Local(port)) => port,
                Some(Location::Remote(_)) => return Err(DropReason::NotHere),
                None => return Err(DropReason::UnknownMac),
            }
        }
    };
    packet.port = Some(port);
    packet.to = packet.index.port(port);
    *packet.verdict = Verdict::unchanged(Action::Deliver { port, worker: None });
    Ok(())
}
