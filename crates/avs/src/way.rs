//! The way of a packet through the switch, written once: what is done on it, or only foreseen, are [`Effects`].

use bifrost_nic::{Offload, Parsed};
use bifrost_wire::Vni;

use crate::description::{GATEWAY_MAC, PeerId, Port, PortId};
use crate::drop_reason::DropReason;
use crate::from_guest::{self, FromGuest};
use crate::from_underlay::{self, FromUnderlay};
use crate::path_mtu::{Ends, Frame, Remedy};
use crate::policy::{GroupPolicy, Judgement, Memory};
use crate::session::Direction;
use crate::switch::Index;
use crate::vpc::VpcIndex;

/// What follows from judgements on a packet's way.
pub(crate) trait Effects {
    /// What security groups remember.
    fn memory(&self) -> Memory<'_>;
    /// The ACL of a port's network has been asked: the rule that decides, and whether it lets the packet pass.
    fn acl(&mut self, port: PortId, direction: Direction, rule: Option<(usize, bool)>);
    /// The security groups of a port have been asked.
    fn groups(&mut self, port: PortId, direction: Direction, judgement: Judgement) -> Result<(), DropReason>;
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
    let Frame { head, parsed, .. } = frame;
    let (port, vpc) = index.port(port).ok_or(DropReason::UnknownPort)?;
    let id = port.port.id;
    if let Some(acl) = &vpc.acl {
        let rule = acl.judge(direction, head, parsed);
        effects.acl(id, direction, rule);
        if rule.is_some_and(|(_, allow)| !allow) {
            return Err(DropReason::Acl);
        }
    }
    let Some(policy) = index.policy(port) else { return Ok(()) };
    ask(policy, id, direction, frame, effects)
}

/// Whether the groups of a port let a packet pass. One function: most ports need none of it, and its parts are for it alone.
#[inline(never)]
fn ask(
    policy: &GroupPolicy,
    port: PortId,
    direction: Direction,
    frame: Frame<'_>,
    effects: &mut impl Effects,
) -> Result<(), DropReason> {
    let judgement = policy.judge(effects.memory(), port.0, direction, frame.head, frame.parsed);
    effects.groups(port, direction, judgement)
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
