//! Two programs that together are a gateway.
//!
//! - [`nicd`], the program `bifrost-nicd`: the NIC pipeline between a network device and the pods.
//! - [`pod`], the program `bifrost-gw`: a pod, which decides about packets.
//!
//! They speak memif with each other. What both need: configuration files ([`mod@file`]), the status server ([`status`]), the life of a program ([`program`]).

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod capture;
mod described;
pub mod file;
pub mod nicd;
pub mod pod;
pub mod program;
pub mod status;
