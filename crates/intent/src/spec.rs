//! What each kind of object says.
//!
//! Settings that a host's `bifrostd` has a word for have the same word here, and are not described again: [`VpcSpec::settings`],
//! [`PortSpec::settings`] and the rules of groups are read by `bifrostd`'s own reader, when a change is planned.

use std::collections::BTreeSet;
use std::net::IpAddr;

use bifrost_wire::Mac;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::key::{Key, Kind};

mod services;

pub use services::{
    BackendSpec, Block, FloatingIpSpec, FlowLogSpec, LoadBalancerSpec, MAX_BACKENDS, MAX_FLOWS, MAX_JSON_MB,
    MAX_LOGGED, MAX_MIRRORED, MAX_POOL, MAX_ROUTES, MirrorSpec, NatGatewaySpec, RouteTableSpec, RouteToSpec, UPLINK,
    UplinkSpec,
};

/// The most addresses of a host, and of a port.
pub const MAX_ADDRESSES: usize = 8;
/// The most security groups of a port.
pub const MAX_GROUPS: usize = 16;
/// The most prefixes of a grant.
pub const MAX_GRANTED: usize = 256;
/// The most prefixes in which hosts learn routes of a VPC.
pub const MAX_LEARNED: usize = 16;
/// The most prefixes behind a port.
pub const MAX_ROUTED: usize = 16;

/// An object.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "each is what its kind is")]
pub enum Spec {
    Host(HostSpec),
    Project(ProjectSpec),
    OutsideGrant(OutsideGrantSpec),
    Vpc(VpcSpec),
    Subnet(SubnetSpec),
    AddressSet(AddressSetSpec),
    SecurityGroup(SecurityGroupSpec),
    Port(Box<PortSpec>),
    Peering(PeeringSpec),
    LoadBalancer(Box<LoadBalancerSpec>),
    NatGateway(Box<NatGatewaySpec>),
    FloatingIp(FloatingIpSpec),
    RouteTable(RouteTableSpec),
    Mirror(Box<MirrorSpec>),
    FlowLog(Box<FlowLogSpec>),
}

/// A host that runs `bifrostd` and an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostSpec {
    /// Its underlay addresses, 1 to [`MAX_ADDRESSES`], in the order of its paths. Only one host has an address.
    pub addresses: Vec<IpAddr>,
    /// How other hosts talk to it.
    #[serde(default, skip_serializing_if = "HostTransport::is_auto")]
    pub transport: HostTransport,
    /// The way of its guests to the outside. Absent: there is none, and no NAT.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<UplinkSpec>,
}

/// How other hosts talk to a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostTransport {
    /// Reliably, where it can.
    #[default]
    Auto,
    /// By plain VXLAN.
    Plain,
}

impl HostTransport {
    fn is_auto(&self) -> bool {
        *self == HostTransport::Auto
    }

    /// The word of it.
    pub fn name(self) -> &'static str {
        match self {
            HostTransport::Auto => "auto",
            HostTransport::Plain => "plain",
        }
    }
}

/// A project.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProjectSpec {
    /// How many objects it may have.
    #[serde(default, skip_serializing_if = "Quota::is_empty")]
    pub quota: Quota,
}

/// The most objects of a project, kind by kind. Absent: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "each is of its kind")]
pub struct Quota {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vpcs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subnets: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address_sets: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_groups: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peerings: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_balancers: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nat_gateways: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floating_ips: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route_tables: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirrors: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flow_logs: Option<u64>,
}

impl Quota {
    /// The most objects of a kind; none: no limit.
    pub fn of(&self, kind: Kind) -> Option<u64> {
        match kind {
            Kind::Host | Kind::Project | Kind::OutsideGrant => None,
            Kind::Vpc => self.vpcs,
            Kind::Subnet => self.subnets,
            Kind::AddressSet => self.address_sets,
            Kind::SecurityGroup => self.security_groups,
            Kind::Port => self.ports,
            Kind::Peering => self.peerings,
            Kind::LoadBalancer => self.load_balancers,
            Kind::NatGateway => self.nat_gateways,
            Kind::FloatingIp => self.floating_ips,
            Kind::RouteTable => self.route_tables,
            Kind::Mirror => self.mirrors,
            Kind::FlowLog => self.flow_logs,
        }
    }

    /// What it calls objects of a kind.
    pub(crate) fn name(kind: Kind) -> &'static str {
        match kind {
            Kind::Host => "hosts",
            Kind::Project => "projects",
            Kind::OutsideGrant => "outside_grants",
            Kind::Vpc => "vpcs",
            Kind::Subnet => "subnets",
            Kind::AddressSet => "address_sets",
            Kind::SecurityGroup => "security_groups",
            Kind::Port => "ports",
            Kind::Peering => "peerings",
            Kind::LoadBalancer => "load_balancers",
            Kind::NatGateway => "nat_gateways",
            Kind::FloatingIp => "floating_ips",
            Kind::RouteTable => "route_tables",
            Kind::Mirror => "mirrors",
            Kind::FlowLog => "flow_logs",
        }
    }

    fn is_empty(&self) -> bool {
        *self == Quota::default()
    }
}

/// Outside addresses that a project may use. While there is one, each project may use only those that it was granted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutsideGrantSpec {
    /// 1 to [`MAX_GRANTED`] prefixes; no host bits are set. They overlap with none of another grant.
    pub prefixes: BTreeSet<IpNet>,
}

/// A network of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VpcSpec {
    /// Its VXLAN network identifier, 1 to 16,777,215. Absent: the lowest free one from 4,096 on. It does not change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vni: Option<u32>,
    /// Prefixes in which hosts learn routes when a packet needs them, at most [`MAX_LEARNED`]; no host bits are set. Routes to other
    /// addresses, and all routes if there are none, are sent to each host with a port of the VPC.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub learned: BTreeSet<IpNet>,
    /// All other keys of `[[vpc]]` but `gateway`, which the subnets give.
    #[serde(flatten)]
    pub settings: Map<String, Value>,
}

/// Addresses of a VPC.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubnetSpec {
    /// The VPC's name. It does not change.
    pub vpc: String,
    /// Which addresses; no host bits are set. It does not change, and overlaps with no other of the VPC.
    pub prefix: IpNet,
    /// The router's address. Absent: the first of the prefix. It does not change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// Addresses that rules name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddressSetSpec {
    /// Prefixes; no host bits are set.
    #[serde(default)]
    pub addresses: BTreeSet<IpNet>,
}

/// A rule, with the keys of `bifrostd`'s configuration.
pub type RuleSpec = Map<String, Value>;

/// Conversations that may begin with a guest, and that it may begin.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecurityGroupSpec {
    /// Rules as in `[[security_group.ingress]]`. `group:NAME` and `set:NAME` are those of the project.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ingress: Vec<RuleSpec>,
    /// Rules as in `[[security_group.egress]]`. Absent: the guest may begin everything; empty: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Vec<RuleSpec>>,
}

/// A port of a guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PortSpec {
    /// The subnets' names, 1 or more, of one VPC. They do not change.
    pub subnets: Vec<String>,
    /// The host that it is on.
    pub host: String,
    /// Its addresses, each of one of the subnets. Absent: the lowest free one of each subnet. They do not change unless they are named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// Its MAC address. Absent: one that follows from the first address.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "mac_text")]
    pub mac: Option<Mac>,
    /// Its security groups, of its project.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub security_groups: Vec<String>,
    /// Prefixes behind the guest, which routes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routed: Vec<IpNet>,
    /// All other keys of `[[port]]`, such as `netns`, `device`, `kind`, `socket`, `mtu` and limits.
    #[serde(flatten)]
    pub settings: Map<String, Value>,
}

/// A connection between two VPCs of a project: guests of each reach those of the other through their routers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeeringSpec {
    /// The two VPCs' names. They do not change.
    pub vpcs: [String; 2],
}

impl Spec {
    /// Reads an object's description.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub fn parse(kind: Kind, value: &Value) -> Result<Spec, (String, String)> {
        Ok(match kind {
            Kind::Host => Spec::Host(read(value)?),
            Kind::Project => Spec::Project(read(value)?),
            Kind::OutsideGrant => Spec::OutsideGrant(read(value)?),
            Kind::Vpc => Spec::Vpc(read(value)?),
            Kind::Subnet => Spec::Subnet(read(value)?),
            Kind::AddressSet => Spec::AddressSet(read(value)?),
            Kind::SecurityGroup => Spec::SecurityGroup(read(value)?),
            Kind::Port => Spec::Port(Box::new(read(value)?)),
            Kind::Peering => Spec::Peering(read(value)?),
            Kind::LoadBalancer => Spec::LoadBalancer(Box::new(read(value)?)),
            Kind::NatGateway => Spec::NatGateway(Box::new(read(value)?)),
            Kind::FloatingIp => Spec::FloatingIp(read(value)?),
            Kind::RouteTable => Spec::RouteTable(read(value)?),
            Kind::Mirror => Spec::Mirror(Box::new(read(value)?)),
            Kind::FlowLog => Spec::FlowLog(Box::new(read(value)?)),
        })
    }

    /// Its description. Defaults are left out.
    pub fn value(&self) -> Value {
        let value = match self {
            Spec::Host(spec) => serde_json::to_value(spec),
            Spec::Project(spec) => serde_json::to_value(spec),
            Spec::OutsideGrant(spec) => serde_json::to_value(spec),
            Spec::Vpc(spec) => serde_json::to_value(spec),
            Spec::Subnet(spec) => serde_json::to_value(spec),
            Spec::AddressSet(spec) => serde_json::to_value(spec),
            Spec::SecurityGroup(spec) => serde_json::to_value(spec),
            Spec::Port(spec) => serde_json::to_value(spec),
            Spec::Peering(spec) => serde_json::to_value(spec),
            Spec::LoadBalancer(spec) => serde_json::to_value(spec),
            Spec::NatGateway(spec) => serde_json::to_value(spec),
            Spec::FloatingIp(spec) => serde_json::to_value(spec),
            Spec::RouteTable(spec) => serde_json::to_value(spec),
            Spec::Mirror(spec) => serde_json::to_value(spec),
            Spec::FlowLog(spec) => serde_json::to_value(spec),
        };
        // Maps with texts as keys, which JSON has.
        value.unwrap_or(Value::Null)
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        match self {
            Spec::Host(_) => Kind::Host,
            Spec::Project(_) => Kind::Project,
            Spec::OutsideGrant(_) => Kind::OutsideGrant,
            Spec::Vpc(_) => Kind::Vpc,
            Spec::Subnet(_) => Kind::Subnet,
            Spec::AddressSet(_) => Kind::AddressSet,
            Spec::SecurityGroup(_) => Kind::SecurityGroup,
            Spec::Port(_) => Kind::Port,
            Spec::Peering(_) => Kind::Peering,
            Spec::LoadBalancer(_) => Kind::LoadBalancer,
            Spec::NatGateway(_) => Kind::NatGateway,
            Spec::FloatingIp(_) => Kind::FloatingIp,
            Spec::RouteTable(_) => Kind::RouteTable,
            Spec::Mirror(_) => Kind::Mirror,
            Spec::FlowLog(_) => Kind::FlowLog,
        }
    }

    /// The objects that it refers to, each with the field.
    pub fn references(&self, key: &Key) -> Vec<(String, Key)> {
        let sibling = |field: String, kind, name: &str| (field, key.sibling(kind, name));
        match self {
            Spec::Host(_) | Spec::Project(_) | Spec::OutsideGrant(_) | Spec::Vpc(_) | Spec::AddressSet(_) => Vec::new(),
            Spec::Subnet(spec) => vec![sibling("vpc".into(), Kind::Vpc, &spec.vpc)],
            Spec::SecurityGroup(spec) => {
                let named = spec.remotes().into_iter();
                named.map(|(field, kind, name)| sibling(field, kind, &name)).collect()
            }
            Spec::Port(spec) => {
                let mut all: Vec<_> = (spec.subnets.iter().enumerate())
                    .map(|(i, name)| sibling(format!("subnets[{i}]"), Kind::Subnet, name))
                    .collect();
                let groups = spec.security_groups.iter().enumerate();
                all.extend(groups.map(|(i, name)| sibling(format!("security_groups[{i}]"), Kind::SecurityGroup, name)));
                // A name that no host can have refers to nothing, which the check of references says.
                all.push(("host".into(), Key::unchecked_host(&spec.host)));
                all
            }
            Spec::Peering(spec) => {
                let vpcs = spec.vpcs.iter().enumerate();
                vpcs.map(|(i, name)| sibling(format!("vpcs[{i}]"), Kind::Vpc, name)).collect()
            }
            Spec::LoadBalancer(spec) => {
                let guests =
                    spec.backends.iter().enumerate().filter_map(|(i, backend)| Some((i, backend.guest.as_ref()?)));
                let guests = guests.map(|(i, name)| sibling(format!("backends[{i}].guest"), Kind::Port, name));
                std::iter::once(sibling("subnet".into(), Kind::Subnet, &spec.subnet)).chain(guests).collect()
            }
            Spec::NatGateway(spec) => vec![sibling("vpc".into(), Kind::Vpc, &spec.vpc)],
            Spec::FloatingIp(spec) => {
                let guest = sibling("guest".into(), Kind::Port, &spec.guest);
                let pool = spec.pool.iter().map(|pool| sibling("pool".into(), Kind::AddressSet, pool));
                std::iter::once(guest).chain(pool).collect()
            }
            Spec::RouteTable(spec) => {
                let routes = spec.routes.iter().enumerate();
                let guests = routes.map(|(i, route)| sibling(format!("routes[{i}].guest"), Kind::Port, &route.guest));
                std::iter::once(sibling("vpc".into(), Kind::Vpc, &spec.vpc)).chain(guests).collect()
            }
            Spec::Mirror(spec) => of_scope(key, spec.vpc.as_deref(), &spec.guests),
            Spec::FlowLog(spec) => of_scope(key, spec.vpc.as_deref(), &spec.guests),
        }
    }
}

impl PortSpec {
    /// The interface of a container's port that does not name it, within a namespace of its own. A name of 63 bytes is none of an
    /// interface.
    pub(crate) const DEVICE: &str = "eth0";

    /// Whether its guest is a container, which gets an interface; otherwise a machine, which has a socket.
    pub(crate) fn is_container(&self) -> bool {
        self.settings.get("kind").is_none_or(|kind| kind == "tap")
    }

    /// What its guest is attached to: an interface of a namespace, or a socket. None: what it says is no such thing.
    pub(crate) fn attachment(&self) -> Option<String> {
        if !self.is_container() {
            return self.settings.get("socket").and_then(Value::as_str).map(str::to_owned);
        }
        let default = self.settings.contains_key("netns").then_some(PortSpec::DEVICE);
        interface(&self.settings, default)
    }
}

/// The interface that a container's port with these settings has; `default`: its name, if they name none.
fn interface(settings: &Map<String, Value>, default: Option<&str>) -> Option<String> {
    let text = |key: &str| settings.get(key).and_then(Value::as_str);
    let device = text("device").or(default)?;
    Some(match text("netns") {
        None => format!("interface {device}"),
        Some(path) if path.starts_with('/') => format!("interface {device} in {path}"),
        // As `bifrostd` reads it.
        Some(name) => format!("interface {device} in /run/netns/{name}"),
    })
}

impl SecurityGroupSpec {
    /// The lists of rules: their name, the key of the remote end, the rules.
    pub(crate) fn lists(&self) -> [(&'static str, &'static str, &[RuleSpec]); 2] {
        [("ingress", "from", &self.ingress), ("egress", "to", self.egress.as_deref().unwrap_or_default())]
    }

    /// The groups and sets that its rules name: the field, the kind, the name.
    pub(crate) fn remotes(&self) -> Vec<(String, Kind, String)> {
        let mut named = Vec::new();
        for (list, end, rules) in self.lists() {
            for (i, rule) in rules.iter().enumerate() {
                for who in texts(rule.get(end)) {
                    if let Some((kind, name)) = remote(who) {
                        named.push((format!("{list}[{i}].{end}"), kind, name.to_owned()));
                    }
                }
            }
        }
        named
    }
}

/// A group or set that a rule names, if it is one.
pub(crate) fn remote(who: &str) -> Option<(Kind, &str)> {
    let group = who.strip_prefix("group:").map(|name| (Kind::SecurityGroup, name));
    group.or_else(|| who.strip_prefix("set:").map(|name| (Kind::AddressSet, name)))
}

/// A VPC or guests that an object of that key names.
fn of_scope(key: &Key, vpc: Option<&str>, guests: &[String]) -> Vec<(String, Key)> {
    let vpc = vpc.map(|vpc| ("vpc".to_owned(), key.sibling(Kind::Vpc, vpc)));
    let guests = guests.iter().enumerate();
    let guests = guests.map(|(i, name)| (format!("guests[{i}]"), key.sibling(Kind::Port, name)));
    vpc.into_iter().chain(guests).collect()
}

/// A text, or the texts of a list.
fn texts(value: Option<&Value>) -> Vec<&str> {
    match value {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(all)) => all.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

fn read<T: for<'de> Deserialize<'de>>(value: &Value) -> Result<T, (String, String)> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { String::new() } else { path };
        (field, error.into_inner().to_string())
    })
}

mod mac_text {
    use bifrost_wire::Mac;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(mac: &Option<Mac>, serializer: S) -> Result<S::Ok, S::Error> {
        match mac {
            Some(mac) => serializer.collect_str(mac),
            None => serializer.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Mac>, D::Error> {
        let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
        let wrong = || serde::de::Error::custom(format!("{text:?} is not a MAC address, such as 02:00:00:00:00:01"));
        text.parse().map(Some).map_err(|_| wrong())
    }
}
