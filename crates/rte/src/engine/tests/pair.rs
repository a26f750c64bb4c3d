//! Two engines and the links between them, in virtual time: a seed reproduces everything.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

use bifrost_wire::Mac;
use bifrost_wire::bifrost::{AckHeader, Cid, DataHeader, PathId, Psn, Version};

use crate::conn::Pair;
use crate::engine::{Admission, Arrival, Destination, Engine, LocalVnic, Outbound, Verdict};
use crate::output::{Control, Output, PeerId};
use crate::{Config, Ordering, Time, US};

/// A small generator (SplitMix64), so that a run depends on its seed alone.
#[derive(Clone, Debug)]
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn chance(&mut self, p: f64) -> bool {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64 <= p && p > 0.0
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// An ordinary packet.
pub(super) fn data(psn: Psn, cid: Cid, now: Time) -> DataHeader {
    DataHeader {
        version: Version::LATEST,
        cc: 1,
        probe: false,
        ack_now: false,
        from_responder: false,
        ecn: false,
        retransmit: false,
        path: PathId::default(),
        distance: 0,
        psn,
        cid,
        timestamp: now.tick(),
    }
}

/// One direction of one path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) delay_ns: u64,
    pub(super) jitter_ns: u64,
    pub(super) loss: f64,
    pub(super) duplicate: f64,
    pub(super) down: bool,
}

#[derive(Clone, Debug)]
enum Packet {
    Data(DataHeader, u32, u8),
    Probe(DataHeader),
    Skip(DataHeader),
    Ack(AckHeader),
    Setup(bifrost_wire::bifrost::Setup),
    Reset(bifrost_wire::bifrost::Reset),
}

#[derive(Debug)]
struct Flight {
    at: Time,
    order: u64,
    to: usize,
    packet: Packet,
}

impl PartialEq for Flight {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Flight {}
impl PartialOrd for Flight {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Flight {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// What a side's guest sent and received.
#[derive(Debug, Default)]
pub(super) struct Guest {
    /// Handle -> (flow, first sequence number in the flow, segments not yet released).
    held: HashMap<u32, (u32, u32, u32)>,
    next_handle: u32,
    next_seq: BTreeMap<u32, u32>,
    /// Received (flow, sequence) in order of publication, with the time.
    pub(super) seen: Vec<(u32, u32, Time)>,
    /// When each (flow, sequence) was sent.
    pub(super) sent_at: HashMap<(u32, u32), Time>,
    /// Placed handles: handle -> (flow, sequence).
    placed: HashMap<u32, (u32, u32)>,
    next_placed: u32,
    /// Segments sent as plain VXLAN.
    pub(super) plain: u64,
    /// Offered packets held back by a closed window.
    pub(super) backlog: std::collections::VecDeque<(u32, u8)>,
}

impl Guest {
    /// The next sequence number of `flow`.
    pub(super) fn next_seq(&self, flow: u32) -> u32 {
        self.next_seq.get(&flow).copied().unwrap_or_default()
    }

    /// Its port is removed with the placed packets.
    pub(super) fn forget_placed(&mut self) {
        self.placed.clear();
    }

    /// Buffers of packets that have not been released.
    pub(super) fn unreleased(&self) -> usize {
        self.held.len()
    }

    /// Whether all placed packets have been shown.
    pub(super) fn holds_nothing(&self) -> bool {
        self.placed.is_empty()
    }
}

pub(super) struct Side {
    pub(super) engine: Engine,
    pub(super) guest: Guest,
    pub(super) vnic: Option<LocalVnic>,
    pub(super) has_buffers: bool,
    pub(super) ordering: Ordering,
    pub(super) out: Output,
}

pub(super) struct World {
    pub(super) now: Time,
    pub(super) sides: [Side; 2],
    /// `links[from][path]`.
    pub(super) links: [Vec<Link>; 2],
    flights: BinaryHeap<Flight>,
    order: u64,
    pub(super) rng: Rng,
    /// Latest arrival per direction and path, so that a path keeps its order.
    last: [Vec<Time>; 2],
    /// Allows paths to reorder packets.
    pub(super) reorder_within_path: bool,
    pub(super) dropped: u64,
    /// `data_sent[from][path]`: data packets, including retransmissions and their copies.
    pub(super) data_sent: [Vec<u64>; 2],
    /// Data with this PSN is lost on every path.
    pub(super) doomed: Option<Psn>,
    /// SKIPs are lost.
    pub(super) lose_skips: bool,
    pub(super) rogue: Rogue,
    /// Output for this owner belongs to another test's traffic and is ignored.
    pub(super) isolate_owner: Option<u32>,
}

/// A second pair of guests on the same hosts: traffic from side 0 to side 1 over the same paths, whose guests spoil
/// their own packets. The only check on it is that its buffers are released.
#[derive(Debug, Default)]
pub(super) struct Rogue {
    /// The fate of an arrived data packet.
    pub(super) misdeed: Option<fn(&mut Rng, &DataHeader, &RogueView) -> Misdeed>,
    pub(super) view: RogueView,
    /// Handle -> segments not yet released.
    held: HashMap<u32, u32>,
    next_handle: u32,
    placed: u32,
    backlog: std::collections::VecDeque<u8>,
    /// Its own packets that were spoiled.
    pub(super) spoilt: u64,
}

/// Inputs of a rogue's decision.
#[derive(Debug, Default)]
pub(super) struct RogueView {
    pub(super) now: Time,
    /// The sender's best path.
    pub(super) best: PathId,
}

/// What a guest does to one of its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Misdeed {
    /// Nothing.
    None,
    /// Changes its contents between the checksum and the wire.
    Damage,
    /// The receiving guest has no buffer for it.
    NoBuffer,
    /// The receiving guest's own rate limit drops it.
    Limit,
}

/// The port of the rogue's guests.
const ROGUE: u32 = 9;

impl Rogue {
    fn mac(side: usize) -> Mac {
        Mac([2, 0, 0, 0, 9, side as u8 + 1])
    }

    fn release(&mut self, handle: u32) {
        let left = self.held.get_mut(&handle).expect("released once per segment");
        *left -= 1;
        if *left == 0 {
            self.held.remove(&handle);
        }
    }

    /// Buffers that were not released.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }
}

pub(super) const VNI: u32 = 100;

pub(super) fn mac(side: usize) -> Mac {
    Mac([2, 0, 0, 0, 0, side as u8 + 1])
}

impl World {
    pub(super) fn new(seed: u64, paths: usize, configs: [Config; 2]) -> Self {
        let link = Link { delay_ns: 50 * US, jitter_ns: 0, loss: 0.0, duplicate: 0.0, down: false };
        let [a, b] = configs;
        World {
            now: Time(1_000_000_000),
            sides: [side(a, 0), side(b, 1)].map(|mut s| {
                s.engine.add_peer(paths);
                s
            }),
            links: [vec![link; paths], vec![link; paths]],
            flights: BinaryHeap::new(),
            order: 0,
            rng: Rng(seed),
            last: [vec![Time(0); paths], vec![Time(0); paths]],
            reorder_within_path: false,
            dropped: 0,
            data_sent: [vec![0; paths], vec![0; paths]],
            doomed: None,
            lose_skips: false,
            rogue: Rogue::default(),
            isolate_owner: None,
        }
    }

    pub(super) fn pair(side: usize) -> Pair {
        Pair { vni: VNI, local: mac(side), remote: mac(1 - side) }
    }

    pub(super) fn all_links(&mut self, change: impl Fn(&mut Link)) {
        self.links.iter_mut().flatten().for_each(change);
    }

    /// A guest offers a packet of `segments` segments in `flow`.
    pub(super) fn offer(&mut self, side: usize, flow: u32, segments: u8) {
        self.sides[side].guest.backlog.push_back((flow, segments));
        self.pump(side);
    }

    /// The rogue's guest on side 0 offers a packet.
    pub(super) fn offer_rogue(&mut self, segments: u8) {
        self.rogue.backlog.push_back(segments);
        self.pump_rogue();
    }

    fn pump_rogue(&mut self) {
        let now = self.now;
        let Side { engine, out, .. } = &mut self.sides[0];
        let to = Destination {
            vni: VNI,
            owner: ROGUE,
            local: Rogue::mac(0),
            remote: Rogue::mac(1),
            peer: PeerId(0),
            ordering: Ordering::Flow,
        };
        while let Some(&segments) = self.rogue.backlog.front() {
            let handle = self.rogue.next_handle;
            match engine.transmit(now, &to, Outbound { handle, segments, flow: handle % 4 }, out) {
                Admission::Blocked => break,
                Admission::Accepted => drop(self.rogue.held.insert(handle, u32::from(segments))),
                Admission::Plain => {}
            }
            self.rogue.next_handle += 1;
            self.rogue.backlog.pop_front();
        }
        self.carry_out(0);
    }

    /// A packet of side `from` is sent as plain VXLAN, bypassing the engine.
    pub(super) fn send_plain(&mut self, from: usize) {
        let now = self.now;
        let Side { engine, out, ordering, .. } = &mut self.sides[from];
        let (local, remote, ordering) = (mac(from), mac(1 - from), *ordering);
        let to = Destination { vni: VNI, owner: 7, local, remote, peer: PeerId(0), ordering };
        if engine.lacks_observer(now, to.peer) {
            engine.observe(now, &to, out);
        }
        engine.note_plain(now, to.peer);
        self.carry_out(from);
    }

    /// Fetches from the guest until a window closes.
    fn pump(&mut self, from: usize) {
        let now = self.now;
        let Side { engine, guest, out, ordering, .. } = &mut self.sides[from];
        while let Some(&(flow, segments)) = guest.backlog.front() {
            let to = Destination {
                vni: VNI,
                owner: 7,
                local: mac(from),
                remote: mac(1 - from),
                peer: PeerId(0),
                ordering: *ordering,
            };
            let handle = guest.next_handle;
            let first = *guest.next_seq.entry(flow).or_default();
            let admission = engine.transmit(now, &to, Outbound { handle, segments, flow }, out);
            match admission {
                Admission::Blocked => break,
                Admission::Accepted => {
                    guest.held.insert(handle, (flow, first, u32::from(segments)));
                }
                Admission::Plain => guest.plain += u64::from(segments),
            }
            for i in 0..u32::from(segments) {
                guest.sent_at.insert((flow, first + i), now);
            }
            guest.next_seq.insert(flow, first + u32::from(segments));
            guest.next_handle += 1;
            guest.backlog.pop_front();
        }
        self.carry_out(from);
    }

    /// Executes the output of a call of the engine of `side`.
    pub(super) fn send(&mut self, side: usize, out: Output) {
        self.sides[side].out = out;
        self.carry_out(side);
    }

    fn carry_out(&mut self, from: usize) {
        let now = self.now;
        let mut out = std::mem::take(&mut self.sides[from].out);
        if let Some(other) = self.isolate_owner {
            out.publish.retain(|p| p.0 != other);
            out.release.retain(|p| p.0 != other);
            out.data.retain(|d| d.owner != other);
            out.plain.retain(|p| p.owner != other);
        }
        out.publish.retain(|p| p.0 != ROGUE);
        for &(owner, handle) in &out.publish {
            assert_eq!(owner, 7);
            let guest = &mut self.sides[from].guest;
            let (flow, seq) = guest.placed.remove(&handle).expect("published once, and only if placed");
            guest.seen.push((flow, seq, now));
        }
        let early = out.control.iter().any(|c| matches!(c.packet, Control::Ack(a) if !a.probe));
        assert!(!early, "an ACK covers unpublished packets");
        self.sides[from].engine.flush_acks(now, &mut out);
        for d in &out.data {
            let rogues = d.owner == ROGUE && self.rogue.held.contains_key(&d.handle);
            assert!(
                rogues || self.sides[from].guest.held.contains_key(&d.handle),
                "sends a buffer that it has released"
            );
            self.launch(from, d.header.path.index(), Packet::Data(d.header, d.handle, d.segment));
        }
        for c in out.control.iter().filter(|c| c.peer == PeerId(0)) {
            let packet = match c.packet {
                Control::Ack(a) => Packet::Ack(a),
                Control::Probe(h) => Packet::Probe(h),
                Control::Skip(h) => Packet::Skip(h),
                Control::Setup(s) => Packet::Setup(s),
                Control::Reset(r) => Packet::Reset(r),
            };
            self.launch(from, c.path.index(), packet);
        }
        for handle in out.release.iter().filter(|r| r.0 == ROGUE).map(|r| r.1) {
            self.rogue.release(handle);
        }
        for handle in out.plain.iter().filter(|p| p.owner == ROGUE).map(|p| p.handle) {
            self.rogue.release(handle);
        }
        out.release.retain(|r| r.0 != ROGUE);
        out.plain.retain(|p| p.owner != ROGUE);
        let guest = &mut self.sides[from].guest;
        let plain: Vec<_> = out.plain.iter().map(|p| (p.owner, p.handle)).collect();
        guest.plain += plain.len() as u64;
        for &(owner, handle) in out.release.iter().chain(&plain) {
            assert_eq!(owner, 7, "released to another owner");
            let left = &mut guest.held.get_mut(&handle).expect("released once per segment").2;
            *left -= 1;
            if *left == 0 {
                guest.held.remove(&handle);
            }
        }
        out.clear();
        self.sides[from].out = out;
    }

    fn launch(&mut self, from: usize, path: usize, packet: Packet) {
        let link = self.links[from][path];
        self.data_sent[from][path] += u64::from(matches!(packet, Packet::Data(..)));
        let doomed = matches!(packet, Packet::Data(h, ..) if Some(h.psn) == self.doomed);
        let skip = matches!(packet, Packet::Skip(_)) && self.lose_skips;
        if doomed || skip || link.down || self.rng.chance(link.loss) {
            self.dropped += 1;
            return;
        }
        let copies = 1 + usize::from(self.rng.chance(link.duplicate));
        for _ in 0..copies {
            let jitter = if link.jitter_ns > 0 { self.rng.below(link.jitter_ns) } else { 0 };
            let mut at = self.now.after(link.delay_ns + jitter);
            if !self.reorder_within_path {
                at = at.max(self.last[from][path]);
                self.last[from][path] = at;
            }
            self.order += 1;
            self.flights.push(Flight { at, order: self.order, to: 1 - from, packet: packet.clone() });
        }
    }

    /// Runs until `end`.
    pub(super) fn run_until(&mut self, end: Time) {
        loop {
            let arrival = self.flights.peek().map_or(Time::NEVER, |f| f.at);
            let timers = self.sides.iter().filter_map(|s| s.engine.next_timeout()).min().unwrap_or(Time::NEVER);
            let next = arrival.min(timers);
            if next > end {
                self.now = end;
                return;
            }
            self.now = self.now.max(next);
            if timers <= arrival {
                for side in 0..2 {
                    let now = self.now;
                    let Side { engine, out, .. } = &mut self.sides[side];
                    engine.on_timeout(now, out);
                    self.carry_out(side);
                    self.pump(side);
                }
                self.pump_rogue();
                continue;
            }
            let mut touched = BTreeSet::new();
            while self.flights.peek().is_some_and(|f| f.at <= self.now) {
                if let Some(flight) = self.flights.pop() {
                    touched.insert(flight.to);
                    self.deliver(flight);
                }
            }
            for side in touched {
                self.carry_out(side);
                self.pump(side);
            }
            self.pump_rogue();
        }
    }

    pub(super) fn run_for(&mut self, nanos: u64) {
        self.run_until(self.now.after(nanos));
    }

    fn deliver(&mut self, flight: Flight) {
        let now = self.now;
        let from_held = |world: &World, handle: u32, segment: u8| {
            let guest = &world.sides[1 - flight.to].guest;
            guest.held.get(&handle).map(|&(flow, first, _)| (flow, first + u32::from(segment)))
        };
        let identity = match &flight.packet {
            // A copy may arrive after the buffer was released; then it is a duplicate, and its contents are not used.
            Packet::Data(_, handle, segment) => from_held(self, *handle, *segment),
            _ => None,
        };
        let arrival = Arrival { peer: PeerId(0), vni: VNI, nic_rx: now, hops: 2, marked: false };
        self.rogue.view.now = now;
        if let Some(best) = self.sides[0].engine.selected_paths(PeerId(0)).first() {
            self.rogue.view.best = *best;
        }
        let Side { engine, guest, vnic, has_buffers, out, .. } = &mut self.sides[flight.to];
        match flight.packet {
            Packet::Data(header, ..) => {
                if let Verdict::Place { owner, slot } = engine.on_data(now, &arrival, &header, out) {
                    if owner == ROGUE {
                        let Rogue { misdeed, view, .. } = &self.rogue;
                        let misdeed = misdeed.map_or(Misdeed::None, |misdeed| misdeed(&mut self.rng, &header, view));
                        self.rogue.spoilt += u64::from(misdeed != Misdeed::None);
                        match misdeed {
                            Misdeed::None => {
                                self.rogue.placed += 1;
                                engine.placed(now, slot, self.rogue.placed, out);
                            }
                            Misdeed::Damage => engine.damaged(slot),
                            Misdeed::NoBuffer => engine.not_placed(slot),
                            Misdeed::Limit => engine.rate_limited(slot),
                        }
                        return;
                    }
                    assert_eq!(owner, 7);
                    if !*has_buffers {
                        engine.not_placed(slot);
                        return;
                    }
                    let handle = guest.next_placed;
                    guest.next_placed += 1;
                    guest.placed.insert(handle, identity.expect("a new packet's buffer is still held"));
                    if !engine.placed(now, slot, handle, out) {
                        guest.placed.remove(&handle);
                    }
                }
            }
            Packet::Probe(header) => engine.on_probe(now, &arrival, &header, out),
            Packet::Skip(header) => engine.on_skip(now, &arrival, &header, out),
            Packet::Ack(ack) => engine.on_ack(now, &arrival, &ack, out),
            Packet::Setup(setup) => {
                let rogue = LocalVnic { owner: ROGUE, ordering: Ordering::Flow, reliable: true };
                let vnic = if setup.to == Rogue::mac(flight.to) { Some(rogue) } else { *vnic };
                engine.on_setup(now, &arrival, &setup, vnic, out);
            }
            Packet::Reset(reset) => engine.on_reset(now, &arrival, &reset, out),
        }
    }

    /// The other guest has seen every packet that `from` offered exactly once, in order per flow, and all buffers and
    /// pages are released.
    pub(super) fn assert_complete(&self, from: usize) {
        let sender = &self.sides[from].guest;
        let receiver = &self.sides[1 - from].guest;
        assert!(sender.backlog.is_empty(), "{} packets still wait", sender.backlog.len());
        let mut expected: BTreeMap<u32, u32> = BTreeMap::new();
        for &(flow, seq, _) in &receiver.seen {
            let next = expected.entry(flow).or_default();
            assert_eq!(seq, *next, "flow {flow} out of order, lost or repeated");
            *next += 1;
        }
        assert_eq!(expected, sender.next_seq, "packets per flow");
        assert!(sender.held.is_empty(), "{} buffers never released", sender.held.len());
        assert!(receiver.placed.is_empty(), "{} packets never shown", receiver.placed.len());
    }

    /// Every packet that a side sent reliably ends in a counter: received, given up, or sent again by a connection that
    /// restarted.
    pub(super) fn assert_accounted(&self) {
        for from in 0..2 {
            let (sender, receiver) = (self.sides[from].engine.counters(), self.sides[1 - from].engine.counters());
            let ended = receiver.received_packets + sender.given_up_packets + sender.restarted_packets;
            assert!(sender.sent_packets <= ended, "side {from}: {} packets sent, {ended} ended", sender.sent_packets);
        }
    }

    /// No guest or engine holds any packet state.
    pub(super) fn assert_empty(&self) {
        for side in &self.sides {
            assert!(side.guest.backlog.is_empty(), "{} packets still wait", side.guest.backlog.len());
            assert!(side.guest.held.is_empty(), "{} buffers never released", side.guest.held.len());
            assert!(side.guest.holds_nothing(), "{} packets never shown", side.guest.placed.len());
            assert_eq!(side.engine.pages_used(), (0, 0));
        }
    }

    /// Latency of each seen packet of the guest of `side`, ns, sorted.
    pub(super) fn latencies(&self, side: usize) -> Vec<u64> {
        let sent = &self.sides[1 - side].guest.sent_at;
        let mut all: Vec<u64> =
            self.sides[side].guest.seen.iter().map(|(f, s, at)| at.since(sent[&(*f, *s)])).collect();
        all.sort_unstable();
        all
    }

    /// Side `side` crashes and restarts with a newer instance; only its guest remembers what it saw. Its guest's unsent
    /// packets stay.
    pub(super) fn restart(&mut self, index: usize, instance: u64, paths: usize) {
        let config = self.sides[index].engine.config().clone();
        let salt = self.rng.next() as u32;
        let mut engine = Engine::new(config, 0, instance, salt);
        engine.add_peer(paths);
        self.sides[index].engine = engine;
        self.sides[index].out.clear();
        self.sides[index].guest.placed.clear();
    }
}

fn side(config: Config, index: usize) -> Side {
    Side {
        engine: Engine::new(config, 0, 1000 + index as u64, 0x00ab_cdef ^ index as u32),
        guest: Guest::default(),
        vnic: Some(LocalVnic { owner: 7, ordering: Ordering::Flow, reliable: true }),
        has_buffers: true,
        ordering: Ordering::Flow,
        out: Output::default(),
    }
}
