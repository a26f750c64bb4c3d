//! Checks of hosts: what `bifrostd` would refuse on others.

use std::net::IpAddr;

use super::Trial;
use crate::key::{Key, Kind};
use crate::model::Index;
use crate::spec::{HostSpec, MAX_ADDRESSES, Spec};

impl Trial<'_> {
    pub(super) fn check_host(&mut self, key: &Key, spec: &HostSpec) {
        self.check_count(key, "addresses", spec.addresses.len(), 1, MAX_ADDRESSES);
        self.check_distinct(key, "addresses", &spec.addresses);
        for (i, address) in spec.addresses.iter().enumerate() {
            let field = format!("addresses[{i}]");
            let is_broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
            if address.is_unspecified() || address.is_multicast() || is_broadcast {
                self.wrong(key, &field, format!("{address} is not a unicast address"));
            }
            self.check_only(key, &field, &Index::Underlay(*address), *address);
        }
        if let Some(what) = self.other_families(key, &spec.addresses) {
            self.conflict(key, "addresses", what);
        }
        if let Some(uplink) = &spec.uplink {
            self.check_uplink(key, uplink);
        }
    }

    /// A path to another host whose ends are of different families. `bifrostd` repeats the addresses of both hosts, and
    /// connects the nth of one with the nth of the other. Hosts that agree with one agree with all others.
    fn other_families(&self, key: &Key, addresses: &[IpAddr]) -> Option<String> {
        let mut hosts = self.model.iter().take_while(|(other, _)| other.kind() == Kind::Host);
        let (other, theirs) = hosts.find_map(|(other, stored)| match &stored.spec {
            Spec::Host(spec) if other != key => Some((other, &spec.addresses)),
            _ => None,
        })?;
        let mut paths = addresses.iter().cycle().zip(theirs.iter().cycle()).take(MAX_ADDRESSES * MAX_ADDRESSES);
        let (ours, theirs) = paths.find(|(ours, theirs)| ours.is_ipv4() != theirs.is_ipv4())?;
        let advice = "name addresses of the same families in the same order on all hosts";
        Some(format!("a path would run from {ours} to {theirs} of {other}: {advice}"))
    }
}
