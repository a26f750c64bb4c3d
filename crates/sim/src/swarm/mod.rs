//! The swarm: random worlds from seeds, in which all invariants must hold.
//!
//! [`scenario`] draws the world, [`run`] runs it with all [checkers](crate::checkers), [`shrink`] reduces a failing
//! one. As in TigerBeetle and FoundationDB, random testing finds cases that nobody thought of.

mod choice;
mod draw;
#[cfg(feature = "mutations")]
pub mod mutations;
mod run;
mod shrink;
mod workloads;

pub(crate) use choice::Draw;
pub use draw::scenario;
pub use run::{Outcome, run, run_scenario};
pub use shrink::shrink;
