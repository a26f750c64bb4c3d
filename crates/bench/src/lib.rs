//! What the transport costs, measured on the engine that the daemon runs: two of them, face to face, in virtual time.
//!
//! [`End`] is one side: an engine, and around it just what its caller does for it on every turn. Its turns are what is
//! counted. [`Link`] carries datagrams between two ends and is never counted. [`account`] counts allocations and bytes
//! by side. docs/COST.md says what the numbers mean.

pub mod account;
pub mod decisions;
mod end;
pub mod forwarding;
pub mod gateway;
mod link;
pub mod memory;
pub mod messages;
pub mod report;
pub mod round;
pub mod routes;
pub mod stages;
pub mod vectors;
pub mod wall;

pub use end::{Batch, Datagram, End, Offer};
pub use link::Link;
