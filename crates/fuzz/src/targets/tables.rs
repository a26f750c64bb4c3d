//! Configurations of the switch for the targets that use it.

use std::net::IpAddr;
use std::sync::Arc;

use bifrost_avs::{
    AclRule, Affinity, Backend, Direction, FlowLimits, FlowLogSpec, GroupId, GroupRule, LoadBalancer, Ordering,
    Pattern, PeerId, Peering, Port, PortId, Reliability, Route, RuleLogSpec, RuleName, RuleOwner, SecurityGroup,
    SessionLimits, SharedAddress, Tables, Transport, Vpc,
};
use bifrost_wire::{Mac, Vni};

pub(super) const fn mac(n: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, n])
}

pub(super) fn vni(n: u32) -> Vni {
    Vni::try_from(n).unwrap_or_default()
}

/// vNICs 1 and 2 on this host, 3 at peer 1, 4 at peer 2 with a network behind it; 1, 2 and 3 share address 5. A
/// second tenant has the same addresses.
pub(super) fn tables() -> Tables {
    let v4 = |n: u8| IpAddr::from([10, 0, 0, n]);
    let v6 = |n: u16| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, n]);
    let port = |id, of, n: u8| Port {
        id: PortId(id),
        vni: vni(of),
        mac: mac(n),
        addresses: vec![v4(n), v6(u16::from(n))],
        routed: vec![],
        mtu: if n == 2 { 100 } else { 1500 },
        groups: if n == 2 { vec![GroupId(0)] } else { vec![] },
        home: None,
    };
    let route = |of, prefix: &str, peer, n| Route {
        vni: vni(of),
        prefix: prefix.parse().unwrap_or_else(|e| panic!("{prefix}: {e}")),
        peer: PeerId(peer),
        mac: mac(n),
        mtu: if n == 4 { 68 } else { 1500 },
    };
    let mut across = port(5, 200, 1);
    across.addresses.push(IpAddr::from([10, 2, 0, 1]));
    let peering = |of, prefix: &str, to| Peering {
        vni: vni(of),
        prefix: prefix.parse().unwrap_or_else(|e| panic!("{prefix}: {e}")),
        to: vni(to),
    };
    // Tenants' rules: some ports, one protocol; few sessions, so that the table is full at times.
    let tcp = Pattern { protocol: Some(6), dst_ports: 1..=1023, ..Pattern::default() };
    let name = |owner, direction| Some(Arc::new(RuleName { owner, direction, number: 1 }));
    let log = name(RuleOwner::Group("g".to_owned()), Direction::Ingress);
    let rules = vec![GroupRule { log, ..GroupRule::new(Direction::Ingress, tcp.clone()) }];
    let log = name(RuleOwner::Acl(vni(200)), Direction::Egress);
    let acl = vec![AclRule { direction: Direction::Egress, pattern: tcp, allow: false, log }];
    // Listens where the frames go: on the client itself, its neighbour, and another host for backends.
    let balancer = |address, port, protocol, backends: [IpAddr; 3]| LoadBalancer {
        vni: vni(100),
        address,
        port,
        protocol,
        affinity: Affinity::Connection,
        backends: backends.map(|address| Backend { address, port, weight: 1 }).to_vec(),
    };
    let load_balancers = vec![
        balancer(v4(4), 6379, Transport::Tcp, [1, 2, 3].map(v4)),
        balancer(v4(4), 53, Transport::Udp, [1, 2, 3].map(v4)),
        balancer(v6(4), 6379, Transport::Tcp, [1, 2, 3].map(v6)),
        balancer(v6(4), 53, Transport::Udp, [1, 2, 3].map(v6)),
    ];
    let shared = [v4(5), v6(5)].map(|address| SharedAddress {
        vni: vni(100),
        address,
        vnics: vec![mac(1), mac(2), mac(3)],
        holder: None,
    });
    Tables {
        shared: shared.to_vec(),
        metadata: vec![PortId(0)],
        load_balancers,
        vpcs: vec![
            Vpc {
                vni: vni(100),
                reliability: Reliability::Tcp,
                ordering: Ordering::Flow,
                gateways: vec![v4(254), v6(254)],
                acl: vec![],
            },
            Vpc {
                vni: vni(200),
                reliability: Reliability::All,
                ordering: Ordering::Strict,
                gateways: vec![IpAddr::from([10, 2, 0, 254])],
                acl,
            },
        ],
        ports: vec![port(0, 100, 1), port(1, 100, 2), across],
        routes: vec![
            route(100, "10.0.0.3/32", 1, 3),
            route(100, "fd00::3/128", 1, 3),
            route(100, "10.1.0.0/16", 2, 4),
            route(200, "10.0.0.3/32", 2, 3),
            route(200, "10.2.0.3/32", 2, 4),
        ],
        peerings: vec![
            peering(100, "10.2.0.0/16", 200),
            peering(200, "10.0.0.0/24", 100),
            peering(200, "10.1.0.0/16", 100),
        ],
        groups: vec![SecurityGroup::new(rules)],
        sessions: SessionLimits { total: 8, per_port: 4 },
        flows: FlowLimits { records: 8, vectors: true },
        flow_logs: vec![
            flow_log("", &[0, 1, 5], 8),
            FlowLogSpec { accepted: false, ..flow_log("rejected", &[1], 2) },
            FlowLogSpec { rejected: false, ..flow_log("accepted", &[0, 5], 4) },
        ],
        rule_log: Some(RuleLogSpec { records_per_s: 4, interval_ns: 20 << 30 }),
        ..Tables::default()
    }
}

fn flow_log(name: &str, ports: &[u32], flows: u32) -> FlowLogSpec {
    FlowLogSpec {
        name: name.into(),
        ports: ports.iter().map(|port| PortId(*port)).collect(),
        accepted: true,
        rejected: true,
        one_in: 1,
        flows,
        active_ns: 50 << 30,
        idle_ns: 20 << 30,
    }
}

/// The same without rules, peerings and limits, and only with the first network.
pub(super) fn plain_tables() -> Tables {
    let mut tables = tables();
    tables.vpcs.truncate(1);
    tables.ports.truncate(2);
    tables.routes.retain(|route| route.vni == vni(100));
    tables.peerings.clear();
    tables.load_balancers.clear();
    tables.shared.clear();
    tables.metadata.clear();
    tables.flow_logs.clear();
    tables.rule_log = None;
    tables.groups.clear();
    tables.ports.iter_mut().for_each(|port| port.groups.clear());
    tables
}

/// The mutation that the environment variable `MUTATION` names.
#[cfg(feature = "mutations")]
pub(super) fn mutation() -> Option<bifrost_avs::Mutation> {
    let name = std::env::var("MUTATION").ok()?;
    bifrost_avs::Mutation::ALL.into_iter().find(|m| format!("{m:?}") == name)
}
