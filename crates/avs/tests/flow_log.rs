//! Flow logs, compared with a model: each packet is in one record; timeouts, limits, handshakes.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::HashMap;

use bifrost_avs::{
    Affinity, Backend, DropReason, FlowEnd, FlowLogSpec, FlowRecord, GATEWAY_MAC, GroupId, LoadBalancer, MAX_FLOW_LOGS,
    PeerId, PortId, SecurityGroup, Switch, Tables, Transport,
};
use bifrost_nic::parse;
use bifrost_wire::Mac;
use common::any::SECOND;
use common::*;

const SYN: u8 = 0x02;
const SYN_ACK: u8 = 0x12;
const ACK: u8 = 0x10;
const FIN: u8 = 0x11;
const RST: u8 = 0x04;

fn spec(ports: &[u32]) -> FlowLogSpec {
    FlowLogSpec {
        name: "".into(),
        ports: ports.iter().map(|port| PortId(*port)).collect(),
        accepted: true,
        rejected: true,
        one_in: 1,
        flows: 64,
        active_ns: 60 * SECOND,
        idle_ns: 15 * SECOND,
    }
}

fn logged(spec: FlowLogSpec) -> Tables {
    Tables { flow_logs: vec![spec], ..tables() }
}

fn build(tables: &Tables) -> Switch {
    let mut switch = Switch::build(tables, 1).unwrap();
    switch.advance(1000 * SECOND);
    switch
}

fn segment(macs: (Mac, Mac), from: (&str, u16), to: (&str, u16), flags: u8, payload: usize) -> Vec<u8> {
    let mut body = [&from.1.to_be_bytes()[..], &to.1.to_be_bytes()].concat();
    body.extend([0, 0, 0, 7, 0, 0, 0, 9, 0x50, flags, 1, 0, 0, 0, 0, 0]);
    body.resize(20 + payload, 0);
    packet(macs, from.0, to.0, 64, 6, &body)
}

fn taken(switch: &mut Switch, now_ns: u64) -> Vec<FlowRecord> {
    let mut records = Vec::new();
    switch.take_flow_records(1, now_ns, &mut records);
    records
}

/// A segment from guest 1 to vNIC 3 at peer 1.
fn outwards(flags: u8, port: u16) -> Vec<u8> {
    segment((mac(1), mac(3)), ("10.0.0.1", port), ("10.0.0.3", 80), flags, 0)
}

fn inwards(flags: u8, port: u16) -> Vec<u8> {
    segment((mac(3), mac(1)), ("10.0.0.3", 80), ("10.0.0.1", port), flags, 100)
}

fn receive(switch: &mut Switch, frame: &[u8]) {
    switch.from_underlay(vni(100), PeerId(1), frame, &parse(frame, frame.len()).unwrap());
}

#[test]
fn a_connection_is_one_record_from_its_beginning_to_its_end() {
    let mut switch = build(&logged(spec(&[0])));
    let at = |ms: u64| 1000 * SECOND + ms * 1_000_000;
    for (ms, is_sent, flags) in [
        (0, true, SYN),
        (30, false, SYN_ACK),
        (31, true, ACK),
        (40, false, ACK),
        (900, true, FIN),
        (930, false, FIN),
        (931, true, ACK),
    ] {
        switch.advance(at(ms));
        if is_sent {
            assert!(guest(&mut switch, 0, &outwards(flags, 1000)).passes());
        } else {
            receive(&mut switch, &inwards(flags, 1000));
        }
    }
    assert_eq!(taken(&mut switch, at(1000)), [], "late packets may come");
    let records = taken(&mut switch, at(2000));
    let [record] = &records[..] else { panic!("{records:?}") };
    assert_eq!((record.port, record.protocol, record.rejected, record.end), (PortId(0), 6, None, FlowEnd::Closed));
    assert_eq!((record.local, record.local_port), (ip("10.0.0.1"), 1000));
    assert_eq!((record.remote, record.remote_port), (ip("10.0.0.3"), 80));
    assert_eq!((record.sent.packets, record.sent.bytes, record.sent.tcp_flags), (4, 160, 0x13));
    assert_eq!((record.received.packets, record.received.bytes, record.received.tcp_flags), (3, 420, 0x13));
    assert_eq!((record.start_ns, record.end_ns), (at(0), at(931)));
    assert_eq!(record.handshake_ns, Some(31_000_000));
    assert_eq!(switch.flow_log_counters().current_flows, 0);
}

#[test]
fn a_repeated_syn_says_nothing_about_the_round_trip() {
    let mut switch = build(&logged(spec(&[0])));
    for flags in [SYN, SYN] {
        guest(&mut switch, 0, &outwards(flags, 1000));
    }
    receive(&mut switch, &inwards(SYN_ACK, 1000));
    guest(&mut switch, 0, &outwards(ACK, 1000));
    receive(&mut switch, &inwards(RST, 1000));
    assert_eq!(taken(&mut switch, 1010 * SECOND)[0].handshake_ns, None);
}

#[test]
fn long_conversations_have_interim_records_and_idle_ones_end() {
    let mut switch = build(&logged(spec(&[0])));
    let mut ends = Vec::new();
    let mut bytes = 0;
    for second in 1000..1200 {
        switch.advance(second * SECOND);
        if second < 1130 {
            guest(&mut switch, 0, &outwards(ACK, 1000));
        }
        for record in taken(&mut switch, second * SECOND) {
            bytes += record.sent.bytes;
            ends.push((second, record.end));
        }
    }
    assert_eq!(ends, [(1060, FlowEnd::Active), (1121, FlowEnd::Active), (1144, FlowEnd::Idle)]);
    assert_eq!(bytes, 130 * 40);
}

#[test]
fn another_connection_with_the_same_key_has_its_own_record() {
    let mut switch = build(&logged(spec(&[0])));
    for flags in [SYN, RST, SYN, RST] {
        guest(&mut switch, 0, &outwards(flags, 1000));
    }
    let records = taken(&mut switch, 1002 * SECOND);
    assert_eq!(records.iter().map(|r| r.sent.packets).collect::<Vec<_>>(), [2, 2]);
}

#[test]
fn dropped_packets_are_logged_as_rejected_at_both_ends() {
    let mut tables = logged(spec(&[0, 1]));
    tables.groups = vec![SecurityGroup::default()];
    tables.ports[1].groups = vec![GroupId(0)];
    let mut switch = build(&tables);
    let frame = segment((mac(1), mac(2)), ("10.0.0.1", 7), ("10.0.0.2", 80), SYN, 0);
    assert_eq!(guest(&mut switch, 0, &frame).drop_reason(), Some(DropReason::GroupIngress));
    // From another host to the same port.
    let frame = segment((mac(3), mac(2)), ("10.0.0.3", 7), ("10.0.0.2", 80), SYN, 0);
    receive(&mut switch, &frame);
    let mut records = taken(&mut switch, 1020 * SECOND);
    records.sort_by_key(|r| (r.port, r.remote));
    let seen: Vec<_> = records.iter().map(|r| (r.port.0, r.sent.packets, r.received.packets, r.rejected)).collect();
    let rejected = Some(DropReason::GroupIngress);
    assert_eq!(seen, [(0, 1, 0, rejected), (1, 0, 1, rejected), (1, 0, 1, rejected)]);
    // Only accepted conversations are logged.
    tables.flow_logs = vec![FlowLogSpec { rejected: false, ..spec(&[0, 1]) }];
    let mut switch = build(&tables);
    receive(&mut switch, &frame);
    assert_eq!(taken(&mut switch, 1020 * SECOND), []);
}

#[test]
fn a_balanced_connection_has_one_record_for_both_directions() {
    let mut tables = logged(spec(&[0]));
    let backend = Backend { address: ip("10.0.0.3"), port: 80, weight: 1 };
    tables.load_balancers = vec![LoadBalancer {
        vni: vni(100),
        address: ip("10.0.0.100"),
        port: 8080,
        protocol: Transport::Tcp,
        affinity: Affinity::Connection,
        backends: vec![backend],
    }];
    let mut switch = build(&tables);
    for n in 0..3 {
        switch.advance((1000 + n) * SECOND);
        let flags = if n == 0 { SYN } else { ACK };
        let frame = segment((mac(1), GATEWAY_MAC), ("10.0.0.1", 1000), ("10.0.0.100", 8080), flags, 0);
        assert!(guest(&mut switch, 0, &frame).passes());
        receive(&mut switch, &inwards(if n == 0 { SYN_ACK } else { ACK }, 1000));
    }
    let records = taken(&mut switch, 1100 * SECOND);
    let [record] = &records[..] else { panic!("{records:?}") };
    assert_eq!((record.remote, record.remote_port), (ip("10.0.0.100"), 8080));
    assert_eq!((record.sent.packets, record.received.packets), (3, 3));
}

#[test]
fn conversations_without_room_are_counted_and_others_stay() {
    let mut switch = build(&logged(spec(&[0, 1])));
    for port in 0..100 {
        guest(&mut switch, 0, &outwards(ACK, 1000 + port));
    }
    let counters = switch.flow_log_counters();
    assert_eq!((counters.current_flows, counters.unlogged_packets), (16, 84), "a quarter of 64");
    guest(&mut switch, 1, &segment((mac(2), mac(3)), ("10.0.0.2", 1), ("10.0.0.3", 80), ACK, 0));
    assert_eq!(switch.flow_log_counters().current_flows, 17);
    assert_eq!(taken(&mut switch, 1015 * SECOND).len(), 17);
    assert_eq!(switch.flow_log_counters().current_flows, 0);
    // Connections with the same key that end faster than their records are taken.
    for _ in 0..5000 {
        guest(&mut switch, 0, &outwards(SYN, 1000));
        guest(&mut switch, 0, &outwards(RST, 1000));
    }
    let counters = switch.flow_log_counters();
    assert_eq!((counters.created_records, counters.lost_records), (17 + 4999, 4999 - 4096));
}

#[test]
fn a_disabled_log_still_returns_its_records() {
    let mut switch = build(&logged(spec(&[0])));
    guest(&mut switch, 0, &outwards(ACK, 1000));
    switch.replace(&tables()).unwrap();
    guest(&mut switch, 0, &outwards(ACK, 1001));
    let mut records = Vec::new();
    assert!(switch.take_flow_records(1, 1000 * SECOND, &mut records), "nothing is left");
    assert_eq!(records.iter().map(|r| (r.local_port, r.end)).collect::<Vec<_>>(), [(1000, FlowEnd::Forced)]);
    switch.replace(&logged(spec(&[0]))).unwrap();
    assert!(!switch.take_flow_records(1, 1000 * SECOND, &mut records));
    assert_eq!(switch.flow_log_counters().created_records, 1, "counters go on");
}

/// The logs of `records`, with the guest's port of each.
fn logs_of(records: &[FlowRecord]) -> Vec<(&str, u16, FlowEnd)> {
    let mut all: Vec<_> = records.iter().map(|record| (&*record.log, record.local_port, record.end)).collect();
    all.sort_by_key(|(log, port, _)| (*log, *port));
    all
}

#[test]
fn each_log_has_ports_and_records_of_its_own() {
    let log = |name: &str, ports: &[u32]| FlowLogSpec { name: name.into(), ..spec(ports) };
    let of = |flow_logs: Vec<FlowLogSpec>| Tables { flow_logs, ..tables() };
    let rejected = FlowLogSpec { accepted: false, ..log("rejected", &[0]) };
    let short = FlowLogSpec { idle_ns: SECOND, ..log("short", &[0]) };
    let mut switch = build(&of(vec![rejected.clone(), short.clone(), log("all", &[0, 1]), log("other", &[1])]));
    guest(&mut switch, 0, &outwards(ACK, 1000));
    // Guest 1 sends it as well, which is spoofing.
    guest(&mut switch, 1, &outwards(ACK, 2000));
    assert_eq!(switch.flow_log_counters().current_flows, 4);
    let records = taken(&mut switch, 1002 * SECOND);
    assert_eq!(logs_of(&records), [("short", 1000, FlowEnd::Idle)]);
    // One is added in front of the others, one removed, and one changed: the others' open records stay.
    let changed = FlowLogSpec { active_ns: 30 * SECOND, ..log("all", &[0, 1]) };
    switch.replace(&of(vec![log("new", &[0]), changed.clone(), short.clone(), rejected.clone()])).unwrap();
    assert_eq!(logs_of(&taken(&mut switch, 1002 * SECOND)), [("other", 2000, FlowEnd::Forced)]);
    assert_eq!(switch.flow_logs().map(|name| &**name).collect::<Vec<_>>(), ["new", "all", "short", "rejected"]);
    guest(&mut switch, 0, &outwards(ACK, 1000));
    let records = taken(&mut switch, 1040 * SECOND);
    let expected = [("all", 1000, FlowEnd::Idle), ("all", 2000, FlowEnd::Idle), ("new", 1000, FlowEnd::Idle)];
    assert_eq!(logs_of(&records), [&expected[..], &[("short", 1000, FlowEnd::Idle)]].concat());
    let packets = |log: &str| records.iter().filter(|r| &*r.log == log).map(|r| r.sent.packets).sum::<u64>();
    assert_eq!((packets("all"), packets("new"), packets("short")), (3, 1, 1), "no packet is lost or counted twice");
    // A log without ports stays; one that ends while it waits to be taken does not take its successors' ports.
    switch.replace(&of(vec![log("empty", &[]), log("last", &[0])])).unwrap();
    guest(&mut switch, 0, &outwards(ACK, 1001));
    assert!(!switch.take_flow_records(1, 1000 * SECOND, &mut Vec::new()));
    guest(&mut switch, 0, &outwards(ACK, 1001));
    let mut records = Vec::new();
    switch.end_flow_logs(1041 * SECOND, &mut records);
    assert_eq!(logs_of(&records), [("last", 1001, FlowEnd::Forced)]);
    assert_eq!(records[0].sent.packets, 2);
    assert_eq!(switch.flow_log_counters().current_flows, 0);
}

#[test]
fn more_logs_than_there_may_be_are_ignored() {
    let many = (0..MAX_FLOW_LOGS + 3).map(|n| FlowLogSpec { name: format!("{n:02}").into(), ..spec(&[0]) });
    let mut switch = build(&Tables { flow_logs: many.collect(), ..tables() });
    guest(&mut switch, 0, &outwards(ACK, 1000));
    let records = taken(&mut switch, 1060 * SECOND);
    assert_eq!(records.len(), MAX_FLOW_LOGS);
    assert!(records.iter().all(|record| record.sent.packets == 1 && &*record.log < "64"));
}

#[test]
fn a_port_that_moves_to_another_network_starts_new_records() {
    let mut switch = build(&logged(spec(&[5])));
    let frame = segment((mac(1), mac(3)), ("10.0.0.1", 1000), ("10.0.0.3", 80), ACK, 0);
    assert!(guest(&mut switch, 5, &frame).passes());
    let mut tables = logged(spec(&[5]));
    tables.ports.swap_remove(0);
    tables.ports.iter_mut().filter(|port| port.id == PortId(5)).for_each(|port| port.vni = vni(100));
    switch.replace(&tables).unwrap();
    assert!(guest(&mut switch, 5, &frame).passes());
    let mut networks: Vec<_> =
        taken(&mut switch, 1020 * SECOND).iter().map(|r| (r.vni.get(), r.sent.packets)).collect();
    networks.sort_unstable();
    assert_eq!(networks, [(100, 1), (200, 1)]);
}

#[test]
fn every_packet_is_in_one_record_as_in_a_model() {
    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..20 {
        let mut switch = build(&logged(FlowLogSpec { flows: 1000, ..spec(&[0, 1]) }));
        let mut model: HashMap<(u32, u16, Option<DropReason>), (u64, u64)> = HashMap::new();
        let mut seen = HashMap::new();
        let mut now = 1000 * SECOND;
        let add = |seen: &mut HashMap<_, (u64, u64)>, records: Vec<FlowRecord>| {
            for r in records {
                assert!(r.start_ns <= r.end_ns && r.sent.packets + r.received.packets > 0);
                let name = (r.port.0, if r.remote_port == 80 { r.local_port } else { r.remote_port }, r.rejected);
                let sum = seen.entry(name).or_insert((0, 0));
                sum.0 += r.sent.packets;
                sum.1 += r.received.packets;
            }
        };
        for _ in 0..1000 {
            now += rng.u64(0..SECOND);
            switch.advance(now);
            let port = rng.u16(1000..1010);
            let flags = *rng.choice(&[SYN, ACK, ACK, FIN, RST]).unwrap();
            match rng.u8(0..4) {
                0 => {
                    guest(&mut switch, 0, &outwards(flags, port));
                    model.entry((0, port, None)).or_default().0 += 1;
                }
                1 => {
                    receive(&mut switch, &inwards(flags, port));
                    model.entry((0, port, None)).or_default().1 += 1;
                }
                2 => {
                    // To the other guest of this host: both ports log it.
                    let frame = segment((mac(1), mac(2)), ("10.0.0.1", port + 100), ("10.0.0.2", 80), flags, 9);
                    guest(&mut switch, 0, &frame);
                    model.entry((0, port + 100, None)).or_default().0 += 1;
                    model.entry((1, port + 100, None)).or_default().1 += 1;
                }
                _ => {
                    let frame = segment((mac(1), mac(3)), ("10.0.0.9", port), ("10.0.0.3", 80), flags, 0);
                    let reason = guest(&mut switch, 0, &frame).drop_reason();
                    assert!(reason.is_some());
                    model.entry((0, port, reason)).or_default().0 += 1;
                }
            }
            if rng.u8(0..10) == 0 {
                let records = taken(&mut switch, now);
                add(&mut seen, records);
            }
        }
        for _ in 0..3 {
            now += 100 * SECOND;
            let records = taken(&mut switch, now);
            add(&mut seen, records);
        }
        assert_eq!(seen, model);
        let counters = switch.flow_log_counters();
        assert_eq!((counters.current_flows, counters.lost_records, counters.unlogged_packets), (0, 0, 0));
    }
}

#[test]
fn of_sampled_conversations_both_directions_are_logged_and_of_others_none() {
    let sampled = FlowLogSpec { one_in: 4, flows: 1 << 16, ..spec(&[0]) };
    let mut switch = build(&logged(sampled));
    for port in 1000..3000 {
        assert!(guest(&mut switch, 0, &outwards(SYN, port)).passes());
        receive(&mut switch, &inwards(SYN_ACK, port));
        receive(&mut switch, &inwards(RST, port));
    }
    let records = taken(&mut switch, 1010 * SECOND);
    assert!((400..600).contains(&records.len()), "{}", records.len());
    assert!(records.iter().all(|record| (record.sent.packets, record.received.packets) == (1, 2)));
    let counters = switch.flow_log_counters();
    assert_eq!(counters.unsampled_packets, 3 * (2000 - records.len() as u64));
    assert_eq!((counters.unlogged_packets, counters.current_flows), (0, 0));
    // The other end of a conversation logs the same ones: here a guest of this host.
    let logged_at = |port: u32| {
        let mut switch = build(&logged(FlowLogSpec { one_in: 4, ..spec(&[port]) }));
        for at in 1000..1100 {
            guest(&mut switch, 0, &segment((mac(1), mac(2)), ("10.0.0.1", at), ("10.0.0.2", 80), RST, 0));
        }
        let records = taken(&mut switch, 1010 * SECOND);
        let port = |record: &FlowRecord| record.local_port.max(record.remote_port);
        let mut ports: Vec<u16> = records.iter().map(port).collect();
        ports.sort_unstable();
        ports
    };
    let of_sender = logged_at(0);
    assert!(of_sender.len() > 10, "{of_sender:?}");
    assert_eq!(of_sender, logged_at(1));
}
