//! What an object needs of others, and what only one object may have: the reasons why two changes cannot come in any order.
//!
//! They mirror what `bifrost_control::config` checks between objects. What is missing here costs a batch that is refused and tried
//! again, not a wrong state.

use std::net::IpAddr;
use std::path::PathBuf;

use bifrost_control::config::{Kind, Mac, Object, PortKind, Remote, Vni};
use bifrost_control::objects::Id;
use ipnet::IpNet;

/// Something that objects share only if they agree on it: two claims to the same thing with different values contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Claim {
    /// An address in a VPC.
    Address(Vni, IpAddr),
    /// A prefix in a VPC.
    Prefix(Vni, IpNet),
    /// A MAC address in a VPC: at one port, or behind one peer.
    Mac(Vni, Mac),
    /// A peer's underlay address.
    Underlay(IpAddr),
    /// A network device in a namespace.
    Device(Option<PathBuf>, String),
    /// A socket of a virtual machine.
    Socket(PathBuf),
    /// An address outside, of an uplink.
    Outside(String, IpAddr),
    /// A guest that has an address outside.
    Inside(Vni, IpAddr),
    /// A peering of two VPCs, in both directions.
    Peering(Vni, Vni),
    /// Where a load balancer listens, and through which uplink a VPC goes out.
    Service(Vni, String),
}

/// The objects that have to exist for this one, without itself.
pub(crate) fn needs(object: &Object) -> Vec<Id> {
    let mut ids = Vec::new();
    let mut named = |kind, key: &str| ids.push(Id { kind, key: key.to_owned() });
    match object {
        Object::AddressSet(_) | Object::Peer(_) | Object::Vpc(_) => {}
        Object::SecurityGroup(group) => {
            for remote in group.ingress.iter().chain(&group.egress).flat_map(|rule| &rule.remotes) {
                match remote {
                    Remote::Group(name) if *name != group.name => named(Kind::SecurityGroup, name),
                    Remote::Group(_) => {}
                    Remote::Set(name) => named(Kind::AddressSet, name),
                }
            }
        }
        Object::Port(port) => port.security_groups.iter().for_each(|name| named(Kind::SecurityGroup, name)),
        Object::Route(route) => {
            named(Kind::Peer, &route.peer);
            route.security_groups.iter().for_each(|name| named(Kind::SecurityGroup, name));
        }
        Object::Peering(peering) => named(Kind::Vpc, &peering.to_vni.to_string()),
        Object::LoadBalancer(balancer) => {
            let from = balancer.check.as_ref().and_then(|check| check.from.as_deref());
            from.into_iter().for_each(|from| named(Kind::Port, from));
        }
        Object::Uplink(uplink) => named(Kind::Port, &uplink.port),
        Object::Nat(source) => named(Kind::Uplink, &source.uplink),
        Object::FloatingIp(floating) => named(Kind::Uplink, &floating.uplink),
        Object::PortForward(forward) => named(Kind::Uplink, &forward.uplink),
        Object::Mirror(mirror) => {
            mirror.ports.iter().for_each(|name| named(Kind::Port, name));
            mirror.vpcs.iter().for_each(|vni| named(Kind::Vpc, &vni.to_string()));
        }
        Object::VpcFlowLog(log) => {
            log.log.ports.iter().for_each(|name| named(Kind::Port, name));
            log.log.vpcs.iter().for_each(|vni| named(Kind::Vpc, &vni.to_string()));
        }
    }
    if let Some(vni) = object.vni().filter(|_| object.kind() != Kind::Vpc) {
        named(Kind::Vpc, &vni.to_string());
    }
    ids
}

/// What the object claims, each with its value.
pub(crate) fn claims(object: &Object) -> Vec<(Claim, String)> {
    let mut claims = Vec::new();
    let own = || format!("{} {}", object.kind(), object.key());
    match object {
        Object::Peer(peer) => claims.extend(peer.addresses.iter().map(|a| (Claim::Underlay(*a), own()))),
        Object::Vpc(vpc) => claims.extend(vpc.gateway.iter().map(|a| (Claim::Address(vpc.vni, *a), own()))),
        Object::Port(port) => {
            claims.push((Claim::Mac(port.vni, port.mac), own()));
            claims.extend(port.addresses.iter().map(|a| (Claim::Address(port.vni, a.addr()), own())));
            claims.extend(port.routed.iter().map(|p| (Claim::Prefix(port.vni, *p), own())));
            claims.extend(port.routed.iter().filter_map(|p| host(port.vni, p)).map(|claim| (claim, own())));
            match port.kind {
                PortKind::Tap => claims.push((Claim::Device(port.netns.clone(), port.device.clone()), own())),
                PortKind::VhostUser => claims.extend(port.socket.clone().map(|s| (Claim::Socket(s), own()))),
            }
        }
        Object::Route(route) => {
            claims.push((Claim::Mac(route.vni, route.mac), format!("peer {}", route.peer)));
            claims.push((Claim::Prefix(route.vni, route.prefix), own()));
            claims.extend(host(route.vni, &route.prefix).map(|claim| (claim, own())));
        }
        Object::Peering(peering) => {
            let (vni, other) = (peering.vni, peering.to_vni);
            claims.push((Claim::Peering(vni.min(other), vni.max(other)), own()));
            claims.push((Claim::Prefix(peering.vni, peering.prefix), own()));
            claims.extend(host(peering.vni, &peering.prefix).map(|claim| (claim, own())));
        }
        Object::LoadBalancer(balancer) => {
            claims.push((Claim::Address(balancer.vni, balancer.address), "load balancers".to_owned()));
            let place = format!("{} {:?} {}", balancer.address, balancer.protocol, balancer.port);
            claims.push((Claim::Service(balancer.vni, place), own()));
        }
        Object::Nat(source) => {
            claims.push((Claim::Service(source.vni, String::new()), source.uplink.clone()));
            let outside = |a: &IpAddr| (Claim::Outside(source.uplink.clone(), *a), "shared".to_owned());
            claims.extend(source.addresses.iter().map(outside));
        }
        Object::FloatingIp(floating) => {
            claims.push((Claim::Service(floating.vni, String::new()), floating.uplink.clone()));
            claims.push((Claim::Outside(floating.uplink.clone(), floating.address), own()));
            claims.push((Claim::Inside(floating.vni, floating.inside), own()));
        }
        Object::PortForward(forward) => {
            claims.push((Claim::Service(forward.vni, String::new()), forward.uplink.clone()));
            claims.push((Claim::Outside(forward.uplink.clone(), forward.address), "shared".to_owned()));
        }
        Object::SecurityGroup(_) | Object::AddressSet(_) | Object::Uplink(_) => {}
        Object::Mirror(_) | Object::VpcFlowLog(_) => {}
    }
    claims
}

/// A prefix of one address is a claim to that.
fn host(vni: Vni, prefix: &IpNet) -> Option<Claim> {
    (prefix.prefix_len() == prefix.max_prefix_len()).then(|| Claim::Address(vni, prefix.addr()))
}
