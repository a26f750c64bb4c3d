//! A switch with caches decides like one that evaluates its tables for every packet.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use bifrost_avs::{
    Action, Direction, FlowLimits, GATEWAY_MAC, GroupId, GroupRule, GuestTrace, Pattern, PeerId, PortId, SecurityGroup,
    SessionLimits, Switch, Tables, UnderlayTrace, Verdict,
};
use bifrost_nic::{L3, Offload, Segment, SegmentKind, parse};
use common::any::*;
use common::*;

const ETHERNET: usize = 14;
const ACK: u8 = 0x10;

/// A frame and its sender: guests 1 and 2 are on this host, 3 and 4 at peers 1 and 2.
struct Sent {
    from: u8,
    frame: Vec<u8>,
    offload: Offload,
}

impl Sent {
    fn any(rng: &mut fastrand::Rng, crowded: bool) -> Sent {
        let from = rng.u8(1..=4);
        let frame = match rng.u8(0..8) {
            0 => udp(
                (mac(from), mac(rng.u8(1..4))),
                &format!("fd00::{from}"),
                &format!("fd00::{}", rng.u8(1..4)),
                (1, 2),
            ),
            _ => any_frame(rng, from, crowded),
        };
        Sent { from, frame, offload: Offload::default() }
    }

    /// Changes it into another packet, usually of the same flow.
    fn vary(&mut self, rng: &mut fastrand::Rng) {
        let parsed = parse(&self.frame, self.frame.len()).unwrap();
        if parsed.tcp.is_some() {
            let flags = [ACK, ACK, ACK, ACK, ACK, ACK, ACK | 8, ACK | 1, 4, SYN, SYN | ACK];
            self.frame[usize::from(parsed.l4) + 13] = *rng.choice(&flags).unwrap();
            if parsed.kind == L3::V4 {
                // Larger or smaller than the previous one.
                let end = usize::from(parsed.payload) + *rng.choice(&[0, 0, 1000]).unwrap();
                self.frame.resize(end, 0);
                self.frame[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&((end - ETHERNET) as u16).to_be_bytes());
            }
            let segment = Segment { mss: *rng.choice(&[100, 700]).unwrap(), kind: SegmentKind::TcpV4 };
            let large = self.frame.len() > 500 && rng.u8(0..4) == 0;
            self.offload.segment = large.then_some(segment);
        }
        if parsed.kind == L3::V4 {
            self.frame[ETHERNET + 8] = *rng.choice(&[64, 64, 64, 64, 64, 64, 2, 1]).unwrap();
        }
    }

    fn to(&self, switch: &mut Switch) -> Decided {
        let Sent { from, ref frame, offload } = *self;
        let parsed = parse(frame, frame.len()).unwrap();
        if from < 3 {
            let verdict = *switch.from_guest(PortId(u32::from(from - 1)), frame, frame.len(), offload, &parsed);
            let answer = matches!(verdict.action, Action::Answer { .. }).then(|| switch.answer().to_vec());
            Decided(verdict, answer)
        } else {
            let verdict = *switch.from_underlay(vni(100), PeerId(u32::from(from - 2)), frame, &parsed);
            let answer = matches!(verdict.action, Action::Answer { .. }).then(|| switch.answer().to_vec());
            Decided(verdict, answer)
        }
    }

    /// Its trace: the checks, and the state of the sessions.
    fn trace(&self, switch: &Switch) -> Traced {
        let Sent { from, ref frame, offload } = *self;
        let parsed = parse(frame, frame.len()).unwrap();
        if from < 3 {
            let port = PortId(u32::from(from - 1));
            Traced::Guest(switch.trace_from_guest(port, frame, frame.len(), offload, &parsed))
        } else {
            Traced::Underlay(switch.trace_from_underlay(vni(100), PeerId(u32::from(from - 2)), frame, &parsed))
        }
    }
}

/// The verdict on a packet, and the switch's reply.
#[derive(Debug, PartialEq)]
struct Decided(Verdict, Option<Vec<u8>>);

#[derive(Debug, PartialEq)]
enum Traced {
    Guest(GuestTrace),
    Underlay(UnderlayTrace),
}

#[track_caller]
fn assert_same_counters(a: &Switch, b: &Switch, at: (u64, u32)) {
    assert!(
        a.counters().eq(b.counters()),
        "{at:?}: {:?} {:?}",
        a.counters().collect::<Vec<_>>(),
        b.counters().collect::<Vec<_>>()
    );
    assert_eq!(a.underlay_counters(), b.underlay_counters(), "{at:?}");
    assert_eq!(a.session_counters(), b.session_counters(), "{at:?}");
}

fn with(tables: &Tables, flows: FlowLimits) -> Tables {
    Tables { flows, ..tables.clone() }
}

/// A switch without caches.
const FORGETFUL: FlowLimits = FlowLimits { records: 0, vectors: false };

/// With few sessions or many, with rules or without.
fn any_world(rng: &mut fastrand::Rng, crowded: bool) -> Tables {
    let mut tables = any_tables(rng, crowded);
    let most = *rng.choice(&[5, 100, 100]).unwrap();
    tables.sessions = SessionLimits { total: most, per_port: most };
    tables
}

#[test]
fn caching_changes_no_decision() {
    let (mut found, mut followed, mut made, mut packets) = (0, 0, 0, 0);
    for seed in 0..if cfg!(miri) { 1 } else { 200 } {
        let mut rng = fastrand::Rng::with_seed(seed);
        let crowded = rng.u8(0..4) > 0;
        let flows = FlowLimits { records: *rng.choice(&[0, 4, 8, 64, 64]).unwrap(), vectors: rng.u8(0..4) > 0 };
        let mut tables = any_world(&mut rng, crowded);
        let mut slow = Switch::build(&with(&tables, FORGETFUL), seed).unwrap();
        let mut quick = Switch::build(&with(&tables, flows), seed).unwrap();
        let mut sent: Vec<Sent> = (0..6).map(|_| Sent::any(&mut rng, crowded)).collect();
        let mut now = 1000 * SECOND;
        for step in 0..if cfg!(miri) { 100 } else { 300 } {
            let at = (seed, step);
            // Some packets come in the same turn. Occasionally the next one comes so late that sessions have expired.
            if rng.u8(0..8) == 0 {
                now += match rng.u8(0..25) {
                    0 => 8000 * SECOND,
                    1 => 250 * SECOND,
                    n => u64::from(n) * SECOND / 10,
                };
                slow.advance(now);
                quick.advance(now);
            }
            match rng.u8(0..100) {
                0 => tables = any_world(&mut rng, crowded),
                1 => sent[rng.usize(0..6)] = Sent::any(&mut rng, crowded),
                _ => {}
            }
            if rng.u8(0..100) == 0 {
                slow.replace(&with(&tables, FORGETFUL)).unwrap();
                quick.replace(&with(&tables, flows)).unwrap();
            }
            let sent = &mut sent[rng.usize(0..6)];
            sent.vary(&mut rng);
            let before = *quick.flow_counters();
            assert_eq!(sent.trace(&quick), sent.trace(&slow), "{at:?}");
            assert_eq!(quick.flow_counters(), &before, "a trace creates no records, {at:?}");
            assert_eq!(sent.to(&mut quick), sent.to(&mut slow), "{at:?}");
            assert_same_counters(&quick, &slow, at);
            packets += 1;
        }
        let of_slow = slow.flow_counters();
        assert_eq!((of_slow.found_packets, of_slow.batched_packets, of_slow.created_records), (0, 0, 0));
        found += quick.flow_counters().found_packets;
        followed += quick.flow_counters().batched_packets;
        made += quick.flow_counters().created_records;
    }
    // The random worlds must use the caches often enough to test them.
    let shown = format!("{found} found, {followed} followed, {made} made of {packets}");
    assert!(found > packets / 50 && followed > packets / 20 && made > packets / 100, "{shown}");
}

/// Both guests on this host have a group that allows all conversations in both directions.
fn open() -> Tables {
    let mut tables = tables();
    let rule = |direction| GroupRule::new(direction, Pattern::default());
    tables.groups = vec![SecurityGroup::new(vec![rule(Direction::Egress), rule(Direction::Ingress)])];
    tables.ports.iter_mut().for_each(|port| port.groups = vec![GroupId(0)]);
    tables
}

/// Whether a packet in a turn of its own has a flow record.
fn found(switch: &mut Switch, sent: &Sent) -> bool {
    switch.advance(0);
    let before = switch.flow_counters().found_packets;
    sent.to(switch);
    switch.flow_counters().found_packets > before
}

/// Whether a packet uses a note.
fn followed(switch: &mut Switch, sent: &Sent) -> bool {
    let before = switch.flow_counters().batched_packets;
    sent.to(switch);
    switch.flow_counters().batched_packets > before
}

fn plain(from: u8, frame: Vec<u8>) -> Sent {
    Sent { from, frame, offload: Offload::default() }
}

#[test]
fn ordinary_flows_have_records_from_their_second_packet_on() {
    let mut switch = Switch::build(&open(), 1).unwrap();
    switch.advance(1000 * SECOND);
    let (here, there) = ((mac(1), mac(3)), (mac(3), mac(1)));
    let cases = [
        ("a datagram", plain(1, udp(here, "10.0.0.1", "10.0.0.3", (7, 9))), [false, false, true, true]),
        ("its answer", plain(3, udp(there, "10.0.0.3", "10.0.0.1", (9, 7))), [false, true, true, true]),
        ("of IPv6", plain(1, udp(here, "fd00::1", "fd00::3", (7, 9))), [false, false, true, true]),
        ("to a neighbour", plain(1, udp((mac(1), mac(2)), "10.0.0.1", "10.0.0.2", (7, 9))), [false, false, true, true]),
        ("routed", plain(1, udp((mac(1), GATEWAY_MAC), "10.0.0.1", "10.1.0.9", (7, 9))), [false, false, true, true]),
        ("a SYN", plain(1, segment(1, 3, (1, 2), SYN, 0, true)), [false; 4]),
        ("what follows it", plain(1, segment(1, 3, (1, 2), ACK, 0, true)), [false, true, true, true]),
        ("a ping", plain(1, ping(here, "10.0.0.1", "10.0.0.3", b"there?")), [false; 4]),
        ("to the gateway itself", plain(1, udp((mac(1), GATEWAY_MAC), "10.0.0.1", "10.0.0.254", (7, 9))), [false; 4]),
    ];
    for (name, sent, expected) in cases {
        assert_eq!([(); 4].map(|()| found(&mut switch, &sent)), expected, "{name}");
    }
    // After a change of the configuration, even to the same one, everything is evaluated once more.
    let sent = plain(1, udp(here, "10.0.0.1", "10.0.0.3", (7, 9)));
    switch.replace(&open()).unwrap();
    assert_eq!([(); 3].map(|()| found(&mut switch, &sent)), [false, true, true]);
    // The same after a session has expired: a new session with the same key does not revive the record.
    switch.advance(2000 * SECOND);
    assert_eq!([(); 3].map(|()| found(&mut switch, &sent)), [false, false, true]);
}

#[test]
fn networks_without_rules_have_no_records() {
    let mut switch = switch();
    let sent = plain(1, udp((mac(1), mac(3)), "10.0.0.1", "10.0.0.3", (7, 9)));
    assert_eq!([(); 3].map(|()| found(&mut switch, &sent)), [false; 3]);
    assert_eq!(switch.flow_counters().created_records, 0);
}

#[test]
fn packets_of_a_flow_in_one_turn_are_looked_up_once() {
    let (here, there) = ((mac(1), mac(3)), (mac(3), mac(1)));
    let tcp = |flags| plain(1, segment(1, 3, (1, 2), flags, 0, true));
    let mut segments = tcp(ACK);
    segments.frame.resize(2000, 0);
    segments.frame[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&1986u16.to_be_bytes());
    let cases = [
        ("datagrams", plain(1, udp(here, "10.0.0.1", "10.0.0.3", (7, 9))), true),
        ("datagrams from a peer", plain(3, udp(there, "10.0.0.3", "10.0.0.1", (9, 7))), true),
        ("of IPv6", plain(1, udp(here, "fd00::1", "fd00::3", (7, 9))), true),
        ("to a neighbour", plain(1, udp((mac(1), mac(2)), "10.0.0.1", "10.0.0.2", (7, 9))), true),
        ("routed", plain(1, udp((mac(1), GATEWAY_MAC), "10.0.0.1", "10.1.0.9", (7, 9))), true),
        ("segments", tcp(ACK), true),
        ("SYNs", tcp(SYN), false),
        ("FINs", tcp(ACK | 1), false),
        ("RSTs", tcp(4), false),
        ("pings", plain(1, ping(here, "10.0.0.1", "10.0.0.3", b"there?")), false),
        ("to the gateway itself", plain(1, udp((mac(1), GATEWAY_MAC), "10.0.0.1", "10.0.0.254", (7, 9))), false),
        ("to nobody", plain(1, udp((mac(1), mac(9)), "10.0.0.1", "10.0.0.9", (7, 9))), false),
        ("what is cut", segments, false),
    ];
    for (name, sent, expected) in cases {
        for tables in [tables(), open()] {
            let mut switch = Switch::build(&tables, 1).unwrap();
            // The conversation has begun.
            switch.advance(1000 * SECOND);
            sent.to(&mut switch);
            switch.advance(1001 * SECOND);
            let is_followed = [(); 3].map(|()| followed(&mut switch, &sent));
            assert_eq!(is_followed, [false, expected, expected], "{name}");
            switch.advance(1002 * SECOND);
            assert!(!followed(&mut switch, &sent), "{name}: later");
        }
    }
}

#[test]
fn notes_are_invalid_after_a_change() {
    let first = plain(1, udp((mac(1), mac(3)), "10.0.0.1", "10.0.0.3", (7, 9)));
    let other = plain(1, udp((mac(1), mac(3)), "10.0.0.1", "10.0.0.3", (8, 9)));
    let mut larger = plain(1, udp((mac(1), mac(3)), "10.0.0.1", "10.0.0.3", (7, 9)));
    larger.frame.resize(larger.frame.len() + 1, 0);
    let mut dying = plain(1, udp((mac(1), GATEWAY_MAC), "10.0.0.1", "10.1.0.9", (7, 9)));
    dying.frame[ETHERNET + 8] = 1;
    let routed = plain(1, udp((mac(1), GATEWAY_MAC), "10.0.0.1", "10.1.0.9", (7, 9)));
    let mut switch = Switch::build(&open(), 1).unwrap();
    let mut begin = |sent: &Sent| {
        switch.advance(1000 * SECOND);
        (0..3).for_each(|_| drop(sent.to(&mut switch)));
        assert!(followed(&mut switch, sent));
    };
    begin(&first);
    assert!(!followed(&mut switch, &larger), "larger");
    let mut begin = |sent: &Sent| (0..3).for_each(|_| drop(sent.to(&mut switch)));
    begin(&routed);
    assert!(!followed(&mut switch, &dying), "its TTL expires");
    assert!(followed(&mut switch, &routed));
    assert!(!followed(&mut switch, &other), "a conversation begins");
    assert!(!followed(&mut switch, &routed), "after that");
    assert!(followed(&mut switch, &routed));
    switch.replace(&open()).unwrap();
    assert!(!followed(&mut switch, &routed), "another configuration");
    switch.replace(&with(&open(), FORGETFUL)).unwrap();
    assert!(!(0..3).any(|_| followed(&mut switch, &routed)), "vectors are off");
}

#[test]
#[cfg_attr(miri, ignore = "thousands of flows")]
fn prefetching_changes_nothing() {
    let [mut ahead, mut behind] = [(); 2].map(|()| Switch::build(&open(), 1).unwrap());
    let flows: Vec<Sent> = (0..70_000u32)
        .map(|n| plain(1, udp((mac(1), mac(3)), "10.0.0.1", "10.0.0.3", ((n / 2) as u16, 9 + (n % 2) as u16))))
        .collect();
    let mut strange = vec![segment(1, 3, (1, 2), SYN, 0, true), ping((mac(1), mac(3)), "10.0.0.1", "10.0.0.3", b"?")];
    strange.extend(flows[..100].iter().map(|sent| sent.frame.clone()));
    let strange: Vec<_> = strange.iter().map(|frame| parse(frame, frame.len()).unwrap()).collect();
    for sent in (0..3).flat_map(|_| &flows) {
        let parsed = parse(&sent.frame, sent.frame.len()).unwrap();
        ahead.fetch_ahead(PortId(0), [&parsed].into_iter());
        assert_eq!(sent.to(&mut ahead), sent.to(&mut behind));
    }
    // Other packets, more than a vector has, and a port that does not exist.
    ahead.fetch_ahead(PortId(0), strange.iter());
    ahead.fetch_ahead(PortId(77), strange.iter());
    assert_same_counters(&ahead, &behind, (0, 0));
    assert_eq!(ahead.flow_counters(), behind.flow_counters());
    assert!(ahead.flow_counters().found_packets > 5000);
}
