//! The way of a packet through the switch, written once: what is done on it, or only foreseen, are [`Effects`].

use bifrost_nic::{L3, Offload, Parsed};
use bifrost_wire::protocol::{ICMP, ICMPV6};
use bifrost_wire::{Mac, Vni};

use crate::description::{GATEWAY_MAC, PeerId, Port, PortId};
use crate::drop_reason::DropReason;
use crate::fragments::{First, Piece};
use crate::from_guest::{self, FromGuest};
use crate::from_underlay::{self, FromUnderlay};
use crate::mutation::mutated;
use crate::neighbour;
use crate::path_mtu::{Ends, Frame, Remedy};
use crate::policy::{About, Acl, GroupPolicy, Judgement, Memory};
use crate::session::{self, Direction, Quote};
use crate::switch::{Index, PortIndex};
use crate::vpc::VpcIndex;

/// What follows from judgements on a packet's way.
pub(crate) trait Effects {
    /// What security groups remember.
    fn memory(&self) -> Memory<'_>;
    /// The ACL of a port's network has been asked: the rule that decides, and whether it lets the packet pass.
    fn acl(&mut self, port: PortId, direction: Direction, rule: Option<(usize, bool)>);
    /// The security groups of a port have been asked.
    fn groups(&mut self, port: PortId, direction: Direction, judgement: Judgement) -> Result<(), DropReason>;
    /// A piece of a packet from or to a port is not the first: whether it may pass by what is known of that packet.
    fn later_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason>;
    /// It is the first: whether it can be.
    fn check_first_fragment(&mut self, at: (PortId, Direction), piece: &Piece) -> Result<(), DropReason>;
    /// It is the first, and passes.
    fn first_fragment(&mut self, at: (PortId, Direction), piece: &Piece, first: First);
    /// A frame from or to a port is larger than `mtu`. `answer` receives what its sender is told.
    fn too_large(
        &mut self,
        port: PortId,
        frame: Frame<'_>,
        mtu: u16,
        ends: Option<Ends>,
        answer: &mut Vec<u8>,
    ) -> Remedy;
}

/// Of a frame that a guest sent.
#[inline(always)]
pub(crate) fn from_guest(
    index: &Index,
    port: PortId,
    frame: Frame<'_>,
    answer: &mut Vec<u8>,
    effects: &mut impl Effects,
) -> Result<FromGuest, DropReason> {
    let decision = from_guest::decide(index, port, frame, answer)?;
    let (to, cut) = match decision {
        FromGuest::Remote { cut, .. } => (None, cut),
        // Another worker's switch, which knows the receiver's conversations, says whether they may come in.
        FromGuest::Local { port, cut, worker, .. } => (Some(port).filter(|_| worker.is_none()), cut),
        FromGuest::Answer | FromGuest::Drop(_) => return Ok(decision),
    };
    pass(index, port, Direction::Egress, frame, effects)?;
    if let Some(to) = to {
        pass(index, to, Direction::Ingress, frame, effects)?;
    }
    let Some(mtu) = cut else { return Ok(decision) };
    let ends = told_by(index, port, frame.parsed);
    match effects.too_large(port, frame, mtu, ends, answer) {
        Remedy::Cut => Ok(decision),
        Remedy::Told => Ok(FromGuest::Answer),
        Remedy::None => Err(DropReason::PathMtu),
    }
}

/// Of a frame that a peer sent, in a network that is here or not: the port that it is for, and what becomes of it.
#[inline(always)]
pub(crate) fn from_underlay(
    index: &Index,
    vpc: Option<&VpcIndex>,
    peer: PeerId,
    frame: Frame<'_>,
    answer: &mut Vec<u8>,
    effects: &mut impl Effects,
) -> (Option<PortId>, FromUnderlay) {
    let Frame { head, parsed, .. } = frame;
    let port = match from_underlay::decide(index, vpc, peer, head, parsed) {
        Ok(port) => port,
        Err(reason) => return (None, FromUnderlay::Drop(reason)),
    };
    let Some((to, vpc)) = index.port(port) else {
        // Never so: it was found in the index.
        return (None, FromUnderlay::Drop(DropReason::UnknownPort));
    };
    let decision = match pass(index, port, Direction::Ingress, frame, effects) {
        Err(reason) => FromUnderlay::Drop(reason),
        Ok(()) if parsed.packet_len() <= usize::from(to.port.mtu) => FromUnderlay::Port(port),
        Ok(()) => {
            let mtu = to.port.mtu;
            let whole = Frame { len: parsed.end as usize, offload: Offload::default(), ..frame };
            let (vni, ends) = receiver_tells(index, vpc, &to.port, parsed).unzip();
            match (effects.too_large(port, whole, mtu, ends, answer), vni) {
                (Remedy::Cut, _) => FromUnderlay::Cut { port, mtu },
                (Remedy::Told, Some(vni)) => FromUnderlay::Answer { vni },
                (Remedy::Told | Remedy::None, _) => FromUnderlay::Drop(DropReason::PathMtu),
            }
        }
    };
    (Some(port), decision)
}

/// Whether the ACL of its network and the groups of a port let a packet pass.
#[inline(always)]
pub(crate) fn pass(
    index: &Index,
    port: PortId,
    direction: Direction,
    frame: Frame<'_>,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    let (port, vpc) = index.port(port).ok_or(DropReason::UnknownPort)?;
    if frame.parsed.is_fragment() {
        return pass_fragment(index, (port, vpc), direction, frame, effects);
    }
    let exempt = is_exempt(index, frame);
    if let Some(acl) = &vpc.acl {
        by_acl(acl, port.port.id, direction, frame.parsed, exempt, effects)?;
    }
    let Some(policy) = index.policy(port) else { return Ok(()) };
    ask(index, (port, vpc), policy, direction, frame, exempt, effects)
}

/// Whether rules say nothing about a packet: it says who has an address.
#[inline(always)]
fn is_exempt(index: &Index, Frame { head, parsed, .. }: Frame<'_>) -> bool {
    let _ = index;
    if mutated!(index, NeighboursExempt)
        && (parsed.kind, parsed.protocol) == (L3::V6, ICMPV6)
        && head.get(usize::from(parsed.l4)).is_some_and(|kind| (133..=137).contains(kind))
    {
        return true;
    }
    parsed.kind == L3::Arp || matches!(neighbour::message(head, parsed), Ok(Some(_)))
}

#[inline(always)]
fn by_acl(
    acl: &Acl,
    port: PortId,
    direction: Direction,
    parsed: &Parsed,
    exempt: bool,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    let rule = if exempt { None } else { acl.judge(direction, parsed) };
    effects.acl(port, direction, rule);
    if rule.is_some_and(|(_, allow)| !allow) { Err(DropReason::Acl) } else { Ok(()) }
}

/// The same of a piece of a packet. Where rules look at what only the first one shows, that one is judged as the packet would be,
/// and the others pass if it did; elsewhere each is judged by what it shows.
#[cold]
#[inline(never)]
fn pass_fragment(
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
        return vpc.acl.as_ref().map_or(Ok(()), |acl| by_acl(acl, id, direction, parsed, false, effects));
    }
    if mutated!(index, FragmentSession)
        && let Some(policy) = policy
    {
        return ask(index, (port, vpc), policy, direction, frame, false, effects);
    }
    let piece = Piece::of(parsed, fragment);
    let Some(whole) = parsed.as_whole(frame.head) else {
        return effects.later_fragment((id, direction), &piece);
    };
    effects.check_first_fragment((id, direction), &piece)?;
    if let Some(acl) = &vpc.acl {
        let seen = if mutated!(index, FragmentPortsUnseen) { parsed } else { &whole.parsed };
        by_acl(acl, id, direction, seen, false, effects)?;
    }
    if let Some(policy) = policy {
        let error = session::error(id.0, direction, frame.head, &whole.parsed);
        // An error in pieces is about nothing: real ones are short.
        let about = if error.is_some() { About::Error(None) } else { About::Packets };
        let judgement = policy.judge(effects.memory(), id.0, direction, frame.head, &whole.parsed, about);
        effects.groups(id, direction, judgement)?;
    }
    let sender = sender(index, vpc, parsed);
    effects.first_fragment((id, direction), &piece, First { sender, least_len: whole.least_len });
    Ok(())
}

/// A number for the vNIC that sent a packet: by its MAC address, or, if it came through the gateway, by its source.
fn sender(index: &Index, vpc: &VpcIndex, parsed: &Parsed) -> u64 {
    let number = |(network, mac): (usize, Mac)| (network as u64) << 48 | mac.as_u64();
    let routed = parsed.src_mac == GATEWAY_MAC;
    let by_address = if routed { index.vnic_of(vpc, parsed.src_ip) } else { None };
    number(by_address.unwrap_or((vpc.number, parsed.src_mac)))
}

/// Whether the groups of a port let a packet pass. One function: most ports need none of it, and its parts are for it alone.
#[inline(never)]
fn ask(
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
        _ if exempt => About::Neighbours,
        ICMP | ICMPV6 => about(index, vpc, session::error(id.0, direction, frame.head, parsed), parsed),
        _ => About::Packets,
    };
    let judgement = policy.judge(effects.memory(), id.0, direction, frame.head, parsed, about);
    effects.groups(id, direction, judgement)
}

/// What an ICMP message is about, if it is an `error`: one counts for what it quotes if it goes to the sender of that packet, and comes
/// from whom that was for, or from another address of the same vNIC, which may be a router.
fn about(index: &Index, vpc: &VpcIndex, error: Option<Option<Quote>>, parsed: &Parsed) -> About {
    let is_right = |quote: &Quote| {
        let vnic = |addr| index.vnic_of(vpc, addr);
        let from = parsed.src_ip == quote.destination
            || vnic(parsed.src_ip).is_some_and(|from| vnic(quote.destination) == Some(from));
        (from && parsed.dst_ip == quote.source) || mutated!(index, ErrorOfAnybody)
    };
    error.map_or(About::Packets, |quote| About::Error(quote.filter(is_right)))
}

/// Who tells the guest behind `port` that its packet is larger than its way allows: the gateway, or, where there is none, who it
/// was for.
#[cold]
fn told_by(index: &Index, port: PortId, parsed: &Parsed) -> Option<Ends> {
    let (_, vpc) = index.port(port)?;
    let (source, source_mac) = match vpc.gateway(parsed.src_ip.is_ipv6()) {
        Some(gateway) => (gateway, GATEWAY_MAC),
        None => (parsed.dst_ip, parsed.dst_mac),
    };
    Some(Ends { source, source_mac, destination_mac: parsed.src_mac })
}

/// Who tells a guest elsewhere, and in which network, that its packet is larger than what the one behind `to` is given: that one
/// itself, for the sender's host lets no other host speak as the gateway.
#[cold]
fn receiver_tells(index: &Index, vpc: &VpcIndex, to: &Port, parsed: &Parsed) -> Option<(Vni, Ends)> {
    let (sender, vni) = if parsed.src_mac == GATEWAY_MAC {
        let (station, of) = index.next_hop(vpc, parsed.dst_ip, parsed.src_ip)?;
        (station.mac, of.vni)
    } else {
        (parsed.src_mac, vpc.vni)
    };
    // From another network it comes through the gateway.
    let source_mac = if vni == vpc.vni { to.mac } else { GATEWAY_MAC };
    Some((vni, Ends { source: parsed.dst_ip, source_mac, destination_mac: sender }))
}
