//! Packets to addresses whose routes are learned: what happens while there is none. Nothing here is on the path of a
//! packet that has a route.

use std::net::IpAddr;

use super::{Outbound, Stop};
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::learned::Known;
use crate::location::{Owner, Path};
use crate::verdict::{Action, Verdict};
use crate::vpc::{VpcIndex, is_host};

/// What to do with a packet that the gateway should route, and for which no next hop is known. `owner`: that of the
/// destination according to the configured routes.
#[cold]
#[inline(never)]
pub(super) fn unrouted(packet: &mut Outbound<'_>, owner: Option<Owner>, effects: &mut impl Effects) -> Stop {
    let (index, p) = (packet.index, packet.frame.parsed);
    let vpc = match owner {
        None | Some(Owner::Outside(_)) => Some(packet.vpc),
        Some(Owner::Peered(other)) => {
            let other = index.vpc_of(other).filter(|other| index.is_way(packet.vpc, other, p.src_ip));
            // A configured route that leads nowhere else is not replaced by a learned one.
            other.filter(|other| other.owner_by_route(p.dst_ip).is_none_or(|owner| matches!(owner, Owner::Outside(_))))
        }
        Some(Owner::Vnic(_) | Owner::Own) => None,
    };
    match vpc {
        Some(vpc) => ask(packet, vpc, p.dst_ip, DropReason::NoRoute, effects),
        None => DropReason::NoRoute.into(),
    }
}

/// The path to the vNIC with the packet's destination MAC address, which no configured route leads to.
#[cold]
#[inline(never)]
pub(super) fn path(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<Path, Stop> {
    let (vpc, p) = (packet.vpc, packet.frame.parsed);
    if let Some(path) = vpc.learned_path(p.dst_mac) {
        // Marks the route as used.
        vpc.learned_route(p.dst_ip);
        return Ok(path);
    }
    // The guest remembers who has the address. If the route was forgotten, it is learned again.
    let is_elsewhere = !p.is_ip() || vpc.owner(p.dst_ip).is_some_and(|owner| !matches!(owner, Owner::Outside(_)));
    if is_elsewhere || !matches!(vpc.learned(p.dst_ip, effects.now_ns()), Known::Unknown | Known::Full) {
        return Err(DropReason::UnknownMac.into());
    }
    Err(ask(packet, vpc, p.dst_ip, DropReason::UnknownMac, effects))
}

/// The packet waits until the route to an address is learned; or it is dropped for `reason`, if the address has no
/// vNIC or its routes are not learned.
#[cold]
#[inline(never)]
pub(super) fn ask(
    packet: &mut Outbound<'_>,
    vpc: &VpcIndex,
    address: IpAddr,
    reason: DropReason,
    effects: &mut impl Effects,
) -> Stop {
    if vpc.learned.is_none() || !is_host(address) {
        return reason.into();
    }
    match vpc.learned(address, effects.now_ns()) {
        Known::Unknown => {
            *packet.verdict = Verdict::unchanged(Action::Ask { vni: vpc.vni, address });
            Stop::Ask
        }
        Known::Full => DropReason::LearnedFull.into(),
        Known::Route(_) | Known::Nothing | Known::NotLearned => reason.into(),
    }
}
