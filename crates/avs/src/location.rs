//! Where vNICs and addresses are.

use bifrost_wire::Mac;

use crate::ids::{PeerId, PortId, UplinkId};

/// Names a network of a configuration: its place among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct VpcId(pub(crate) u32);

impl VpcId {
    #[inline(always)]
    pub(crate) fn place(self) -> usize {
        self.0 as usize
    }
}

/// Where a vNIC is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    Local(PortId),
    Remote(PeerId),
}

/// Where a vNIC is, and how large a packet gets there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) location: Location,
    /// Path MTU: bytes of the largest IP packet.
    pub(crate) mtu: u16,
}

/// The vNIC that a packet goes to, and the route to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextHop {
    pub(crate) mac: Mac,
    pub(crate) path: Path,
}

/// Who has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A vNIC of the network.
    Vnic(NextHop),
    /// One of another network, if that network has a route back.
    Peered(VpcId),
    /// Somebody outside, behind an uplink.
    Outside(UplinkId),
    /// The switch itself: the gateway, or a load balancer.
    Own,
}
