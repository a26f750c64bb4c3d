//! Uplinks and NAT as hosts take them.

use std::net::IpAddr;

use bifrost_control::config::Kind as HostKind;
use serde_json::{Value, json};

use super::{Contribution, gateways, one, placed_in};
use crate::allocate;
use crate::key::{Key, Kind};
use crate::model::Model;
use crate::span::Topic;
use crate::spec::{FloatingIpSpec, HostSpec, NatGatewaySpec, UPLINK};

/// The port of a host's uplink, alone in a VPC of its own.
pub(super) fn uplink(key: &Key, host: &HostSpec) -> Vec<Contribution> {
    let Some((uplink, first)) = host.uplink.as_ref().zip(host.addresses.first()) else { return Vec::new() };
    let (vni, name) = (uplink.vni(), UPLINK);
    let mut port = uplink.settings.clone();
    port.insert("name".into(), json!(name));
    port.insert("vni".into(), json!(vni));
    port.insert("mac".into(), json!(uplink.mac.unwrap_or_else(|| allocate::mac_of(*first)).to_string()));
    port.insert("addresses".into(), json!(uplink.addresses));
    let topic = || Topic::Host(key.name().to_owned());
    vec![
        one(topic(), HostKind::Vpc, &vni.to_string(), json!({"vni": vni, "reliability": "off"})),
        one(topic(), HostKind::Port, name, Value::Object(port)),
        one(topic(), HostKind::Uplink, name, json!({"port": name})),
    ]
}

/// What hosts translate with: each its block. Without a router of the family in the VPC there is no way out.
pub(super) fn gateway(model: &Model, key: &Key, spec: &NatGatewaySpec) -> Vec<Contribution> {
    let vpc = key.sibling(Kind::Vpc, &spec.vpc);
    let Some(vni) = model.vni(&vpc) else { return Vec::new() };
    let blocks = spec.blocks.iter().filter(|(host, block)| {
        model.uplink(host).is_some() && spec.has_block(block) && has_router(model, &vpc, block.address)
    });
    let item = |(host, block): (&String, &crate::spec::Block)| {
        let mut item = json!({"vni": vni, "uplink": UPLINK, "addresses": [block.address], "ports": block.ports});
        if let Some(ports) = spec.ports_per_guest {
            item["ports_per_guest"] = ports.into();
        }
        one(Topic::Nat(key.clone(), host.clone()), HostKind::Nat, &vni.to_string(), item)
    };
    blocks.map(item).collect()
}

/// For the host of the guest. None: it has no uplink, or the guest no such address.
pub(super) fn floating_ip(model: &Model, key: &Key, spec: &FloatingIpSpec) -> Option<Contribution> {
    let address = spec.address?;
    let guest = key.sibling(Kind::Port, &spec.guest);
    let port = model.port(&guest)?;
    let vpc = placed_in(model, &guest, port)?;
    model.uplink(&port.host)?;
    let inside = inside_address(model, key, spec)?;
    let subnets = port.subnets.iter().filter_map(|name| model.subnet(&key.sibling(Kind::Subnet, name)));
    subnets.filter_map(|subnet| subnet.gateway).find(|gateway| gateway.is_ipv4() == address.is_ipv4())?;
    let (vni, uplink) = (model.vni(&vpc)?, UPLINK);
    let item = json!({"vni": vni, "uplink": uplink, "address": address, "inside": inside});
    let id = format!("{uplink}/{address}");
    Some(one(Topic::Host(port.host.clone()), HostKind::FloatingIp, &id, item))
}

/// The address of the guest that a floating address leads to.
pub(crate) fn inside_address(model: &Model, key: &Key, spec: &FloatingIpSpec) -> Option<IpAddr> {
    let port = model.port(&key.sibling(Kind::Port, &spec.guest))?;
    let is_it = |of_guest: &&IpAddr| {
        spec.address.is_none_or(|address| address.is_ipv4() == of_guest.is_ipv4())
            && spec.inside.is_none_or(|inside| inside == **of_guest)
    };
    port.addresses.iter().find(is_it).copied()
}

/// Whether a VPC has a router of the family of an address, through which guests go out.
pub(crate) fn has_router(model: &Model, vpc: &Key, address: IpAddr) -> bool {
    gateways(model, vpc).any(|gateway| gateway.is_ipv4() == address.is_ipv4())
}
