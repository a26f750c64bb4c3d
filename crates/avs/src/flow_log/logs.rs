//! All flow logs of a switch.

use std::sync::Arc;

use super::FlowLogCounters;
use super::handed::HandedFlow;
use super::record::FlowRecord;
use super::table::{FlowLog, Name, Packet};
use crate::drop_reason::DropReason;
use crate::ids::{Direction, PortId};
use crate::tables::{FlowLogSpec, MAX_FLOW_LOGS};

/// The flow logs of one switch. Each has a table of its own, so none takes room from another.
#[derive(Debug, Default)]
pub(crate) struct FlowLogs {
    /// Those of the configuration, in its order, and then former ones with records that wait to be taken.
    logs: Vec<FlowLog>,
    /// Number of logs of the configuration.
    live: usize,
    /// Indexed by port number. Bit i: `logs[i]` logs the port.
    ports: Vec<u64>,
}

impl FlowLogs {
    /// Changes what is logged. A log continues if it has the name of one in `specs`. The others end: their records can
    /// still be taken. `seed`: secret seed of the hashes.
    pub(crate) fn set_specs(&mut self, specs: Vec<FlowLogSpec>, seed: u64) {
        let mut former = std::mem::take(&mut self.logs);
        self.ports.clear();
        for spec in specs.into_iter().take(MAX_FLOW_LOGS) {
            let bit = 1 << self.logs.len();
            for port in &spec.ports {
                if self.ports.len() <= port.place() {
                    self.ports.resize(port.place() + 1, 0);
                }
                self.ports[port.place()] |= bit;
            }
            let log = match former.iter().position(|log| log.name() == &spec.name) {
                Some(at) => {
                    let mut log = former.remove(at);
                    log.set_spec(Some(spec));
                    log
                }
                None => FlowLog::new(spec, seed),
            };
            self.logs.push(log);
        }
        self.live = self.logs.len();
        for mut log in former {
            log.set_spec(None);
            self.logs.push(log);
        }
    }

    /// The logs that log packets of a port with this fate: bit i is log i.
    #[inline]
    pub(crate) fn wanting(&self, port: PortId, rejected: Option<DropReason>) -> u64 {
        let mut of_port = self.ports.get(port.place()).copied().unwrap_or(0);
        let mut wanting = 0;
        while of_port != 0 {
            let bit = of_port & of_port.wrapping_neg();
            of_port ^= bit;
            if self.logs.get(bit.trailing_zeros() as usize).is_some_and(|log| log.wants(port, rejected)) {
                wanting |= bit;
            }
        }
        wanting
    }

    /// Counts a packet from or to the guest of a port in the logs that [want](Self::wanting) it.
    pub(crate) fn count(&mut self, mut wanting: u64, name: Name, direction: Direction, packet: Packet, now_ns: u64) {
        while wanting != 0 {
            if let Some(log) = self.logs.get_mut(wanting.trailing_zeros() as usize) {
                log.count(name, direction, packet, now_ns);
            }
            wanting &= wanting - 1;
        }
    }

    /// Scans the next of `parts` parts of each log, and adds the due records. Returns the counters of logs that have
    /// ended, and of which all records have been taken; they are forgotten.
    pub(crate) fn take(&mut self, parts: usize, now_ns: u64, out: &mut Vec<FlowRecord>) -> FlowLogCounters {
        self.logs.iter_mut().for_each(|log| log.take(parts, now_ns, out));
        let mut ended = FlowLogCounters::default();
        let mut at = self.live;
        while let Some(log) = self.logs.get(at) {
            if log.is_over() {
                ended = ended.and(log.counters());
                self.logs.remove(at);
            } else {
                at += 1;
            }
        }
        ended
    }

    /// Whether there is no log, and no record is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.logs.is_empty()
    }

    /// Names of the logs, including those that have ended and still have records.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.logs.iter().map(FlowLog::name)
    }

    /// The sum of the counters of all logs.
    pub(crate) fn counters(&self) -> FlowLogCounters {
        self.logs.iter().fold(FlowLogCounters::default(), |sum, log| sum.and(log.counters()))
    }

    /// All conversations and records, which stay.
    pub(crate) fn handed(&self) -> Vec<HandedFlow> {
        self.logs.iter().flat_map(FlowLog::handed).collect()
    }

    /// Continues a conversation of another switch. Returns false if there is no log with that name.
    pub(crate) fn continue_flow(&mut self, handed: &HandedFlow, now_ns: u64) -> bool {
        let log = self.logs.iter_mut().find(|log| log.name() == &handed.log);
        log.map(|log| log.continue_flow(handed, now_ns)).is_some()
    }
}
