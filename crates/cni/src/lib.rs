//! A CNI plugin: a container runtime runs it to attach a container to this host's `bifrostd`, and to take it away again.
//!
//! It follows version 1.1.0 of the [specification](https://www.cni.dev/docs/spec/), and knows 0.4.0 and 1.0.0. What a call
//! says ([`call`]), what the network is ([`network`]), which port that makes ([`attachment`]) and what is answered
//! ([`answer`]) is pure; [`plugin`] asks the plugin for addresses ([`ipam`]), `bifrostd`, and the kernel ([`kernel`]).

pub mod answer;
pub mod attachment;
pub mod call;
pub mod error;
pub mod ipam;
pub mod kernel;
pub mod network;
pub mod plugin;
