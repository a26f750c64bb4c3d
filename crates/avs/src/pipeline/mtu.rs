//! Stage: packets that are larger than the path MTU (Triton paper, section 5.2).

use bifrost_nic::Offload;
use bifrost_wire::Vni;

use super::{Inbound, Outbound, Stop};
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::frame::Frame;
use crate::path_mtu::{Ends, Remedy, TooLarge};
use crate::tables::{GATEWAY_MAC, Port};
use crate::verdict::{Action, Verdict};

/// `came`: the packet as its sender sent it.
#[inline(always)]
pub(super) fn outbound(packet: &mut Outbound<'_>, came: Frame<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    if packet.frame.largest_packet() <= usize::from(packet.mtu) { Ok(()) } else { shrink(packet, came, effects) }
}

#[cold]
fn shrink(packet: &mut Outbound<'_>, came: Frame<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let frame = TooLarge { frame: came, mtu: packet.mtu, ends: Some(gateway_to_guest(packet, came)) };
    match effects.too_large(packet.port.port.id, frame, packet.answer) {
        Remedy::Fragment => {
            packet.verdict.fragment_to = Some(packet.mtu);
            Ok(())
        }
        Remedy::Answer => Err(Stop::Answer),
        Remedy::None => Err(DropReason::PathMtu.into()),
    }
}

/// The gateway sends the error or, if there is none, the packet's receiver.
fn gateway_to_guest(packet: &Outbound<'_>, came: Frame<'_>) -> Ends {
    let p = came.parsed;
    let (source, source_mac) = match packet.vpc.gateway(p.src_ip.is_ipv6()) {
        Some(gateway) => (gateway, GATEWAY_MAC),
        None => (p.dst_ip, p.dst_mac),
    };
    Ends { source, source_mac, destination_mac: p.src_mac }
}

#[inline(always)]
pub(super) fn inbound(packet: &mut Inbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    match packet.to.map(|(to, _)| &to.port) {
        Some(to) if packet.frame.parsed.packet_len() > usize::from(to.mtu) => shrink_inbound(packet, to, effects),
        _ => Ok(()),
    }
}

#[cold]
fn shrink_inbound(packet: &mut Inbound<'_>, to: &Port, effects: &mut impl Effects) -> Result<(), Stop> {
    let parsed = packet.frame.parsed;
    let whole = Frame { len: parsed.end as usize, offload: Offload::default(), ..packet.frame };
    let (vni, ends) = receiver_to_sender(packet, to).unzip();
    let frame = TooLarge { frame: whole, mtu: to.mtu, ends };
    match (effects.too_large(to.id, frame, packet.answer), vni) {
        (Remedy::Fragment, _) => {
            packet.verdict.fragment_to = Some(to.mtu);
            Ok(())
        }
        (Remedy::Answer, Some(vni)) => {
            *packet.verdict = Verdict::unchanged(Action::Answer { vni });
            Err(Stop::Answer)
        }
        (Remedy::Answer | Remedy::None, _) => Err(DropReason::PathMtu.into()),
    }
}

/// The receiver sends the error, in the sender's network. It cannot come from the gateway, because the sender's host
/// accepts the gateway's address from no other host.
fn receiver_to_sender(packet: &Inbound<'_>, to: &Port) -> Option<(Vni, Ends)> {
    let (parsed, vpc) = (packet.frame.parsed, packet.vpc);
    let (sender, vni) = if parsed.src_mac == GATEWAY_MAC {
        let (hop, of) = packet.index.next_hop(vpc, parsed.dst_ip, parsed.src_ip)?;
        (hop.mac, of.vni)
    } else {
        (parsed.src_mac, vpc.vni)
    };
    // From another network the error comes through the gateway.
    let source_mac = if vni == vpc.vni { to.mac } else { GATEWAY_MAC };
    Some((vni, Ends { source: parsed.dst_ip, source_mac, destination_mac: sender }))
}
