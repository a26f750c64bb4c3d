//! Settings, errors and events of a host.

use bifrost_rdm::{Class, CloseReason, Config, ConnectionConfig, ConnectionId, MessageId, OpenError};
use bifrost_verbs::{PostError, VerbsError};
use bifrost_wire::rdm::Service;

/// Settings of a host.
#[derive(Clone, Copy, Debug)]
pub struct HostConfig {
    /// Maximum number of connections.
    pub connections: u32,
    /// Bytes of long messages that may be in flight to this host ([`Config::inbound`]).
    pub inbound: u64,
    /// Seed of all random values.
    pub seed: u64,
}

impl HostConfig {
    /// Settings with the engine's default for `inbound`.
    #[must_use]
    pub const fn new(connections: u32, seed: u64) -> Self {
        Self { connections, inbound: Config::new(connections, seed).inbound, seed }
    }
}

/// Settings of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Whether the engine or the NIC retransmits.
    pub service: Service,
    /// Payload of a packet, bytes.
    pub mtu: u16,
    /// Maximum number of work requests in flight on a lane.
    pub credits: u16,
    /// Messages accepted before the application consumes them.
    pub window: u16,
    /// The longest message accepted, bytes.
    pub longest: u32,
    /// RC: retransmissions by the NIC (paper §3.4.2: two).
    pub retries: u8,
    /// RC: time until a retransmission, ns.
    pub timeout_ns: u64,
}

impl Limits {
    /// The settings of the project's own programs.
    #[must_use]
    pub const fn new(service: Service, mtu: u16) -> Self {
        let config = ConnectionConfig::new(service, mtu);
        Self {
            service,
            mtu,
            credits: config.credits,
            window: config.window,
            longest: config.longest,
            retries: 2,
            timeout_ns: 4_000_000,
        }
    }
}

/// Why an operation of a host failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// The NIC reports an error.
    #[error("NIC: {0}")]
    Verbs(#[from] VerbsError),
    /// The NIC refused a request.
    #[error("NIC: {0}")]
    Post(#[from] PostError),
    /// The engine refused to open a connection.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The maximum number of memory regions is registered.
    #[error("65,536 regions of memory are registered")]
    Regions,
    /// No such connection.
    #[error("no such connection")]
    Unknown,
    /// The settings of the two ends differ.
    #[error("the peer's {0} differs from this end's")]
    Mismatch(&'static str),
}

/// Events for the application.
#[derive(Debug)]
pub enum HostEvent {
    /// A message has arrived.
    Message {
        /// The connection.
        connection: ConnectionId,
        /// Its class.
        class: Class,
        /// The number of the call.
        call: u32,
        /// Its data.
        data: Vec<u8>,
    },
    /// A message has arrived at the peer. Answers to the peer's memory accesses are messages, too.
    Sent {
        /// The connection.
        connection: ConnectionId,
        /// The message.
        message: MessageId,
    },
    /// A connection has ended.
    Closed {
        /// The connection.
        connection: ConnectionId,
        /// The reason.
        reason: CloseReason,
        /// The peer ended it.
        by_peer: bool,
    },
}
