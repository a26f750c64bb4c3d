//! Everything derived from one configuration: ports, networks, and where addresses are.

use std::collections::BTreeMap;
use std::net::IpAddr;

use bifrost_nic::steer;
use bifrost_tables::{ExactMap, exact_map};
use bifrost_wire::{Mac, Vni};

use crate::groups::GroupPolicy;
use crate::ids::{LoadBalancerId, PortId, WorkerId};
use crate::tables::{BuildError, Port, Tables, Workers};
use crate::vpc::{NextHop, Owner, VpcId, VpcIndex};

/// The indexes of one configuration.
#[derive(Debug)]
pub(crate) struct Index {
    ports: Vec<Option<PortIndex>>,
    vpcs: Vec<VpcIndex>,
    by_vni: ExactMap<Vni, VpcId>,
    /// What ports with the same groups have in common.
    policies: Vec<GroupPolicy>,
    workers: Workers,
    /// Not every worker of the host may show its guests all that is for them.
    has_affinity: bool,
    has_balancers: bool,
    #[cfg(feature = "mutations")]
    pub(crate) mutation: Option<crate::Mutation>,
}

/// A port and where its network is.
#[derive(Debug)]
pub(crate) struct PortIndex {
    pub(crate) port: Port,
    vpc: VpcId,
    policy: Option<usize>,
}

impl Index {
    pub(crate) fn build(tables: &Tables) -> Result<Self, BuildError> {
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
            #[cfg(feature = "mutations")]
            mutation: tables.mutation,
        };
        for vpc in &tables.vpcs {
            let id = VpcId(index.vpcs.len() as u32);
            if index.by_vni.insert(vpc.vni, id).is_some() {
                return Err(BuildError::DuplicateVni(vpc.vni));
            }
            index.vpcs.push(VpcIndex::new(vpc, id, index.has_balancers)?);
        }
        for (place, balancer) in tables.load_balancers.iter().enumerate() {
            let vpc = index.vpc_id(balancer.vni)?;
            index.vpcs[vpc.place()].add_balancer(LoadBalancerId(place as u16), balancer)?;
        }
        index.add_ports(tables)?;
        for route in &tables.routes {
            let vpc = index.vpc_id(route.vni)?;
            index.vpcs[vpc.place()].add_route(route)?;
        }
        for peering in &tables.peerings {
            let (vpc, to) = (index.vpc_id(peering.vni)?, index.vpc_id(peering.to)?);
            if vpc == to {
                return Err(BuildError::PeeringWithItself(peering.vni));
            }
            index.vpcs[vpc.place()].add_peering(peering.prefix, to)?;
        }
        index.vpcs.iter_mut().try_for_each(VpcIndex::finish)?;
        Ok(index)
    }

    fn add_ports(&mut self, tables: &Tables) -> Result<(), BuildError> {
        let mut policies = BTreeMap::new();
        for port in &tables.ports {
            let vpc = self.vpc_id(port.vni)?;
            let slot = port.id.place();
            if self.ports.len() <= slot {
                self.ports.resize_with(slot + 1, || None);
            }
            if self.ports[slot].is_some() {
                return Err(BuildError::DuplicatePort(port.id));
            }
            self.vpcs[vpc.place()].add_port(port)?;
            let policy = match (port.groups.is_empty(), policies.get(&port.groups)) {
                (true, _) => None,
                (false, Some(&known)) => Some(known),
                (false, None) => {
                    self.policies.push(GroupPolicy::new(&port.groups, &tables.groups)?);
                    policies.insert(port.groups.clone(), self.policies.len() - 1);
                    Some(self.policies.len() - 1)
                }
            };
            self.ports[slot] = Some(PortIndex { port: port.clone(), vpc, policy });
        }
        Ok(())
    }

    fn vpc_id(&self, vni: Vni) -> Result<VpcId, BuildError> {
        self.by_vni.get(&vni).copied().ok_or(BuildError::UnknownVni(vni))
    }

    /// A port, and its network.
    pub(crate) fn port(&self, id: PortId) -> Option<(&PortIndex, &VpcIndex)> {
        let port = self.ports.get(id.place())?.as_ref()?;
        Some((port, &self.vpcs[port.vpc.place()]))
    }

    /// Every port.
    pub(crate) fn ports(&self) -> impl Iterator<Item = &Port> {
        self.ports.iter().flatten().map(|index| &index.port)
    }

    /// Port numbers are below this.
    pub(crate) fn port_numbers(&self) -> usize {
        self.ports.len()
    }

    /// Whether there are load balancers in any network.
    #[inline(always)]
    pub(crate) fn has_balancers(&self) -> bool {
        self.has_balancers
    }

    /// Whether flow records are of use to a network.
    pub(crate) fn has_records(&self) -> bool {
        self.vpcs.iter().any(|vpc| vpc.has_records)
    }

    /// The other worker that serves what `sender` sends to a port of this host; `None`: this one does.
    #[inline]
    pub(crate) fn other_worker(&self, id: PortId, sender: Mac) -> Option<WorkerId> {
        if !self.has_affinity {
            return None;
        }
        let Workers { own, count } = self.workers;
        let (to, _) = self.port(id)?;
        let worker = match to.port.home {
            Some(home) => home,
            // Nothing is remembered: the worker that has the packet shows it.
            None if to.policy.is_none() => return None,
            None => WorkerId(steer::worker_of_pair(sender.octets(), to.port.mac.octets(), count)),
        };
        (worker != own).then_some(worker)
    }

    /// Whether a port of this host may be another worker's.
    pub(crate) fn has_affinity(&self) -> bool {
        self.has_affinity
    }

    /// What the groups of a port say, if it has any.
    #[inline(always)]
    pub(crate) fn policy(&self, port: &PortIndex) -> Option<&GroupPolicy> {
        port.policy.map(|policy| &self.policies[policy])
    }

    /// Which vNIC a packet is for that goes through the gateway of `vpc`, and its network.
    #[inline(always)]
    pub(crate) fn next_hop<'a>(
        &'a self,
        vpc: &'a VpcIndex,
        from: IpAddr,
        to: IpAddr,
    ) -> Option<(NextHop, &'a VpcIndex)> {
        match vpc.owner_by_route(to)? {
            Owner::Vnic(hop) => Some((hop, vpc)),
            Owner::Peered(other) => self.across(vpc, other, from, to),
        }
    }

    /// Which vNIC of another network a packet is for, if both networks say that they can reach each other so: `to` from `vpc`, and
    /// `from` from that other one.
    #[cold]
    pub(crate) fn across(
        &self,
        vpc: &VpcIndex,
        other: VpcId,
        from: IpAddr,
        to: IpAddr,
    ) -> Option<(NextHop, &VpcIndex)> {
        let other = self.vpc_of(other)?;
        let back = other.owner_by_route(from) == Some(Owner::Peered(vpc.id));
        let hop = other.route(to).filter(|_| back && other.has_gateway())?;
        Some((hop, other))
    }

    /// The vNIC that has an address, as seen from a network: that of its network, and its MAC address.
    pub(crate) fn vnic_of(&self, vpc: &VpcIndex, addr: IpAddr) -> Option<(VpcId, Mac)> {
        match vpc.owner(addr)? {
            Owner::Vnic(hop) => Some((vpc.id, hop.mac)),
            Owner::Peered(other) => {
                let other = self.vpc_of(other)?;
                other.route(addr).map(|hop| (other.id, hop.mac))
            }
        }
    }

    /// A network.
    pub(crate) fn vpc_of(&self, id: VpcId) -> Option<&VpcIndex> {
        self.vpcs.get(id.place())
    }

    pub(crate) fn vpc(&self, vni: Vni) -> Option<&VpcIndex> {
        self.by_vni.get(&vni).and_then(|&id| self.vpc_of(id))
    }
}
