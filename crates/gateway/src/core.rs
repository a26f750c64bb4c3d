//! One core of a pod: it processes packets.

use std::net::IpAddr;
use std::sync::Arc;

use bifrost_tables::{Meter, TokenBucket};

use crate::ahead::{self, Ahead};
use crate::decision::{Context, Decision, State};
use crate::fragments::Fragments;
use crate::nat::Nat;
use crate::tables::Tables;
use crate::{Counters, DropReason, Packet, Service};

/// Rate (per second) and burst of one core's ICMP errors and other answers.
const ANSWERS_PER_SECOND: u64 = 1000;
const ANSWERS_AT_ONCE: u64 = 100;
/// Rate (per second) and burst of ICMP errors that one core translates: each takes a lock.
const ERRORS_PER_SECOND: u64 = 1000;
const ERRORS_AT_ONCE: u64 = 100;

/// The verdict on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send the packet as it is now.
    Forward(Service),
    /// Send an answer, which replaces the packet. It is complete, even if the packet came without its payload.
    Answer,
    /// Drop the packet.
    Drop(DropReason),
}

/// One core. See the [crate].
#[derive(Debug)]
pub struct Core {
    tables: Arc<Tables>,
    nat: Arc<Nat>,
    state: State,
    /// Whether the tables have many entries.
    many: bool,
}

impl Core {
    /// One of `cores` that share the work; `seed` seeds its hash tables.
    pub fn new(tables: Arc<Tables>, nat: Arc<Nat>, cores: u16, seed: u64) -> Self {
        let state = State {
            meters: vec![Meter::default(); tables.meters()].into(),
            cores: u64::from(cores.max(1)),
            answers: TokenBucket::new(ANSWERS_PER_SECOND, ANSWERS_AT_ONCE),
            errors: TokenBucket::new(ERRORS_PER_SECOND, ERRORS_AT_ONCE),
            missing: None,
            fragments: Fragments::new(seed),
            more: Vec::new(),
            counters: Counters::default(),
        };
        let many = ahead::are_many(&tables);
        Core { tables, nat, state, many }
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.state.counters
    }

    /// The next hop whose link-layer address was missing last; returned once.
    pub fn take_missing(&mut self) -> Option<IpAddr> {
        self.state.missing.take()
    }

    /// Frames that leave in addition to the packet that was [processed](Self::process) last: its other fragments. Each
    /// is allocated separately, because fragmentation is rare.
    pub fn take_more(&mut self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.state.more.drain(..)
    }

    /// Counts answers or fragments that did not fit the ring.
    pub fn lose(&mut self, frames: u64) {
        (0..frames).for_each(|_| self.state.counters.drop(DropReason::NoRoom));
    }

    /// Adds a frame, which will be [processed](Self::process) soon, to a vector. With small tables and few sessions,
    /// which stay in the caches anyway, it does nothing.
    #[inline]
    pub fn look_ahead(&self, ahead: &mut Ahead, frame: &[u8]) {
        if self.many || self.nat.are_many() {
            ahead.add(&self.nat, frame);
        }
    }

    /// Prefetches the table entries of the vector's frames, so that their memory accesses overlap, and empties the
    /// vector.
    #[inline]
    pub fn fetch_ahead(&self, ahead: &mut Ahead) {
        if self.many {
            ahead.fetch(&self.tables, &self.nat, &self.state);
        }
        ahead.clear();
    }

    /// For tests: the number of these frames whose destination it finds when it prefetches.
    #[cfg(test)]
    pub(crate) fn found_ahead(&self, frames: &[Vec<u8>]) -> usize {
        let mut ahead = Ahead::default();
        frames.iter().for_each(|frame| ahead.add(&self.nat, frame));
        ahead.fetch(&self.tables, &self.nat, &self.state)
    }

    /// Processes a packet: decides and rewrites it. A dropped packet may be partly rewritten.
    pub fn process(&mut self, context: Context<'_>, packet: &mut Packet<'_>) -> Verdict {
        let Core { tables, nat, state, .. } = self;
        state.more.clear();
        let decided = Decision { tables, nat, state, context, steps: None }.decide(packet);
        match decided {
            Ok(service) => {
                self.state.counters.forward(service);
                if service == Service::Answer { Verdict::Answer } else { Verdict::Forward(service) }
            }
            Err(reason) => {
                self.state.more.clear();
                self.state.counters.drop(reason);
                Verdict::Drop(reason)
            }
        }
    }
}
