//! Answers router solicitations from a guest: the gateway is the only router. The advertisements are built in
//! `router.rs`. Security groups and ACLs do not apply, as for ARP: nothing leaves the host.

use bifrost_nic::L3;
use bifrost_wire::protocol::ICMPV6;

use super::{Outbound, Stop};
use crate::answer;
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::port_state::Asked;
use crate::router::{self, SOLICITATION};

/// Answers a router solicitation at once, if the guest has IPv6 settings. Called only for packets to a group or to
/// the gateway; others do not pay for it.
#[cold]
pub(super) fn outbound(packet: &mut Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let (port, frame) = (packet.port, packet.frame);
    let p = frame.parsed;
    let Some(lease) = &port.ipv6_lease else { return Ok(()) };
    // Fragmented ones were dropped before (RFC 6980).
    let is_question = p.kind == L3::V6
        && p.protocol == ICMPV6
        && frame.head.get(usize::from(p.l4)) == Some(&SOLICITATION)
        && !p.is_fragment();
    if !is_question {
        return Ok(());
    }
    if !effects.may_ask(port.port.id, Asked::Router) {
        return Err(DropReason::SolicitationRate.into());
    }
    router::check_solicitation(frame.head, p, port.port.mac)?;
    answer::router_advertisement(Some(lease), Some((p.src_ip, p.src_mac)), packet.answer);
    Err(Stop::Answer)
}
