//! Checks a batch of changes, and says what the store is to write.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use bifrost_control::config::Object;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::allocate;
use crate::compile;
use crate::grants;
use crate::key::{Key, Kind};
use crate::model::{Index, Model, Stored};
use crate::quota;
use crate::spec::{MAX_ADDRESSES, MAX_GRANTED, MAX_GROUPS, MAX_ROUTED, PortSpec, Spec};

mod hosts;
mod learning;
mod nat;
mod numbers;
mod problem;
mod services;

pub use problem::{PlanError, Problem};

/// The most changes of a batch.
pub const MAX_CHANGES: usize = 500;
/// The most objects in a store.
pub const MAX_OBJECTS: usize = 2_000_000;

/// Changes of which all are made, or none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// At most [`MAX_CHANGES`], of an object once only. Their order does not matter.
    pub changes: Vec<Change>,
}

/// A change of one object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// What is to be done.
    pub op: Op,
    /// With which object.
    pub key: Key,
    /// What it is to be; none to delete it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<Value>,
    /// The generation that it has to have for the change to be made; 0: it must not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_generation: Option<u64>,
}

/// What is to be done with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// It is to exist, and to say what its spec says. Addresses and numbers that were given to it stay.
    Set,
    /// It is to be gone; that it is gone already is no error.
    Delete,
}

/// What a batch comes to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// What the store is to write, each with the object as it is to be. Empty: nothing changes.
    pub writes: Vec<(Key, Option<Stored>)>,
    /// Changes that change nothing.
    pub unchanged: u64,
}

impl Model {
    /// What a batch comes to, if it is made at `now_ms`, in milliseconds since 1970. The model is as it was afterwards.
    ///
    /// # Errors
    /// Everything that is wrong with the changes, by themselves and together with what there is.
    pub fn plan(&mut self, batch: &Batch, now_ms: u64) -> Result<Plan, PlanError> {
        if batch.changes.len() > MAX_CHANGES {
            let what = format!("{} changes; a batch has at most {MAX_CHANGES}: split it", batch.changes.len());
            return Err(PlanError(vec![problem(None, "", what, false)]));
        }
        let mut trial = Trial { model: self, now_ms, before: Vec::new(), problems: Vec::new() };
        trial.make(batch);
        if trial.problems.is_empty() {
            trial.check();
        }
        trial.end(batch)
    }
}

/// A batch that is tried on the model itself, and taken back: a copy of many objects would take longer.
struct Trial<'m> {
    model: &'m mut Model,
    now_ms: u64,
    /// What the changed objects were, in the order of the changes.
    before: Vec<(Key, Option<Stored>)>,
    problems: Vec<Problem>,
}

impl Trial<'_> {
    fn make(&mut self, batch: &Batch) {
        let mut seen = BTreeSet::new();
        let mut sets = Vec::new();
        let mut deletions = Vec::new();
        for change in &batch.changes {
            let key = &change.key;
            if !seen.insert(key) {
                self.wrong(key, "", "is in the batch twice; keep one".into());
                continue;
            }
            self.check_generation(change);
            match (change.op, &change.spec) {
                (Op::Delete, None) => deletions.push(key),
                (Op::Delete, Some(_)) => self.wrong(key, "spec", "a deletion has none; remove it".into()),
                (Op::Set, None) => self.wrong(key, "spec", "missing; say what the object is to be".into()),
                (Op::Set, Some(spec)) => match Spec::parse(key.kind(), spec) {
                    Ok(spec) => sets.push((key, spec)),
                    Err((field, what)) => self.wrong(key, &field, what),
                },
            }
        }
        // What is referred to comes first; addresses that are named come before those that are chosen.
        sets.sort_by_key(|(key, spec)| (turn(key.kind()), leaves_open(spec)));
        deletions.sort_by_key(|key| std::cmp::Reverse(*key));
        for key in deletions {
            let before = self.model.remove(key);
            self.before.push((key.clone(), before));
        }
        for (key, spec) in sets {
            self.set(key, spec);
        }
        self.allot_blocks();
    }

    fn check_generation(&mut self, change: &Change) {
        let Some(expected) = change.if_generation else { return };
        let generation = self.model.get(&change.key).map_or(0, |stored| stored.generation);
        if generation != expected {
            let what = match (generation, expected) {
                (_, 0) => "exists already".to_owned(),
                (0, _) => "does not exist".to_owned(),
                _ => format!("has generation {generation}, not {expected}: read it again, and repeat the change"),
            };
            self.conflict(&change.key, "", what);
        }
    }

    fn set(&mut self, key: &Key, mut spec: Spec) {
        let before = self.model.get(key).cloned();
        self.fill_in(key, &mut spec, before.as_ref().map(|stored| &stored.spec));
        let generation = before.as_ref().map_or(1, |stored| stored.generation.saturating_add(1));
        if let Some(before) = &before {
            self.check_kept(key, &before.spec, &spec);
        }
        let before = match before {
            // Nothing to write.
            Some(before) if before.spec == spec => Some(before),
            _ => self.model.set(key.clone(), Stored { spec, generation, committed_ms: self.now_ms }),
        };
        self.before.push((key.clone(), before));
    }

    /// What the author left open: as it was before, or chosen.
    fn fill_in(&mut self, key: &Key, spec: &mut Spec, before: Option<&Spec>) {
        match (spec, before) {
            (Spec::Vpc(spec), before) if spec.vni.is_none() => {
                let old = if let Some(Spec::Vpc(before)) = before { before.vni } else { None };
                spec.vni = old.or_else(|| allocate::vni(self.model));
                if spec.vni.is_none() {
                    self.conflict(key, "vni", "all are in use; delete a VPC, or name a VNI".into());
                }
            }
            (Spec::Subnet(spec), _) if spec.gateway.is_none() => {
                spec.gateway = allocate::gateway(spec.prefix);
                if spec.gateway.is_none() {
                    self.wrong(key, "prefix", format!("{} has no room for a router and a port", spec.prefix));
                }
            }
            (Spec::Port(spec), before) => {
                let old = if let Some(Spec::Port(before)) = before { Some(&**before) } else { None };
                self.fill_in_port(key, spec, old);
            }
            (Spec::NatGateway(spec), Some(Spec::NatGateway(before))) if spec.blocks.is_empty() => {
                spec.blocks = before.blocks.clone();
            }
            (Spec::FloatingIp(spec), before) => {
                let old = if let Some(Spec::FloatingIp(before)) = before { before.address } else { None };
                self.fill_in_floating(key, spec, old);
            }
            (Spec::LoadBalancer(spec), before) => {
                let old = if let Some(Spec::LoadBalancer(before)) = before { Some(&**before) } else { None };
                self.fill_in_balancer(key, spec, old);
            }
            _ => {}
        }
    }

    fn fill_in_port(&mut self, key: &Key, spec: &mut PortSpec, before: Option<&PortSpec>) {
        if let Some(before) = before {
            if spec.addresses.is_empty() {
                spec.addresses = before.addresses.clone();
            }
            spec.mac = spec.mac.or(before.mac);
        }
        // The check of references tells what is missing.
        let Some(vpc) = self.model.vpc_of(key, spec) else { return };
        if spec.addresses.is_empty() {
            for (i, name) in spec.subnets.iter().take(MAX_ADDRESSES).enumerate() {
                let subnet = key.sibling(Kind::Subnet, name);
                let Some(prefix) = self.model.subnet(&subnet).map(|subnet| subnet.prefix) else { return };
                match allocate::free_address(self.model, &vpc, &subnet, prefix) {
                    Some(address) => spec.addresses.push(address),
                    None => {
                        self.conflict(key, &format!("subnets[{i}]"), no_address(prefix));
                    }
                }
            }
        }
        if spec.mac.is_none() {
            spec.mac = spec.addresses.first().map(|address| allocate::mac(self.model, &vpc, *address));
        }
    }

    /// What does not change, because much depends on it that would have to change in the same moment on all hosts.
    fn check_kept(&mut self, key: &Key, before: &Spec, now: &Spec) {
        let what = "does not change; delete the object and make another".to_owned();
        match (before, now) {
            (Spec::Vpc(before), Spec::Vpc(now)) if before.vni != now.vni => self.conflict(key, "vni", what),
            (Spec::Subnet(before), Spec::Subnet(now)) => {
                for (field, differs) in [
                    ("vpc", before.vpc != now.vpc),
                    ("prefix", before.prefix != now.prefix),
                    ("gateway", before.gateway != now.gateway),
                ] {
                    if differs {
                        self.conflict(key, field, what.clone());
                    }
                }
            }
            (Spec::Port(before), Spec::Port(now)) if before.subnets != now.subnets => {
                self.conflict(key, "subnets", what);
            }
            (Spec::Peering(before), Spec::Peering(now)) if before.vpcs != now.vpcs => self.conflict(key, "vpcs", what),
            (Spec::LoadBalancer(before), Spec::LoadBalancer(now)) if before.subnet != now.subnet => {
                self.conflict(key, "subnet", what);
            }
            (Spec::NatGateway(before), Spec::NatGateway(now)) if before.vpc != now.vpc => {
                self.conflict(key, "vpc", what);
            }
            (Spec::RouteTable(before), Spec::RouteTable(now)) if before.vpc != now.vpc => {
                self.conflict(key, "vpc", what);
            }
            _ => {}
        }
    }

    /// Everything that must hold once the changes are made.
    fn check(&mut self) {
        if self.model.len() > MAX_OBJECTS {
            let what = format!("there would be more than {MAX_OBJECTS} objects; delete some first");
            self.problems.push(problem(None, "", what, true));
        }
        self.problems.extend(quota::problems(self.model, &self.before));
        for key in self.before.iter().map(|(key, _)| key.clone()).collect::<Vec<_>>() {
            match self.model.get(&key).map(|stored| stored.spec.clone()) {
                None => self.check_deleted(&key),
                Some(spec) => {
                    self.check_references(&key, &spec);
                    self.check_one(&key, &spec);
                }
            }
        }
        self.check_users_of_ports();
        self.problems.extend(grants::problems(self.model, &self.before));
        if self.problems.is_empty() {
            self.check_numbers_on_hosts();
            self.check_on_hosts();
        }
    }

    fn check_grant(&mut self, key: &Key, prefixes: &BTreeSet<ipnet::IpNet>) {
        self.check_count(key, "prefixes", prefixes.len(), 1, MAX_GRANTED);
        for (i, prefix) in prefixes.iter().enumerate() {
            let field = format!("prefixes[{i}]");
            if *prefix != prefix.trunc() {
                self.wrong(key, &field, format!("{prefix} has host bits set; write {}", prefix.trunc()));
            }
            if prefixes.iter().any(|other| other != prefix && other.contains(prefix)) {
                self.wrong(key, &field, format!("{prefix} is within another prefix of it; remove it"));
            }
            let within = self.model.granted_within(*prefix).map(|(_, other)| other);
            let other = self.model.grants_of(*prefix).chain(within).find(|other| *other != key).cloned();
            if let Some(other) = other {
                self.conflict(key, &field, format!("{prefix} overlaps with {other}"));
            }
        }
    }

    fn check_deleted(&mut self, key: &Key) {
        let mut referrers = self.model.referrers(key);
        let Some(first) = referrers.next().cloned() else { return };
        let what = match referrers.count() {
            0 => format!("is in use by {first}; change or delete that first"),
            more => format!("is in use by {first} and {more} more; change or delete them first"),
        };
        self.conflict(key, "", what);
    }

    fn check_references(&mut self, key: &Key, spec: &Spec) {
        for (field, to) in spec.references(key) {
            if self.model.get(&to).is_none() {
                self.conflict(key, &field, format!("there is no {to}; add it, in this batch or before"));
            }
        }
    }

    fn check_one(&mut self, key: &Key, spec: &Spec) {
        match spec {
            Spec::Host(spec) => self.check_host(key, spec),
            Spec::Vpc(spec) => {
                self.check_reserved(key, &spec.settings, &["gateway"]);
                self.check_learning(key, spec);
                if let Some(vni) = spec.vni {
                    self.check_only(key, "vni", &Index::Vni(vni), vni);
                    self.check_only(key, "vni", &Index::OutsideVni(vni), vni);
                }
            }
            Spec::Subnet(_) => self.check_subnet(key),
            Spec::Port(spec) => self.check_port(key, spec),
            Spec::LoadBalancer(spec) => self.check_balancer(key, spec),
            Spec::NatGateway(spec) => self.check_gateway(key, spec),
            Spec::FloatingIp(spec) => self.check_floating(key, spec),
            Spec::RouteTable(spec) => self.check_routes(key, spec),
            Spec::Mirror(spec) => self.check_mirror(key, spec),
            Spec::FlowLog(spec) => self.check_flow_log(key, spec),
            Spec::Peering(spec) => self.check_peering(key, &spec.vpcs),
            Spec::OutsideGrant(spec) => self.check_grant(key, &spec.prefixes),
            Spec::SecurityGroup(spec) => self.check_group(key, spec),
            Spec::Project(_) | Spec::AddressSet(_) => {}
        }
    }

    fn check_subnet(&mut self, key: &Key) {
        let Some(spec) = self.model.subnet(key).cloned() else { return };
        let prefix = spec.prefix;
        if prefix != prefix.trunc() {
            return self.wrong(key, "prefix", format!("{prefix} has host bits set; write {}", prefix.trunc()));
        }
        let Some(gateway) = spec.gateway else { return };
        let is_host =
            allocate::hosts(prefix).is_some_and(|(first, last)| (first..=last).contains(&allocate::number(gateway)));
        if !prefix.contains(&gateway) || !is_host {
            return self.wrong(key, "gateway", format!("{gateway} is not the address of a host in {prefix}"));
        }
        let vpc = key.sibling(Kind::Vpc, &spec.vpc);
        self.check_only(key, "gateway", &Index::Address(vpc.clone(), gateway), gateway);
        let others: Vec<Key> = self.model.referrers(&vpc).cloned().collect();
        for other in others {
            let overlaps = |other: &crate::spec::SubnetSpec| overlap(other.prefix, prefix);
            if other != *key && self.model.subnet(&other).is_some_and(overlaps) {
                self.conflict(key, "prefix", format!("{prefix} overlaps with {other}"));
            }
            if let Some(Spec::Peering(peering)) = self.model.get(&other).map(|stored| stored.spec.clone()) {
                self.check_peering(&other, &peering.vpcs);
            }
        }
    }

    fn check_port(&mut self, key: &Key, spec: &PortSpec) {
        self.check_reserved(key, &spec.settings, &["name", "vni"]);
        if spec.settings.contains_key("shared") {
            let what =
                "shared addresses cannot be set for many hosts yet; remove it, or set it in the hosts' own files";
            self.wrong(key, "shared", what.into());
        }
        self.check_count(key, "subnets", spec.subnets.len(), 1, MAX_ADDRESSES);
        self.check_count(key, "security_groups", spec.security_groups.len(), 0, MAX_GROUPS);
        self.check_count(key, "routed", spec.routed.len(), 0, MAX_ROUTED);
        // Told before: something does not exist.
        let Some(vpc) = self.model.vpc_of(key, spec) else { return };
        for (i, name) in spec.subnets.iter().enumerate() {
            let other = self.model.subnet(&key.sibling(Kind::Subnet, name)).map(|subnet| subnet.vpc.clone());
            if let Some(other) = other.filter(|other| other != vpc.name()) {
                let what = format!("{name:?} is of VPC {other:?}, not of {:?} as the first one", vpc.name());
                self.wrong(key, &format!("subnets[{i}]"), what);
            }
        }
        self.check_groups_of_learning(key, spec, &vpc);
        self.check_count(key, "addresses", spec.addresses.len(), 1, MAX_ADDRESSES);
        self.check_distinct(key, "addresses", &spec.addresses);
        for (i, address) in spec.addresses.iter().enumerate() {
            let field = format!("addresses[{i}]");
            match compile::prefix_of(self.model, key, spec, *address) {
                None => self.wrong(key, &field, format!("{address} is in none of the port's subnets")),
                Some(prefix) => self.check_host_address(key, &field, prefix, *address),
            }
            self.check_only(key, &field, &Index::Address(vpc.clone(), *address), *address);
            self.check_nested(key, &field, &vpc, (*address).into());
        }
        self.check_distinct(key, "routed", &spec.routed);
        for (i, prefix) in spec.routed.iter().enumerate() {
            self.check_only(key, &format!("routed[{i}]"), &Index::routed(&vpc, *prefix), *prefix);
            self.check_nested(key, &format!("routed[{i}]"), &vpc, *prefix);
        }
        if let Some(mac) = spec.mac {
            self.check_only(key, "mac", &Index::Mac(vpc, mac), mac);
        }
        if let Some(to) = spec.attachment() {
            let field = if !spec.is_container() {
                "socket"
            } else if spec.settings.contains_key("device") {
                "device"
            } else {
                "netns"
            };
            let what = format!("{to} of host {}", spec.host);
            self.check_only(key, field, &Index::Attachment(spec.host.clone(), to), what);
        }
    }

    fn check_host_address(&mut self, key: &Key, field: &str, prefix: ipnet::IpNet, address: IpAddr) {
        let is_host =
            allocate::hosts(prefix).is_some_and(|(first, last)| (first..=last).contains(&allocate::number(address)));
        if !is_host {
            self.wrong(key, field, format!("{address} is not the address of a host in {prefix}"));
        }
    }

    fn check_peering(&mut self, key: &Key, vpcs: &[String; 2]) {
        if vpcs[0] == vpcs[1] {
            return self.wrong(key, "vpcs", "a VPC cannot be peered with itself; name two VPCs".into());
        }
        let [a, b] = vpcs.each_ref().map(|name| {
            let vpc = key.sibling(Kind::Vpc, name);
            let subnets = self.model.referrers(&vpc).filter_map(|key| self.model.subnet(key).map(|s| (key, s.prefix)));
            subnets.map(|(key, prefix)| (key.clone(), prefix)).collect::<Vec<_>>()
        });
        for (one, prefix) in &a {
            for (other, _) in b.iter().filter(|(_, other)| overlap(*other, *prefix)) {
                self.conflict(key, "vpcs", format!("{one} and {other} have addresses in common"));
            }
        }
        let pair: BTreeSet<&String> = vpcs.iter().collect();
        let vpc = key.sibling(Kind::Vpc, &vpcs[0]);
        let same = self.model.referrers(&vpc).find(|other| {
            let spec = self.model.get(other).map(|stored| &stored.spec);
            *other != key && matches!(spec, Some(Spec::Peering(other)) if BTreeSet::from_iter(&other.vpcs) == pair)
        });
        if let Some(same) = same.cloned() {
            self.conflict(key, "vpcs", format!("{same} connects them already"));
        }
    }

    /// What hosts' `bifrostd` would refuse.
    fn check_on_hosts(&mut self) {
        for key in self.before.iter().map(|(key, _)| key.clone()).collect::<Vec<_>>() {
            for item in compile::contributions(self.model, &key) {
                let Err(errors) = Object::parse(item.id.kind, &item.spec, 1) else { continue };
                for error in errors {
                    // It is the list of an object of many hosts.
                    let field = match error.field.strip_prefix("backend[") {
                        Some(rest) => format!("backends[{rest}"),
                        None => error.field,
                    };
                    self.wrong(&key, &field, error.message);
                }
                // The other items of the object have the same fields.
                break;
            }
        }
    }

    fn check_reserved(&mut self, key: &Key, settings: &serde_json::Map<String, Value>, reserved: &[&str]) {
        for name in reserved {
            if settings.contains_key(*name) {
                let what = "follows from other objects; remove it".to_owned();
                self.wrong(key, name, what);
            }
        }
    }

    fn check_count(&mut self, key: &Key, field: &str, count: usize, least: usize, most: usize) {
        if !(least..=most).contains(&count) {
            self.wrong(key, field, format!("{count} given; there are {least} to {most}"));
        }
    }

    /// That a list names nothing twice.
    fn check_distinct<T: PartialEq + fmt::Display>(&mut self, key: &Key, field: &str, list: &[T]) {
        // Of a longer list something else is wrong.
        for (i, one) in list.iter().enumerate().take(MAX_ROUTED) {
            if list[..i].contains(one) {
                self.wrong(key, &format!("{field}[{i}]"), format!("{one} is named twice; keep one"));
            }
        }
    }

    /// That nothing else is found by what only one object may have.
    fn check_only(&mut self, key: &Key, field: &str, index: &Index, value: impl fmt::Display) {
        let other = self.model.found(index).find(|other| *other != key).cloned();
        if let Some(other) = other {
            self.conflict(key, field, format!("{value} is in use by {other}"));
        }
    }

    fn wrong(&mut self, key: &Key, field: &str, what: String) {
        self.problems.push(problem(Some(key), field, what, false));
    }

    fn conflict(&mut self, key: &Key, field: &str, what: String) {
        self.problems.push(problem(Some(key), field, what, true));
    }

    /// Takes the changes back, and says what they were.
    fn end(self, batch: &Batch) -> Result<Plan, PlanError> {
        let Trial { model, before, problems, .. } = self;
        let mut writes = Vec::new();
        for (key, before) in before.into_iter().rev() {
            let now = match &before {
                None => model.remove(&key),
                Some(before) => {
                    let now = model.get(&key).cloned();
                    if now.as_ref() == Some(before) {
                        continue;
                    }
                    model.set(key.clone(), before.clone());
                    now
                }
            };
            if before.is_some() || now.is_some() {
                writes.push((key, now));
            }
        }
        writes.reverse();
        if !problems.is_empty() {
            return Err(PlanError(problems));
        }
        // NAT gateways that get blocks are not of the batch.
        let written: BTreeSet<&Key> = writes.iter().map(|(key, _)| key).collect();
        let unchanged = batch.changes.iter().filter(|change| !written.contains(&change.key)).count() as u64;
        Ok(Plan { writes, unchanged })
    }
}

/// Whether something is still to be chosen.
fn leaves_open(spec: &Spec) -> bool {
    match spec {
        Spec::Vpc(spec) => spec.vni.is_none(),
        Spec::Port(spec) => spec.addresses.is_empty(),
        Spec::LoadBalancer(spec) => spec.address.is_none(),
        Spec::FloatingIp(spec) => spec.address.is_none(),
        _ => false,
    }
}

/// When an object of a kind is taken over: what is given out of the same addresses has the same turn.
fn turn(kind: Kind) -> Kind {
    if kind == Kind::LoadBalancer { Kind::Port } else { kind }
}

fn no_address(prefix: ipnet::IpNet) -> String {
    format!("no address of {prefix} is free; delete ports, or add a subnet")
}

fn overlap(a: ipnet::IpNet, b: ipnet::IpNet) -> bool {
    a.contains(&b) || b.contains(&a)
}

fn problem(key: Option<&Key>, field: &str, what: String, is_conflict: bool) -> Problem {
    Problem { key: key.cloned(), field: field.to_owned(), what, is_conflict }
}
