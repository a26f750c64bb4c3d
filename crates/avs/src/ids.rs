//! Identifiers: small numbers from the operator's configuration; and the direction of a packet.

/// Identifies a local port. The numbers are small, because the switch indexes an array with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u32);

impl PortId {
    /// Upper bound of the numbers, exclusive: 2^20, because a session's key has 20 bits for them.
    pub const LIMIT: u32 = 1 << 20;

    /// Index into arrays of ports.
    #[inline(always)]
    pub(crate) fn place(self) -> usize {
        self.0 as usize
    }
}

/// Identifies an uplink: its index in [`Nat::uplinks`](crate::Nat::uplinks).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UplinkId(pub u16);

/// Identifies a worker of this host, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u16);

/// Identifies another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u32);

impl PeerId {
    /// Upper bound of the numbers, exclusive: 2^24, because a flow record's key has 24 bits for them.
    pub const LIMIT: u32 = 1 << 24;
}

/// Identifies a security group: its index in [`Tables::groups`](crate::Tables::groups).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u16);

/// Identifies a set of addresses: its index in [`Tables::address_sets`](crate::Tables::address_sets).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressSetId(pub u16);

/// Identifies a load balancer: its index in [`Tables::load_balancers`](crate::Tables::load_balancers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LoadBalancerId(pub u16);

/// The direction of a packet, as seen from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the guest.
    Egress = 0,
    /// To the guest.
    Ingress = 1,
}

impl Direction {
    /// The opposite direction.
    #[must_use]
    pub const fn opposite(self) -> Self {
        match self {
            Direction::Egress => Direction::Ingress,
            Direction::Ingress => Direction::Egress,
        }
    }
}
