//! Messages and calls between processes, over RDMA or without it.
//!
//! A [`Worker`], one for each thread, has connections with peers, each an [`Endpoint`]: [`Endpoint::send`] and
//! [`Endpoint::recv`] for messages of up to 256 MiB, [`Endpoint::call`] and [`Endpoint::next_request`] for calls. Nothing is
//! lost, repeated or (by default) reordered, whatever the network drops. There need be no RDMA NIC: packets are RoCEv2 all
//! the same, over UDP sockets ([`Worker::provider`] says so).
//!
//! Calls of a worker and of its endpoints drive the connections; a thread that does something else for long calls
//! [`Worker::poll`] now and then, or [`Worker::wait`].
//!
//! Below, [`Host`] joins the engine (`bifrost-rdm`) and a provider of verbs; it does no I/O of its own.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod buffers;
mod config;
mod control;
mod endpoint;
mod error;
mod host;
mod inner;
mod setup;
mod slots;
#[cfg(test)]
mod tests;
mod worker;

#[cfg(feature = "mutations")]
pub use bifrost_rdm::Mutation;
pub use bifrost_rdm::{
    Adaptive, Chunking, Class, CloseReason, Config, Congestion, ConnectionConfig, ConnectionId, Counters, Fixed,
    MessageId, NEVER, Order, SendError, Service, Swift, SwiftConfig, Unlimited,
};
pub use config::WorkerConfig;
pub use endpoint::{Endpoint, Message, Request};
pub use error::Error;
pub use host::{Host, HostConfig, HostError, HostEvent, Limits};
pub use setup::Listener;
pub use worker::{SETUP_PATIENCE, Worker};
