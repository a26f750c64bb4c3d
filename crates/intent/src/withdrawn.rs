//! Hosts that are dead, and what others are no longer told of them.

use serde::{Deserialize, Serialize};

/// What is withdrawn of a host that is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Withdrawn {
    /// Its guests are no backends of load balancers, unless a load balancer has no others.
    Backends,
    /// In addition, no host has routes to its ports.
    Routes,
}
