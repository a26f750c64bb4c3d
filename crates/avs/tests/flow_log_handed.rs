//! Flow logs that continue in another switch: each packet is in one record.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;

use bifrost_avs::{
    Direction, FlowEnd, FlowLogSpec, FlowRecord, PeerId, PortId, Switch, Tables, read_handed_flows, write_handed_flows,
};
use bifrost_nic::parse;
use common::any::SECOND;
use common::*;
use proptest::prelude::*;

const SYN: u8 = 0x02;
const SYN_ACK: u8 = 0x12;
const ACK: u8 = 0x10;
const FIN: u8 = 0x11;
const RST: u8 = 0x04;

fn spec(flows: u32) -> FlowLogSpec {
    FlowLogSpec {
        name: "".into(),
        ports: vec![PortId(0)],
        accepted: true,
        rejected: true,
        one_in: 1,
        flows,
        active_ns: 60 * SECOND,
        idle_ns: 15 * SECOND,
    }
}

fn build(flow_log: Option<FlowLogSpec>) -> Switch {
    let flow_logs = flow_log.into_iter().collect();
    let mut switch = Switch::build(&Tables { flow_logs, ..tables() }, 1).unwrap();
    switch.advance(at(0));
    switch
}

fn at(ms: u64) -> u64 {
    1000 * SECOND + ms * 1_000_000
}

/// A packet between guest 1 and vNIC 3 at peer 1, at this time in ms.
fn pass(switch: &mut Switch, ms: u64, direction: Direction, flags: u8, port: u16) {
    switch.advance(at(ms));
    let (mut ends, mut macs, mut ips) = ([port, 80], (mac(1), mac(3)), ("10.0.0.1", "10.0.0.3"));
    if direction == Direction::Ingress {
        ends.reverse();
        (macs, ips) = ((macs.1, macs.0), (ips.1, ips.0));
    }
    let mut body = [ends[0].to_be_bytes(), ends[1].to_be_bytes()].concat();
    body.extend([0, 0, 0, 7, 0, 0, 0, 9, 0x50, flags, 1, 0, 0, 0, 0, 0]);
    let frame = packet(macs, ips.0, ips.1, 64, 6, &body);
    match direction {
        Direction::Egress => {
            guest(switch, 0, &frame);
        }
        Direction::Ingress => {
            switch.from_underlay(vni(100), PeerId(1), &frame, &parse(&frame, frame.len()).unwrap());
        }
    }
}

/// `to` continues what `from` has logged.
fn hand_over(from: &Switch, to: &mut Switch, ms: u64) {
    let (flows, invalid) = read_handed_flows(&write_handed_flows(&from.handed_flows())).unwrap();
    assert_eq!((&flows, invalid), (&from.handed_flows(), 0));
    assert_eq!(to.continue_flows(&flows, at(ms)), 0);
}

fn taken(switch: &mut Switch, ms: u64) -> Vec<FlowRecord> {
    let mut records = Vec::new();
    switch.take_flow_records(1, at(ms), &mut records);
    records
}

const CONNECTION: [(u64, Direction, u8); 7] = [
    (0, Direction::Egress, SYN),
    (30, Direction::Ingress, SYN_ACK),
    (31, Direction::Egress, ACK),
    (40, Direction::Ingress, ACK),
    (900, Direction::Egress, FIN),
    (930, Direction::Ingress, FIN),
    (931, Direction::Egress, ACK),
];

#[test]
fn a_connection_has_the_record_that_it_would_have_in_one_switch() {
    let mut alone = build(Some(spec(64)));
    for (ms, direction, flags) in CONNECTION {
        pass(&mut alone, ms, direction, flags, 1000);
    }
    let expected = taken(&mut alone, 3000);
    assert_eq!((expected.len(), expected[0].handshake_ns), (1, Some(31_000_000)));
    for cut in 0..=CONNECTION.len() {
        let (mut old, mut new) = (build(Some(spec(64))), build(Some(spec(64))));
        for (n, (ms, direction, flags)) in CONNECTION.into_iter().enumerate() {
            if n == cut {
                hand_over(&old, &mut new, ms);
            }
            pass(if n < cut { &mut old } else { &mut new }, ms, direction, flags, 1000);
        }
        if cut == CONNECTION.len() {
            hand_over(&old, &mut new, 1000);
        }
        assert_eq!(taken(&mut new, 3000), expected, "after {cut} packets");
        assert_eq!(new.flow_log_counters().current_flows, 0);
    }
}

#[test]
fn packets_of_the_meantime_are_added() {
    let (mut old, mut new) = (build(Some(spec(64))), build(Some(spec(64))));
    for (ms, direction, flags) in &CONNECTION[..4] {
        pass(&mut old, *ms, *direction, *flags, 1000);
    }
    pass(&mut new, 500, Direction::Ingress, ACK, 1000);
    hand_over(&old, &mut new, 600);
    let [record] = &taken(&mut new, 61_000)[..] else { panic!() };
    assert_eq!((record.origin, record.end, record.handshake_ns), (Direction::Egress, FlowEnd::Idle, Some(31_000_000)));
    assert_eq!((record.sent.packets, record.received.packets, record.received.tcp_flags), (2, 3, 0x12));
    assert_eq!((record.start_ns, record.end_ns), (at(0), at(500)));
    // Another connection with the same ends has begun.
    let (mut old, mut new) = (build(Some(spec(64))), build(Some(spec(64))));
    for (ms, direction, flags) in CONNECTION {
        pass(&mut old, ms, direction, flags, 1000);
    }
    pass(&mut new, 950, Direction::Egress, SYN, 1000);
    hand_over(&old, &mut new, 1000);
    let records = taken(&mut new, 20_000);
    let ends: Vec<_> = records.iter().map(|record| (record.end, record.sent.packets)).collect();
    assert_eq!(ends, [(FlowEnd::Closed, 4), (FlowEnd::Idle, 1)]);
    assert_eq!(new.flow_log_counters().created_records, 2);
}

#[test]
fn what_has_no_place_becomes_a_record_at_once() {
    let mut old = build(Some(spec(64)));
    for port in 1..=3 {
        pass(&mut old, 0, Direction::Egress, SYN, port);
    }
    // A record waits: the same connection again.
    pass(&mut old, 1, Direction::Ingress, RST, 1);
    pass(&mut old, 2, Direction::Egress, SYN, 1);
    assert_eq!(old.handed_flows().len(), 4);
    let ended = |new: &mut Switch| {
        hand_over(&old, new, 10);
        let mut ends: Vec<_> = taken(new, 10).iter().map(|record| (record.local_port, record.end)).collect();
        ends.sort_by_key(|(port, end)| (*port, end.number()));
        assert_eq!(new.flow_log_counters().lost_records, 0);
        ends
    };
    // The table has less room, and another port is logged.
    let small = ended(&mut build(Some(spec(2))));
    assert_eq!((small.len(), small.iter().filter(|(_, end)| *end == FlowEnd::Forced).count()), (2, 1));
    let elsewhere = ended(&mut build(Some(FlowLogSpec { ports: vec![PortId(1)], ..spec(64) })));
    let forced = FlowEnd::Forced;
    assert_eq!(elsewhere, [(1, FlowEnd::Closed), (1, forced), (2, forced), (3, forced)]);
    assert_eq!(build(None).continue_flows(&old.handed_flows(), at(10)), 4);
    assert_eq!(build(None).handed_flows(), []);
}

#[test]
fn conversations_stay_in_their_logs() {
    let named = |names: &[&str]| {
        let of = |name: &&str| FlowLogSpec { name: (*name).into(), ..spec(64) };
        let tables = Tables { flow_logs: names.iter().map(of).collect(), ..tables() };
        let mut switch = Switch::build(&tables, 1).unwrap();
        switch.advance(at(0));
        switch
    };
    let long = "l".repeat(63);
    let (mut old, mut new) = (named(&["", "demo.a", &long, "gone"]), named(&[&long, "more", "demo.a", ""]));
    pass(&mut old, 0, Direction::Egress, ACK, 1000);
    pass(&mut new, 1, Direction::Egress, ACK, 1000);
    let bytes = write_handed_flows(&old.handed_flows());
    let (flows, invalid) = read_handed_flows(&bytes).unwrap();
    assert_eq!((flows.len(), invalid), (4, 0));
    assert_eq!(new.continue_flows(&flows, at(2)), 1, "that of a log which is gone");
    let packets: BTreeMap<String, u64> =
        taken(&mut new, 20_000).iter().map(|record| (record.log.to_string(), record.sent.packets)).collect();
    let expected = [("", 2), ("demo.a", 2), (&long, 2), ("more", 1)].map(|(log, count)| (log.to_owned(), count));
    assert_eq!(packets, expected.into());
}

#[test]
fn a_log_that_ends_gives_all_its_records() {
    let mut switch = build(Some(spec(64)));
    for port in 0..20 {
        pass(&mut switch, 0, Direction::Egress, SYN, 1000 + port);
        let mut some = Vec::new();
        switch.take_flow_records(8, at(0), &mut some);
        assert_eq!(some, []);
    }
    let mut records = Vec::new();
    switch.end_flow_logs(at(1), &mut records);
    assert_eq!(records.len(), 20);
    assert!(records.iter().all(|record| record.end == FlowEnd::Forced));
    assert_eq!(switch.flow_log_counters().current_flows, 0);
}

proptest! {
    /// Whatever is counted where and handed over when, the sums are those of all packets.
    #[test]
    fn no_packet_is_lost_or_counted_twice(
        packets in prop::collection::vec(
            (0u16..4, any::<bool>(), prop_oneof![Just(SYN), Just(ACK), Just(FIN), Just(RST)]), 1..80,
        ),
        cuts in prop::collection::vec((0usize..80, 0usize..5), 0..4),
    ) {
        let mut switches = vec![build(Some(spec(64)))];
        let mut waiting: Option<usize> = None;
        let mut records = Vec::new();
        let mut ms = 0;
        for (n, (port, out, flags)) in packets.iter().enumerate() {
            ms += 100;
            if let Some((_, late)) = cuts.iter().find(|(cut, _)| *cut == n).filter(|_| waiting.is_none()) {
                switches.push(build(Some(spec(64))));
                waiting = Some(*late);
            }
            waiting = match waiting {
                Some(0) => {
                    let [.., old, new] = &mut switches[..] else { unreachable!() };
                    hand_over(old, new, ms);
                    None
                }
                Some(late) => Some(late - 1),
                None => {
                    records.extend(taken(switches.last_mut().unwrap(), ms));
                    None
                }
            };
            let direction = if *out { Direction::Egress } else { Direction::Ingress };
            pass(switches.last_mut().unwrap(), ms, direction, *flags, *port);
        }
        if waiting.is_some() {
            let [.., old, new] = &mut switches[..] else { unreachable!() };
            hand_over(old, new, ms);
        }
        switches.last_mut().unwrap().end_flow_logs(at(ms), &mut records);
        let mut sums: BTreeMap<u16, (u64, u64)> = BTreeMap::new();
        for record in &records {
            let sum = sums.entry(record.local_port).or_default();
            *sum = (sum.0 + record.sent.packets, sum.1 + record.received.packets);
            prop_assert!(record.start_ns <= record.end_ns && record.end_ns <= at(ms));
        }
        let mut expected: BTreeMap<u16, (u64, u64)> = BTreeMap::new();
        for (port, out, _) in packets {
            let sum = expected.entry(port).or_default();
            *sum = (sum.0 + u64::from(out), sum.1 + u64::from(!out));
        }
        prop_assert_eq!(sums, expected);
    }

    #[test]
    fn damaged_flows_do_no_harm(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut old = build(Some(spec(64)));
        for port in 1..=3 {
            pass(&mut old, 0, Direction::Egress, SYN, port);
        }
        let mut bytes = write_handed_flows(&old.handed_flows());
        for (at, to) in &changes {
            // Also where few bytes are: in the conversations.
            let len = bytes.len();
            bytes[len - 1 - at.index(340)] = *to;
            bytes[at.index(len)] = *to;
        }
        let mut new = build(Some(spec(64)));
        if let Ok((flows, left_out)) = read_handed_flows(&bytes) {
            prop_assert!(flows.len() as u64 + left_out <= 1 << 16);
            for _ in 0..3 {
                new.continue_flows(&flows, at(10));
            }
            pass(&mut new, 20, Direction::Egress, ACK, 1);
            new.end_flow_logs(at(30), &mut Vec::new());
        }
        bytes.truncate(cut.index(bytes.len()));
        let _ = read_handed_flows(&bytes);
    }
}
