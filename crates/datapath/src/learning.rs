//! Packets that wait until the route to their destination is learned.
//!
//! In networks whose routes are learned, the switch has no route for the first packet to a destination
//! ([`Action::Ask`](bifrost_avs::Action)). The packet stays in the guest's buffer, and a question goes to the daemon's
//! bounded queue. When the answer comes ([`Core::learn`](crate::core::Core::learn)), the switch decides again about all
//! packets that wait for it, before it sees later ones. Packets without an answer are dropped after [`PATIENCE_NS`].
//!
//! Everything is bounded for each port. What ports share, the packets that may wait at a worker and the queue of
//! questions, is bounded for each port by what is free of it (dynamic thresholds; Choudhury and Hahne, ToN 1998): if N
//! guests scan a network, each holds no more than what is left for others, a part of N + 1.

mod asking;

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use bifrost_port::TxFrame;
use bifrost_rte::Time;
use bifrost_tables::{IpNet, TokenBucket};
use bifrost_wire::Vni;

use crate::counters::OutboundCounters;
use crate::questions::{RouteQuestion, RouteQuestions};

/// Most packets that wait for one destination, those of a port, and those of a worker.
const OF_DESTINATION: usize = 4;
const OF_PORT: usize = 256;
const OF_WORKER: usize = 4096;
/// New questions of a port: each second, and at once.
const QUESTIONS: (u64, u64) = (500, 1000);
/// How long a packet waits for an answer, ns.
pub(crate) const PATIENCE_NS: u64 = 1_000_000_000;

/// Shortest time between two searches for packets that give up, ns.
const SWEEP_NS: u64 = 10_000_000;

/// A worker's part.
#[derive(Debug, Default)]
pub(crate) struct Asking {
    questions: Option<RouteQuestions>,
    /// Packets of all ports that wait.
    packets: usize,
    /// When to look which of them give up.
    due: Option<Time>,
}

impl Asking {
    /// When packets may give up.
    pub(crate) fn next(&self) -> Option<Time> {
        self.due
    }
}

/// A port's part.
#[derive(Debug)]
pub(crate) struct Learning {
    bucket: TokenBucket,
    waiting: BTreeMap<(Vni, IpAddr), Waiting>,
    packets: usize,
}

/// The packets that wait for one destination, oldest first.
#[derive(Debug)]
struct Waiting {
    frames: Vec<TxFrame>,
    until: Time,
}

impl Default for Learning {
    fn default() -> Self {
        Learning { bucket: TokenBucket::new(QUESTIONS.0, QUESTIONS.1), waiting: BTreeMap::new(), packets: 0 }
    }
}

impl Learning {
    /// Packets that wait.
    pub(crate) fn packets(&self) -> usize {
        self.packets
    }

    /// All packets that wait; those for one destination in their order.
    pub(crate) fn frames(&self) -> impl Iterator<Item = &TxFrame> {
        self.waiting.values().flat_map(|waiting| &waiting.frames)
    }

    /// Keeps a packet, or says why not: by the counter of its drop.
    fn keep(
        &mut self,
        now: Time,
        (vni, address): (Vni, IpAddr),
        frame: TxFrame,
        asking: &Asking,
    ) -> Result<(), fn(&mut OutboundCounters) -> &mut u64> {
        if self.packets >= OF_PORT.min(OF_WORKER.saturating_sub(asking.packets)) {
            return Err(|counters| &mut counters.learn_full_packets);
        }
        if let Some(waiting) = self.waiting.get_mut(&(vni, address)) {
            if waiting.frames.len() >= OF_DESTINATION {
                return Err(|counters| &mut counters.learn_full_packets);
            }
            waiting.frames.push(frame);
            self.packets += 1;
            return Ok(());
        }
        if !self.bucket.take(now.0, 1) {
            return Err(|counters| &mut counters.learn_rate_packets);
        }
        let free = asking.questions.as_ref().map_or(0, RouteQuestions::free);
        // What waits for an answer was asked for, and may still be in the queue.
        if free > 0 && self.waiting.len() >= free {
            return Err(|counters| &mut counters.learn_full_packets);
        }
        let question = RouteQuestion { vni, address, asked_ns: now.0 };
        if !asking.questions.as_ref().is_some_and(|queue| queue.ask(question)) {
            return Err(|counters| &mut counters.learn_unasked_packets);
        }
        let until = now.after(PATIENCE_NS);
        self.waiting.insert((vni, address), Waiting { frames: vec![frame], until });
        self.packets += 1;
        Ok(())
    }

    /// Takes the packets of some destinations, those for one destination in their order.
    fn take(&mut self, mut chosen: impl FnMut(&(Vni, IpAddr), Time) -> bool) -> VecDeque<TxFrame> {
        let mut taken = VecDeque::new();
        self.waiting.retain(|to, waiting| {
            let is_chosen = chosen(to, waiting.until);
            if is_chosen {
                taken.extend(waiting.frames.drain(..));
            }
            !is_chosen
        });
        self.packets -= taken.len();
        taken
    }
}

/// Ranges of addresses. A look-up takes few steps, because packets for thousands of addresses may wait when answers
/// about a thousand ranges come, and all guests of the worker wait meanwhile.
struct Ranges(Vec<IpNet>);

impl Ranges {
    fn new(all: Vec<IpNet>) -> Self {
        // Disjoint afterwards.
        let mut all = IpNet::aggregate(&all);
        all.sort_unstable();
        Ranges(all)
    }

    fn contains(&self, address: IpAddr) -> bool {
        let behind = self.0.partition_point(|range| range.network() <= address);
        self.0[..behind].last().is_some_and(|range| range.contains(&address))
    }
}

#[cfg(test)]
mod tests;
