//! What a host is told, and what it tells.

use bifrost_rdm::{Class, CloseReason, Config, ConnectionConfig, ConnectionId, MessageId, OpenError};
use bifrost_verbs::{PostError, VerbsError};
use bifrost_wire::rdm::Service;

/// Settings of a host.
#[derive(Clone, Copy, Debug)]
pub struct HostConfig {
    /// Connections, at most.
    pub connections: u32,
    /// Bytes of long messages on their way to this host at once ([`Config::inbound`]).
    pub inbound: u64,
    /// Of everything that is to be random.
    pub seed: u64,
}

impl HostConfig {
    /// With the engine's default for what may be on its way.
    #[must_use]
    pub const fn new(connections: u32, seed: u64) -> Self {
        Self { connections, inbound: Config::new(connections, seed).inbound, seed }
    }
}

/// What a connection is to have.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Who repeats.
    pub service: Service,
    /// Payload of a packet, bytes.
    pub mtu: u16,
    /// Work requests that may be on their way on a lane.
    pub credits: u16,
    /// Messages that are taken ahead of the application.
    pub window: u16,
    /// The longest message that is taken, bytes.
    pub longest: u32,
    /// RC: repetitions by the NIC (paper §3.4.2: two).
    pub retries: u8,
    /// RC: time until a repetition, ns.
    pub timeout_ns: u64,
}

impl Limits {
    /// What the project's own programs use.
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

/// Why a host cannot do what it is asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// The NIC says no.
    #[error("NIC: {0}")]
    Verbs(#[from] VerbsError),
    /// The NIC does not take a request.
    #[error("NIC: {0}")]
    Post(#[from] PostError),
    /// The engine has no place.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// There are as many regions of memory as there may be.
    #[error("65,536 regions of memory are registered")]
    Regions,
    /// No such connection.
    #[error("no such connection")]
    Unknown,
    /// The two ends want different things.
    #[error("the peer's {0} differs from this end's")]
    Mismatch(&'static str),
}

/// What the application should know.
#[derive(Debug)]
pub enum HostEvent {
    /// A message has come in.
    Message {
        /// On which connection.
        connection: ConnectionId,
        /// What it is.
        class: Class,
        /// The number of the call.
        call: u32,
        /// Its bytes.
        data: Vec<u8>,
    },
    /// A message has arrived at the peer. An answer to an access of the peer to memory is a message, too.
    Sent {
        /// On which connection.
        connection: ConnectionId,
        /// Which.
        message: MessageId,
    },
    /// A connection has ended.
    Closed {
        /// Which.
        connection: ConnectionId,
        /// Why.
        reason: CloseReason,
        /// The peer did it.
        by_peer: bool,
    },
}
