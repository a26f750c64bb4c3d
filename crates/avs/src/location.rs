//! Locations of vNICs and addresses.

use bifrost_wire::Mac;

use crate::ids::{PeerId, PortId, UplinkId};

// Entries of 16 bytes never span two cache lines.
const _: () = assert!(size_of::<Path>() == 6 && size_of::<Owner>() == 16);

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

impl Location {
    /// The host, if it is another one.
    #[cfg(test)]
    pub(crate) fn peer(self) -> Option<PeerId> {
        match self {
            Location::Local(_) => None,
            Location::Remote(peer) => Some(peer),
        }
    }
}

/// The location of a vNIC, and the path MTU to it. Without padding: tables have one of these in each entry, next to a
/// MAC address.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(Rust, packed(2))]
pub(crate) struct Path {
    /// The number of the port or peer, and [`REMOTE`].
    location: u32,
    /// Path MTU: largest IP packet, bytes.
    pub(crate) mtu: u16,
}

/// Set in the location of a vNIC on another host.
const REMOTE: u32 = 1 << 31;

const _: () = assert!(PortId::LIMIT <= REMOTE && PeerId::LIMIT <= REMOTE);

impl Path {
    /// `mtu`: path MTU, bytes.
    #[inline(always)]
    pub(crate) fn new(location: Location, mtu: u16) -> Path {
        let location = match location {
            Location::Local(port) => port.0,
            Location::Remote(peer) => peer.0 | REMOTE,
        };
        Path { location, mtu }
    }

    #[inline(always)]
    pub(crate) fn location(self) -> Location {
        let number = self.location & !REMOTE;
        if self.location & REMOTE == 0 { Location::Local(PortId(number)) } else { Location::Remote(PeerId(number)) }
    }
}

impl std::fmt::Debug for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Path").field("location", &self.location()).field("mtu", &{ self.mtu }).finish()
    }
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
