//! Checks of shared addresses.

use std::collections::HashSet;
use std::net::IpAddr;

use super::Vni;
use super::check::Checked;
use super::section::Sink;

/// A shared address must be a unicast address, have no other owner, and its VPC must have a gateway.
pub(super) fn check(config: &Checked<'_>, sink: &Sink<'_>) {
    let of_ports = config.ports.iter().enumerate().map(|(i, port)| ("port", i, port.vni, &port.shared[..]));
    let of_routes = config.routes.iter().enumerate().map(|(i, route)| ("route", i, route.vni, &route.shared[..]));
    let mut lists = of_ports.chain(of_routes).filter(|(.., shared)| !shared.is_empty()).peekable();
    if lists.peek().is_none() {
        return;
    }
    let taken = taken(config);
    for (kind, i, vni, shared) in lists {
        for (k, &address) in shared.iter().enumerate() {
            let field = format!("{kind}[{i}].shared[{k}]");
            if sink.failed(&field) || sink.failed(format!("{kind}[{i}].vni")) {
                continue;
            }
            let is_broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
            if address.is_unspecified() || address.is_multicast() || address.is_loopback() || is_broadcast {
                sink.error(field, format!("{address} is not the address of a host; name a unicast address"));
            } else if shared[..k].contains(&address) {
                sink.error(field, format!("{address} is listed twice; remove one"));
            } else if taken.contains(&(vni, address)) {
                sink.error(field, format!("{address} has another owner in VNI {vni}; choose another address"));
            } else if config.vpc(vni).is_some_and(|vpc| vpc.gateway.is_empty()) && !sink.failed_within("vpc") {
                sink.error(field, format!("VNI {vni} has no gateway, which shared addresses need; add one"));
            }
        }
    }
}

/// Addresses of vNICs, load balancers and gateways.
fn taken(config: &Checked<'_>) -> HashSet<(Vni, IpAddr)> {
    let own = config.ports.iter().flat_map(|port| port.addresses.iter().map(|net| (port.vni, net.addr())));
    let balancers = config.load_balancers.iter().map(|balancer| (balancer.vni, balancer.address));
    let gateways = config.vpcs.iter().flat_map(|vpc| vpc.gateway.iter().map(|gateway| (vpc.vni, *gateway)));
    let routed = config.ports.iter().flat_map(|port| port.routed.iter().map(|prefix| (port.vni, *prefix)));
    let routes = config.routes.iter().map(|route| (route.vni, route.prefix));
    let peerings = config.peerings.iter().map(|peering| (peering.vni, peering.prefix));
    let prefixes = routes.chain(peerings).chain(routed);
    let single = prefixes.filter(|(_, prefix)| prefix.prefix_len() == prefix.max_prefix_len());
    own.chain(balancers).chain(gateways).chain(single.map(|(vni, prefix)| (vni, prefix.addr()))).collect()
}
