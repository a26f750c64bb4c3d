//! Compares the hosts' packets on the wire with the protocol.

use bifrost_datapath::Core;
use bifrost_rte::State;
use bifrost_wire::bifrost::{AckHeader, AckKind, Cid, DataHeader, Packet as Bifrost, Setup, SetupKind};
use foldhash::fast::FixedState;
use hashbrown::{HashMap, HashSet};

use super::calm::Calm;
use super::seen::Seen;
use crate::checker::{Checker, Wire};
use crate::faults::Action;
use crate::flows::peek;
use crate::packet::Packet;
use crate::port::SimPort;
use crate::rng::mix;
use crate::violation::{Kind, Violations};
use crate::world::World;

/// Longest ACK delay of a receiver that adapts it (PROTOCOL §11), ns.
const ACK_DELAY_NS: u64 = 500_000;
/// Number of packets in a long turn of a host's loop. An ACK can be late by two such turns.
const LONG_TURN_PACKETS: u64 = 8_000;

/// The receiver has accepted it.
const TAKEN: u8 = 1;
/// The sender has read an ACK for it, in this turn or an earlier one.
const HEARD: u8 = 2;
/// ... in an earlier turn.
const ACKED: u8 = 4;

/// One packet of a stream.
#[derive(Clone, Copy, Debug)]
struct Sent {
    frame: u64,
    light: Option<(u32, u32)>,
    first_at: u64,
    sends: u16,
    distance: u8,
    state: u8,
}

/// One direction of a connection, from its set-up until it restarts: all packets sent to one CID.
#[derive(Debug, Default)]
struct Stream {
    from: u32,
    packets: Vec<Sent>,
    /// Packets below these indexes are acknowledged: as far as the sender has read ACKs (`heard`), as far as the
    /// receiver has claimed (`claimed`), or because the receiver was told to skip them (`skipped`).
    heard: usize,
    claimed: usize,
    skipped: usize,
    /// Start of the receiver's turn in which it placed the oldest unacknowledged packet, ns.
    unanswered: Option<u64>,
    /// Number of the receiver's turn in which it last sent an ACK.
    answered_in: u64,
}

/// Receiving host and its CID.
type Key = (u32, u32);

#[derive(Clone, Debug, Default)]
struct HostState {
    turns: u64,
    /// Start of its current turn, ns.
    turn_at: u64,
    /// Packets that ACKs have named in this turn: stream, range of indexes.
    heard: Vec<(Key, usize, usize)>,
    /// Connections that ended, or fell back, up to the last turn.
    ended: u64,
    /// ... in this turn: their packets leave as plain VXLAN.
    surrenders: bool,
    /// Its connections: own CID, the peer's CID.
    connections: Vec<(u32, u32)>,
    opened: u64,
    ack_delay: u64,
    give_up: (u16, u64),
    /// Number of packets sent reliably that later left as plain VXLAN, since the daemon started.
    surrendered: u64,
    first_psn: u32,
}

/// The checker.
#[derive(Debug)]
pub struct Conversation {
    calm: Calm,
    hosts: Vec<HostState>,
    streams: HashMap<Key, Stream, FixedState>,
    /// Streams of which one end has crashed.
    dead: HashSet<Key, FixedState>,
    /// The set-up attempt that a CID belongs to, by its owner and the CID. Few CIDs are in use, and they are reused.
    attempts: HashMap<Key, (u64, u32), FixedState>,
    /// The stream on which each light packet was last sent reliably.
    carried: HashMap<(u32, u32), (Key, usize), FixedState>,
    /// Claims of ACKs in this turn: receiving host, stream, range of packets.
    claims: Vec<(Key, usize, usize)>,
    placed: Seen,
    /// Packets that left as plain VXLAN, so it is unknown which copy was placed.
    plain: Seen,
    shown: Seen,
    /// By flow: VNI, sending and receiving host.
    flows: Vec<(u32, u32, u32)>,
    macs: Vec<[u8; 6]>,
    /// Maximum delay of an ACK: two long turns, ns.
    slack: u64,
}

impl Conversation {
    /// Creates the checker for this world.
    pub fn new(world: &World) -> Self {
        let guests = world.guests();
        let flow = |f| {
            let flow = world.flows().get(f);
            let (from, to) = (&guests[flow.from as usize], &guests[flow.to as usize]);
            (from.vni, from.host, to.host)
        };
        let host = &world.scenario().host;
        Conversation {
            calm: Calm::default(),
            hosts: vec![HostState::default(); world.hosts().len()],
            streams: HashMap::default(),
            dead: HashSet::default(),
            attempts: HashMap::default(),
            carried: HashMap::default(),
            claims: Vec::new(),
            placed: Seen::none_of(world.flows().next_flow()),
            plain: Seen::none_of(world.flows().next_flow()),
            shown: Seen::none_of(world.flows().next_flow()),
            flows: (0..world.flows().next_flow()).map(flow).collect(),
            macs: guests.iter().map(|g| g.mac).collect(),
            slack: 2 * (host.turn_cost.0 + host.packet_cost.0 * LONG_TURN_PACKETS),
        }
    }

    /// A frame on the wire must belong to its hosts and its network.
    fn check_addresses(&self, at: u64, packet: &Packet, frame: &[u8], violations: &mut Violations) {
        let Some(light) = peek(frame) else { return };
        let want = self.flows.get(light.0 as usize).copied();
        let is = (packet.vni().unwrap_or(0), packet.src, packet.dst);
        if want.is_some_and(|want| want != is) {
            violations.add(at, Kind::WrongGuest, || {
                format!(
                    "packet {} of flow {} is sent as (VNI, from, to) {is:?}, but belongs to {want:?}",
                    light.1, light.0
                )
            });
        }
    }

    fn data_sent(&mut self, at: u64, packet: &Packet, header: &DataHeader, frame: &[u8], violations: &mut Violations) {
        self.check_addresses(at, packet, frame, violations);
        let key = (packet.dst, header.cid.0);
        if self.dead.contains(&key) {
            return;
        }
        let first = self.hosts[packet.src as usize].first_psn;
        let stream = self.streams.entry(key).or_insert_with(|| Stream { from: packet.src, ..Stream::default() });
        let index = header.psn.0.wrapping_sub(first) as usize;
        let (light, hash) = (peek(frame), fingerprint(frame));
        let mut wrong = |what: &str| {
            violations.add(at, Kind::Other("sender"), || {
                format!("host {} to {}, CID {:#x}, packet {index}: {what}", packet.src, key.0, key.1)
            });
        };
        if !header.retransmit {
            if index != stream.packets.len() {
                return wrong("a new packet out of sequence");
            }
            let (first_at, sends, distance, state) = (at, 1, header.distance, 0);
            stream.packets.push(Sent { frame: hash, light, first_at, sends, distance, state });
            if let Some(light) = light {
                self.carried.insert(light, (key, index));
            }
            return;
        }
        let Some(sent) = stream.packets.get_mut(index) else { return wrong("retransmitted, but never sent before") };
        sent.sends = sent.sends.saturating_add(1);
        if sent.frame != hash {
            wrong("retransmitted with another frame");
        }
        if sent.distance != header.distance {
            wrong("retransmitted with another flow distance");
        }
        if sent.state & ACKED != 0 {
            wrong("retransmitted after its acknowledgement");
        }
    }

    fn plain_sent(&mut self, at: u64, packet: &Packet, frame: &[u8], violations: &mut Violations) {
        self.check_addresses(at, packet, frame, violations);
        let Some(light) = peek(frame) else { return };
        // A second copy, kept through an outage, is of a packet that is already counted as given up.
        let again = self.plain.has(light);
        self.plain.add(frame);
        if again {
            return;
        }
        let Some(&(key, index)) = self.carried.get(&light) else { return };
        let Some(sent) = self.streams.get(&key).and_then(|s| s.packets.get(index)) else { return };
        let host = &mut self.hosts[packet.src as usize];
        host.surrendered += 1;
        let mut wrong = |what: &str| {
            violations.add(at, Kind::Other("given_up"), || {
                let (sends, ms) = (sent.sends, (at - sent.first_at) as f64 / 1e6);
                format!("packet {} of flow {}, sent {sends} times within {ms:.3} ms: {what}", light.1, light.0)
            });
        };
        if sent.state & ACKED != 0 {
            return wrong("as plain VXLAN after its acknowledgement");
        }
        let (tries, age) = host.give_up;
        // The engine uses the current RTO, so the actual wait may be shorter.
        if !host.surrenders && (sent.sends < tries || at - sent.first_at < age / 2) {
            wrong("given up too early");
        }
    }

    fn set_up(&mut self, packet: &Packet, setup: &Setup) {
        if matches!(setup.kind, SetupKind::Reject(_)) {
            return;
        }
        let (key, attempt) = ((packet.src, setup.local.0), (setup.instance, setup.generation));
        if self.attempts.insert(key, attempt).is_some_and(|before| before != attempt) {
            self.streams.remove(&key);
        }
    }

    /// An ACK at its sender, which is the receiver of data.
    fn ack_sent(&mut self, at: u64, packet: &Packet, ack: &AckHeader, violations: &mut Violations) {
        let receiver = packet.src;
        let own = self.hosts[receiver as usize].connections.iter().find(|(_, peer)| *peer == ack.cid.0);
        let Some(key) = own.map(|(own, _)| (receiver, *own)) else { return };
        let first = self.hosts[packet.dst as usize].first_psn;
        let host = &self.hosts[receiver as usize];
        let Some(stream) = self.streams.get_mut(&key) else { return };
        let base = ack.base.0.wrapping_sub(first) as usize;
        let mut wrong = |what: String| {
            violations.add(at, Kind::Other("receiver"), || {
                format!("host {receiver} to {}, about CID {:#x}: {what}", packet.dst, key.1)
            });
        };
        let taken = |stream: &Stream, i: usize| stream.packets.get(i).is_some_and(|p| p.state & TAKEN != 0);
        for bit in ack.bitmap.iter().map(|bit| base + bit).filter(|_| !refuses(ack)) {
            if !taken(stream, bit) {
                return wrong(format!("acknowledges packet {bit} without having received it"));
            }
        }
        let answers = matches!(ack.kind, AckKind::Cumulative | AckKind::Selective) && !ack.probe;
        if answers && let Some(placed) = stream.unanswered.take() {
            let due = placed.max(self.calm.paused_until(receiver)) + host.ack_delay + self.slack;
            if host.turn_at > due {
                wrong(format!("an ACK that is {:.3} ms late", (host.turn_at - due) as f64 / 1e6));
            }
        }
        if ack.kind != AckKind::Cumulative {
            return;
        }
        for i in stream.claimed..base {
            if i >= stream.skipped && !taken(stream, i) {
                return wrong(format!("acknowledges all below {base}, but has not received {i}"));
            }
        }
        if base > stream.claimed {
            self.claims.push((key, stream.claimed, base));
            stream.claimed = base;
        }
        if ack.probe {
            return;
        }
        if stream.answered_in == host.turns {
            wrong("acknowledges twice in one batch, so once before publication".into());
        }
        stream.answered_in = host.turns;
    }

    /// An ACK at its receiver, which is the sender of data.
    fn ack_taken(&mut self, packet: &Packet, ack: &AckHeader) {
        let host = &mut self.hosts[packet.dst as usize];
        let peers = host.connections.iter().find(|(own, _)| *own == ack.cid.0);
        let Some(key) = peers.map(|(_, peers)| (packet.src, *peers)) else { return };
        let base = ack.base.0.wrapping_sub(host.first_psn) as usize;
        let Some(stream) = self.streams.get_mut(&key) else { return };
        if refuses(ack) {
            return;
        }
        if ack.kind == AckKind::Cumulative && base > stream.heard {
            host.heard.push((key, stream.heard, base));
            stream.heard = base;
        }
        for bit in ack.bitmap.iter().map(|bit| base + bit) {
            if let Some(sent) = stream.packets.get_mut(bit).filter(|p| p.state & HEARD == 0) {
                sent.state |= HEARD;
                host.heard.push((key, bit, bit + 1));
            }
        }
    }

    fn data_taken(&mut self, packet: &Packet, header: &DataHeader, frame: &[u8]) {
        // Whichever stream it belongs to: a copy that arrives later, on a restarted connection, was not placed.
        let placed = peek(frame).filter(|light| self.placed.has(*light));
        if let Some(light) = placed {
            self.placed.remove(light);
        }
        let key = (packet.dst, header.cid.0);
        let turn_at = self.hosts[packet.dst as usize].turn_at;
        let Some(stream) = self.streams.get_mut(&key) else { return };
        let index = header.psn.0.wrapping_sub(self.hosts[stream.from as usize].first_psn) as usize;
        let Some(sent) = stream.packets.get_mut(index) else { return };
        sent.state |= TAKEN;
        if placed.is_some_and(|light| !self.plain.has(light)) {
            stream.unanswered.get_or_insert(turn_at);
        }
    }

    /// Packets that a cumulative ACK covers must be published by now.
    fn check_claims(&mut self, at: u64, violations: &mut Violations) {
        for (key, from, to) in self.claims.drain(..) {
            let Some(stream) = self.streams.get(&key) else { continue };
            for (i, sent) in (from..to).filter_map(|i| Some((i, stream.packets.get(i)?))) {
                let hidden = sent.state & TAKEN != 0 && sent.light.is_some_and(|light| !self.shown.has(light));
                if hidden && i >= stream.skipped {
                    violations.add(at, Kind::Other("receiver"), || {
                        format!("host {}, CID {:#x}: claims that packet {i} is published, but it is not", key.0, key.1)
                    });
                    break;
                }
            }
        }
    }

    /// Finds ACKs that should have been sent in an earlier turn.
    fn check_answers(&mut self, at: u64, host: u32, core: &Core<SimPort>, violations: &mut Violations) {
        let due = self.hosts[host as usize].ack_delay + self.slack;
        let awake = self.calm.paused_until(host);
        let late = |s: &Stream| s.unanswered.is_some_and(|placed| at > placed.max(awake) + due);
        for (key, stream) in self.streams.iter_mut().filter(|(key, s)| key.0 == host && late(s)) {
            stream.unanswered = None;
            let lives = |cid: Cid| {
                let all = &mut core.engine().connection_snapshots(bifrost_rte::Time(0));
                all.any(|c| c.local_cid == cid && matches!(c.state, State::Open | State::BestEffort))
            };
            if lives(Cid(key.1)) {
                violations.add(at, Kind::Other("receiver"), || format!("host {host}, CID {:#x}: owes an ACK", key.1));
            }
        }
    }

    /// One packet of a datagram; `None` if it is invalid.
    fn wire_packet(
        &mut self,
        at: u64,
        what: Wire,
        packet: &Packet,
        inside: Option<Bifrost<'_>>,
        violations: &mut Violations,
    ) {
        match (what, inside) {
            (Wire::Sent, Some(Bifrost::Data(header, frame))) => self.data_sent(at, packet, &header, frame, violations),
            (Wire::Sent, Some(Bifrost::Ack(ack))) => self.ack_sent(at, packet, &ack, violations),
            (Wire::Sent, Some(Bifrost::Setup(setup))) => self.set_up(packet, &setup),
            (Wire::Taken, Some(Bifrost::Data(header, frame))) => self.data_taken(packet, &header, frame),
            (Wire::Taken, Some(Bifrost::Ack(ack))) => self.ack_taken(packet, &ack),
            (Wire::Taken, Some(Bifrost::Skip(header))) => {
                if let Some(stream) = self.streams.get_mut(&(packet.dst, header.cid.0)) {
                    let first = self.hosts[stream.from as usize].first_psn;
                    stream.skipped = stream.skipped.max(header.psn.0.wrapping_sub(first) as usize);
                }
            }
            (Wire::Sent, None) => {
                violations.add(at, Kind::Other("sender"), || format!("host {} sends an invalid packet", packet.src));
            }
            _ => {}
        }
    }
}

impl Checker for Conversation {
    fn wire(&mut self, at: u64, what: Wire, packet: &Packet, violations: &mut Violations) {
        if !matches!(what, Wire::Sent | Wire::Taken) {
            return;
        }
        if let Some(frame) = packet.plain() {
            if what == Wire::Sent {
                self.plain_sent(at, packet, frame, violations);
            }
            return;
        }
        for inside in packet.bifrost() {
            self.wire_packet(at, what, packet, inside, violations);
        }
    }

    fn placed(&mut self, _: u64, _: u32, frame: &[u8], _: &mut Violations) {
        self.placed.add(frame);
    }

    fn shown(&mut self, at: u64, guest: u32, frame: &[u8], violations: &mut Violations) {
        self.shown.add(frame);
        if frame.get(..6) != Some(&self.macs[guest as usize]) {
            violations.add(at, Kind::WrongGuest, || format!("guest {guest} gets a frame for another address"));
        }
    }

    fn turned(&mut self, at: u64, id: u32, core: &Core<SimPort>, violations: &mut Violations) {
        self.check_claims(at, violations);
        let engine = core.engine();
        let (config, counters) = (engine.config(), engine.counters());
        let host = &mut self.hosts[id as usize];
        for (key, from, to) in host.heard.drain(..) {
            if let Some(stream) = self.streams.get_mut(&key) {
                let to = to.min(stream.packets.len());
                stream.packets[from.min(to)..to].iter_mut().for_each(|p| p.state |= ACKED);
            }
        }
        let ended = counters.best_effort_connections
            + counters.unanswered_connections
            + counters.rejects_received_packets
            + counters.reaped_connections;
        host.surrenders = ended != host.ended;
        host.ended = ended;
        let counted = counters.given_up_packets + counters.restarted_packets;
        if host.surrendered > counted {
            violations.add(at, Kind::Other("account"), || {
                let left = host.surrendered;
                format!(
                    "host {id}: {left} packets sent reliably left as plain VXLAN, {counted} are counted as given up"
                )
            });
        }
        let opened = counters.opened_connections + counters.resets_received_packets;
        if opened != host.opened || host.turns.is_multiple_of(64) {
            host.opened = opened;
            host.connections.clear();
            let all = engine.connection_snapshots(bifrost_rte::Time(0));
            host.connections.extend(all.map(|c| (c.local_cid.0, c.peer_cid.0)));
        }
        host.turns += 1;
        host.turn_at = at;
        host.first_psn = config.first_psn;
        host.ack_delay = config.ack_delay_ns.unwrap_or(ACK_DELAY_NS);
        host.give_up = (config.give_up_rtos.min(7).into(), config.give_up_ns(1));
        self.check_answers(at, id, core, violations);
    }

    fn fault(&mut self, at: u64, action: &Action, _: &mut Violations) {
        self.calm.fault(at, action);
        if let Action::Crash(host) = action {
            let gone = |key: &Key, stream: &Stream| key.0 == *host || stream.from == *host;
            self.dead.extend(self.streams.extract_if(|key, stream| gone(key, stream)).map(|(key, _)| key));
            let host = &mut self.hosts[*host as usize];
            (host.ended, host.opened, host.surrendered) = (0, u64::MAX, 0);
        }
    }

    fn end(&mut self, world: &World, violations: &mut Violations) {
        self.check_claims(world.now(), violations);
    }
}

/// A number that is equal only for equal frames.
fn fingerprint(frame: &[u8]) -> u64 {
    let head = frame.chunks_exact(8).take(12).map(|c| u64::from_le_bytes(c.try_into().unwrap_or_default()));
    head.fold(frame.len() as u64, |hash, word| mix(hash ^ word))
}

/// Whether an ACK names packets that were not accepted.
fn refuses(ack: &AckHeader) -> bool {
    matches!(ack.kind, AckKind::RateLimited | AckKind::NotTaken)
}
