//! Rule logs: connections that a logged rule accepts, and packets that it rejects.
//!
//! A rule is logged when it is looked up. Packets with a flow record pass without a lookup: their connection is
//! already in the log. Rejected packets never have flow records, so the log counts each of them. The number and the
//! rate of records are bounded per port; packets beyond the bounds are counted and not logged. A port without logged
//! rules has no log.

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

/// Maximum number of flows in a port's log at a time.
const MOST: usize = 1024;

/// What a rule did: to whom, when, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleRecord {
    /// The rule.
    pub rule: Arc<RuleName>,
    /// The port whose guest sent the packets, or was to receive them.
    pub port: PortId,
    /// The network of the port.
    pub vni: Vni,
    /// Direction of the packets, as seen from the guest.
    pub direction: Direction,
    /// Whether the rule accepted them.
    pub accepted: bool,
    /// The guest's address.
    pub local: IpAddr,
    /// The guest's port; for ICMP the identifier or type, for protocols without ports 0.
    pub local_port: u16,
    /// The other end's address.
    pub remote: IpAddr,
    /// The other end's port.
    pub remote_port: u16,
    /// IP protocol.
    pub protocol: u8,
    /// IP packets for which the rule was looked up since the previous record. For a rejecting rule these are all
    /// rejected packets; for an accepting rule at least the first one of each connection.
    pub packets: u64,
    /// Their bytes, headers included.
    pub bytes: u64,
    /// Time of the first packet, ns of the switch's time.
    pub start_ns: u64,
    /// Time of the last packet, ns of the switch's time.
    pub end_ns: u64,
}

/// Counters of the rule logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleLogCounters {
    /// Records created.
    pub created_records: u64,
    /// Packets that a logged rule accepted or rejected, but that are in no record: the port had no room for another
    /// flow, or exceeded its rate of records.
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

/// The decision of a logged rule about a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ruling<'a> {
    pub(crate) rule: &'a Arc<RuleName>,
    pub(crate) accepted: bool,
    /// Whether the packet begins a connection, which always gets a record.
    pub(crate) begins: bool,
}

/// The key of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Name {
    key: Key,
    direction: Direction,
    accepted: bool,
    rule: Arc<RuleName>,
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // The rest is not hashed: few rules match the same packets.
        (self.key, self.direction).hash(state);
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    packets: u64,
    bytes: u64,
    start_ns: u64,
    end_ns: u64,
    /// Time of the last record; `None`: a record is due now.
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
    /// `seed`: secret seed of the hash, because tenants choose the keys.
    pub(crate) fn new(spec: RuleLogSpec, seed: u64) -> Self {
        let rate = u64::from(spec.records_per_s);
        RuleLog {
            interval_ns: spec.interval_ns,
            allowance: TokenBucket::new(rate, rate),
            flows: HashMap::with_hasher(FixedState::with_seed(seed)),
            counters: RuleLogCounters::default(),
        }
    }

    /// Changes the bounds.
    pub(crate) fn set_spec(&mut self, spec: RuleLogSpec, now_ns: u64) {
        let rate = u64::from(spec.records_per_s);
        self.interval_ns = spec.interval_ns;
        if self.allowance.rate() != (rate, rate) {
            self.allowance.set_rate(now_ns, rate, rate);
        }
    }

    /// Called when a logged rule was looked up for a packet from or to the guest of a port.
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

    /// Adds the records that are due, and forgets flows that have been idle for an interval. `all`: all remaining
    /// records are due.
    pub(crate) fn take(&mut self, vni: Vni, all: bool, now_ns: u64, out: &mut Vec<RuleRecord>) {
        let RuleLog { interval_ns, flows, counters, .. } = self;
        flows.retain(|name, entry| {
            // Of a flow that an ACL accepts, only the first packet is logged.
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
