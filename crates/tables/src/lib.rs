//! Structures that a forwarding decision needs: longest-prefix match, exact match, the first match of an ordered list of
//! rules, which of several paths, and a meter.

#![forbid(unsafe_code)]

mod classifier;
mod exact;
mod intervals;
mod lpm;
mod resilient;
mod token_bucket;

pub use classifier::{Classifier, Fields, Pattern};
pub use exact::{ExactMap, exact_map};
pub use ipnet::IpNet;
pub use lpm::Lpm;
pub use resilient::{AfterGap, Choice, Move, PathSet, Resilient};
pub use token_bucket::TokenBucket;
