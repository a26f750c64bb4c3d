//! Objects as a host's `bifrostd` takes them.
//!
//! An object contributes items to topics; a host gets the items of the topics that it needs (see [`Spans`](crate::Spans)). What
//! refers to something that does not exist contributes nothing, and a rule that names a group that does not exist is left out: rules
//! only ever allow.

use std::collections::BTreeSet;
use std::net::IpAddr;

use bifrost_control::config::Kind as HostKind;
use ipnet::IpNet;
use serde_json::{Map, Value, json};

use crate::key::{Key, Kind};
use crate::model::Model;
use crate::span::{ItemId, Topic};
use crate::spec::{PortSpec, SecurityGroupSpec, Spec, remote};
use crate::withdrawn::Withdrawn;

mod nat;
mod services;

pub(crate) use nat::{has_router, inside_address};
pub(crate) use services::backend_address;

/// What an object adds to what hosts of a topic have.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Contribution {
    pub(crate) topic: Topic,
    pub(crate) id: ItemId,
    /// What the item says, with the keys of `bifrostd`'s configuration.
    pub(crate) spec: Value,
    /// The host that does not get it, although it needs the topic: the one to which a route leads.
    pub(crate) except: Option<String>,
}

/// Everything that an object contributes.
pub(crate) fn contributions(model: &Model, key: &Key) -> Vec<Contribution> {
    let Some(stored) = model.get(key) else { return Vec::new() };
    match &stored.spec {
        Spec::Host(spec) => {
            let mut item = json!({"name": key.name(), "addresses": spec.addresses});
            if spec.transport != crate::spec::HostTransport::Auto {
                item["transport"] = spec.transport.name().into();
            }
            let peer = one(Topic::Peer(key.name().to_owned()), HostKind::Peer, key.name(), item);
            std::iter::once(peer).chain(nat::uplink(key, spec)).collect()
        }
        Spec::Vpc(spec) => {
            let Some(vni) = spec.vni else { return Vec::new() };
            let mut item = spec.settings.clone();
            item.insert("vni".into(), vni.into());
            let gateways: Vec<_> = gateways(model, key).collect();
            if !gateways.is_empty() {
                item.insert("gateway".into(), json!(gateways));
            }
            list(&mut item, "learned", json!(spec.learned));
            vec![one(Topic::Vpc(key.clone()), HostKind::Vpc, &vni.to_string(), Value::Object(item))]
        }
        // The routes of a table are those of their ports.
        Spec::Project(_) | Spec::OutsideGrant(_) | Spec::Subnet(_) | Spec::RouteTable(_) => Vec::new(),
        Spec::AddressSet(spec) => {
            let name = key.on_host();
            let item = json!({"name": name, "addresses": spec.addresses});
            vec![one(Topic::Set(key.clone()), HostKind::AddressSet, &name, item)]
        }
        Spec::SecurityGroup(spec) => {
            let name = key.on_host();
            let item = group(model, key, spec);
            let whole = one(Topic::Group(key.clone()), HostKind::SecurityGroup, &name, item);
            let member = one(Topic::GroupName(key.clone()), HostKind::SecurityGroup, &name, json!({"name": name}));
            vec![whole, member]
        }
        Spec::Port(spec) => port(model, key, spec),
        Spec::Peering(spec) => {
            let [a, b] = spec.vpcs.each_ref().map(|name| key.sibling(Kind::Vpc, name));
            [way(model, key, &a, &b), way(model, key, &b, &a)].concat()
        }
        Spec::LoadBalancer(spec) => Vec::from_iter(services::load_balancer(model, key, spec)),
        Spec::NatGateway(spec) => nat::gateway(model, key, spec),
        Spec::Mirror(spec) => services::mirror(model, key, spec),
        Spec::FlowLog(spec) => services::flow_log(model, key, spec),
        Spec::FloatingIp(spec) => Vec::from_iter(nat::floating_ip(model, key, spec)),
    }
}

/// The groups of a port that exist.
pub(crate) fn groups_of(model: &Model, key: &Key, spec: &PortSpec) -> Vec<Key> {
    let named = spec.security_groups.iter().map(|name| key.sibling(Kind::SecurityGroup, name));
    named.filter(|group| model.get(group).is_some()).collect()
}

/// The VPC of a port that can be brought into force: everything that it needs exists.
pub(crate) fn placed_in(model: &Model, key: &Key, spec: &PortSpec) -> Option<Key> {
    let vpc = model.vpc_of(key, spec)?;
    model.vni(&vpc)?;
    model.get(&Key::unchecked_host(&spec.host))?;
    let is_of_vpc = |name: &String| {
        let subnet = model.subnet(&key.sibling(Kind::Subnet, name));
        subnet.is_some_and(|subnet| subnet.vpc == vpc.name())
    };
    let whole = !spec.addresses.is_empty() && spec.mac.is_some() && spec.subnets.iter().all(is_of_vpc);
    (whole && spec.addresses.iter().all(|address| prefix_of(model, key, spec, *address).is_some())).then_some(vpc)
}

/// The prefix of the subnet that an address of a port is of.
pub(crate) fn prefix_of(model: &Model, key: &Key, spec: &PortSpec, address: IpAddr) -> Option<IpNet> {
    let subnets = spec.subnets.iter().filter_map(|name| model.subnet(&key.sibling(Kind::Subnet, name)));
    subnets.map(|subnet| subnet.prefix).find(|prefix| prefix.contains(&address))
}

fn port(model: &Model, key: &Key, spec: &PortSpec) -> Vec<Contribution> {
    let Some((vpc, mac)) = placed_in(model, key, spec).zip(spec.mac) else { return Vec::new() };
    let Some(vni) = model.vni(&vpc) else { return Vec::new() };
    let name = key.on_host();
    let mac = mac.to_string();
    let groups: Vec<String> = groups_of(model, key, spec).iter().map(Key::on_host).collect();
    let of_subnet = |address: &IpAddr| {
        let prefix = prefix_of(model, key, spec, *address)?;
        IpNet::new(*address, prefix.prefix_len()).ok()
    };
    let addresses: Vec<IpNet> = spec.addresses.iter().filter_map(of_subnet).collect();

    let mut item = spec.settings.clone();
    if spec.is_container() {
        if item.contains_key("netns") {
            item.entry("device").or_insert_with(|| PortSpec::DEVICE.into());
        }
        let first = spec.subnets.first().and_then(|name| model.subnet(&key.sibling(Kind::Subnet, name)));
        if let Some(gateway) = first.and_then(|subnet| subnet.gateway) {
            item.entry("default_gateway").or_insert_with(|| json!(gateway));
        }
    }
    item.insert("name".into(), json!(name));
    item.insert("vni".into(), json!(vni));
    item.insert("mac".into(), json!(mac));
    item.insert("addresses".into(), json!(addresses));
    list(&mut item, "security_groups", json!(groups));
    let routed = routed(model, key, &vpc, spec);
    list(&mut item, "routed", json!(routed));
    let mut all = vec![one(Topic::Host(spec.host.clone()), HostKind::Port, &name, Value::Object(item))];

    if model.withdrawn(&spec.host) == Some(Withdrawn::Routes) {
        return all;
    }
    let to_host = spec.addresses.iter().map(|address| IpNet::from(*address)).chain(routed);
    for prefix in to_host {
        let mut route = Map::new();
        route.insert("vni".into(), json!(vni));
        route.insert("prefix".into(), json!(prefix));
        route.insert("peer".into(), json!(spec.host));
        route.insert("mac".into(), json!(mac));
        list(&mut route, "security_groups", json!(groups));
        let topic = if is_learned(model, &vpc, prefix) { Topic::Routes } else { Topic::Vpc };
        let route = one(topic(vpc.clone()), HostKind::Route, &format!("{vni}/{prefix}"), Value::Object(route));
        all.push(Contribution { except: Some(spec.host.clone()), ..route });
    }
    all
}

/// Whether hosts learn the route to a prefix when they need it.
pub(crate) fn is_learned(model: &Model, vpc: &Key, prefix: IpNet) -> bool {
    model.learned(vpc).is_some_and(|learned| learned.iter().any(|within| within.contains(&prefix)))
}

/// The prefixes behind a port: what it says itself, and what tables of its VPC say.
pub(crate) fn routed(model: &Model, key: &Key, vpc: &Key, spec: &PortSpec) -> Vec<IpNet> {
    let mut all = spec.routed.clone();
    for table in model.referrers(key) {
        if let Some(Spec::RouteTable(table)) = model.get(table).map(|stored| &stored.spec)
            && table.vpc == vpc.name()
        {
            all.extend(table.routes.iter().filter(|route| route.guest == key.name()).map(|route| route.prefix));
        }
    }
    let mut seen = BTreeSet::new();
    all.retain(|prefix| seen.insert(*prefix));
    all
}

/// A group whose rules name others as hosts do.
fn group(model: &Model, key: &Key, spec: &SecurityGroupSpec) -> Value {
    let mut item = Map::new();
    item.insert("name".into(), key.on_host().into());
    for (list, end, rules) in spec.lists() {
        let rules: Vec<Value> = rules.iter().filter_map(|rule| rule_on_host(model, key, end, rule)).collect();
        if list == "egress" && spec.egress.is_some() || !rules.is_empty() {
            item.insert(list.into(), rules.into());
        }
    }
    Value::Object(item)
}

/// A rule as hosts have it. None: all those that it names are gone.
fn rule_on_host(model: &Model, key: &Key, end: &str, rule: &Map<String, Value>) -> Option<Value> {
    let who_on_host = |who: &Value| match who.as_str().and_then(remote) {
        None => Some(who.clone()),
        Some((kind, name)) => {
            let named = key.sibling(kind, name);
            let word = if kind == Kind::AddressSet { "set" } else { "group" };
            model.get(&named).map(|_| format!("{word}:{}", named.on_host()).into())
        }
    };
    let mut rule = rule.clone();
    let named = match rule.get(end) {
        None => return Some(Value::Object(rule)),
        Some(Value::Array(all)) if all.is_empty() => return Some(Value::Object(rule)),
        Some(Value::Array(all)) => all.iter().filter_map(who_on_host).collect(),
        Some(one) => Vec::from_iter(who_on_host(one)),
    };
    if named.is_empty() {
        // Without the key it would allow everybody.
        return None;
    }
    rule.insert(end.to_owned(), named.into());
    Some(Value::Object(rule))
}

/// From one VPC to another, for each family that both have.
fn way(model: &Model, peering: &Key, from: &Key, to: &Key) -> Vec<Contribution> {
    let Some((vni, to_vni)) = model.vni(from).zip(model.vni(to)) else { return Vec::new() };
    let has = |is_ipv4: bool| gateways(model, from).any(|gateway| gateway.is_ipv4() == is_ipv4);
    let subnets = model.referrers(to).filter_map(|key| model.subnet(key));
    let prefixes = subnets.map(|subnet| subnet.prefix).filter(|prefix| has(prefix.addr().is_ipv4()));
    let item = |prefix: IpNet| {
        let spec = json!({"vni": vni, "prefix": prefix, "to_vni": to_vni});
        one(Topic::Peering(peering.clone()), HostKind::Peering, &format!("{vni}/{prefix}"), spec)
    };
    prefixes.map(item).collect()
}

/// The routers' addresses of a VPC.
fn gateways(model: &Model, vpc: &Key) -> impl Iterator<Item = IpAddr> {
    model.referrers(vpc).filter_map(|key| model.subnet(key)?.gateway)
}

/// Sets a list that is not empty.
fn list(item: &mut Map<String, Value>, key: &str, list: Value) {
    if list.as_array().is_some_and(|list| !list.is_empty()) {
        item.insert(key.to_owned(), list);
    }
}

fn one(topic: Topic, kind: HostKind, key: &str, spec: Value) -> Contribution {
    Contribution { topic, id: ItemId { kind, key: key.to_owned() }, spec, except: None }
}
