//! Two programs that together are a gateway, and a third one that shows how they are.
//!
//! - [`nicd`], the program `bifrost-nicd`: the NIC pipeline between a network device and the pods.
//! - [`pod`], the program `bifrost-gw`: a pod, which decides about packets.
//! - [`console`], the program `bifrost-gw-console`: a web page about servers with these.
//!
//! They speak memif with each other. What both need: configuration files ([`mod@file`]), the status server ([`status`]), the life of a program ([`program`]).

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
