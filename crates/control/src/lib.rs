//! What an operator says to the daemon, and what the daemon says back.
//!
//! - [`config`]: the TOML file, checked as a whole into types that cannot be wrong.
//! - [`diff`]: what a reload changes, and what it cannot change.
//! - [`objects`]: the objects of the file and of others, and changes to them one at a time.
//! - [`api`]: the types of the HTTP API, shared by both of its ends.
//! - [`balance`]: whether every packet is accounted for.
//! - [`counters`]: what every counter means.
//! - [`described`]: the frame of a packet that is only described.
//! - [`server`]: the daemon's end, HTTP/1.1 with JSON over a Unix socket.
//! - [`client`]: the other end, for `bifrostctl`, the lab and tests.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod api;
pub mod balance;
pub mod capture;
pub mod client;
pub mod config;
pub mod counters;
pub mod described;
pub mod diff;
pub mod objects;
pub mod server;

pub use client::Client;
pub use config::Config;
pub use diff::ConfigDiff;
pub use server::{Backend, Listeners, ServerHandle, serve, serve_handed, serve_with_metrics};
