//! `libnccl-net-bifrost.so`: a network plugin for NCCL. Its traffic goes over connections of
//! `bifrost-endpoint`, so it survives a network that drops packets, with an RDMA NIC or without
//! one. `docs/RDM-LIBRARY.md` says how to use it.
//!
//! The interface is that of NCCL's public headers `net_v8.h` to `net_v12.h`; the bindings in
//! `ffi.rs` are our own. From the outside inwards:
//!
//! - `exports.rs`: the tables of functions that NCCL finds, one for each version. They check
//!   arguments, and let no panic out.
//! - `plugin.rs`: what all calls share: devices, workers, the log, and a thread that keeps
//!   connections alive while NCCL computes.
//! - `hub.rs`: a worker with its listeners and connections; `comm.rs`: a connection in one
//!   direction, as NCCL knows it.
//! - `sending.rs`, `receiving.rs`, `frame.rs`: which send belongs to which receive, and how it is
//!   told. They do no I/O.
//!
//! What NCCL gets as pointers are numbers (`token.rs`), which are looked up: one that was never
//! given, or is old, is an error.
//!
//! A receiver tells its receives to the sender (RDM §13), and a send waits for one with its tag:
//! nothing arrives that has no place, and memory is bounded whatever a peer does.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod comm;
mod devices;
mod exports;
mod ffi;
mod frame;
mod hub;
mod plugin;
mod receiving;
mod requests;
mod sending;
mod token;

pub use exports::{ncclNetPlugin_v8, ncclNetPlugin_v9, ncclNetPlugin_v10, ncclNetPlugin_v11, ncclNetPlugin_v12};
