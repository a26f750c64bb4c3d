//! Stage: addresses that several vNICs share, one of which holds each at a time (VRRP, RFC 9568; keepalived). The
//! tables say which one. This stage records announcements of vNICs for the daemon, which updates the tables, and
//! copies VRRP to the vNICs that share an address.
//!
//! A vNIC takes an address by a gratuitous ARP message or an unsolicited neighbor advertisement, as VRRP routers do.
//! If no vNIC holds the address, any packet from it is enough: after a restart of the switch, guests do not repeat
//! their announcements.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_wire::Mac;

use super::{Inbound, Outbound, Stop};
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::frame::Frame;
use crate::port_state::Asked;
use crate::shared::{Claim, Statement, announced};
use crate::vpc::VpcIndex;

/// VRRP's protocol number, and the groups to which its routers send (RFC 9568, section 5.1).
const VRRP: u8 = 112;
const GROUP_V4: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 18);
const GROUP_V6: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x12);
/// Maximum length of a VRRP packet, bytes: 255 IPv6 addresses fit.
const MAX_VRRP_LEN: usize = 4200;

/// Handles a guest's announcements of its shared addresses.
#[inline(always)]
pub(super) fn outbound(packet: &Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    if packet.port.shared.is_empty() { Ok(()) } else { of_guest(packet, effects) }
}

#[inline(never)]
fn of_guest(packet: &Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let (port, mac) = (packet.port, packet.port.port.mac);
    let mut is_bounded =
        || if effects.may_ask(port.port.id, Asked::Sharing) { Ok(()) } else { Err(DropReason::SharingRate) };
    if is_vrrp(packet.frame) {
        is_bounded()?;
        return Err(Stop::Copy);
    }
    if let Some((address, _)) = announced(packet.frame, mac).filter(|(address, _)| port.shared.contains(address)) {
        is_bounded()?;
        // The current holder's announcements count too: other hosts may not know it.
        effects.claim(claim(packet.vpc, address, mac, Statement::Takes));
        return Err(DropReason::OwnAddress.into());
    }
    let from = packet.frame.parsed.src_ip;
    if port.shared.contains(&from) && packet.vpc.route(from).is_none() {
        effects.claim(claim(packet.vpc, from, mac, Statement::Has));
    }
    Ok(())
}

/// Handles announcements of a vNIC on another host. [`admit`](super::admit) has checked that it is there.
#[inline(always)]
pub(super) fn inbound(packet: &Inbound<'_>, effects: &mut impl Effects) {
    if packet.vpc.has_shared() {
        of_peer(packet, effects);
    }
}

#[inline(never)]
fn of_peer(packet: &Inbound<'_>, effects: &mut impl Effects) {
    let p = packet.frame.parsed;
    let (address, statement) = announced(packet.frame, p.src_mac).unwrap_or((p.src_ip, Statement::Has));
    let is_news = statement == Statement::Takes || packet.vpc.route(address).is_none();
    if is_news && packet.vpc.sharers(address).any(|mac| mac == p.src_mac) {
        effects.claim(claim(packet.vpc, address, p.src_mac, statement));
    }
}

fn claim(vpc: &VpcIndex, address: IpAddr, mac: Mac, statement: Statement) -> Claim {
    Claim { vni: vpc.vni, address, mac, statement, at_ns: 0 }
}

/// Whether a packet is VRRP to its multicast group, unfragmented and not too long.
#[inline(always)]
fn is_vrrp(frame: Frame<'_>) -> bool {
    let p = frame.parsed;
    let to_group = p.dst_ip == IpAddr::V4(GROUP_V4) || p.dst_ip == IpAddr::V6(GROUP_V6);
    p.protocol == VRRP && p.dst_mac.is_multicast() && to_group && !p.is_fragment() && frame.len <= MAX_VRRP_LEN
}
