//! Stage: whether a packet may pass. The ACL of a port's network is evaluated first, then the port's security groups.
//! Packets between two guests of this host are checked at both ports.

use bifrost_nic::{L3, Parsed};
use bifrost_wire::Mac;
use bifrost_wire::protocol::{ICMP, ICMPV6};

use super::{Inbound, Outbound};
use crate::acl::Acl;
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::fragments::{First, Piece};
use crate::frame::Frame;
use crate::groups::{About, GroupPolicy, Judgement, Permission};
use crate::ids::{Direction, PortId};
use crate::index::{Index, PortIndex};
use crate::location::VpcId;
use crate::mutation::mutated;
use crate::resolution;
use crate::rule_log::Ruling;
use crate::session::{self, Quote};
use crate::tables::GATEWAY_MAC;
use crate::verdict::Action;
use crate::vpc::VpcIndex;

#[inline(always)]
pub(super) fn outbound(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), DropReason> {
    if effects.has_services() && packet.service.is_some_and(|balanced| balanced.is_hairpin()) {
        // A guest may talk to itself.
        return Ok(());
    }
    check_at(packet.index, (packet.port, packet.vpc), Direction::Egress, packet.frame, effects)?;
    match packet.verdict.action {
        // If another worker serves the pair, its switch has the receiver's sessions, and applies the ingress rules.
        Action::Deliver { port, worker: None } => check(packet.index, port, Direction::Ingress, packet.frame, effects),
        _ => Ok(()),
    }
}

#[inline(always)]
pub(super) fn inbound(packet: &mut Inbound<'_>, effects: &mut impl Effects) -> Result<(), DropReason> {
    match packet.to {
        Some(to) => check_at(packet.index, to, Direction::Ingress, packet.frame, effects),
        None => Ok(()),
    }
}

/// Checks a packet against the ACL of a port's network and the port's security groups.
#[inline(always)]
pub(super) fn check(
    index: &Index,
    port: PortId,
    direction: Direction,
    frame: Frame<'_>,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    let at = index.port(port).ok_or(DropReason::UnknownPort)?;
    check_at(index, at, direction, frame, effects)
}

#[inline(always)]
fn check_at(
    index: &Index,
    at: (&PortIndex, &VpcIndex),
    direction: Direction,
    frame: Frame<'_>,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    let (port, vpc) = at;
    if frame.parsed.is_fragment() {
        return check_fragment(index, at, direction, frame, effects);
    }
    let exempt = is_exempt(index, frame);
    if let Some(acl) = &vpc.acl {
        by_acl(acl, (port.port.id, direction), frame, exempt, effects)?;
    }
    let Some(policy) = index.policy(port) else { return Ok(()) };
    by_groups(index, at, policy, direction, frame, exempt, effects)
}

/// Whether a packet is exempt from rules: a valid ARP or neighbor discovery message.
#[inline(always)]
fn is_exempt(index: &Index, Frame { head, parsed, .. }: Frame<'_>) -> bool {
    let _ = index;
    if mutated!(index, NeighboursExempt)
        && (parsed.kind, parsed.protocol) == (L3::V6, ICMPV6)
        && head.get(usize::from(parsed.l4)).is_some_and(|kind| (133..=137).contains(kind))
    {
        return true;
    }
    parsed.kind == L3::Arp || matches!(resolution::message(head, parsed), Ok(Some(_)))
}

#[inline(always)]
fn by_acl(
    acl: &Acl,
    (port, direction): (PortId, Direction),
    frame: Frame<'_>,
    exempt: bool,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    let rule = if exempt { None } else { acl.judge(direction, frame.parsed) };
    effects.acl(port, direction, rule);
    if let (Some(logs), Some((place, accepted))) = (&acl.logs, rule)
        && let Some(rule) = &logs[direction as usize][place]
    {
        effects.log((port, direction), frame, Ruling { rule, accepted, begins: false });
    }
    if rule.is_some_and(|(_, allow)| !allow) { Err(DropReason::Acl) } else { Ok(()) }
}

/// Checks a packet against the security groups of a port. Not inlined, because most ports have none; the functions
/// that it calls are inlined into it.
#[inline(never)]
fn by_groups(
    index: &Index,
    (port, vpc): (&PortIndex, &VpcIndex),
    policy: &GroupPolicy,
    direction: Direction,
    frame: Frame<'_>,
    exempt: bool,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    let (id, parsed) = (port.port.id, frame.parsed);
    let about = match parsed.protocol {
        _ if exempt => About::Resolution,
        ICMP | ICMPV6 => about(index, vpc, session::error(id, direction, frame.head, parsed), parsed),
        _ => About::Packets,
    };
    let judgement = policy.judge(effects.memory(), id, direction, frame.head, parsed, about);
    conclude(policy, (id, direction), frame, judgement, effects)
}

/// Applies the decision of a port's security groups. A rule that accepts is logged only if the session actually
/// begins.
#[inline(always)]
fn conclude(
    policy: &GroupPolicy,
    at: (PortId, Direction),
    frame: Frame<'_>,
    judgement: Judgement,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    let (port, direction) = at;
    let Some(logs) = &policy.logs else { return effects.groups(port, direction, judgement) };
    let (rule, begins) = match judgement {
        Judgement::Begins { permission: Permission::Rule(place), .. } => (Some(place), true),
        Judgement::Related { known: false, permission: Permission::Rule(place) } => (Some(place), false),
        _ => (None, false),
    };
    effects.groups(port, direction, judgement)?;
    if let Some(rule) = rule.and_then(|place| logs[direction as usize][place].as_ref()) {
        effects.log(at, frame, Ruling { rule, accepted: true, begins });
    }
    Ok(())
}

/// Classifies an ICMP message. For an `error`, the quote is valid only if the error goes to the sender of the quoted
/// packet, and comes from that packet's destination or from another address of the same vNIC, which may be a router.
fn about(index: &Index, vpc: &VpcIndex, error: Option<Option<Quote>>, parsed: &Parsed) -> About {
    let is_right = |quote: &Quote| {
        let vnic = |addr| index.vnic_of(vpc, addr);
        let from = parsed.src_ip == quote.destination
            || vnic(parsed.src_ip).is_some_and(|from| vnic(quote.destination) == Some(from));
        (from && parsed.dst_ip == quote.source) || mutated!(index, ErrorOfAnybody)
    };
    error.map_or(About::Packets, |quote| About::Error(quote.filter(is_right)))
}

/// The same for a fragment. If rules match fields that only the first fragment has, the first one is judged as the
/// whole packet would be, and the others pass if it did; otherwise each fragment is judged by itself.
#[cold]
#[inline(never)]
fn check_fragment(
    index: &Index,
    (port, vpc): (&PortIndex, &VpcIndex),
    direction: Direction,
    frame: Frame<'_>,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    let parsed = frame.parsed;
    let Some(fragment) = parsed.fragment else { return Ok(()) };
    let (id, policy) = (port.port.id, index.policy(port));
    if policy.is_none() && !vpc.acl.as_ref().is_some_and(|acl| acl.needs_first(direction, parsed)) {
        return vpc.acl.as_ref().map_or(Ok(()), |acl| by_acl(acl, (id, direction), frame, false, effects));
    }
    if mutated!(index, FragmentSession)
        && let Some(policy) = policy
    {
        return by_groups(index, (port, vpc), policy, direction, frame, false, effects);
    }
    let piece = Piece::of(parsed, fragment);
    let Some(whole) = parsed.as_whole(frame.head) else {
        return effects.later_fragment((id, direction), &piece);
    };
    effects.check_first_fragment((id, direction), &piece)?;
    if let Some(acl) = &vpc.acl {
        let parsed = if mutated!(index, FragmentPortsUnseen) { parsed } else { &whole.parsed };
        by_acl(acl, (id, direction), Frame { parsed, ..frame }, false, effects)?;
    }
    if let Some(policy) = policy {
        let error = session::error(id, direction, frame.head, &whole.parsed);
        // A fragmented error matches no session: real errors are short.
        let about = if error.is_some() { About::Error(None) } else { About::Packets };
        let judgement = policy.judge(effects.memory(), id, direction, frame.head, &whole.parsed, about);
        conclude(policy, (id, direction), Frame { parsed: &whole.parsed, ..frame }, judgement, effects)?;
    }
    let sender = sender(index, vpc, parsed);
    effects.first_fragment((id, direction), &piece, First { sender, least_len: whole.least_len });
    Ok(())
}

/// A number that identifies the vNIC that sent a packet: by its MAC address, or by the source address if the packet
/// came through the gateway.
fn sender(index: &Index, vpc: &VpcIndex, parsed: &Parsed) -> u64 {
    let number = |(network, mac): (VpcId, Mac)| u64::from(network.0) << 48 | mac.as_u64();
    let routed = parsed.src_mac == GATEWAY_MAC;
    let by_address = if routed { index.vnic_of(vpc, parsed.src_ip) } else { None };
    number(by_address.unwrap_or((vpc.id, parsed.src_mac)))
}
