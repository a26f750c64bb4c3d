//! Checks of what a host takes a limited number of: flow logs and mirrors.

use std::collections::{BTreeMap, BTreeSet};

use bifrost_control::config::{MAX_FLOW_LOGS, MAX_MIRRORS};

use super::Trial;
use crate::compile::placed_in;
use crate::key::{Key, Kind};
use crate::model::Model;
use crate::spec::Spec;

/// Kinds, the most of a host, and what they are called.
const LIMITS: [(Kind, usize, &str); 2] =
    [(Kind::FlowLog, MAX_FLOW_LOGS, "flow logs"), (Kind::Mirror, MAX_MIRRORS, "mirrors")];
/// How many of them an error names.
const MAX_NAMED: usize = 5;

impl Trial<'_> {
    /// That no host would get more than it takes. What hosts have too many of already may stay.
    pub(super) fn check_numbers_on_hosts(&mut self) {
        for (kind, most, what) in LIMITS {
            // No host has more than there are.
            if self.model.count_of_kind(kind) <= most as u64 {
                continue;
            }
            let (logs, ports) = (self.changed(kind), self.changed(Kind::Port));
            let mut hosts: BTreeMap<String, &Key> = BTreeMap::new();
            for key in &logs {
                for host in hosts_of(self.model, key) {
                    hosts.entry(host.to_owned()).or_insert(key);
                }
            }
            for (key, port) in ports.iter().filter_map(|key| Some((key, self.model.port(key)?))) {
                hosts.entry(port.host.clone()).or_insert(key);
            }
            for (host, by) in hosts {
                let all = on_host(self.model, kind, &host, &BTreeSet::new());
                if all.len() <= most {
                    continue;
                }
                let mut before = on_host(self.model, kind, &host, &ports);
                before.retain(|key| !logs.contains(key));
                // Those that come are named first.
                let named = all.difference(&before).chain(&before).take(MAX_NAMED);
                let names: Vec<String> = named.map(|key| key.to_string()).collect();
                if before.len() < all.len() {
                    let (count, more) = (all.len(), all.len() - names.len());
                    let what = format!(
                        "host {host} would have {count} {what}, and takes {most}: {}, and {more} more; delete some, or \
                         move guests to other hosts",
                        names.join(", ")
                    );
                    self.conflict(by, "", what);
                }
            }
        }
    }

    /// Objects of a kind of which a host may have more because of the batch: new ones, and those that concern something else now.
    fn changed(&self, kind: Kind) -> BTreeSet<Key> {
        let differs = |key: &Key, before: Option<&Spec>| match (self.model.get(key).map(|stored| &stored.spec), before)
        {
            (Some(Spec::Port(now)), Some(Spec::Port(before))) => now.host != before.host,
            (Some(now), Some(before)) => scope(now) != scope(before),
            (now, _) => now.is_some(),
        };
        let of_kind = self.before.iter().filter(|(key, _)| key.kind() == kind);
        let changed = of_kind.filter(|(key, before)| differs(key, before.as_ref().map(|stored| &stored.spec)));
        changed.map(|(key, _)| key.clone()).collect()
    }
}

/// What a flow log or mirror is of.
fn scope(spec: &Spec) -> Option<(Option<&str>, &[String])> {
    match spec {
        Spec::FlowLog(spec) => Some((spec.vpc.as_deref(), &spec.guests)),
        Spec::Mirror(spec) => Some((spec.vpc.as_deref(), &spec.guests)),
        _ => None,
    }
}

/// The hosts that get a flow log or mirror.
fn hosts_of<'m>(model: &'m Model, key: &Key) -> BTreeSet<&'m str> {
    let Some((vpc, guests)) = model.get(key).and_then(|stored| scope(&stored.spec)) else { return BTreeSet::new() };
    let guests = guests.iter().map(|name| key.sibling(Kind::Port, name));
    let vpc = vpc.map(|name| key.sibling(Kind::Vpc, name));
    let subnets = vpc.iter().flat_map(|vpc| model.referrers(vpc)).filter(|key| key.kind() == Kind::Subnet);
    let ports = subnets.flat_map(|subnet| model.referrers(subnet)).filter(|key| key.kind() == Kind::Port);
    ports.cloned().chain(guests).filter_map(|port| model.port(&port)).map(|port| port.host.as_str()).collect()
}

/// The flow logs or mirrors that a host gets, but for those that it has only because of some ports.
fn on_host(model: &Model, kind: Kind, host: &str, without: &BTreeSet<Key>) -> BTreeSet<Key> {
    let ports = model.referrers(&Key::unchecked_host(host)).filter(|key| key.kind() == Kind::Port);
    let (mut vpcs, mut all) = (BTreeSet::new(), BTreeSet::new());
    for key in ports.filter(|key| !without.contains(*key)) {
        let Some(vpc) = model.port(key).and_then(|port| placed_in(model, key, port)) else { continue };
        vpcs.insert(vpc);
        all.extend(model.referrers(key).filter(|user| user.kind() == kind).cloned());
    }
    let of_vpcs = vpcs.iter().flat_map(|vpc| model.referrers(vpc)).filter(|user| user.kind() == kind);
    all.extend(of_vpcs.cloned());
    all
}
