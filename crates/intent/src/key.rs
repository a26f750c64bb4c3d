//! Kinds and names of objects.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Where all objects are in the store. The number is the version of the format of keys and values.
pub const PREFIX: &str = "/bifrost/v1/objects/";
/// The longest name of a project or of an object in one, bytes. On hosts an object is called `PROJECT.NAME`, of at most 63.
pub const MAX_NAME: usize = 31;
/// The longest name of a host, bytes.
pub const MAX_HOST_NAME: usize = 63;

/// The kinds of objects. What refers to others comes after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A host that runs `bifrostd`. Hosts belong to no project.
    Host,
    /// What a project may have. Without it a project has no limits.
    Project,
    /// Outside addresses that a project may use.
    OutsideGrant,
    /// A network of tenants.
    Vpc,
    /// Addresses of a VPC.
    Subnet,
    /// Addresses that rules name.
    AddressSet,
    /// Who may talk to a port, and to whom it may talk.
    SecurityGroup,
    /// A port of a guest: its host, its addresses.
    Port,
    /// A connection between two VPCs.
    Peering,
    /// An address and port of a VPC in front of several guests.
    LoadBalancer,
    /// How the guests of a VPC reach the outside: addresses that they share, of which each host has a part.
    NatGateway,
    /// An outside address of one guest.
    FloatingIp,
    /// Ways of a VPC to networks behind its guests.
    RouteTable,
    /// Copies of guests' packets for somebody to look at.
    Mirror,
    /// Records of guests' conversations.
    FlowLog,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 15] = [
        Kind::Host,
        Kind::Project,
        Kind::OutsideGrant,
        Kind::Vpc,
        Kind::Subnet,
        Kind::AddressSet,
        Kind::SecurityGroup,
        Kind::Port,
        Kind::Peering,
        Kind::LoadBalancer,
        Kind::NatGateway,
        Kind::FloatingIp,
        Kind::RouteTable,
        Kind::Mirror,
        Kind::FlowLog,
    ];

    /// As keys, files and the API name it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Host => "host",
            Kind::Project => "project",
            Kind::OutsideGrant => "outside_grant",
            Kind::Vpc => "vpc",
            Kind::Subnet => "subnet",
            Kind::AddressSet => "address_set",
            Kind::SecurityGroup => "security_group",
            Kind::Port => "port",
            Kind::Peering => "peering",
            Kind::LoadBalancer => "load_balancer",
            Kind::NatGateway => "nat_gateway",
            Kind::FloatingIp => "floating_ip",
            Kind::RouteTable => "route_table",
            Kind::Mirror => "mirror",
            Kind::FlowLog => "flow_log",
        }
    }

    /// Whether its objects belong to a project.
    pub fn has_project(self) -> bool {
        !matches!(self, Kind::Host | Kind::Project)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Kind, String> {
        let found = Kind::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("{text:?} is not a kind of object; there are {}", names()))
    }
}

/// What names an object: `host/NAME`, `project/NAME`, or `KIND/PROJECT/NAME`. A clone shares it, because indexes have each key many times.
#[derive(Clone, Debug, Eq)]
pub struct Key(Arc<Parts>);

#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Parts {
    kind: Kind,
    /// Empty for hosts and projects.
    project: Box<str>,
    name: Box<str>,
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        // Mostly they are shared.
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Key) -> Ordering {
        if Arc::ptr_eq(&self.0, &other.0) { Ordering::Equal } else { self.0.cmp(&other.0) }
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Key) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Key {
    /// A host's.
    ///
    /// # Errors
    /// What is wrong with the name.
    pub fn host(name: &str) -> Result<Key, String> {
        Key::new(Kind::Host, "", name)
    }

    /// That of an object of a project; of a host or a project itself `project` is empty.
    ///
    /// # Errors
    /// What is wrong with the names.
    pub fn new(kind: Kind, project: &str, name: &str) -> Result<Key, String> {
        match kind {
            Kind::Host => check(name, MAX_HOST_NAME, "name of a host", ".")?,
            Kind::Project => check(name, MAX_NAME, "name of a project", "")?,
            _ => check(name, MAX_NAME, "name", "")?,
        }
        match (kind.has_project(), project.is_empty()) {
            (true, true) => return Err(format!("a {kind} belongs to a project; name it")),
            (false, false) => return Err(format!("a {kind} belongs to no project, and {project:?} is given")),
            (true, false) => check(project, MAX_NAME, "project", "")?,
            (false, true) => {}
        }
        Ok(Key::of_parts(kind, project, name))
    }

    fn of_parts(kind: Kind, project: &str, name: &str) -> Key {
        Key(Arc::new(Parts { kind, project: project.into(), name: name.into() }))
    }

    /// Another object of the same project.
    pub(crate) fn sibling(&self, kind: Kind, name: &str) -> Key {
        Key::of_parts(kind, &self.0.project, name)
    }

    /// The key of the project that it belongs to.
    pub(crate) fn of_project(&self) -> Option<Key> {
        self.kind().has_project().then(|| Key::of_parts(Kind::Project, "", &self.0.project))
    }

    /// The key of a host of that name, which may be no name of a host.
    pub(crate) fn unchecked_host(name: &str) -> Key {
        Key::of_parts(Kind::Host, "", name)
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The name of the project that it belongs to; empty for hosts and projects.
    pub fn project(&self) -> &str {
        &self.0.project
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// What a host calls the object: `PROJECT.NAME`. Names have no dot, so that no two objects of a kind share one.
    pub fn on_host(&self) -> String {
        format!("{}.{}", self.0.project, self.0.name)
    }

    /// Where the store has the object.
    pub fn in_store(&self) -> String {
        format!("{PREFIX}{self}")
    }

    /// The object that the store has there; none: it is not an object's key.
    pub fn of_store(key: &str) -> Option<Key> {
        key.strip_prefix(PREFIX)?.parse().ok()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Parts { kind, project, name } = &*self.0;
        match kind.has_project() {
            true => write!(f, "{kind}/{project}/{name}"),
            false => write!(f, "{kind}/{name}"),
        }
    }
}

impl FromStr for Key {
    type Err = String;

    fn from_str(text: &str) -> Result<Key, String> {
        match *text.split('/').collect::<Vec<_>>() {
            [kind, name] => Key::new(kind.parse()?, "", name),
            [kind, project, name] => Key::new(kind.parse()?, project, name),
            _ => Err(format!(
                "{text:?} is not a key: write host/NAME, project/NAME, or KIND/PROJECT/NAME, such as port/demo/web1"
            )),
        }
    }
}

impl Serialize for Key {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Key, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// A name of `a-z`, `0-9`, `-` and `others` that begins and ends with a letter or digit.
fn check(name: &str, longest: usize, what: &str, others: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let allowed = |c: char| plain(c) || c == '-' || others.contains(c);
    if (1..=longest).contains(&name.len())
        && name.chars().all(allowed)
        && name.starts_with(plain)
        && name.ends_with(plain)
    {
        return Ok(());
    }
    let dot = if others.is_empty() { "" } else { ", '.'" };
    Err(format!("{name:?} is not a {what}: use 1 to {longest} of a-z, 0-9{dot} and '-', with no '-' at either end"))
}

fn names() -> String {
    Kind::ALL.map(Kind::name).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_are_written() {
        for text in ["host/h1", "host/rack1.h1", "project/demo", "vpc/demo/net", "security_group/a/b-1", "peering/a/b"]
        {
            let key: Key = text.parse().unwrap();
            assert_eq!(key.to_string(), text);
            assert_eq!(Key::of_store(&key.in_store()), Some(key));
        }
    }

    #[test]
    fn bad_keys_are_refused() {
        let long = format!("vpc/{}/net", "a".repeat(MAX_NAME + 1));
        for text in [
            "",
            "vpc",
            "vpc/demo",
            "host/a/b",
            "vpc/demo/",
            "vpc//net",
            "vpc/Demo/net",
            "vpc/demo/a.b",
            "vpc/demo/a_b",
            "vpc/demo/-a",
            "vpc/demo/a-",
            "lan/demo/a",
            "vpc/demo/a/b",
            "vpc/demo/\u{e9}",
            "host/..",
            &long,
        ] {
            assert!(text.parse::<Key>().is_err(), "{text:?}");
        }
        assert_eq!(Key::of_store("/bifrost/v1/other/vpc/demo/net"), None);
    }
}
