//! `bifrost-agent`: brings what a relay says into a host's `bifrostd`, and repairs what differs.
//!
//! [`Core`] decides, and does no I/O: [`Desired`] is what the relay says, [`plan`] makes batches of what differs. [`run`] is around it: the
//! stream with a relay ([`follow`]), `bifrostd`'s API ([`switch`]), clocks and metrics. docs/FLEET.md is the protocol.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod blame;
pub mod cli;
pub mod desired;
pub mod follow;
mod health;
pub mod identity;
pub mod learn;
pub mod metrics;
mod pinned;
pub mod plan;
mod relations;
pub mod run;
pub mod state;
pub mod switch;
#[cfg(test)]
mod tests;
pub mod traced;

pub use desired::Desired;
pub use state::{Core, Next, Observed};

/// Whose objects the agent changes, and no others.
pub const OWNER: &str = "fleet";
