//! The switch with arbitrary frames from guests and peers: nobody can send as somebody else.

use std::net::IpAddr;
use std::sync::Arc;

use bifrost_avs::{
    AclRule, Action, Affinity, Backend, Direction, FlowLimits, FlowLogSpec, GATEWAY_MAC, GroupId, GroupRule,
    LoadBalancer, METADATA, Ordering, Pattern, PeerId, Peering, Port, PortId, Reliability, Route, RuleLogSpec,
    RuleName, RuleOwner, SecurityGroup, SessionLimits, SharedAddress, Switch, Tables, Transport, Verdict, Vpc,
};
use bifrost_nic::{L3, Offload, Parsed, parse};
use bifrost_wire::{Mac, Vni};

use super::frame::frame;
use super::{cutting, dhcp, dns, outside, router};
use crate::Input;

pub(super) const fn mac(n: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, n])
}

pub(super) fn vni(n: u32) -> Vni {
    Vni::try_from(n).unwrap_or_default()
}

/// vNICs 1 and 2 on this host, 3 at peer 1, 4 at peer 2 with a network behind it; 1, 2 and 3 share address 5. A
/// second tenant has the same addresses.
fn tables() -> Tables {
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
        flow_log: Some(FlowLogSpec {
            ports: [0, 1, 5].map(PortId).to_vec(),
            accepted: true,
            rejected: true,
            flows: 8,
            active_ns: 50 << 30,
            idle_ns: 20 << 30,
        }),
        rule_log: Some(RuleLogSpec { records_per_s: 4, interval_ns: 20 << 30 }),
        ..Tables::default()
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
    (tables.flow_log, tables.rule_log) = (None, None);
    tables.groups.clear();
    tables.ports.iter_mut().for_each(|port| port.groups.clear());
    tables
}

pub(crate) fn run(bytes: &[u8]) {
    let input = &mut Input::new(bytes);
    let part: Option<fn(&mut Input<'_>)> = match bytes.first() {
        Some(0x80..) => Some(cutting::run),
        Some(0x60..) => Some(outside::run),
        Some(0x58..) => Some(dhcp::run),
        Some(0x50..) => Some(router::run),
        Some(0x48..) => Some(dns::run),
        _ => None,
    };
    if let Some(run) = part {
        let _ = input.u8();
        return run(input);
    }
    let mut tables = tables();
    let mut switch = Switch::build(&tables, 0).unwrap_or_else(|e| panic!("{e}"));
    let mut now_s = 0;
    while !input.is_empty() {
        now_s += input.pick(&[0, 0, 0, 1, 100, 10_000]);
        switch.advance(now_s << 30);
        let port = PortId(input.pick(&[0, 0, 1, 5, 3]));
        let (network, peer) = (input.pick(&[100, 100, 100, 200, 300]), PeerId(input.pick(&[1, 1, 2, 7])));
        let frame = frame(input, 64);
        let Ok(parsed) = parse(&frame, frame.len()) else { continue };
        // Its flow is cached after the second time at the latest.
        for _ in 0..3 {
            guest(&mut switch, port, &frame, &parsed);
            underlay(&mut switch, vni(network), peer, &frame, &parsed);
        }
        let current = [switch.session_counters(), switch.connection_counters()].map(|counters| counters.current);
        assert!(current.into_iter().all(|current| current <= 8), "more sessions than allowed");
        claimed(&mut switch, &mut tables);
        if input.u8() & 3 == 0 {
            logged(&mut switch, now_s << 30);
        }
    }
}

/// Only vNICs that share an address claim it; each then has it.
fn claimed(switch: &mut Switch, tables: &mut Tables) {
    let mut claims = Vec::new();
    switch.take_claims(&mut claims);
    for claim in &claims {
        let shared = tables.shared.iter_mut().find(|shared| shared.address == claim.address);
        let Some(shared) = shared.filter(|shared| shared.vni == claim.vni) else {
            panic!("{claim:?} of no shared address")
        };
        assert!(shared.vnics.contains(&claim.mac), "{claim:?} of a vNIC that does not share it");
        shared.holder = Some(claim.mac);
    }
    if !claims.is_empty() {
        switch.replace(tables).unwrap_or_else(|e| panic!("{e}"));
    }
}

fn logged(switch: &mut Switch, now_ns: u64) {
    let (mut records, before) = (Vec::new(), switch.flow_log_counters());
    switch.take_flow_records(2, now_ns, &mut records);
    let after = switch.flow_log_counters();
    assert!(before.current_flows <= 8 && after.current_flows <= before.current_flows, "more flows than allowed");
    assert!(after.created_records - before.created_records <= records.len() as u64 && after.lost_records == 0);
    for record in records {
        assert!(record.start_ns <= record.end_ns && record.end_ns <= now_ns);
        assert!(record.sent.packets + record.received.packets > 0 && record.local.is_ipv4() == record.remote.is_ipv4());
        assert!(switch.port(record.port).is_some(), "of a port that does not exist");
    }
    let mut records = Vec::new();
    switch.take_rule_records(1, now_ns, &mut records);
    for record in records {
        assert!(record.start_ns <= record.end_ns && record.end_ns <= now_ns && record.packets > 0);
        assert_eq!(record.local.is_ipv4(), record.remote.is_ipv4());
        // The rule of the group accepts TCP, that of the ACL rejects it.
        let is_of_group = matches!(record.rule.owner, RuleOwner::Group(_));
        assert_eq!((record.accepted, record.direction), (is_of_group, record.rule.direction));
        assert_eq!((record.protocol, record.vni == vni(100)), (6, is_of_group));
        let port = if record.direction == Direction::Egress { record.remote_port } else { record.local_port };
        assert!((1..=1023).contains(&port), "no rule is about port {port}");
    }
}

fn guest(switch: &mut Switch, port: PortId, frame: &[u8], parsed: &Parsed) {
    let &Verdict { action, rewrite, .. } = switch.from_guest(port, frame, frame.len(), Offload::default(), parsed);
    let Some(from) = switch.port(port).cloned() else {
        return assert!(matches!(action, Action::Drop(_)));
    };
    match action {
        Action::Forward { vni, peer, local, remote, .. } => {
            assert_eq!(local, from.mac, "pretends to be another vNIC");
            assert_eq!(vni, network_of(from.vni, rewrite.is_some(), parsed.src_ip, parsed.dst_ip), "crosses tenants");
            assert!(switch.is_at_peer(vni, remote, peer), "goes to a host without the vNIC");
            speaks_for_itself(&from, parsed);
            rewritten(frame, parsed, rewrite, remote);
        }
        Action::Deliver { port: to, .. } => {
            let to = switch.port(to).cloned();
            let Some(to) = to else { panic!("to a port that does not exist") };
            let network = network_of(from.vni, rewrite.is_some(), parsed.src_ip, parsed.dst_ip);
            assert_eq!(to.vni, network, "crosses tenants");
            speaks_for_itself(&from, parsed);
            rewritten(frame, parsed, rewrite, to.mac);
        }
        Action::Answer { .. } => {
            let answer = switch.answer();
            let answered = parse(answer, answer.len()).unwrap_or_else(|e| panic!("malformed answer: {e}"));
            assert_eq!(answered.dst_mac, from.mac, "the answer goes to another guest");
        }
        Action::Copy => {
            speaks_for_itself(&from, parsed);
            let to = switch.copies(port);
            assert!(to.iter().all(|to| [1, 2, 3].map(mac).contains(to) && *to != from.mac), "copies for {to:?}");
            assert!(from.vni == vni(100) && !to.is_empty(), "copies for nobody");
        }
        Action::Host => {
            speaks_for_itself(&from, parsed);
            let has_metadata = port == PortId(0) && [METADATA.0.into(), METADATA.1.into()].contains(&parsed.dst_ip);
            assert!(has_metadata && parsed.dst_port == 80, "no service of the host");
        }
        Action::Drop(_) => {}
    }
}

/// The network of `to`, seen from network `vni` by a sender with the address `from`.
fn network_of(of: Vni, routed: bool, from: IpAddr, to: IpAddr) -> Vni {
    let is_across = |of: Vni, addr: IpAddr| match (of.get(), addr) {
        (100, IpAddr::V4(addr)) => addr.octets()[1] == 2,
        (200, IpAddr::V4(addr)) => addr.octets()[1] == 1 || matches!(addr.octets(), [10, 0, 0, n] if n != 1 && n != 3),
        _ => false,
    };
    if !routed || !is_across(of, to) {
        return of;
    }
    let other = vni(300 - of.get());
    assert!(is_across(other, from), "{to} has no route back to {from}");
    other
}

fn speaks_for_itself(from: &Port, parsed: &Parsed) {
    assert_eq!(parsed.src_mac, from.mac);
    assert!(parsed.vlan.is_none());
    if parsed.is_ip() {
        let own = from.addresses.contains(&parsed.src_ip);
        let link_local = matches!(parsed.src_ip, IpAddr::V6(a) if a.is_unicast_link_local() || a.is_unspecified());
        let may_share = from.vni == vni(100) && last(parsed.src_ip) == 5;
        assert!(own || link_local || may_share, "speaks as {}", parsed.src_ip);
    }
}

fn rewritten(frame: &[u8], parsed: &Parsed, rewrite: Option<bifrost_avs::Rewrite>, to: Mac) {
    let Some(rewrite) = rewrite else {
        return assert_eq!(parsed.dst_mac, to);
    };
    let mut out = frame.to_vec();
    rewrite.apply(&mut out);
    let after = parse(&out, out.len()).unwrap_or_else(|e| panic!("routing made it malformed: {e}"));
    assert_eq!((after.dst_mac, after.src_mac), (to, GATEWAY_MAC));
    let l3 = usize::from(parsed.l3);
    if parsed.kind == L3::V4 {
        let header = |f: &[u8]| bifrost_wire::ipv4::checksum_is_valid(&f[l3..usize::from(parsed.l4)]);
        assert_eq!(header(&out), header(frame), "a valid checksum stays valid, a wrong one wrong");
    }
    if (after.src_ip, after.dst_ip) != (parsed.src_ip, parsed.dst_ip) {
        return balanced(parsed, &after);
    }
    assert_eq!(
        (after.src_ip, after.dst_ip, after.payload, after.end),
        (parsed.src_ip, parsed.dst_ip, parsed.payload, parsed.end)
    );
    let ttl = l3 + if parsed.kind == L3::V6 { 7 } else { 8 };
    assert_eq!(out[ttl] + 1, frame[ttl]);
}

fn last(addr: IpAddr) -> u8 {
    match addr {
        IpAddr::V4(addr) => addr.octets()[3],
        IpAddr::V6(addr) => addr.octets()[15],
    }
}

/// Addresses change only for load balancers, and only to their own and their backends'.
fn balanced(before: &Parsed, after: &Parsed) {
    let [from, to, new_from, new_to] = [before.src_ip, before.dst_ip, after.src_ip, after.dst_ip].map(last);
    let goes = to == 4 && [1, 2, 3].contains(&new_to) && (new_from == from || new_from == 4);
    let comes = new_from == 4 && [1, 2, 3].contains(&from) && (new_to == to || to == 4);
    assert!(goes || comes, "{before:?} becomes {after:?}");
    assert_eq!((after.payload, after.end), (before.payload, before.end));
}

fn underlay(switch: &mut Switch, vni: Vni, peer: PeerId, frame: &[u8], parsed: &Parsed) {
    let by_mac = switch.is_at_peer(vni, parsed.src_mac, peer);
    match switch.from_underlay(vni, peer, frame, parsed).action {
        Action::Deliver { port, .. } => {
            let to = switch.port(port).cloned();
            assert_eq!(to.map(|p| p.vni), Some(vni), "crosses tenants");
            assert!(by_mac || parsed.src_mac == GATEWAY_MAC, "from a vNIC that is not at that peer");
        }
        Action::Answer { vni: told } => {
            let answer = switch.answer();
            let answered = parse(answer, answer.len()).unwrap_or_else(|e| panic!("malformed answer: {e}"));
            let network = network_of(vni, parsed.src_mac == GATEWAY_MAC, parsed.dst_ip, parsed.src_ip);
            assert_eq!(told, network, "the answer crosses tenants");
            let speaker = if told == vni { parsed.dst_mac } else { GATEWAY_MAC };
            assert_eq!((answered.src_mac, answered.src_ip), (speaker, parsed.dst_ip), "answers for another vNIC");
            assert!(switch.is_at_peer(told, answered.dst_mac, peer), "the answer goes elsewhere");
        }
        Action::Forward { .. } | Action::Copy | Action::Host => panic!("a peer's frame goes to other vNICs"),
        Action::Drop(_) => {}
    }
}
