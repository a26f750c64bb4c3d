//! Settings.

use bifrost_transport::time::{MS, US};
use bifrost_wire::rdm::{MAX_MESSAGE, MAX_WINDOW, Service};

/// In which order messages are delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// As they were sent.
    #[default]
    Sent,
    /// Each when it is complete.
    Complete,
}

/// Settings of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Connections, at most.
    pub connections: u32,
    /// Bytes of long messages that may be on their way to this host at once, over all connections: some round trips of its
    /// link, and less than the buffer of the switch in front of it. One message always may.
    pub inbound: u64,
    /// Of sequence numbers, tags and source ports.
    pub seed: u64,
}

impl Config {
    /// 4 MiB on their way: 300 us of 100 Gbit/s.
    #[must_use]
    pub const fn new(connections: u32, seed: u64) -> Self {
        Self { connections, inbound: 4 << 20, seed }
    }
}

/// Settings of a connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionConfig {
    /// Who repeats.
    pub service: Service,
    /// Payload of a packet, bytes.
    pub mtu: u16,
    /// Order of delivery.
    pub order: Order,
    /// Work requests that the peer has room for on each lane.
    pub credits: u16,
    /// Messages that the peer takes at first.
    pub peer_window: u16,
    /// Messages that this end takes ahead of its application, 1..=1024.
    pub window: u16,
    /// Bytes of long messages that this end takes ahead of its application. One message is always taken.
    pub budget: u64,
    /// The longest message that this end takes, bytes.
    pub longest: u32,
    /// The longest that the peer takes.
    pub peer_longest: u32,
    /// Connected, rather than listened: counts repairs of lanes with odd numbers (RDM §7.3).
    pub initiator: bool,
    /// ACK after as many work requests, 1..=16 (RDM §6.2).
    pub ack_requests: u8,
    /// ACK after as many bytes.
    pub ack_bytes: u32,
    /// ACK after that time, ns.
    pub ack_delay_ns: u64,
    /// Added to the time within which an answer is expected, ns: what the hosts' schedulers add.
    pub patience_ns: u64,
    /// A peer that has not been heard for that long, though something was asked, is gone, ns.
    pub silence_ns: u64,
    /// A deliberate mistake.
    #[cfg(any(test, feature = "mutations"))]
    pub mutation: Option<crate::mutation::Mutation>,
}

impl ConnectionConfig {
    /// What the paper uses, where it says so: 120 us, 32 KB. Instead of 32 work requests it is 16, for each ACK names the
    /// last 32 and so everything twice.
    #[must_use]
    pub const fn new(service: Service, mtu: u16) -> Self {
        Self {
            service,
            mtu,
            order: Order::Sent,
            credits: 128,
            peer_window: MAX_WINDOW,
            window: 256,
            budget: 64 << 20,
            longest: MAX_MESSAGE,
            peer_longest: MAX_MESSAGE,
            initiator: false,
            ack_requests: 16,
            ack_bytes: 32 * 1024,
            ack_delay_ns: 120 * US,
            patience_ns: 100 * US,
            silence_ns: 3000 * MS,
            #[cfg(any(test, feature = "mutations"))]
            mutation: None,
        }
    }
}
