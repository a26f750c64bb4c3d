//! Rule logs: what accepted or rejected whom; one record per accepted connection, and counts for rejected packets.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use bifrost_avs::{
    AclRule, By, Check, Direction, DropReason, FlowLimits, GroupId, GroupRule, Pattern, PeerId, Permission, PortId,
    RuleLogSpec, RuleName, RuleOwner, RuleRecord, SecurityGroup, Switch, Tables,
};
use bifrost_nic::{Offload, parse};
use common::any::*;
use common::*;

const SPEC: RuleLogSpec = RuleLogSpec { records_per_s: 1000, interval_ns: 10 * SECOND };

fn to(protocol: u8, port: u16) -> Pattern {
    Pattern { protocol: Some(protocol), dst_ports: port..=port, ..Pattern::default() }
}

fn name(owner: RuleOwner, direction: Direction, number: u32) -> Option<Arc<RuleName>> {
    Some(Arc::new(RuleName { owner, direction, number }))
}

fn of_acl(direction: Direction, number: u32) -> Option<Arc<RuleName>> {
    name(RuleOwner::Acl(vni(100)), direction, number)
}

fn of_group(direction: Direction, number: u32) -> Option<Arc<RuleName>> {
    name(RuleOwner::Group("web".into()), direction, number)
}

/// Guest 1 accepts TCP ports 22 and 80, and logs the latter; its network denies UDP port 9 from guests, and logs
/// that.
fn logged() -> Tables {
    let mut tables = tables();
    let ingress = |port| GroupRule::new(Direction::Ingress, to(6, port));
    let web = GroupRule { log: of_group(Direction::Ingress, 2), ..ingress(80) };
    tables.groups = vec![SecurityGroup::new(vec![ingress(22), web])];
    tables.ports[0].groups = vec![GroupId(0)];
    let (direction, log) = (Direction::Egress, of_acl(Direction::Egress, 1));
    tables.vpcs[0].acl = vec![AclRule { direction, pattern: to(17, 9), allow: false, log }];
    tables.rule_log = Some(SPEC);
    tables.flows = FlowLimits { records: 64, vectors: true };
    tables
}

fn build(tables: &Tables) -> Switch {
    let mut switch = Switch::build(tables, 1).unwrap();
    switch.advance(1000 * SECOND);
    switch
}

fn taken(switch: &mut Switch, now_ns: u64) -> Vec<RuleRecord> {
    let mut records = Vec::new();
    switch.take_rule_records(1, now_ns, &mut records);
    records
}

fn receive(switch: &mut Switch, frame: &[u8]) -> Option<DropReason> {
    let parsed = parse(frame, frame.len()).unwrap();
    switch.from_underlay(vni(100), PeerId(1), frame, &parsed).drop_reason()
}

fn rejected_datagram(from_port: u16) -> Vec<u8> {
    udp((mac(1), mac(3)), "10.0.0.1", "10.0.0.3", (from_port, 9))
}

#[test]
fn an_accepted_connection_is_one_record_that_names_the_rule() {
    let mut switch = build(&logged());
    for flags in [SYN, 0x10, 0x10, 0x10] {
        assert_eq!(receive(&mut switch, &segment(3, 1, (5000, 80), flags, 0, true)), None);
    }
    // The rule for port 22 is not logged, and no rule allows port 23.
    assert_eq!(receive(&mut switch, &segment(3, 1, (5000, 22), SYN, 0, true)), None);
    assert!(receive(&mut switch, &segment(3, 1, (5000, 23), SYN, 0, true)).is_some());
    let records = taken(&mut switch, 1000 * SECOND);
    let [record] = &records[..] else { panic!("{records:?}") };
    assert_eq!(record.rule, of_group(Direction::Ingress, 2).unwrap());
    assert_eq!((record.port, record.vni, record.direction), (PortId(0), vni(100), Direction::Ingress));
    assert_eq!((record.accepted, record.packets, record.bytes), (true, 1, 40));
    assert_eq!((record.local, record.local_port), (ip("10.0.0.1"), 80));
    assert_eq!((record.remote, record.remote_port, record.protocol), (ip("10.0.0.3"), 5000, 6));
    assert_eq!((record.start_ns, record.end_ns), (1000 * SECOND, 1000 * SECOND));
    // After a reset another connection of the same ports begins.
    for flags in [0x04, SYN] {
        receive(&mut switch, &segment(3, 1, (5000, 80), flags, 0, true));
    }
    assert_eq!(taken(&mut switch, 1000 * SECOND).len(), 1);
    assert_eq!(switch.rule_log_counters().created_records, 2);
}

#[test]
fn rejected_packets_are_counted_and_recorded_at_once_and_at_intervals() {
    let mut switch = build(&logged());
    let mut told = Vec::new();
    for second in 1000..1025 {
        switch.advance(second * SECOND);
        for _ in 0..3 {
            assert_eq!(guest(&mut switch, 0, &rejected_datagram(7)).drop_reason(), Some(DropReason::Acl));
        }
        told.extend(taken(&mut switch, second * SECOND).into_iter().map(|r| (second, r.packets, r.accepted)));
    }
    assert_eq!(told, [(1000, 3, false), (1010, 30, false), (1020, 30, false)]);
    let rest = taken(&mut switch, 1100 * SECOND);
    assert_eq!((rest[0].packets, rest[0].start_ns, rest[0].end_ns), (12, 1021 * SECOND, 1024 * SECOND));
    assert_eq!(rest[0].rule, of_acl(Direction::Egress, 1).unwrap());
    assert_eq!(switch.rule_log_counters().created_records, 4);
}

#[test]
fn flows_accepted_by_an_acl_have_one_record() {
    let mut tables = logged();
    tables.vpcs[0].acl[0].allow = true;
    let mut switch = build(&tables);
    for _ in 0..5 {
        assert!(guest(&mut switch, 0, &rejected_datagram(7)).passes());
    }
    let records = taken(&mut switch, 1000 * SECOND);
    assert_eq!(records.iter().map(|r| (r.accepted, r.local_port)).collect::<Vec<_>>(), [(true, 7)]);
    switch.advance(1001 * SECOND);
    guest(&mut switch, 0, &rejected_datagram(7));
    assert_eq!(taken(&mut switch, 1001 * SECOND), []);
    // A verdict that was cached under rules without a log does not hide a rule with a log.
    tables.vpcs[0].acl[0].log = None;
    tables.rule_log = None;
    switch.replace(&tables).unwrap();
    guest(&mut switch, 0, &rejected_datagram(8));
    tables.vpcs[0].acl[0].log = of_acl(Direction::Egress, 7);
    tables.rule_log = Some(SPEC);
    switch.replace(&tables).unwrap();
    switch.advance(1002 * SECOND);
    guest(&mut switch, 0, &rejected_datagram(8));
    let numbers: Vec<_> = taken(&mut switch, 1002 * SECOND).iter().map(|r| r.rule.number).collect();
    assert_eq!(numbers, [7]);
}

#[test]
fn the_rate_of_records_is_bounded_per_port() {
    let mut tables = logged();
    tables.rule_log = Some(RuleLogSpec { records_per_s: 10, ..SPEC });
    let mut switch = build(&tables);
    for port in 1..=100 {
        guest(&mut switch, 0, &rejected_datagram(port));
    }
    guest(&mut switch, 1, &udp((mac(2), mac(3)), "10.0.0.2", "10.0.0.3", (1, 9)));
    let records = taken(&mut switch, 1000 * SECOND);
    assert_eq!(records.iter().filter(|r| r.port == PortId(0)).count(), 10);
    assert_eq!(records.iter().filter(|r| r.port == PortId(1)).count(), 1);
    let counters = switch.rule_log_counters();
    assert_eq!((counters.created_records, counters.suppressed_packets), (11, 90));
    // Also for many flows, however long the interval is.
    tables.rule_log = Some(RuleLogSpec { records_per_s: 1_000_000, interval_ns: u64::MAX });
    let mut switch = build(&tables);
    for port in 1..=3000 {
        guest(&mut switch, 0, &rejected_datagram(port));
    }
    assert_eq!(taken(&mut switch, 1000 * SECOND).len(), 1024);
    assert_eq!(switch.rule_log_counters().suppressed_packets, 3000 - 1024);
}

#[test]
fn a_log_that_ends_returns_its_records_and_keeps_its_counters() {
    let mut switch = build(&logged());
    guest(&mut switch, 0, &rejected_datagram(7));
    let off = Tables { rule_log: None, ..logged() };
    switch.replace(&off).unwrap();
    guest(&mut switch, 0, &rejected_datagram(8));
    let mut records = Vec::new();
    assert!(switch.take_rule_records(1, 1000 * SECOND, &mut records));
    assert_eq!(records.iter().map(|r| r.local_port).collect::<Vec<_>>(), [7]);
    assert_eq!(switch.rule_log_counters().created_records, 1);
    switch.replace(&logged()).unwrap();
    assert!(!switch.take_rule_records(1, 1000 * SECOND, &mut records));
    // Another vNIC gets the port's number.
    guest(&mut switch, 0, &rejected_datagram(9));
    let mut other = logged();
    other.ports[0].mac = mac(77);
    switch.replace(&other).unwrap();
    assert_eq!(taken(&mut switch, 1000 * SECOND).iter().map(|r| r.local_port).collect::<Vec<_>>(), [9]);
}

#[test]
fn the_workers_of_both_guests_log_their_own_rules() {
    let mut tables = logged();
    tables.workers = bifrost_avs::Workers { own: bifrost_avs::WorkerId(0), count: 2 };
    tables.ports[0].home = Some(bifrost_avs::WorkerId(1));
    let frame = segment(2, 1, (5000, 80), SYN, 0, true);
    let parsed = parse(&frame, frame.len()).unwrap();
    let mut sender = build(&tables);
    assert!(guest(&mut sender, 1, &frame).passes());
    assert_eq!(taken(&mut sender, 1000 * SECOND), []);
    tables.workers.own = bifrost_avs::WorkerId(1);
    let mut receiver = build(&tables);
    assert!(receiver.from_worker(PortId(1), PortId(0), &frame, &parsed).passes());
    assert_eq!(taken(&mut receiver, 1000 * SECOND)[0].rule.number, 2);
}

/// What a record is about. The ports are left out, because later fragments do not have them.
type Told = (PortId, Direction, String, bool, (String, u8));

/// The rule that a check refers to, found by a walk through the tables.
fn rule_of(tables: &Tables, check: &Check) -> Option<(Option<Arc<RuleName>>, bool)> {
    match check.by {
        By::Acl(Some(place)) => {
            let mut rules = tables.vpcs[0].acl.iter().filter(|rule| rule.direction == check.direction);
            Some((rules.nth(place)?.log.clone(), false))
        }
        By::Groups { permission: Permission::Rule(place), .. }
        | By::Error { known: false, permission: Permission::Rule(place) } => {
            let port = tables.ports.iter().find(|port| port.id == check.port)?;
            let rules = port.groups.iter().flat_map(|id| &tables.groups[usize::from(id.0)].rules);
            Some((rules.filter(|rule| rule.direction == check.direction).nth(place)?.log.clone(), true))
        }
        _ => None,
    }
}

#[test]
fn records_match_a_walk_through_the_rules_with_and_without_caches() {
    let mut seen = [0; 3];
    for seed in 0..if cfg!(miri) { 1 } else { 300 } {
        let mut rng = fastrand::Rng::with_seed(seed);
        let crowded = rng.bool();
        let mut tables = any_tables(&mut rng, crowded);
        let mut number = 0;
        let mut maybe = |owner, direction| {
            number += 1;
            if rng.bool() { name(owner, direction, number) } else { None }
        };
        for rule in &mut tables.vpcs[0].acl {
            rule.log = maybe(RuleOwner::Acl(vni(100)), rule.direction);
        }
        for (n, group) in tables.groups.iter_mut().enumerate() {
            group.rules.iter_mut().for_each(|rule| rule.log = maybe(RuleOwner::Group(n.to_string()), rule.direction));
        }
        tables.rule_log = Some(RuleLogSpec { records_per_s: 1_000_000, interval_ns: u64::MAX });
        tables.flows = FlowLimits { records: rng.u32(0..2) * 64, vectors: rng.bool() };
        let mut switch = Switch::build(&tables, seed).unwrap();
        let mut model: HashMap<Told, (u64, bool)> = HashMap::new();
        let mut now = 1000 * SECOND;
        for _ in 0..if cfg!(miri) { 20 } else { 100 } {
            now += u64::from(rng.u32(0..8)) * SECOND / 4;
            switch.advance(now);
            let n = rng.u8(0..4);
            let frame = any_frame(&mut rng, n + 1, crowded);
            let parsed = parse(&frame, frame.len()).unwrap();
            // Some packets come several times in a turn.
            for _ in 0..rng.u8(1..4) {
                let (port, peer) = (PortId(u32::from(n)), PeerId(u32::from(n.max(1) - 1)));
                let checks = if n < 2 {
                    let offload = Offload::default();
                    let checks = switch.trace_from_guest(port, &frame, frame.len(), offload, &parsed).checks;
                    switch.from_guest(port, &frame, frame.len(), offload, &parsed);
                    checks
                } else {
                    let checks = switch.trace_from_underlay(vni(100), peer, &frame, &parsed).checks;
                    switch.from_underlay(vni(100), peer, &frame, &parsed);
                    checks
                };
                for check in checks {
                    let rule = rule_of(&tables, &check);
                    let is_logged = rule
                        .as_ref()
                        .is_some_and(|(log, of_group)| log.is_some() && (check.result.is_ok() || !of_group));
                    assert_eq!(check.logged, is_logged, "seed {seed}: {check:?}");
                    if let Some((Some(log), of_group)) = rule.filter(|_| is_logged) {
                        let remote = if check.direction == Direction::Egress { parsed.dst_ip } else { parsed.src_ip }
                            .to_string();
                        let about = (remote, parsed.protocol);
                        let told = (check.port, check.direction, format!("{log:?}"), check.result.is_ok(), about);
                        let entry = model.entry(told).or_insert((0, of_group));
                        entry.0 += 1;
                    }
                }
            }
        }
        let mut records: HashMap<Told, u64> = HashMap::new();
        for r in taken(&mut switch, now) {
            assert!(r.start_ns <= r.end_ns && r.packets > 0);
            let about = (r.remote.to_string(), r.protocol);
            *records.entry((r.port, r.direction, format!("{:?}", r.rule), r.accepted, about)).or_default() += r.packets;
        }
        assert_eq!(records.len(), model.len(), "seed {seed}: {records:?} {model:?}");
        for (told, (packets, of_group)) in model {
            let logged = records[&told];
            let is_exact = of_group || !told.3;
            let ok = if is_exact { logged == packets } else { (1..=packets).contains(&logged) };
            assert!(ok, "seed {seed}: {told:?}: {logged} of {packets}");
            seen[if !told.3 { 0 } else { 1 + usize::from(of_group) }] += packets;
        }
        assert_eq!(switch.rule_log_counters().suppressed_packets, 0);
    }
    assert!(cfg!(miri) || seen.iter().all(|packets| *packets > 200), "{seen:?}");
}
