//! The swarm of hosts with RDMA NICs: random worlds from seeds, in which all invariants must hold.
//!
//! [`describe`] draws the world, [`run`] runs it. The application checks the engine's guarantees: each message arrives
//! once, complete, in the agreed order, and does not change afterwards; no more work requests are open than the peer
//! has credits; honest peers' packets are not refused. Every world must finish, and be quiet afterwards.

mod application;
mod draw;
#[cfg(feature = "mutations")]
pub mod mutations;
mod run;
mod shrink;

pub use draw::{ConnectionPlan, Description, Fault, Sends, Trouble, describe, load};
pub use run::{run, run_world};
pub use shrink::shrink;
