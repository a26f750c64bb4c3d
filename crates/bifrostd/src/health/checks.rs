//! Runs the health checks of a running daemon.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::Instant;

use bifrost_port::panics;

use super::{AFTER_PANIC, Health, MAX_RUNNING, Probe, ProbeSpec, Results, Streak, TICK, Target, run_check, targets};
use crate::daemon::Daemon;

/// Checks backends until the daemon ends. Restarts after a panic.
pub(crate) fn run(daemon: &Daemon) {
    while let Err(panic) = panics::contain(|| run_loop(daemon)) {
        tracing::error!(%panic, "panic while checking backends; retrying");
        thread::sleep(AFTER_PANIC);
    }
}

/// Checks backends until the daemon ends.
fn run_loop(daemon: &Daemon) {
    let results = Results::default();
    let mut probes: BTreeMap<Target, Probe> = BTreeMap::new();
    let mut running = 0;
    loop {
        thread::sleep(TICK);
        let Some(wanted) = wanted(daemon) else { return };
        probes.retain(|target, probe| wanted.get(target).is_some_and(|(check, _)| *check == probe.check));
        for (target, (check, _)) in &wanted {
            probes.entry(target.clone()).or_insert_with(|| Probe {
                check: check.clone(),
                streak: Streak::default(),
                next: Instant::now(),
                is_running: false,
            });
        }
        let finished = std::mem::take(&mut *results.lock().unwrap_or_else(PoisonError::into_inner));
        running -= finished.len();
        let mut changes = Health::new();
        for (target, good) in finished {
            // The backend may have been removed, or its check changed.
            let Some(probe) = probes.get_mut(&target) else { continue };
            probe.is_running = false;
            let Some(good) = good else { continue };
            let works = daemon.state().health.get(&target).copied().unwrap_or(true);
            if let Some(works) = probe.streak.after(good, works, &probe.check) {
                changes.insert(target, works);
            }
        }
        if !changes.is_empty() {
            for ((balancer, backend), works) in &changes {
                tracing::warn!(balancer, %backend, works, "the health of a load balancer's backend changed");
            }
            if let Err(error) = daemon.state().set_health(changes) {
                tracing::error!(error = format!("{error:#}"), "cannot apply the health of backends");
            }
        }
        let now = Instant::now();
        let due = probes.iter_mut().filter(|(_, probe)| !probe.is_running && probe.next <= now);
        for (target, probe) in due.take(MAX_RUNNING.saturating_sub(running)) {
            let Some((_, namespaces)) = wanted.get(target) else { continue };
            let (to, check, namespaces) = (target.clone(), probe.check.clone(), Arc::clone(namespaces));
            let results = Arc::clone(&results);
            let check = move || {
                // A panic counts as a failed check, and does not stop later checks.
                let good = panics::contain(|| run_check(&namespaces, to.1, &check)).unwrap_or(Some(false));
                results.lock().unwrap_or_else(PoisonError::into_inner).push((to, good));
            };
            // On a thread, because it enters another network namespace, and blocks.
            if thread::Builder::new().name("health".into()).spawn(check).is_ok() {
                probe.is_running = true;
                probe.next = now + probe.check.interval;
                running += 1;
            }
        }
    }
}

/// The backends to check, and how; `None` once the daemon ends.
fn wanted(daemon: &Daemon) -> Option<BTreeMap<Target, ProbeSpec>> {
    let state = daemon.state();
    if state.workers.is_empty() {
        return None;
    }
    Some(targets(&state.config))
}
