//! The rule logs of all ports of a switch.

use crate::port_state::PortState;
use crate::rule_log::{RuleLog, RuleLogCounters, RuleRecord};
use crate::tables::RuleLogSpec;

/// Once this many records of ended logs wait to be taken, the records of further ended logs are lost. The records of
/// one port are either all kept or all lost.
const MOST_PAST: usize = 1 << 16;

/// The settings of rule logs, and the remaining records of ended ones.
#[derive(Debug)]
pub(crate) struct RuleLogs {
    /// `None`: rules are not logged.
    pub(crate) spec: Option<RuleLogSpec>,
    /// Secret seed of hashes whose keys tenants choose.
    seed: u64,
    past: Vec<RuleRecord>,
    ended: RuleLogCounters,
    /// The port from which records are taken next.
    cursor: usize,
}

impl RuleLogs {
    pub(crate) fn new(spec: Option<RuleLogSpec>, seed: u64) -> Self {
        RuleLogs { spec, seed, past: Vec::new(), ended: RuleLogCounters::default(), cursor: 0 }
    }

    /// Ends the log of a port, if it has one. Its records can still be taken.
    pub(crate) fn end(&mut self, state: &mut PortState, now_ns: u64) {
        let (Some(mut log), Some((vni, _))) = (state.rules.take(), state.vnic) else { return };
        if self.past.len() < MOST_PAST {
            log.take(vni, true, now_ns, &mut self.past);
        }
        self.ended = self.ended.and(&log.counters);
    }

    /// Creates, updates or ends the log of a port that stays. `is_wanted`: a rule about the port's packets is logged.
    pub(crate) fn claim(&mut self, state: &mut PortState, is_wanted: bool, now_ns: u64) {
        match (&mut state.rules, self.spec.filter(|_| is_wanted)) {
            (_, None) => self.end(state, now_ns),
            (Some(log), Some(spec)) => log.set_spec(spec, now_ns),
            (none, Some(spec)) => *none = Some(Box::new(RuleLog::new(spec, self.seed))),
        }
    }

    /// Adds the due records of the next of `parts` parts of the ports.
    pub(crate) fn take(&mut self, ports: &mut [PortState], parts: usize, now_ns: u64, out: &mut Vec<RuleRecord>) {
        out.append(&mut self.past);
        let end = ports.len().min(self.cursor + ports.len().div_ceil(parts.max(1)));
        for state in ports.get_mut(self.cursor..end).unwrap_or_default() {
            if let (Some(log), Some((vni, _))) = (&mut state.rules, state.vnic) {
                log.take(vni, false, now_ns, out);
            }
        }
        self.cursor = if end == ports.len() { 0 } else { end };
    }

    /// Ends the logs of all ports, and adds their records.
    pub(crate) fn end_all(&mut self, ports: &mut [PortState], now_ns: u64, out: &mut Vec<RuleRecord>) {
        for state in ports {
            out.append(&mut self.past);
            self.end(state, now_ns);
        }
        out.append(&mut self.past);
    }

    pub(crate) fn counters(&self, ports: &[PortState]) -> RuleLogCounters {
        let logs = ports.iter().filter_map(|state| state.rules.as_deref());
        logs.fold(self.ended, |sum, log| sum.and(&log.counters))
    }
}
