//! Structures that a forwarding decision needs: longest-prefix match and exact match.

#![forbid(unsafe_code)]

mod exact;
mod lpm;

pub use exact::{ExactMap, exact_map};
pub use ipnet::IpNet;
pub use lpm::Lpm;
