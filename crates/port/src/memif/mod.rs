//! memif: packets between two processes through shared memory (the protocol of FD.io's VPP and libmemif, version 2.0; also DPDK's `net_memif`).
//!
//! Of the two ends the *client* (the protocol's slave) owns the memory: it lays out rings and buffers in a file and sends that over a Unix socket. The
//! *server* (master) maps it. Each ring has one producer and one consumer and two counters: the client writes `head`, the server `tail`.
//!
//! | ring | client | server |
//! |---|---|---|
//! | C2S | puts packets before `head` | takes them, moves `tail` behind them |
//! | S2C | puts empty buffers before `head` | fills them, moves `tail` behind them |
//!
//! [`Server`] is for one that trusts no client: what is in the memory is copied once and checked, buffers are named by offsets that are compared with the
//! region, a client that cuts its file loses its interface and nobody else, and its descriptors are never waited for. [`Client`] trusts its server: it
//! hands out packets in the shared memory itself, so that a packet is forwarded where it lies.

mod client;
mod message;
mod ring;
mod server;
mod socket;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub use client::{Client, ClientConfig, Queue, Received};
pub use message::ProtocolError;
pub use server::{Attached, BadPacket, FromClient, Server, ServerConfig, ToClient, TooLong};

use thiserror::Error;

/// Why an interface could not be set up.
#[derive(Debug, Error)]
pub enum MemifError {
    /// The socket, or memory.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A message that cannot be understood.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// A message that does not fit here.
    #[error("{0}")]
    Unexpected(String),
    /// The other end closed the interface.
    #[error("the other end closed the interface: {0}")]
    Disconnected(String),
    /// Memory that cannot be what it is said to be.
    #[error("the client's memory: {0}")]
    Memory(String),
}
