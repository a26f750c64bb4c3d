//! Settings.

use bifrost_transport::time::{MS, US};
use bifrost_wire::rdm::{MAX_MESSAGE, MAX_WINDOW, Service};

/// The order in which messages are delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// In the order in which they were sent.
    #[default]
    Sent,
    /// As soon as each is complete.
    Complete,
}

/// Settings of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Maximum number of connections.
    pub connections: u32,
    /// Bytes of long messages that may be in flight to this host, over all connections: several round trips of its
    /// link, but less than the buffer of the switch in front of it. One message is always allowed.
    pub inbound: u64,
    /// Seed of sequence numbers, tags and source ports.
    pub seed: u64,
}

impl Config {
    /// 4 MiB in flight: 300 us at 100 Gbit/s.
    #[must_use]
    pub const fn new(connections: u32, seed: u64) -> Self {
        Self { connections, inbound: 4 << 20, seed }
    }
}

/// Settings of a connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionConfig {
    /// Whether this engine or the NIC retransmits.
    pub service: Service,
    /// Payload of a packet, bytes.
    pub mtu: u16,
    /// Order of delivery.
    pub order: Order,
    /// Receive requests that the peer posts on each lane.
    pub credits: u16,
    /// The peer's window at the start, messages.
    pub peer_window: u16,
    /// Messages accepted before the application consumes them, 1..=1024.
    pub window: u16,
    /// Bytes of long messages accepted before the application consumes them. One message is always accepted.
    pub budget: u64,
    /// The longest message accepted, bytes.
    pub longest: u32,
    /// The longest message that the peer accepts, bytes.
    pub peer_longest: u32,
    /// This end connected, rather than listened; its lane repairs have odd generations (RDM §7.3).
    pub initiator: bool,
    /// ACK after this number of work requests, 1..=16 (RDM §6.2).
    pub ack_requests: u8,
    /// ACK after this number of bytes.
    pub ack_bytes: u32,
    /// ACK after this time, ns.
    pub ack_delay_ns: u64,
    /// Allowance for the hosts' schedulers, added to the time within which a response is expected, ns.
    pub patience_ns: u64,
    /// A peer that is silent for this time although a response is due is gone, ns.
    pub silence_ns: u64,
    /// A deliberate mistake.
    #[cfg(any(test, feature = "mutations"))]
    pub mutation: Option<crate::mutation::Mutation>,
}

impl ConnectionConfig {
    /// The paper's values where it states them: 120 us, 32 KB. But 16 work requests instead of 32, so that each number
    /// is in two ACKs, because an ACK contains the last 32.
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
