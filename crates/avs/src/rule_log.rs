//! Logs of single rules: connections that a rule with a log accepts, and packets that it rejects.
//!
//! A rule is logged where it is looked up. Packets of a flow with a flow record pass without a look-up: their connection is in the log
//! already. Rejected packets never have flow records, and the log counts each of them. Records are bounded in number and in rate, for
//! each port by itself; what exceeds that is counted and not logged. Without logged rules a port has no log.

use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;

use bifrost_tables::TokenBucket;
use bifrost_wire::Vni;
use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::frame::Frame;
use crate::ids::{Direction, PortId};
use crate::session::Key;
use crate::tables::{RuleLogSpec, RuleName};

/// Flows that a port's log tells apart at a time.
const MOST: usize = 1024;

/// What a rule did: the answer to who, when, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleRecord {
    /// The rule.
    pub rule: Arc<RuleName>,
    /// The port whose guest sent the packets, or was to get them.
    pub port: PortId,
    /// The network of the port.
    pub vni: Vni,
    /// Of the packets, seen from the guest.
    pub direction: Direction,
    /// Whether the rule accepted them.
    pub accepted: bool,
    /// The guest's address.
    pub local: IpAddr,
    /// The guest's port; of ICMP what stands for it, 0 for protocols without.
    pub local_port: u16,
    /// The other end's address.
    pub remote: IpAddr,
    /// The other end's port.
    pub remote_port: u16,
    /// IP protocol.
    pub protocol: u8,
    /// IP packets for which the rule was looked up since the record before: all that it rejected; of those that it accepted at least the
    /// first one of each connection.
    pub packets: u64,
    /// Their bytes, headers included.
    pub bytes: u64,
    /// The first of them, ns of the switch's time.
    pub start_ns: u64,
    /// The last of them, ns of the switch's time.
    pub end_ns: u64,
}

/// Counters of the logs of rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleLogCounters {
    /// Records that were made.
    pub created_records: u64,
    /// Packets that a logged rule accepted or rejected, and that are in no record: the port had no room for another flow, or made
    /// records too fast.
    pub suppressed_packets: u64,
}

impl RuleLogCounters {
    /// The sum of two.
    pub(crate) fn and(self, other: &RuleLogCounters) -> RuleLogCounters {
        RuleLogCounters {
            created_records: self.created_records + other.created_records,
            suppressed_packets: self.suppressed_packets + other.suppressed_packets,
        }
    }

    /// Every counter by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [("created_records", self.created_records), ("suppressed_packets", self.suppressed_packets)].into_iter()
    }
}

/// What a logged rule did with a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ruling<'a> {
    pub(crate) rule: &'a Arc<RuleName>,
    pub(crate) accepted: bool,
    /// Whether the packet begins a connection, so that there is a record of it in any case.
    pub(crate) begins: bool,
}

/// What is told by one record.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Name {
    key: Key,
    direction: Direction,
    accepted: bool,
    rule: Arc<RuleName>,
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Few rules are about the same packets.
        (self.key, self.direction).hash(state);
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    packets: u64,
    bytes: u64,
    start_ns: u64,
    end_ns: u64,
    /// When there was a record last; `None`: there is to be one now.
    told_ns: Option<u64>,
}

/// The log of one port.
#[derive(Clone, Debug)]
pub(crate) struct RuleLog {
    interval_ns: u64,
    allowance: TokenBucket,
    flows: HashMap<Name, Entry, FixedState>,
    pub(crate) counters: RuleLogCounters,
}

impl RuleLog {
    /// `seed`: of the hash, secret, since names come from tenants.
    pub(crate) fn new(spec: RuleLogSpec, seed: u64) -> Self {
        let rate = u64::from(spec.records_per_s);
        RuleLog {
            interval_ns: spec.interval_ns,
            allowance: TokenBucket::new(rate, rate),
            flows: HashMap::with_hasher(FixedState::with_seed(seed)),
            counters: RuleLogCounters::default(),
        }
    }

    /// Other bounds apply from now on.
    pub(crate) fn set_spec(&mut self, spec: RuleLogSpec, now_ns: u64) {
        let rate = u64::from(spec.records_per_s);
        self.interval_ns = spec.interval_ns;
        if self.allowance.rate() != (rate, rate) {
            self.allowance.set_rate(now_ns, rate, rate);
        }
    }

    /// A logged rule was looked up for a packet from or to the guest of a port.
    #[cold]
    #[inline(never)]
    pub(crate) fn note(&mut self, at: (PortId, Direction), frame: Frame<'_>, ruling: Ruling<'_>, now_ns: u64) {
        let (port, direction) = at;
        let Ruling { rule, accepted, begins } = ruling;
        let key = Key::of(port, direction, frame.head, frame.parsed);
        let bytes = frame.parsed.packet_len() as u64;
        let name = Name { key, direction, accepted, rule: Arc::clone(rule) };
        if let Some(entry) = self.flows.get_mut(&name) {
            if entry.packets == 0 {
                entry.start_ns = now_ns;
            }
            entry.packets += 1;
            entry.bytes += bytes;
            entry.end_ns = now_ns;
            if begins {
                entry.told_ns = None;
            }
        } else if self.flows.len() < MOST && self.allowance.take(now_ns, 1) {
            self.flows.insert(name, Entry { packets: 1, bytes, start_ns: now_ns, end_ns: now_ns, told_ns: None });
        } else {
            self.counters.suppressed_packets += 1;
        }
    }

    /// Adds the records that are due, and forgets flows of which nothing was heard for an interval. `all`: whatever is left is due.
    pub(crate) fn take(&mut self, vni: Vni, all: bool, now_ns: u64, out: &mut Vec<RuleRecord>) {
        let RuleLog { interval_ns, flows, counters, .. } = self;
        flows.retain(|name, entry| {
            // Of what an ACL accepts, the first packet stands for the others.
            let again = !name.accepted || all;
            let due = entry.told_ns.is_none_or(|told| again && (all || now_ns.saturating_sub(told) >= *interval_ns));
            if due && entry.packets > 0 {
                counters.created_records += 1;
                out.push(record(name, entry, vni));
                *entry = Entry { packets: 0, bytes: 0, told_ns: Some(now_ns), ..*entry };
            } else if name.accepted && entry.told_ns.is_some() {
                (entry.packets, entry.bytes) = (0, 0);
            }
            entry.packets > 0 || now_ns.saturating_sub(entry.end_ns) < *interval_ns
        });
        if all {
            flows.clear();
        }
    }
}

fn record(name: &Name, entry: &Entry, vni: Vni) -> RuleRecord {
    let (local, remote) = name.key.ends();
    RuleRecord {
        rule: Arc::clone(&name.rule),
        port: name.key.port(),
        vni,
        direction: name.direction,
        accepted: name.accepted,
        local: local.address,
        local_port: local.port,
        remote: remote.address,
        remote_port: remote.port,
        protocol: name.key.protocol(),
        packets: entry.packets,
        bytes: entry.bytes,
        start_ns: entry.start_ns,
        end_ns: entry.end_ns,
    }
}
