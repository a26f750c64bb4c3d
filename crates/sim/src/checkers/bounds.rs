//! Windows, pages, connections, timers and buffers stay within their bounds, and are released.

use bifrost_datapath::Core;
use bifrost_rte::{ConnSnapshot, State, Time};
use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::LIVENESS_NS;
use super::calm::Calm;
use crate::checker::{Checker, Wire};
use crate::faults::Action;
use crate::packet::Packet;
use crate::port::SimPort;
use crate::violation::{Kind, Violations};
use crate::world::World;

/// One of this many turns is checked.
const EVERY: u32 = 8;
/// Maximum number of segments in one buffer. An empty window accepts a whole buffer.
const MOST_SEGMENTS: u32 = 44;
/// Packets beyond its base that a receiver accepts, and the largest window of a sender (PROTOCOL §6.2).
const WINDOW: u32 = 4096;
/// Pages of 64 packets that such a window can touch.
const WINDOW_PAGES: u32 = WINDOW / 64 + 1;
/// Timer entries per connection or peer, including superseded ones: about 80 if packets arrive twice and 20 ms late.
const TIMERS: usize = 128;

/// The checker.
#[derive(Debug)]
pub struct Bounds {
    turns: u32,
    calm: Calm,
    clock_offsets: Vec<u64>,
    connections: Vec<ConnSnapshot>,
    /// Since when connections have been in best effort without a fault, by host and CID, ns.
    fallen: HashMap<(u32, u32), u64, FixedState>,
    /// By host: since when it has had no connections, ns.
    alone: Vec<Option<u64>>,
    /// By host: the hosts that are its peers, by peer number.
    peers: Vec<Vec<u32>>,
    /// When plain VXLAN was last sent, by sending and receiving host, ns. Plain VXLAN keeps the connection that carries
    /// the probes of the pair's paths.
    plain: HashMap<(u32, u32), u64, FixedState>,
}

impl Bounds {
    /// Creates the checker for this world.
    pub fn new(world: &World) -> Self {
        Bounds {
            turns: 0,
            calm: Calm::default(),
            clock_offsets: world.hosts().iter().map(|h| h.underlay().clock_offset()).collect(),
            connections: Vec::new(),
            fallen: HashMap::default(),
            alone: vec![None; world.hosts().len()],
            peers: world.hosts().iter().map(|h| h.peers().to_vec()).collect(),
            plain: HashMap::default(),
        }
    }

    fn look(&mut self, at: u64, host: u32, core: &Core<SimPort>, violations: &mut Violations) {
        let engine = core.engine();
        let config = engine.config();
        let now = Time(at + self.clock_offsets.get(host as usize).copied().unwrap_or(0));
        self.connections.clear();
        self.connections.extend(engine.connection_snapshots(now));
        match &mut self.alone[host as usize] {
            alone if self.connections.is_empty() => _ = alone.get_or_insert(at),
            alone => *alone = None,
        }
        let calm = self.calm.since(at);
        let mut beyond = |what: &'static str, value: u64, most: u64| {
            if value > most {
                violations.add(at, Kind::Other("bound"), || format!("host {host}: {what}: {value}, at most {most}"));
            }
        };
        let largest = u32::from(config.max_window.max(config.initial_window));
        for c in &self.connections {
            beyond("window", u64::from(c.window_packets), u64::from(largest.min(WINDOW)));
            beyond("in flight", c.in_flight_packets.into(), c.window_packets.max(MOST_SEGMENTS).into());
            beyond("held behind a gap", c.held_packets.into(), WINDOW.into());
            let queue = u32::from(config.setup_queue_packets).max(MOST_SEGMENTS) + WINDOW + MOST_SEGMENTS;
            beyond("waiting for set-up", c.pending_packets.into(), queue.into());
            let forgotten = config.idle_reap_ns + config.idle_shrink_ns + LIVENESS_NS;
            let forgotten = match c.state {
                State::Plain { .. } => forgotten + config.plain_retry_ns,
                _ => forgotten,
            };
            // A peer that gets no response repeats its request, and this end then repeats its own. Set-up has a
            // separate bound.
            let asking = matches!(c.state, State::Opening { .. });
            if !asking && self.calm.paused_until(host) < at.saturating_sub(LIVENESS_NS) {
                let peer = self.peers[host as usize].get(c.peer.0 as usize);
                let plain = peer.and_then(|&peer| self.plain.get(&(host, peer)));
                beyond(
                    "ns of idleness of a connection",
                    plain.map_or(c.idle_ns, |at_ns| c.idle_ns.min(at - at_ns)),
                    forgotten,
                );
            }
            let key = (host, c.local_cid.0);
            if c.state != State::BestEffort || calm.is_none() || c.idle_ns > LIVENESS_NS / 8 {
                self.fallen.remove(&key);
            } else {
                let since = *self.fallen.entry(key).or_insert(at);
                beyond("ns of best effort in a whole network with traffic", at - since, LIVENESS_NS);
            }
        }
        let count = self.connections.len() as u32;
        let (send, receive) = engine.pages_used();
        beyond("connections", count.into(), config.max_connections.into());
        beyond("pages for sending", send.into(), config.max_pages.min(count * WINDOW_PAGES).into());
        beyond("pages for receiving", receive.into(), config.max_pages.min(count * WINDOW_PAGES).into());
        let peers = engine.path_snapshots(now).map(|p| p.peer.0).max().map_or(0, |p| p as usize + 1);
        beyond("timers", engine.timers_pending() as u64, (TIMERS * (count as usize + peers)) as u64);
        let mut on_paths = 0;
        for path in engine.path_snapshots(now) {
            on_paths += u64::from(path.in_flight_packets);
        }
        let in_flight: u64 = self.connections.iter().map(|c| u64::from(c.in_flight_packets - c.landed_packets)).sum();
        if on_paths != in_flight {
            violations.add(at, Kind::Other("in_flight"), || {
                format!("host {host}: {on_paths} packets in flight on its paths, {in_flight} on its connections")
            });
        }
        for owner in 0u32.. {
            let Some(port) = core.device(owner) else { break };
            let own = || self.connections.iter().filter(|c| c.owner == owner);
            let (held, hidden) = port.outstanding();
            let known: u32 = own().map(|c| c.in_flight_packets + c.pending_packets).sum();
            let known = known + core.waiting_packets(owner) as u32;
            if held as u32 > known {
                violations.add(at, Kind::Leak, || {
                    format!("host {host}, port {owner}: {held} buffers held, {known} packets in flight or waiting")
                });
            }
            let behind: u32 = own().map(|c| c.held_packets).sum();
            if hidden as u32 > behind {
                violations.add(at, Kind::Leak, || {
                    format!("host {host}, port {owner}: {hidden} placed buffers unpublished, {behind} behind gaps")
                });
            }
        }
    }
}

impl Checker for Bounds {
    fn wire(&mut self, at: u64, what: Wire, packet: &Packet, _: &mut Violations) {
        if what == Wire::Sent && packet.plain().is_some() {
            self.plain.insert((packet.src, packet.dst), at);
        }
    }

    fn turned(&mut self, at: u64, host: u32, core: &Core<SimPort>, violations: &mut Violations) {
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(EVERY) {
            self.look(at, host, core, violations);
        }
    }

    fn fault(&mut self, at: u64, action: &Action, _: &mut Violations) {
        self.calm.fault(at, action);
    }

    fn end(&mut self, world: &World, violations: &mut Violations) {
        let at = world.now();
        for host in world.hosts() {
            let Some(core) = host.core() else { continue };
            self.look(at, host.id(), core, violations);
            let engine = core.engine();
            let pages = engine.pages_used();
            let all_idle = self.connections.iter().all(|c| c.is_idle);
            // Path supervision of a peer ends shortly after the last connection is gone. A timer for the next request
            // to a peer may remain.
            let never_plain =
                engine.counters().unanswered_connections + engine.counters().rejects_received_packets == 0;
            let none = never_plain && self.alone[host.id() as usize].is_some_and(|since| at - since >= LIVENESS_NS / 4);
            if all_idle && pages != (0, 0) || none && engine.timers_pending() > 0 {
                violations.add(at, Kind::Leak, || {
                    let (count, timers) = (self.connections.len(), engine.timers_pending());
                    format!("host {}: {count} connections, all idle, {pages:?} pages, {timers} timers", host.id())
                });
            }
        }
    }
}
