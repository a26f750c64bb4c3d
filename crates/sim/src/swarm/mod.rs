//! The swarm: from a seed, a random world; in it everything must hold that always must.
//!
//! [`scenario`] draws the world, [`run`] runs it with all [checkers](crate::checkers), [`shrink`] makes a failing one
//! smaller. The idea is TigerBeetle's and FoundationDB's: what nobody thought of is found by trying.

mod draw;
#[cfg(feature = "mutations")]
pub mod mutations;
mod run;
mod shrink;
mod workloads;

pub(crate) use draw::Draw;
pub use draw::scenario;
pub use run::{Outcome, run, run_scenario};
pub use shrink::shrink;
