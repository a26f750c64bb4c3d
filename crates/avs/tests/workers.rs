//! Several workers with a switch each decide like a single switch that sees everything.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use bifrost_avs::{Action, DropReason, PeerId, PortId, SessionLimits, Switch, Tables, Verdict, WorkerId, Workers};
use bifrost_nic::{Offload, parse, steer};
use common::any::*;
use common::*;

/// The switches of a host, and the choice of the worker for a packet.
struct Host {
    switches: Vec<Switch>,
    /// Frames handed over to another worker: accepted and rejected there.
    handed_over: [u64; 2],
}

/// The decision about a packet.
#[derive(Debug, PartialEq)]
enum Decided {
    Guest(Verdict),
    Underlay(Verdict),
}

fn of_worker(tables: &Tables, own: u16, count: u16) -> Tables {
    let mut tables = tables.clone();
    tables.workers = Workers { own: WorkerId(own), count };
    tables
}

impl Host {
    fn new(tables: &Tables, count: u16) -> Host {
        let build = |own| Switch::build(&of_worker(tables, own, count), 1).unwrap();
        Host { switches: (0..count).map(build).collect(), handed_over: [0; 2] }
    }

    fn replace(&mut self, tables: &Tables) {
        let count = self.switches.len() as u16;
        for (own, switch) in self.switches.iter_mut().enumerate() {
            switch.replace(&of_worker(tables, own as u16, count)).unwrap();
        }
    }

    fn decide(&mut self, from: u8, frame: &[u8]) -> Decided {
        let parsed = parse(frame, frame.len()).unwrap();
        let count = self.switches.len() as u16;
        // The same choice as that of the BPF programs.
        let (source, destination) = (parsed.src_mac, parsed.dst_mac);
        let by_pair = usize::from(steer::worker_of_pair(source.octets(), destination.octets(), count));
        if from > 2 {
            let other = self.switches[by_pair].other_worker(vni(100), source, destination);
            let switch = &mut self.switches[other.map_or(by_pair, |WorkerId(other)| usize::from(other))];
            return Decided::Underlay(*switch.from_underlay(vni(100), PeerId(u32::from(from - 2)), frame, &parsed));
        }
        let port = PortId(u32::from(from - 1));
        let home = self.switches[0].port(port).unwrap().home.filter(|_| count > 1);
        let switch = &mut self.switches[home.map_or(by_pair, |WorkerId(home)| usize::from(home))];
        let mut decision = *switch.from_guest(port, frame, frame.len(), Offload::default(), &parsed);
        if let Action::Deliver { port, worker } = &mut decision.action
            && let Some(worker) = worker.take()
        {
            let mut frame = frame.to_vec();
            if let Some(rewrite) = decision.rewrite {
                rewrite.apply(&mut frame);
            }
            let parsed = parse(&frame, frame.len()).unwrap();
            let passed =
                *self.switches[usize::from(worker.0)].from_worker(PortId(u32::from(from - 1)), *port, &frame, &parsed);
            self.handed_over[usize::from(!passed.passes())] += 1;
            if !passed.passes() {
                decision = passed;
            }
        }
        Decided::Guest(decision)
    }
}

/// Random rules, MTUs that no frame exceeds, and room for every session. `homes`: the workers of ports that only one
/// worker serves.
fn any_world(rng: &mut fastrand::Rng, routed: bool, homes: [Option<u16>; 2], workers: u16) -> Tables {
    let crowded = rng.bool();
    let mut tables = any_tables(rng, crowded);
    tables.sessions = SessionLimits { total: 1000, per_port: 1000 };
    if !routed {
        tables.vpcs[0].gateways.clear();
    }
    tables.routes.iter_mut().for_each(|route| route.mtu = 1500);
    for (port, home) in tables.ports.iter_mut().zip(homes) {
        port.mtu = 1500;
        // As the daemon configures it.
        port.home = home.or((routed && !port.groups.is_empty()).then_some(port.id.0 as u16 % workers)).map(WorkerId);
    }
    tables
}

#[test]
fn several_workers_decide_what_one_does() {
    let mut handed_over = [0; 2];
    for seed in 0..if cfg!(miri) { 2 } else { 300 } {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (routed, count) = (rng.bool(), rng.u16(2..4));
        let homes: [Option<u16>; 2] = std::array::from_fn(|_| rng.bool().then(|| rng.u16(0..count)));
        let tables = any_world(&mut rng, routed, homes, count);
        let (mut one, mut several) = (Host::new(&tables, 1), Host::new(&tables, count));
        let mut now = 1000 * SECOND;
        for step in 0..if cfg!(miri) { 50 } else { 200 } {
            now += if rng.u8(0..50) == 0 { 250 * SECOND } else { SECOND / 10 };
            one.switches.iter_mut().chain(&mut several.switches).for_each(|switch| switch.advance(now));
            if rng.u8(0..50) == 0 {
                let tables = any_world(&mut rng, routed, homes, count);
                one.replace(&tables);
                several.replace(&tables);
            }
            let from = rng.u8(1..=4);
            let frame = any_frame(&mut rng, from, true);
            assert_eq!(several.decide(from, &frame), one.decide(from, &frame), "seed {seed}, step {step}");
        }
        assert_eq!(one.handed_over, [0; 2], "there is no other worker");
        handed_over = std::array::from_fn(|i| handed_over[i] + several.handed_over[i]);
    }
    assert!(handed_over.iter().all(|count| *count > 1000) || cfg!(miri), "too few hand-overs: {handed_over:?}");
}

#[test]
fn the_receivers_worker_applies_ingress_rules() {
    let mut tables = tables();
    tables.groups = vec![Default::default()];
    tables.ports[1].groups = vec![bifrost_avs::GroupId(0)];
    (tables.ports[0].home, tables.ports[1].home) = (Some(WorkerId(0)), Some(WorkerId(1)));
    let mut host = Host::new(&tables, 2);
    let frame = segment(1, 2, (1000, 80), SYN, 0, true);
    assert_eq!(host.decide(1, &frame), Decided::Guest(Verdict::drop(DropReason::GroupIngress)));
    // It is rejected and counted by the receiver's worker.
    let [sender, receiver] = &host.switches[..] else { unreachable!() };
    assert_eq!(sender.port_counters(PortId(0)).unwrap().to_local_packets, 1);
    assert_eq!(receiver.port_counters(PortId(1)).unwrap().ingress_dropped.packets(DropReason::GroupIngress), 1);
    assert_eq!(receiver.underlay_counters().ingress_dropped_packets, 1);
    // The trace there predicts it.
    let parsed = parse(&frame, frame.len()).unwrap();
    let foreseen = receiver.trace_from_worker(PortId(0), PortId(1), &frame, &parsed);
    assert_eq!((foreseen.verdict, foreseen.checks.len()), (Verdict::drop(DropReason::GroupIngress), 1));
    // The reply to a guest's request is accepted, although request and reply pass through different workers.
    let ask = segment(2, 1, (80, 1000), SYN, 0, true);
    assert!(matches!(host.decide(2, &ask), Decided::Guest(Verdict { action: Action::Deliver { .. }, .. })));
    let answer = segment(1, 2, (1000, 80), 0x12, 0, true);
    assert!(matches!(host.decide(1, &answer), Decided::Guest(Verdict { action: Action::Deliver { .. }, .. })));
    // The port has been removed meanwhile.
    assert_eq!(
        *host.switches[1].from_worker(PortId(0), PortId(9), &frame, &parsed),
        Verdict::drop(DropReason::UnknownPort)
    );
    assert_eq!(host.switches[1].underlay_counters().dropped.packets(DropReason::UnknownPort), 1);
}
