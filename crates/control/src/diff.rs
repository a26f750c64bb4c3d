//! What a reload changes: the difference between two configurations.

use std::fmt;
use std::hash::Hash;
use std::net::SocketAddr;

use std::collections::HashMap;

use crate::api::{Changed, ReloadReport};
use crate::config::{
    AddressSet, BalancedProtocol, Config, FloatingIp, LoadBalancer, Mirror, Peer, Peering, Port, PortForward, PortKind,
    Qos, Route, RouteChange, Routes, SecurityGroup, Sessions, SourceNat, Transport, Uplink, Vpc, VpcFlowLog,
};

/// The difference between two configurations, as far as a running daemon can apply it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConfigDiff {
    /// Ports, by name.
    pub ports: Changes<Port>,
    /// Routes, by VNI and prefix.
    pub routes: Changes<Route>,
    /// Peers, by name.
    pub peers: Changes<Peer>,
    /// Peerings with other VPCs, by VPC and prefix.
    pub peerings: Changes<Peering>,
    /// VPCs, by VNI.
    pub vpcs: Changes<Vpc>,
    /// Security groups, by name.
    pub security_groups: Changes<SecurityGroup>,
    /// Address sets, by name.
    pub address_sets: Changes<AddressSet>,
    /// Load balancers, by name.
    pub load_balancers: Changes<LoadBalancer>,
    /// Uplinks, by port.
    pub uplinks: Changes<Uplink>,
    /// Shared addresses, by VPC.
    pub nat: Changes<SourceNat>,
    /// Floating addresses, by uplink and address.
    pub floating_ips: Changes<FloatingIp>,
    /// Forwards, by uplink, protocol, address and port.
    pub port_forwards: Changes<PortForward>,
    /// Mirrors, by name.
    pub mirrors: Changes<Mirror>,
    /// Flow logs of VPCs and ports, by name.
    pub flow_logs: Changes<VpcFlowLog>,
    /// Whether the host's flow log differs.
    pub flow_log: bool,
    /// The new bounds of sessions, if they differ.
    pub sessions: Option<Sessions>,
    /// The new rate to other hosts, if it differs.
    pub qos: Option<Qos>,
    /// The new transport settings, if they differ.
    pub transport: Option<Transport>,
}

/// Changes of objects of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Changes<T> {
    /// Only in the new configuration, in its order.
    pub added: Vec<T>,
    /// Only in the old configuration, in its order.
    pub removed: Vec<T>,
    /// In both configurations but different, in the order of the new one.
    pub changed: Vec<Change<T>>,
}

/// An object before and after a change.
#[derive(Clone, Debug, PartialEq)]
pub struct Change<T> {
    /// Before.
    pub old: T,
    /// After.
    pub new: T,
}

/// Differences that need a restart; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestartNeeded {
    /// One entry a field, such as `underlay.addresses: 192.0.2.1 -> 192.0.2.3`.
    pub fields: Vec<String>,
}

impl ConfigDiff {
    /// Compares two configurations.
    ///
    /// # Errors
    /// A setting differs that a running daemon cannot change: host name, control socket, workers, underlay. Do not
    /// apply any of the new configuration then.
    pub fn between(old: &Config, new: &Config) -> Result<ConfigDiff, RestartNeeded> {
        let fields = fixed_fields(old, new);
        if !fields.is_empty() {
            return Err(RestartNeeded { fields });
        }
        Ok(ConfigDiff {
            ports: Changes::between(&old.ports, &new.ports, |p| p.name.clone()),
            routes: of_routes(&old.routes, &new.routes),
            peerings: Changes::between(&old.peerings, &new.peerings, |p| (p.vni, p.prefix)),
            peers: Changes::between(&old.peers, &new.peers, |p| p.name.clone()),
            vpcs: Changes::between(&old.vpcs, &new.vpcs, |v| v.vni),
            security_groups: Changes::between(&old.security_groups, &new.security_groups, |g| g.name.clone()),
            address_sets: Changes::between(&old.address_sets, &new.address_sets, |s| s.name.clone()),
            load_balancers: Changes::between(&old.load_balancers, &new.load_balancers, |b| b.name.clone()),
            uplinks: Changes::between(&old.nat.uplinks, &new.nat.uplinks, |u| u.port.clone()),
            nat: Changes::between(&old.nat.sources, &new.nat.sources, |s| s.vni),
            floating_ips: Changes::between(&old.nat.floating, &new.nat.floating, |f| (f.uplink.clone(), f.address)),
            port_forwards: Changes::between(&old.nat.forwards, &new.nat.forwards, |f| {
                (f.uplink.clone(), f.protocol, f.address, f.port)
            }),
            mirrors: Changes::between(&old.mirrors, &new.mirrors, |m| m.name.clone()),
            flow_logs: Changes::between(&old.flow_logs, &new.flow_logs, |log| log.name.clone()),
            flow_log: old.flow_log != new.flow_log,
            sessions: (old.sessions != new.sessions).then_some(new.sessions),
            qos: (old.qos != new.qos).then_some(new.qos),
            transport: (old.transport != new.transport).then_some(new.transport),
        })
    }

    /// Whether a program that takes over from a running daemon may work with the new configuration. `[transport]`,
    /// `[underlay]` and `[workers]` may differ; with another number of workers, so may the numbers of ports' queues.
    /// Returns whether nothing else differs.
    ///
    /// # Errors
    /// A setting differs that needs a restart.
    pub fn suits_upgrade(old: &Config, new: &Config) -> Result<bool, RestartNeeded> {
        let is_fixed = |field: &String| !is_changed_by_upgrade(field);
        let fields: Vec<String> = fixed_fields(old, new).into_iter().filter(is_fixed).collect();
        if !fields.is_empty() {
            return Err(RestartNeeded { fields });
        }
        let (transport, underlay, workers) = (new.transport, new.underlay.clone(), new.workers.clone());
        let recounted = old.workers.count != new.workers.count;
        let mut old = Config { transport, underlay, workers, ..old.clone() };
        if recounted {
            let queues: HashMap<&str, usize> = new.ports.iter().map(|port| (port.name.as_str(), port.queues)).collect();
            for port in old.ports.iter_mut().filter(|port| port.kind == PortKind::Tap) {
                port.queues = queues.get(port.name.as_str()).copied().unwrap_or(port.queues);
            }
        }
        Ok(ConfigDiff::between(&old, new)?.is_empty())
    }

    /// Whether nothing differs.
    pub fn is_empty(&self) -> bool {
        self.report().is_empty()
    }

    /// The difference in the format of the API.
    pub fn report(&self) -> ReloadReport {
        ReloadReport {
            ports: self.ports.names(|p| p.name.clone()),
            routes: self.routes.names(|r| format!("vni {} {}", r.vni, r.prefix)),
            peerings: self.peerings.names(|p| format!("vni {} {} to vni {}", p.vni, p.prefix, p.to_vni)),
            peers: self.peers.names(|p| p.name.clone()),
            vpcs: self.vpcs.names(|v| v.vni.to_string()),
            security_groups: self.security_groups.names(|g| g.name.clone()),
            address_sets: self.address_sets.names(|s| s.name.clone()),
            load_balancers: self.load_balancers.names(|b| b.name.clone()),
            uplinks: self.uplinks.names(|u| u.port.clone()),
            nat: self.nat.names(|s| format!("vni {}", s.vni)),
            floating_ips: self.floating_ips.names(|f| f.address.to_string()),
            port_forwards: self.port_forwards.names(|f| {
                let protocol = if f.protocol == BalancedProtocol::Tcp { "tcp" } else { "udp" };
                format!("{protocol} {}", SocketAddr::new(f.address, f.port))
            }),
            mirrors: self.mirrors.names(|m| m.name.clone()),
            flow_logs: self.flow_logs.names(|log| log.name.clone()),
            flow_log_changed: self.flow_log,
            sessions_changed: self.sessions.is_some(),
            qos_changed: self.qos.is_some(),
            transport_changed: self.transport.is_some(),
        }
    }
}

impl<T> Default for Changes<T> {
    fn default() -> Changes<T> {
        Changes { added: Vec::new(), removed: Vec::new(), changed: Vec::new() }
    }
}

impl<T> Changes<T> {
    /// Whether nothing differs.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }

    fn names(&self, name: impl Fn(&T) -> String) -> Changed {
        Changed {
            added: self.added.iter().map(&name).collect(),
            removed: self.removed.iter().map(&name).collect(),
            changed: self.changed.iter().map(|c| name(&c.new)).collect(),
        }
    }
}

impl<T: Clone + PartialEq> Changes<T> {
    fn between<K: Hash + Eq>(old: &[T], new: &[T], key: impl Fn(&T) -> K) -> Changes<T> {
        let mut before: HashMap<K, &T> = old.iter().map(|t| (key(t), t)).collect();
        let mut changes = Changes::default();
        for t in new {
            match before.remove(&key(t)) {
                None => changes.added.push(t.clone()),
                Some(o) if o != t => changes.changed.push(Change { old: o.clone(), new: t.clone() }),
                Some(_) => {}
            }
        }
        changes.removed = old.iter().filter(|t| before.contains_key(&key(t))).cloned().collect();
        changes
    }
}

fn of_routes(old: &Routes, new: &Routes) -> Changes<Route> {
    let mut changes = Changes::default();
    for change in new.changes_since(old) {
        match change {
            RouteChange::Added(route) => changes.added.push(route.clone()),
            RouteChange::Removed(route) => changes.removed.push(route.clone()),
            RouteChange::Changed(old, new) => changes.changed.push(Change { old: old.clone(), new: new.clone() }),
        }
    }
    changes
}

impl fmt::Display for RestartNeeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let upgrade = if self.fields.iter().all(|field| is_changed_by_upgrade(field)) { "an upgrade or " } else { "" };
        write!(f, "these need {upgrade}a restart of bifrostd: {}", self.fields.join("; "))
    }
}

impl std::error::Error for RestartNeeded {}

/// Whether an upgrade can change a field.
fn is_changed_by_upgrade(field: &str) -> bool {
    field.starts_with("underlay.") || field.starts_with("workers.")
}

fn fixed_fields(old: &Config, new: &Config) -> Vec<String> {
    let mut fields = Vec::new();
    let mut compare = |field: &str, old: String, new: String| {
        if old != new {
            fields.push(format!("{field}: {old} -> {new}"));
        }
    };
    let list = |items: Vec<String>| format!("[{}]", items.join(", "));
    compare("host.name", old.host.name.clone(), new.host.name.clone());
    compare("host.keep_devices", old.host.keep_devices.to_string(), new.host.keep_devices.to_string());
    compare("control.socket", old.control.socket.display().to_string(), new.control.socket.display().to_string());
    let metrics = |c: &Config| c.control.metrics.map_or("off".to_owned(), |address| address.to_string());
    compare("control.metrics", metrics(old), metrics(new));
    compare("workers.count", old.workers.count.to_string(), new.workers.count.to_string());
    let cpus = |c: &Config| list(c.workers.cpus.iter().map(ToString::to_string).collect());
    compare("workers.cpus", cpus(old), cpus(new));
    let share = |c: &Config| c.workers.slow_port_percent.to_string();
    compare("workers.slow_port_percent", share(old), share(new));
    compare("workers.answer_us", old.workers.answer_us.to_string(), new.workers.answer_us.to_string());
    let addresses = |c: &Config| list(c.underlay.addresses.iter().map(ToString::to_string).collect());
    compare("underlay.addresses", addresses(old), addresses(new));
    let (o, n) = (&old.underlay, &new.underlay);
    compare("underlay.bifrost_port", o.bifrost_port.to_string(), n.bifrost_port.to_string());
    compare("underlay.vxlan_port", o.vxlan_port.to_string(), n.vxlan_port.to_string());
    compare("underlay.paths", o.paths.to_string(), n.paths.to_string());
    compare("underlay.source_port_base", o.source_port_base.to_string(), n.source_port_base.to_string());
    compare("underlay.mtu", o.mtu.to_string(), n.mtu.to_string());
    compare("underlay.gso", o.gso.to_string(), n.gso.to_string());
    let plain_paths = |choice| format!("{choice:?}").to_lowercase();
    compare("underlay.plain_paths", plain_paths(o.plain_paths), plain_paths(n.plain_paths));
    let micros = |gap: std::time::Duration| gap.as_micros().to_string();
    compare("underlay.flowlet_gap_us", micros(o.flowlet_gap), micros(n.flowlet_gap));
    compare("underlay.port", format!("{:?}", o.port).to_lowercase(), format!("{:?}", n.port).to_lowercase());
    let mode = |mode| format!("{mode:?}").to_lowercase();
    compare("underlay.xdp_mode", mode(o.xdp_mode), mode(n.xdp_mode));
    compare("underlay.xdp_frames", o.xdp_frames.to_string(), n.xdp_frames.to_string());
    compare("underlay.control_dscp", o.control_dscp.to_string(), n.control_dscp.to_string());
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = r#"
        [host]
        name = "a"
        [underlay]
        addresses = ["192.0.2.1"]
        [[peer]]
        name = "b"
        addresses = ["192.0.2.2"]
        [[vpc]]
        vni = 1
        [[port]]
        name = "p1"
        vni = 1
        mac = "02:00:00:00:00:01"
        addresses = ["10.0.0.1/24"]
        [[route]]
        vni = 1
        prefix = "10.0.0.2/32"
        peer = "b"
        mac = "02:00:00:00:00:02"
    "#;

    fn parse(text: &str) -> Config {
        Config::parse(text, "t").unwrap()
    }

    fn report(old: &str, new: &str) -> ReloadReport {
        ConfigDiff::between(&parse(old), &parse(new)).unwrap().report()
    }

    #[test]
    fn same_is_empty() {
        assert!(ConfigDiff::between(&parse(BASE), &parse(BASE)).unwrap().is_empty());
    }

    #[test]
    fn added_removed_changed() {
        let names = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<Vec<_>>();
        let port = "[[port]]\nname='p2'\nvni=1\nmac='02:00:00:00:00:03'\naddresses=['10.0.0.3/24']\n";
        let more = format!("{BASE}{port}");
        assert_eq!(report(BASE, &more).ports.added, names(&["p2"]));
        assert_eq!(report(&more, BASE).ports.removed, names(&["p2"]));
        let r = report(BASE, &BASE.replace("10.0.0.2/32", "10.0.0.4/32"));
        assert_eq!((r.routes.added, r.routes.removed), (names(&["vni 1 10.0.0.4/32"]), names(&["vni 1 10.0.0.2/32"])));
        let two = BASE.replace(
            "vni = 1\n        [[port]]",
            "vni = 1\ngateway = ['10.0.0.254']\n[[vpc]]\nvni = 2\ngateway = ['10.2.0.254']\n[[port]]",
        );
        let peering = |vni, net, to| format!("[[peering]]\nvni = {vni}\nprefix = '{net}'\nto_vni = {to}\n");
        let peered = format!("{two}{}{}", peering(1, "10.2.0.0/16", 2), peering(2, "10.0.0.0/16", 1));
        let p = report(&peered, &peered.replace("10.0.0.0/16", "10.0.0.0/24")).peerings;
        assert_eq!(
            (p.added, p.removed),
            (names(&["vni 2 10.0.0.0/24 to vni 1"]), names(&["vni 2 10.0.0.0/16 to vni 1"]))
        );
        assert!(report(&two, &peered).peerings.added.len() == 2 && !report(&two, &peered).is_empty());
        assert!(r.ports.is_empty() && r.peers.is_empty() && r.vpcs.is_empty() && !r.transport_changed);
        let r = report(BASE, &BASE.replace("vni = 1\n        [[port]]", "vni = 1\nreliability = 'all'\n[[port]]"));
        assert_eq!(r.vpcs.changed, names(&["1"]));
        assert_eq!(report(BASE, &BASE.replace("192.0.2.2", "192.0.2.3")).peers.changed, names(&["b"]));
        let qos = format!("{BASE}[qos]\nlink_mbit = 100");
        assert!(report(BASE, &qos).qos_changed && report(&qos, BASE).qos_changed);
        assert!(!report(&qos, &qos).qos_changed && !report(BASE, &qos).is_empty());
        assert!(report(BASE, &format!("{BASE}[transport]\nack_threshold = 8")).transport_changed);
    }

    #[test]
    fn an_upgrade_may_change_more_than_a_reload() {
        let suits = |new: &str| ConfigDiff::suits_upgrade(&parse(BASE), &parse(new));
        for (from, to) in [
            ("[underlay]", "[underlay]\npaths = 2\nmtu = 9000\nsource_port_base = 50000\nbifrost_port = 4800"),
            ("[underlay]", "[underlay]\nport = 'afxdp'\nxdp_mode = 'generic'\nplain_paths = 'flowlet'"),
            ("[\"192.0.2.1\"]", "['192.0.2.9', '192.0.2.10']"),
            ("[underlay]", "[workers]\ncpus = [1]\nanswer_us = 500\n[transport]\nack_threshold = 8\n[underlay]"),
            ("[underlay]", "[workers]\ncount = 2\n[underlay]"),
        ] {
            assert_eq!(suits(&BASE.replace(from, to)), Ok(true), "{to}");
            assert_eq!(suits(&BASE.replace(from, to).replace("10.0.0.2/32", "10.0.0.4/32")), Ok(false), "{to}");
        }
        // Queues may differ with the number of workers only.
        let two = BASE.replace("[underlay]", "[workers]\ncount = 2\n[underlay]");
        let one_queue = two.replace("name = \"p1\"", "name = \"p1\"\nqueues = 1");
        assert_eq!(ConfigDiff::suits_upgrade(&parse(&two), &parse(&one_queue)), Ok(false));
        assert_eq!(suits(&one_queue), Ok(true));
        for (from, to, field) in [
            ("name = \"a\"", "name = \"c\"", "host.name: a -> c"),
            ("[underlay]", "[control]\nsocket = '/x'\n[underlay]", "control.socket: /run/bifrost/bifrostd.sock -> /x"),
        ] {
            let error = suits(&BASE.replace(from, to).replace("[underlay]", "[underlay]\npaths = 2")).unwrap_err();
            assert_eq!(error.fields, [field]);
        }
    }

    #[test]
    fn restart() {
        let cases = [
            (
                "addresses = [\"192.0.2.1\"]",
                "addresses = [\"192.0.2.9\"]",
                "underlay.addresses: [192.0.2.1] -> [192.0.2.9]",
            ),
            ("addresses = [\"192.0.2.1\"]", "addresses = [\"192.0.2.1\"]\npaths = 2", "underlay.paths: 4 -> 2"),
            ("[underlay]", "[underlay]\nplain_paths = 'flowlet'", "underlay.plain_paths: flow -> flowlet"),
            ("[underlay]", "[underlay]\nflowlet_gap_us = 100", "underlay.flowlet_gap_us: 500 -> 100"),
            ("[underlay]", "[workers]\ncount = 2\n[underlay]", "workers.count: 1 -> 2"),
            ("[underlay]", "[control]\nsocket = '/x'\n[underlay]", "control.socket: /run/bifrost/bifrostd.sock -> /x"),
            ("name = \"a\"", "name = \"c\"", "host.name: a -> c"),
            ("name = \"a\"", "name = \"a\"\nkeep_devices = false", "host.keep_devices: true -> false"),
        ];
        for (from, to, message) in cases {
            let error = ConfigDiff::between(&parse(BASE), &parse(&BASE.replace(from, to))).unwrap_err();
            assert!(error.fields.contains(&message.to_owned()), "{error}");
            let is_upgrade = message.starts_with("underlay.") || message.starts_with("workers.");
            let expected = if is_upgrade { "these need an upgrade or a restart" } else { "these need a restart" };
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
