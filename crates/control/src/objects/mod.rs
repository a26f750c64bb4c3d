//! The objects in force, and changes to them one at a time: whose they are, which version, and what follows from a batch.
//!
//! Everything here is a function of its arguments. [`Store::plan`] says what a batch would lead to, or what is wrong with it;
//! [`Store::commit`] takes that over once the data path has. [`Store::list`] tells what there is, page by page. [`journal`] is how
//! objects outlive the daemon.

mod digest;
mod error;
pub mod journal;
mod list;
mod store;
#[cfg(test)]
mod tests;

pub use digest::Digest;
pub use error::{ApplyError, ItemError};
pub use store::{Entry, Id, MAX_OBJECTS, Plan, Store};
