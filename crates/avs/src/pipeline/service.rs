//! Stage: load balancers. Outbound, the destination of what a guest sends becomes a backend; inbound, the source of the answer becomes the
//! load balancer. What decides is in `service/`.

use bifrost_nic::{L3, Parsed};
use bifrost_wire::protocol::{ICMP, ICMPV6};

use super::{Inbound, Outbound, Stop};
use crate::answer;
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::frame::Frame;
use crate::ids::Direction;
use crate::index::PortIndex;
use crate::rewrite::{Rewrite, Translation};
use crate::service::{self, Balancers, Step};
use crate::tables::{GATEWAY_MAC, Port};
use crate::verdict::{Action, Verdict};
use crate::vpc::VpcIndex;

/// Chooses. Later stages see the packet as it will be.
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
    let balanced = packet.room.get_or_init(|| Balanced::new(frame, step));
    packet.frame = Frame { head: balanced.head(frame), parsed: &balanced.parsed, ..frame };
    packet.service = Some(balanced);
    Ok(())
}

/// The packet passes: its connection takes the step. What goes to a guest of this host may be the answer that it waits for.
#[inline(always)]
pub(super) fn outbound_passed(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), DropReason> {
    if effects.has_services() && packet.index.has_balancers() { pass(packet, effects) } else { Ok(()) }
}

#[inline(never)]
fn pass(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), DropReason> {
    if let Some(balanced) = packet.service {
        effects.service(packet.port.port.id, Direction::Egress, &balanced.step)?;
        // It goes through the gateway.
        let rewrite = packet.verdict.rewrite.as_mut();
        rewrite.into_iter().for_each(|rewrite| rewrite.translate(balanced.step.translation));
        if balanced.step.is_hairpin {
            return Ok(());
        }
    }
    match packet.verdict.action {
        Action::Deliver { port, worker: None } => {
            translate_back(packet.index.port(port), packet.frame, packet.verdict, effects)
        }
        _ => Ok(()),
    }
}

/// The answer of a backend.
#[inline(always)]
pub(super) fn inbound(packet: &mut Inbound<'_>, effects: &mut impl Effects) -> Result<(), DropReason> {
    if effects.has_services() { translate_back(packet.to, packet.frame, packet.verdict, effects) } else { Ok(()) }
}

/// The same of what is for any port.
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
    let Some(step) = service::back(effects.connections(), to, frame) else { return Ok(()) };
    effects.service(to.id, Direction::Ingress, &step)?;
    let rewrite = verdict.rewrite.get_or_insert_with(|| Rewrite::link(frame.parsed, GATEWAY_MAC, to.mac));
    rewrite.translate(step.translation);
    Ok(())
}

/// What a load balancer does with a packet, and what later stages see of that: what its headers will say.
#[derive(Debug)]
pub(crate) struct Balanced {
    step: Step,
    parsed: Parsed,
    /// Of an ICMP error, which is judged by what it quotes; as much as that takes.
    head: Option<([u8; HEAD], usize)>,
}

/// Bytes of a frame in which an ICMP error has all that is looked at: Ethernet with two tags, two IP headers with options, and what
/// is behind each.
const HEAD: usize = 192;

impl Balanced {
    fn new(frame: Frame<'_>, step: Step) -> Balanced {
        let parsed = step.view(frame.parsed);
        let head = step.is_error().then(|| {
            let mut head = [0; HEAD];
            let len = frame.head.len().min(HEAD);
            head[..len].copy_from_slice(&frame.head[..len]);
            if let Some(packet) = head[..len].get_mut(usize::from(parsed.l3)..) {
                step.translation.apply(packet, parsed.kind == L3::V6);
            }
            (head, len)
        });
        Balanced { step, parsed, head }
    }

    /// Whether the packet goes back to the guest that sent it.
    pub(super) fn is_hairpin(&self) -> bool {
        self.step.is_hairpin
    }

    fn head<'a>(&'a self, frame: Frame<'a>) -> &'a [u8] {
        self.head.as_ref().map_or(frame.head, |(head, len)| &head[..*len])
    }
}
