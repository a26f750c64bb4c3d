//! The swarm of hosts with RDMA NICs: from a seed, a random world; in it everything must hold that always must.
//!
//! [`describe`] draws the world, [`run`] runs it. The application holds the engine to its promises:
//! each message once, whole, in the order that was agreed, and not changed afterwards; no more work requests open than
//! the peer has credits; nothing refused among honest peers. Every world must end, and be quiet then.

mod application;
mod draw;
#[cfg(feature = "mutations")]
pub mod mutations;
mod run;
mod shrink;

pub use draw::{ConnectionPlan, Description, Fault, Sends, Trouble, describe, load};
pub use run::{run, run_world};
pub use shrink::shrink;
