//! Names: small numbers that the operator's configuration gives, and the direction of a packet.

/// Names a local port. Small numbers: the switch keeps an array of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u16);

impl PortId {
    /// Its place in arrays of ports.
    #[inline(always)]
    pub(crate) fn place(self) -> usize {
        usize::from(self.0)
    }
}

/// Names an uplink of a configuration: its place in [`Nat::uplinks`](crate::Nat::uplinks).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UplinkId(pub u16);

/// Names a worker of this host: workers are numbered from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u16);

/// Names another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u16);

/// Names a security group: its place in [`Tables::groups`](crate::Tables::groups).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u16);

/// Names a set of addresses: its place in [`Tables::address_sets`](crate::Tables::address_sets).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressSetId(pub u16);

/// Names a load balancer: its place in [`Tables::load_balancers`](crate::Tables::load_balancers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LoadBalancerId(pub u16);

/// The direction of a packet, seen from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Sent by the guest.
    Egress = 0,
    /// To the guest.
    Ingress = 1,
}

impl Direction {
    /// The other one.
    #[must_use]
    pub const fn opposite(self) -> Self {
        match self {
            Direction::Egress => Direction::Ingress,
            Direction::Ingress => Direction::Egress,
        }
    }
}
