//! The switches' tables: built once, and changed by what a new configuration changes. Workers share what comes from
//! routes: a large base, and the few entries that differ from it. When these are many, a thread merges them into a new
//! base while changes go on.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bifrost_avs::{self as avs, Prepared};
use bifrost_control::config::{self, Config, Mac};
use bifrost_control::diff::ConfigDiff;
use bifrost_port::panics;
use bifrost_wire::Vni;

use crate::background::at_lower_priority;
use crate::daemon::{Daemon, State};
use crate::health::Health;
use crate::names::Names;
use crate::shared::Holders;
use crate::translate;

/// Polling interval of the thread that merges tables.
const TICK: Duration = Duration::from_millis(100);
/// Changed entries of a network that are merged. Each change copies them, in up to a millisecond at this number.
const MERGE_AT: usize = 4096;
/// Fewer entries than [`MERGE_AT`] are merged after a time without changes: `QUIET`, plus `QUIET` for each
/// `QUIET_ROUTES` routes. So rare changes of large configurations cause little work.
const QUIET: Duration = Duration::from_secs(1);
const QUIET_ROUTES: usize = 100_000;
/// Pause after a merge, in multiples of its duration: even if a configuration changes constantly, the host has time for
/// other work.
const REST: u32 = 2;
/// Pause after a panic, which may recur.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// All tables of a configuration, for the first worker.
///
/// # Errors
/// The configuration contradicts itself.
pub(crate) fn build(config: &Config, names: &Names, health: &Health, holders: &Holders) -> Result<Prepared> {
    let mut tables = translate::tables(config, names, health, holders);
    tables.routes = routes(config, names).collect();
    Prepared::build(&tables).context("building the switch")
}

/// The tables of the configuration after the one of `former`, with the same `diff`.
///
/// # Errors
/// The configuration contradicts itself.
pub(crate) fn after(
    former: &Prepared,
    diff: &ConfigDiff,
    config: &Config,
    names: &Names,
    health: &Health,
    holders: &Holders,
) -> Result<Prepared> {
    // The path MTU of routes may follow from the addresses of their peer.
    if !diff.peers.changed.is_empty() {
        return build(config, names, health, holders);
    }
    let tables = translate::tables(config, names, health, holders);
    former.after(&tables, &changes(former, diff, config, names)).context("building the switch")
}

/// The routes of a configuration.
fn routes<'a>(config: &'a Config, names: &'a Names) -> impl Iterator<Item = avs::Route> + 'a {
    let path_mtu = config.path_mtu();
    config.routes.iter().filter_map(move |route| self::route(route, names, path_mtu(route)))
}

fn route(route: &config::Route, names: &Names, mtu: u16) -> Option<avs::Route> {
    let (vni, peer) = (Vni::new(route.vni.value())?, avs::PeerId(names.peer(&route.peer)?));
    Some(avs::Route { vni, prefix: route.prefix, peer, mac: route.mac, mtu })
}

/// The changes of routes in `diff`, by VPC.
fn changes(former: &Prepared, diff: &ConfigDiff, config: &Config, names: &Names) -> Vec<avs::RouteChanges> {
    let (path_mtu, diff) = (config.path_mtu(), &diff.routes);
    let gone = diff.removed.iter().map(|route| (route, None));
    let changed = diff.changed.iter().map(|change| (&change.old, Some(&change.new)));
    let added = diff.added.iter().map(|route| (route, Some(route)));
    let mut all: BTreeMap<config::Vni, Vec<_>> = BTreeMap::new();
    let mut vnics: BTreeMap<config::Vni, BTreeSet<Mac>> = BTreeMap::new();
    for (any, new) in gone.chain(changed).chain(added) {
        let new_route = new.and_then(|new| route(new, names, path_mtu(new)));
        all.entry(any.vni).or_default().push((any.prefix, new_route));
        vnics.entry(any.vni).or_default().extend([any.mac].into_iter().chain(new.map(|new| new.mac)));
    }
    let of_vpc = |(vni, routes): (config::Vni, Vec<(_, Option<avs::Route>)>)| {
        let number = Vni::new(vni.value())?;
        let vnic = |mac: Mac| {
            let former = former.remote_vnic(number, mac).map(|(_, mtu)| mtu);
            let new = routes.iter().filter_map(|(_, new)| new.as_ref()).filter(|new| new.mac == mac).map(|new| new.mtu);
            // No path MTU is below this one, so the search ends there: a vNIC may have very many routes.
            let floor = new.chain(former).min().unwrap_or(0);
            let mut least = None;
            for route in config.routes.of_mac(vni, mac) {
                let Some(peer) = names.peer(&route.peer) else { continue };
                let mtu = path_mtu(route).min(least.map_or(u16::MAX, |(_, mtu)| mtu));
                least = Some((avs::PeerId(peer), mtu));
                if mtu <= floor {
                    break;
                }
            }
            (mac, least)
        };
        let vnics = vnics.get(&vni).into_iter().flatten().map(|mac| vnic(*mac)).collect();
        Some(avs::RouteChanges { vni: number, routes, vnics })
    };
    all.into_iter().filter_map(of_vpc).collect()
}

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
