//! Which host needs which items.
//!
//! Objects contribute items to *topics* ([`topic`]): a VPC's routes, a host's ports, a group's rules. A host needs the topics that
//! follow from the ports on it ([`placement`]). So an item is kept once, however many hosts need it, and a change costs what it
//! changes: an item more in a VPC's topic reaches the hosts of that topic, and what topics a host needs is found again only when a
//! VPC comes to a host or leaves it, or a group comes to a VPC or leaves it.

mod learning;
mod placement;
#[cfg(test)]
mod tests;
mod topic;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use bifrost_control::config::Kind as HostKind;
use ipnet::IpNet;

use crate::compile::{Contribution, contributions};
use crate::key::{Key, Kind};
use crate::model::{Index, Model, Stored};
use crate::resolve::Resolved;
use crate::spec::Spec;
use learning::Learning;
use placement::{Dirty, May, Placement};
pub(crate) use topic::Topic;
use topic::{Told, Topics, Visible};

/// What names an item among those of a host.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ItemId {
    /// Its kind, one of `bifrostd`'s.
    pub kind: HostKind,
    /// Its key, one of `bifrostd`'s.
    pub key: String,
}

/// An object as a host's `bifrostd` takes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// What it says: JSON with the keys of `bifrostd`'s configuration.
    pub spec: Arc<str>,
    /// When the object that it follows from was changed last, milliseconds since 1970; 0: it follows from something else, too.
    pub committed_ms: u64,
}

/// What changes on a host: items as they are to be, or none.
pub type HostChanges = BTreeMap<ItemId, Option<Item>>;

/// Where an address of a VPC is.
#[derive(Clone, Debug)]
pub struct Located<'a> {
    vpc: &'a Key,
    resolved: Resolved,
}

impl Located<'_> {
    /// The answer for a host. None: the host has nothing to do with the VPC.
    pub fn for_host(&self, spans: &Spans, host: &str) -> Option<Resolved> {
        if !spans.placement.sees(host, self.vpc) {
            return None;
        }
        let Resolved { range, hop } = &self.resolved;
        // It has its own ports, and asks no longer once they are in force.
        Some(Resolved { range: *range, hop: hop.clone().filter(|hop| *hop.host != *host) })
    }
}

/// Why a host has items of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It is the host itself, or a port on it.
    OnThisHost,
    /// A VPC, group or set of a port on it.
    UsedHere,
    /// A port, or the host of one, that guests of this host can reach.
    Reachable,
}

/// Which host needs which items.
#[derive(Debug, Default)]
pub struct Spans {
    topics: Topics,
    placement: Placement,
    learning: Learning,
    /// What each object has contributed.
    contributed: HashMap<Key, Vec<(Topic, ItemId)>, foldhash::fast::RandomState>,
}

impl Spans {
    /// Those of all objects of a model.
    pub fn of(model: &Model) -> Spans {
        let mut spans = Spans::default();
        let mut effect = Effect::default();
        effect.hosts.is_everything = true;
        for (key, _) in model.iter() {
            spans.take(model, key, true, &mut effect);
            effect.items.clear();
        }
        let hosts: Vec<Arc<str>> = spans.placement.hosts().cloned().collect();
        for host in hosts {
            let wanted = spans.placement.topics_of(&host);
            spans.topics.subscribe(&host, wanted);
        }
        spans.learning.take_changed();
        spans
    }

    /// The answer to a question of a host: where an address of a VPC is. None: the host has nothing to do with the VPC, or its
    /// routes to the address are not learned.
    pub fn resolve(&self, model: &Model, host: &str, vni: u32, address: IpAddr) -> Option<Resolved> {
        self.locate(model, vni, address)?.for_host(self, host)
    }

    /// Where an address of a VPC is; what that means for a host is another question. None: its routes are not learned.
    pub fn locate<'a>(&self, model: &'a Model, vni: u32, address: IpAddr) -> Option<Located<'a>> {
        let vpc = model.vpc_of_vni(vni)?;
        let within = model.learned(vpc)?.iter().filter(|prefix| prefix.contains(&address));
        let within = within.max_by_key(|prefix| prefix.prefix_len())?;
        Some(Located { vpc, resolved: self.learning.resolve(vpc, *within, address) })
    }

    /// The prefixes whose learned routes have changed since this was called last: answers about them may be wrong.
    pub fn take_rerouted(&mut self) -> Vec<(u32, IpNet)> {
        self.learning.take_changed()
    }

    /// How many routes there are that hosts learn.
    pub fn learned_routes(&self) -> usize {
        self.learning.len()
    }

    /// Whether a host has a port of a VPC whose routes are learned, or of one that is peered with such a VPC.
    pub fn learns(&self, model: &Model, host: &str) -> bool {
        self.placement.vpcs_of(host).any(|vpc| model.learned(vpc).is_some_and(|learned| !learned.is_empty()))
    }

    /// Takes over changes of objects, once the model has them: each with what it was before. Gives the hosts that are concerned, and
    /// for those that `wants` names what changes there; a host that is told nothing item by item has no items.
    pub fn change(
        &mut self,
        model: &Model,
        changed: &[(Key, Option<Stored>)],
        wants: &dyn Fn(&str) -> bool,
    ) -> BTreeMap<Arc<str>, HostChanges> {
        self.change_all(model, &affected(model, changed), true, wants)
    }

    /// `is_intent`: somebody has committed that they change.
    fn change_all(
        &mut self,
        model: &Model,
        changed: &BTreeSet<Key>,
        is_intent: bool,
        wants: &dyn Fn(&str) -> bool,
    ) -> BTreeMap<Arc<str>, HostChanges> {
        let mut effect = Effect::default();
        for key in changed {
            self.take(model, key, is_intent, &mut effect);
        }
        // What a topic has lost is told to all that needed it. What a host no longer needs goes then, and what it needs comes last:
        // an item that moves between topics stays.
        let mut told = Told::new(wants);
        self.topics.publish(&effect.items, &mut told);
        let mut added = Vec::new();
        for (host, may) in &effect.hosts.hosts {
            let new = match may {
                May::All => self.topics.unsubscribe(host, &self.placement.topics_of(host), &mut told),
                May::These(topics) => {
                    let needs = |topic: &Topic| self.placement.needs(host, topic);
                    self.topics.unsubscribe_from(host, topics, needs, &mut told)
                }
            };
            added.push((host, new));
        }
        if !added.is_empty() {
            self.topics.publish(&effect.items, &mut told);
        }
        for (host, new) in added {
            self.topics.subscribe_to(host, new, &mut told);
        }
        told.into_changes()
    }

    /// Takes over that what is withdrawn of a host has changed, once the model has it. Gives the same as [`change`](Self::change).
    pub fn withdraw(
        &mut self,
        model: &Model,
        host: &str,
        wants: &dyn Fn(&str) -> bool,
    ) -> BTreeMap<Arc<str>, HostChanges> {
        let ports = model.referrers(&Key::unchecked_host(host)).filter(|key| key.kind() == Kind::Port);
        let mut concerned = BTreeSet::new();
        for port in ports {
            concerned.insert(port.clone());
            concerned.extend(model.referrers(port).filter(|key| key.kind() == Kind::LoadBalancer).cloned());
        }
        self.change_all(model, &concerned, false, wants)
    }

    /// The hosts that have anything.
    pub fn hosts(&self) -> impl Iterator<Item = &Arc<str>> {
        self.placement.hosts()
    }

    /// Everything that a host is to have.
    pub fn of_host(&self, host: &str) -> HostChanges {
        self.topics.of_host(host).map(|(id, item)| (id.clone(), Some(item.clone()))).collect()
    }

    /// The items of an object, whichever host has them.
    pub fn items_of(&self, key: &Key) -> impl Iterator<Item = &ItemId> {
        self.contributed.get(key).into_iter().flatten().map(|(_, id)| id)
    }

    /// The hosts that have items of an object, and why; in order.
    pub fn why(&self, model: &Model, key: &Key) -> Vec<(Arc<str>, Reason)> {
        // What a table says is with its ports.
        let by: BTreeSet<Key> = match model.get(key).map(|stored| &stored.spec) {
            Some(Spec::RouteTable(spec)) => {
                spec.routes.iter().map(|route| key.sibling(Kind::Port, &route.guest)).collect()
            }
            _ => [key.clone()].into(),
        };
        let contributed = by.iter().filter_map(|by| self.contributed.get(by)).flatten();
        let own = match model.get(key).map(|stored| &stored.spec) {
            Some(Spec::Port(spec)) => Some(spec.host.as_str()),
            Some(Spec::Host(_)) => Some(key.name()),
            _ => None,
        };
        let reachable = matches!(key.kind(), Kind::Port | Kind::Host);
        let mut hosts = BTreeSet::new();
        for (topic, _) in contributed {
            hosts.extend(self.topics.subscribers(topic).cloned());
        }
        let reason = |host: &Arc<str>| match () {
            () if own == Some(&**host) => Reason::OnThisHost,
            () if reachable => Reason::Reachable,
            () => Reason::UsedHere,
        };
        hosts.into_iter().map(|host| (Arc::clone(&host), reason(&host))).collect()
    }

    /// Takes over what an object contributes, and where it is.
    fn take(&mut self, model: &Model, key: &Key, is_intent: bool, effect: &mut Effect) {
        let now = contributions(model, key);
        let committed_ms = model.get(key).filter(|_| is_intent).map_or(0, |stored| stored.committed_ms);
        let kept: HashSet<(&Topic, &ItemId)> = now.iter().map(|c| (&c.topic, &c.id)).collect();
        let (by, contributed) = self.contributed.remove_entry(key).unwrap_or_else(|| (key.clone(), Vec::new()));
        for (topic, id) in contributed {
            if !kept.contains(&(&topic, &id))
                && let Some(before) = self.topics.remove(&topic, &id, &by)
            {
                self.learning.note(&self.topics, &topic, &id);
                effect.items.push((topic, id, before));
            }
        }
        drop(kept);
        let mut entries = Vec::with_capacity(now.len());
        for Contribution { topic, id, spec, except } in now {
            let item = Item { spec: spec.to_string().into(), committed_ms };
            let visible = Visible { item, except: except.map(Into::into) };
            entries.push((topic.clone(), id.clone()));
            if let Some(before) = self.topics.set(&topic, &id, &by, visible) {
                self.learning.note(&self.topics, &topic, &id);
                effect.items.push((topic, id, before));
            }
        }
        if !entries.is_empty() {
            self.contributed.insert(by, entries);
        }
        self.placement.take(model, key, &mut effect.hosts);
    }
}

/// What changes of objects lead to.
#[derive(Debug, Default)]
struct Effect {
    /// Items that differ, each with what it was.
    items: Vec<(Topic, ItemId, Option<Visible>)>,
    hosts: Dirty,
}

/// The objects whose items may differ: those that changed, and those whose items say something of them.
fn affected(model: &Model, changed: &[(Key, Option<Stored>)]) -> BTreeSet<Key> {
    let mut all = BTreeSet::new();
    for (key, before) in changed {
        all.insert(key.clone());
        let now = model.get(key);
        // Gateways, ways between VPCs and to the outside follow from subnets.
        let specs = [before.as_ref().map(|stored| &stored.spec), now.map(|stored| &stored.spec)];
        for spec in specs.into_iter().flatten() {
            // The routes of a table are those of its ports.
            if let Spec::RouteTable(spec) = spec {
                let guests = spec.routes.iter().map(|route| key.sibling(Kind::Port, &route.guest));
                all.extend(guests.filter(|guest| model.get(guest).is_some()));
            }
            if let Spec::Subnet(spec) = spec {
                let vpc = key.sibling(Kind::Vpc, &spec.vpc);
                let follows = |key: &&Key| matches!(key.kind(), Kind::Peering | Kind::NatGateway);
                all.extend(model.referrers(&vpc).filter(follows).cloned());
                all.insert(vpc);
            }
        }
        // What refers to something that does not exist contributes nothing, or less.
        let is_same = match (before.as_ref().map(|stored| &stored.spec), now.map(|stored| &stored.spec)) {
            (Some(Spec::Vpc(before)), Some(Spec::Vpc(now))) => (before.vni, &before.learned) == (now.vni, &now.learned),
            (Some(before @ Spec::Subnet(_)), Some(now)) => before == now,
            // Load balancers have the addresses of their guests; outside addresses of guests are where these are.
            (Some(Spec::Port(before)), Some(Spec::Port(now))) => {
                (&before.addresses, &before.subnets, &before.host, before.mac.is_some())
                    == (&now.addresses, &now.subnets, &now.host, now.mac.is_some())
            }
            (Some(Spec::Host(before)), Some(Spec::Host(now))) => before.uplink.is_some() == now.uplink.is_some(),
            (before, now) => before.is_some() == now.is_some(),
        };
        if !is_same {
            add_referrers(model, key, &mut all);
            if key.kind() == Kind::Host {
                all.extend(model.found(&Index::Allotted(key.name().to_owned())).cloned());
            }
        }
    }
    all
}

/// Everything that refers to an object, and what refers to that.
fn add_referrers(model: &Model, key: &Key, all: &mut BTreeSet<Key>) {
    for referrer in model.referrers(key) {
        all.insert(referrer.clone());
        // Of a VPC its subnets, of these and of hosts the ports, and what names these. Others are
        // not looked through: what names a group does not depend on what the group names.
        if matches!(key.kind(), Kind::Vpc | Kind::Subnet | Kind::Host) {
            add_referrers(model, referrer, all);
        }
    }
}
