//! RDMA verbs behind one trait, [`Provider`]: [`RdmaCore`] is a NIC of this host, used through the system's libibverbs;
//! [`Soft`] is RoCEv2 in software, over UDP sockets; [`Any`] chooses between them.
//!
//! [`bifrost_rnic::Nic`] is a provider, too; its caller carries the packets, for instance in virtual time.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod any;
mod provider;
pub mod rdma_core;
mod soft;

pub use any::{Any, AnyError, Choice};
pub use bifrost_rnic::*;
pub use provider::{Provider, Software};
pub use rdma_core::{OpenError, RdmaCore, RdmaCoreConfig, RdmaCoreCounters};
pub use soft::{Soft, SoftConfig, SoftCounters};
