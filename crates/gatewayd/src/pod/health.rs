//! Health of a pod's workers. Its addresses are announced only while all workers run.

use std::sync::PoisonError;

use super::worker::Counts;

/// Maximum time for a turn of a worker's loop, ns. An idle worker takes a twentieth of it.
const STUCK_NS: u64 = 1_000_000_000;
/// Interval at which workers are checked, ns.
const LOOK_NS: u64 = 100_000_000;

/// Watches the workers.
#[derive(Debug)]
pub(super) struct Health {
    workers: Vec<Watched>,
    look_at: u64,
}

#[derive(Debug)]
struct Watched {
    counts: Counts,
    turns: u64,
    changed_at: u64,
}

impl Health {
    pub(super) fn new(counts: Vec<Counts>) -> Self {
        let watched = |counts| Watched { counts, turns: 0, changed_at: 0 };
        Health { workers: counts.into_iter().map(watched).collect(), look_at: 0 }
    }

    /// Whether every worker has made a turn within the last second.
    pub(super) fn check(&mut self, now: u64) -> bool {
        if now >= self.look_at {
            self.look_at = now + LOOK_NS;
            for worker in &mut self.workers {
                let counts = worker.counts.lock().unwrap_or_else(PoisonError::into_inner);
                let turns = counts.get("turns").copied().unwrap_or(0);
                if turns != worker.turns {
                    (worker.turns, worker.changed_at) = (turns, now);
                }
            }
        }
        let works = |worker: &Watched| worker.turns > 0 && now.saturating_sub(worker.changed_at) < STUCK_NS;
        self.workers.iter().all(works)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_worker_that_stands_still() {
        let counts = [Counts::default(), Counts::default()];
        let mut health = Health::new(counts.to_vec());
        let turn = |worker: usize, turns| {
            counts[worker].lock().unwrap().insert("turns".into(), turns);
        };
        assert!(!health.check(0), "no worker has begun");
        turn(0, 1);
        turn(1, 1);
        assert!(health.check(100 * MS));
        turn(0, 2);
        assert!(health.check(1000 * MS));
        assert!(!health.check(1100 * MS), "worker 1 stands still");
        turn(1, 2);
        assert!(health.check(1200 * MS));
    }
}
