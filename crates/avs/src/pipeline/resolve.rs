//! Stage: ARP and neighbor discovery. The switch replies to guests' requests itself; nothing is broadcast.

use std::net::IpAddr;

use bifrost_nic::L3;
use bifrost_wire::{Mac, arp};

use super::admit::{is_at_peer, is_own};
use super::{Inbound, Outbound, Stop, learn};
use crate::answer;
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::ids::PortId;
use crate::location::{Location, Owner};
use crate::mutation::mutated;
use crate::resolution::{self, Message};

/// Replies to a guest's request. A reply about the guest's own address is forwarded to the vNIC that asked.
#[inline(always)]
pub(super) fn outbound(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let p = packet.frame.parsed;
    if p.kind == L3::Arp {
        return arp(packet, effects);
    }
    match resolution::message(packet.frame.head, p) {
        Ok(None) => Ok(()),
        Ok(Some(message)) => neighbor_discovery(packet, message, effects),
        Err(DropReason::SpoofedNeighbour) if mutated!(packet.index, RouterUnseen) => Ok(()),
        Err(reason) => Err(reason.into()),
    }
}

fn arp(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let (frame, port) = (packet.frame, packet.port);
    let message = resolution::arp(frame.head, frame.parsed)?;
    let request = message.operation == arp::Operation::Request;
    let probe = request && message.sender_ip.is_unspecified();
    if message.sender_mac != port.port.mac || !(probe || is_own(port, IpAddr::V4(message.sender_ip))) {
        return Err(DropReason::SpoofedArp.into());
    }
    let target = IpAddr::V4(message.target_ip);
    // A guest may resolve the holder of an address that it shares. A guest that is about to take the address, which a
    // probe or an announcement shows, gets no reply.
    let is_asked = !probe && !message.is_gratuitous() && port.shared.contains(&target);
    if is_own(port, target) && !is_asked {
        return Err(DropReason::OwnAddress.into());
    }
    if !request {
        packet.is_resolution = true;
        return if frame.parsed.dst_mac.is_multicast() { Err(DropReason::Broadcast.into()) } else { Ok(()) };
    }
    let mac = neighbour(packet, target, effects)?;
    answer::arp_reply(&message, mac, packet.answer);
    Err(Stop::Answer)
}

fn neighbor_discovery(packet: &mut Outbound<'_>, message: Message, effects: &mut impl Effects) -> Result<(), Stop> {
    let (frame, port) = (packet.frame, packet.port);
    match message {
        Message::Solicitation(solicitation) => {
            if solicitation.source_mac.is_some_and(|mac| mac != port.port.mac) {
                return Err(DropReason::SpoofedNeighbour.into());
            }
            let target = IpAddr::V6(solicitation.target);
            let is_asked = !frame.parsed.src_ip.is_unspecified() && port.shared.contains(&target);
            if is_own(port, target) && !is_asked {
                return Err(DropReason::OwnAddress.into());
            }
            let mac = neighbour(packet, target, effects)?;
            answer::advertisement(&solicitation, mac, frame.parsed, packet.answer);
            Err(Stop::Answer)
        }
        Message::Advertisement(a) => {
            let own = is_own(port, IpAddr::V6(a.target)) && a.target_mac.is_none_or(|mac| mac == port.port.mac);
            if !own || a.router {
                return Err(DropReason::SpoofedNeighbour.into());
            }
            packet.is_resolution = true;
            if frame.parsed.dst_mac.is_multicast() { Err(DropReason::OwnAddress.into()) } else { Ok(()) }
        }
    }
}

/// The MAC address that has an address, unless it is the requesting guest's own: the guest knows better what is
/// behind itself.
fn neighbour(packet: &mut Outbound<'_>, address: IpAddr, effects: &mut impl Effects) -> Result<Mac, Stop> {
    match packet.vpc.resolve(address) {
        Some(mac) if mac != packet.port.port.mac => Ok(mac),
        Some(_) => Err(DropReason::UnknownNeighbour.into()),
        // An address that is elsewhere, such as behind an uplink, is not one of this network's.
        None if packet.vpc.owner(address).is_some_and(|owner| !matches!(owner, Owner::Outside(_))) => {
            Err(DropReason::UnknownNeighbour.into())
        }
        None => Err(learn::ask(packet, packet.vpc, address, DropReason::UnknownNeighbour, effects)),
    }
}

/// A request, which may be a broadcast, is delivered to the port that it asks about. Peers with this switch never
/// send requests; plain VXLAN devices do. Replies are not delivered: requests of guests never leave their host.
#[inline(always)]
pub(super) fn inbound(packet: &mut Inbound<'_>) -> Result<(), DropReason> {
    let p = packet.frame.parsed;
    if p.kind == L3::Arp {
        packet.port = Some(arp_of_peer(packet)?);
    } else if let Some(message) = resolution::message(packet.frame.head, p)? {
        packet.port = Some(neighbor_discovery_of_peer(packet, message)?);
    }
    Ok(())
}

fn arp_of_peer(packet: &Inbound<'_>) -> Result<PortId, DropReason> {
    let p = packet.frame.parsed;
    let message = resolution::arp(packet.frame.head, p)?;
    if message.sender_mac != p.src_mac {
        return Err(DropReason::SpoofedArp);
    }
    if message.is_gratuitous() || message.operation == arp::Operation::Reply {
        return Err(DropReason::OwnAddress);
    }
    port_of(packet, IpAddr::V4(message.target_ip))
}

fn neighbor_discovery_of_peer(packet: &Inbound<'_>, message: Message) -> Result<PortId, DropReason> {
    let p = packet.frame.parsed;
    match message {
        Message::Solicitation(s) => {
            if s.source_mac.is_some_and(|mac| mac != p.src_mac) {
                return Err(DropReason::SpoofedNeighbour);
            }
            port_of(packet, IpAddr::V6(s.target))
        }
        Message::Advertisement(a) => {
            let honest = a.target_mac.is_none_or(|mac| mac == p.src_mac) && !a.router;
            let own = honest && is_at_peer(packet, IpAddr::V6(a.target)).unwrap_or(false);
            Err(if own { DropReason::OwnAddress } else { DropReason::SpoofedNeighbour })
        }
    }
}

fn port_of(packet: &Inbound<'_>, target: IpAddr) -> Result<PortId, DropReason> {
    match packet.vpc.vnic(target).map(|hop| hop.path.location()) {
        Some(Location::Local(port)) => Ok(port),
        Some(Location::Remote(_)) => Err(DropReason::NotHere),
        None => Err(DropReason::UnknownNeighbour),
    }
}
