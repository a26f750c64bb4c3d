//! Puts tables into the workers of a running daemon.

use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result};
use bifrost_avs::{self as avs, Prepared};
use bifrost_port::panics;

use super::{AFTER_PANIC, MERGE_AT, QUIET, QUIET_ROUTES, REST, TICK};
use crate::background::at_lower_priority;
use crate::daemon::{Daemon, State};
use crate::translate;

impl State {
    /// Gives all workers other tables. Returns the former ones, which take time to drop.
    pub(crate) fn install(&mut self, tables: Prepared) -> Result<Vec<avs::Former>> {
        (self.tables, self.tables_changed) = (tables, Instant::now());
        self.on_each(|worker, tables| worker.core_mut().switch_mut().take_over(tables))
    }

    /// Changes the tables to the current health of backends and holders of shared addresses.
    pub(crate) fn rebuild(&mut self) -> Result<()> {
        let tables = translate::tables(&self.config, &self.names, &self.health, &self.shared.holders);
        let tables = self.tables.after(&tables, &[]).context("building the switch")?;
        drop(self.install(tables)?);
        Ok(())
    }

    /// Runs `work` on every worker, with its tables.
    fn on_each<T: Send + 'static>(
        &self,
        work: fn(&mut bifrost_datapath::Worker<bifrost_port::HostUnderlay>, Prepared) -> T,
    ) -> Result<Vec<T>> {
        let mut results = Vec::new();
        for (own, worker) in (0..).zip(&self.workers) {
            let tables = self.tables.of_worker(avs::WorkerId(own));
            results.push(worker.run(move |worker| work(worker, tables))?);
        }
        Ok(results)
    }
}

/// Merges changed entries into the shared tables until the daemon ends. Restarts after a panic.
pub(crate) fn run(daemon: &Daemon) {
    at_lower_priority();
    while let Err(panic) = panics::contain(|| run_loop(daemon)) {
        tracing::error!(%panic, "panic while merging tables; retrying");
        thread::sleep(AFTER_PANIC);
    }
}

fn run_loop(daemon: &Daemon) {
    let mut rest = TICK;
    loop {
        thread::sleep(rest);
        rest = TICK;
        let tables = {
            let state = daemon.state();
            if state.workers.is_empty() {
                return;
            }
            let quiet = QUIET + QUIET * (state.config.routes.len() / QUIET_ROUTES) as u32;
            match state.tables.changed_len() {
                0 => continue,
                few if few < MERGE_AT && state.tables_changed.elapsed() < quiet => continue,
                _ => {}
            }
            state.tables.clone()
        };
        let started = Instant::now();
        // Without the lock: this takes up to a second for a million routes, and longer beside busy workers.
        let merged = tables.merged();
        let former = {
            let mut state = daemon.state();
            state.tables = state.tables.rebased(&merged);
            state.on_each(|worker, tables| worker.core_mut().switch_mut().refresh(tables))
        };
        match former {
            Ok(former) => drop(former),
            Err(error) => tracing::error!("tables were not merged: {error:#}"),
        }
        drop((tables, merged));
        tracing::debug!(took_ms = started.elapsed().as_millis() as u64, "tables were merged");
        rest = TICK.max(started.elapsed() * REST);
    }
}
