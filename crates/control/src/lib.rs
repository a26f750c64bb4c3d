//! Configuration, control API and counter descriptions: the interface between operators and the daemon.
//!
//! - [`config`]: the TOML file, parsed and validated as a whole.
//! - [`diff`]: the difference between two configurations, and what needs a restart.
//! - [`objects`]: configuration objects of the file and of other owners, and changes to single ones.
//! - [`api`]: the types of the HTTP API, shared by server and client.
//! - [`balance`]: checks that every packet is accounted for.
//! - [`counters`]: descriptions of all counters.
//! - [`described`]: builds the frame of a packet that is only described.
//! - [`server`]: the API server, HTTP/1.1 with JSON over a Unix socket.
//! - [`client`]: the API client, for `bifrostctl`, the lab and tests.

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
