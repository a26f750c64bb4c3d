//! The pipeline: the stages that decide about a packet, and their order.
//!
//! A stage is a file with a function for each direction that it takes part in, and a line in [`outbound`] or
//! [`inbound`]. It reads and changes the packet's state, [`Outbound`] or [`Inbound`], and may end the pipeline
//! ([`Stop`]). Stages are generic over [`Effects`]: the same code decides about packets and traces the decisions.

mod admit;
mod dhcp;
mod dns;
mod filter;
mod learn;
mod metadata;
mod mtu;
mod nat;
mod resolve;
mod route;
mod router;
mod service;
mod shared;

use std::cell::OnceCell;

use self::service::Translated;
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::frame::Frame;
use crate::ids::{Direction, PeerId, PortId, UplinkId};
use crate::index::{Index, PortIndex};
use crate::verdict::{Action, Verdict};
use crate::vpc::VpcIndex;

/// Stages for packets from a guest.
#[inline(always)]
fn outbound_stages(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    if effects.has_services()
        && let Some(uplink) = packet.port.uplink
    {
        return arrival_stages(packet, uplink, effects);
    }
    admit::outbound(packet)?;
    shared::outbound(packet, effects)?;
    resolve::outbound(packet, effects)?;
    service::outbound(packet, effects)?;
    route::outbound(packet, effects)?;
    filter::outbound(packet, effects)?;
    service::outbound_passed(packet, effects)?;
    mtu::outbound(packet, packet.frame, effects)
}

/// Stages for packets from an uplink.
#[inline(never)]
fn arrival_stages(packet: &mut Outbound<'_>, uplink: UplinkId, effects: &mut impl Effects) -> Result<(), Stop> {
    // ICMP errors quote the packet as it was sent.
    let came = packet.frame;
    nat::arrive(packet, uplink, effects)?;
    filter::outbound(packet, effects)?;
    service::outbound_passed(packet, effects)?;
    mtu::outbound(packet, came, effects)
}

/// Stages for packets from a peer.
#[inline(always)]
fn inbound_stages(packet: &mut Inbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    admit::inbound(packet)?;
    shared::inbound(packet, effects);
    resolve::inbound(packet)?;
    route::inbound(packet)?;
    filter::inbound(packet, effects)?;
    service::inbound(packet, effects)?;
    mtu::inbound(packet, effects)
}

/// State of a packet from a guest in the pipeline.
pub(crate) struct Outbound<'a> {
    pub(crate) index: &'a Index,
    /// The port that the packet comes from.
    pub(crate) port: &'a PortIndex,
    /// The network of that port.
    pub(crate) vpc: &'a VpcIndex,
    pub(crate) frame: Frame<'a>,
    /// Receives the switch's reply.
    pub(crate) answer: &'a mut Vec<u8>,
    /// Storage for `service`.
    pub(crate) room: &'a OnceCell<Translated>,
    /// The translation by a load balancer, or by NAT at an uplink.
    pub(crate) service: Option<&'a Translated>,
    /// Whether the packet is a valid ARP or neighbor discovery message.
    pub(crate) is_resolution: bool,
    /// The path MTU, bytes; set by the routing stage.
    pub(crate) mtu: u16,
    /// The decision so far.
    pub(crate) verdict: &'a mut Verdict,
}

/// State of a packet from a peer in the pipeline.
pub(crate) struct Inbound<'a> {
    pub(crate) index: &'a Index,
    /// The network in which it arrives.
    pub(crate) vpc: &'a VpcIndex,
    pub(crate) peer: PeerId,
    pub(crate) frame: Frame<'a>,
    /// Receives the switch's reply.
    pub(crate) answer: &'a mut Vec<u8>,
    /// The destination port, once it is known.
    pub(crate) port: Option<PortId>,
    /// That port and its network; set by the routing stage.
    pub(crate) to: Option<(&'a PortIndex, &'a VpcIndex)>,
    /// The decision so far.
    pub(crate) verdict: &'a mut Verdict,
}

/// The pipeline ends before its last stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The frame is dropped.
    Drop(DropReason),
    /// The frame ends here, and the switch replies.
    Answer,
    /// The frame ends here, and copies of it go to other vNICs.
    Copy,
    /// The frame goes to this host's daemon.
    Host,
    /// A route must be learned; the stage has written the verdict.
    Ask,
}

impl From<DropReason> for Stop {
    #[inline(always)]
    fn from(reason: DropReason) -> Self {
        Stop::Drop(reason)
    }
}

/// Where a decision is written.
pub(crate) struct Output<'a> {
    pub(crate) verdict: &'a mut Verdict,
    /// Receives the switch's reply.
    pub(crate) answer: &'a mut Vec<u8>,
}

/// Decides about a frame from a guest. Returns the path MTU of a frame that passes, bytes; otherwise 0.
#[inline(always)]
pub(crate) fn outbound(
    index: &Index,
    port: PortId,
    frame: Frame<'_>,
    Output { verdict, answer }: Output<'_>,
    effects: &mut impl Effects,
) -> u16 {
    let Some((port, vpc)) = index.port(port) else {
        *verdict = Verdict::drop(DropReason::UnknownPort);
        return 0;
    };
    let room = &OnceCell::new();
    let (service, is_resolution, mtu) = (None, false, 0);
    let mut packet = Outbound { index, port, vpc, frame, answer, room, service, is_resolution, mtu, verdict };
    match outbound_stages(&mut packet, effects) {
        Ok(()) => return packet.mtu,
        Err(Stop::Drop(reason)) => *packet.verdict = Verdict::drop(reason),
        Err(Stop::Answer) => *packet.verdict = Verdict::unchanged(Action::Answer { vni: vpc.vni }),
        Err(Stop::Host) => *packet.verdict = Verdict::unchanged(Action::Host),
        Err(Stop::Copy) => *packet.verdict = Verdict::unchanged(Action::Copy),
        Err(Stop::Ask) => {}
    }
    0
}

/// Decides about a frame from a peer. `vpc`: its network, if this host has it. Returns the destination port, if it is
/// known.
#[inline(always)]
pub(crate) fn inbound(
    index: &Index,
    vpc: Option<&VpcIndex>,
    peer: PeerId,
    frame: Frame<'_>,
    Output { verdict, answer }: Output<'_>,
    effects: &mut impl Effects,
) -> Option<PortId> {
    let Some(vpc) = vpc else {
        *verdict = Verdict::drop(DropReason::UnknownVni);
        return None;
    };
    let mut packet = Inbound { index, vpc, peer, frame, answer, port: None, to: None, verdict };
    match inbound_stages(&mut packet, effects) {
        // Only frames from guests of this host are copied, passed to services, or wait for a route.
        Ok(()) | Err(Stop::Answer | Stop::Copy | Stop::Host | Stop::Ask) => {}
        Err(Stop::Drop(reason)) => *packet.verdict = Verdict::drop(reason),
    }
    packet.port
}

/// Decides about a frame from the guest behind `from` that another worker of this host hands over: the receiver's
/// part of [`outbound`].
#[inline(always)]
pub(crate) fn handed_over(
    index: &Index,
    (from, port): (PortId, PortId),
    frame: Frame<'_>,
    effects: &mut impl Effects,
) -> Verdict {
    let mut verdict = Verdict::unchanged(Action::Deliver { port, worker: None });
    let filtered = filter::check(index, port, Direction::Ingress, frame, effects);
    match filtered.and_then(|()| service::deliver(index, (from, port), frame, &mut verdict, effects)) {
        Ok(()) => verdict,
        Err(reason) => Verdict::drop(reason),
    }
}

/// Runs only the first stage of [`outbound`]: whether a guest may send a frame at all.
pub(crate) fn admits(index: &Index, port: PortId, frame: Frame<'_>) -> Result<(), DropReason> {
    let (port, vpc) = index.port(port).ok_or(DropReason::UnknownPort)?;
    let (verdict, answer) = (&mut Verdict::drop(DropReason::NoRoute), &mut Vec::new());
    let room = &OnceCell::new();
    let (service, is_resolution, mtu) = (None, false, 0);
    admit::outbound(&Outbound { index, port, vpc, frame, answer, room, service, is_resolution, mtu, verdict })
}

/// Runs only the first stage of [`inbound`]: whether a peer may send a frame at all.
pub(crate) fn admits_from_peer(index: &Index, vpc: &VpcIndex, peer: PeerId, frame: Frame<'_>) -> bool {
    let (verdict, answer) = (&mut Verdict::drop(DropReason::NoRoute), &mut Vec::new());
    admit::inbound(&Inbound { index, vpc, peer, frame, answer, port: None, to: None, verdict }).is_ok()
}
