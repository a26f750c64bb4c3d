//! Whether a pod can do its work, so that its addresses may be announced.

use std::net::IpAddr;
use std::sync::PoisonError;

use super::worker::Counts;

/// How long a worker may take for a turn of its loop. One that has nothing to do takes a twentieth of it.
const STUCK_NS: u64 = 1_000_000_000;
/// How often workers are looked at.
const LOOK_NS: u64 = 100_000_000;

/// Watches the workers, and whether the router answers.
#[derive(Debug)]
pub(super) struct Health {
    workers: Vec<Watched>,
    router: Option<IpAddr>,
    look_at: u64,
}

#[derive(Debug)]
struct Watched {
    counts: Counts,
    turns: u64,
    changed_at: u64,
}

impl Health {
    pub(super) fn new(counts: Vec<Counts>, router: Option<IpAddr>) -> Self {
        let watched = |counts| Watched { counts, turns: 0, changed_at: 0 };
        Health { workers: counts.into_iter().map(watched).collect(), router, look_at: 0 }
    }

    /// Whether all workers have worked within the last second, and the MAC address of the router is known (`is_known`).
    pub(super) fn check(&mut self, now: u64, is_known: impl Fn(IpAddr) -> bool) -> bool {
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
        self.workers.iter().all(works) && self.router.is_none_or(is_known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_worker_that_stands_still_or_a_router_that_is_silent() {
        let counts = [Counts::default(), Counts::default()];
        let router = IpAddr::from([10, 1, 0, 254]);
        let mut health = Health::new(counts.to_vec(), Some(router));
        let turn = |worker: usize, turns| {
            counts[worker].lock().unwrap().insert("turns".into(), turns);
        };
        assert!(!health.check(0, |_| true), "no worker has begun");
        turn(0, 1);
        turn(1, 1);
        assert!(!health.check(100 * MS, |_| false) && health.check(100 * MS, |address| address == router));
        turn(0, 2);
        assert!(health.check(1000 * MS, |_| true));
        assert!(!health.check(1100 * MS, |_| true), "worker 1 stands still");
        turn(1, 2);
        assert!(health.check(1200 * MS, |_| true));
    }
}
