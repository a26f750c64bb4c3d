//! A CNI plugin: a container runtime runs it to attach a container to this host's `bifrostd`, and to detach it.
//!
//! It implements version 1.1.0 of the [specification](https://www.cni.dev/docs/spec/), and supports 0.4.0 and 1.0.0.
//! Parsing a call ([`call`]) and a network's configuration ([`network`]), building the port ([`attachment`]) and the
//! result ([`answer`]) are pure; [`plugin`] talks to the IPAM plugin ([`ipam`]), `bifrostd`, and the kernel
//! ([`kernel`]).

pub mod answer;
pub mod attachment;
pub mod call;
pub mod error;
pub mod ipam;
pub mod kernel;
pub mod network;
pub mod plugin;
