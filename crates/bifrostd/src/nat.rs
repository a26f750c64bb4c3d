//! The status of NAT for the API.

use std::net::IpAddr;

use bifrost_control::api::{NatKind, NatStatus};
use bifrost_control::config::{BalancedProtocol, Config, Vni};

/// All external addresses, in the configuration's order. `used`: TCP ports, UDP ports and ICMP identifiers in use, for
/// each shared address.
pub(crate) fn status(config: &Config, used: &mut dyn Iterator<Item = [u32; 3]>) -> Vec<NatStatus> {
    let is_here = |vni: Vni, address: IpAddr| {
        config.ports.iter().any(|port| port.vni == vni && port.addresses.iter().any(|own| own.addr() == address))
    };
    let entry = |kind, uplink: &str, vni: Vni, address| NatStatus {
        kind,
        uplink: uplink.to_owned(),
        vni: vni.value(),
        address,
        protocol: None,
        port: None,
        inside: None,
        inside_port: None,
        here: true,
        ports: None,
        tcp_ports: 0,
        udp_ports: 0,
        echo_identifiers: 0,
    };
    let shared = config.nat.sources.iter().flat_map(|s| s.addresses.iter().map(move |address| (s, *address)));
    let shared = shared.map(|(s, address)| {
        let [tcp_ports, udp_ports, echo_identifiers] = used.next().unwrap_or_default();
        let ports = Some(s.ports);
        NatStatus { ports, tcp_ports, udp_ports, echo_identifiers, ..entry(NatKind::Shared, &s.uplink, s.vni, address) }
    });
    let floating = config.nat.floating.iter().map(|f| NatStatus {
        inside: Some(f.inside),
        here: is_here(f.vni, f.inside),
        ..entry(NatKind::Floating, &f.uplink, f.vni, f.address)
    });
    let forwards = config.nat.forwards.iter().map(|f| NatStatus {
        protocol: Some(if f.protocol == BalancedProtocol::Tcp { "tcp" } else { "udp" }.to_owned()),
        port: Some(f.port),
        inside: Some(f.inside),
        inside_port: Some(f.inside_port),
        here: is_here(f.vni, f.inside),
        ..entry(NatKind::Forward, &f.uplink, f.vni, f.address)
    });
    shared.chain(floating).chain(forwards).collect()
}
