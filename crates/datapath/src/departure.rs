//! Where the switch sends a packet of a guest, as its queues and the transport need it.

use bifrost_rte::Destination;

/// Where the switch sends a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Departure {
    pub(crate) vni: u32,
    /// The peer's number.
    pub(crate) peer: u32,
    /// The destination as the transport knows it; `None`: plain VXLAN.
    pub(crate) reliably: Option<Destination>,
}
