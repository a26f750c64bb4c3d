//! The switches' tables: built once, and changed by what a new configuration changes. Workers share what comes from
//! routes: a large base, and the few entries that differ from it. When these are many, a thread merges them into a new
//! base while changes go on.

pub(crate) mod install;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, Result};
use bifrost_avs::{self as avs, Prepared};
use bifrost_control::config::{self, Config, Mac};
use bifrost_control::diff::ConfigDiff;
use bifrost_wire::Vni;

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
