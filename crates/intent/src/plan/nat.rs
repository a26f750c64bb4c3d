//! Uplinks, NAT gateways and floating addresses: checks, and which host gets which ports.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::Trial;
use crate::allocate;
use crate::compile::{has_router, inside_address};
use crate::grants;
use crate::key::{Key, Kind};
use crate::model::{Index, Model, Stored};
use crate::spec::{Block, FloatingIpSpec, MAX_ADDRESSES, MAX_POOL, NatGatewaySpec, Spec, UplinkSpec};

impl Trial<'_> {
    pub(super) fn check_uplink(&mut self, key: &Key, spec: &UplinkSpec) {
        let reserved = ["name", "security_groups", "routed", "kind", "shared", "metadata"].into_iter();
        for name in reserved.filter(|name| spec.settings.contains_key(*name)) {
            self.wrong(key, &format!("uplink.{name}"), "an uplink has none; remove it".into());
        }
        self.check_count(key, "uplink.addresses", spec.addresses.len(), 1, MAX_ADDRESSES);
        for (i, address) in spec.addresses.iter().enumerate() {
            let address = address.addr();
            self.check_only(key, &format!("uplink.addresses[{i}]"), &Index::Outside(address), address);
        }
        self.check_only(key, "uplink.vni", &Index::Vni(spec.vni()), spec.vni());
        if let Some(to) = spec.attachment() {
            let what = format!("{to} of host {}", key.name());
            self.check_only(key, "uplink.device", &Index::Attachment(key.name().to_owned(), to), what);
        }
    }

    pub(super) fn check_gateway(&mut self, key: &Key, spec: &NatGatewaySpec) {
        let vpc = key.sibling(Kind::Vpc, &spec.vpc);
        self.check_only(key, "vpc", &Index::Gateway(vpc.clone()), &vpc);
        self.check_count(key, "addresses", spec.addresses.len(), 1, MAX_POOL);
        let Some(first) = spec.addresses.first().copied() else { return };
        let mut known = BTreeSet::new();
        for (i, address) in spec.addresses.iter().enumerate() {
            let field = format!("addresses[{i}]");
            if address.is_ipv4() != first.is_ipv4() {
                self.wrong(key, &field, format!("{address} is of another family than {first}; name one family"));
            }
            if !known.insert(address) {
                self.wrong(key, &field, format!("{address} is named twice; keep one"));
            }
            self.check_outside(key, &field, *address);
        }
        if let Some(ports) = spec.ports_per_host.filter(|ports| !(64..=NatGatewaySpec::PORTS).contains(ports)) {
            let what = format!("{ports} is not in 64..={}", NatGatewaySpec::PORTS);
            self.wrong(key, "ports_per_host", what);
        }
        if self.model.get(&vpc).is_some() && !has_router(self.model, &vpc, first) {
            let family = if first.is_ipv4() { "IPv4" } else { "IPv6" };
            self.conflict(key, "vpc", format!("{vpc} has no {family} subnet, whose router is the way out; add one"));
        }
        if let Some(all) = spec.default_route() {
            self.check_only(key, "vpc", &Index::routed(&vpc, all), format!("the route to {all} of {vpc}"));
        }
        let mut taken = BTreeSet::new();
        for (host, block) in &spec.blocks {
            if !taken.insert(block) {
                let what = format!("{} has the same ports as another host; remove it", block.address);
                self.wrong(key, &format!("blocks.{host}"), what);
            }
        }
    }

    /// Its address stays, or is one of the pool.
    pub(super) fn fill_in_floating(&mut self, key: &Key, spec: &mut FloatingIpSpec, before: Option<IpAddr>) {
        spec.address = spec.address.or(before);
        if spec.address.is_some() {
            return;
        }
        let Some(pool) = &spec.pool else {
            return self.wrong(key, "address", "missing: name an address, or a pool, which is an address set".into());
        };
        let pool = key.sibling(Kind::AddressSet, pool);
        // The check of references tells that it is missing.
        let Some(Spec::AddressSet(set)) = self.model.get(&pool).map(|stored| &stored.spec) else { return };
        spec.address = allocate::outside_address(self.model, key.project(), &set.addresses);
        if spec.address.is_none() {
            let granted = if self.model.grants().next().is_some() { " and granted to the project" } else { "" };
            self.conflict(key, "pool", format!("no address of {pool} is free{granted}; add some, or name an address"));
        }
    }

    pub(super) fn check_floating(&mut self, key: &Key, spec: &FloatingIpSpec) {
        // Told before: there is none.
        let Some(address) = spec.address else { return };
        self.check_outside(key, "address", address);
        let guest = key.sibling(Kind::Port, &spec.guest);
        let Some(port) = self.model.port(&guest) else { return };
        if self.model.uplink(&port.host).is_none() {
            let what = format!("{} of {guest} has no uplink; give it one, or move the guest", port.host);
            return self.conflict(key, "guest", what);
        }
        let Some(inside) = inside_address(self.model, key, spec) else {
            let family = if address.is_ipv4() { "IPv4" } else { "IPv6" };
            let what = match spec.inside {
                Some(inside) => format!("{inside} is not an {family} address of {guest}"),
                None => format!("{guest} has no {family} address"),
            };
            return self.conflict(key, if spec.inside.is_some() { "inside" } else { "guest" }, what);
        };
        let has_it = |other: &&Key| match self.model.get(other).map(|stored| &stored.spec) {
            Some(Spec::FloatingIp(spec)) => *other != key && inside_address(self.model, other, spec) == Some(inside),
            _ => false,
        };
        let other = self.model.referrers(&guest).find(has_it).cloned();
        if let Some(other) = other {
            self.conflict(key, "guest", format!("{inside} of {guest} has the outside address of {other} already"));
        }
    }

    fn check_outside(&mut self, key: &Key, field: &str, address: IpAddr) {
        if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
            return self.wrong(key, field, format!("{address} cannot be an address outside"));
        }
        self.check_only(key, field, &Index::Outside(address), address);
        if !grants::may_use(self.model, key.project(), address) {
            let project = key.project();
            let what = format!(
                "{address} is not granted to project {project:?}; name another, or have an administrator add \
                 outside_grant/{project}/NAME with its prefix"
            );
            self.conflict(key, field, what);
        }
    }

    /// Gives hosts their blocks: those that get a port of a VPC with a gateway, or an uplink, and
    /// all of a gateway that is set. An implied change of the gateway.
    pub(super) fn allot_blocks(&mut self) {
        let mut gateways = BTreeSet::new();
        let mut wanted = BTreeSet::new();
        for (key, _) in &self.before {
            match self.model.get(key).map(|stored| &stored.spec) {
                Some(Spec::NatGateway(_)) => drop(gateways.insert(key.clone())),
                Some(Spec::Port(_)) => wanted.extend(ways_out(self.model, key)),
                Some(Spec::Host(host)) if host.uplink.is_some() => {
                    let ports = self.model.referrers(key).filter(|key| key.kind() == Kind::Port);
                    wanted.extend(ports.flat_map(|port| ways_out(self.model, port)));
                }
                _ => {}
            }
        }
        for gateway in &gateways {
            wanted.extend(hosts_of(self.model, gateway).into_iter().map(|host| (gateway.clone(), host)));
        }
        let mut wanted = wanted.into_iter().peekable();
        while let Some((gateway, host)) = wanted.next() {
            let mut hosts = vec![host];
            while let Some((_, host)) = wanted.next_if(|(other, _)| *other == gateway) {
                hosts.push(host);
            }
            self.allot(&gateway, &hosts, gateways.contains(&gateway));
            gateways.remove(&gateway);
        }
        // Gateways without hosts.
        for gateway in gateways {
            self.allot(&gateway, &[], true);
        }
    }

    /// `is_set`: the gateway is part of the batch, and hosts without a port of its VPC give their blocks back.
    fn allot(&mut self, key: &Key, hosts: &[String], is_set: bool) {
        let Some(Spec::NatGateway(mut spec)) = self.model.get(key).map(|stored| stored.spec.clone()) else { return };
        // Told elsewhere: it has no addresses.
        if spec.addresses.is_empty() {
            return;
        }
        let old = spec.blocks.clone();
        if is_set {
            let sizes: Vec<(String, Block)> = std::mem::take(&mut spec.blocks).into_iter().collect();
            let kept = sizes.into_iter().filter(|(host, block)| spec.has_block(block) && hosts.contains(host));
            spec.blocks = kept.collect();
        }
        let mut waiting: Vec<&String> = hosts.iter().filter(|host| !spec.blocks.contains_key(*host)).collect();
        for is_last in [false, true] {
            if is_last && !waiting.is_empty() {
                // Those that have no guests here do not need theirs.
                let needed = hosts_of(self.model, key);
                spec.blocks.retain(|host, _| needed.contains(host));
            }
            let taken: BTreeSet<Block> = spec.blocks.values().copied().collect();
            let free: Vec<Block> =
                spec.all_blocks().filter(|block| !taken.contains(block)).take(waiting.len()).collect();
            let rest = waiting.split_off(free.len().min(waiting.len()));
            spec.blocks.extend(waiting.into_iter().cloned().zip(free));
            waiting = rest;
        }
        if let Some(host) = waiting.first() {
            let most = spec.all_blocks().count();
            let what = format!(
                "there are ports for {most} hosts, and none for {host}; name more addresses, or set a lower ports_per_host"
            );
            return self.conflict(key, "addresses", what);
        }
        if spec.blocks != old {
            self.amend(key, Spec::NatGateway(spec));
        }
    }

    /// Changes an object beyond what the batch says of it.
    fn amend(&mut self, key: &Key, spec: Spec) {
        let known = self.before.iter().find(|(known, _)| known == key).map(|(_, before)| before.clone());
        let is_known = known.is_some();
        let before = known.unwrap_or_else(|| self.model.get(key).cloned());
        let stored = match &before {
            // What was set differs from that no longer.
            Some(before) if before.spec == spec => before.clone(),
            before => {
                let generation = before.as_ref().map_or(1, |stored| stored.generation.saturating_add(1));
                Stored { spec, generation, committed_ms: self.now_ms }
            }
        };
        self.model.set(key.clone(), stored);
        if !is_known {
            self.before.push((key.clone(), before));
        }
    }
}

/// The gateway of a port's VPC with the port's host, if that has an uplink and no block yet.
fn ways_out(model: &Model, port: &Key) -> Option<(Key, String)> {
    let spec = model.port(port)?;
    let vpc = model.vpc_of(port, spec)?;
    let gateway = model.found(&Index::Gateway(vpc)).next()?;
    model.uplink(&spec.host)?;
    if model.nat_gateway(gateway)?.blocks.contains_key(&spec.host) {
        return None;
    }
    Some((gateway.clone(), spec.host.clone()))
}

/// The hosts with an uplink and a port of a gateway's VPC.
fn hosts_of(model: &Model, gateway: &Key) -> BTreeSet<String> {
    let Some(spec) = model.nat_gateway(gateway) else { return BTreeSet::new() };
    let subnets = model.referrers(&gateway.sibling(Kind::Vpc, &spec.vpc)).filter(|key| key.kind() == Kind::Subnet);
    let ports = subnets.flat_map(|subnet| model.referrers(subnet)).filter_map(|port| model.port(port));
    let hosts: BTreeSet<&String> = ports.map(|port| &port.host).collect();
    hosts.into_iter().filter(|host| model.uplink(host).is_some()).cloned().collect()
}
