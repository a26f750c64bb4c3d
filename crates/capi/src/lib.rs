//! `libbifrost_rdm`: the library `bifrost-endpoint` for C. The header is `include/bifrost_rdm.h`,
//! made from this crate; the guide is `docs/RDM-LIBRARY.md`.
//!
//! Rules that hold for all functions:
//!
//! - They return a [`Status`], and say more in the text of [`bifrost_rdm_last_error`]. What they
//!   give is behind their last arguments, which are written only if the status is `OK`.
//! - A null pointer where there must be something, a number out of range and a text that is not
//!   UTF-8 are refused. Beyond that, pointers must be what the caller says they are, as everywhere
//!   in C.
//! - Nothing is called of the application, no signal is taken, no thread started. A panic of the
//!   library does not leave it: the call returns `BROKEN`, and so do all later ones of that worker.
//! - A worker and all that was made with it may be used by any thread, but by one at a time: a call
//!   that finds another one at work returns `BUSY`, and has done nothing. Threads that work side by
//!   side have a worker each.

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

/// The version of this interface. It grows with what is added; what is taken away or changed
/// changes the library's name, which now ends with `.so.0`.
pub const ABI: u32 = 2;

/// `config.provider`: whatever there is.
pub const PROVIDER_AUTO: u32 = 0;
/// `config.provider`: the NIC in software, RoCEv2 over UDP.
pub const PROVIDER_SOFT: u32 = 1;
/// `config.provider`: an RDMA NIC.
pub const PROVIDER_VERBS: u32 = 2;
/// The NIC repeats what is lost: reliable connections.
pub const SERVICE_RC: u32 = 1;
/// The library repeats what is lost: unreliable connections.
pub const SERVICE_UC: u32 = 2;
/// `config.service`: both are set up, and `bifrost_rdm_switch` chooses.
pub const SERVICE_BOTH: u32 = 3;
/// `config.order`: messages are delivered as they were sent.
pub const ORDER_SENT: u32 = 0;
/// `config.order`: messages are delivered as they are complete.
pub const ORDER_COMPLETE: u32 = 1;
/// A right to a region: to read it.
pub const RIGHT_READ: u32 = 1;
/// A right to a region: to write it.
pub const RIGHT_WRITE: u32 = 2;

/// A timeout that does not end.
pub const FOREVER: u64 = u64::MAX;
