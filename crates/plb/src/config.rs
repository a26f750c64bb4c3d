//! Settings of a balancer.

use thiserror::Error;

#[cfg(any(test, feature = "mutations"))]
use crate::Mutation;

/// Bits of a PSN that are compared before a returned packet is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LegalCheck {
    /// All of them. A stale packet can never take the place of a fresh one.
    #[default]
    Full,
    /// Only those that index the queue: 12 for 4,096 entries, as in hardware (Albatross, 4.1). A stale packet whose low bits fit
    /// takes a place, and the packet that has that place is then lost. For comparison with hardware.
    LowBits,
}

/// Settings of one pod's [`Balancer`](crate::Balancer). The defaults are Albatross's (4.1) where it names a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The pod's number, which its trailers must carry.
    pub pod: u16,
    /// Data cores of the pod, each with a receive queue: 1 to 1,024.
    pub cores: u16,
    /// Order queues: 1 to 8, in proportion to the cores. More of them isolate flows from each other's delays, fewer allow a larger
    /// single flow for the same memory.
    pub order_queues: u8,
    /// Entries of an order queue: a power of two from 16 to 65,536. A queue takes at most `queue_entries / timeout_ns`: 40 Mpps.
    pub queue_entries: u32,
    /// How long the first packet of a queue is waited for, ns: 1 to 1 s.
    pub timeout_ns: u64,
    /// Payloads that the pipeline can keep while the pod has only the headers: 0 (none) to 1,048,576. At least twice
    /// `order_queues * queue_entries` lets every packet be delivered that way.
    pub payload_slots: u32,
    /// How returned packets are compared with the queue.
    pub legal_check: LegalCheck,
    /// The first PSN of each queue. A random one lets packets of an earlier balancer of the same pod be told apart.
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

/// A setting that is out of its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// See [`Config::cores`].
    #[error("a pod has 1 to 1,024 data cores, not {0}")]
    Cores(u16),
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
    /// Whether a balancer can be made of it.
    ///
    /// # Errors
    /// The first setting that is out of its range.
    pub fn check(&self) -> Result<(), ConfigError> {
        match *self {
            Config { cores, .. } if !(1..=1024).contains(&cores) => Err(ConfigError::Cores(cores)),
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
