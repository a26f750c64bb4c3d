//! What a switch keeps for each port, beside its sessions.

use bifrost_tables::TokenBucket;
use bifrost_wire::{Mac, Vni};

use crate::counters::PortCounters;
use crate::path_mtu;
use crate::rule_log::RuleLog;

/// What a guest asks the switch itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Dhcp,
    Router,
    Dns,
    /// VRRP, or an announcement of a shared address.
    Sharing,
    /// A packet to the metadata service.
    Metadata,
}

/// Counters of a port, and of which vNIC.
#[derive(Clone, Debug)]
pub(crate) struct PortState {
    pub(crate) vnic: Option<(Vni, Mac)>,
    pub(crate) counters: PortCounters,
    /// For ICMP errors about what it sends and gets.
    pub(crate) errors: TokenBucket,
    /// For what it asks by DHCP, and asks routers.
    questions: TokenBucket,
    /// For what it asks by DNS.
    names: TokenBucket,
    /// For VRRP, and announcements of shared addresses.
    sharing: TokenBucket,
    /// For packets to the metadata service.
    metadata: TokenBucket,
    /// What logged rules did with its packets; `None`: no rule about them is logged.
    pub(crate) rules: Option<Box<RuleLog>>,
}

/// Questions a second, and how many at once, that a guest may ask: a client repeats each after seconds.
const QUESTIONS_PER_SECOND: u64 = 10;
const QUESTIONS_AT_ONCE: u64 = 20;
/// The same of names: a program may ask for many, and an answer costs some microseconds.
const NAMES_PER_SECOND: u64 = 1000;
const NAMES_AT_ONCE: u64 = 1000;
/// The same of VRRP and announcements: the shortest interval of VRRP is 10 ms (RFC 9568, section 5.2.7).
const SHARING_PER_SECOND: u64 = 200;
const SHARING_AT_ONCE: u64 = 200;
/// The same for packets to the metadata service, which a thread of the daemon processes.
const METADATA_PER_SECOND: u64 = 500;
const METADATA_AT_ONCE: u64 = 500;

impl PortState {
    /// Of a vNIC that has just come.
    pub(crate) fn of(vnic: Option<(Vni, Mac)>) -> Self {
        let questions = TokenBucket::new(QUESTIONS_PER_SECOND, QUESTIONS_AT_ONCE);
        let names = TokenBucket::new(NAMES_PER_SECOND, NAMES_AT_ONCE);
        let sharing = TokenBucket::new(SHARING_PER_SECOND, SHARING_AT_ONCE);
        let metadata = TokenBucket::new(METADATA_PER_SECOND, METADATA_AT_ONCE);
        let (counters, errors) = (PortCounters::default(), path_mtu::allowance());
        PortState { vnic, counters, errors, questions, names, sharing, metadata, rules: None }
    }

    /// What bounds how often a guest has the switch do this.
    pub(crate) fn bound(&mut self, asked: Asked) -> &mut TokenBucket {
        match asked {
            Asked::Dns => &mut self.names,
            Asked::Sharing => &mut self.sharing,
            Asked::Metadata => &mut self.metadata,
            Asked::Dhcp | Asked::Router => &mut self.questions,
        }
    }
}

impl Default for PortState {
    fn default() -> Self {
        PortState::of(None)
    }
}
