//! A pod of a gateway in virtual time: the real balancer, and model cores with rings.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use anyhow::Result;
use bifrost_plb::{Balancer, Config, Egress, Order, TRAILER_LEN, Trailer};

use super::load::{Arrival, exponential};
use crate::Rng;
use crate::rng::mix;

/// Configuration of a pod, and its processing times.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Setup {
    /// Number of cores, number of order queues, and timeout.
    pub(in super::super) plb: Config,
    /// Whether packets are sprayed over the cores; otherwise flows are hashed to them, as with RSS.
    pub(in super::super) spray: bool,
    /// Entries of the ring in front of each core.
    pub(in super::super) ring: usize,
    /// Mean processing time per packet, ns. Four fifths of it are constant, one fifth is exponential.
    pub(in super::super) service_ns: f64,
    /// Interruptions of cores: mean interval and duration, ns.
    pub(in super::super) stalls_ns: Option<(f64, f64)>,
    /// Share of packets that the pod drops, and whether it sets the drop flag.
    pub(in super::super) drops: (f64, bool),
    /// Latency of the pipeline, both directions together, ns (table 4 of the paper).
    pub(in super::super) nic_ns: u64,
    /// Width of the bins for the cores' busy time, ns; 0: none.
    pub(in super::super) bin_ns: u64,
    /// Group size and bin width, ns, for counting sent packets by group of flows and time of arrival.
    pub(in super::super) follow: Option<(u32, u64)>,
    /// Seed of random decisions.
    pub(in super::super) seed: u64,
}

impl Setup {
    /// A pod of that many cores with the paper's values.
    pub(in super::super) fn new(cores: u16, service_ns: f64) -> Self {
        Setup {
            plb: Config {
                cores,
                affinity: Config::AFFINITY,
                order_queues: super::order_queues(cores),
                ..Config::default()
            },
            spray: true,
            ring: 64,
            service_ns,
            stalls_ns: None,
            drops: (0.0, true),
            nic_ns: 8_070,
            bin_ns: 0,
            follow: None,
            seed: 1,
        }
    }
}

#[derive(Clone, Debug)]
struct Core {
    /// When its ring will be empty.
    free_at: u64,
    /// Completion time of each packet in its ring.
    ring: VecDeque<u64>,
    next_stall: f64,
    busy_ns: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Packet {
    flow: u32,
    number: u32,
    at: u64,
    trailer: [u8; TRAILER_LEN],
    /// Whether the pod drops it, and whether with the drop flag.
    dropped: Option<bool>,
}

/// Results.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Outcome {
    /// Packets that arrived.
    pub(in super::super) arrived: u64,
    /// Lost because a core's ring was full.
    pub(in super::super) lost_ring: u64,
    /// Lost because an order queue was full.
    pub(in super::super) lost_queue: u64,
    /// Dropped by the pod's rules.
    pub(in super::super) dropped: u64,
    /// Sent.
    pub(in super::super) sent: u64,
    /// Sent after a later one of the same flow.
    pub(in super::super) disordered: u64,
    /// Sent after their entry timed out: possibly, but not always, after a later one of the same flow.
    pub(in super::super) late: u64,
    /// Sent, by flow (the first ones).
    pub(in super::super) sent_of_flow: Vec<u64>,
    /// Sent, by group of flows and bin of arrival, if requested.
    pub(in super::super) sent_by_bin: Vec<Vec<u64>>,
    /// Latency from arrival to leaving, ns, of every packet; empty if groups are counted.
    pub(in super::super) latency_ns: Vec<u32>,
    /// Timeouts while other packets waited behind.
    pub(in super::super) blocking: u64,
    /// By bin and core, share of the time that it was busy.
    pub(in super::super) busy: Vec<Vec<f64>>,
    /// When the last packet was completed, ns.
    pub(in super::super) ended_at: u64,
}

impl Outcome {
    /// Share of the arrived packets that were lost.
    pub(in super::super) fn loss(&self) -> f64 {
        (self.lost_ring + self.lost_queue) as f64 / self.arrived.max(1) as f64
    }

    /// Share of the sent packets that were late or after a later one of their flow.
    pub(in super::super) fn disorder(&self) -> f64 {
        self.late.max(self.disordered) as f64 / self.sent.max(1) as f64
    }

    /// The latency at quantile `p`, us.
    pub(in super::super) fn percentile_us(&mut self, p: f64) -> f64 {
        let n = self.latency_ns.len();
        if n == 0 {
            return 0.0;
        }
        let rank = ((n as f64 * p).ceil() as usize).clamp(1, n) - 1;
        f64::from(*self.latency_ns.select_nth_unstable(rank).1) / 1e3
    }
}

/// A pod, its pipeline, and the time.
pub(in super::super) struct Pod {
    setup: Setup,
    balancer: Balancer<u32>,
    cores: Vec<Core>,
    /// Packets in the cores, by completion time.
    done: BinaryHeap<Reverse<(u64, u64, u32)>>,
    packets: Vec<Packet>,
    free: Vec<u32>,
    /// By flow: the number of its next packet, and of the last that left, plus one.
    flows: Vec<(u32, u32)>,
    rng: Rng,
    order: u64,
    outcome: Outcome,
}

impl Pod {
    /// An empty pod.
    pub(in super::super) fn new(setup: Setup, flows: u32) -> Result<Self> {
        let mut rng = Rng::new(setup.seed);
        let mut core = || Core {
            free_at: 0,
            ring: VecDeque::new(),
            next_stall: setup.stalls_ns.map_or(f64::INFINITY, |(every, _)| exponential(&mut rng, every)),
            busy_ns: Vec::new(),
        };
        let cores = (0..setup.plb.cores).map(|_| core()).collect();
        Ok(Pod {
            balancer: Balancer::new(setup.plb)?,
            cores,
            done: BinaryHeap::new(),
            packets: Vec::new(),
            free: Vec::new(),
            flows: vec![(0, 0); flows as usize],
            rng,
            order: 0,
            outcome: Outcome { sent_of_flow: vec![0; flows.min(64) as usize], ..Outcome::default() },
            setup,
        })
    }

    /// Processes all arrivals before `until`, and drains.
    pub(in super::super) fn run(mut self, load: impl Iterator<Item = Arrival>, until: u64) -> Outcome {
        load.take_while(|arrival| arrival.at < until).for_each(|arrival| self.arrive(arrival));
        self.finish()
    }

    /// A packet arrives, after all earlier events.
    pub(in super::super) fn arrive(&mut self, Arrival { at, flow }: Arrival) {
        self.advance(at);
        self.outcome.arrived += 1;
        let (next, _) = &mut self.flows[flow as usize];
        let number = *next;
        *next += 1;
        let hash = (mix(u64::from(flow) ^ 0x5bd1_e995) >> 32) as u32;
        let dispatched = if self.setup.spray {
            self.balancer.dispatch(at, hash, false)
        } else {
            self.balancer.dispatch_by_flow(hash, false)
        };
        let Ok(dispatch) = dispatched else {
            self.outcome.lost_queue += 1;
            return;
        };
        let core = &mut self.cores[usize::from(dispatch.core)];
        while core.ring.pop_front_if(|done| *done <= at).is_some() {}
        if core.ring.len() >= self.setup.ring {
            self.outcome.lost_ring += 1;
            // The pipeline knows that the packet did not reach the pod.
            let gone = Trailer { drop: true, ..dispatch.trailer };
            self.balancer.returned(gone.emit(), u32::MAX);
            return;
        }
        let service = self.setup.service_ns;
        let takes = (service * 0.8 + exponential(&mut self.rng, service * 0.2)) as u64;
        let mut begins = at.max(core.free_at);
        if let Some((every, length)) = self.setup.stalls_ns {
            while core.next_stall <= begins as f64 {
                let ends = core.next_stall + exponential(&mut self.rng, length);
                begins = begins.max(ends as u64);
                core.next_stall = ends + exponential(&mut self.rng, every);
            }
        }
        core.free_at = begins + takes;
        core.ring.push_back(core.free_at);
        if let Some(bin) = at.checked_div(self.setup.bin_ns) {
            let bin = bin as usize;
            if core.busy_ns.len() <= bin {
                core.busy_ns.resize(bin + 1, 0);
            }
            core.busy_ns[bin] += takes;
        }
        let (share, says_so) = self.setup.drops;
        let dropped = self.rng.chance(share).then_some(says_so);
        let packet = Packet { flow, number, at, trailer: dispatch.trailer.emit(), dropped };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.packets[slot as usize] = packet;
                slot
            }
            None => {
                self.packets.push(packet);
                self.packets.len() as u32 - 1
            }
        };
        self.done.push(Reverse((core.free_at, self.order, slot)));
        self.order += 1;
    }

    /// Cores complete packets and entries time out, until `until`.
    fn advance(&mut self, until: u64) {
        loop {
            let done = self.done.peek().map(|Reverse((at, ..))| *at);
            let deadline = self.balancer.deadline();
            match (done, deadline) {
                (Some(at), deadline) if at <= until && deadline.is_none_or(|deadline| at < deadline) => {
                    if let Some(Reverse((_, _, slot))) = self.done.pop() {
                        self.returned(at, slot);
                    }
                }
                (_, Some(at)) if at <= until => self.release(at),
                _ => break,
            }
        }
    }

    fn returned(&mut self, now: u64, slot: u32) {
        let Packet { trailer, dropped, .. } = self.packets[slot as usize];
        self.outcome.ended_at = now;
        match (dropped, Trailer::parse(trailer)) {
            (None, _) => {
                if let Some(egress) = self.balancer.returned(trailer, slot) {
                    self.leave(now, egress);
                }
            }
            (Some(true), Ok(trailer)) => {
                self.outcome.dropped += 1;
                let gone = Trailer { drop: true, ..trailer };
                self.balancer.returned(gone.emit(), u32::MAX);
                self.free.push(slot);
            }
            (Some(_), _) => {
                self.outcome.dropped += 1;
                self.free.push(slot);
            }
        }
        self.release(now);
    }

    fn release(&mut self, now: u64) {
        let mut out = Vec::new();
        self.balancer.release(now, u32::MAX, |egress| out.push(egress));
        out.into_iter().for_each(|egress| self.leave(now, egress));
    }

    fn leave(&mut self, now: u64, egress: Egress<u32>) {
        // The balancer drops no packet of an honest pod.
        let (packet, late) = match egress {
            Egress::Send { packet, order, .. } => (packet, order == Order::Late),
            Egress::Drop { packet, .. } => (packet, false),
        };
        self.free.push(packet);
        let Packet { flow, number, at, .. } = self.packets[packet as usize];
        let o = &mut self.outcome;
        o.sent += 1;
        o.late += u64::from(late);
        let (_, last) = &mut self.flows[flow as usize];
        o.disordered += u64::from(number < *last);
        *last = (*last).max(number + 1);
        if let Some(sent) = o.sent_of_flow.get_mut(flow as usize) {
            *sent += 1;
        }
        let Some((group, bin_ns)) = self.setup.follow else {
            o.latency_ns.push((now - at + self.setup.nic_ns) as u32);
            return;
        };
        let (group, bin) = ((flow / group) as usize, (at / bin_ns) as usize);
        if o.sent_by_bin.len() <= group {
            o.sent_by_bin.resize(group + 1, Vec::new());
        }
        let bins = &mut o.sent_by_bin[group];
        if bins.len() <= bin {
            bins.resize(bin + 1, 0);
        }
        bins[bin] += 1;
    }

    /// Waits until all packets have left.
    pub(in super::super) fn finish(mut self) -> Outcome {
        self.advance(u64::MAX);
        self.outcome.blocking = self.balancer.counters().timed_out_blocking_packets;
        let bins = self.cores.iter().map(|core| core.busy_ns.len()).max().unwrap_or(0);
        let share = |core: &Core, bin| core.busy_ns.get(bin).copied().unwrap_or(0) as f64 / self.setup.bin_ns as f64;
        self.outcome.busy = (0..bins).map(|bin| self.cores.iter().map(|core| share(core, bin)).collect()).collect();
        self.outcome
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::{HEAVY, Load};
    use super::*;

    fn run(setup: Setup, load: Load, ns: u64) -> Outcome {
        let o = Pod::new(setup, 1000).expect("a pod").run(load, ns);
        assert_eq!(o.arrived, o.sent + o.lost_ring + o.lost_queue + o.dropped, "an account that does not balance");
        o
    }

    #[test]
    fn a_heavy_flow_is_spread_by_packets_and_not_by_flows() {
        let load = Load::new(1, 1000, 100_000.0).heavy(1_250_000.0);
        let setup = Setup::new(3, 1_000.0);
        let sprayed = run(setup, load.clone(), 20_000_000);
        assert_eq!((sprayed.loss(), sprayed.disordered), (0.0, 0));
        assert_eq!(sprayed.sent_of_flow[HEAVY as usize], 25_000);
        let hashed = run(Setup { spray: false, ..setup }, load, 20_000_000);
        assert!(hashed.loss() > 0.2, "{}", hashed.loss());
        assert_eq!(hashed.disordered, 0);
    }

    #[test]
    fn silent_drops_block_and_flagged_ones_do_not() {
        let load = Load::new(1, 1000, 500_000.0);
        let silent = Setup { drops: (0.01, false), ..Setup::new(3, 1_000.0) };
        let [silent, told] =
            [silent, Setup { drops: (0.01, true), ..silent }].map(|s| run(s, load.clone(), 20_000_000));
        assert!(silent.blocking > 50 && silent.dropped > 50, "{}", silent.blocking);
        assert_eq!(told.blocking, 0);
    }

    #[test]
    fn a_run_depends_only_on_its_seed() {
        let setup = Setup { stalls_ns: Some((1e6, 20e3)), ..Setup::new(3, 1_000.0) };
        let [a, b] = [0; 2].map(|_| run(setup, Load::new(1, 1000, 500_000.0), 10_000_000));
        assert_eq!((a.latency_ns, a.sent), (b.latency_ns, b.sent));
        let c = run(Setup { seed: 2, ..setup }, Load::new(1, 1000, 500_000.0), 10_000_000);
        assert_ne!(b.ended_at, c.ended_at);
    }
}
