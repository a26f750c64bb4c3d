//! Load balancers as hosts take them.

use std::net::IpAddr;

use bifrost_control::config::Kind as HostKind;
use serde_json::{Map, Value, json};

use super::{Contribution, one};
use crate::key::{Key, Kind};
use crate::model::Model;
use crate::span::Topic;
use crate::spec::{BackendSpec, LoadBalancerSpec};

/// What hosts with ports of the VPC get. None: it has no address that the VPC's router is beside, or no backend that exists.
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
    let backends: Vec<Value> = spec.backends.iter().filter_map(backend).collect();
    if backends.is_empty() {
        return None;
    }
    let name = key.on_host();
    let mut item = spec.settings.clone();
    item.insert("name".into(), json!(name));
    item.insert("vni".into(), json!(vni));
    item.insert("address".into(), json!(address));
    item.insert("backend".into(), backends.into());
    Some(one(Topic::Inside(vpc), HostKind::LoadBalancer, &name, Value::Object(item)))
}

/// The address of a backend of a load balancer: of a guest, its first one of the family. None: the guest has none, or is not of the VPC.
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
