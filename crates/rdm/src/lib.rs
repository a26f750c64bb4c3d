//! Reliable messages over RDMA on a network that loses packets: the engine (`docs/RDM.md`, cited as RDM §n).
//!
//! The paper is *Bifröst: A Highly Compatible and Flexible PFC-free RDMA Framework* ("paper" below). The data path
//! stays in the NIC; this crate is the control path: it selects what is sent when, tracks what has arrived and what was
//! lost, and controls the rate. It does no I/O, reads no clock, and sees no payload: completions and `now` go in, work
//! requests and events come out ([`Output`]).
//!
//! The replaceable parts are [`Chunking`], [`Congestion`], and where retransmission happens ([`Service`]: in the engine
//! over unreliable connections, or in the NIC over reliable ones, with the engine as a fallback).
//!
//! The order of calls in a loop: completions of control datagrams ([`Engine::on_control`]) before those of data
//! ([`Engine::on_arrival`], [`Engine::on_sent`]), then [`Engine::turn`], then the work in the output.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod acknowledger;
mod chunking;
mod clock;
mod config;
mod congestion;
mod connection;
mod counters;
mod engine;
mod flight;
mod inbound;
mod incoming;
mod lane;
mod losses;
mod mutation;
mod outgoing;
mod output;
mod rtt;
mod swift;
mod units;

pub use bifrost_transport::cc::Unlimited;
pub use bifrost_wire::rdm::{Class, CloseReason, LANES, MAX_LANES, MessageId, Service};
pub use chunking::{Adaptive, Chunking, Fixed, View};
pub use clock::Clock;
pub use config::{Config, ConnectionConfig, Order};
pub use congestion::{Congestion, Sample};
pub use counters::Counters;
pub use engine::{Arrival, Engine, OpenError, Place, SendError};
#[cfg(any(test, feature = "mutations"))]
pub use mutation::Mutation;
pub use output::{BufferId, ConnectionId, Event, Memory, Output, Work};
pub use rtt::Rtt;
pub use swift::{Swift, SwiftConfig};

/// No deadline.
pub const NEVER: u64 = u64::MAX;
