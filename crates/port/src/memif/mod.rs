//! memif: packets between two processes through shared memory (the protocol of FD.io's VPP and libmemif, version 2.0;
//! also DPDK's `net_memif`).
//!
//! The *client* (the protocol's slave) owns the memory: it lays out rings and buffers in a file and sends the file over
//! a Unix socket. The *server* (master) maps it. Each ring has one producer and one consumer and two indexes: the
//! client writes `head`, the server `tail`.
//!
//! | ring | client | server |
//! |---|---|---|
//! | C2S | adds packets at `head` | consumes them at `tail` |
//! | S2C | adds empty buffers at `head` | fills them at `tail` |
//!
//! [`Server`] does not trust its clients. It copies and checks the contents of the memory once, checks buffer offsets
//! against the region, and never blocks on a client's descriptors. A client that truncates its file loses its
//! interface, and no other client is affected. [`Client`] trusts its server: it hands out packets in the shared memory
//! itself, so that they are forwarded in place.

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

/// Why an interface cannot be set up.
#[derive(Debug, Error)]
pub enum MemifError {
    /// An error of the socket or the memory.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A message that cannot be parsed.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// A message that is not valid in this state.
    #[error("{0}")]
    Unexpected(String),
    /// The other end closed the interface.
    #[error("the other end closed the interface: {0}")]
    Disconnected(String),
    /// Invalid shared memory.
    #[error("the client's memory: {0}")]
    Memory(String),
}
