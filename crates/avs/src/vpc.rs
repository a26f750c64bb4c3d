//! The indexes of one network.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

use bifrost_tables::IpNet;
use bifrost_wire::{Mac, Vni};

use crate::acl::Acl;
use crate::addresses::{Addresses, Draft};
use crate::dns::Names;
use crate::ids::{LoadBalancerId, PeerId, UplinkId};
use crate::learned::{Known, Learned};
use crate::location::{Location, NextHop, Owner, Path, VpcId};
use crate::service::Balancers;
use crate::tables::LoadBalancer;
use crate::tables::{BuildError, GATEWAY_MAC, Ordering, Port, Reliability, Route, RouteChanges, SharedAddress, Vpc};
use crate::tables::{METADATA, is_metadata};

#[derive(Clone, Debug)]
pub(crate) struct VpcIndex {
    pub(crate) vni: Vni,
    pub(crate) id: VpcId,
    pub(crate) reliability: Reliability,
    pub(crate) ordering: Ordering,
    pub(crate) acl: Option<Acl>,
    /// DNS names that the gateway resolves for its guests.
    pub(crate) names: Option<Names>,
    /// Whether its packets have flow records. They do if a decision needs more than a route lookup: there is an ACL,
    /// a port has security groups, or any network has load balancers, because replies to their clients may come from
    /// any network.
    pub(crate) has_records: bool,
    gateways: Vec<IpAddr>,
    /// The gateway also has the addresses of the metadata service.
    pub(crate) has_metadata: bool,
    /// Addresses that vNICs share, and these vNICs. They are reached through the gateway, so that guests need not
    /// know which vNIC holds one.
    shared: BTreeMap<IpAddr, Box<[Mac]>>,
    /// `None`: there are no load balancers.
    pub(crate) balancers: Option<Box<Balancers>>,
    /// Routes that are learned; `None`: all are configured.
    pub(crate) learned: Option<Box<Learned>>,
    /// Present until [`finish`](Self::finish).
    draft: Option<Box<Draft>>,
    pub(crate) addresses: Addresses,
}

impl VpcIndex {
    /// `former`: the network's addresses in an earlier configuration, whose routes stay.
    pub(crate) fn new(
        vpc: &Vpc,
        id: VpcId,
        has_balancers: bool,
        former: Option<&Addresses>,
    ) -> Result<Self, BuildError> {
        if let Some(&addr) = vpc.gateways.iter().find(|a| !is_host(**a)) {
            return Err(BuildError::Address(addr));
        }
        Ok(Self {
            vni: vpc.vni,
            id,
            reliability: vpc.reliability,
            ordering: vpc.ordering,
            acl: Acl::new(&vpc.acl),
            names: None,
            has_records: has_balancers || !vpc.acl.is_empty(),
            gateways: vpc.gateways.clone(),
            has_metadata: false,
            shared: BTreeMap::new(),
            balancers: None,
            learned: None,
            draft: Some(Box::new(Draft::new(vpc.vni, former))),
            addresses: Addresses::default(),
        })
    }

    pub(crate) fn add_port(&mut self, port: &Port) -> Result<(), BuildError> {
        let path = Path::new(Location::Local(port.id), port.mtu);
        self.draft()?.add_vnic(port.mac, path)?;
        self.has_records |= !port.groups.is_empty();
        for &addr in &port.addresses {
            if !is_host(addr) {
                return Err(BuildError::Address(addr));
            }
            self.add_prefix(IpNet::from(addr), Owner::Vnic(NextHop { mac: port.mac, path }))?;
        }
        let routed = |&prefix| self.add_prefix(prefix, Owner::Vnic(NextHop { mac: port.mac, path }));
        port.routed.iter().try_for_each(routed)
    }

    /// Adds a shared address. The `vnics` must belong to ports and routes that have been added.
    pub(crate) fn add_shared(&mut self, shared: &SharedAddress) -> Result<(), BuildError> {
        let SharedAddress { vni: _, address, ref vnics, holder } = *shared;
        if !is_host(address) {
            return Err(BuildError::Address(address));
        }
        let path = |mac: Mac| self.draft.as_ref().and_then(|draft| draft.path(mac));
        let is_here = |mac: &Mac| path(*mac).is_some();
        let is_right = holder.is_none_or(|holder| vnics.contains(&holder)) && vnics.iter().all(is_here);
        if self.is_own(address) || self.is_shared(address) || !self.has_gateway() || !is_right {
            return Err(BuildError::SharedAddress(address));
        }
        let hop = holder.and_then(|mac| Some(NextHop { mac, path: path(mac)? }));
        self.shared.insert(address, vnics.clone().into());
        hop.map_or(Ok(()), |hop| self.add_prefix(IpNet::from(address), Owner::Vnic(hop)))
    }

    /// Whether any vNICs share addresses in this network.
    #[inline(always)]
    pub(crate) fn has_shared(&self) -> bool {
        !self.shared.is_empty()
    }

    pub(crate) fn is_shared(&self, addr: IpAddr) -> bool {
        self.sharers(addr).next().is_some()
    }

    /// The vNICs that share an address.
    pub(crate) fn sharers(&self, addr: IpAddr) -> impl Iterator<Item = Mac> {
        self.shared.get(&addr).into_iter().flatten().copied()
    }

    pub(crate) fn add_route(&mut self, route: &Route) -> Result<(), BuildError> {
        self.check_prefix(route.prefix.trunc())?;
        self.draft()?.add_route(route)
    }

    /// Applies the differences of the routes from the earlier configuration, instead of adding all routes. All ports
    /// must have been added.
    pub(crate) fn change_routes(&mut self, changes: &RouteChanges) -> Result<(), BuildError> {
        changes.routes.iter().filter(|(_, route)| route.is_some()).try_for_each(|(net, _)| self.check_prefix(*net))?;
        self.draft()?.change_routes(changes)
    }

    /// Adds a load balancer. Called before ports and routes are added, which may not have its address.
    pub(crate) fn add_balancer(&mut self, id: LoadBalancerId, balancer: &LoadBalancer) -> Result<(), BuildError> {
        let address = balancer.address;
        if !is_host(address) {
            return Err(BuildError::Address(address));
        }
        if self.gateways.contains(&address) {
            return Err(BuildError::DuplicatePrefix { vni: self.vni, prefix: IpNet::from(address) });
        }
        let of_other = balancer.backends.iter().find(|backend| backend.address.is_ipv4() != address.is_ipv4());
        if let Some(backend) = of_other {
            return Err(BuildError::BackendFamily(backend.address));
        }
        self.balancers.get_or_insert_default().add(id, balancer)
    }

    /// Whether the switch itself owns an address: the gateway's, or a load balancer's.
    #[inline(always)]
    pub(crate) fn is_own(&self, addr: IpAddr) -> bool {
        self.is_gateway(addr) || self.balancers.as_ref().is_some_and(|balancers| balancers.has_address(addr))
    }

    /// Adds a default route to an uplink, for IPv4 or IPv6.
    pub(crate) fn add_outside(&mut self, uplink: UplinkId, v6: bool) -> Result<(), BuildError> {
        let any = if v6 { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::from([0, 0, 0, 0]) };
        let prefix = IpNet::new_assert(any, 0);
        self.has_records = true;
        match self.draft()?.local_owner(prefix) {
            Some(Owner::Outside(known)) if known == uplink => Ok(()),
            _ => self.add_prefix(prefix, Owner::Outside(uplink)),
        }
    }

    pub(crate) fn add_peering(&mut self, prefix: IpNet, network: VpcId) -> Result<(), BuildError> {
        self.add_prefix(prefix, Owner::Peered(network))
    }

    fn add_prefix(&mut self, prefix: IpNet, owner: Owner) -> Result<(), BuildError> {
        let prefix = prefix.trunc();
        self.check_prefix(prefix)?;
        self.draft()?.add_owner(prefix, owner)
    }

    /// Checks that a prefix is not an address of the switch itself.
    fn check_prefix(&self, prefix: IpNet) -> Result<(), BuildError> {
        let single = prefix.prefix_len() == prefix.max_prefix_len();
        if single && self.is_own(prefix.addr()) {
            return Err(BuildError::DuplicatePrefix { vni: self.vni, prefix });
        }
        Ok(())
    }

    /// The tables under construction; after [`finish`](Self::finish) the network cannot be changed.
    fn draft(&mut self) -> Result<&mut Draft, BuildError> {
        self.draft.as_deref_mut().ok_or(BuildError::UnknownVni(self.vni))
    }

    /// Builds the tables from everything that was added.
    pub(crate) fn finish(&mut self) -> Result<(), BuildError> {
        let balancers = self.balancers.iter().flat_map(|balancers| balancers.addresses());
        let mut own: Vec<IpAddr> = self.gateways.iter().copied().chain(balancers).collect();
        if self.has_gateway() {
            own.push(IpAddr::V6(link_local(GATEWAY_MAC)));
        }
        if self.has_metadata {
            own.extend([IpAddr::V4(METADATA.0), IpAddr::V6(METADATA.1)]);
        }
        own.sort_unstable();
        own.dedup();
        let Some(mut draft) = self.draft.take() else { return Ok(()) };
        own.into_iter().try_for_each(|addr| draft.add_owner(IpNet::from(addr), Owner::Own))?;
        self.addresses = draft.finish()?;
        Ok(())
    }

    pub(crate) fn path(&self, mac: Mac) -> Option<Path> {
        self.addresses.path(mac)
    }

    /// The location of a vNIC while the network is built, once ports and routes have been added.
    pub(crate) fn drafted_location(&self, mac: Mac) -> Option<Location> {
        self.draft.as_ref()?.path(mac).map(|path| path.location())
    }

    pub(crate) fn location(&self, mac: Mac) -> Option<Location> {
        self.path(mac).map(|path| path.location())
    }

    /// The owner of an address according to the routes.
    #[inline(always)]
    pub(crate) fn owner_by_route(&self, addr: IpAddr) -> Option<Owner> {
        self.addresses.owner(addr)
    }

    /// The vNIC of this network that has an address, according to the routes.
    #[inline(always)]
    pub(crate) fn route(&self, addr: IpAddr) -> Option<NextHop> {
        match self.owner_by_route(addr)? {
            Owner::Vnic(hop) => Some(hop),
            Owner::Peered(_) | Owner::Outside(_) | Owner::Own => None,
        }
    }

    /// The gateway's first address of a family.
    pub(crate) fn gateway(&self, v6: bool) -> Option<IpAddr> {
        self.gateways.iter().copied().find(|addr| addr.is_ipv6() == v6)
    }

    pub(crate) fn has_gateway(&self) -> bool {
        !self.gateways.is_empty()
    }

    pub(crate) fn is_gateway(&self, addr: IpAddr) -> bool {
        self.gateways.contains(&addr)
            || (self.has_gateway() && addr == IpAddr::V6(link_local(GATEWAY_MAC)))
            || (self.has_metadata && is_metadata(addr))
    }

    /// The MAC address to reply with when a guest resolves `addr`.
    pub(crate) fn resolve(&self, addr: IpAddr) -> Option<Mac> {
        if self.is_own(addr) || self.is_shared(addr) {
            return Some(GATEWAY_MAC);
        }
        self.vnic(addr).or_else(|| self.learned_route(addr)).map(|hop| hop.mac)
    }

    /// The learned route to an address that has no configured one.
    #[cold]
    pub(crate) fn learned_route(&self, addr: IpAddr) -> Option<NextHop> {
        self.learned.as_ref()?.route(addr)
    }

    /// What is known of an address that has no configured route.
    #[cold]
    pub(crate) fn learned(&self, addr: IpAddr, now_ns: u64) -> Known {
        self.learned.as_ref().map_or(Known::NotLearned, |learned| learned.look_up(addr, now_ns))
    }

    /// The path to a vNIC that only learned routes lead to.
    #[cold]
    pub(crate) fn learned_path(&self, mac: Mac) -> Option<Path> {
        self.learned.as_ref()?.path(mac)
    }

    /// Whether a vNIC without configured routes may be on host `peer`: nothing else was learned.
    #[cold]
    pub(crate) fn may_learn_vnic_at(&self, mac: Mac, peer: PeerId) -> bool {
        let at = Location::Remote(peer);
        self.learned.as_ref().is_some_and(|learned| learned.path(mac).is_none_or(|path| path.location() == at))
            && self.location(mac).is_none()
    }

    /// Whether an address without a configured route may be on host `peer`: its routes are learned, and nothing else
    /// was learned.
    #[cold]
    pub(crate) fn may_learn_address_at(&self, addr: IpAddr, peer: PeerId) -> bool {
        let at = Location::Remote(peer);
        self.learned
            .as_ref()
            .is_some_and(|learned| learned.has(addr) && learned.route(addr).is_none_or(|hop| hop.path.location() == at))
    }

    /// The vNIC of this network that has an address: according to the routes, or, for an IPv6 link-local address, by
    /// the MAC address in it.
    pub(crate) fn vnic(&self, addr: IpAddr) -> Option<NextHop> {
        match self.owner(addr)? {
            Owner::Vnic(hop) => Some(hop),
            Owner::Peered(_) | Owner::Outside(_) | Owner::Own => None,
        }
    }

    /// The owner of an address, as [`owner_by_route`](Self::owner_by_route); for an IPv6 link-local address, by the
    /// MAC address in it first.
    pub(crate) fn owner(&self, addr: IpAddr) -> Option<Owner> {
        match addr {
            IpAddr::V6(a) if a.is_unicast_link_local() => mac_of_link_local(a)
                .and_then(|mac| self.path(mac).map(|path| Owner::Vnic(NextHop { mac, path })))
                .or_else(|| self.owner_by_route(addr)),
            _ => self.owner_by_route(addr),
        }
    }
}

/// Whether a vNIC can have the address.
pub(crate) fn is_host(addr: IpAddr) -> bool {
    let special = match addr {
        IpAddr::V4(a) => a.is_broadcast(),
        IpAddr::V6(_) => false,
    };
    !(special || addr.is_unspecified() || addr.is_multicast() || addr.is_loopback())
}

/// The link-local address derived from a MAC address (RFC 4291, appendix A).
pub(crate) fn link_local(mac: Mac) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0;
    Ipv6Addr::from_octets([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

fn mac_of_link_local(addr: Ipv6Addr) -> Option<Mac> {
    let [.., a, b, c, 0xff, 0xfe, d, e, f] = addr.octets() else { return None };
    let mac = Mac([a ^ 2, b, c, d, e, f]);
    (link_local(mac) == addr).then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_local_addresses_contain_their_mac() {
        let mac = Mac([0x02, 0, 0, 0xab, 0xcd, 0xef]);
        let addr: Ipv6Addr = "fe80::ff:feab:cdef".parse().expect("an address");
        assert_eq!(link_local(mac), addr);
        assert_eq!(mac_of_link_local(addr), Some(mac));
        for other in ["fe80::1", "fe80:0:0:1::ff:feab:cdef", "2001:db8::ff:feab:cdef"] {
            assert_eq!(mac_of_link_local(other.parse().expect("an address")), None, "{other}");
        }
    }
}
