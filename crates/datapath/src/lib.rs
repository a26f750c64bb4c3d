//! One run-to-completion loop per core; the only place where the rooms are wired together.
//!
//! A [`Worker`] owns everything it touches: its transport engine, its switch, its queue of every guest port, its sockets.
//! Nothing is shared between workers and nothing is locked. Other threads talk to a worker by sending it closures
//! ([`Handle::run`]), which it runs between two batches.
//!
//! A packet's way, file by file:
//!
//! * out: `guest.rs` fetches, parses, asks the switch, hands to the transport; `emit.rs` segments, encapsulates and sends;
//! * in: `underlay.rs` decapsulates, asks the transport, verifies and places; `worker.rs` publishes, then acknowledges.

mod core;
mod counters;
mod delayed;
mod emit;
pub mod fault;
mod guest;
mod hand_over;
mod handle;
mod peers;
mod ports;
mod snapshot;
mod underlay;
mod worker;

pub use crate::core::Core;
pub use counters::Counters;
pub use handle::{Gone, Handle, join, start};
pub use peers::{PeerConfig, PeerError};
pub use ports::PortConfig;
pub use snapshot::{PathView, PortView, WorkerView};
pub use worker::{Worker, WorkerConfig};
