//! Locations of vNICs and addresses.

use bifrost_wire::Mac;

use crate::ids::{PeerId, PortId, UplinkId};

/// Identifies a network of a configuration: its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct VpcId(pub(crate) u32);

impl VpcId {
    #[inline(always)]
    pub(crate) fn place(self) -> usize {
        self.0 as usize
    }
}

/// The location of a vNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    Local(PortId),
    Remote(PeerId),
}

/// The location of a vNIC, and the path MTU to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) location: Location,
    /// Path MTU: largest IP packet, bytes.
    pub(crate) mtu: u16,
}

/// The vNIC that a packet goes to next, and the path to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextHop {
    pub(crate) mac: Mac,
    pub(crate) path: Path,
}

/// The owner of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A vNIC of the network.
    Vnic(NextHop),
    /// A vNIC of another network, if that network has a route back.
    Peered(VpcId),
    /// A node outside, behind an uplink.
    Outside(UplinkId),
    /// The switch itself: the gateway, or a load balancer.
    Own,
}
