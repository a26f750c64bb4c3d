//! Every order in which a network can deliver and lose the first packets of a connection, up to a depth: in all cases
//! the two sides agree in the end, and all offered packets arrive.

use std::collections::VecDeque;

use bifrost_wire::bifrost::{DataHeader, Reset};

use super::pair::{VNI, World, mac};
use super::*;
use crate::US;
use crate::output::Control;

/// How many packets may overtake the oldest one.
const REORDER: usize = 2;
/// How often time may pass while packets are in flight: with more, a side concludes that the peer does not answer.
const WAITS: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// Neither knows the other; both want to send.
    Cold,
    /// One sends a REQUEST.
    OneSided,
    /// Both have a connection, and each is told that the other has forgotten it.
    BothReset,
    /// One of two connected sides dies.
    OneRestarts,
    /// Both die.
    BothRestart,
}

enum Flight {
    Data(DataHeader, u32),
    Control(Control),
}

/// Two engines and the packets between them; the test determines the order of all events.
struct Line {
    engines: [Engine; 2],
    out: Output,
    now: Time,
    flights: VecDeque<(usize, Flight)>,
    /// Identities of packets that each guest has seen.
    seen: [Vec<u32>; 2],
    released: [usize; 2],
    /// Identities of packets sent as plain VXLAN, given up after 28 ms.
    plain: [Vec<u32>; 2],
    waits: u32,
}

impl Line {
    fn new() -> Self {
        let engine = |index: u32, instance| {
            let mut engine = Engine::new(Config::default(), 0, instance, index * 7);
            engine.add_peer(2);
            engine
        };
        Line {
            engines: [engine(1, 100), engine(2, 200)],
            out: Output::default(),
            now: Time(1_000_000),
            flights: VecDeque::new(),
            seen: [vec![], vec![]],
            released: [0, 0],
            plain: [vec![], vec![]],
            waits: 0,
        }
    }

    fn offer(&mut self, side: usize, name: u32) {
        let to = Destination {
            vni: VNI,
            owner: 7,
            local: mac(side),
            remote: mac(1 - side),
            peer: PeerId(0),
            ordering: Ordering::Flow,
        };
        let packet = Outbound { handle: name, segments: 1, flow: 1 };
        let admission = self.engines[side].transmit(self.now, &to, packet, &mut self.out);
        assert_eq!(admission, Admission::Accepted);
        self.carry_out(side);
    }

    fn restart(&mut self, side: usize) {
        let instance = 1_000 + self.engines[side].instance;
        self.engines[side] = Engine::new(Config::default(), 0, instance, instance as u32);
        self.engines[side].add_peer(2);
        // A process takes longer to start than packets live.
        self.flights.retain(|(to, _)| *to == side);
    }

    fn carry_out(&mut self, side: usize) {
        self.seen[side].extend(self.out.publish.drain(..).map(|(_, name)| name));
        self.engines[side].flush_acks(self.now, &mut self.out);
        let data = self.out.data.drain(..).map(|d| Flight::Data(d.header, d.handle));
        let control = self.out.control.drain(..).map(|c| Flight::Control(c.packet));
        self.flights.extend(data.chain(control).map(|flight| (1 - side, flight)));
        self.plain[side].extend(self.out.plain.drain(..).map(|p| p.handle));
        self.released[side] += self.out.release.drain(..).len();
    }

    fn deliver(&mut self, at: usize) {
        let Some((to, flight)) = self.flights.remove(at) else { return };
        let arrival = Arrival { peer: PeerId(0), vni: VNI, nic_rx: self.now, hops: 0, marked: false };
        let vnic = LocalVnic { owner: 7, ordering: Ordering::Flow, reliable: true };
        let (engine, now, out) = (&mut self.engines[to], self.now, &mut self.out);
        match flight {
            Flight::Data(header, name) => {
                if let Verdict::Place { slot, .. } = engine.on_data(now, &arrival, &header, out) {
                    assert!(engine.placed(now, slot, name, out));
                }
            }
            Flight::Control(Control::Ack(ack)) => engine.on_ack(now, &arrival, &ack, out),
            Flight::Control(Control::Probe(header)) => engine.on_probe(now, &arrival, &header, out),
            Flight::Control(Control::Skip(header)) => engine.on_skip(now, &arrival, &header, out),
            Flight::Control(Control::Setup(setup)) => engine.on_setup(now, &arrival, &setup, Some(vnic), out),
            Flight::Control(Control::Reset(reset)) => engine.on_reset(now, &arrival, &reset, out),
        }
        self.carry_out(to);
    }

    /// Advances to the next deadline of either side.
    fn wait(&mut self) {
        self.waits += 1;
        let due = |side: usize| Some((self.engines[side].next_timeout()?, side));
        if let Some((at, side)) = [0, 1].into_iter().filter_map(due).min() {
            self.now = self.now.max(at);
            self.engines[side].on_timeout(self.now, &mut self.out);
            self.carry_out(side);
        }
    }

    /// Delivers everything after 50 us, for this long.
    fn calm(&mut self, nanos: u64) {
        let end = self.now.after(nanos);
        while self.now < end {
            if self.flights.is_empty() {
                let next = self.engines.iter().filter_map(Engine::next_timeout).min().unwrap_or(end);
                self.now = self.now.max(next.min(end));
            } else {
                self.now = self.now.after(50 * US);
                (0..self.flights.len()).for_each(|_| self.deliver(0));
            }
            for side in [0, 1] {
                self.engines[side].on_timeout(self.now, &mut self.out);
                self.carry_out(side);
            }
        }
    }

    /// The two sides before the network becomes unreliable; returns what must arrive at each.
    fn start(start: Start) -> (Self, [Vec<u32>; 2]) {
        let mut line = Line::new();
        if !matches!(start, Start::Cold | Start::OneSided) {
            line.offer(0, 1);
            line.offer(1, 2);
            line.calm(MS);
            line.seen = [vec![], vec![]];
        }
        let cid = |line: &Line, side: usize| line.engines[side].cid_of(World::pair(side));
        match start {
            Start::Cold | Start::OneSided => {}
            Start::BothReset => {
                let cids = [cid(&line, 0), cid(&line, 1)];
                for side in [0, 1] {
                    let arrival = Arrival { peer: PeerId(0), vni: VNI, nic_rx: line.now, hops: 0, marked: false };
                    let reset = Reset { unknown: cids[1 - side].expect("open") };
                    line.engines[side].on_reset(line.now, &arrival, &reset, &mut line.out);
                    line.carry_out(side);
                }
            }
            Start::OneRestarts => line.restart(0),
            Start::BothRestart => [0, 1].into_iter().for_each(|side| line.restart(side)),
        }
        line.released = [0, 0];
        line.offer(0, 10);
        if start == Start::OneSided {
            return (line, [vec![], vec![10]]);
        }
        line.offer(1, 20);
        (line, [vec![20], vec![10]])
    }
}

/// The possible next events; the first is the default.
fn choices(line: &Line) -> usize {
    let deliveries = line.flights.len().min(1 + REORDER);
    // Deliver one of them, lose the oldest, or let time pass.
    deliveries + usize::from(deliveries > 0) + usize::from(line.waits < WAITS || deliveries == 0)
}

fn step(line: &mut Line, choice: usize) {
    let deliveries = line.flights.len().min(1 + REORDER);
    match choice {
        n if n < deliveries => line.deliver(n),
        n if n == deliveries && deliveries > 0 => drop(line.flights.pop_front()),
        _ => line.wait(),
    }
}

/// Plays one sequence of choices to its end; returns the number of choices at each step.
fn play(start: Start, path: &[usize]) -> Vec<usize> {
    let (mut line, offered) = Line::start(start);
    let mut counts = Vec::new();
    for &choice in path {
        counts.push(choices(&line));
        step(&mut line, choice);
    }
    line.calm(100 * MS);
    let told = format!("{start:?} {path:?}");
    // Nothing is given up before the time is over; a packet that is given up was lost at least three times.
    let patient = path.iter().filter(|choice| **choice > 0).count() < 3;
    assert!(!patient || line.plain == [vec![], vec![]], "{told}: {:?} given up", line.plain);
    let ends = [0, 1].map(|side| line.engines[side].connection_snapshots(line.now).next());
    // Five losses in a row can be five REQUESTs, after which a peer becomes plain.
    let unanswered = line.engines.iter().any(|e| e.counters().unanswered_connections > 0);
    if !unanswered || patient {
        let [Some(a), Some(b)] = ends else { panic!("{told}: no connection: {ends:?}") };
        assert_eq!((a.state, b.state), (State::Open, State::Open), "{told}");
        assert_eq!((a.local_cid, a.peer_cid), (b.peer_cid, b.local_cid), "{told}: they do not agree");
    }
    for side in [0, 1] {
        assert!(line.engines[side].connections() <= 1, "{told}");
        let restarts = line.engines[side].counters().restarted_connections;
        assert!(restarts <= 3, "{told}: {restarts} restarts");
        let other = &line.plain[1 - side];
        let arrived = |name: &u32| line.seen[side].contains(name) || other.contains(name);
        assert!(offered[side].iter().all(arrived), "{told}: {:?}, plain {other:?}", line.seen);
        let back = line.released[1 - side] + other.len();
        assert_eq!(back, offered[side].len(), "{told}: buffers come back");
    }
    counts
}

/// Depth first through all choices, playing each sequence from its start; returns the number of sequences.
fn explore(start: Start, depth: usize) -> usize {
    let mut path = vec![0; depth];
    let mut lines = 0;
    loop {
        let counts = play(start, &path);
        lines += 1;
        let Some(at) = (0..depth).rev().find(|&i| path[i] + 1 < counts[i]) else { return lines };
        path[at] += 1;
        path[at + 1..].fill(0);
    }
}

const STARTS: [Start; 5] = [Start::Cold, Start::OneSided, Start::BothReset, Start::OneRestarts, Start::BothRestart];

#[test]
fn two_sides_agree_whatever_happens_to_the_first_packets() {
    for start in STARTS {
        let lines = explore(start, if cfg!(miri) { 1 } else { 6 });
        assert!(cfg!(miri) || lines > 200, "{start:?}: {lines} lines");
    }
}

/// A daemon that restarts at once: packets of its former life to the same CID must not count for the new one (PROTOCOL
/// 4.4).
#[test]
fn a_request_after_data_gets_a_cid_unknown_to_former_instances() {
    for heard in [false, true] {
        let mut line = Line::new();
        line.offer(0, 1);
        let told = line.engines[0].cid_of(World::pair(0)).expect("opening");
        // The peer accepts the REQUEST and has data to send; its RESPONSE is lost.
        line.deliver(0);
        line.offer(1, 2);
        line.flights.retain(|(_, flight)| heard && matches!(flight, Flight::Data(..)));
        (0..line.flights.len()).for_each(|_| line.deliver(0));
        assert!(line.seen[0].is_empty(), "not open yet");
        line.restart(1);
        line.offer(1, 3);
        line.calm(20 * MS);
        assert_eq!(line.seen, [vec![3], vec![1]]);
        let now = line.engines[0].cid_of(World::pair(0)).expect("open");
        assert_eq!(now != told, heard, "heard: {heard}");
    }
}

/// The same at a greater depth, in minutes: `make prove`.
#[test]
#[ignore = "minutes"]
fn two_sides_agree_in_full() {
    for start in STARTS {
        eprintln!("{start:?}: {} lines", explore(start, 9));
    }
}
