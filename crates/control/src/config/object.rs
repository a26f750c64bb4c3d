//! Single configuration objects: the elements of `[[port]]`, `[[route]]` and the other arrays of tables.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use toml::de::DeTable;

use super::section::{Section, Sink};
use super::{
    AddressSet, BalancedProtocol, Config, FloatingIp, LoadBalancer, Mirror, Peer, Peering, Port, PortForward, Route,
    Routes, SecurityGroup, SourceNat, Uplink, Vni, Vpc, VpcFlowLog, parse,
};

/// The kinds of objects, with the names of the file's tables. A kind comes after those to which it refers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// `[[security_group]]`; its key is its name.
    SecurityGroup,
    /// `[[address_set]]`; its key is its name.
    AddressSet,
    /// `[[peer]]`; its key is its name.
    Peer,
    /// `[[vpc]]`; its key is its VNI.
    Vpc,
    /// `[[port]]`; its key is its name.
    Port,
    /// `[[route]]`; its key is `VNI/PREFIX`.
    Route,
    /// `[[peering]]`; its key is `VNI/PREFIX`.
    Peering,
    /// `[[load_balancer]]`; its key is its name.
    LoadBalancer,
    /// `[[uplink]]`; its key is the port's name.
    Uplink,
    /// `[[nat]]`; its key is its VNI.
    Nat,
    /// `[[floating_ip]]`; its key is `UPLINK/ADDRESS`.
    FloatingIp,
    /// `[[port_forward]]`; its key is `UPLINK/PROTOCOL/ADDRESS/PORT`.
    PortForward,
    /// `[[mirror]]`; its key is its name.
    Mirror,
    /// `[[vpc_flow_log]]`; its key is its name.
    VpcFlowLog,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 14] = [
        Kind::SecurityGroup,
        Kind::AddressSet,
        Kind::Peer,
        Kind::Vpc,
        Kind::Port,
        Kind::Route,
        Kind::Peering,
        Kind::LoadBalancer,
        Kind::Uplink,
        Kind::Nat,
        Kind::FloatingIp,
        Kind::PortForward,
        Kind::Mirror,
        Kind::VpcFlowLog,
    ];

    /// Its name in the file and in the API.
    pub fn name(self) -> &'static str {
        match self {
            Kind::SecurityGroup => "security_group",
            Kind::AddressSet => "address_set",
            Kind::Peer => "peer",
            Kind::Vpc => "vpc",
            Kind::Port => "port",
            Kind::Route => "route",
            Kind::Peering => "peering",
            Kind::LoadBalancer => "load_balancer",
            Kind::Uplink => "uplink",
            Kind::Nat => "nat",
            Kind::FloatingIp => "floating_ip",
            Kind::PortForward => "port_forward",
            Kind::Mirror => "mirror",
            Kind::VpcFlowLog => "vpc_flow_log",
        }
    }

    /// The canonical form of a key: addresses and numbers have several notations. `None`: the key is invalid for this
    /// kind.
    pub fn canonical(self, key: &str) -> Option<String> {
        let number = |text: &str| text.parse().ok().and_then(Vni::new);
        Some(match self {
            Kind::Vpc | Kind::Nat => number(key)?.to_string(),
            Kind::Route | Kind::Peering => {
                let (vni, prefix) = key.split_once('/')?;
                format!("{}/{}", number(vni)?, prefix.parse::<IpNet>().ok()?)
            }
            Kind::FloatingIp => {
                let (uplink, address) = key.split_once('/')?;
                format!("{uplink}/{}", address.parse::<IpAddr>().ok()?)
            }
            Kind::PortForward => {
                let [uplink, protocol, address, port] = key.split('/').collect::<Vec<_>>()[..] else { return None };
                let protocol = ["tcp", "udp"].into_iter().find(|known| *known == protocol)?;
                format!("{uplink}/{protocol}/{}/{}", address.parse::<IpAddr>().ok()?, port.parse::<u16>().ok()?)
            }
            _ => (!key.is_empty()).then(|| key.to_owned())?,
        })
    }

    /// The format of keys of this kind.
    pub fn key_form(self) -> &'static str {
        match self {
            Kind::Vpc | Kind::Nat => "VNI",
            Kind::Route | Kind::Peering => "VNI/PREFIX, such as 100/10.0.0.2/32",
            Kind::Uplink => "the name of its port",
            Kind::FloatingIp => "UPLINK/ADDRESS",
            Kind::PortForward => "UPLINK/PROTOCOL/ADDRESS/PORT, such as outside/tcp/203.0.113.1/443",
            _ => "its name",
        }
    }

    /// The kind with this name.
    pub fn of_name(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An object. Its values are in range; the objects to which it refers need not exist.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "see Kind")]
pub enum Object {
    SecurityGroup(SecurityGroup),
    AddressSet(AddressSet),
    Peer(Peer),
    Vpc(Vpc),
    Port(Box<Port>),
    Route(Route),
    Peering(Peering),
    LoadBalancer(LoadBalancer),
    Uplink(Uplink),
    Nat(SourceNat),
    FloatingIp(FloatingIp),
    PortForward(PortForward),
    Mirror(Mirror),
    VpcFlowLog(Box<VpcFlowLog>),
}

/// An error of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// The field, such as `addresses[0]`; empty: the object as a whole.
    pub field: String,
    /// What is wrong, and what to do.
    pub message: String,
}

impl Object {
    /// Parses an object from a spec with the keys of the file's table. `workers` is the host's number of workers, the
    /// default number of queues of a TAP port.
    ///
    /// # Errors
    /// All errors of the object itself.
    pub fn parse(kind: Kind, spec: &serde_json::Value, workers: usize) -> Result<Object, Vec<FieldError>> {
        let error = |message: String| vec![FieldError { field: String::new(), message }];
        if !spec.is_object() {
            return Err(error(format!("the spec of a {kind} must be an object with the keys of [[{kind}]]")));
        }
        // The schema is that of the file, so use the same parser.
        let text = toml::to_string(spec).map_err(|e| error(format!("{e}; leave out keys without a value")))?;
        let document = DeTable::parse(&text).map_err(|e| error(e.message().to_owned()))?;
        let sink = Sink::new("", &text, document.get_ref());
        let object = parse::object(kind, Section::root(&sink, document.get_ref()), workers);
        let errors = sink.into_errors();
        if errors.is_empty() {
            return Ok(object);
        }
        Err(errors.into_iter().map(|e| FieldError { field: e.field, message: e.message }).collect())
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        match self {
            Object::SecurityGroup(_) => Kind::SecurityGroup,
            Object::AddressSet(_) => Kind::AddressSet,
            Object::Peer(_) => Kind::Peer,
            Object::Vpc(_) => Kind::Vpc,
            Object::Port(_) => Kind::Port,
            Object::Route(_) => Kind::Route,
            Object::Peering(_) => Kind::Peering,
            Object::LoadBalancer(_) => Kind::LoadBalancer,
            Object::Uplink(_) => Kind::Uplink,
            Object::Nat(_) => Kind::Nat,
            Object::FloatingIp(_) => Kind::FloatingIp,
            Object::PortForward(_) => Kind::PortForward,
            Object::Mirror(_) => Kind::Mirror,
            Object::VpcFlowLog(_) => Kind::VpcFlowLog,
        }
    }

    /// Its key, unique within its kind.
    pub fn key(&self) -> String {
        match self {
            Object::SecurityGroup(group) => group.name.clone(),
            Object::AddressSet(set) => set.name.clone(),
            Object::Peer(peer) => peer.name.clone(),
            Object::Vpc(vpc) => vpc.vni.to_string(),
            Object::Port(port) => port.name.clone(),
            Object::Route(route) => format!("{}/{}", route.vni, route.prefix),
            Object::Peering(peering) => format!("{}/{}", peering.vni, peering.prefix),
            Object::LoadBalancer(balancer) => balancer.name.clone(),
            Object::Uplink(uplink) => uplink.port.clone(),
            Object::Nat(source) => source.vni.to_string(),
            Object::FloatingIp(floating) => format!("{}/{}", floating.uplink, floating.address),
            Object::PortForward(forward) => {
                let protocol = protocol(forward.protocol);
                format!("{}/{protocol}/{}/{}", forward.uplink, forward.address, forward.port)
            }
            Object::Mirror(mirror) => mirror.name.clone(),
            Object::VpcFlowLog(log) => log.name.clone(),
        }
    }

    /// The VPC to which it belongs, if any.
    pub fn vni(&self) -> Option<Vni> {
        match self {
            Object::Vpc(vpc) => Some(vpc.vni),
            Object::Port(port) => Some(port.vni),
            Object::Route(route) => Some(route.vni),
            Object::Peering(peering) => Some(peering.vni),
            Object::LoadBalancer(balancer) => Some(balancer.vni),
            Object::Nat(source) => Some(source.vni),
            Object::FloatingIp(floating) => Some(floating.vni),
            Object::PortForward(forward) => Some(forward.vni),
            Object::SecurityGroup(_) | Object::AddressSet(_) | Object::Peer(_) => None,
            Object::Uplink(_) | Object::Mirror(_) | Object::VpcFlowLog(_) => None,
        }
    }
}

/// The name of a protocol.
pub(super) fn protocol(protocol: BalancedProtocol) -> &'static str {
    match protocol {
        BalancedProtocol::Tcp => "tcp",
        BalancedProtocol::Udp => "udp",
    }
}

impl Config {
    /// Adds an object without checks.
    pub fn push(&mut self, object: Object) {
        match object {
            Object::SecurityGroup(group) => self.security_groups.push(group),
            Object::AddressSet(set) => self.address_sets.push(set),
            Object::Peer(peer) => self.peers.push(peer),
            Object::Vpc(vpc) => self.vpcs.push(vpc),
            Object::Port(port) => self.ports.push(*port),
            Object::Route(route) => drop(self.routes.insert(route)),
            Object::Peering(peering) => self.peerings.push(peering),
            Object::LoadBalancer(balancer) => self.load_balancers.push(balancer),
            Object::Uplink(uplink) => self.nat.uplinks.push(uplink),
            Object::Nat(source) => self.nat.sources.push(source),
            Object::FloatingIp(floating) => self.nat.floating.push(floating),
            Object::PortForward(forward) => self.nat.forwards.push(forward),
            Object::Mirror(mirror) => self.mirrors.push(mirror),
            Object::VpcFlowLog(log) => self.flow_logs.push(*log),
        }
    }

    /// The number of objects of a kind.
    pub fn count(&self, kind: Kind) -> usize {
        match kind {
            Kind::SecurityGroup => self.security_groups.len(),
            Kind::AddressSet => self.address_sets.len(),
            Kind::Peer => self.peers.len(),
            Kind::Vpc => self.vpcs.len(),
            Kind::Port => self.ports.len(),
            Kind::Route => self.routes.len(),
            Kind::Peering => self.peerings.len(),
            Kind::LoadBalancer => self.load_balancers.len(),
            Kind::Uplink => self.nat.uplinks.len(),
            Kind::Nat => self.nat.sources.len(),
            Kind::FloatingIp => self.nat.floating.len(),
            Kind::PortForward => self.nat.forwards.len(),
            Kind::Mirror => self.mirrors.len(),
            Kind::VpcFlowLog => self.flow_logs.len(),
        }
    }

    /// Removes all objects of a kind.
    pub(crate) fn clear(&mut self, kind: Kind) {
        match kind {
            Kind::SecurityGroup => self.security_groups.clear(),
            Kind::AddressSet => self.address_sets.clear(),
            Kind::Peer => self.peers.clear(),
            Kind::Vpc => self.vpcs.clear(),
            Kind::Port => self.ports.clear(),
            Kind::Route => self.routes = Routes::new(),
            Kind::Peering => self.peerings.clear(),
            Kind::LoadBalancer => self.load_balancers.clear(),
            Kind::Uplink => self.nat.uplinks.clear(),
            Kind::Nat => self.nat.sources.clear(),
            Kind::FloatingIp => self.nat.floating.clear(),
            Kind::PortForward => self.nat.forwards.clear(),
            Kind::Mirror => self.mirrors.clear(),
            Kind::VpcFlowLog => self.flow_logs.clear(),
        }
    }

    /// A copy of an object, by its kind and index. Finding a route takes time proportional to its index; see
    /// [`objects_of`](Self::objects_of).
    pub fn object(&self, kind: Kind, index: usize) -> Option<Object> {
        Some(match kind {
            Kind::SecurityGroup => Object::SecurityGroup(self.security_groups.get(index)?.clone()),
            Kind::AddressSet => Object::AddressSet(self.address_sets.get(index)?.clone()),
            Kind::Peer => Object::Peer(self.peers.get(index)?.clone()),
            Kind::Vpc => Object::Vpc(self.vpcs.get(index)?.clone()),
            Kind::Port => Object::Port(Box::new(self.ports.get(index)?.clone())),
            Kind::Route => Object::Route(self.routes.iter().nth(index)?.clone()),
            Kind::Peering => Object::Peering(self.peerings.get(index)?.clone()),
            Kind::LoadBalancer => Object::LoadBalancer(self.load_balancers.get(index)?.clone()),
            Kind::Uplink => Object::Uplink(self.nat.uplinks.get(index)?.clone()),
            Kind::Nat => Object::Nat(self.nat.sources.get(index)?.clone()),
            Kind::FloatingIp => Object::FloatingIp(self.nat.floating.get(index)?.clone()),
            Kind::PortForward => Object::PortForward(self.nat.forwards.get(index)?.clone()),
            Kind::Mirror => Object::Mirror(self.mirrors.get(index)?.clone()),
            Kind::VpcFlowLog => Object::VpcFlowLog(Box::new(self.flow_logs.get(index)?.clone())),
        })
    }

    /// Copies of all objects, kind by kind.
    pub fn objects(&self) -> impl Iterator<Item = Object> + '_ {
        Kind::ALL.into_iter().flat_map(|kind| self.objects_of(kind, 0))
    }

    /// Copies of the objects of a kind, from an index.
    pub fn objects_of(&self, kind: Kind, from: usize) -> Box<dyn Iterator<Item = Object> + '_> {
        match kind {
            Kind::Route => Box::new(self.routes.iter().skip(from).cloned().map(Object::Route)),
            _ => Box::new((from..self.count(kind)).filter_map(move |index| self.object(kind, index))),
        }
    }
}
