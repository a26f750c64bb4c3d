//! The end of a run, and its final checks.

use super::World;
use crate::host::Host;
use crate::violation::Kind;

impl World {
    /// When the run ends if nothing changes.
    pub(super) fn end(&self) -> u64 {
        let most = self.scenario.duration.0;
        match self.done_at {
            Some(done) if !self.scenario.run_to_end => (done + self.scenario.settle.0).min(most),
            _ => most,
        }
    }

    pub(super) fn look_for_end(&mut self) {
        let busy = self.senders_active > 0 || self.flows.missing > 0 || self.conns.open > 0 || self.faults_left > 0;
        if busy || !self.hosts.iter().all(Host::is_drained) {
            self.done_at = None;
        } else {
            self.done_at.get_or_insert(self.now);
        }
    }

    /// Why the run is not finished, as text.
    pub(crate) fn undone(&self) -> String {
        let held: Vec<_> = self.hosts.iter().filter(|h| !h.is_drained()).map(Host::id).collect();
        format!(
            "not done: {} senders, {} packets, {} connections, {} faults; hosts {held:?} hold buffers",
            self.senders_active, self.flows.missing, self.conns.open, self.faults_left
        )
    }

    pub(super) fn finish(&mut self, end: u64) -> bool {
        self.now = self.now.max(end.min(self.scenario.duration.0));
        self.finished = true;
        let at = self.now;
        for sender in self.senders.iter().filter(|s| s.left > 0) {
            let name = self.scenario.workloads[sender.workload as usize].name();
            self.violations.add(at, Kind::NoProgress, || {
                format!("workload {name:?}: guest {} could not send {} packets", sender.from, sender.left)
            });
        }
        self.flows.check_complete(at, &mut self.violations);
        for (i, conn) in self.conns.all.iter().enumerate().filter(|(_, c)| c.done < c.count) {
            self.violations.add(at, Kind::NoProgress, || {
                let (client, server) = (conn.client, conn.server);
                format!("connection {i} from guest {client} to {server}: {} of {} requests done", conn.done, conn.count)
            });
        }
        if self.senders_active == 0 && self.conns.open == 0 && self.faults_left == 0 {
            for host in &self.hosts {
                for (owner, guest) in (0..).zip(host.guests()) {
                    let (tx, rx) = host.port(owner).outstanding();
                    if (tx, rx) != (0, 0) {
                        self.violations.add(at, Kind::Leak, || {
                            format!(
                                "guest {guest}: {tx} transmit buffers held, {rx} receive buffers unpublished at the end"
                            )
                        });
                    }
                }
            }
        }
        let mut checkers = std::mem::take(&mut self.checkers);
        let mut violations = std::mem::take(&mut self.violations);
        for checker in &mut checkers {
            checker.end(self, &mut violations);
        }
        (self.checkers, self.violations) = (checkers, violations);
        self.statistics.unrecovered = self.losses.len() as u64;
        true
    }
}
