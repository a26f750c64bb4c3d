//! A panic at any stage of a core affects only the port or connection that the core was working for.
//!
//! Two hosts, two tenants. Tenant A's port on the first host is the victim. Tenant B sends continuously, between the
//! hosts and within the first one. All its packets must arrive once and in order, and all counters must balance.

#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use bifrost_avs as avs;
use bifrost_control::api::{Place, Sample};
use bifrost_control::balance;
use bifrost_datapath::{Effect, Injection, Of, PortView, Recovery, Stage, WatchdogConfig};
use bifrost_nic::Offload;
use bifrost_port::panics;
use bifrost_rte::{Config, Ordering, Pair, PeerId, Time};
use bifrost_wire::{Mac, Vni, ipv4};

use crate::host::{Host, HostParts, Vnic};
use crate::port::SimPort;
use crate::underlay::SimUnderlay;

/// Duration of a turn of both hosts, and one-way delay between them, ns.
const STEP_NS: u64 = 20_000;
/// VNIs of the tenants' networks.
const A: u32 = 100;
const B: u32 = 200;
/// The victim's port on host 0. There are other ports before and after it.
const VICTIM: u32 = 1;

/// Guests: number, host, port, network.
const GUESTS: [(u8, usize, u32, u32); 7] =
    [(4, 0, 0, B), (1, 0, 1, A), (3, 0, 2, A), (6, 0, 3, B), (5, 1, 0, B), (2, 1, 1, A), (7, 1, 2, B)];
/// Flows (from, to) and their frame lengths.
const FLOWS: [(u8, u8, usize); 9] = [
    (1, 2, 200),
    (2, 1, 200),
    (1, 3, 3000),
    (3, 1, 200),
    (4, 5, 300),
    (5, 4, 300),
    (4, 6, 3000),
    (6, 4, 100),
    (6, 7, 3000),
];

fn mac(guest: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, guest])
}

fn ip(guest: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, guest)
}

/// A numbered UDP packet without a checksum.
fn frame(from: u8, to: u8, len: usize, number: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(&mac(to).0);
    out.extend_from_slice(&mac(from).0);
    out.extend_from_slice(&[8, 0, 0x45, 0]);
    let total = len - 14;
    out.extend_from_slice(&(total as u16).to_be_bytes());
    out.extend_from_slice(&[0, 0, 0, 0, 64, 17, 0, 0]);
    out.extend_from_slice(&ip(from).octets());
    out.extend_from_slice(&ip(to).octets());
    ipv4::fill_checksum(&mut out[14..34]);
    out.extend_from_slice(&[4, 0, 5, 0]);
    out.extend_from_slice(&((total - 20) as u16).to_be_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(&number.to_be_bytes());
    out.resize(len, number as u8);
}

/// The sender and the number of a received packet.
fn read(frame: &[u8]) -> (u8, u32) {
    let number = u32::from_be_bytes(frame[42..46].try_into().unwrap());
    assert!(frame[46..].iter().all(|byte| *byte == number as u8), "the frame is damaged");
    (frame[29], number)
}

thread_local! {
    /// Wall-clock time, and the thread's own CPU time, ns.
    static CLOCK: Cell<u64> = const { Cell::new(0) };
    static USED: Cell<u64> = const { Cell::new(0) };
    /// Number of pauses of the machine still to come.
    static PAUSES: Cell<u32> = const { Cell::new(0) };
}

/// The thread uses the CPU.
fn work(ns: u64) {
    CLOCK.set(CLOCK.get() + ns);
    USED.set(USED.get() + ns);
}

/// Another thread uses the CPU.
fn sleep(ns: u64) {
    CLOCK.set(CLOCK.get() + ns);
}

struct Worlds {
    hosts: [Host; 2],
    now: u64,
    sent: BTreeMap<(u8, u8), u32>,
    received: BTreeMap<(u8, u8), Vec<u32>>,
    recoveries: Vec<Recovery>,
    /// Total time of the first host's turns, ns.
    turns_ns: u64,
}

fn port() -> SimPort {
    SimPort::new(256, 256, 4000)
}

impl Worlds {
    fn new() -> Self {
        panics::install();
        let host = |id: usize| {
            let here = || GUESTS.iter().filter(move |g| g.1 == id);
            let vni = |id| Vni::new(id).unwrap();
            let vpc = |id| avs::Vpc {
                vni: vni(id),
                reliability: avs::Reliability::All,
                ordering: avs::Ordering::Flow,
                gateways: Vec::new(),
                acl: Vec::new(),
            };
            let tables = avs::Tables {
                vpcs: vec![vpc(A), vpc(B)],
                ports: here()
                    .map(|&(guest, _, owner, network)| avs::Port {
                        id: avs::PortId(owner),
                        vni: vni(network),
                        mac: mac(guest),
                        addresses: vec![IpAddr::from(ip(guest))],
                        routed: vec![],
                        mtu: 3500,
                        groups: Vec::new(),
                        home: None,
                    })
                    .collect(),
                routes: GUESTS
                    .iter()
                    .filter(|g| g.1 != id)
                    .map(|&(guest, _, _, network)| avs::Route {
                        vni: vni(network),
                        prefix: IpAddr::from(ip(guest)).into(),
                        peer: avs::PeerId(0),
                        mac: mac(guest),
                        mtu: 3500,
                    })
                    .collect(),
                ..avs::Tables::default()
            };
            let vnic = |&(guest, _, _, network): &(u8, usize, u32, u32)| {
                let (vni, mac) = (vni(network), mac(guest));
                (
                    Vnic {
                        guest: guest.into(),
                        vni,
                        mac,
                        ordering: Ordering::Flow,
                        reliable: true,
                        rates: Default::default(),
                        weights: (1, 1),
                    },
                    port(),
                )
            };
            let mut host = Host::new(HostParts {
                id: id as u32,
                underlay: SimUnderlay::new(id as u32, 1 << 20, 0),
                vnics: here().map(vnic).collect(),
                tables,
                peers: vec![1 - id as u32],
                paths: 2,
                source_port_base: 40_000,
                config: Config::default(),
                control_dscp: 0,
            });
            host.start(1_000_000 + id as u64, 7 + id as u32);
            host
        };
        Worlds {
            hosts: [host(0), host(1)],
            now: 1_000_000,
            sent: BTreeMap::new(),
            received: BTreeMap::new(),
            recoveries: Vec::new(),
            turns_ns: 0,
        }
    }

    fn port_of(&mut self, guest: u8) -> &mut SimPort {
        let &(_, host, owner, _) = GUESTS.iter().find(|g| g.0 == guest).unwrap();
        self.hosts[host].port_mut(owner)
    }

    /// Each flow sends `count` frames, if there is room.
    fn send(&mut self, count: usize, flows: impl Fn(u8) -> bool) {
        for (from, to, len) in FLOWS.into_iter().filter(|flow| flows(flow.0)) {
            for _ in 0..count {
                let number = self.sent.get(&(from, to)).copied().unwrap_or(0);
                if self.port_of(from).send(Offload::default(), |out| frame(from, to, len, number, out)) {
                    self.sent.insert((from, to), number + 1);
                }
            }
            let &(_, host, owner, _) = GUESTS.iter().find(|g| g.0 == from).unwrap();
            self.hosts[host].core.as_mut().unwrap().on_port_readable(owner);
        }
    }

    /// Both hosts run a turn, and their packets arrive.
    fn turn(&mut self) {
        self.now = (self.now + STEP_NS).max(CLOCK.get());
        for id in 0..2 {
            let host = &mut self.hosts[id];
            host.underlay.now = self.now;
            let core = host.core.as_mut().unwrap();
            core.on_underlay_readable();
            let started = Time(self.now);
            CLOCK.set(self.now);
            core.begin_turn(started);
            let turned = panics::contain(|| core.turn(started, &mut host.underlay, |_| ()));
            core.end_turn(started, Time(CLOCK.get()));
            self.turns_ns += if id == 0 { CLOCK.get() - self.now } else { 0 };
            if let Err(panic) = turned {
                assert!(panic.message.starts_with("injected"), "{panic}");
                self.recoveries.push(core.recover(panic, || Ok(SimPort::new(0, 0, 0))));
            }
            host.underlay.finish();
            while core.take_rewatched().is_some() {}
            host.underlay.spent.clear();
        }
        for id in 0..2 {
            for packet in std::mem::take(&mut self.hosts[id].underlay.outbox) {
                self.hosts[1 - id].underlay.arrive(self.now, packet).unwrap();
            }
        }
        for (guest, ..) in GUESTS {
            let port = self.port_of(guest);
            assert_eq!(port.take_misuses(), []);
            port.settle(|_| ());
            let mut heard = Vec::new();
            while let Some(what) = port.receive(|frame, _| read(frame)) {
                heard.push(what);
            }
            for (from, number) in heard {
                self.received.entry((from, guest)).or_default().push(number);
            }
        }
    }

    fn run(&mut self, turns: usize, count: usize, flows: impl Fn(u8) -> bool) {
        for _ in 0..turns {
            self.send(count, &flows);
            self.turn();
        }
    }

    /// Runs until nothing is in flight.
    fn drain(&mut self) {
        (0..20_000).for_each(|_| self.turn());
    }

    fn inject(&mut self, stage: Stage, of: Of) {
        self.hosts[0].core.as_mut().unwrap().inject(Injection { stage, of, effect: Effect::Panic });
    }

    fn is_due(&self) -> bool {
        self.hosts[0].core.as_ref().unwrap().is_panic_due()
    }

    /// All frames of a flow have arrived, once and in order.
    #[track_caller]
    fn assert_complete(&self, flow: (u8, u8), why: &str) {
        let (sent, received) = (self.sent[&flow], &self.received[&flow]);
        assert!(received.iter().copied().eq(0..sent), "{why}: {flow:?}: {sent} sent, {} received", received.len());
    }

    /// Only buffers of the victim may be held.
    #[track_caller]
    fn assert_nothing_held(&self, why: &str) {
        for &(guest, host, owner, _) in GUESTS.iter().filter(|g| (g.1, g.2) != (0, VICTIM)) {
            assert_eq!(self.hosts[host].port(owner).outstanding(), (0, 0), "{why}: guest {guest}");
        }
    }

    /// Every packet is counted.
    #[track_caller]
    fn assert_balanced(&self, why: &str) {
        for host in &self.hosts {
            let core = host.core().unwrap();
            let (totals, counters) = (core.totals(), core.totals().counters());
            let at = Place { worker: Some(0), ..Place::default() };
            let mut samples: Vec<Sample> = counters
                .iter()
                .map(|(counter, value)| Sample { counter: counter.clone(), at: at.clone(), value: *value })
                .collect();
            let mut add = |counter: String, at: &Place, value| samples.push(Sample { counter, at: at.clone(), value });
            let sent = host.underlay.lanes().iter().map(|lane| lane.packets).sum();
            add("udp.tx_datagrams".into(), &at, sent);
            let unread = counters["datapath.unread_datagrams"];
            add("udp.rx_datagrams".into(), &at, totals.own.underlay_rx_packets + unread);
            for port in core.port_views() {
                let at = Place { port: Some(port.owner.to_string()), ..at.clone() };
                add("port.tx_packets".into(), &at, port.tx_packets);
                add("port.rx_packets".into(), &at, port.rx_packets);
                add("port.slow_packets".into(), &at, port.rest_packets);
                add("port.unswitched_packets".into(), &at, port.waiting_packets.0);
                add("port.blocked_packets".into(), &at, port.waiting_packets.1);
                port.outbound.iter().for_each(|(name, value)| add(format!("port.{name}"), &at, value));
                port.switch().for_each(|(name, value)| add(format!("avs.{name}"), &at, value));
            }
            let unexplained = balance::unexplained(&samples);
            assert!(unexplained.is_empty(), "{why}: host {}: {unexplained:#?}", host.id());
        }
    }
}

fn is_b(guest: u8) -> bool {
    guest >= 4
}

/// Tenant B's flows, which the panic must not affect.
fn flows_of_b() -> impl Iterator<Item = (u8, u8)> {
    FLOWS.into_iter().filter(|flow| is_b(flow.0)).map(|(from, to, _)| (from, to))
}

#[test]
fn without_a_panic_everything_arrives() {
    let mut worlds = Worlds::new();
    worlds.run(300, 2, |_| true);
    worlds.drain();
    for (from, to, _) in FLOWS {
        worlds.assert_complete((from, to), "nothing has happened");
    }
    worlds.assert_balanced("nothing has happened");
}

#[test]
fn a_panic_in_a_stage_of_a_port_disables_only_that_port() {
    let stages = Stage::ALL.into_iter().filter(|stage| stage.is_of_port());
    // The panic comes after different numbers of turns, so that the lengths of lists and the work before it differ. In
    // one run, only a guest of the same host sends to the victim.
    let every: fn(u8) -> bool = |_| true;
    let without_2: fn(u8) -> bool = |guest| guest != 2;
    let runs =
        stages.flat_map(|stage| [(stage, 40, every), (stage, 47, every), (stage, 101, every), (stage, 61, without_2)]);
    for (stage, warm, flows) in runs {
        let why = &format!("{} after {warm} turns", stage.name());
        let mut worlds = Worlds::new();
        worlds.run(warm, 3, |_| true);
        if !flows(2) {
            worlds.drain();
        }
        worlds.inject(stage, Of::Port(VICTIM));
        worlds.run(100, 3, flows);
        assert!(!worlds.is_due(), "{why}: the panic did not happen");
        match &worlds.recoveries[..] {
            [Recovery::PortOut(VICTIM, fault)] => {
                assert_eq!(fault.stage, stage, "{why}");
                assert!(fault.panic.location.contains("work.rs"), "{why}: {fault:?}");
            }
            other => panic!("{why}: {other:?}"),
        }
        let port = victim(&worlds);
        assert!(port.failed && port.fault_times == 1 && port.fault.is_some(), "{why}");
        assert_eq!(worlds.hosts[0].core().unwrap().failed_ports(), [VICTIM], "{why}");
        assert_eq!(worlds.hosts[0].core().unwrap().counters().caught_panics, 1, "{why}");
        worlds.drain();
        for flow in flows_of_b() {
            worlds.assert_complete(flow, why);
        }
        worlds.assert_balanced(why);
        // The buffers of all other ports are released.
        worlds.assert_nothing_held(why);
        // With a new device the port works again. The removed device is returned unchanged.
        let core = worlds.hosts[0].core.as_mut().unwrap();
        let broken = core.swap_device(VICTIM, port_again()).unwrap();
        assert!(broken.rx_was_used(), "{why}: the removed device is returned");
        let before = worlds.received[&(2, 1)].len();
        worlds.run(100, 3, |_| true);
        worlds.drain();
        assert!(worlds.received[&(2, 1)].len() > before + 100, "{why}: it receives again");
        for flow in flows_of_b() {
            worlds.assert_complete(flow, why);
        }
        worlds.assert_balanced(why);
    }
}

fn port_again() -> SimPort {
    port()
}

#[test]
fn a_panic_on_a_packet_of_a_connection_drops_only_that_connection() {
    let (local, remote) = (mac(1), mac(2));
    for stage in [Stage::Control, Stage::Data, Stage::Judge] {
        let why = stage.name();
        let mut worlds = Worlds::new();
        worlds.run(60, 3, |_| true);
        let cid = worlds.hosts[0].core().unwrap().engine().cid_of(Pair { vni: A, local, remote }).unwrap();
        worlds.inject(stage, Of::Connection(cid));
        worlds.run(100, 3, |_| true);
        assert!(!worlds.is_due(), "{why}: the panic did not happen");
        assert_eq!(worlds.recoveries, [Recovery::Dropped], "{why}");
        worlds.drain();
        for flow in flows_of_b() {
            worlds.assert_complete(flow, why);
        }
        worlds.assert_balanced(why);
        let core = worlds.hosts[0].core().unwrap();
        assert_eq!(core.engine().counters().faulted_connections, 1, "{why}");
        assert_eq!(core.failed_ports(), [0u32; 0], "{why}");
        // The pair gets a new connection, which works.
        let before = worlds.received[&(2, 1)].len();
        worlds.run(100, 3, |_| true);
        worlds.drain();
        assert!(worlds.received[&(2, 1)].len() >= before + 290, "{why}");
        worlds.assert_balanced(why);
    }
}

#[test]
fn a_connection_that_panics_repeatedly_disables_its_port() {
    let mut worlds = Worlds::new();
    worlds.run(60, 3, |_| true);
    for _ in 0..20 {
        let pair = Pair { vni: A, local: mac(1), remote: mac(2) };
        if let Some(cid) = worlds.hosts[0].core().unwrap().engine().cid_of(pair) {
            worlds.inject(Stage::Data, Of::Connection(cid));
        }
        worlds.run(60, 3, |_| true);
    }
    let out = worlds.recoveries.iter().filter(|r| matches!(r, Recovery::PortOut(VICTIM, _))).count();
    assert_eq!((out, worlds.recoveries.len()), (1, 20), "{:?}", worlds.recoveries);
    assert!(matches!(worlds.recoveries[4], Recovery::PortOut(..)), "{:?}", worlds.recoveries);
    worlds.drain();
    for flow in flows_of_b() {
        worlds.assert_complete(flow, "repeated panics");
    }
}

#[test]
fn a_panic_without_an_owner_loses_nothing_that_the_transport_carries() {
    let stages = [Stage::Loop, Stage::Arrival, Stage::Timer, Stage::Acknowledge, Stage::EmitControl, Stage::Send];
    for (stage, warm) in stages.into_iter().flat_map(|stage| [(stage, 40), (stage, 53)]) {
        let why = &format!("{} after {warm} turns", stage.name());
        let mut worlds = Worlds::new();
        worlds.run(warm, 3, |_| true);
        worlds.inject(stage, Of::Anybody);
        worlds.run(100, 3, |_| true);
        assert!(!worlds.is_due(), "{why}: the panic did not happen");
        assert_eq!(worlds.recoveries, [Recovery::Dropped], "{why}");
        worlds.drain();
        for (from, to, _) in FLOWS {
            worlds.assert_complete((from, to), why);
        }
        worlds.assert_nothing_held(why);
        worlds.assert_balanced(why);
    }
}

#[test]
fn panics_without_an_owner_are_not_tolerated_forever() {
    let mut worlds = Worlds::new();
    while !worlds.recoveries.contains(&Recovery::Hopeless) {
        assert!(worlds.recoveries.len() <= 12);
        worlds.inject(Stage::Loop, Of::Anybody);
        worlds.turn();
    }
    assert_eq!(worlds.recoveries.len(), 11);
}

#[test]
fn the_peer_state_is_unchanged() {
    // The only peer is the engine's first one, `PeerId(0)`.
    let mut worlds = Worlds::new();
    worlds.run(60, 3, |_| true);
    let before = worlds.hosts[0].core().unwrap().engine().selected_paths(PeerId(0)).len();
    worlds.inject(Stage::Fetch, Of::Port(VICTIM));
    worlds.run(60, 3, |_| true);
    worlds.drain();
    let engine = worlds.hosts[0].core().unwrap().engine();
    assert_eq!(engine.selected_paths(PeerId(0)).len(), before);
    assert!(engine.path_snapshots(Time(worlds.now)).all(|path| path.in_flight_packets == 0), "windows open again");
    assert_eq!(engine.pages_used().0, 0, "no page is lost");
}

/// Worlds in which the first host measures how much time each port uses.
fn watched(share_percent: u8, victim: fn(usize)) -> Worlds {
    let mut worlds = Worlds::new();
    CLOCK.set(0);
    let config = WatchdogConfig { clock: || CLOCK.get(), processor_time: || USED.get(), share_percent };
    worlds.hosts[0].core.as_mut().unwrap().watch_time(config);
    worlds.run(60, 1, |_| true);
    worlds.port_of(1).on_packets = Some(victim);
    worlds
}

fn victim(worlds: &Worlds) -> PortView {
    worlds.hosts[0].core().unwrap().port_views().find(|port| port.owner == VICTIM).unwrap()
}

#[test]
fn a_slow_port_gets_no_more_than_its_share_of_the_worker() {
    // As with a receive ring full of unusable buffers.
    let slow = |packets| work(5_000_000 * packets as u64);
    let shares = [0, 10].map(|share| {
        let mut worlds = watched(share, slow);
        // Gives the worker time to notice.
        worlds.run(20, 1, |_| true);
        let (began, used) = (worlds.now, worlds.turns_ns);
        while worlds.now < began + 3_000_000_000 {
            worlds.run(1, 1, |_| true);
        }
        let percent = (worlds.turns_ns - used) * 100 / (worlds.now - began);
        let port = victim(&worlds);
        assert!(port.slow_turns > 3 && port.slow_ns > 10_000_000, "{port:?}");
        assert_eq!(port.rest_times > 0, share > 0);
        if share > 0 {
            assert!(port.drops()["slow_port"] > 0);
        }
        worlds.port_of(1).on_packets = None;
        worlds.drain();
        for flow in flows_of_b() {
            worlds.assert_complete(flow, "slow");
        }
        worlds.assert_balanced("slow");
        // A port that is no longer slow is served as before.
        let before = worlds.received[&(2, 1)].len();
        (0..60_000).for_each(|_| worlds.turn());
        worlds.run(200, 1, |_| true);
        worlds.drain();
        assert!(worlds.received[&(2, 1)].len() >= before + 190, "{share} %");
        percent
    });
    assert!(shares[0] > 60 && shares[1] <= 15, "percent of the worker's time, without and with a bound: {shares:?}");
}

#[test]
fn scheduling_delays_are_not_charged_to_ports() {
    // Turns also use much CPU time, so that the worker measures closely.
    let mut worlds = watched(10, |packets| {
        work(35_000 * packets as u64);
        sleep(4_000_000);
    });
    for _ in 0..600 {
        worlds.run(1, 100, |guest| guest <= 2);
    }
    assert!(worlds.hosts[0].core().unwrap().counters().long_turns > 100);
    let port = victim(&worlds);
    assert_eq!((port.slow_turns, port.slow_ns, port.rest_times), (0, 0, 0));
}

#[test]
fn pauses_of_the_machine_are_not_charged_to_ports() {
    // Turns are long, so that the worker measures closely. Sometimes the hypervisor takes the CPU for 25 ms, which the
    // kernel charges to the thread.
    let mut worlds = watched(10, |packets| {
        work(35_000 * packets as u64);
        if PAUSES.get() > 0 {
            PAUSES.set(PAUSES.get() - 1);
            work(25_000_000);
        }
    });
    for _ in 0..8 {
        for _ in 0..30 {
            worlds.run(1, 100, |guest| guest <= 2);
        }
        PAUSES.set(1);
        worlds.run(10, 100, |guest| guest <= 2);
        assert_eq!(PAUSES.get(), 0);
        let until = worlds.now + 300_000_000;
        while worlds.now < until {
            worlds.turn();
        }
    }
    let port = victim(&worlds);
    assert_eq!((port.slow_turns, port.rest_times), (0, 0));
    // Such pauses are charged to the port if they follow each other immediately.
    PAUSES.set(40);
    worlds.run(100, 100, |guest| guest <= 2);
    assert!(victim(&worlds).rest_times > 0);
}

#[test]
fn a_busy_port_is_not_slow() {
    // Many large packets, and turns of several milliseconds.
    let mut worlds = watched(1, |packets| work(35_000 * packets as u64));
    for _ in 0..600 {
        worlds.run(1, 100, |guest| guest <= 2);
    }
    let port = victim(&worlds);
    let turns = worlds.hosts[0].core().unwrap().counters().long_turns;
    assert!(turns > 100, "{turns} long turns");
    assert_eq!((port.slow_turns, port.rest_times), (0, 0));
}
