//! No buffer is held forever, and without faults everything arrives in time.

use std::collections::VecDeque;

use bifrost_datapath::Core;

use super::calm::Calm;
use super::seen::Seen;
use super::{HELD_NS, LIVENESS_NS};
use crate::checker::{Checker, Wire};
use crate::faults::Action;
use crate::flows::peek;
use crate::packet::Packet;
use crate::port::SimPort;
use crate::violation::{Kind, Violations};
use crate::world::World;

/// A packet that waits.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    since: u64,
    packet: (u32, u32),
}

/// The checker. It covers only packets of light guests, because a guest's TCP may wait for any time.
#[derive(Debug)]
pub struct Patience {
    calm: Calm,
    /// By guest: its host.
    hosts: Vec<u32>,
    /// By flow: the receiving guest's host.
    to: Vec<u32>,
    /// By flow: the pair of guests, as an index into `progress`.
    pairs: Vec<usize>,
    /// By pair of guests: when the receiver last got a packet from the sender, ns. If buffers are scarce, packets wait
    /// for those before them.
    progress: Vec<u64>,
    /// By host: packets fetched and not released; fetched and not yet at the receiver; placed and not published.
    fetched: Vec<VecDeque<Waiting>>,
    underway: Vec<VecDeque<Waiting>>,
    placed: Vec<VecDeque<Waiting>>,
    given_back: Seen,
    arrived: Seen,
    shown: Seen,
    /// Guests that lose packets between guest and switch.
    lossy: Vec<u32>,
    reaped: bool,
    idle_reap: u64,
}

impl Patience {
    /// Creates the checker for this world.
    pub fn new(world: &World) -> Self {
        let count = world.hosts().len();
        let queues = || vec![VecDeque::new(); count];
        let flows = || (0..world.flows().next_flow()).map(|f| world.flows().get(f));
        let guests = world.guests().len();
        Patience {
            pairs: flows().map(|flow| flow.from as usize * guests + flow.to as usize).collect(),
            progress: vec![0; guests * guests],
            calm: Calm::default(),
            hosts: world.guests().iter().map(|g| g.host).collect(),
            to: flows().map(|flow| world.guests()[flow.to as usize].host).collect(),
            fetched: queues(),
            underway: queues(),
            placed: queues(),
            given_back: Seen::none_of(world.flows().next_flow()),
            arrived: Seen::none_of(world.flows().next_flow()),
            shown: Seen::none_of(world.flows().next_flow()),
            lossy: Vec::new(),
            reaped: false,
            idle_reap: 0,
        }
    }

    fn host(&self, guest: u32) -> usize {
        self.hosts[guest as usize] as usize
    }

    fn last_progress(&self, flow: u32) -> u64 {
        self.pairs.get(flow as usize).map_or(0, |&pair| self.progress[pair])
    }
}

/// The oldest waiting packet that is not in `done`. Removes the ones before it.
fn oldest(queue: &mut VecDeque<Waiting>, done: &Seen) -> Option<Waiting> {
    while let Some(front) = queue.front() {
        if !done.has(front.packet) {
            return Some(*front);
        }
        queue.pop_front();
    }
    None
}

impl Checker for Patience {
    fn wire(&mut self, _: u64, what: Wire, packet: &Packet, _: &mut Violations) {
        if what == Wire::Sent
            && let Some(frame) = packet.plain()
        {
            // The network may lose plain VXLAN, so it counts as arrived.
            self.arrived.add(frame);
        }
    }

    fn fetched(&mut self, at: u64, guest: u32, frame: &[u8], _: &mut Violations) {
        let Some(packet) = peek(frame) else { return };
        let host = self.host(guest);
        self.fetched[host].push_back(Waiting { since: at, packet });
        let to_another_host = self.to.get(packet.0 as usize).is_some_and(|&to| to != self.hosts[guest as usize]);
        if to_another_host && !self.lossy.contains(&guest) {
            self.underway[host].push_back(Waiting { since: at, packet });
        }
    }

    fn placed(&mut self, at: u64, guest: u32, frame: &[u8], _: &mut Violations) {
        // A corrupted frame may name a packet that does not exist.
        let Some(packet) = peek(frame).filter(|packet| self.shown.knows(*packet)) else { return };
        if !self.shown.has(packet) {
            let host = self.host(guest);
            self.placed[host].push_back(Waiting { since: at, packet });
        }
    }

    fn shown(&mut self, at: u64, _: u32, frame: &[u8], _: &mut Violations) {
        if let Some(&pair) = peek(frame).and_then(|packet| self.pairs.get(packet.0 as usize)) {
            self.progress[pair] = at;
        }
        self.shown.add(frame);
        self.arrived.add(frame);
    }

    fn completed(&mut self, _: u64, _: u32, frame: &[u8], _: &mut Violations) {
        self.given_back.add(frame);
    }

    fn refused(&mut self, _: u32, frame: &[u8]) {
        self.arrived.add(frame);
    }

    fn turned(&mut self, at: u64, host: u32, core: &Core<SimPort>, violations: &mut Violations) {
        let (h, calm) = (host as usize, self.calm.since(at));
        self.reaped |= core.engine().counters().reaped_connections > 0;
        self.idle_reap = core.engine().config().idle_reap_ns;
        let awake = self.calm.paused_until(host);
        if let Some(w) = oldest(&mut self.fetched[h], &self.given_back)
            && at.saturating_sub(w.since.max(awake)) > HELD_NS
        {
            self.fetched[h].pop_front();
            violations.add(at, Kind::Other("held"), || {
                let (flow, seq) = w.packet;
                format!("host {host} has held packet {seq} of flow {flow} since {:.3} ms", w.since as f64 / 1e6)
            });
        }
        // A sender that crashed or dropped the connection does not report what it gave up. Packets behind that wait
        // until the receiver drops the connection.
        let most = if self.calm.crashed || self.reaped { self.idle_reap + LIVENESS_NS } else { LIVENESS_NS };
        if let (Some(w), Some(calm)) = (oldest(&mut self.underway[h], &self.arrived), calm)
            && at.saturating_sub(w.since.max(calm).max(self.last_progress(w.packet.0))) > most
        {
            self.underway[h].pop_front();
            violations.add(at, Kind::NoProgress, || {
                let ((flow, seq), ms) = (w.packet, w.since as f64 / 1e6);
                format!("packet {seq} of flow {flow}, fetched by host {host} at {ms:.3} ms, has not reached its guest")
            });
        }
        if let (Some(w), Some(calm)) = (oldest(&mut self.placed[h], &self.shown), calm)
            && at.saturating_sub(w.since.max(calm)) > most
        {
            self.placed[h].pop_front();
            violations.add(at, Kind::Other("held"), || {
                let ((flow, seq), ms) = (w.packet, w.since as f64 / 1e6);
                format!("host {host} has placed packet {seq} of flow {flow} at {ms:.3} ms and not published it")
            });
        }
    }

    fn fault(&mut self, at: u64, action: &Action, _: &mut Violations) {
        self.calm.fault(at, action);
        if let Action::Port(guest, Some(fault)) = action
            && fault.direction == bifrost_datapath::fault::Direction::Tx
        {
            self.lossy.push(*guest);
            let host = self.host(*guest);
            self.underway[host].clear();
        }
        let Action::Crash(host) = action else { return };
        // Fetched and placed packets are lost with the daemon.
        let h = *host as usize;
        self.fetched[h].clear();
        self.underway[h].clear();
        self.placed[h].clear();
        // Packets placed there and acknowledged are lost; the sender cannot see that.
        let to = &self.to;
        for queue in &mut self.underway {
            queue.retain(|w| to.get(w.packet.0 as usize) != Some(host));
        }
    }
}
