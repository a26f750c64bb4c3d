//! Load balancers, mirrors and flow logs as hosts take them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use bifrost_control::config::Kind as HostKind;
use serde_json::{Map, Value, json};

use super::{Contribution, one, placed_in};
use crate::key::{Key, Kind};
use crate::model::Model;
use crate::span::Topic;
use crate::spec::{BackendSpec, FlowLogSpec, LoadBalancerSpec, MirrorSpec};

/// The directory of hosts for files of flow logs. Projects do not choose it: `bifrostd` may write more than they should.
const FLOW_LOGS: &str = "/var/log/bifrost";

/// What hosts with ports of the VPC get. None: it has no address that the VPC's router is beside,
/// or no backend that exists.
pub(super) fn load_balancer(model: &Model, key: &Key, spec: &LoadBalancerSpec) -> Option<Contribution> {
    let subnet = model.subnet(&key.sibling(Kind::Subnet, &spec.subnet))?;
    let vpc = key.sibling(Kind::Vpc, &subnet.vpc);
    let (vni, address) = (model.vni(&vpc)?, spec.address?);
    if subnet.gateway.is_none_or(|gateway| gateway.is_ipv4() != address.is_ipv4()) {
        return None;
    }
    let backend = |backend: &BackendSpec| {
        let mut item = Map::new();
        item.insert("address".into(), json!(backend_address(model, key, &vpc, address, backend)?));
        item.extend(backend.port.map(|port| ("port".into(), port.into())));
        item.extend(backend.weight.map(|weight| ("weight".into(), weight.into())));
        Some(Value::Object(item))
    };
    let backends: Vec<(bool, Value)> =
        spec.backends.iter().filter_map(|of| Some((is_withdrawn(model, key, of), backend(of)?))).collect();
    if backends.is_empty() {
        return None;
    }
    // Some may work although nothing is heard of their hosts: without any, none would.
    let all_are_withdrawn = backends.iter().all(|(is_withdrawn, _)| *is_withdrawn);
    let backends = backends.into_iter().filter(|(is_withdrawn, _)| all_are_withdrawn || !is_withdrawn);
    let backends: Vec<Value> = backends.map(|(_, backend)| backend).collect();
    let name = key.on_host();
    let mut item = spec.settings.clone();
    item.insert("name".into(), json!(name));
    item.insert("vni".into(), json!(vni));
    item.insert("address".into(), json!(address));
    item.insert("backend".into(), backends.into());
    Some(one(Topic::Inside(vpc), HostKind::LoadBalancer, &name, Value::Object(item)))
}

/// Whether a backend is a guest of a host that is dead.
fn is_withdrawn(model: &Model, balancer: &Key, backend: &BackendSpec) -> bool {
    let guest = backend.guest.as_ref().map(|guest| balancer.sibling(Kind::Port, guest));
    let port = guest.and_then(|guest| model.port(&guest));
    port.is_some_and(|port| model.withdrawn(&port.host).is_some())
}

/// The address of a backend of a load balancer: of a guest, its first one of the family. None: the
/// guest has none, or is not of the VPC.
pub(crate) fn backend_address(
    model: &Model,
    balancer: &Key,
    vpc: &Key,
    address: IpAddr,
    backend: &BackendSpec,
) -> Option<IpAddr> {
    let Some(guest) = &backend.guest else { return backend.address };
    let guest = balancer.sibling(Kind::Port, guest);
    let port = model.port(&guest)?;
    if model.vpc_of(&guest, port).as_ref() != Some(vpc) {
        return None;
    }
    port.addresses.iter().copied().find(|of_guest| of_guest.is_ipv4() == address.is_ipv4())
}

pub(super) fn mirror(model: &Model, key: &Key, spec: &MirrorSpec) -> Vec<Contribution> {
    of_scope(model, key, HostKind::Mirror, (spec.vpc.as_deref(), &spec.guests), &spec.settings)
}

pub(super) fn flow_log(model: &Model, key: &Key, spec: &FlowLogSpec) -> Vec<Contribution> {
    let mut settings = spec.settings.clone();
    if spec.json {
        settings.insert("json".into(), json!(format!("{FLOW_LOGS}/{}.jsonl", key.on_host())));
    }
    of_scope(model, key, HostKind::VpcFlowLog, (spec.vpc.as_deref(), &spec.guests), &settings)
}

/// For all hosts with ports of the VPC; or for each host with some of the guests, those.
fn of_scope(
    model: &Model,
    key: &Key,
    kind: HostKind,
    (vpc, guests): (Option<&str>, &[String]),
    settings: &Map<String, Value>,
) -> Vec<Contribution> {
    let name = key.on_host();
    let item = |of: &str, list: Value| {
        let mut item = settings.clone();
        item.insert("name".into(), json!(name));
        item.insert(of.into(), list);
        Value::Object(item)
    };
    if let Some(vpc) = vpc {
        let vpc = key.sibling(Kind::Vpc, vpc);
        let vni = model.vni(&vpc);
        let all = vni.map(|vni| one(Topic::Inside(vpc), kind, &name, item("vpcs", json!([vni]))));
        return Vec::from_iter(all);
    }
    let mut hosts: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for guest in guests.iter().map(|name| key.sibling(Kind::Port, name)) {
        if let Some(port) = model.port(&guest)
            && placed_in(model, &guest, port).is_some()
        {
            hosts.entry(&port.host).or_default().push(guest.on_host());
        }
    }
    let of_host = |(host, guests): (&str, Vec<String>)| {
        one(Topic::Host(host.to_owned()), kind, &name, item("ports", json!(guests)))
    };
    hosts.into_iter().map(of_host).collect()
}
