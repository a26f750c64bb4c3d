//! RDMA verbs behind one trait, [`Provider`].
//!
//! [`bifrost_rnic::Nic`] is a provider by itself, whose packets the caller carries: in virtual time, for instance.

mod provider;
mod soft;

pub use bifrost_rnic::*;
pub use provider::{Provider, Software};
pub use soft::{Soft, SoftConfig, SoftCounters};
