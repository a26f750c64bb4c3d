//! What `[[peering]]` sections need to be of use: gateways on both sides, and a way back.

use std::collections::HashSet;
use std::fmt::Display;

use super::section::Sink;
use super::{Config, Peering, Vni};

/// Ways between VPCs, as the configuration has them.
pub(super) struct Ways {
    /// VPCs that have gateways, of IPv6 or not.
    gateways: HashSet<(Vni, bool)>,
    /// From where to where, IPv6 or not.
    ways: HashSet<(Vni, Vni, bool)>,
    /// Nothing is wrong with what the VPCs say.
    gateways_are_known: bool,
    /// Nothing is wrong with what the peerings say.
    ways_are_known: bool,
}

impl Ways {
    pub(super) fn new(config: &Config, sink: &Sink<'_>) -> Ways {
        let gateways = config.vpcs.iter().flat_map(|vpc| vpc.gateway.iter().map(|addr| (vpc.vni, addr.is_ipv6())));
        let ways = config.peerings.iter().map(|p| (p.vni, p.to_vni, p.prefix.addr().is_ipv6()));
        Ways {
            gateways: gateways.collect(),
            ways: ways.collect(),
            gateways_are_known: !sink.failed_within("vpc"),
            ways_are_known: !sink.failed_within("peering"),
        }
    }

    /// Checks a peering between VPCs that there are. `at` names a key of it.
    pub(super) fn check<F: Display>(&self, sink: &Sink<'_>, at: impl Fn(&'static str) -> F, peering: &Peering) {
        let Peering { vni, prefix, to_vni } = *peering;
        let is_v6 = prefix.addr().is_ipv6();
        let family = if is_v6 { "IPv6" } else { "IPv4" };
        if vni == to_vni {
            return sink.error(at("to_vni"), format!("a VPC needs no way into itself; name another one than {vni}"));
        }
        for (key, vni) in [("vni", vni), ("to_vni", to_vni)] {
            if self.gateways_are_known && !self.gateways.contains(&(vni, is_v6)) {
                let lacks = format!("VNI {vni} has no {family} gateway, through which the way would lead; add one");
                sink.error(at(key), lacks);
            }
        }
        if self.ways_are_known && !self.ways.contains(&(to_vni, vni, is_v6)) {
            let lacks = format!(
                "there is no way back; add a [[peering]] with vni = {to_vni}, an {family} prefix and to_vni = {vni}"
            );
            sink.error(at("to_vni"), lacks);
        }
    }
}
