//! Two programs that together are a gateway, and a third one that shows their state.
//!
//! - [`nicd`], the program `bifrost-nicd`: the NIC pipeline between a network device and the pods.
//! - [`pod`], the program `bifrost-gw`: a pod, which forwards packets.
//! - [`console`], the program `bifrost-gw-console`: a web page about servers with these.
//!
//! The first two communicate over memif. Shared parts: configuration files ([`mod@file`]), the status server
//! ([`status`]), and the life cycle of a program ([`program`]).

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod capture;
pub mod console;
mod described;
pub mod file;
pub mod nicd;
pub mod pod;
pub mod program;
pub mod status;
