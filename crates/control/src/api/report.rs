//! What a reload did.

use serde::{Deserialize, Serialize};

/// The outcome of `POST /v1/reload`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReloadReport {
    /// Ports, by name.
    pub ports: Changed,
    /// Routes, as `vni 100 10.0.0.2/32`.
    pub routes: Changed,
    /// Peers, by name.
    pub peers: Changed,
    /// VPCs, by VNI.
    pub vpcs: Changed,
    /// Whether transport settings changed.
    pub transport_changed: bool,
}

/// Names of what was added, removed and changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Changed {
    /// Only in the new configuration.
    pub added: Vec<String>,
    /// Only in the old configuration.
    pub removed: Vec<String>,
    /// In both, and different.
    pub changed: Vec<String>,
}

impl Changed {
    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }
}

impl ReloadReport {
    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        !self.transport_changed && [&self.ports, &self.routes, &self.peers, &self.vpcs].iter().all(|c| c.is_empty())
    }
}
