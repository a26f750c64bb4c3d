//! One core of a pod: what becomes of a packet.

use std::net::IpAddr;
use std::sync::Arc;

use bifrost_tables::{Meter, TokenBucket};

use crate::decision::{Context, Decision, State};
use crate::fragments::Fragments;
use crate::nat::Nat;
use crate::tables::Tables;
use crate::{Counters, DropReason, Packet, Service};

/// ICMP errors and other answers a second, and at once, of one core.
const ANSWERS_PER_SECOND: u64 = 1000;
const ANSWERS_AT_ONCE: u64 = 100;
/// ICMP errors that one core looks into, a second, and at once: each takes a lock.
const ERRORS_PER_SECOND: u64 = 1000;
const ERRORS_AT_ONCE: u64 = 100;

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It leaves, as the packet is now.
    Forward(Service),
    /// An answer leaves in its place. It is whole, even if the packet came without its payload.
    Answer,
    /// It is dropped.
    Drop(DropReason),
}

/// One core. See the [crate].
#[derive(Debug)]
pub struct Core {
    tables: Arc<Tables>,
    nat: Arc<Nat>,
    state: State,
}

impl Core {
    /// One of `cores` that share the work; `seed` is that of its hash tables.
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
        Core { tables, nat, state }
    }

    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.state.counters
    }

    /// The next hop whose link-layer address was missing last; once.
    pub fn take_missing(&mut self) -> Option<IpAddr> {
        self.state.missing.take()
    }

    /// Frames that leave beside the packet that was [processed](Self::process) last: the other pieces, if it had to be cut. Each has an allocation
    /// of its own: it is rare that a packet must be cut.
    pub fn take_more(&mut self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.state.more.drain(..)
    }

    /// Counts frames of the core's own, or pieces of a packet that was cut, for which there was no room.
    pub fn lose(&mut self, frames: u64) {
        (0..frames).for_each(|_| self.state.counters.drop(DropReason::NoRoom));
    }

    /// Has what the decision about a frame will need come into the processor's caches: to be called for several frames before the first of them is
    /// [processed](Self::process), so that they wait for memory at the same time. With few sessions, which are in the caches anyway, it does nothing.
    #[inline]
    pub fn fetch_ahead(&self, frame: &[u8]) {
        self.nat.fetch_ahead(frame);
    }

    /// Decides about a packet and rewrites it. A dropped packet may be rewritten in part.
    pub fn process(&mut self, context: Context<'_>, packet: &mut Packet<'_>) -> Verdict {
        let Core { tables, nat, state } = self;
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
