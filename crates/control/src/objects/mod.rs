//! The objects in force with their owners and versions, and changes to single objects in batches.
//!
//! Everything here is free of I/O. [`Store::plan`] computes the result of a batch, or its errors; [`Store::commit`]
//! applies the plan after the data path has. [`Store::list`] lists objects page by page. [`journal`] makes objects
//! persistent.

#[cfg(test)]
mod change_tests;
mod digest;
mod error;
pub mod journal;
mod list;
mod store;
#[cfg(test)]
mod tests;
mod workers;

pub use digest::Digest;
pub use error::{ApplyError, ItemError};
pub use store::{Entry, Id, MAX_OBJECTS, Objects, Plan, Store};
pub use workers::with_workers;
