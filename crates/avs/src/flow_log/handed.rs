//! Conversations of another switch's log, which this one continues.
//!
//! The other switch has stopped, and this one may have counted packets of the same conversations since then. So both
//! counts are added, and each packet stays in one record.

use std::sync::Arc;

use bifrost_wire::tcp::Flags;

use super::record::{FlowEnd, FlowRecord};
use super::table::{Flow, FlowLog, Handshake, Name, PENDING};
use crate::ids::Direction;
use crate::rewrite::Endpoint;
use crate::session::Key;

/// Larger counts of another switch are invalid, so that sums do not overflow.
pub(crate) const COUNT_MAX: u64 = 1 << 60;

/// A conversation of another switch's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedFlow {
    /// Name of the log.
    pub(crate) log: Arc<str>,
    pub(crate) flow: Flow,
    /// Its record is made, for this reason, and waits to be taken; `None`: it continues.
    pub(crate) end: Option<FlowEnd>,
}

impl FlowLog {
    /// All conversations and records, which stay.
    pub(crate) fn handed(&self) -> Vec<HandedFlow> {
        let handed = |flow, end| HandedFlow { log: Arc::clone(&self.spec.name), flow, end };
        let waiting = self.pending.iter().map(|record| handed(of_record(record), Some(record.end)));
        waiting.chain(self.open().map(|flow| handed(*flow, None))).collect()
    }

    /// Continues a conversation that another log had until `now_ns` or before. Both switches must use the same clock.
    pub(crate) fn continue_flow(&mut self, handed: &HandedFlow, now_ns: u64) {
        let HandedFlow { mut flow, end, .. } = *handed;
        flow.end_ns = flow.end_ns.min(now_ns);
        flow.start_ns = flow.start_ns.min(flow.end_ns);
        if let Some(end) = end {
            return self.keep(flow.record(&self.spec.name, end));
        }
        let Name { key, rejected, .. } = flow.name;
        if !self.wants(key.port(), rejected) || !self.samples(&flow.name) {
            return self.end(&flow, FlowEnd::Forced);
        }
        if let Some(later) = self.find(&flow.name) {
            // Otherwise it is another conversation with the same key.
            if !flow.is_closed() || !later.has_syn() {
                return later.add_earlier(&flow);
            }
            self.end(&flow, FlowEnd::Closed);
        } else if !self.add(flow) {
            self.end(&flow, FlowEnd::Forced);
        }
    }

    /// Makes the record of a conversation that is not in the table.
    fn end(&mut self, flow: &Flow, end: FlowEnd) {
        if !flow.traffic_is_empty() {
            self.counters.created_records += 1;
            self.keep(flow.record(&self.spec.name, end));
        }
    }

    /// Keeps a record until it is taken. There may be one for each conversation of the other log.
    fn keep(&mut self, record: FlowRecord) {
        if self.pending.len() < PENDING.max(self.spec.flows as usize) {
            self.pending.push(record);
        } else {
            self.counters.lost_records += 1;
        }
    }
}

impl Flow {
    fn has_syn(&self) -> bool {
        self.flags.iter().any(|flags| flags & Flags::SYN.0 != 0)
    }

    /// Adds the counts of the same conversation until this one began.
    fn add_earlier(&mut self, earlier: &Flow) {
        self.origin = earlier.origin;
        // The order of the handshake's packets is unknown if it was in progress.
        self.handshake = match earlier.handshake {
            Handshake::Done(ns) => Handshake::Done(ns),
            _ => Handshake::Unknown,
        };
        if !earlier.traffic_is_empty() {
            self.start_ns = earlier.start_ns;
        }
        self.end_ns = self.end_ns.max(earlier.end_ns);
        for (traffic, before) in self.traffic.iter_mut().zip(&earlier.traffic) {
            traffic.packets = (traffic.packets + before.packets).min(COUNT_MAX);
            traffic.bytes = (traffic.bytes + before.bytes).min(COUNT_MAX);
            traffic.tcp_flags |= before.tcp_flags;
        }
        self.flags.iter_mut().zip(&earlier.flags).for_each(|(flags, before)| *flags |= before);
    }
}

/// A conversation that has this record.
fn of_record(record: &FlowRecord) -> Flow {
    let local = Endpoint { address: record.local, port: record.local_port };
    let remote = Endpoint { address: record.remote, port: record.remote_port };
    let key = Key::between(record.port, local, remote, record.protocol);
    let name = Name { key, vni: record.vni, rejected: record.rejected };
    let mut flow = Flow::begin(name, record.origin, record.start_ns);
    flow.handshake = record.handshake_ns.map_or(Handshake::Unknown, Handshake::Done);
    flow.traffic[Direction::Egress as usize] = record.sent;
    flow.traffic[Direction::Ingress as usize] = record.received;
    flow.end_ns = record.end_ns;
    flow
}
