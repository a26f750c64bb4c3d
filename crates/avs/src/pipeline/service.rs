//! Stage: load balancers. Outbound, it rewrites the destination of a guest's packet to a backend; inbound, it
//! rewrites the source of a reply to the load balancer. The decisions are made in `service/`.

use bifrost_nic::{L3, Parsed};
use bifrost_wire::protocol::{ICMP, ICMPV6};

use super::{Inbound, Outbound, Stop, nat};
use crate::answer;
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::frame::Frame;
use crate::ids::{Direction, PortId};
use crate::index::{Index, PortIndex};
use crate::rewrite::{Rewrite, Translation};
use crate::service::{self, Balancers, Step};
use crate::tables::{GATEWAY_MAC, Port};
use crate::verdict::{Action, Verdict};
use crate::vpc::VpcIndex;

/// Chooses the backend. Later stages see the translated packet.
#[inline(always)]
pub(super) fn outbound(packet: &mut Outbound<'_>, effects: &impl Effects) -> Result<(), Stop> {
    match &packet.vpc.balancers {
        Some(balancers) if effects.has_services() && balancers.has_address(packet.frame.parsed.dst_ip) => {
            choose(packet, balancers, effects)
        }
        _ => Ok(()),
    }
}

#[inline(never)]
fn choose(packet: &mut Outbound<'_>, balancers: &Balancers, effects: &impl Effects) -> Result<(), Stop> {
    let frame = packet.frame;
    let p = frame.parsed;
    if !matches!(p.kind, L3::V4 | L3::V6) || p.dst_mac != GATEWAY_MAC {
        return Ok(());
    }
    if p.is_fragment() {
        return Err(DropReason::ServiceFragment.into());
    }
    let port = &packet.port.port;
    let step = if matches!(p.protocol, ICMP | ICMPV6) {
        let Some(step) = service::about_answer(effects.connections(), port, frame) else {
            answer::echo_reply(frame.head, p, packet.answer).ok_or(DropReason::NoService)?;
            return Err(Stop::Answer);
        };
        step
    } else if Translation::is_possible(p) {
        service::begin_or_continue(balancers, effects.connections(), port, frame)?
    } else {
        return Err(DropReason::NoService.into());
    };
    let (at, view) = ((port.id, Direction::Egress), step.view(p));
    let translated = packet.room.get_or_init(|| Translated::new(frame, at, (step.translation, view), Some(step)));
    packet.frame = Frame { head: translated.head(frame), parsed: &translated.parsed, ..frame };
    packet.service = Some(translated);
    Ok(())
}

/// The packet passes: updates its connection. A packet to a guest of this host may also be a reply that must be
/// translated.
#[inline(always)]
pub(super) fn outbound_passed(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), DropReason> {
    if effects.has_services() && packet.index.has_services() { pass(packet, effects) } else { Ok(()) }
}

#[inline(never)]
fn pass(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), DropReason> {
    if let Some(translated) = packet.service {
        if let Some(step) = &translated.step {
            let (port, direction) = translated.at;
            effects.service(port, direction, step)?;
        }
        // Packets to a load balancer are routed, so there is a rewrite.
        let rewrite = packet.verdict.rewrite.as_mut();
        rewrite.into_iter().for_each(|rewrite| rewrite.translate(translated.translation));
        if translated.is_hairpin() {
            return Ok(());
        }
    }
    match packet.verdict.action {
        // A packet is translated only once.
        Action::Deliver { port, .. } if packet.service.is_some() && packet.index.is_uplink(port) => {
            Err(DropReason::NatProtocol)
        }
        Action::Deliver { port, worker: None } if packet.port.uplink.is_none() => {
            deliver(packet.index, (packet.port.port.id, port), packet.frame, packet.verdict, effects)
        }
        _ => Ok(()),
    }
}

/// Delivers a packet from the port `from` to the port `to`; either may be an uplink. The packet has passed the
/// filters.
#[inline(always)]
pub(super) fn deliver(
    index: &Index,
    (from, to): (PortId, PortId),
    frame: Frame<'_>,
    verdict: &mut Verdict,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    let at = index.port(to);
    match at.and_then(|(port, _)| port.uplink) {
        Some(uplink) => nat::depart(index, (from, uplink), frame, verdict, effects),
        None => translate_back(at, frame, verdict, effects),
    }
}

/// Translates the reply of a backend.
#[inline(always)]
pub(super) fn inbound(packet: &mut Inbound<'_>, effects: &mut impl Effects) -> Result<(), DropReason> {
    if effects.has_services() { translate_back(packet.to, packet.frame, packet.verdict, effects) } else { Ok(()) }
}

/// The same for a packet to any port.
#[inline(always)]
pub(super) fn translate_back(
    to: Option<(&PortIndex, &VpcIndex)>,
    frame: Frame<'_>,
    verdict: &mut Verdict,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    match to {
        Some((to, vpc)) if vpc.balancers.is_some() => translate_back_at(&to.port, frame, verdict, effects),
        _ => Ok(()),
    }
}

#[inline(never)]
fn translate_back_at(
    to: &Port,
    frame: Frame<'_>,
    verdict: &mut Verdict,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    if let Some(connection) = service::superseded(effects.connections(), to, frame) {
        effects.supersede(connection);
        return Ok(());
    }
    let Some(step) = service::back(effects.connections(), to, frame) else { return Ok(()) };
    effects.service(to.id, Direction::Ingress, &step)?;
    let rewrite = verdict.rewrite.get_or_insert_with(|| Rewrite::link(frame.parsed, GATEWAY_MAC, to.mac));
    rewrite.translate(step.translation);
    Ok(())
}

/// A packet after translation by a load balancer or NAT, as later stages see it.
#[derive(Debug)]
pub(crate) struct Translated {
    /// What the packet does to its connection, if it has one.
    step: Option<Step>,
    /// The guest whose connection it is, and the packet's direction as seen from that guest.
    at: (PortId, Direction),
    translation: Translation,
    pub(super) parsed: Parsed,
    /// The start of a translated ICMP message, which later stages judge by its content; with its length.
    head: Option<([u8; HEAD], usize)>,
}

/// Bytes of a frame that contain all fields of an ICMP error that are read: Ethernet with two tags, two IP headers
/// with options, and the start of what follows each.
const HEAD: usize = 192;

impl Translated {
    /// `parsed`: the packet's headers after the translation.
    pub(super) fn new(
        frame: Frame<'_>,
        at: (PortId, Direction),
        (translation, parsed): (Translation, Parsed),
        step: Option<Step>,
    ) -> Translated {
        let head = matches!(parsed.protocol, ICMP | ICMPV6).then(|| {
            let mut head = [0; HEAD];
            let len = frame.head.len().min(HEAD);
            head[..len].copy_from_slice(&frame.head[..len]);
            if let Some(packet) = head[..len].get_mut(usize::from(parsed.l3)..) {
                translation.apply(packet, parsed.kind == L3::V6);
            }
            (head, len)
        });
        Translated { step, at, translation, parsed, head }
    }

    /// Whether the packet goes back to the guest that sent it.
    pub(super) fn is_hairpin(&self) -> bool {
        self.step.is_some_and(|step| step.is_hairpin)
    }

    pub(super) fn head<'a>(&'a self, frame: Frame<'a>) -> &'a [u8] {
        self.head.as_ref().map_or(frame.head, |(head, len)| &head[..*len])
    }
}
