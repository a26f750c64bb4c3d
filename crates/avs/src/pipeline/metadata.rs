//! Requests of a guest to the metadata service. The switch only passes them to the daemon, which identifies the guest
//! by its port. Security groups and ACLs do not apply, as for ARP: nothing leaves the host.

use bifrost_wire::protocol::TCP;

use super::{Outbound, Stop};
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::port_state::Asked;
use crate::tables::is_metadata;

/// HTTP port.
const HTTP: u16 = 80;

/// Passes a packet to the metadata service on to the daemon, if the guest has metadata. Called only for packets to
/// the gateway.
#[cold]
pub(super) fn outbound(packet: &Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let (port, p) = (packet.port, packet.frame.parsed);
    let is_for_it = is_metadata(p.dst_ip) && (p.protocol, p.dst_port) == (TCP, HTTP) && !p.is_fragment();
    if !port.has_metadata || !is_for_it {
        return Ok(());
    }
    if effects.may_ask(port.port.id, Asked::Metadata) { Err(Stop::Host) } else { Err(DropReason::MetadataRate.into()) }
}
