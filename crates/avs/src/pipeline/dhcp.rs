//! What a guest asks a DHCP server, at a broadcast address or the gateway's. What is answered is in `dhcp.rs`. Security groups and ACLs are
//! not asked, as for ARP: nothing leaves the host.

use std::net::{IpAddr, Ipv4Addr};

use bifrost_nic::L3;
use bifrost_wire::protocol::UDP;

use super::{Outbound, Stop};
use crate::answer;
use crate::dhcp::{self, CLIENT_PORT, SERVER_PORT};
use crate::drop_reason::DropReason;
use crate::effects::Effects;

/// Answers, if a packet is a question to a DHCP server, and the guest has a lease. Called only for packets that go to a group or to the
/// gateway: others pay nothing.
#[cold]
pub(super) fn outbound(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let (port, frame) = (packet.port, packet.frame);
    let p = frame.parsed;
    let Some(lease) = &port.lease else { return Ok(()) };
    let to = [IpAddr::V4(Ipv4Addr::BROADCAST), IpAddr::V4(lease.gateway)];
    let is_question = p.kind == L3::V4 && p.protocol == UDP && (p.src_port, p.dst_port) == (CLIENT_PORT, SERVER_PORT);
    if !is_question || p.is_fragment() || !to.contains(&p.dst_ip) {
        return Ok(());
    }
    if !effects.may_ask(port.port.id) {
        return Err(DropReason::DhcpRate.into());
    }
    let message = frame.head.get(usize::from(p.payload)..p.end as usize).ok_or(DropReason::DhcpMalformed)?;
    let reply = dhcp::answer(lease, port.port.mac, message)?;
    let ends = ((lease.gateway, SERVER_PORT), (reply.to, CLIENT_PORT));
    answer::datagram(port.port.mac, ends, &reply.payload, packet.answer);
    Err(Stop::Answer)
}
