//! Keeps track of active faults.

use crate::faults::Action;

/// The active faults.
#[derive(Debug, Default)]
pub(super) struct Calm {
    faults: i64,
    /// Since when there has been no fault in the network, hosts or guests, ns; meaningless during faults.
    since: u64,
    /// By host: the end of its last pause, ns.
    paused: Vec<u64>,
    /// Whether any daemon has crashed so far.
    pub(super) crashed: bool,
}

impl Calm {
    /// Since when there has been no fault, ns; `None` during faults.
    pub(super) fn since(&self, now: u64) -> Option<u64> {
        let since = self.paused.iter().copied().fold(self.since, u64::max);
        (self.faults == 0 && since <= now).then_some(since)
    }

    /// The end of a host's last pause, ns.
    pub(super) fn paused_until(&self, host: u32) -> u64 {
        self.paused.get(host as usize).copied().unwrap_or(0)
    }

    /// A fault begins or ends.
    pub(super) fn fault(&mut self, at: u64, action: &Action) {
        let begins = match action {
            Action::Links { set, .. } => set.is_some(),
            Action::Crash(_) => {
                self.crashed = true;
                true
            }
            Action::Restart(_) => false,
            Action::Pause(host, until) => {
                if self.paused.len() <= *host as usize {
                    self.paused.resize(*host as usize + 1, 0);
                }
                self.paused[*host as usize] = *until;
                return;
            }
            Action::Stall(_, stalled) => *stalled,
            Action::Slow(_, gap) => *gap > 0,
            Action::Port(_, fault) => fault.is_some(),
        };
        self.faults += if begins { 1 } else { -1 };
        self.since = at;
    }
}
