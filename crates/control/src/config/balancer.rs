//! `[[load_balancer]]`: virtual addresses inside a VPC, each for several backends.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Duration;

use super::section::{Section, Sink};
use super::{Config, Port, PortKind, Vni};

/// Maximum number of load balancers.
pub(super) const MAX_BALANCERS: usize = 4096;
/// Maximum number of backends of one load balancer.
const MAX_BACKENDS: usize = 256;
/// Maximum length of a health check's path, bytes.
const MAX_PATH: usize = 256;

/// A virtual address and port in a VPC, for several backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBalancer {
    /// Its name.
    pub name: String,
    /// The VPC of its clients and backends.
    pub vni: Vni,
    /// The address that clients connect to; no other owner.
    pub address: IpAddr,
    /// The port that clients connect to.
    pub port: u16,
    /// The protocol.
    pub protocol: BalancedProtocol,
    /// Which packets go to the same backend.
    pub affinity: Affinity,
    /// At least one, of the family of `address`.
    pub backends: Vec<Backend>,
    /// How this host checks the backends; none: all count as healthy.
    pub check: Option<HealthCheck>,
}

/// A backend of a load balancer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Backend {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Its share of new connections, relative to the others', 0 to 1000. 0 drains it: it keeps its connections and gets
    /// no others.
    pub weight: u16,
}

/// The protocol of a load balancer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BalancedProtocol {
    /// TCP connections.
    Tcp,
    /// UDP flows.
    Udp,
}

/// Which packets go to the same backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Affinity {
    /// The packets of a connection.
    Connection,
    /// All connections of a client's address, while the set of backends does not change.
    Client,
}

/// A health check of backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The path of HTTP requests; none: a TCP connection is enough.
    pub http_path: Option<String>,
    /// Name of the TAP port in whose namespace the check runs, so that it tests what the guest can reach. None: any
    /// suitable port of the VPC.
    pub from: Option<String>,
    /// The port to connect to; none: the backend's.
    pub port: Option<u16>,
    /// Interval between checks.
    pub interval: Duration,
    /// Timeout of a check.
    pub timeout: Duration,
    /// Consecutive successes after which a backend is up.
    pub rise: u32,
    /// Consecutive failures after which it is down.
    pub fall: u32,
}

/// Parses the section after `name` and `vni`.
pub(super) fn load_balancer(name: String, vni: Vni, mut s: Section<'_, '_>) -> LoadBalancer {
    let address = s.required("address");
    let port = s.required_int("port", 1..=65535) as u16;
    let protocol = s.choice("protocol", &[("tcp", BalancedProtocol::Tcp), ("udp", BalancedProtocol::Udp)]);
    let affinity = s.choice("affinity", &[("connection", Affinity::Connection), ("client", Affinity::Client)]);
    let sections = s.sections("backend");
    if sections.is_empty() && !s.has_failed("backend") {
        s.error("backend", "missing: add a [[load_balancer.backend]]");
    } else if sections.len() > MAX_BACKENDS {
        s.error("backend", format!("{} are more than {MAX_BACKENDS}", sections.len()));
    }
    let backends = sections.into_iter().take(MAX_BACKENDS).map(|s| backend(s, port)).collect();
    let check = s.optional_section("check").map(health_check);
    s.finish();
    LoadBalancer { name, vni, address, port, protocol, affinity, backends, check }
}

fn backend(mut s: Section<'_, '_>, port: u16) -> Backend {
    let backend = Backend {
        address: s.required("address"),
        port: s.optional_int("port", 1..=65535).map_or(port, |port| port as u16),
        weight: s.int("weight", 0..=1000, 1) as u16,
    };
    s.finish();
    backend
}

fn health_check(mut s: Section<'_, '_>) -> HealthCheck {
    let is_http = s.choice("kind", &[("tcp", false), ("http", true)]);
    let path: Option<String> = s.optional("path");
    if let Some(path) = &path {
        let is_path = path.starts_with('/') && path.len() <= MAX_PATH && path.bytes().all(|b| b.is_ascii_graphic());
        if !is_http {
            s.error("path", "only allowed with kind = \"http\"");
        } else if !is_path {
            s.error("path", format!("{path:?} is not a path: / and at most {MAX_PATH} printable characters"));
        }
    }
    let from = s.optional("from");
    let port = s.optional_int("port", 1..=65535).map(|port| port as u16);
    let interval = s.int("interval_ms", 100..=600_000, 2000);
    let timeout = s.int("timeout_ms", 10..=60_000, interval.min(1000));
    let check = HealthCheck {
        http_path: is_http.then(|| path.unwrap_or_else(|| "/".to_owned())),
        from,
        port,
        interval: Duration::from_millis(interval),
        timeout: Duration::from_millis(timeout),
        rise: s.int("rise", 1..=100, 2) as u32,
        fall: s.int("fall", 1..=100, 3) as u32,
    };
    s.finish();
    check
}

impl LoadBalancer {
    /// Whether its health check runs from a port: the port that the check names or, without a name, any suitable port
    /// of the VPC.
    pub fn asks_from(&self, port: &Port) -> bool {
        let Some(check) = &self.check else { return false };
        match check.from.as_deref() {
            Some(name) => port.name == name,
            None => port.vni == self.vni && can_ask(port),
        }
    }
}

/// Whether health checks can run from a port: it has a network namespace.
fn can_ask(port: &Port) -> bool {
    port.kind == PortKind::Tap && port.netns.is_some()
}

/// Checks the relations of load balancers to other objects.
pub(super) fn check(config: &Config, sink: &Sink<'_>) {
    let count = config.load_balancers.len();
    if count > MAX_BALANCERS {
        sink.error("load_balancer", format!("{count} are more than {MAX_BALANCERS}"));
    }
    let mut names = HashSet::new();
    let mut listeners = HashSet::new();
    let own = |vni: Vni, address: IpAddr| {
        let port = config.ports.iter().find(|p| p.vni == vni && p.addresses.iter().any(|a| a.addr() == address));
        port.map(|port| format!("port {:?} has it", port.name))
    };
    for (i, balancer) in config.load_balancers.iter().enumerate() {
        let at = |key: &str| format!("load_balancer[{i}].{key}");
        if !names.insert(&balancer.name) && !sink.failed(at("name")) {
            sink.error(at("name"), format!("load balancer {:?} is defined twice", balancer.name));
        }
        let (vni, address) = (balancer.vni, balancer.address);
        if sink.failed(at("address")) || sink.failed(at("vni")) {
            continue;
        }
        if !listeners.insert((vni, address, balancer.port, balancer.protocol)) {
            sink.error(at("port"), format!("another load balancer listens at {address} port {}", balancer.port));
        }
        let is_host = !(address.is_unspecified() || address.is_multicast() || address.is_loopback());
        let vpc = config.vpc(vni);
        if !is_host {
            sink.error(at("address"), format!("{address} cannot be the address of a load balancer"));
        } else if let Some(owner) = own(vni, address) {
            sink.error(at("address"), format!("{address} is in use: {owner}"));
        } else if vpc.is_none() && !sink.failed_within("vpc") {
            sink.error(at("vni"), format!("there is no [[vpc]] with vni = {vni}"));
        } else if vpc.is_some_and(|vpc| vpc.gateway.contains(&address)) {
            sink.error(at("address"), format!("{address} is the gateway's"));
        } else if vpc.is_some_and(|vpc| !vpc.gateway.iter().any(|a| a.is_ipv4() == address.is_ipv4())) {
            let family = if address.is_ipv4() { "IPv4" } else { "IPv6" };
            sink.error(at("vni"), format!("VNI {vni} has no {family} gateway, which load balancers need; add one"));
        }
        let mut known = HashSet::new();
        for (k, backend) in balancer.backends.iter().enumerate() {
            let field = format!("load_balancer[{i}].backend[{k}].address");
            if sink.failed(&field) {
                continue;
            }
            if backend.address.is_ipv4() != address.is_ipv4() {
                sink.error(&field, format!("{} is of another family than {address}", backend.address));
            } else if !known.insert((backend.address, backend.port)) {
                sink.error(&field, format!("{} port {} is listed twice", backend.address, backend.port));
            }
        }
        if let Some(from) = balancer.check.as_ref().and_then(|check| check.from.as_deref()) {
            let field = format!("load_balancer[{i}].check.from");
            let port = config.port(from);
            if sink.failed(&field) || sink.failed_within("port") {
                continue;
            }
            match port {
                None => sink.error(&field, format!("no port named {from:?}")),
                Some(port) if port.vni != vni => {
                    sink.error(&field, format!("port {from:?} is in VNI {}, not {vni}", port.vni));
                }
                Some(port) if !can_ask(port) => {
                    sink.error(&field, format!("port {from:?} is not a TAP device in a network namespace"));
                }
                Some(_) => {}
            }
        }
    }
}
