//! Messages and calls between processes, over RDMA or without it.
//!
//! [`Host`] joins the engine (`bifrost-rdm`) and a provider of verbs; it does no I/O of its own.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod buffers;
mod control;
mod host;
mod slots;
#[cfg(test)]
mod tests;

pub use bifrost_rdm::{
    Adaptive, Chunking, Class, CloseReason, Config, Congestion, ConnectionConfig, ConnectionId, Counters, Fixed,
    MessageId, NEVER, Order, SendError, Service, Swift, SwiftConfig, Unlimited,
};
pub use host::{Host, HostConfig, HostError, HostEvent, Limits};
