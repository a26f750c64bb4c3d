//! All objects, with the indexes that checks, allocation and spans need.
//!
//! A model takes whatever the store has, also what contradicts itself because another program wrote it: it must never lose step
//! with the store. What may be written is checked when a change is planned.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use bifrost_wire::Mac;
use ipnet::{IpNet, Ipv4Net};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::key::{Key, Kind};
use crate::spec::{LoadBalancerSpec, NatGatewaySpec, PortSpec, Spec, SubnetSpec, UplinkSpec};
use crate::withdrawn::Withdrawn;

/// An object as the store has it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// What it says.
    pub spec: Spec,
    /// Its version, 1 and more: one more with each change.
    pub generation: u64,
    /// When it became what it is, milliseconds since 1970.
    pub committed_ms: u64,
}

/// The value of a record.
#[derive(Serialize, Deserialize)]
struct RecordValue {
    generation: u64,
    committed_ms: u64,
    spec: Value,
}

impl Stored {
    /// The value that the store keeps.
    pub fn encode(&self) -> Vec<u8> {
        let (generation, committed_ms) = (self.generation, self.committed_ms);
        let value = RecordValue { generation, committed_ms, spec: self.spec.value() };
        // Texts, numbers and maps with texts as keys: JSON has them all.
        serde_json::to_vec(&value).unwrap_or_default()
    }

    /// The object of a value that the store keeps.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(kind: Kind, value: &[u8]) -> Result<Stored, String> {
        let value: RecordValue = serde_json::from_slice(value).map_err(|e| format!("is not a record: {e}"))?;
        let spec = Spec::parse(kind, &value.spec).map_err(|(field, what)| format!("{field}: {what}"))?;
        Ok(Stored { spec, generation: value.generation, committed_ms: value.committed_ms })
    }
}

/// Where an object is found other than by its key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Index {
    /// A VPC of that VNI.
    Vni(u32),
    /// A host of that underlay address.
    Underlay(IpAddr),
    /// A port, load balancer or router of a VPC with that address.
    Address(Key, IpAddr),
    /// A port of a VPC with that MAC address.
    Mac(Key, Mac),
    /// A port of a VPC behind whose guest that prefix is, or a table that says so.
    Routed(Key, IpNet),
    /// A NAT gateway of a VPC.
    Gateway(Key),
    /// A NAT gateway of which a host has a block.
    Allotted(String),
    /// What has an address outside: an uplink, a NAT gateway, a guest.
    Outside(IpAddr),
    /// A grant of that prefix of outside addresses.
    Granted(IpNet),
    /// A host where that VNI stands for the outside.
    OutsideVni(u32),
    /// A port whose guest is attached there: a host, and what is attached to on it.
    Attachment(String, String),
    /// What refers to that object.
    Referrer(Key),
}

impl Index {
    /// Where a prefix behind a guest is entered: one that is a single address with the addresses.
    pub(crate) fn routed(vpc: &Key, prefix: IpNet) -> Index {
        match prefix.prefix_len() == prefix.max_prefix_len() {
            true => Index::Address(vpc.clone(), prefix.addr()),
            false => Index::Routed(vpc.clone(), prefix),
        }
    }
}

/// What is found in one place of the index: one, but for referrers.
#[derive(Debug)]
enum Found {
    One(Key),
    Many(BTreeSet<Key>),
}

impl Found {
    fn insert(&mut self, key: &Key) {
        match self {
            Found::One(known) if known == key => {}
            Found::One(known) => *self = Found::Many([known.clone(), key.clone()].into()),
            Found::Many(keys) => drop(keys.insert(key.clone())),
        }
    }

    /// Whether that was the last one.
    fn remove(&mut self, key: &Key) -> bool {
        match self {
            Found::One(known) => known == key,
            Found::Many(keys) => {
                keys.remove(key);
                keys.is_empty()
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Key> {
        let (one, many) = match self {
            Found::One(key) => (Some(key), None),
            Found::Many(keys) => (None, Some(keys)),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }
}

#[derive(Debug)]
struct Object {
    stored: Stored,
    /// Where it is entered.
    entered: Box<[Index]>,
}

/// All objects.
#[derive(Debug, Default)]
pub struct Model {
    objects: HashMap<Key, Object, foldhash::fast::RandomState>,
    /// Their keys, in order: a map in order would compare texts at each look-up.
    keys: BTreeSet<Key>,
    index: BTreeMap<Index, Found>,
    /// The highest address that each subnet has given to a port or load balancer: freed addresses
    /// are used again only when there are no later ones.
    cursors: HashMap<Key, IpAddr>,
    /// How many objects of each kind a project has, in the order of [`Kind::ALL`].
    counts: HashMap<Box<str>, [u64; Kind::ALL.len()]>,
    /// Hosts that are dead. They are no objects: nobody wishes them so.
    withdrawn: BTreeMap<String, Withdrawn>,
}

impl Model {
    /// The object of a key.
    pub fn get(&self, key: &Key) -> Option<&Stored> {
        self.objects.get(key).map(|object| &object.stored)
    }

    /// All objects, kind by kind, then by project and name.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Stored)> {
        self.keys.iter().filter_map(|key| Some((key, self.get(key)?)))
    }

    /// All objects from a key on, in the same order.
    pub fn iter_from(&self, from: &Key) -> impl Iterator<Item = (&Key, &Stored)> {
        self.keys.range(from..).filter_map(|key| Some((key, self.get(key)?)))
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// How many objects of a kind belong to a project.
    pub fn count(&self, project: &str, kind: Kind) -> u64 {
        self.counts.get(project).map_or(0, |counts| counts[kind as usize])
    }

    /// How many objects of a kind there are.
    pub(crate) fn count_of_kind(&self, kind: Kind) -> u64 {
        self.counts.values().map(|counts| counts[kind as usize]).sum()
    }

    /// What refers to an object, which need not exist.
    pub fn referrers<'m>(&'m self, key: &Key) -> impl Iterator<Item = &'m Key> + use<'m> {
        self.found(&Index::Referrer(key.clone()))
    }

    /// What is withdrawn of a host, because it is dead.
    pub fn withdrawn(&self, host: &str) -> Option<Withdrawn> {
        self.withdrawn.get(host).copied()
    }

    /// Takes over what is withdrawn of a host, which need not exist; gives what was before. [`Spans::withdraw`](crate::Spans::withdraw)
    /// has to follow if that differs.
    pub fn set_withdrawn(&mut self, host: &str, withdrawn: Option<Withdrawn>) -> Option<Withdrawn> {
        match withdrawn {
            Some(withdrawn) => self.withdrawn.insert(host.to_owned(), withdrawn),
            None => self.withdrawn.remove(host),
        }
    }

    /// Takes over an object as the store has it; gives what it was before.
    pub fn set(&mut self, key: Key, stored: Stored) -> Option<Stored> {
        let before = self.take(&key);
        if self.keys.insert(key.clone()) {
            self.counts.entry(key.project().into()).or_default()[key.kind() as usize] += 1;
        }
        self.put(key.clone(), stored);
        if key.kind() == Kind::Subnet && before.is_none() {
            self.enter_users_again(&key);
        }
        before
    }

    /// Takes over that an object is gone; gives what it was.
    pub fn remove(&mut self, key: &Key) -> Option<Stored> {
        let before = self.take(key)?;
        if self.keys.remove(key) {
            self.count_less(key);
        }
        if key.kind() == Kind::Subnet {
            self.enter_users_again(key);
        }
        Some(before)
    }

    pub(crate) fn found<'m>(&'m self, index: &Index) -> impl Iterator<Item = &'m Key> + use<'m> {
        self.index.get(index).into_iter().flat_map(Found::iter)
    }

    /// The VNIs in use, from one on, in order.
    pub(crate) fn vnis_from(&self, first: u32) -> impl Iterator<Item = u32> {
        let range = self.index.range(Index::Vni(first)..);
        range.map_while(|(index, _)| if let Index::Vni(vni) = index { Some(*vni) } else { None })
    }

    /// The addresses of a VPC in use within a prefix, in order.
    pub(crate) fn addresses_in(&self, vpc: &Key, prefix: IpNet) -> impl DoubleEndedIterator<Item = IpAddr> {
        let (first, last) = (prefix.network(), prefix.broadcast());
        let range = self.index.range(Index::Address(vpc.clone(), first)..=Index::Address(vpc.clone(), last));
        range.filter_map(|(index, _)| if let Index::Address(_, address) = index { Some(*address) } else { None })
    }

    /// The prefixes behind guests of a VPC, or the ways out, within a prefix, each with what says so.
    pub(crate) fn routed_within(&self, vpc: &Key, prefix: IpNet) -> impl Iterator<Item = (IpNet, &Key)> {
        let last = IpNet::from(prefix.broadcast());
        let range = Index::Routed(vpc.clone(), prefix.trunc())..=Index::Routed(vpc.clone(), last);
        self.index.range(range).flat_map(|(index, found)| {
            let prefix = if let Index::Routed(_, prefix) = index { Some(*prefix) } else { None };
            prefix.into_iter().flat_map(|prefix| found.iter().map(move |by| (prefix, by)))
        })
    }

    /// The grants of outside addresses, some more than once.
    pub(crate) fn grants(&self) -> impl Iterator<Item = &Key> {
        let range = self.index.range(Index::Granted(IpNet::V4(Ipv4Net::default()))..);
        let grants = range.map_while(|(index, found)| if let Index::Granted(_) = index { Some(found) } else { None });
        grants.flat_map(Found::iter)
    }

    /// The grants of prefixes that have all of a prefix.
    pub(crate) fn grants_of(&self, prefix: IpNet) -> impl Iterator<Item = &Key> {
        let wider = (0..=prefix.prefix_len()).rev().filter_map(move |length| IpNet::new(prefix.addr(), length).ok());
        wider.flat_map(move |wider| self.found(&Index::Granted(wider.trunc())))
    }

    /// The prefixes within one that are granted, each with its grant.
    pub(crate) fn granted_within(&self, prefix: IpNet) -> impl Iterator<Item = (IpNet, &Key)> {
        // In order of first address and length: what begins with the same address and is wider comes before.
        let range = Index::Granted(prefix.trunc())..=Index::Granted(IpNet::from(prefix.broadcast()));
        self.index.range(range).flat_map(|(index, found)| {
            let prefix = if let Index::Granted(prefix) = index { Some(*prefix) } else { None };
            prefix.into_iter().flat_map(|prefix| found.iter().map(move |grant| (prefix, grant)))
        })
    }

    /// The outside addresses in use within a prefix, each with what has it.
    pub(crate) fn outside_within(&self, prefix: IpNet) -> impl Iterator<Item = (IpAddr, &Key)> {
        let range = Index::Outside(prefix.network())..=Index::Outside(prefix.broadcast());
        self.index.range(range).flat_map(|(index, found)| {
            let address = if let Index::Outside(address) = index { Some(*address) } else { None };
            address.into_iter().flat_map(|address| found.iter().map(move |user| (address, user)))
        })
    }

    /// The highest address that a subnet has given.
    pub(crate) fn cursor(&self, subnet: &Key) -> Option<IpAddr> {
        self.cursors.get(subnet).copied()
    }

    pub(crate) fn subnet(&self, key: &Key) -> Option<&SubnetSpec> {
        match self.get(key).map(|stored| &stored.spec) {
            Some(Spec::Subnet(spec)) => Some(spec),
            _ => None,
        }
    }

    pub(crate) fn port(&self, key: &Key) -> Option<&PortSpec> {
        match self.get(key).map(|stored| &stored.spec) {
            Some(Spec::Port(spec)) => Some(spec),
            _ => None,
        }
    }

    pub(crate) fn load_balancer(&self, key: &Key) -> Option<&LoadBalancerSpec> {
        match self.get(key).map(|stored| &stored.spec) {
            Some(Spec::LoadBalancer(spec)) => Some(spec),
            _ => None,
        }
    }

    pub(crate) fn nat_gateway(&self, key: &Key) -> Option<&NatGatewaySpec> {
        match self.get(key).map(|stored| &stored.spec) {
            Some(Spec::NatGateway(spec)) => Some(spec),
            _ => None,
        }
    }

    /// The uplink of a host that has one.
    pub(crate) fn uplink(&self, host: &str) -> Option<&UplinkSpec> {
        match self.get(&Key::unchecked_host(host)).map(|stored| &stored.spec) {
            Some(Spec::Host(spec)) => spec.uplink.as_ref(),
            _ => None,
        }
    }

    /// The VNI of a VPC that has one.
    pub(crate) fn vni(&self, vpc: &Key) -> Option<u32> {
        match self.get(vpc).map(|stored| &stored.spec) {
            Some(Spec::Vpc(spec)) => spec.vni,
            _ => None,
        }
    }

    /// The prefixes in which hosts learn routes of a VPC.
    pub(crate) fn learned(&self, vpc: &Key) -> Option<&BTreeSet<IpNet>> {
        match self.get(vpc).map(|stored| &stored.spec) {
            Some(Spec::Vpc(spec)) => Some(&spec.learned),
            _ => None,
        }
    }

    /// The VPC of a VNI.
    pub(crate) fn vpc_of_vni(&self, vni: u32) -> Option<&Key> {
        self.found(&Index::Vni(vni)).next()
    }

    /// The VPC of a port: that of its first subnet.
    pub(crate) fn vpc_of(&self, key: &Key, spec: &PortSpec) -> Option<Key> {
        self.vpc_of_subnet(key, spec.subnets.first()?)
    }

    /// The VPC of a subnet that an object names.
    pub(crate) fn vpc_of_subnet(&self, key: &Key, subnet: &str) -> Option<Key> {
        let subnet = self.subnet(&key.sibling(Kind::Subnet, subnet))?;
        Some(key.sibling(Kind::Vpc, &subnet.vpc))
    }

    fn count_less(&mut self, key: &Key) {
        let Some(counts) = self.counts.get_mut(key.project()) else { return };
        counts[key.kind() as usize] -= 1;
        if counts.iter().all(|count| *count == 0) {
            self.counts.remove(key.project());
        }
    }

    fn put(&mut self, key: Key, stored: Stored) {
        let entered = self.entries(&key, &stored.spec);
        for index in &entered {
            match self.index.get_mut(index) {
                Some(found) => found.insert(&key),
                None => drop(self.index.insert(index.clone(), Found::One(key.clone()))),
            }
        }
        match &stored.spec {
            Spec::Port(spec) => self.advance_cursors(&key, &spec.subnets, &spec.addresses),
            Spec::LoadBalancer(spec) => {
                self.advance_cursors(&key, std::slice::from_ref(&spec.subnet), spec.address.as_slice())
            }
            _ => {}
        }
        self.objects.insert(key, Object { stored, entered });
    }

    fn take(&mut self, key: &Key) -> Option<Stored> {
        let object = self.objects.remove(key)?;
        for index in object.entered {
            if self.index.get_mut(&index).is_some_and(|found| found.remove(key)) {
                self.index.remove(&index);
            }
        }
        if key.kind() == Kind::Subnet {
            self.cursors.remove(key);
        }
        Some(object.stored)
    }

    /// Addresses are entered by their VPC, which the subnet of a port or load balancer names.
    fn enter_users_again(&mut self, subnet: &Key) {
        let users: Vec<Key> = self.referrers(subnet).cloned().collect();
        for user in users {
            if let Some(stored) = self.take(&user) {
                self.put(user, stored);
            }
        }
    }

    fn entries(&self, key: &Key, spec: &Spec) -> Box<[Index]> {
        // Keys of objects that exist are shared.
        let shared = |key: Key| self.objects.get_key_value(&key).map_or(key, |(known, _)| known.clone());
        let references = spec.references(key).into_iter();
        let mut all: Vec<Index> = references.map(|(_, to)| Index::Referrer(shared(to))).collect();
        match spec {
            Spec::Host(host) => {
                all.extend(host.addresses.iter().map(|address| Index::Underlay(*address)));
                if let Some(uplink) = &host.uplink {
                    all.push(Index::OutsideVni(uplink.vni()));
                    all.extend(uplink.addresses.iter().map(|address| Index::Outside(address.addr())));
                    all.extend(uplink.attachment().map(|to| Index::Attachment(key.name().to_owned(), to)));
                }
            }
            Spec::Vpc(vpc) => all.extend(vpc.vni.map(Index::Vni)),
            Spec::Subnet(subnet) => {
                let vpc = key.sibling(Kind::Vpc, &subnet.vpc);
                all.extend(subnet.gateway.map(|gateway| Index::Address(vpc, gateway)));
            }
            Spec::Port(port) => {
                if let Some(vpc) = self.vpc_of(key, port).map(shared) {
                    all.extend(port.addresses.iter().map(|address| Index::Address(vpc.clone(), *address)));
                    all.extend(port.routed.iter().map(|prefix| Index::routed(&vpc, *prefix)));
                    all.extend(port.mac.map(|mac| Index::Mac(vpc, mac)));
                }
                all.extend(port.attachment().map(|to| Index::Attachment(port.host.clone(), to)));
            }
            Spec::LoadBalancer(balancer) => {
                let vpc = self.vpc_of_subnet(key, &balancer.subnet).map(shared);
                all.extend(vpc.zip(balancer.address).map(|(vpc, address)| Index::Address(vpc, address)));
            }
            Spec::NatGateway(gateway) => {
                let vpc = shared(key.sibling(Kind::Vpc, &gateway.vpc));
                // It is the way to everything that has no other one.
                all.extend(gateway.default_route().map(|prefix| Index::routed(&vpc, prefix)));
                all.push(Index::Gateway(vpc));
                all.extend(gateway.addresses.iter().map(|address| Index::Outside(*address)));
                all.extend(gateway.blocks.keys().map(|host| Index::Allotted(host.clone())));
            }
            Spec::RouteTable(table) => {
                let vpc = shared(key.sibling(Kind::Vpc, &table.vpc));
                all.extend(table.routes.iter().map(|route| Index::routed(&vpc, route.prefix)));
            }
            Spec::FloatingIp(floating) => all.extend(floating.address.map(Index::Outside)),
            Spec::OutsideGrant(grant) => all.extend(grant.prefixes.iter().map(|prefix| Index::Granted(prefix.trunc()))),
            Spec::Project(_) | Spec::AddressSet(_) | Spec::SecurityGroup(_) | Spec::Peering(_) => {}
            Spec::Mirror(_) | Spec::FlowLog(_) => {}
        }
        all.sort_unstable();
        all.dedup();
        all.into_boxed_slice()
    }

    fn advance_cursors(&mut self, key: &Key, subnets: &[String], addresses: &[IpAddr]) {
        for name in subnets {
            let subnet = key.sibling(Kind::Subnet, name);
            let Some(prefix) = self.subnet(&subnet).map(|subnet| subnet.prefix) else { continue };
            let highest = addresses.iter().copied().filter(|address| prefix.contains(address)).max();
            let Some(highest) = highest else { continue };
            let cursor = self.cursors.entry(subnet).or_insert(highest);
            *cursor = highest.max(*cursor);
        }
    }
}
