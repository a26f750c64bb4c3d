//! What a network of many hosts is to be (intent), and what each host needs to know of it (its span).
//!
//! Pure: no I/O, no clock, no thread, no global state.
//!
//! - [`key`]: kinds and names of objects.
//! - [`spec`]: what each kind of object says.
//! - [`Model`]: all objects, with their indexes. [`Model::plan`] checks a batch of changes, fills in what the author left open
//!   (VNIs, addresses, MAC addresses), and says what the store is to write.
//! - [`compile`]: objects as a host's `bifrostd` takes them (`POST /v1/apply`).
//! - [`Routes`]: where addresses are, for hosts that learn routes when they need them.
//! - [`role`]: what somebody may do with which project.
//! - [`api`]: the types of the HTTP API of the relay, which carries this out.
//! - [`Withdrawn`]: what is no longer told of a host that is dead.
//! - [`Spans`]: which host needs which of them, kept up to date change by change. Its cost is that of what changes.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod allocate;
pub mod api;
pub mod compile;
mod grants;
pub mod key;
pub mod model;
mod overview;
mod plan;
mod quota;
mod resolve;
pub mod role;
mod span;
pub mod spec;
mod withdrawn;

pub use key::{Key, Kind};
pub use model::{Model, Stored};
pub use plan::{Batch, Change, MAX_CHANGES, MAX_OBJECTS, Op, Plan, PlanError, Problem};
pub use resolve::{Hop, Resolved, Routes};
pub use role::{ProjectRole, Role};
pub use span::{HostChanges, Item, ItemId, Reason, Spans};
pub use spec::{Quota, Spec, UPLINK};
pub use withdrawn::Withdrawn;
