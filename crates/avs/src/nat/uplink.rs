//! An uplink: its outside addresses and their owners.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use bifrost_tables::{ExactMap, exact_map};
use bifrost_wire::Mac;

use crate::ids::PortId;
use crate::location::VpcId;
use crate::rewrite::Endpoint;
use crate::tables::BuildError;

/// A port that leads to the outside.
#[derive(Clone, Debug)]
pub(crate) struct Uplink {
    pub(crate) port: PortId,
    pub(crate) mac: Mac,
    pub(crate) mtu: u16,
    /// The port's network.
    pub(crate) vpc: VpcId,
    addresses: ExactMap<IpAddr, Address>,
    floating: ExactMap<(VpcId, IpAddr), IpAddr>,
    sources: ExactMap<VpcId, Source>,
    /// Port forwards by protocol and outside end, and by network, protocol and inside end.
    forwards: ExactMap<(u8, Endpoint), (VpcId, Endpoint)>,
    forwarded: ExactMap<(VpcId, u8, Endpoint), Endpoint>,
}

/// The owner of an outside address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// A floating address of one guest: its network and its address there.
    Floating(VpcId, IpAddr),
    /// Shared by several guests.
    Shared,
}

/// Source NAT of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) v4: Vec<IpAddr>,
    pub(crate) v6: Vec<IpAddr>,
    /// The ports of each address that this host may allocate.
    pub(crate) block: RangeInclusive<u16>,
    /// Maximum number of ports of a guest.
    pub(crate) per_guest: u32,
}

impl Source {
    pub(crate) fn addresses(&self, v6: bool) -> &[IpAddr] {
        if v6 { &self.v6 } else { &self.v4 }
    }
}

impl Uplink {
    pub(crate) fn new(port: PortId, mac: Mac, mtu: u16, vpc: VpcId) -> Self {
        Uplink {
            port,
            mac,
            mtu,
            vpc,
            addresses: exact_map(0),
            floating: exact_map(0),
            sources: exact_map(0),
            forwards: exact_map(0),
            forwarded: exact_map(0),
        }
    }

    /// Assigns a floating address to a guest.
    ///
    /// # Errors
    /// The outside address has another owner, or the guest has another floating address.
    pub(crate) fn add_floating(&mut self, outside: IpAddr, vpc: VpcId, inside: IpAddr) -> Result<(), BuildError> {
        let taken = self.addresses.insert(outside, Address::Floating(vpc, inside)).is_some();
        let twice = self.floating.insert((vpc, inside), outside).is_some();
        if taken || twice { Err(BuildError::OutsideAddress(outside)) } else { Ok(()) }
    }

    /// Adds the addresses that a network's guests share.
    ///
    /// # Errors
    /// An address is a floating one, or the network already has source NAT.
    pub(crate) fn add_source(&mut self, vpc: VpcId, source: Source) -> Result<(), BuildError> {
        for &address in source.v4.iter().chain(&source.v6) {
            self.share(address)?;
        }
        let address = source.v4.iter().chain(&source.v6).next().copied();
        match self.sources.insert(vpc, source) {
            None => Ok(()),
            Some(_) => Err(BuildError::OutsideAddress(address.unwrap_or(IpAddr::from([0, 0, 0, 0])))),
        }
    }

    /// Adds a port forward.
    ///
    /// # Errors
    /// The outside end or the guest's end is already in use.
    pub(crate) fn add_forward(
        &mut self,
        protocol: u8,
        outside: Endpoint,
        vpc: VpcId,
        inside: Endpoint,
    ) -> Result<(), BuildError> {
        self.share(outside.address)?;
        let taken = self.forwards.insert((protocol, outside), (vpc, inside)).is_some();
        let twice = self.forwarded.insert((vpc, protocol, inside), outside).is_some();
        if taken || twice { Err(BuildError::OutsideAddress(outside.address)) } else { Ok(()) }
    }

    fn share(&mut self, address: IpAddr) -> Result<(), BuildError> {
        match self.addresses.insert(address, Address::Shared) {
            Some(Address::Floating(..)) => Err(BuildError::OutsideAddress(address)),
            Some(Address::Shared) | None => Ok(()),
        }
    }

    /// The owner of an address, if it is one of the uplink's addresses.
    pub(crate) fn address(&self, address: IpAddr) -> Option<Address> {
        self.addresses.get(&address).copied()
    }

    /// The floating address of a guest, if it has one.
    pub(crate) fn floating(&self, vpc: VpcId, inside: IpAddr) -> Option<IpAddr> {
        self.floating.get(&(vpc, inside)).copied()
    }

    /// The source NAT of a network.
    pub(crate) fn source(&self, vpc: VpcId) -> Option<&Source> {
        self.sources.get(&vpc)
    }

    /// The guest end that an outside end is forwarded to.
    pub(crate) fn forward(&self, protocol: u8, outside: Endpoint) -> Option<(VpcId, Endpoint)> {
        self.forwards.get(&(protocol, outside)).copied()
    }

    /// The outside end from which a guest's end is forwarded.
    pub(crate) fn forwarded(&self, vpc: VpcId, protocol: u8, inside: Endpoint) -> Option<Endpoint> {
        self.forwarded.get(&(vpc, protocol, inside)).copied()
    }

    /// Whether guests of a network may get a dynamic mapping to this outside end.
    pub(crate) fn lends(&self, vpc: VpcId, protocol: u8, outside: Endpoint) -> bool {
        let of_source = self.source(vpc).is_some_and(|source| {
            source.block.contains(&outside.port)
                && source.addresses(outside.address.is_ipv6()).contains(&outside.address)
        });
        of_source && self.forward(protocol, outside).is_none()
    }
}
