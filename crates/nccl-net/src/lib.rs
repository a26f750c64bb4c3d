//! `libnccl-net-bifrost.so`: a network plugin for NCCL. It uses connections of `bifrost-endpoint`,
//! so it tolerates a network that drops packets, with or without RDMA NICs. `docs/RDM-LIBRARY.md`
//! describes its use.
//!
//! The interface is that of NCCL's public headers `net_v8.h` to `net_v12.h`; the bindings in
//! `ffi.rs` are original. From the outside inwards:
//!
//! - `exports.rs`: the function tables that NCCL looks up, one per version. They check arguments,
//!   and let no panic out.
//! - `plugin.rs`: state shared by all calls: devices, workers, the log, and a thread that keeps
//!   connections alive while NCCL computes.
//! - `hub.rs`: a worker with its listeners and connections; `comm.rs`: a connection in one
//!   direction, as NCCL uses it.
//! - `sending.rs`, `receiving.rs`, `frame.rs`: matching of sends with receives, and its messages.
//!   They do no I/O.
//!
//! The pointers that NCCL gets are numbers (`token.rs`), which are looked up: an unknown or
//! outdated one is an error.
//!
//! A receiver announces its receives to the sender (RDM §13), and a send waits for one with its
//! tag. So all data that arrives has a buffer, and memory is bounded whatever a peer does.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod comm;
mod devices;
mod exports;
mod fail;
mod ffi;
mod frame;
mod hub;
mod plugin;
mod receiving;
mod requests;
mod sending;
mod token;

pub use exports::{ncclNetPlugin_v8, ncclNetPlugin_v9, ncclNetPlugin_v10, ncclNetPlugin_v11, ncclNetPlugin_v12};
