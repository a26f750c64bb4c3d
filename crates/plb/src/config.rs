//! Settings of a balancer.

use thiserror::Error;

#[cfg(any(test, feature = "mutations"))]
use crate::Mutation;

/// Bits of a PSN that the legal check compares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LegalCheck {
    /// All bits. A stale packet can never take the entry of a fresh one.
    #[default]
    Full,
    /// Only the bits that index the queue: 12 for 4,096 entries, as in hardware (Albatross, 4.1). A stale packet whose
    /// low bits match takes an entry, and the packet of that entry is then lost. For comparison with hardware.
    LowBits,
}

/// Settings of one pod's [`Balancer`](crate::Balancer). The defaults are Albatross's (4.1) if it gives a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The pod's number, which its trailers must contain.
    pub pod: u16,
    /// Data cores of the pod, each with a receive queue: 1 to 1,024.
    pub cores: u16,
    /// Packets by which the core of a flow may be ahead of another core and still gets the flow's packets: 0 to 1,024.
    /// 0: cores take turns, whatever the flow, as in Albatross. See [`Cores`](crate::Cores).
    pub affinity: u16,
    /// Order queues: 1 to 8, in proportion to the cores. More of them isolate flows from each other's delays, fewer
    /// allow a larger single flow for the same memory.
    pub order_queues: u8,
    /// Entries of an order queue: a power of two from 16 to 65,536. A queue passes at most `queue_entries /
    /// timeout_ns`: 40 Mpps.
    pub queue_entries: u32,
    /// Maximum wait for the first packet of a queue, ns: 1 ns to 1 s.
    pub timeout_ns: u64,
    /// Payloads that the pipeline can keep while the pod has only the headers: 0 (none) to 1,048,576. At least twice
    /// `order_queues * queue_entries` allows header-only delivery of every packet.
    pub payload_slots: u32,
    /// How returned packets are compared with the queue.
    pub legal_check: LegalCheck,
    /// The first PSN of each queue. A random value distinguishes packets of an earlier balancer of the same pod.
    pub first_psn: u32,
    /// A deliberate mistake.
    #[cfg(any(test, feature = "mutations"))]
    pub mutation: Option<Mutation>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            pod: 0,
            cores: 1,
            affinity: 0,
            order_queues: 1,
            queue_entries: 4096,
            timeout_ns: 100_000,
            payload_slots: 0,
            legal_check: LegalCheck::Full,
            first_psn: 0,
            #[cfg(any(test, feature = "mutations"))]
            mutation: None,
        }
    }
}

/// A setting out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// See [`Config::cores`].
    #[error("a pod has 1 to 1,024 data cores, not {0}")]
    Cores(u16),
    /// See [`Config::affinity`].
    #[error("a flow's core may be ahead by 0 to 1,024 packets, not {0}")]
    Affinity(u16),
    /// See [`Config::order_queues`].
    #[error("a pod has 1 to 8 order queues, not {0}")]
    OrderQueues(u8),
    /// See [`Config::queue_entries`].
    #[error("an order queue has a power of two from 16 to 65,536 entries, not {0}")]
    QueueEntries(u32),
    /// See [`Config::timeout_ns`].
    #[error("the timeout of an order queue is 1 ns to 1 s, not {0} ns")]
    Timeout(u64),
    /// See [`Config::payload_slots`].
    #[error("there are at most 1,048,576 payload slots, not {0}")]
    PayloadSlots(u32),
}

impl Config {
    /// A good [`affinity`](Self::affinity): the hits in private caches that a smaller one costs, and the latency that a
    /// larger one adds, are in docs/STUDIES.md (gw-plb).
    pub const AFFINITY: u16 = 4;

    /// Checks that a balancer can be made with these settings.
    ///
    /// # Errors
    /// The first setting out of range.
    pub fn check(&self) -> Result<(), ConfigError> {
        match *self {
            Config { cores, .. } if !(1..=1024).contains(&cores) => Err(ConfigError::Cores(cores)),
            Config { affinity, .. } if affinity > 1024 => Err(ConfigError::Affinity(affinity)),
            Config { order_queues: n, .. } if !(1..=8).contains(&n) => Err(ConfigError::OrderQueues(n)),
            Config { queue_entries: n, .. } if !n.is_power_of_two() || !(16..=65_536).contains(&n) => {
                Err(ConfigError::QueueEntries(n))
            }
            Config { timeout_ns: ns, .. } if !(1..=1_000_000_000).contains(&ns) => Err(ConfigError::Timeout(ns)),
            Config { payload_slots: n, .. } if n > 1 << 20 => Err(ConfigError::PayloadSlots(n)),
            _ => Ok(()),
        }
    }
}
