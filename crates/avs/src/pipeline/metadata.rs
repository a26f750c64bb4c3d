//! What a guest asks the metadata service. The switch only lets it through to the daemon, which knows the guest by its
//! port. Security groups and ACLs are not asked, as for ARP: nothing leaves the host.

use bifrost_wire::protocol::TCP;

use super::{Outbound, Stop};
use crate::drop_reason::DropReason;
use crate::effects::Effects;
use crate::port_state::Asked;
use crate::tables::is_metadata;

/// The port of HTTP.
const HTTP: u16 = 80;

/// Gives a packet to the daemon, if it is for the metadata service, and the guest has metadata. Called only for packets
/// that go to the gateway.
#[cold]
pub(super) fn outbound(packet: &Outbound<'_>, effects: &mut impl Effects) -> Result<(), Stop> {
    let (port, p) = (packet.port, packet.frame.parsed);
    let is_for_it = is_metadata(p.dst_ip) && (p.protocol, p.dst_port) == (TCP, HTTP) && !p.is_fragment();
    if !port.has_metadata || !is_for_it {
        return Ok(());
    }
    if effects.may_ask(port.port.id, Asked::Metadata) { Err(Stop::Host) } else { Err(DropReason::MetadataRate.into()) }
}
