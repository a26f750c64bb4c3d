//! Answers DHCP messages from a guest, sent to a broadcast or multicast address or to the gateway. The replies are
//! built in `dhcp.rs` and `dhcpv6.rs`. Security groups and ACLs do not apply, as for ARP: nothing leaves the host.

use std::net::{IpAddr, Ipv4Addr};

use bifrost_nic::L3;
use bifrost_wire::protocol::UDP;

use super::{Outbound, Stop};
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::port_state::Asked;
use crate::tables::GATEWAY_MAC;
use crate::vpc::link_local;
use crate::{answer, dhcp, dhcpv6};

/// Answers a message to a DHCP server, if the guest has a lease. Called only for packets to a group or to the
/// gateway; others do not pay for it.
#[cold]
pub(super) fn outbound(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let p = packet.frame.parsed;
    if p.protocol != UDP || p.is_fragment() {
        return Ok(());
    }
    match (p.kind, p.src_port, p.dst_port) {
        (L3::V4, dhcp::CLIENT_PORT, dhcp::SERVER_PORT) => v4(packet, effects),
        // A client may send from any port (RFC 8415, section 7.2).
        (L3::V6, _, dhcpv6::SERVER_PORT) => v6(packet, effects),
        _ => Ok(()),
    }
}

fn v4(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let port = packet.port;
    let Some(lease) = &port.lease else { return Ok(()) };
    if ![IpAddr::V4(Ipv4Addr::BROADCAST), IpAddr::V4(lease.gateway)].contains(&packet.frame.parsed.dst_ip) {
        return Ok(());
    }
    let message = question(packet, effects)?;
    let reply = dhcp::answer(lease, port.port.mac, message)?;
    let ends = ((lease.gateway.into(), dhcp::SERVER_PORT), (reply.to.into(), dhcp::CLIENT_PORT));
    answer::datagram(port.port.mac, ends, &reply.payload, packet.answer);
    Err(Stop::Answer)
}

fn v6(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let (port, p) = (packet.port, packet.frame.parsed);
    let Some(lease) = &port.ipv6_lease else { return Ok(()) };
    let server = link_local(GATEWAY_MAC);
    let to_group = p.dst_ip == IpAddr::V6(dhcpv6::SERVERS);
    if !to_group && p.dst_ip != IpAddr::V6(server) {
        return Ok(());
    }
    let message = question(packet, effects)?;
    // Clients use their link-local addresses (RFC 8415, section 17.1).
    let IpAddr::V6(client) = p.src_ip else { return Err(DropReason::DhcpMalformed.into()) };
    if !client.is_unicast_link_local() {
        return Err(DropReason::DhcpMalformed.into());
    }
    let payload = dhcpv6::answer(lease, message, to_group)?;
    let ends = ((server.into(), dhcpv6::SERVER_PORT), (client.into(), dhcpv6::CLIENT_PORT));
    answer::datagram(port.port.mac, ends, &payload, packet.answer);
    Err(Stop::Answer)
}

/// The message, if it is complete and the guest does not exceed its rate limit.
fn question<'a>(packet: &Outbound<'a>, effects: &mut impl Effects) -> Result<&'a [u8], DropReason> {
    if !effects.may_ask(packet.port.port.id, Asked::Dhcp) {
        return Err(DropReason::DhcpRate);
    }
    let (frame, p) = (packet.frame, packet.frame.parsed);
    frame.head.get(usize::from(p.payload)..p.end as usize).ok_or(DropReason::DhcpMalformed)
}
