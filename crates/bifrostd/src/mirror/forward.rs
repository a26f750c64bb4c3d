//! Sends the copies that the workers of a running daemon make.

use std::thread;

use bifrost_datapath::capture::Copies;
use bifrost_port::panics;

use super::{AFTER_PANIC, COPIES_BYTES, Counters, IDLE_TICK, Sender, TICK};
use crate::daemon::Daemon;

/// Sends copies until the daemon ends. Restarts after a panic.
pub(crate) fn run(daemon: &Daemon) {
    while let Err(panic) = panics::contain(|| run_loop(daemon)) {
        tracing::error!(%panic, "panic while sending mirrored packets; retrying");
        thread::sleep(AFTER_PANIC);
    }
}

fn run_loop(daemon: &Daemon) {
    let (mut sender, mut spares) = (Sender::default(), Vec::new());
    loop {
        let state = daemon.state();
        if state.workers.is_empty() {
            return;
        }
        if state.config.mirrors.is_empty() {
            drop(state);
            (sender, spares) = (Sender::default(), Vec::new());
            thread::sleep(IDLE_TICK);
            continue;
        }
        let mirrors = state.config.mirrors.clone();
        spares.resize_with(state.workers.len(), || Copies::new(COPIES_BYTES));
        let mut fetched = Vec::new();
        for (worker, spare) in state.workers.iter().zip(std::mem::take(&mut spares)) {
            match worker.run(move |w| w.core_mut().fetch_mirrored(spare)) {
                Ok(copies) => fetched.push(copies.unwrap_or_else(|| Copies::new(COPIES_BYTES))),
                Err(error) => {
                    tracing::error!(error = format!("{error:#}"), "cannot fetch mirrored packets from a worker")
                }
            }
        }
        // Release the lock before sending.
        drop(state);
        let counted: Vec<(String, Counters)> = sender.send(&mirrors, &fetched);
        let state = &mut daemon.state().mirrored;
        for (_, counters) in &counted {
            state.all.add(counters);
        }
        for (name, counters) in counted {
            state.by_name.entry(name).or_default().add(&counters);
        }
        state.by_name.retain(|name, _| mirrors.iter().any(|mirror| mirror.name == *name));
        spares = fetched;
        thread::sleep(TICK);
    }
}
