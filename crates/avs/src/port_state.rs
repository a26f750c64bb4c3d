//! What a switch keeps for each port, beside its sessions.

use bifrost_tables::TokenBucket;
use bifrost_wire::{Mac, Vni};

use crate::counters::PortCounters;
use crate::path_mtu;
use crate::rule_log::RuleLog;

/// Counters of a port, and of which vNIC.
#[derive(Clone, Debug)]
pub(crate) struct PortState {
    pub(crate) vnic: Option<(Vni, Mac)>,
    pub(crate) counters: PortCounters,
    /// For ICMP errors about what it sends and gets.
    pub(crate) errors: TokenBucket,
    /// For what it asks by DHCP, and asks routers.
    pub(crate) questions: TokenBucket,
    /// What logged rules did with its packets; `None`: no rule about them is logged.
    pub(crate) rules: Option<Box<RuleLog>>,
}

/// Questions a second, and how many at once, that a guest may ask: a client repeats each after seconds.
const QUESTIONS_PER_SECOND: u64 = 10;
const QUESTIONS_AT_ONCE: u64 = 20;

impl PortState {
    /// Of a vNIC that has just come.
    pub(crate) fn of(vnic: Option<(Vni, Mac)>) -> Self {
        let questions = TokenBucket::new(QUESTIONS_PER_SECOND, QUESTIONS_AT_ONCE);
        PortState { vnic, counters: PortCounters::default(), errors: path_mtu::allowance(), questions, rules: None }
    }
}

impl Default for PortState {
    fn default() -> Self {
        PortState::of(None)
    }
}
