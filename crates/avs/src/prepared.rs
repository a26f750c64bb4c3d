//! Configurations with their indexes, which are built outside the switches that take them over.

use bifrost_wire::{Mac, Vni};

use crate::addresses::Addresses;
use crate::ids::{PeerId, WorkerId};
use crate::index::Index;
use crate::limits::{FlowLimits, SessionLimits};
use crate::location::Location;
use crate::tables::{BuildError, FlowLogSpec, RouteChanges, RuleLogSpec, Tables};

/// A configuration with its indexes, ready for [`Switch::take_over`](crate::Switch::take_over). Clones share the
/// tables that come from routes.
#[derive(Clone, Debug)]
pub struct Prepared {
    pub(crate) index: Index,
    pub(crate) sessions: SessionLimits,
    pub(crate) flows: FlowLimits,
    pub(crate) flow_logs: Vec<FlowLogSpec>,
    pub(crate) rule_log: Option<RuleLogSpec>,
}

/// The configuration before [`Switch::take_over`](crate::Switch::take_over). Dropping it takes time, so the caller
/// chooses when.
#[derive(Debug)]
pub struct Former {
    _index: Index,
}

impl Former {
    pub(crate) fn of(index: Index) -> Self {
        Former { _index: index }
    }
}

/// New shared tables, built from those of an earlier configuration and its changes.
#[derive(Debug)]
pub struct Merged {
    /// For each changed network: its earlier addresses, and the same ones in new tables.
    networks: Vec<(Vni, Addresses, Addresses)>,
}

impl Prepared {
    /// Builds the indexes of one switch.
    ///
    /// # Errors
    /// The first contradiction in `tables`.
    pub fn build(tables: &Tables) -> Result<Self, BuildError> {
        Ok(Self::of(tables, Index::build(tables)?))
    }

    /// Builds the indexes of the configuration after this one, in time that does not depend on the number of routes.
    /// `changes` are the differences of the routes; `tables` is everything else, and its routes are ignored.
    ///
    /// # Errors
    /// A contradiction in `tables`, or between `tables` and a route.
    pub fn after(&self, tables: &Tables, changes: &[RouteChanges]) -> Result<Self, BuildError> {
        Ok(Self::of(tables, Index::since(tables, Some((&self.index, changes)))?))
    }

    fn of(tables: &Tables, index: Index) -> Self {
        let Tables { sessions, flows, ref flow_logs, rule_log, .. } = *tables;
        Prepared { index, sessions, flows, flow_logs: flow_logs.clone(), rule_log }
    }

    /// The same configuration for another worker of the host.
    pub fn of_worker(&self, own: WorkerId) -> Self {
        Prepared { index: self.index.of_worker(own), flow_logs: self.flow_logs.clone(), ..*self }
    }

    /// The host of a vNIC that routes lead to, and the smallest path MTU of these routes, bytes.
    pub fn remote_vnic(&self, vni: Vni, mac: Mac) -> Option<(PeerId, u16)> {
        let path = self.index.vpc(vni)?.path(mac)?;
        match path.location() {
            Location::Remote(peer) => Some((peer, path.mtu)),
            Location::Local(_) => None,
        }
    }

    /// Number of entries that differ from the shared tables, in the network with the most. Lookups check these first,
    /// and each change copies them.
    pub fn changed_len(&self) -> usize {
        self.index.addresses().map(|(_, addresses)| addresses.changed_len()).max().unwrap_or(0)
    }

    /// Builds new shared tables from those of this configuration and its changes, in time proportional to their size.
    /// Further configurations may be built after this one meanwhile.
    pub fn merged(&self) -> Merged {
        let changed = self.index.addresses().filter(|(_, addresses)| addresses.changed_len() > 0);
        Merged { networks: changed.map(|(vni, former)| (vni, former.clone(), former.merged())).collect() }
    }

    /// The same configuration on new shared tables that were built from an earlier one. Networks that do not derive
    /// from the earlier one keep their tables.
    pub fn rebased(&self, merged: &Merged) -> Self {
        let mut rebased = self.clone();
        for (vni, former, merged) in &merged.networks {
            let now = self.index.vpc(*vni).map(|vpc| &vpc.addresses);
            if let Some(addresses) = now.and_then(|now| now.rebased(former, merged)) {
                rebased.index.set_addresses(*vni, addresses);
            }
        }
        rebased
    }
}
