//! Two engines and an adversary who controls the network between them: it drops, duplicates, reorders and delays
//! packets as the input says, crashes hosts and removes guests' buffers; with forgeries it also changes and invents
//! packets.
//!
//! Without forgeries each flow is delivered in order and once within a connection's life, and nothing is released that
//! did not arrive. In any case each buffer is released once, and everything drains when the adversary stops.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bifrost_rte::{
    Admission, Arrival, CcKind, Config, Control, Destination, Engine, LocalVnic, MS, Ordering, Outbound, Output, Pair,
    PeerId, S, Time, US, Verdict,
};
use bifrost_wire::Mac;
use bifrost_wire::bifrost::{Cid, DataHeader, Packet, Psn, parse};

use super::forge::Knowledge;
use super::ledger::{Ledger, check_wire, emit};
use crate::Input;

const VNI: u32 = 100;
const OWNER: u32 = 7;
/// Maximum number of packets in flight; size of the adversary's memory.
const FLIGHTS: usize = 400;
const PAGES: u32 = 200;

/// A guest's packet: flow and number in it.
type Content = (u32, u32);

#[derive(Clone, Debug)]
enum Flight {
    Data(DataHeader, Content),
    /// Everything else, as bytes.
    Bytes(Vec<u8>),
}

struct Side {
    engine: Engine,
    config: Config,
    out: Output,
    ledger: Ledger<(Content, Cid)>,
    /// Content of each buffer.
    contents: BTreeMap<u32, Content>,
    next_seq: BTreeMap<u32, u32>,
    /// Latest number published of each flow, and in which life of the connection.
    seen: BTreeMap<u32, (u32, Cid)>,
    /// Everything that was published, or had arrived when the host crashed.
    arrived: BTreeSet<Content>,
    has_buffers: bool,
    ordering: Ordering,
    instance: u64,
}

struct World {
    sides: [Side; 2],
    now: Time,
    /// Destination and content, in sending order.
    flights: VecDeque<(usize, Flight)>,
    /// Delivered or dropped before, for duplication.
    old: VecDeque<(usize, Flight)>,
    paths: usize,
    forged: bool,
    timeouts: u32,
}

fn mac(side: usize) -> Mac {
    Mac([2, 0, 0, 0, 0, side as u8 + 1])
}

fn pair(side: usize) -> Pair {
    Pair { vni: VNI, local: mac(side), remote: mac(1 - side) }
}

/// Without forgeries.
pub(crate) fn run(bytes: &[u8]) {
    play(bytes, false);
}

/// With forgeries.
pub(crate) fn run_with_forgeries(bytes: &[u8]) {
    play(bytes, true);
}

fn play(bytes: &[u8], forged: bool) {
    let input = &mut Input::new(bytes);
    let paths = 1 + input.below(8);
    let wrap = input.chance(128);
    let sides = [0, 1].map(|index| Side::new(index, paths, wrap, input));
    let mut world = World {
        sides,
        now: Time(u64::from(input.u16()) * 10 * MS + 1),
        flights: VecDeque::new(),
        old: VecDeque::new(),
        paths,
        forged,
        timeouts: 0,
    };
    while !input.is_empty() {
        world.step(input);
    }
    world.calm();
}

impl Side {
    fn new(index: usize, paths: usize, wrap: bool, input: &mut Input<'_>) -> Self {
        let config = Config {
            version_max: if input.chance(24) { input.pick(&[1, 3]) } else { 4 },
            congestion_control: if input.chance(64) { CcKind::None } else { CcKind::Swift },
            initial_window: if input.chance(64) { 16 } else { 512 },
            max_window: 600,
            group_packets: if input.chance(128) { 1 } else { 50 },
            ack_delay_ns: if input.chance(48) { Some(0) } else { None },
            ack_threshold: if input.chance(48) { 1 } else { 32 },
            max_connections: 4,
            max_pages: PAGES,
            #[cfg(feature = "mutations")]
            first_psn: if wrap { u32::MAX - 60 } else { 0 },
            #[cfg(feature = "mutations")]
            mutation: mutation(),
            ..Config::default()
        };
        let _ = wrap;
        let mut engine = Engine::new(config.clone(), 0, 1000 + index as u64, index as u32);
        engine.add_peer(paths);
        Side {
            engine,
            config,
            out: Output::default(),
            ledger: Ledger::default(),
            contents: BTreeMap::new(),
            next_seq: BTreeMap::new(),
            seen: BTreeMap::new(),
            arrived: BTreeSet::new(),
            has_buffers: true,
            ordering: input.pick(&[Ordering::Flow, Ordering::Flow, Ordering::Strict]),
            instance: 1000 + index as u64,
        }
    }
}

/// The mutation that the environment variable `MUTATION` names, by its position.
#[cfg(feature = "mutations")]
fn mutation() -> Option<bifrost_rte::Mutation> {
    let name = std::env::var("MUTATION").ok()?;
    bifrost_rte::Mutation::ALL.into_iter().find(|m| format!("{m:?}") == name)
}

impl World {
    fn step(&mut self, input: &mut Input<'_>) {
        let pick = |len: usize, input: &mut Input<'_>| usize::from(input.u8()) % len.max(1);
        match input.below(32) {
            0..=5 => {
                let (side, flow) = (input.below(2), u32::from(input.u8() % 5));
                for _ in 0..=input.u8() / 16 {
                    let segments = if input.chance(24) { 1 + input.u8() % 64 } else { 1 };
                    self.offer(side, flow, segments);
                }
            }
            // In order, one or many.
            6..=13 => {
                for _ in 0..=pick(self.flights.len(), input).min(64) {
                    self.deliver(0);
                }
            }
            14..=15 => self.deliver(pick(self.flights.len(), input)),
            16..=17 => {
                for _ in 0..=input.below(8) {
                    let at = pick(self.flights.len(), input);
                    let lost = self.flights.remove(at);
                    self.remember(lost);
                }
            }
            18 => {
                let copy = self.flights.get(pick(self.flights.len(), input)).cloned();
                self.flights.extend(copy);
            }
            19 => {
                let copy = self.old.get(pick(self.old.len(), input)).cloned();
                self.flights.extend(copy);
            }
            // Everything in flight in one direction, of one path or of all.
            20 => {
                let (to, odd) = (input.below(2), input.chance(128));
                let mut n = 0;
                self.flights.retain(|(side, _)| {
                    n += 1;
                    *side != to || (odd && n % 2 == 0)
                });
            }
            21..=26 => {
                let wait = match input.below(8) {
                    0..=3 => u64::from(input.u8()) * 2 * US,
                    4 | 5 => u64::from(input.u8()) * 50 * US,
                    6 => u64::from(input.u8()) * MS,
                    _ => u64::from(input.u8()) * S / 8,
                };
                self.run_until(self.now.after(wait));
            }
            27 => {
                // One host is late.
                self.now = self.now.after(u64::from(input.u8()) * 20 * US);
                let side = input.below(2);
                self.timeout(side);
            }
            28 => {
                let side = input.below(2);
                self.sides[side].has_buffers = !self.sides[side].has_buffers;
            }
            29 if input.chance(64) => self.crash(input.below(2)),
            _ if self.forged => self.forge(input),
            _ => {}
        }
        while self.flights.len() > FLIGHTS {
            let lost = self.flights.pop_front();
            self.remember(lost);
        }
    }

    fn offer(&mut self, index: usize, flow: u32, segments: u8) {
        let now = self.now;
        let side = &mut self.sides[index];
        let to = Destination {
            vni: VNI,
            owner: OWNER,
            local: mac(index),
            remote: mac(1 - index),
            peer: PeerId(0),
            ordering: side.ordering,
        };
        let handle = side.ledger.fresh();
        let first = side.next_seq.get(&flow).copied().unwrap_or_default();
        match side.engine.transmit(now, &to, Outbound { handle, segments, flow }, &mut side.out) {
            Admission::Accepted => {
                side.ledger.accepted((OWNER, handle), segments);
                side.contents.insert(handle, (flow, first));
            }
            // The guest retries with the same packet, or it leaves another way.
            Admission::Blocked | Admission::Plain => return self.carry_out(index),
        }
        side.next_seq.insert(flow, first + u32::from(segments));
        self.carry_out(index);
    }

    fn deliver(&mut self, at: usize) {
        let Some((to, flight)) = self.flights.remove(at) else { return };
        self.arrive(to, &flight);
        self.remember(Some((to, flight)));
        self.carry_out(to);
    }

    fn remember(&mut self, flight: Option<(usize, Flight)>) {
        self.old.extend(flight);
        if self.old.len() > 64 {
            self.old.pop_front();
        }
    }

    fn arrive(&mut self, to: usize, flight: &Flight) {
        let (now, ordering) = (self.now, self.sides[to].ordering);
        let arrival = Arrival { peer: PeerId(0), vni: VNI, nic_rx: now, hops: 2, marked: false };
        let Side { engine, out, ledger, has_buffers, .. } = &mut self.sides[to];
        let bytes = match flight {
            Flight::Data(header, content) => {
                if let Verdict::Place { owner, slot } = engine.on_data(now, &arrival, header, out) {
                    assert_eq!(owner, OWNER);
                    let handle = ledger.fresh();
                    if !*has_buffers {
                        engine.not_placed(slot);
                    } else if engine.placed(now, slot, handle, out) {
                        ledger.placed((OWNER, handle), (*content, header.cid));
                    }
                }
                return;
            }
            Flight::Bytes(bytes) => bytes,
        };
        match parse(bytes) {
            Ok(Packet::Probe(header)) => engine.on_probe(now, &arrival, &header, out),
            Ok(Packet::Skip(header)) => engine.on_skip(now, &arrival, &header, out),
            Ok(Packet::Ack(ack)) => engine.on_ack(now, &arrival, &ack, out),
            Ok(Packet::Setup(setup)) => {
                let vnic = LocalVnic { owner: OWNER, ordering, reliable: true };
                let here = setup.to == mac(to) && setup.from == mac(1 - to);
                engine.on_setup(now, &arrival, &setup, here.then_some(vnic), out);
            }
            Ok(Packet::Reset(reset)) => engine.on_reset(now, &arrival, &reset, out),
            Ok(Packet::Data(..) | Packet::Bundle(_)) | Err(_) => {}
        }
    }

    /// Publishes, sends and releases as the engine of `index` requests.
    fn carry_out(&mut self, index: usize) {
        let now = self.now;
        let mut out = std::mem::take(&mut self.sides[index].out);
        let side = &mut self.sides[index];
        let early = out.control.iter().any(|c| matches!(c.packet, Control::Ack(a) if !a.probe));
        assert!(!early, "an ACK confirms a packet that is not published yet");
        for handle in &out.publish {
            let ((flow, seq), life) = side.ledger.publish(*handle);
            let before = side.seen.insert(flow, (seq, life));
            let in_order = before.is_none_or(|(last, of)| of != life || last < seq);
            assert!(in_order || self.forged, "flow {flow}: {seq} after {before:?}");
            side.arrived.insert((flow, seq));
        }
        side.engine.flush_acks(now, &mut out);
        check_wire(&out);
        for data in &out.data {
            side.ledger.check_sent(data);
            let (flow, first) = side.contents[&data.handle];
            let content = (flow, first + u32::from(data.segment));
            self.flights.push_back((1 - index, Flight::Data(data.header, content)));
        }
        for control in &out.control {
            self.flights.push_back((1 - index, Flight::Bytes(emit(&control.packet))));
        }
        for plain in &out.plain {
            side.ledger.give_back((plain.owner, plain.handle));
        }
        for handle in &out.release {
            side.ledger.give_back(*handle);
        }
        if !self.forged {
            self.check_released(index, &out);
        }
        out.clear();
        self.sides[index].out = out;
        self.check_bounds(index);
    }

    /// A released packet has arrived: counted per buffer, because an output does not tell the segment.
    fn check_released(&mut self, index: usize, out: &Output) {
        let handles: BTreeSet<u32> = out.release.iter().map(|r| r.1).collect();
        let waiting: BTreeSet<Content> = self.sides[1 - index].ledger.waiting().map(|w| w.0).collect();
        for handle in handles {
            let (flow, first) = self.sides[index].contents[&handle];
            let released = out.release.iter().filter(|r| r.1 == handle).count();
            let arrived = (0..255)
                .filter(|i| {
                    let content = (flow, first + i);
                    self.sides[1 - index].arrived.contains(&content) || waiting.contains(&content)
                })
                .count();
            assert!(arrived >= released, "{released} segments of flow {flow} from {first} released, {arrived} arrived");
        }
    }

    fn check_bounds(&self, index: usize) {
        let side = &self.sides[index];
        let (send, receive) = side.engine.pages_used();
        assert!(send <= PAGES && receive <= PAGES, "pages {send} {receive}");
        assert!(side.engine.connections() <= 4);
        assert!(side.engine.timers_pending() <= 2000, "{} timers", side.engine.timers_pending());
        for c in side.engine.connection_snapshots(self.now) {
            assert!(c.in_flight_packets <= 600, "{} packets in flight", c.in_flight_packets);
        }
    }

    fn timeout(&mut self, index: usize) {
        let side = &mut self.sides[index];
        side.engine.on_timeout(self.now, &mut side.out);
        self.carry_out(index);
        self.timeouts += 1;
        assert!(self.timeouts < 300_000, "timers keep firing");
    }

    fn run_until(&mut self, end: Time) {
        loop {
            let due = |index: usize| self.sides[index].engine.next_timeout().filter(|at| *at <= end);
            let Some((at, index)) = [0, 1].into_iter().filter_map(|i| Some((due(i)?, i))).min() else { break };
            self.now = self.now.max(at);
            self.timeout(index);
        }
        self.now = self.now.max(end);
    }

    /// A host crashes with its state, and restarts when its packets have left the network (PROTOCOL §4.6).
    fn crash(&mut self, index: usize) {
        let side = &mut self.sides[index];
        let died: Vec<Content> = side.ledger.waiting().map(|w| w.0).collect();
        side.arrived.extend(died);
        side.ledger.forget(OWNER);
        side.out.clear();
        side.instance += 1000;
        // CIDs start elsewhere in each life, as the specification requires.
        let salt = (side.instance as u32).wrapping_mul(7919) ^ index as u32;
        side.engine = Engine::new(side.config.clone(), 0, side.instance, salt);
        side.engine.add_peer(self.paths);
        self.flights.retain(|(to, _)| *to == index);
        self.old.retain(|(to, _)| *to == index);
    }

    fn forge(&mut self, input: &mut Input<'_>) {
        let to = input.below(2);
        let cid = |side: usize| self.sides[side].engine.cid_of(pair(side));
        let psn = self.flights.iter().rev().find_map(|(_, f)| match f {
            Flight::Data(header, _) => Some(header.psn),
            Flight::Bytes(_) => None,
        });
        let known = Knowledge {
            now: self.now,
            cids: cid(to).into_iter().collect(),
            peer_cids: cid(1 - to).into_iter().collect(),
            psn: psn.unwrap_or(Psn(0)),
            vnics: vec![mac(to), mac(1 - to)],
        };
        let flight = match input.below(8) {
            0 => Flight::Data(known.header(input), (99, 0)),
            1 | 2 => Flight::Bytes(emit(&Control::Ack(known.ack(input)))),
            3 => Flight::Bytes(emit(&Control::Skip(known.header(input)))),
            4 => Flight::Bytes(known.setup(input).emit().to_vec()),
            5 => Flight::Bytes(known.reset(input).emit().to_vec()),
            // A packet in flight, changed.
            _ => {
                let at = usize::from(input.u8()) % self.flights.len().max(1);
                let Some((_, flight)) = self.flights.get(at) else { return };
                let (mut bytes, content) = match flight {
                    Flight::Data(header, content) => ([&header.emit()[..], &[0; 14]].concat(), *content),
                    Flight::Bytes(bytes) => (bytes.clone(), (99, 0)),
                };
                for _ in 0..=input.below(3) {
                    let at = input.below(bytes.len());
                    bytes[at] = input.u8();
                }
                match parse(&bytes) {
                    Ok(Packet::Data(header, _)) => Flight::Data(header, content),
                    _ => Flight::Bytes(bytes),
                }
            }
        };
        self.flights.push_front((to, flight));
    }

    /// The adversary stops. Everything arrives after 50 us, all buffers are released, and the guests can talk.
    fn calm(&mut self) {
        for side in &mut self.sides {
            side.has_buffers = true;
        }
        self.timeouts = 0;
        // Longer than a peer counts as plain, and than an idle connection lasts.
        self.settle(self.now.after(200 * S));
        for side in &self.sides {
            side.ledger.assert_empty();
            assert_eq!(side.engine.pages_used(), (0, 0));
            assert_eq!(side.engine.connections(), 0, "unused connections");
            assert!(side.engine.path_snapshots(self.now).all(|p| p.in_flight_packets == 0), "in flight forever");
        }
        // Packets between two honest hosts now arrive, whatever happened before.
        let before = [0, 1].map(|i| self.sides[i].arrived.len());
        for index in [0, 1] {
            for flow in 100..103 {
                self.offer(index, flow, 1);
            }
        }
        self.settle(self.now.after(S));
        for (index, before) in before.into_iter().enumerate() {
            assert_eq!(self.sides[index].arrived.len(), before + 3, "no longer works");
            self.sides[index].ledger.assert_empty();
        }
    }

    fn settle(&mut self, end: Time) {
        loop {
            if !self.flights.is_empty() {
                self.run_until(self.now.after(50 * US));
                for _ in 0..self.flights.len() {
                    self.deliver(0);
                }
                continue;
            }
            let next = self.sides.iter().filter_map(|s| s.engine.next_timeout()).min();
            let Some(next) = next.filter(|at| *at <= end) else { break };
            self.run_until(next);
        }
        self.now = self.now.max(end);
    }
}
