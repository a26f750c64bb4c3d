//! The cost of the transport, measured on the engine that the daemon runs: two of them, connected in virtual time.
//!
//! [`End`] is one end: an engine, and the work that its caller does for it on every turn. Its turns are counted.
//! [`Link`] carries datagrams between two ends and is never counted. [`account`] counts allocations and bytes per
//! end. docs/COST.md explains the numbers.

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
pub mod tenants;
pub mod vectors;
pub mod wall;

pub use end::{Batch, Datagram, End, Offer};
pub use link::Link;
