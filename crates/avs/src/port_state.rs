//! What a switch keeps for each port, beside its sessions.

use bifrost_tables::TokenBucket;
use bifrost_wire::{Mac, Vni};

use crate::counters::PortCounters;
use crate::path_mtu;

/// Counters of a port, and of which vNIC.
#[derive(Clone, Debug)]
pub(crate) struct PortState {
    pub(crate) vnic: Option<(Vni, Mac)>,
    pub(crate) counters: PortCounters,
    /// For ICMP errors about what it sends and gets.
    pub(crate) errors: TokenBucket,
}

impl PortState {
    /// Of a vNIC that has just come.
    pub(crate) fn of(vnic: Option<(Vni, Mac)>) -> Self {
        PortState { vnic, counters: PortCounters::default(), errors: path_mtu::allowance() }
    }
}

impl Default for PortState {
    fn default() -> Self {
        PortState::of(None)
    }
}
