//! The BIFROST reliable transport engine (NSDI'26, sections 4 and 5; docs/PROTOCOL.md).
//!
//! The engine works on packet metadata only: a handle of a buffer that it never accesses, a number of segments, a flow.
//! It does no I/O, reads no clock, starts no thread: `now` is an argument, and every action is an entry of [`Output`].
//! So the same code runs in the daemon, in a simulator and under a fuzzer.
//!
//! Order of calls for one batch:
//!
//! 1. for every datagram: [`Engine::on_data`] (then place the packet and report [`Engine::placed`]),
//!    [`Engine::on_ack`], [`Engine::on_setup`], …;
//! 2. [`Engine::on_timeout`] if [`Engine::next_timeout`] is due;
//! 3. publish what [`Output::publish`] names;
//! 4. [`Engine::flush_acks`]: acknowledgements leave only for what the guest's queue has taken;
//! 5. [`Engine::transmit`] for what guests sent;
//! 6. send [`Output::data`], [`Output::plain`], [`Output::control`]; release; clear.

#![forbid(unsafe_code)]

mod config;
mod conn;
mod counters;
mod deadline;
mod engine;
#[cfg(test)]
mod exhaustive;
mod flow_table;
mod mutation;
mod output;
mod path;
mod peer;
mod recv_window;
mod send_window;
mod snapshot;
mod timing;
mod turns;

pub use bifrost_transport::rtt::Estimate;
pub use bifrost_transport::time::{MS, S, Time, US};
pub use config::{CcKind, Config, Ordering};
pub use conn::{Pair, State};
pub use counters::Counters;
pub use engine::{Admission, Arrival, Destination, Engine, LocalVnic, Outbound, Slot, Verdict};
#[cfg(any(test, feature = "mutations"))]
pub use mutation::Mutation;
pub use output::{Control, ControlOut, DataOut, Output, PeerId, PlainOut};
pub use path::{PathEstimate, PathState};
pub use snapshot::{ConnSnapshot, PathSnapshot};
pub use turns::Weight;
