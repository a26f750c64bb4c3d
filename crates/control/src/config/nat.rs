//! `[[uplink]]`, `[[nat]]`, `[[floating_ip]]`, `[[port_forward]]`: connections between guests and the outside.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::check::Checked;
use super::section::{Section, Sink, nearest};
use super::{BalancedProtocol, Vni};

/// Maximum number of uplinks, and of each of the other sections.
const MAX_UPLINKS: usize = 64;
const MAX_SECTIONS: usize = 4096;
/// Maximum number of addresses that the guests of a VPC share.
const MAX_ADDRESSES: usize = 256;
/// Default first port that is allocated of an address (RFC 4787, REQ-3: not a well-known port).
const FIRST_PORT: u64 = 1024;

/// Uplinks to the outside, and NAT.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nat {
    /// `[[uplink]]`, ports unique.
    pub uplinks: Vec<Uplink>,
    /// `[[nat]]`, VPCs unique.
    pub sources: Vec<SourceNat>,
    /// `[[floating_ip]]`, addresses unique.
    pub floating: Vec<FloatingIp>,
    /// `[[port_forward]]`, outside and inside ends unique.
    pub forwards: Vec<PortForward>,
}

/// A port that leads to the outside. Its VPC has no other ports, no routes and no gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uplink {
    /// Name of the port; it exists in [`Config::ports`](super::Config::ports).
    pub port: String,
}

/// Outside addresses that the guests of a VPC share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceNat {
    /// The VPC.
    pub vni: Vni,
    /// Name of the uplink's port.
    pub uplink: String,
    /// At least one.
    pub addresses: Vec<IpAddr>,
    /// First and last port of each address that this host allocates.
    pub ports: (u16, u16),
    /// Maximum number of ports of one guest at a time.
    pub ports_per_guest: u32,
}

/// An outside address of one guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FloatingIp {
    /// The guest's VPC.
    pub vni: Vni,
    /// Name of the uplink's port.
    pub uplink: String,
    /// The outside address.
    pub address: IpAddr,
    /// The guest's address, of the same family; effective on hosts where a port has it.
    pub inside: IpAddr,
}

/// A port of an outside address that is forwarded to a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortForward {
    /// The guest's VPC.
    pub vni: Vni,
    /// Name of the uplink's port.
    pub uplink: String,
    /// The protocol.
    pub protocol: BalancedProtocol,
    /// The outside address; other forwards and `[[nat]]` may share it.
    pub address: IpAddr,
    /// The outside port.
    pub port: u16,
    /// The guest's address, of the same family.
    pub inside: IpAddr,
    /// The guest's port.
    pub inside_port: u16,
}

pub(super) fn uplink(mut s: Section<'_, '_>) -> Uplink {
    let uplink = Uplink { port: s.required("port") };
    s.finish();
    uplink
}

/// Parses the section after `vni`.
pub(super) fn source(vni: Vni, mut s: Section<'_, '_>) -> SourceNat {
    let uplink = s.required("uplink");
    let addresses: Vec<IpAddr> = s.list("addresses", MAX_ADDRESSES);
    if addresses.is_empty() && !s.has_failed("addresses") {
        s.error("addresses", "missing: name at least one outside address for the guests to share");
    }
    let ports = s.int_list("ports", 2, 1..=65535);
    let ports = match ports[..] {
        [] => (FIRST_PORT, 65535),
        [first, last] if first <= last => (first, last),
        _ => {
            if !s.has_failed("ports") {
                s.error("ports", "expected the first and the last port, such as [1024, 65535]");
            }
            (FIRST_PORT, 65535)
        }
    };
    let block = ports.1 - ports.0 + 1;
    let most = block * addresses.len().max(1) as u64;
    let ports_per_guest = s.int("ports_per_guest", 1..=most, block.div_ceil(2)) as u32;
    s.finish();
    SourceNat { vni, uplink, addresses, ports: (ports.0 as u16, ports.1 as u16), ports_per_guest }
}

/// Parses the section after `vni`.
pub(super) fn floating(vni: Vni, mut s: Section<'_, '_>) -> FloatingIp {
    let floating =
        FloatingIp { vni, uplink: s.required("uplink"), address: s.required("address"), inside: s.required("inside") };
    s.finish();
    floating
}

/// Parses the section after `vni`.
pub(super) fn forward(vni: Vni, mut s: Section<'_, '_>) -> PortForward {
    let (uplink, address) = (s.required("uplink"), s.required("address"));
    let port = s.required_int("port", 1..=65535) as u16;
    let forward = PortForward {
        vni,
        uplink,
        protocol: s.choice("protocol", &[("tcp", BalancedProtocol::Tcp), ("udp", BalancedProtocol::Udp)]),
        address,
        port,
        inside: s.required("inside"),
        inside_port: s.optional_int("inside_port", 1..=65535).map_or(port, |port| port as u16),
    };
    s.finish();
    forward
}

/// Checks the relations of these sections to other objects.
pub(super) fn check(config: &Checked<'_>, sink: &Sink<'_>) {
    let nat = &config.nat;
    let counts = [
        ("uplink", nat.uplinks.len(), MAX_UPLINKS),
        ("nat", nat.sources.len(), MAX_SECTIONS),
        ("floating_ip", nat.floating.len(), MAX_SECTIONS),
        ("port_forward", nat.forwards.len(), MAX_SECTIONS),
    ];
    for (name, count, most) in counts {
        if count > most {
            return sink.error(name, format!("{count} are more than {most}"));
        }
    }
    uplinks(config, sink);
    let mut checks = Checks { config, sink, uplink_of: HashMap::new(), owner: HashMap::new() };
    let mut vnis = HashSet::new();
    for (i, source) in nat.sources.iter().enumerate() {
        let at = |key: &str| format!("nat[{i}].{key}");
        if !vnis.insert(source.vni) && !sink.failed(at("vni")) {
            sink.error(at("vni"), format!("VNI {} already has a [[nat]]; name all addresses there", source.vni));
        }
        checks.uplink(&at, source.vni, &source.uplink);
        let mut known = HashSet::new();
        for (k, address) in source.addresses.iter().enumerate() {
            let field = format!("nat[{i}].addresses[{k}]");
            if !known.insert(address) && !sink.failed(&field) {
                sink.error(&field, format!("{address} is listed twice"));
            }
            checks.outside(&field, &source.uplink, *address, None);
            checks.family(&at("vni"), source.vni, *address);
        }
    }
    for (i, floating) in nat.floating.iter().enumerate() {
        let at = |key: &str| format!("floating_ip[{i}].{key}");
        checks.uplink(&at, floating.vni, &floating.uplink);
        checks.outside(&at("address"), &floating.uplink, floating.address, Some((floating.vni, floating.inside)));
        checks.family(&at("vni"), floating.vni, floating.address);
        checks.inside(&at("inside"), floating.address, floating.vni, floating.inside);
    }
    let mut inside = HashMap::new();
    for (i, floating) in nat.floating.iter().enumerate() {
        let field = format!("floating_ip[{i}].inside");
        if inside.insert((floating.vni, floating.inside), i).is_some() && !sink.failed(&field) {
            sink.error(&field, format!("{} already has a floating address", floating.inside));
        }
    }
    let (mut outside_ends, mut inside_ends) = (HashSet::new(), HashSet::new());
    for (i, forward) in nat.forwards.iter().enumerate() {
        let at = |key: &str| format!("port_forward[{i}].{key}");
        checks.uplink(&at, forward.vni, &forward.uplink);
        checks.outside(&at("address"), &forward.uplink, forward.address, None);
        checks.family(&at("vni"), forward.vni, forward.address);
        checks.inside(&at("inside"), forward.address, forward.vni, forward.inside);
        if !outside_ends.insert((forward.protocol, forward.address, forward.port)) && !sink.failed(at("port")) {
            sink.error(at("port"), format!("port {} of {} is already forwarded", forward.port, forward.address));
        }
        let end = (forward.vni, forward.protocol, forward.inside, forward.inside_port);
        if !inside_ends.insert(end) && !sink.failed(at("inside")) {
            let message = format!("port {} of {} already has a forward", forward.inside_port, forward.inside);
            sink.error(at("inside"), message);
        }
        if inside.contains_key(&(forward.vni, forward.inside)) && !sink.failed(at("inside")) {
            let message =
                format!("{} has a floating address, which already makes all its ports reachable", forward.inside);
            sink.error(at("inside"), message);
        }
    }
}

/// Each uplink is a port, alone in its VPC.
fn uplinks(config: &Checked<'_>, sink: &Sink<'_>) {
    let names: Vec<&str> = config.ports.iter().map(|p| p.name.as_str()).collect();
    let mut seen = HashSet::new();
    for (i, uplink) in config.nat.uplinks.iter().enumerate() {
        let field = format!("uplink[{i}].port");
        if sink.failed(&field) || sink.failed_within("port") {
            continue;
        }
        let Some(port) = config.port(&uplink.port) else {
            let known =
                nearest(&uplink.port, &names).map_or_else(String::new, |name| format!("; did you mean {name:?}?"));
            sink.error(&field, format!("no port named {:?}{known}", uplink.port));
            continue;
        };
        let vni = port.vni;
        let others = config.ports.iter().filter(|p| p.vni == vni).count() > 1;
        let routes = config.routes.iter().any(|r| r.vni == vni)
            || config.ports.iter().any(|p| p.vni == vni && !p.routed.is_empty());
        let peerings = config.peerings.iter().any(|p| p.vni == vni || p.to_vni == vni);
        let gateway = config.vpc(vni).is_some_and(|vpc| !vpc.gateway.is_empty());
        let balancers = config.load_balancers.iter().any(|b| b.vni == vni);
        let message = if !seen.insert(&port.name) {
            format!("port {:?} is already an uplink", port.name)
        } else if others || routes || peerings || gateway || balancers {
            format!(
                "VNI {vni} of port {:?} must not have another port, a route, a peering, a gateway or a load balancer",
                port.name
            )
        } else if !port.security_groups.is_empty() {
            format!("port {:?} has security groups; set them on the guests' ports", port.name)
        } else {
            continue;
        };
        sink.error(&field, message);
    }
}

struct Checks<'a> {
    config: &'a Checked<'a>,
    sink: &'a Sink<'a>,
    /// By VPC.
    uplink_of: HashMap<Vni, &'a str>,
    /// The guest that owns an outside address; `None`: several guests share it.
    owner: HashMap<(&'a str, IpAddr), Option<(Vni, IpAddr)>>,
}

impl<'a> Checks<'a> {
    /// The uplink must exist, and a VPC must use only one.
    fn uplink(&mut self, at: &dyn Fn(&str) -> String, vni: Vni, uplink: &'a str) {
        let (config, sink) = (self.config, self.sink);
        if sink.failed(at("uplink")) || sink.failed(at("vni")) || sink.failed_within("uplink") {
            return;
        }
        let names: Vec<&str> = config.nat.uplinks.iter().map(|u| u.port.as_str()).collect();
        if !names.contains(&uplink) {
            let known = match nearest(uplink, &names) {
                Some(name) => format!("did you mean {name:?}?"),
                None => "add an [[uplink]] with that port".to_owned(),
            };
            return sink.error(at("uplink"), format!("{uplink:?} is not an uplink; {known}"));
        }
        let other = *self.uplink_of.entry(vni).or_insert(uplink);
        if other != uplink {
            return sink.error(at("uplink"), format!("VNI {vni} already uses uplink {other:?}; a VPC has one uplink"));
        }
        if sink.failed_within("vpc") || sink.failed_within("port") {
            return;
        }
        if config.vpc(vni).is_none() {
            sink.error(at("vni"), format!("there is no [[vpc]] with vni = {vni}"));
        } else if config.port(uplink).is_some_and(|port| port.vni == vni) {
            sink.error(at("vni"), format!("VNI {vni} is the uplink's; name the VPC of the guests"));
        }
    }

    /// An outside address must be a unicast address without another owner.
    fn outside(&mut self, field: &str, uplink: &'a str, address: IpAddr, owner: Option<(Vni, IpAddr)>) {
        let sink = self.sink;
        if sink.failed(field) {
            return;
        }
        let is_host = !(address.is_unspecified() || address.is_multicast() || address.is_loopback());
        let of_port = self.config.port(uplink).is_some_and(|p| p.addresses.iter().any(|a| a.addr() == address));
        if !is_host {
            return sink.error(field, format!("{address} cannot be an outside address"));
        }
        if of_port {
            return sink.error(field, format!("{address} is the address of the port {uplink:?} itself"));
        }
        match self.owner.insert((uplink, address), owner) {
            Some(other) if other.is_some() || owner.is_some() => {
                sink.error(field, format!("{address} is already in use; a floating address belongs to one guest"));
            }
            _ => {}
        }
    }

    /// A VPC with outside addresses needs a gateway of their family, and must not have another default route.
    fn family(&self, field: &str, vni: Vni, address: IpAddr) {
        let (config, sink) = (self.config, self.sink);
        if sink.failed(field) || sink.failed_within("vpc") {
            return;
        }
        let v6 = address.is_ipv6();
        let family = if v6 { "IPv6" } else { "IPv4" };
        if config.vpc(vni).is_some_and(|vpc| !vpc.gateway.iter().any(|a| a.is_ipv6() == v6)) {
            sink.error(
                field,
                format!("VNI {vni} has no {family} gateway, through which guests reach the outside; add one"),
            );
        }
        let is_all = |prefix: &ipnet::IpNet| prefix.prefix_len() == 0 && prefix.addr().is_ipv6() == v6;
        let routed = config.ports.iter().filter(|p| p.vni == vni).flat_map(|p| &p.routed);
        let mut routes = config.routes.iter().filter(|r| r.vni == vni).map(|r| &r.prefix).chain(routed);
        let route = routes.any(&is_all);
        if route || config.peerings.iter().any(|p| p.vni == vni && is_all(&p.prefix)) {
            let message = format!("VNI {vni} has another {family} default route; remove one of them");
            if !sink.failed(field) {
                sink.error(field, message);
            }
        }
    }

    /// A guest's address must be of the family of its outside address, and not be a gateway's or a load balancer's.
    fn inside(&self, field: &str, outside: IpAddr, vni: Vni, inside: IpAddr) {
        let sink = self.sink;
        if sink.failed(field) {
            return;
        }
        let gateway = self.config.vpc(vni).is_some_and(|vpc| vpc.gateway.contains(&inside));
        if inside.is_ipv4() != outside.is_ipv4() {
            sink.error(field, format!("{inside} is of another family than {outside}"));
        } else if gateway {
            sink.error(field, format!("{inside} is the gateway's"));
        } else if self.config.load_balancers.iter().any(|b| b.vni == vni && b.address == inside) {
            sink.error(field, format!("{inside} is a load balancer's; name a guest"));
        }
    }
}
