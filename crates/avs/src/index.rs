//! All indexes derived from one configuration: ports, networks, and the locations of addresses.

use std::collections::BTreeMap;
use std::net::IpAddr;

use bifrost_nic::steer;
use bifrost_tables::{ExactMap, exact_map};
use bifrost_wire::{Mac, Vni};

use crate::addresses::Addresses;
use crate::dns::Names;
use crate::groups::GroupPolicy;
use crate::ids::{LoadBalancerId, PortId, UplinkId, WorkerId};
use crate::learned::Learned;
use crate::location::{Location, NextHop, Owner, Path, VpcId};
use crate::members::Members;
use crate::nat::{Source, Uplink};
use crate::rewrite::Endpoint;
use crate::session::Key;
use crate::tables::{BuildError, Ipv6Lease, Lease, Nat, Port, RouteChanges, SharedAddress, Tables, Workers};
use crate::vpc::VpcIndex;

/// The indexes of one configuration.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    ports: Vec<Option<PortIndex>>,
    vpcs: Vec<VpcIndex>,
    by_vni: ExactMap<Vni, VpcId>,
    /// Shared by ports of a network that have the same groups.
    policies: Vec<GroupPolicy>,
    workers: Workers,
    /// Whether a packet to a port of this host may belong to another worker.
    has_affinity: bool,
    has_balancers: bool,
    uplinks: Vec<Uplink>,
    #[cfg(feature = "mutations")]
    pub(crate) mutation: Option<crate::Mutation>,
}

/// A port and everything derived for it.
#[derive(Clone, Debug)]
pub(crate) struct PortIndex {
    pub(crate) port: Port,
    vpc: VpcId,
    policy: Option<usize>,
    /// Set if the outside is behind the port.
    pub(crate) uplink: Option<UplinkId>,
    /// Addresses that its guest shares with other vNICs.
    pub(crate) shared: Vec<IpAddr>,
    /// The other vNICs that share at least one of these addresses, without duplicates.
    pub(crate) sharers: Vec<Mac>,
    /// Whether its guest may use the metadata service.
    pub(crate) has_metadata: bool,
    /// Its DHCP lease.
    pub(crate) lease: Option<Box<Lease>>,
    /// Its IPv6 settings.
    pub(crate) ipv6_lease: Option<Box<Ipv6Lease>>,
}

impl Index {
    pub(crate) fn build(tables: &Tables) -> Result<Self, BuildError> {
        Self::since(tables, None)
    }

    /// Builds the index of a configuration from that of a `former` one: `tables` has everything except routes, and
    /// only the changes of the routes are applied.
    pub(crate) fn since(tables: &Tables, former: Option<(&Index, &[RouteChanges])>) -> Result<Self, BuildError> {
        let (ports, vpcs, by_vni, workers) = (Vec::new(), Vec::new(), exact_map(0), tables.workers);
        let several = workers.count > 1;
        let has_affinity = several && tables.ports.iter().any(|port| port.home.is_some() || !port.groups.is_empty());
        let mut index = Self {
            ports,
            vpcs,
            by_vni,
            policies: Vec::new(),
            workers,
            has_affinity,
            has_balancers: !tables.load_balancers.is_empty(),
            uplinks: Vec::new(),
            #[cfg(feature = "mutations")]
            mutation: tables.mutation,
        };
        for vpc in &tables.vpcs {
            let id = VpcId(index.vpcs.len() as u32);
            if index.by_vni.insert(vpc.vni, id).is_some() {
                return Err(BuildError::DuplicateVni(vpc.vni));
            }
            // A network that is new in this configuration starts without routes.
            let none = Addresses::default();
            let addresses = former.map(|(index, _)| index.vpc(vpc.vni).map_or(&none, |vpc| &vpc.addresses));
            index.vpcs.push(VpcIndex::new(vpc, id, index.has_balancers, addresses)?);
        }
        for (place, balancer) in tables.load_balancers.iter().enumerate() {
            let vpc = index.vpc_id(balancer.vni)?;
            index.vpcs[vpc.place()].add_balancer(LoadBalancerId(place as u16), balancer)?;
        }
        for (vni, within) in &tables.learned {
            let vpc = index.vpc_id(*vni)?;
            index.vpcs[vpc.place()].learned = Some(Box::new(Learned::new(within)));
        }
        index.set_metadata(tables)?;
        index.add_ports(tables)?;
        for port in &tables.metadata {
            if let Some(index) = index.ports.get_mut(port.place()).and_then(Option::as_mut) {
                index.has_metadata = true;
            }
        }
        for lease in &tables.leases {
            let port = index.ports.get_mut(lease.port.place()).and_then(Option::as_mut);
            let lent = port.filter(|port| port.lease.is_none()).ok_or(BuildError::Lease(lease.port))?;
            lent.lease = Some(Box::new(lease.clone()));
        }
        for lease in &tables.ipv6_leases {
            let port = index.ports.get_mut(lease.port.place()).and_then(Option::as_mut);
            let lent = port.filter(|port| port.ipv6_lease.is_none()).ok_or(BuildError::Lease(lease.port))?;
            lent.ipv6_lease = Some(Box::new(lease.clone()));
        }
        for zone in &tables.zones {
            let vpc = index.vpc_id(zone.vni)?;
            index.vpcs[vpc.place()].names = Some(Names::new(zone));
        }
        match former {
            None => {
                for route in &tables.routes {
                    let vpc = index.vpc_id(route.vni)?;
                    index.vpcs[vpc.place()].add_route(route)?;
                }
            }
            Some((_, changes)) => {
                for changes in changes {
                    // Routes of a network that has been removed disappear with it.
                    if let Ok(vpc) = index.vpc_id(changes.vni) {
                        index.vpcs[vpc.place()].change_routes(changes)?;
                    }
                }
            }
        }
        tables.shared.iter().try_for_each(|shared| index.add_shared(shared))?;
        for peering in &tables.peerings {
            let (vpc, to) = (index.vpc_id(peering.vni)?, index.vpc_id(peering.to)?);
            if vpc == to {
                return Err(BuildError::PeeringWithItself(peering.vni));
            }
            index.vpcs[vpc.place()].add_peering(peering.prefix, to)?;
        }
        index.add_nat(&tables.nat)?;
        index.vpcs.iter_mut().try_for_each(VpcIndex::finish)?;
        Ok(index)
    }

    /// Called before ports and routes are added: none of them may have the addresses of the metadata service.
    fn set_metadata(&mut self, tables: &Tables) -> Result<(), BuildError> {
        for &id in &tables.metadata {
            let port = tables.ports.iter().find(|port| port.id == id).ok_or(BuildError::Metadata(id))?;
            let vpc = self.vpc_id(port.vni)?;
            if !self.vpcs[vpc.place()].has_gateway() {
                return Err(BuildError::Metadata(id));
            }
            self.vpcs[vpc.place()].has_metadata = true;
        }
        Ok(())
    }

    fn add_ports(&mut self, tables: &Tables) -> Result<(), BuildError> {
        let mut policies = BTreeMap::new();
        let mut members = Members::of(tables);
        for port in &tables.ports {
            let vpc = self.vpc_id(port.vni)?;
            let slot = port.id.place();
            if port.id.0 >= PortId::LIMIT {
                return Err(BuildError::PortNumber(port.id));
            }
            if self.ports.len() <= slot {
                self.ports.resize_with(slot + 1, || None);
            }
            if self.ports[slot].is_some() {
                return Err(BuildError::DuplicatePort(port.id));
            }
            self.vpcs[vpc.place()].add_port(port)?;
            let name = (port.vni, &port.groups);
            let policy = match (port.groups.is_empty(), policies.get(&name)) {
                (true, _) => None,
                (false, Some(&known)) => Some(known),
                (false, None) => {
                    self.policies.push(GroupPolicy::new(port.vni, &port.groups, &mut members)?);
                    policies.insert(name, self.policies.len() - 1);
                    Some(self.policies.len() - 1)
                }
            };
            self.ports[slot] = Some(PortIndex {
                port: port.clone(),
                vpc,
                policy,
                uplink: None,
                shared: Vec::new(),
                sharers: Vec::new(),
                has_metadata: false,
                lease: None,
                ipv6_lease: None,
            });
        }
        Ok(())
    }

    /// Called after ports and routes are added.
    fn add_shared(&mut self, shared: &SharedAddress) -> Result<(), BuildError> {
        let vpc = self.vpc_id(shared.vni)?;
        self.vpcs[vpc.place()].add_shared(shared)?;
        let locations = shared.vnics.iter().map(|mac| self.vpcs[vpc.place()].drafted_location(*mac));
        let ports = locations.filter_map(|at| if let Some(Location::Local(port)) = at { Some(port) } else { None });
        for port in ports.collect::<Vec<_>>() {
            let Some(index) = self.ports.get_mut(port.place()).and_then(Option::as_mut) else { continue };
            index.shared.push(shared.address);
            let others = shared.vnics.iter().filter(|mac| **mac != index.port.mac);
            index.sharers.extend(others);
            index.sharers.sort_unstable();
            index.sharers.dedup();
        }
        Ok(())
    }

    /// Called after ports are added.
    fn add_nat(&mut self, nat: &Nat) -> Result<(), BuildError> {
        for (place, &id) in nat.uplinks.iter().enumerate() {
            let index = self.ports.get_mut(id.place()).and_then(Option::as_mut).ok_or(BuildError::UnknownUplink(id))?;
            index.uplink = Some(UplinkId(place as u16));
            self.uplinks.push(Uplink::new(id, index.port.mac, index.port.mtu, index.vpc));
            self.vpcs[index.vpc.place()].has_records = true;
        }
        for floating in &nat.floating {
            let (vpc, uplink) = (self.vpc_id(floating.vni)?, self.uplink_of(floating.uplink)?);
            same_family(floating.outside, floating.inside)?;
            self.uplinks[usize::from(uplink.0)].add_floating(floating.outside, vpc, floating.inside)?;
            self.vpcs[vpc.place()].add_outside(uplink, floating.outside.is_ipv6())?;
        }
        for source in &nat.sources {
            let (vpc, uplink) = (self.vpc_id(source.vni)?, self.uplink_of(source.uplink)?);
            let (v4, v6): (Vec<_>, Vec<_>) = source.addresses.iter().partition(|address| address.is_ipv4());
            let families = [(false, v4.is_empty()), (true, v6.is_empty())];
            let block = source.ports.0..=source.ports.1;
            self.uplinks[usize::from(uplink.0)]
                .add_source(vpc, Source { v4, v6, block, per_guest: source.per_guest })?;
            for (v6, _) in families.into_iter().filter(|(_, is_empty)| !is_empty) {
                self.vpcs[vpc.place()].add_outside(uplink, v6)?;
            }
        }
        for forward in &nat.forwards {
            let (vpc, uplink) = (self.vpc_id(forward.vni)?, self.uplink_of(forward.uplink)?);
            let end = |(address, port)| Endpoint { address, port };
            let (outside, inside) = (end(forward.outside), end(forward.inside));
            same_family(outside.address, inside.address)?;
            let protocol = forward.protocol.number();
            self.uplinks[usize::from(uplink.0)].add_forward(protocol, outside, vpc, inside)?;
            self.vpcs[vpc.place()].add_outside(uplink, outside.address.is_ipv6())?;
        }
        Ok(())
    }

    /// The same index for another worker of the host.
    pub(crate) fn of_worker(&self, own: WorkerId) -> Index {
        let mut index = self.clone();
        index.workers.own = own;
        index
    }

    /// The addresses of each network.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = (Vni, &Addresses)> {
        self.vpcs.iter().map(|vpc| (vpc.vni, &vpc.addresses))
    }

    /// Takes over what networks have learned in an earlier configuration.
    pub(crate) fn adopt_learned(&mut self, former: &mut Index) {
        for vpc in &mut self.vpcs {
            let Some(learned) = &mut vpc.learned else { continue };
            let before = former.by_vni.get(&vpc.vni).and_then(|id| former.vpcs.get_mut(id.place()));
            if let Some(before) = before.and_then(|before| before.learned.as_deref_mut()) {
                learned.adopt(before);
            }
        }
    }

    /// The learned routes of a network that learns.
    pub(crate) fn learned_mut(&mut self, vni: Vni) -> Option<&mut Learned> {
        let id = *self.by_vni.get(&vni)?;
        self.vpcs.get_mut(id.place())?.learned.as_deref_mut()
    }

    /// Replaces the addresses of a network.
    pub(crate) fn set_addresses(&mut self, vni: Vni, addresses: Addresses) {
        if let Some(vpc) = self.by_vni.get(&vni).and_then(|id| self.vpcs.get_mut(id.place())) {
            vpc.addresses = addresses;
        }
    }

    fn uplink_of(&self, port: PortId) -> Result<UplinkId, BuildError> {
        let uplink = self.port(port).and_then(|(port, _)| port.uplink);
        uplink.ok_or(BuildError::UnknownUplink(port))
    }

    fn vpc_id(&self, vni: Vni) -> Result<VpcId, BuildError> {
        self.by_vni.get(&vni).copied().ok_or(BuildError::UnknownVni(vni))
    }

    /// A port and its network.
    pub(crate) fn port(&self, id: PortId) -> Option<(&PortIndex, &VpcIndex)> {
        let port = self.ports.get(id.place())?.as_ref()?;
        Some((port, &self.vpcs[port.vpc.place()]))
    }

    /// All ports.
    pub(crate) fn ports(&self) -> impl Iterator<Item = &Port> {
        self.ports.iter().flatten().map(|index| &index.port)
    }

    /// The ports to whose guests this worker sends unsolicited router advertisements, and their settings. Of several
    /// workers exactly one advertises to a port.
    pub(crate) fn advertised(&self) -> impl Iterator<Item = (&Port, &Ipv6Lease)> {
        let Workers { own, count } = self.workers;
        let worker = move |port: &Port| port.home.unwrap_or(WorkerId((port.id.0 % u32::from(count.max(1))) as u16));
        let ports = self.ports.iter().flatten().filter(move |index| worker(&index.port) == own);
        ports.filter_map(|index| Some((&index.port, index.ipv6_lease.as_deref()?)))
    }

    /// Upper bound (exclusive) of the port numbers.
    pub(crate) fn port_numbers(&self) -> usize {
        self.ports.len()
    }

    /// Whether there are load balancers in any network, or uplinks.
    #[inline(always)]
    pub(crate) fn has_services(&self) -> bool {
        self.has_balancers || !self.uplinks.is_empty()
    }

    /// All uplinks.
    pub(crate) fn uplinks(&self) -> impl Iterator<Item = &Uplink> {
        self.uplinks.iter()
    }

    /// Whether this worker alone serves a port.
    pub(crate) fn is_own(&self, id: PortId) -> bool {
        let Workers { own, count } = self.workers;
        count < 2 || self.port(id).is_some_and(|(port, _)| port.port.home == Some(own))
    }

    /// An uplink.
    pub(crate) fn uplink(&self, id: UplinkId) -> Option<&Uplink> {
        self.uplinks.get(usize::from(id.0))
    }

    /// Whether a port is an uplink.
    pub(crate) fn is_uplink(&self, port: PortId) -> bool {
        self.port(port).is_some_and(|(port, _)| port.uplink.is_some())
    }

    /// Whether any network uses flow records.
    pub(crate) fn has_records(&self) -> bool {
        self.vpcs.iter().any(|vpc| vpc.has_records)
    }

    /// The other worker that must handle a packet from `sender` to a port of this host; `None`: this worker handles
    /// it.
    #[inline]
    pub(crate) fn other_worker(&self, id: PortId, sender: Mac) -> Option<WorkerId> {
        if !self.has_affinity {
            return None;
        }
        let Workers { own, count } = self.workers;
        let (to, _) = self.port(id)?;
        let worker = match to.port.home {
            Some(home) => home,
            // Without security groups there is no state: the worker that has the packet delivers it.
            None if to.policy.is_none() => return None,
            None => WorkerId(steer::worker_of_pair(sender.octets(), to.port.mac.octets(), count)),
        };
        (worker != own).then_some(worker)
    }

    /// The worker that gets the packets of a conversation, as far as one of its ends tells: packets between two vNICs
    /// have the MAC addresses of these. `None`: the other end is no vNIC's, as with multicast.
    pub(crate) fn worker_of(&self, key: &Key) -> Option<WorkerId> {
        let (port, vpc) = self.port(key.port())?;
        match port.port.home {
            Some(home) => Some(home),
            None if self.workers.count < 2 => Some(WorkerId(0)),
            None => {
                let (_, remote) = key.ends();
                let (_, mac) = self.vnic_of(vpc, remote.address)?;
                Some(WorkerId(steer::worker_of_pair(port.port.mac.octets(), mac.octets(), self.workers.count)))
            }
        }
    }

    /// Whether a packet to a port of this host may belong to another worker.
    pub(crate) fn has_affinity(&self) -> bool {
        self.has_affinity
    }

    /// The security groups' rules for a port, if it has groups.
    #[inline(always)]
    pub(crate) fn policy(&self, port: &PortIndex) -> Option<&GroupPolicy> {
        port.policy.map(|policy| &self.policies[policy])
    }

    /// Whether any rule that applies to a port is logged.
    pub(crate) fn logs_rules(&self, id: PortId) -> bool {
        self.port(id).is_some_and(|(port, vpc)| {
            vpc.acl.as_ref().is_some_and(|acl| acl.logs.is_some())
                || self.policy(port).is_some_and(|policy| policy.logs.is_some())
        })
    }

    /// The vNIC to which a packet goes that is routed by the gateway of `vpc`, and that vNIC's network.
    #[inline(always)]
    pub(crate) fn next_hop<'a>(
        &'a self,
        vpc: &'a VpcIndex,
        from: IpAddr,
        to: IpAddr,
    ) -> Option<(NextHop, &'a VpcIndex)> {
        self.next_hop_to(vpc, vpc.owner_by_route(to), from, to)
    }

    /// The same, for an `owner` of `to` that was looked up before.
    #[inline(always)]
    pub(crate) fn next_hop_to<'a>(
        &'a self,
        vpc: &'a VpcIndex,
        owner: Option<Owner>,
        from: IpAddr,
        to: IpAddr,
    ) -> Option<(NextHop, &'a VpcIndex)> {
        match owner {
            Some(Owner::Vnic(hop)) => Some((hop, vpc)),
            Some(Owner::Peered(other)) => self.across(vpc, other, from, to),
            Some(Owner::Outside(uplink)) => self.outside(vpc, uplink, to),
            Some(Owner::Own) => None,
            None => Some((vpc.learned_route(to)?, vpc)),
        }
    }

    /// The next hop through an uplink, which is the way to everything that is not learned.
    #[cold]
    fn outside<'a>(&'a self, vpc: &'a VpcIndex, uplink: UplinkId, to: IpAddr) -> Option<(NextHop, &'a VpcIndex)> {
        if vpc.learned.as_ref().is_some_and(|learned| learned.has(to)) {
            return Some((vpc.learned_route(to)?, vpc));
        }
        let uplink = self.uplink(uplink)?;
        let path = Path::new(Location::Local(uplink.port), uplink.mtu);
        Some((NextHop { mac: uplink.mac, path }, self.vpc_of(uplink.vpc)?))
    }

    /// The vNIC of another network to which a packet goes. Both networks must have a peering: `vpc` for the address
    /// `to`, the other network for `from`.
    #[cold]
    pub(crate) fn across(
        &self,
        vpc: &VpcIndex,
        other: VpcId,
        from: IpAddr,
        to: IpAddr,
    ) -> Option<(NextHop, &VpcIndex)> {
        let other = self.vpc_of(other)?;
        if !self.is_way(vpc, other, from) {
            return None;
        }
        Some((other.route(to).or_else(|| other.learned_route(to))?, other))
    }

    /// Whether packets from the address `from` of `vpc` may go to `other`.
    pub(crate) fn is_way(&self, vpc: &VpcIndex, other: &VpcIndex, from: IpAddr) -> bool {
        other.owner_by_route(from) == Some(Owner::Peered(vpc.id)) && other.has_gateway()
    }

    /// The vNIC that has an address, as seen from a network: the vNIC's network and MAC address.
    pub(crate) fn vnic_of(&self, vpc: &VpcIndex, addr: IpAddr) -> Option<(VpcId, Mac)> {
        let owner = vpc.owner(addr);
        if matches!(owner, None | Some(Owner::Outside(_)))
            && let Some(hop) = vpc.learned_route(addr)
        {
            return Some((vpc.id, hop.mac));
        }
        match owner? {
            Owner::Vnic(hop) => Some((vpc.id, hop.mac)),
            Owner::Peered(other) => {
                let other = self.vpc_of(other)?;
                other.route(addr).or_else(|| other.learned_route(addr)).map(|hop| (other.id, hop.mac))
            }
            // Everything outside counts as one vNIC: any router there may send an ICMP error.
            Owner::Outside(uplink) => self.uplink(uplink).map(|uplink| (uplink.vpc, uplink.mac)),
            Owner::Own => None,
        }
    }

    /// The index of a network.
    pub(crate) fn vpc_of(&self, id: VpcId) -> Option<&VpcIndex> {
        self.vpcs.get(id.place())
    }

    pub(crate) fn vpc(&self, vni: Vni) -> Option<&VpcIndex> {
        self.by_vni.get(&vni).and_then(|&id| self.vpc_of(id))
    }
}

fn same_family(outside: IpAddr, inside: IpAddr) -> Result<(), BuildError> {
    if outside.is_ipv4() == inside.is_ipv4() { Ok(()) } else { Err(BuildError::OutsideAddress(outside)) }
}
