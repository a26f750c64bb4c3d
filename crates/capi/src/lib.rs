//! `libbifrost_rdm`: the library `bifrost-endpoint` for C. The header `include/bifrost_rdm.h` is
//! generated from this crate; the guide is `docs/RDM-LIBRARY.md`.
//!
//! Rules for all functions:
//!
//! - They return a [`Status`], and describe errors in [`bifrost_rdm_last_error`]. Results are
//!   returned through the last arguments, which are written only if the status is `OK`.
//! - Unexpected null pointers, numbers out of range and invalid UTF-8 are refused. Otherwise, as
//!   always in C, the library relies on the caller for the validity of pointers.
//! - The library has no callbacks, handles no signals and starts no threads. Panics do not leave it:
//!   the call returns `BROKEN`, and so do all later ones of that worker.
//! - A worker and its objects may be used by any thread, but by only one at a time: a concurrent
//!   call returns `BUSY` and has no effect. Threads that run in parallel need separate workers.

mod config;
mod connection;
mod handle;
mod held;
mod memory;
mod message;
mod status;
mod worker;

pub use config::{Config, bifrost_rdm_config_init};
pub use connection::*;
pub use handle::{EndpointHandle, ListenerHandle, RegionHandle, WorkerHandle};
pub use held::Received;
pub use memory::*;
pub use message::*;
pub use status::{Status, bifrost_rdm_last_error, bifrost_rdm_status_text};
pub use worker::*;

/// The version of this interface. It increases with additions. An incompatible change changes the
/// library's soname, which now ends with `.so.0`.
pub const ABI: u32 = 2;

/// `config.provider`: the RDMA NIC if there is one, otherwise software.
pub const PROVIDER_AUTO: u32 = 0;
/// `config.provider`: the software NIC, RoCEv2 over UDP.
pub const PROVIDER_SOFT: u32 = 1;
/// `config.provider`: an RDMA NIC.
pub const PROVIDER_VERBS: u32 = 2;
/// `config.service`: reliable connections; the NIC retransmits.
pub const SERVICE_RC: u32 = 1;
/// `config.service`: unreliable connections; the library retransmits.
pub const SERVICE_UC: u32 = 2;
/// `config.service`: both are set up, and `bifrost_rdm_switch` selects one.
pub const SERVICE_BOTH: u32 = 3;
/// `config.order`: messages are delivered in the order in which they were sent.
pub const ORDER_SENT: u32 = 0;
/// `config.order`: messages are delivered as soon as each is complete.
pub const ORDER_COMPLETE: u32 = 1;
/// Permission to read a region.
pub const RIGHT_READ: u32 = 1;
/// Permission to write to a region.
pub const RIGHT_WRITE: u32 = 2;

/// A timeout that never expires.
pub const FOREVER: u64 = u64::MAX;
