//! Answers DNS queries from a guest to its gateway. The responses are built in `dns`. Security groups and ACLs do not
//! apply, as for ARP: nothing leaves the host.

use bifrost_wire::protocol::UDP;

use super::{Outbound, Stop};
use crate::answer;
use crate::dns::{self, SERVER_PORT};
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::port_state::Asked;

/// Length of the IPv4 and UDP headers, bytes. IPv6 has 20 more, but every IPv6 path carries at least 1280 bytes.
const HEADERS: usize = 28;

/// Answers a DNS query, if the network has names. Called only for packets to the gateway.
#[cold]
pub(super) fn outbound(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let (port, frame) = (&packet.port.port, packet.frame);
    let p = frame.parsed;
    let Some(names) = &packet.vpc.names else { return Ok(()) };
    if (p.protocol, p.dst_port) != (UDP, SERVER_PORT) || p.is_fragment() {
        return Ok(());
    }
    if !effects.may_ask(port.id, Asked::Dns) {
        return Err(DropReason::DnsRate.into());
    }
    let message = frame.head.get(usize::from(p.payload)..p.end as usize).filter(|_| !p.src_ip.is_unspecified());
    let limit = usize::from(port.mtu).saturating_sub(HEADERS);
    let reply = dns::answer(names, message.ok_or(DropReason::DnsMalformed)?, limit)?;
    let ends = ((p.dst_ip, SERVER_PORT), (p.src_ip, p.src_port));
    answer::datagram(port.mac, ends, &reply, packet.answer);
    Err(Stop::Answer)
}
