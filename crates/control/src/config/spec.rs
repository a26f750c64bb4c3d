//! Serializes objects with the keys of the file's tables: the reverse of parsing. Defaults are left out.

use std::fmt::Display;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use serde_json::{Map, Value, json};

use super::object::protocol;
use super::{
    AclRule, Action, Affinity, Backend, Direction, Dscp, HealthCheck, LoadBalancer, Metadata, Mirror, Object, Ordering,
    PeerTransport, Port, PortKind, Reliability, Remote, Route, Rule, SecurityGroup, VhostMode, Vpc, VpcFlowLog,
    flow_log,
};

/// The keys of a table.
#[derive(Default)]
struct Keys(Map<String, Value>);

impl Keys {
    fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Keys {
        self.0.insert(key.to_owned(), value.into());
        self
    }

    fn text(&mut self, key: &str, value: impl Display) -> &mut Keys {
        self.set(key, value.to_string())
    }

    /// Sets a value that differs from its default.
    fn unless<T: PartialEq + Into<Value>>(&mut self, default: T, key: &str, value: T) -> &mut Keys {
        if value != default {
            self.set(key, value);
        }
        self
    }

    fn some<T: Into<Value>>(&mut self, key: &str, value: Option<T>) -> &mut Keys {
        if let Some(value) = value {
            self.set(key, value);
        }
        self
    }

    fn list<T: Into<Value>>(&mut self, key: &str, items: impl IntoIterator<Item = T>) -> &mut Keys {
        let items: Vec<Value> = items.into_iter().map(Into::into).collect();
        if !items.is_empty() {
            self.set(key, items);
        }
        self
    }

    fn texts(&mut self, key: &str, items: impl IntoIterator<Item = impl Display>) -> &mut Keys {
        self.list(key, items.into_iter().map(|item| item.to_string()))
    }

    fn done(self) -> Value {
        Value::Object(self.0)
    }
}

impl Object {
    /// The object's spec, which [`parse`](Self::parse) reads. Equal objects have equal specs.
    pub fn spec(&self) -> Value {
        let mut keys = Keys::default();
        match self {
            Object::SecurityGroup(group) => security_group(&mut keys, group),
            Object::AddressSet(set) => {
                keys.text("name", &set.name).texts("addresses", &set.addresses);
            }
            Object::Peer(peer) => {
                keys.text("name", &peer.name).texts("addresses", &peer.addresses);
                if peer.transport == PeerTransport::Plain {
                    keys.set("transport", "plain");
                }
            }
            Object::Vpc(of) => vpc(&mut keys, of),
            Object::Port(of) => port(&mut keys, of),
            Object::Route(of) => route(&mut keys, of),
            Object::Peering(peering) => {
                keys.set("vni", peering.vni.value()).text("prefix", peering.prefix);
                keys.set("to_vni", peering.to_vni.value());
            }
            Object::LoadBalancer(balancer) => load_balancer(&mut keys, balancer),
            Object::Uplink(uplink) => {
                keys.text("port", &uplink.port);
            }
            Object::Nat(nat) => {
                keys.set("vni", nat.vni.value()).text("uplink", &nat.uplink).texts("addresses", &nat.addresses);
                keys.list("ports", [nat.ports.0, nat.ports.1]).set("ports_per_guest", nat.ports_per_guest);
            }
            Object::FloatingIp(floating) => {
                keys.set("vni", floating.vni.value()).text("uplink", &floating.uplink);
                keys.text("address", floating.address).text("inside", floating.inside);
            }
            Object::PortForward(forward) => {
                keys.set("vni", forward.vni.value()).text("uplink", &forward.uplink);
                keys.text("address", forward.address).set("port", forward.port);
                keys.unless("tcp", "protocol", protocol(forward.protocol));
                keys.text("inside", forward.inside).set("inside_port", forward.inside_port);
            }
            Object::Mirror(of) => mirror(&mut keys, of),
            Object::VpcFlowLog(of) => vpc_flow_log(&mut keys, of),
        }
        keys.done()
    }
}

fn security_group(keys: &mut Keys, group: &SecurityGroup) {
    keys.text("name", &group.name).list("ingress", group.ingress.iter().map(|of| rule(of, "from")));
    // An empty list allows no connections from the guest.
    if group.restricts_egress {
        keys.set("egress", group.egress.iter().map(|of| rule(of, "to")).collect::<Vec<_>>());
    }
}

fn vpc(keys: &mut Keys, vpc: &Vpc) {
    let reliability = match vpc.reliability {
        Reliability::Tcp => "tcp",
        Reliability::All => "all",
        Reliability::Off => "off",
    };
    let ordering = match vpc.ordering {
        Ordering::Flow => "flow",
        Ordering::Strict => "strict",
        Ordering::Off => "off",
    };
    keys.set("vni", vpc.vni.value()).unless("tcp", "reliability", reliability).unless("flow", "ordering", ordering);
    keys.unless(1, "weight", vpc.weight).texts("gateway", &vpc.gateway).unless(false, "dhcp", vpc.dhcp);
    keys.unless(3600, "dhcp_lease_s", vpc.dhcp_lease_s).unless(600, "ra_interval_s", vpc.ra_interval_s);
    keys.texts("dns", &vpc.dns).some("domain", vpc.domain.clone()).texts("learned", &vpc.learned);
    keys.list("acl", vpc.acl.iter().map(acl));
}

fn acl(acl: &AclRule) -> Value {
    let mut keys = Keys::default();
    keys.set("direction", if acl.direction == Direction::Ingress { "ingress" } else { "egress" });
    keys.set("action", if acl.action == Action::Allow { "allow" } else { "deny" });
    // ACL rules have no remotes.
    rule_keys(&mut keys, &acl.rule, "from");
    keys.done()
}

/// `end` is the key of the remote end, `from` or `to`.
fn rule(rule: &Rule, end: &str) -> Value {
    let mut keys = Keys::default();
    rule_keys(&mut keys, rule, end);
    keys.done()
}

fn rule_keys(keys: &mut Keys, rule: &Rule, end: &str) {
    let remote = |remote: &Remote| match remote {
        Remote::Group(name) => format!("group:{name}"),
        Remote::Set(name) => format!("set:{name}"),
    };
    let ends = |prefixes: &[IpNet]| prefixes.iter().map(IpNet::to_string).collect::<Vec<_>>();
    let (mut from, mut to) = (ends(&rule.from), ends(&rule.to));
    let named = if end == "from" { &mut from } else { &mut to };
    named.extend(rule.remotes.iter().map(remote));
    keys.list("from", from).list("to", to);
    protocols(keys, &rule.protocols);
    port_ranges(keys, "ports", &rule.ports);
    keys.unless(false, "log", rule.log);
}

fn protocols(keys: &mut Keys, protocols: &[u8]) {
    match protocols {
        [] => {}
        [1, 58] => {
            keys.set("protocol", "icmp");
        }
        [6] => {
            keys.set("protocol", "tcp");
        }
        [17] => {
            keys.set("protocol", "udp");
        }
        [number, ..] => {
            keys.set("protocol", *number);
        }
    }
}

fn port_ranges(keys: &mut Keys, key: &str, ranges: &[RangeInclusive<u16>]) {
    keys.list(
        key,
        ranges.iter().map(|range| match (range.start(), range.end()) {
            (first, last) if first == last => json!(first),
            (first, last) => json!(format!("{first}-{last}")),
        }),
    );
}

fn port(keys: &mut Keys, port: &Port) {
    keys.text("name", &port.name).set("vni", port.vni.value()).text("mac", port.mac);
    keys.texts("addresses", &port.addresses).texts("routed", &port.routed);
    keys.texts("shared", &port.shared).unless(1500, "mtu", port.mtu);
    keys.some("metadata", port.metadata.as_ref().map(|of| metadata(of, &port.name)));
    keys.list("security_groups", port.security_groups.iter().map(String::as_str));
    let limits = [
        ("tx_mbit", port.limits.tx_mbit),
        ("tx_kpps", port.limits.tx_kpps),
        ("rx_mbit", port.limits.rx_mbit),
        ("rx_kpps", port.limits.rx_kpps),
    ];
    for (key, limit) in limits {
        keys.some(key, limit);
    }
    match port.dscp {
        Dscp::Fixed(0) => {}
        Dscp::Fixed(dscp) => _ = keys.set("dscp", dscp),
        Dscp::Copied => _ = keys.text("dscp", "copy"),
    }
    keys.unless(1, "weight", port.weight);
    keys.some("min_tx_mbit", port.min_tx_mbit).some("rx_queue_kb", port.rx_queue_kb);
    keys.set("queues", port.queues);
    match port.kind {
        PortKind::Tap => {
            keys.some("netns", port.netns.as_ref().map(|netns| netns.display().to_string()));
            keys.text("device", &port.device);
            keys.some("default_gateway", port.default_gateway.map(|gateway| gateway.to_string()));
        }
        PortKind::VhostUser => {
            keys.set("kind", "vhost-user");
            keys.some("socket", port.socket.as_ref().map(|socket| socket.display().to_string()));
            keys.unless("server", "mode", if port.mode == VhostMode::Client { "client" } else { "server" });
            keys.unless(true, "packed", port.packed).unless(true, "slicing", port.slicing);
            keys.unless(true, "merged", port.merged);
        }
    }
}

fn metadata(of: &Metadata, name: &str) -> Value {
    let mut keys = Keys::default();
    keys.unless(name, "instance_id", of.instance_id.as_str()).unless(name, "hostname", of.hostname.as_str());
    keys.texts("public_keys", &of.public_keys).some("user_data", of.user_data.as_deref());
    keys.done()
}

fn route(keys: &mut Keys, route: &Route) {
    keys.set("vni", route.vni.value()).text("prefix", route.prefix).text("peer", &route.peer).text("mac", route.mac);
    keys.some("mtu", route.mtu)
        .some("name", route.name.as_deref())
        .list("security_groups", route.security_groups.iter().map(String::as_str))
        .texts("shared", &route.shared);
}

fn load_balancer(keys: &mut Keys, balancer: &LoadBalancer) {
    let backend = |backend: &Backend| {
        let mut keys = Keys::default();
        keys.text("address", backend.address).set("port", backend.port).unless(1, "weight", backend.weight);
        keys.done()
    };
    keys.text("name", &balancer.name).set("vni", balancer.vni.value());
    keys.text("address", balancer.address).set("port", balancer.port);
    keys.unless("tcp", "protocol", protocol(balancer.protocol));
    keys.unless(
        "connection",
        "affinity",
        match balancer.affinity {
            Affinity::Connection => "connection",
            Affinity::Client => "client",
        },
    );
    keys.list("backend", balancer.backends.iter().map(backend))
        .some("check", balancer.check.as_ref().map(health_check));
}

fn health_check(check: &HealthCheck) -> Value {
    let mut keys = Keys::default();
    if let Some(path) = &check.http_path {
        keys.set("kind", "http").text("path", path);
    }
    keys.some("from", check.from.as_deref()).some("port", check.port);
    keys.set("interval_ms", check.interval.as_millis() as u64).set("timeout_ms", check.timeout.as_millis() as u64);
    keys.unless(2, "rise", check.rise).unless(3, "fall", check.fall);
    keys.done()
}

fn mirror(keys: &mut Keys, mirror: &Mirror) {
    keys.text("name", &mirror.name).list("vpcs", mirror.vpcs.iter().map(|vni| vni.value()));
    keys.list("ports", mirror.ports.iter().map(String::as_str));
    match (mirror.from_guests, mirror.to_guests) {
        (true, false) => {
            keys.set("direction", "egress");
        }
        (false, true) => {
            keys.set("direction", "ingress");
        }
        _ => {}
    }
    protocols(keys, &mirror.protocols);
    keys.texts("prefixes", &mirror.prefixes);
    port_ranges(keys, "l4_ports", &mirror.l4_ports);
    keys.text("target", mirror.target).set("target_vni", mirror.target_vni.value());
    keys.unless(1, "one_in", mirror.one_in).unless(256, "truncate", mirror.truncate);
}

fn vpc_flow_log(keys: &mut Keys, VpcFlowLog { name, log }: &VpcFlowLog) {
    keys.text("name", name).list("vpcs", log.vpcs.iter().map(|vni| vni.value()));
    keys.list("ports", log.ports.iter().map(String::as_str));
    keys.some("json", log.json.as_ref().map(|file| file.display().to_string()));
    keys.unless(Some(flow_log::JSON_MB), "json_mb", log.json_bytes.map(|bytes| bytes / flow_log::MEGABYTE));
    keys.some("collector", log.collector.map(|collector| collector.to_string()));
    match (log.accepted, log.rejected) {
        (true, false) => _ = keys.set("record", "accepted"),
        (false, true) => _ = keys.set("record", "rejected"),
        _ => {}
    }
    keys.unless(1, "one_in", log.one_in);
    keys.unless(flow_log::ACTIVE_S, "active_timeout_s", log.active_timeout.as_secs());
    keys.unless(flow_log::IDLE_S, "idle_timeout_s", log.idle_timeout.as_secs());
    keys.unless(flow_log::FLOWS_OF_VPC, "flows", u64::from(log.flows));
    keys.unless(flow_log::TEMPLATES_S, "template_interval_s", log.template_interval.as_secs());
    keys.unless(flow_log::DOMAIN, "domain", u64::from(log.domain));
    keys.unless(flow_log::ENTERPRISE, "enterprise", u64::from(log.enterprise));
}
