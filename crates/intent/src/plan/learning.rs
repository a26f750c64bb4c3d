//! Checks of VPCs whose routes hosts learn.

use ipnet::IpNet;

use super::Trial;
use crate::key::{Key, Kind};
use crate::model::Index;
use crate::spec::{MAX_LEARNED, PortSpec, SecurityGroupSpec, Spec, VpcSpec};

impl Trial<'_> {
    pub(super) fn check_learning(&mut self, key: &Key, spec: &VpcSpec) {
        self.check_count(key, "learned", spec.learned.len(), 0, MAX_LEARNED);
        for (i, prefix) in spec.learned.iter().enumerate() {
            if *prefix != prefix.trunc() {
                let what = format!("{prefix} has host bits set; write {}", prefix.trunc());
                self.wrong(key, &format!("learned[{i}]"), what);
            }
        }
        if spec.learned.is_empty() {
            return;
        }
        let subnets = self.model.referrers(key).filter(|key| key.kind() == Kind::Subnet);
        let ports = subnets.flat_map(|subnet| self.model.referrers(subnet)).filter(|key| key.kind() == Kind::Port);
        let of_port = |port: &Key| self.names_group(port, self.model.port(port)?).map(|group| (port.clone(), group));
        let found = ports.filter_map(of_port).next();
        let families = ["0.0.0.0/0", "::/0"].iter().filter_map(|all| all.parse::<IpNet>().ok());
        let routed = families.flat_map(|all| self.model.routed_within(key, all)).map(|(prefix, _)| prefix);
        let nested = routed.into_iter().find_map(|prefix| Some((prefix, self.nested(key, prefix)?)));
        if let Some((prefix, (other, by))) = nested {
            self.conflict(key, "learned", format!("{prefix} has {other} of {by} in it; {NESTED}"));
        }
        if let Some((port, group)) = found {
            let what = format!("{port} has security group {group}, whose rules name groups; {ADVICE}");
            self.conflict(key, "learned", what);
        }
    }

    pub(super) fn check_groups_of_learning(&mut self, key: &Key, spec: &PortSpec, vpc: &Key) {
        if self.model.learned(vpc).is_none_or(|learned| learned.is_empty()) {
            return;
        }
        if let Some(group) = self.names_group(key, spec) {
            let what = format!("routes of {vpc} are learned, and the rules of {group} name groups; {ADVICE}");
            self.conflict(key, "security_groups", what);
        }
    }

    /// A route to a prefix of a port or route table.
    pub(super) fn check_nested(&mut self, key: &Key, field: &str, vpc: &Key, prefix: IpNet) {
        if let Some((other, by)) = self.nested(vpc, prefix) {
            self.conflict(key, field, format!("{prefix} and {other} of {by} have addresses in common; {NESTED}"));
        }
    }

    /// Another route of which a route in learned prefixes is a part, or that is a part of it.
    fn nested(&self, vpc: &Key, prefix: IpNet) -> Option<(IpNet, Key)> {
        let learned = self.model.learned(vpc)?;
        if !learned.iter().any(|within| within.contains(&prefix) || prefix.contains(within)) {
            return None;
        }
        // Ways out come after what is learned, and the addresses of routers and load balancers are on all hosts.
        let is_route = |by: &&Key| matches!(by.kind(), Kind::Port | Kind::RouteTable);
        let wider = (0..prefix.prefix_len()).filter_map(|length| Some(IpNet::new(prefix.addr(), length).ok()?.trunc()));
        let wider = wider.filter_map(|wider| {
            let by = self.model.found(&Index::Routed(vpc.clone(), wider)).find(is_route)?;
            Some((wider, by.clone()))
        });
        let narrower = self.model.routed_within(vpc, prefix).filter(|(other, by)| *other != prefix && is_route(by));
        let is_single = prefix.prefix_len() == prefix.max_prefix_len();
        let addresses = (!is_single).then(|| self.model.addresses_in(vpc, prefix)).into_iter().flatten();
        let addresses = addresses.filter_map(|address| {
            let by = self.model.found(&Index::Address(vpc.clone(), address)).find(is_route)?;
            Some((IpNet::from(address), by.clone()))
        });
        wider.chain(narrower.map(|(other, by)| (other, by.clone()))).chain(addresses).next()
    }

    pub(super) fn check_group(&mut self, key: &Key, spec: &SecurityGroupSpec) {
        let Some(field) = named_group(spec) else { return };
        let ports = self.model.referrers(key).filter(|key| key.kind() == Kind::Port);
        let learns = |port: &&Key| {
            let vpc = self.model.port(port).and_then(|spec| self.model.vpc_of(port, spec));
            vpc.is_some_and(|vpc| self.model.learned(&vpc).is_some_and(|learned| !learned.is_empty()))
        };
        let mut concerned = ports.filter(learns).cloned();
        let port = concerned.next();
        drop(concerned);
        if let Some(port) = port {
            self.conflict(key, &field, format!("names a group, and routes of the VPC of {port} are learned; {ADVICE}"));
        }
    }

    /// A group of a port whose rules name groups.
    fn names_group(&self, port: &Key, spec: &PortSpec) -> Option<Key> {
        let groups = spec.security_groups.iter().map(|name| port.sibling(Kind::SecurityGroup, name));
        groups.into_iter().find(|group| match self.model.get(group).map(|stored| &stored.spec) {
            Some(Spec::SecurityGroup(spec)) => named_group(spec).is_some(),
            _ => false,
        })
    }
}

/// A host with the wider one would not ask for the narrower one.
const NESTED: &str = "routes that are learned cannot have others in them; name prefixes that do not overlap";

/// Hosts do not know which addresses a group has when they have not learned the routes to them.
const ADVICE: &str = "hosts do not know their members; name address sets or prefixes";

/// The first field that names a group.
fn named_group(spec: &SecurityGroupSpec) -> Option<String> {
    spec.remotes().into_iter().find(|(_, kind, _)| *kind == Kind::SecurityGroup).map(|(field, ..)| field)
}
