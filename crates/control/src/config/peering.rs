//! Checks of `[[peering]]` sections: gateways on both sides, and a peering in the other direction.

use std::collections::HashSet;
use std::fmt::Display;

use super::section::Sink;
use super::{Config, Peering, Vni};

/// The peerings of a configuration.
pub(super) struct Peerings {
    /// VPCs with gateways, and whether they are IPv6 gateways.
    gateways: HashSet<(Vni, bool)>,
    /// From VPC, to VPC, IPv6 or not.
    peerings: HashSet<(Vni, Vni, bool)>,
    /// Whether the VPCs have no errors.
    gateways_are_known: bool,
    /// Whether the peerings have no errors.
    peerings_are_known: bool,
}

impl Peerings {
    pub(super) fn new(config: &Config, sink: &Sink<'_>) -> Peerings {
        let gateways = config.vpcs.iter().flat_map(|vpc| vpc.gateway.iter().map(|addr| (vpc.vni, addr.is_ipv6())));
        let peerings = config.peerings.iter().map(|p| (p.vni, p.to_vni, p.prefix.addr().is_ipv6()));
        Peerings {
            gateways: gateways.collect(),
            peerings: peerings.collect(),
            gateways_are_known: !sink.failed_within("vpc"),
            peerings_are_known: !sink.failed_within("peering"),
        }
    }

    /// Checks a peering between existing VPCs. `at` names one of its keys.
    pub(super) fn check<F: Display>(&self, sink: &Sink<'_>, at: impl Fn(&'static str) -> F, peering: &Peering) {
        let Peering { vni, prefix, to_vni } = *peering;
        let is_v6 = prefix.addr().is_ipv6();
        let family = if is_v6 { "IPv6" } else { "IPv4" };
        if vni == to_vni {
            return sink
                .error(at("to_vni"), format!("a VPC cannot be peered with itself; name a VPC other than {vni}"));
        }
        for (key, vni) in [("vni", vni), ("to_vni", to_vni)] {
            if self.gateways_are_known && !self.gateways.contains(&(vni, is_v6)) {
                let lacks = format!("VNI {vni} has no {family} gateway, which the peering needs; add one");
                sink.error(at(key), lacks);
            }
        }
        if self.peerings_are_known && !self.peerings.contains(&(to_vni, vni, is_v6)) {
            let lacks = format!(
                "the peering in the other direction is missing; add a [[peering]] with vni = {to_vni}, an {family} prefix and to_vni = {vni}"
            );
            sink.error(at("to_vni"), lacks);
        }
    }
}
