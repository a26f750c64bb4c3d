//! Which topics a host needs: it follows from the ports on it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::Topic;
use crate::compile::{groups_of, placed_in};
use crate::key::{Key, Kind};
use crate::model::Model;
use crate::spec::Spec;

/// How often something is counted, by what counts it.
type Counts<K, V> = HashMap<K, BTreeMap<V, u32>, foldhash::fast::RandomState>;

/// Hosts that may need other topics than before.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    pub(super) hosts: BTreeMap<Arc<str>, May>,
    /// All hosts are looked at in the end: none is noted.
    pub(super) is_everything: bool,
}

/// Of which topics it is to be found out whether a host needs them.
#[derive(Debug)]
pub(super) enum May {
    /// Of any.
    All,
    /// Of these.
    These(BTreeSet<Topic>),
}

impl Dirty {
    fn all(&mut self, host: &Arc<str>) {
        if !self.is_everything {
            self.hosts.insert(Arc::clone(host), May::All);
        }
    }

    fn one(&mut self, host: &Arc<str>, topic: Topic) {
        if !self.is_everything
            && let May::These(topics) = self.hosts.entry(Arc::clone(host)).or_insert(May::These(BTreeSet::new()))
        {
            topics.insert(topic);
        }
    }
}

/// Where a port is.
#[derive(Clone, Debug, PartialEq)]
struct Placed {
    host: Arc<str>,
    vpc: Key,
    groups: Vec<Key>,
}

/// Where ports are, counted in the ways that topics follow from.
#[derive(Debug, Default)]
pub(super) struct Placement {
    ports: HashMap<Key, Placed, foldhash::fast::RandomState>,
    vpcs_of_host: Counts<Arc<str>, Key>,
    hosts_of_vpc: Counts<Key, Arc<str>>,
    groups_of_host: Counts<Arc<str>, Key>,
    groups_of_vpc: Counts<Key, Key>,
    hosts_of_group: Counts<Key, Arc<str>>,
    /// What a group's rules name.
    named: HashMap<Key, BTreeSet<Key>>,
    /// The peerings of a VPC, each with the other VPC.
    peerings: HashMap<Key, BTreeSet<(Key, Key)>>,
    /// The NAT gateways of a VPC.
    gateways: HashMap<Key, BTreeSet<Key>>,
}

impl Placement {
    /// Hosts that have ports.
    pub(super) fn hosts(&self) -> impl Iterator<Item = &Arc<str>> {
        self.vpcs_of_host.keys()
    }

    /// Takes over an object as the model has it; adds the hosts that may need other topics because of that.
    pub(super) fn take(&mut self, model: &Model, key: &Key, dirty: &mut Dirty) {
        match key.kind() {
            Kind::Port => self.take_port(model, key, dirty),
            Kind::Peering => self.take_peering(model, key, dirty),
            Kind::SecurityGroup => {
                let named: BTreeSet<Key> = match model.get(key).map(|stored| &stored.spec) {
                    Some(spec) => spec.references(key).into_iter().map(|(_, to)| to).collect(),
                    None => BTreeSet::new(),
                };
                if self.named.get(key).cloned().unwrap_or_default() != named {
                    counted(&self.hosts_of_group, key).for_each(|host| dirty.all(host));
                    self.named.insert(key.clone(), named);
                    self.named.retain(|_, named| !named.is_empty());
                }
            }
            Kind::NatGateway => self.take_gateway(model, key, dirty),
            Kind::Host | Kind::Project | Kind::OutsideGrant | Kind::Vpc | Kind::Subnet | Kind::AddressSet => {}
            Kind::LoadBalancer | Kind::FloatingIp | Kind::RouteTable | Kind::Mirror | Kind::FlowLog => {}
        }
    }

    /// The topics that a host needs.
    pub(super) fn topics_of(&self, host: &Arc<str>) -> BTreeSet<Topic> {
        let mut topics = BTreeSet::new();
        if !self.vpcs_of_host.contains_key(host) {
            return topics;
        }
        topics.insert(Topic::Host(host.to_string()));
        let mut vpcs = BTreeSet::new();
        for vpc in counted(&self.vpcs_of_host, host) {
            vpcs.insert(vpc);
            topics.insert(Topic::Inside(vpc.clone()));
            let gateways = self.gateways.get(vpc).into_iter().flatten();
            topics.extend(gateways.map(|gateway| Topic::Nat(gateway.clone(), host.to_string())));
            for (peering, other) in self.peerings.get(vpc).into_iter().flatten() {
                topics.insert(Topic::Peering(peering.clone()));
                vpcs.insert(other);
            }
        }
        let mut names: BTreeSet<&Key> = BTreeSet::new();
        let mut others: HashSet<&Arc<str>, foldhash::fast::RandomState> = HashSet::default();
        for vpc in vpcs {
            topics.insert(Topic::Vpc(vpc.clone()));
            others.extend(counted(&self.hosts_of_vpc, vpc));
            // A route says the groups of its port.
            names.extend(counted(&self.groups_of_vpc, vpc));
        }
        let others = others.into_iter().filter(|other| *other != host);
        topics.extend(others.map(|other| Topic::Peer(other.to_string())));
        for group in counted(&self.groups_of_host, host) {
            topics.insert(Topic::Group(group.clone()));
            for named in self.named.get(group).into_iter().flatten() {
                match named.kind() {
                    Kind::AddressSet => drop(topics.insert(Topic::Set(named.clone()))),
                    _ => drop(names.insert(named)),
                }
            }
        }
        let names = names.into_iter().filter(|name| !is_counted(&self.groups_of_host, host, name));
        topics.extend(names.map(|name| Topic::GroupName(name.clone())));
        topics
    }

    /// Whether a host needs a topic of a kind that others' changes bring: the same as that [`topics_of`](Self::topics_of) has it.
    pub(super) fn needs(&self, host: &Arc<str>, topic: &Topic) -> bool {
        match topic {
            Topic::Peer(other) => {
                let other: Arc<str> = other.as_str().into();
                other != *host && self.vpcs_seen(host).any(|vpc| is_counted(&self.hosts_of_vpc, vpc, &other))
            }
            Topic::GroupName(group) => {
                let is_named = |local: &Key| self.named.get(local).is_some_and(|named| named.contains(group));
                !is_counted(&self.groups_of_host, host, group)
                    && (self.vpcs_seen(host).any(|vpc| is_counted(&self.groups_of_vpc, vpc, group))
                        || counted(&self.groups_of_host, host).any(is_named))
            }
            topic => self.topics_of(host).contains(topic),
        }
    }

    /// Whether a host has a port of a VPC, or of one that is connected with it.
    pub(super) fn sees(&self, host: &str, vpc: &Key) -> bool {
        self.vpcs_of(host).any(|seen| seen == vpc)
    }

    /// The VPCs that a host has something to do with; some twice.
    pub(super) fn vpcs_of(&self, host: &str) -> impl Iterator<Item = &Key> {
        let host: Arc<str> = host.into();
        self.vpcs_seen(&host).collect::<Vec<_>>().into_iter()
    }

    fn take_port(&mut self, model: &Model, key: &Key, dirty: &mut Dirty) {
        let placed = model.port(key).and_then(|spec| {
            let (host, vpc) = (spec.host.as_str().into(), placed_in(model, key, spec)?);
            let mut groups = groups_of(model, key, spec);
            groups.sort_unstable();
            groups.dedup();
            Some(Placed { host, vpc, groups })
        });
        let before = self.ports.remove(key);
        if before == placed {
            self.ports.extend(placed.map(|placed| (key.clone(), placed)));
            return;
        }
        // First what comes: what stays must not reach zero in between.
        if let Some(placed) = &placed {
            self.count(placed, 1, dirty);
        }
        if let Some(before) = &before {
            self.count(before, -1, dirty);
        }
        self.ports.extend(placed.map(|placed| (key.clone(), placed)));
    }

    fn count(&mut self, placed: &Placed, by: i32, dirty: &mut Dirty) {
        let Placed { host, vpc, groups } = placed;
        if count(&mut self.vpcs_of_host, host, vpc, by) {
            dirty.all(host);
        }
        if count(&mut self.hosts_of_vpc, vpc, host, by) && !dirty.is_everything {
            self.hosts_that_see(vpc, |other| dirty.one(other, Topic::Peer(host.to_string())));
        }
        for group in groups {
            if count(&mut self.groups_of_host, host, group, by) {
                dirty.all(host);
            }
            count(&mut self.hosts_of_group, group, host, by);
            if count(&mut self.groups_of_vpc, vpc, group, by) && !dirty.is_everything {
                self.hosts_that_see(vpc, |other| dirty.one(other, Topic::GroupName(group.clone())));
            }
        }
    }

    fn take_peering(&mut self, model: &Model, key: &Key, dirty: &mut Dirty) {
        let vpcs = match model.get(key).map(|stored| &stored.spec) {
            Some(Spec::Peering(spec)) => Some(spec.vpcs.each_ref().map(|name| key.sibling(Kind::Vpc, name))),
            _ => None,
        };
        let mut touched = BTreeSet::new();
        let wanted: BTreeSet<(Key, Key)> = match &vpcs {
            Some([a, b]) => [(a.clone(), b.clone()), (b.clone(), a.clone())].into(),
            None => BTreeSet::new(),
        };
        for (vpc, peerings) in &mut self.peerings {
            let stale: Vec<_> = peerings
                .iter()
                .filter(|(peering, other)| peering == key && !wanted.contains(&(vpc.clone(), other.clone())))
                .cloned()
                .collect();
            for entry in stale {
                peerings.remove(&entry);
                touched.insert(vpc.clone());
            }
        }
        self.peerings.retain(|_, peerings| !peerings.is_empty());
        for (vpc, other) in wanted {
            if self.peerings.entry(vpc.clone()).or_default().insert((key.clone(), other)) {
                touched.insert(vpc);
            }
        }
        for vpc in touched {
            counted(&self.hosts_of_vpc, &vpc).for_each(|host| dirty.all(host));
        }
    }

    fn take_gateway(&mut self, model: &Model, key: &Key, dirty: &mut Dirty) {
        let vpc = model.nat_gateway(key).map(|spec| key.sibling(Kind::Vpc, &spec.vpc));
        let mut touched = Vec::new();
        for (of, gateways) in &mut self.gateways {
            if Some(of) != vpc.as_ref() && gateways.remove(key) {
                touched.push(of.clone());
            }
        }
        self.gateways.retain(|_, gateways| !gateways.is_empty());
        if let Some(vpc) = vpc
            && self.gateways.entry(vpc.clone()).or_default().insert(key.clone())
        {
            touched.push(vpc);
        }
        for vpc in touched {
            counted(&self.hosts_of_vpc, &vpc).for_each(|host| dirty.all(host));
        }
    }

    /// Hosts of a VPC, and of those that it is connected with.
    fn hosts_that_see(&self, vpc: &Key, mut f: impl FnMut(&Arc<str>)) {
        counted(&self.hosts_of_vpc, vpc).for_each(&mut f);
        for (_, other) in self.peerings.get(vpc).into_iter().flatten() {
            counted(&self.hosts_of_vpc, other).for_each(&mut f);
        }
    }

    /// VPCs with a port on a host, and those that they are connected with; some twice.
    fn vpcs_seen(&self, host: &Arc<str>) -> impl Iterator<Item = &Key> {
        counted(&self.vpcs_of_host, host).flat_map(|vpc| {
            let others = self.peerings.get(vpc).into_iter().flatten().map(|(_, other)| other);
            std::iter::once(vpc).chain(others)
        })
    }
}

/// Counts one more or one less; whether it came or went.
fn count<K, V>(counts: &mut Counts<K, V>, of: &K, what: &V, by: i32) -> bool
where
    K: std::hash::Hash + Eq + Clone,
    V: Ord + Clone,
{
    let of_one = counts.entry(of.clone()).or_default();
    let known = of_one.entry(what.clone()).or_default();
    let before = *known;
    *known = before.saturating_add_signed(by);
    let now = *known;
    if now == 0 {
        of_one.remove(what);
        if of_one.is_empty() {
            counts.remove(of);
        }
    }
    (before == 0) != (now == 0)
}

fn counted<'c, K: std::hash::Hash + Eq, V>(counts: &'c Counts<K, V>, of: &K) -> impl Iterator<Item = &'c V> {
    counts.get(of).into_iter().flat_map(BTreeMap::keys)
}

fn is_counted<K: std::hash::Hash + Eq, V: Ord>(counts: &Counts<K, V>, of: &K, what: &V) -> bool {
    counts.get(of).is_some_and(|counted| counted.contains_key(what))
}
