//! The state of each port, except its sessions.

use bifrost_tables::TokenBucket;
use bifrost_wire::{Mac, Vni};

use crate::counters::PortCounters;
use crate::path_mtu;
use crate::rule_log::RuleLog;

/// Requests of a guest to the switch itself.
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

/// The counters and rate limiters of a port, and the vNIC that they belong to.
#[derive(Clone, Debug)]
pub(crate) struct PortState {
    pub(crate) vnic: Option<(Vni, Mac)>,
    pub(crate) counters: PortCounters,
    /// Limits ICMP errors about packets from and to the guest.
    pub(crate) errors: TokenBucket,
    /// Limits DHCP messages and router solicitations.
    questions: TokenBucket,
    /// Limits DNS queries.
    names: TokenBucket,
    /// Limits VRRP and announcements of shared addresses.
    sharing: TokenBucket,
    /// Limits packets to the metadata service.
    metadata: TokenBucket,
    /// The port's rule log; `None`: no rule about its packets is logged.
    pub(crate) rules: Option<Box<RuleLog>>,
}

/// Rate and burst of DHCP messages and router solicitations: clients repeat them only after seconds.
const QUESTIONS_PER_SECOND: u64 = 10;
const QUESTIONS_AT_ONCE: u64 = 20;
/// Rate and burst of DNS queries: a program may send many, and an answer costs some microseconds.
const NAMES_PER_SECOND: u64 = 1000;
const NAMES_AT_ONCE: u64 = 1000;
/// Rate and burst of VRRP and announcements: the shortest interval of VRRP is 10 ms (RFC 9568, section 5.2.7).
const SHARING_PER_SECOND: u64 = 200;
const SHARING_AT_ONCE: u64 = 200;
/// Rate and burst of packets to the metadata service, which a thread of the daemon processes.
const METADATA_PER_SECOND: u64 = 500;
const METADATA_AT_ONCE: u64 = 500;

impl PortState {
    /// The initial state of a port with this vNIC.
    pub(crate) fn of(vnic: Option<(Vni, Mac)>) -> Self {
        let questions = TokenBucket::new(QUESTIONS_PER_SECOND, QUESTIONS_AT_ONCE);
        let names = TokenBucket::new(NAMES_PER_SECOND, NAMES_AT_ONCE);
        let sharing = TokenBucket::new(SHARING_PER_SECOND, SHARING_AT_ONCE);
        let metadata = TokenBucket::new(METADATA_PER_SECOND, METADATA_AT_ONCE);
        let (counters, errors) = (PortCounters::default(), path_mtu::allowance());
        PortState { vnic, counters, errors, questions, names, sharing, metadata, rules: None }
    }

    /// The rate limiter for a kind of request.
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
