//! Checks of load balancers, route tables, mirrors and flow logs.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Trial, no_address};
use crate::allocate;
use crate::compile::{self, backend_address};
use crate::key::{Key, Kind};
use crate::model::Index;
use crate::spec::{
    FlowLogSpec, LoadBalancerSpec, MAX_BACKENDS, MAX_FLOWS, MAX_JSON_MB, MAX_LOGGED, MAX_MIRRORED, MAX_ROUTES,
    MirrorSpec, RouteTableSpec, RouteToSpec, Spec,
};

/// The most prefixes behind a guest that `bifrostd` takes.
const MAX_ROUTED_IN_ALL: usize = 64;

impl Trial<'_> {
    /// Its address stays, or is chosen.
    pub(super) fn fill_in_balancer(
        &mut self,
        key: &Key,
        spec: &mut LoadBalancerSpec,
        before: Option<&LoadBalancerSpec>,
    ) {
        spec.address = spec.address.or(before.and_then(|before| before.address));
        let subnet = key.sibling(Kind::Subnet, &spec.subnet);
        // The check of references tells what is missing.
        let Some(prefix) = self.model.subnet(&subnet).map(|subnet| subnet.prefix) else { return };
        let Some(vpc) = self.model.vpc_of_subnet(key, &spec.subnet) else { return };
        if spec.address.is_none() {
            spec.address = allocate::free_address(self.model, &vpc, &subnet, prefix);
            if spec.address.is_none() {
                self.conflict(key, "subnet", no_address(prefix));
            }
        }
    }

    pub(super) fn check_balancer(&mut self, key: &Key, spec: &LoadBalancerSpec) {
        self.check_reserved(key, &spec.settings, &["name", "vni", "backend"]);
        if spec.settings.get("check").and_then(|check| check.get("from")).is_some() {
            self.wrong(key, "check.from", "each host asks from a port of the VPC that it has; remove it".into());
        }
        self.check_count(key, "backends", spec.backends.len(), 1, MAX_BACKENDS);
        let prefix = self.model.subnet(&key.sibling(Kind::Subnet, &spec.subnet)).map(|subnet| subnet.prefix);
        // Told before: something does not exist, or no address is free.
        let Some((prefix, vpc)) = prefix.zip(self.model.vpc_of_subnet(key, &spec.subnet)) else { return };
        let Some(address) = spec.address else { return };
        match prefix.contains(&address) {
            false => self.wrong(key, "address", format!("{address} is not in {prefix}")),
            true => self.check_host_address(key, "address", prefix, address),
        }
        let others: Vec<Key> = self.model.found(&Index::Address(vpc.clone(), address)).cloned().collect();
        for other in others.iter().filter(|other| *other != key) {
            match self.model.load_balancer(other) {
                None => self.conflict(key, "address", format!("{address} is in use by {other}")),
                Some(other_spec) if other_spec.listener() == spec.listener() => {
                    let (protocol, port) = spec.listener();
                    let what = format!("{protocol} port {port} of {address} is in use by {other}");
                    self.conflict(key, "port", what);
                }
                Some(_) => {}
            }
        }
        let mut known = BTreeSet::new();
        for (i, backend) in spec.backends.iter().enumerate() {
            let field = format!("backends[{i}]");
            if backend.guest.is_some() == backend.address.is_some() {
                self.wrong(key, &field, "name a guest, which is a port of the project, or an address".into());
                continue;
            }
            let Some(to) = backend_address(self.model, key, &vpc, address, backend) else {
                self.check_guest(key, &field, &vpc, address.is_ipv4(), backend.guest.as_deref().unwrap_or_default());
                continue;
            };
            if to.is_ipv4() != address.is_ipv4() {
                self.wrong(key, &field, format!("{to} is of another family than {address}"));
            } else if to == address {
                self.wrong(key, &field, format!("{to} is the load balancer's own address; name a guest"));
            } else if !known.insert((to, backend.port.map_or(spec.listener().1, u64::from))) {
                self.wrong(key, &field, format!("{to} is named twice with one port; keep one, with a weight"));
            }
        }
    }

    /// What is wrong with a guest that cannot be a backend; one that does not exist is told elsewhere.
    fn check_guest(&mut self, key: &Key, field: &str, vpc: &Key, is_ipv4: bool, name: &str) {
        let guest = key.sibling(Kind::Port, name);
        let Some(of) = self.model.port(&guest).map(|port| self.model.vpc_of(&guest, port)) else { return };
        let what = match of {
            Some(of) if of != *vpc => format!("{guest} is of {of}, not of {vpc}"),
            _ => format!("{guest} has no {} address", if is_ipv4 { "IPv4" } else { "IPv6" }),
        };
        self.conflict(key, &format!("{field}.guest"), what);
    }

    pub(super) fn check_routes(&mut self, key: &Key, spec: &RouteTableSpec) {
        self.check_count(key, "routes", spec.routes.len(), 0, MAX_ROUTES);
        let vpc = key.sibling(Kind::Vpc, &spec.vpc);
        let mut known = BTreeSet::new();
        for (i, RouteToSpec { prefix, guest: name }) in spec.routes.iter().enumerate() {
            let field = |field: &str| format!("routes[{i}].{field}");
            if *prefix != prefix.trunc() {
                self.wrong(key, &field("prefix"), format!("{prefix} has host bits set; write {}", prefix.trunc()));
            }
            if !known.insert(prefix) {
                self.wrong(key, &field("prefix"), format!("{prefix} is named twice; keep one"));
            }
            self.check_only(key, &field("prefix"), &Index::routed(&vpc, *prefix), *prefix);
            self.check_nested(key, &field("prefix"), &vpc, *prefix);
            let guest = key.sibling(Kind::Port, name);
            let Some(port) = self.model.port(&guest) else { continue };
            if let Some(of) = self.model.vpc_of(&guest, port).filter(|of| *of != vpc) {
                self.conflict(key, &field("guest"), format!("{guest} is of {of}, not of {vpc}"));
            } else if !port.addresses.iter().any(|address| address.is_ipv4() == prefix.addr().is_ipv4()) {
                let family = if prefix.addr().is_ipv4() { "IPv4" } else { "IPv6" };
                self.conflict(key, &field("guest"), format!("{guest} has no {family} address"));
            } else if compile::routed(self.model, &guest, &vpc, port).len() > MAX_ROUTED_IN_ALL {
                let what = format!("{guest} would have more than {MAX_ROUTED_IN_ALL} prefixes; take another guest");
                self.conflict(key, &field("guest"), what);
            }
        }
    }

    pub(super) fn check_mirror(&mut self, key: &Key, spec: &MirrorSpec) {
        self.check_reserved(key, &spec.settings, &["name", "vpcs", "ports"]);
        self.check_scope(key, spec.vpc.is_some(), &spec.guests, MAX_MIRRORED);
    }

    pub(super) fn check_flow_log(&mut self, key: &Key, spec: &FlowLogSpec) {
        self.check_reserved(key, &spec.settings, &["name", "vpcs", "ports"]);
        self.check_scope(key, spec.vpc.is_some(), &spec.guests, MAX_LOGGED);
        if !spec.json && !spec.settings.contains_key("collector") {
            let what = "missing: name an IPFIX collector, such as 192.0.2.9:4739, or set json to true";
            self.wrong(key, "collector", what.into());
        }
        // Projects share the memory and the disks of hosts.
        for (field, most) in [("flows", MAX_FLOWS), ("json_mb", MAX_JSON_MB)] {
            if let Some(given) = spec.settings.get(field).and_then(Value::as_u64).filter(|given| *given > most) {
                self.wrong(key, field, format!("{given} is more than {most}"));
            }
        }
    }

    /// What mirrors and flow logs are of: a VPC, or some guests.
    fn check_scope(&mut self, key: &Key, is_of_vpc: bool, guests: &[String], most: usize) {
        if is_of_vpc != guests.is_empty() {
            self.wrong(key, "", "name a vpc, or guests, which are ports of the project".into());
        }
        self.check_count(key, "guests", guests.len(), 0, most);
        let distinct: BTreeSet<&String> = guests.iter().collect();
        if distinct.len() != guests.len() {
            self.wrong(key, "guests", "one is named twice; keep it once".into());
        }
    }

    /// What names a port that changes, and does not change itself: a guest's addresses are those of
    /// the backends that name it.
    pub(super) fn check_users_of_ports(&mut self) {
        let changed: BTreeSet<&Key> = self.before.iter().map(|(key, _)| key).collect();
        let ports = changed.iter().filter(|key| key.kind() == Kind::Port);
        let users = ports.flat_map(|port| self.model.referrers(port)).filter(|user| !changed.contains(user));
        for user in users.cloned().collect::<BTreeSet<Key>>() {
            match self.model.get(&user).map(|stored| stored.spec.clone()) {
                Some(Spec::LoadBalancer(spec)) => self.check_balancer(&user, &spec),
                Some(Spec::FloatingIp(spec)) => self.check_floating(&user, &spec),
                Some(Spec::RouteTable(spec)) => self.check_routes(&user, &spec),
                _ => {}
            }
        }
    }
}
