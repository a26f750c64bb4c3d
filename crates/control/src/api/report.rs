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
    /// Ways into other VPCs.
    pub peerings: Changed,
    /// VPCs, by VNI.
    pub vpcs: Changed,
    /// Security groups, by name.
    pub security_groups: Changed,
    /// Whether the bounds of sessions changed.
    pub sessions_changed: bool,
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
        let named = [&self.ports, &self.routes, &self.peers, &self.peerings, &self.vpcs, &self.security_groups];
        !self.transport_changed && !self.sessions_changed && named.iter().all(|c| c.is_empty())
    }
}
