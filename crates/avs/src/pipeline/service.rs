//! Stage: load balancers. Outbound, the destination of what a guest sends becomes a backend; inbound, the source of the answer becomes the
//! load balancer. What decides is in `service/`.

use std::cell::OnceCell;

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
        Some(balancers) if balancers.has_address(packet.frame.parsed.dst_ip) => choose(packet, balancers, effects),
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
    let view = packet.view.get_or_init(|| View::of(frame, &step));
    packet.frame = Frame { head: view.head(frame), parsed: &view.parsed, ..frame };
    packet.service = Some(step);
    Ok(())
}

/// The packet passes: its connection takes the step. What goes to a guest of this host may be the answer that it waits for.
#[inline(always)]
pub(super) fn outbound_passed(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), DropReason> {
    let mut is_hairpin = false;
    if let Some(step) = &packet.service {
        effects.service(packet.port.port.id, Direction::Egress, step)?;
        is_hairpin = step.is_hairpin;
    }
    match packet.verdict.action {
        Action::Deliver { port, worker: None } if !is_hairpin => {
            translate_back(packet.index.port(port), packet.frame, packet.verdict, effects)
        }
        _ => Ok(()),
    }
}

/// The answer of a backend.
#[inline(always)]
pub(super) fn inbound(packet: &mut Inbound<'_>, effects: &mut impl Effects) -> Result<(), DropReason> {
    translate_back(packet.to, packet.frame, packet.verdict, effects)
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
    let rewrite = verdict.rewrite.unwrap_or_else(|| Rewrite::link(frame.parsed, GATEWAY_MAC, to.mac));
    verdict.rewrite = Some(rewrite.translated(Some(step.translation)));
    Ok(())
}

/// A packet as later stages see it: what its headers will say.
#[derive(Debug)]
pub(crate) struct View {
    parsed: Parsed,
    /// Of an ICMP error, which is judged by what it quotes; as much as that takes.
    head: Option<([u8; HEAD], usize)>,
}

/// Bytes of a frame in which an ICMP error has all that is looked at: Ethernet with two tags, two IP headers with options, and what
/// is behind each.
const HEAD: usize = 192;

impl View {
    /// Nothing so far.
    pub(super) fn none() -> OnceCell<View> {
        OnceCell::new()
    }

    fn of(frame: Frame<'_>, step: &Step) -> View {
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
        View { parsed, head }
    }

    fn head<'a>(&'a self, frame: Frame<'a>) -> &'a [u8] {
        self.head.as_ref().map_or(frame.head, |(head, len)| &head[..*len])
    }
}
