//! Stages of NAT: packets from an uplink, and packets to one. The decisions are made in `nat/`.

use bifrost_nic::L3;
use bifrost_wire::arp;

use super::service::Translated;
use super::{Outbound, Stop, filter};
use crate::answer;
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::frame::Frame;
use crate::ids::{Direction, PortId, UplinkId};
use crate::index::Index;
use crate::location::{Location, Owner, VpcId};
use crate::nat::{self, Arrival, Departure, Guests};
use crate::resolution::{self, Message};
use crate::rewrite::Rewrite;
use crate::tables::GATEWAY_MAC;
use crate::verdict::{Action, Verdict};

impl Guests for Index {
    fn network(&self, port: PortId) -> Option<VpcId> {
        self.port(port).map(|(_, vpc)| vpc.id)
    }

    fn at(&self, vpc: VpcId, address: std::net::IpAddr) -> Option<PortId> {
        match self.vpc_of(vpc)?.route(address)?.path.location() {
            Location::Local(port) => Some(port),
            Location::Remote(_) => None,
        }
    }
}

/// A packet from an uplink: finds the guest. Later stages see the packet as the guest will.
#[inline(never)]
pub(super) fn arrive(packet: &mut Outbound<'_>, id: UplinkId, effects: &mut impl Effects) -> Result<(), Stop> {
    let (frame, index) = (packet.frame, packet.index);
    let p = frame.parsed;
    let Some(uplink) = index.uplink(id) else { return Err(DropReason::UnknownPort.into()) };
    if p.vlan.is_some() {
        return Err(DropReason::Vlan.into());
    }
    match p.kind {
        L3::Arp => return arp(packet, id),
        L3::Other => return Err(DropReason::EtherType.into()),
        L3::V4 | L3::V6 => {}
    }
    match resolution::message(frame.head, p)? {
        Some(Message::Solicitation(solicitation)) => {
            uplink.address(solicitation.target.into()).ok_or(DropReason::UnknownNeighbour)?;
            answer::advertisement(&solicitation, GATEWAY_MAC, p, packet.answer);
            return Err(Stop::Answer);
        }
        // The switch never solicits anything on an uplink.
        Some(Message::Advertisement(_)) => return Err(DropReason::OwnAddress.into()),
        None => {}
    }
    if p.dst_mac != GATEWAY_MAC {
        let broadcast = if p.dst_mac.is_broadcast() { DropReason::Broadcast } else { DropReason::Multicast };
        return Err(if p.dst_mac.is_multicast() { broadcast } else { DropReason::UnknownMac }.into());
    }
    if uplink.address(p.src_ip).is_some() {
        return Err(DropReason::SpoofedIp.into());
    }
    if frame.time_to_live() <= 1 {
        return Err(DropReason::TtlExpired.into());
    }
    let arrival = nat::arrive(uplink, index, effects.connections(), frame, None)?;
    let (to, vpc) = index.port(arrival.guest).ok_or(DropReason::NatNoMapping)?;
    // Inside addresses must not appear as sources outside.
    if vpc.owner_by_route(p.src_ip) != Some(Owner::Outside(id)) {
        return Err(DropReason::SpoofedIp.into());
    }
    let Arrival { guest, translation, step, .. } = arrival;
    let (at, view) = ((guest, Direction::Ingress), arrival.view(p));
    if step.is_none() {
        effects.readdressed(guest, Direction::Ingress, p.dst_ip);
    }
    let translated = packet.room.get_or_init(|| Translated::new(frame, at, (translation, view), step));
    packet.frame = Frame { head: translated.head(frame), parsed: &translated.parsed, ..frame };
    packet.service = Some(translated);
    packet.mtu = to.port.mtu;
    let worker = index.other_worker(guest, packet.port.port.mac);
    let rewrite = Some(Rewrite::hop(p, GATEWAY_MAC, to.port.mac));
    *packet.verdict = Verdict { action: Action::Deliver { port: guest, worker }, rewrite, fragment_to: None };
    Ok(())
}

fn arp(packet: &mut Outbound<'_>, id: UplinkId) -> Result<(), Stop> {
    let message = resolution::arp(packet.frame.head, packet.frame.parsed)?;
    if message.operation != arp::Operation::Request || message.is_gratuitous() {
        return Err(DropReason::OwnAddress.into());
    }
    let uplink = packet.index.uplink(id).ok_or(DropReason::UnknownPort)?;
    uplink.address(message.target_ip.into()).ok_or(DropReason::UnknownNeighbour)?;
    answer::arp_reply(&message, GATEWAY_MAC, packet.answer);
    Err(Stop::Answer)
}

/// A packet of the guest behind `from` has passed the filters and leaves through an uplink: translates it. A packet
/// to an outside address of a guest of this host is turned around.
#[inline(never)]
pub(super) fn depart(
    index: &Index,
    (from, id): (PortId, UplinkId),
    frame: Frame<'_>,
    verdict: &mut Verdict,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    let uplink = index.uplink(id).ok_or(DropReason::UnknownPort)?;
    let departure = nat::depart(uplink, index, from, effects.connections(), frame)?;
    let rewrite = verdict.rewrite.get_or_insert_with(|| Rewrite::link(frame.parsed, GATEWAY_MAC, uplink.mac));
    rewrite.translate(departure.translation);
    let turned = match uplink.address(frame.parsed.dst_ip) {
        None => None,
        Some(_) => Some(turn_round(index, id, frame, &departure, verdict, effects)?),
    };
    match &departure.step {
        Some(step) => effects.service(from, Direction::Egress, step)?,
        None => effects.readdressed(from, Direction::Egress, departure.translation.source.address),
    }
    if let Some(Arrival { guest, step: Some(step), .. }) = &turned {
        effects.service(*guest, Direction::Ingress, step)?;
    }
    Ok(())
}

#[cold]
fn turn_round(
    index: &Index,
    id: UplinkId,
    frame: Frame<'_>,
    departure: &Departure,
    verdict: &mut Verdict,
    effects: &mut impl Effects,
) -> Result<Arrival, DropReason> {
    let uplink = index.uplink(id).ok_or(DropReason::UnknownPort)?;
    let arrival = nat::arrive(uplink, index, effects.connections(), frame, Some(departure))?;
    let (to, _) = index.port(arrival.guest).ok_or(DropReason::NatNoMapping)?;
    let translation = nat::turn_round(frame.parsed, departure, &arrival);
    let worker = index.other_worker(arrival.guest, uplink.mac);
    verdict.action = Action::Deliver { port: arrival.guest, worker };
    if let Some(rewrite) = &mut verdict.rewrite {
        rewrite.send_to(to.port.mac);
        rewrite.translate(translation);
    }
    if worker.is_none() {
        let at = (arrival.guest, Direction::Ingress);
        let seen = Translated::new(frame, at, (translation, translation.view(frame.parsed)), None);
        let frame = Frame { head: seen.head(frame), parsed: &seen.parsed, ..frame };
        filter::check(index, arrival.guest, Direction::Ingress, frame, effects)?;
    }
    Ok(arrival)
}
