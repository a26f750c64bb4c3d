//! The switch with arbitrary frames from guests and peers: nobody can send as somebody else.

use std::net::IpAddr;

use bifrost_avs::{Action, Direction, GATEWAY_MAC, METADATA, PeerId, Port, PortId, RuleOwner, Switch, Tables, Verdict};
use bifrost_nic::{L3, Offload, Parsed, parse};
use bifrost_wire::{Mac, Vni};

use super::frame::frame;
use super::tables::{mac, tables, vni};
use super::{cutting, dhcp, dns, outside, router};
use crate::Input;

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
    assert!(before.current_flows <= 14 && after.current_flows <= before.current_flows, "more flows than allowed");
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
        Action::Ask { .. } => panic!("no routes are learned"),
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
        Action::Forward { .. } | Action::Copy | Action::Host | Action::Ask { .. } => {
            panic!("a peer's frame goes to other vNICs")
        }
        Action::Drop(_) => {}
    }
}
