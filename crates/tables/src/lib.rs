//! Structures that a forwarding decision needs: longest-prefix match, exact match, and the first match of an ordered list of
//! rules.

#![forbid(unsafe_code)]

mod classifier;
mod exact;
mod lpm;

pub use classifier::{Classifier, Fields, Pattern};
pub use exact::{ExactMap, exact_map};
pub use ipnet::IpNet;
pub use lpm::Lpm;
