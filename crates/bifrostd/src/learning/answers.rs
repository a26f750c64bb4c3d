//! Questions of workers about routes, and answers of clients, in a running daemon.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::thread;

use super::table::Full;
use anyhow::Result;
use bifrost_avs::{self as avs, LearnedAnswer, LearnedChange};
use bifrost_control::api::{LearnReport, LearnSpec, RouteAnswer};
use bifrost_control::config::{Config, GATEWAY_MAC, Mac, Vni};
use bifrost_control::diff::ConfigDiff;
use bifrost_port::{clock, panics};

use super::{AFTER_PANIC, LOOKED_AT, NEGATIVE_NS, SWEEP, Suitable};
use crate::daemon::{Daemon, State};

impl State {
    /// Takes over answers, in order. Packets that wait for them continue.
    pub(crate) fn learn(&mut self, spec: &LearnSpec) -> Result<LearnReport> {
        let now = self.learned.started.elapsed();
        let mut report = LearnReport::default();
        let mut changes: BTreeMap<Vni, Vec<LearnedChange>> = BTreeMap::new();
        let mut vnics = Vec::new();
        for (place, answer) in (0..).zip(&spec.answers) {
            let counters = &mut self.learned.counters;
            let Some((vni, what)) = suitable(&self.config, &self.names, answer) else {
                report.unsuitable += 1;
                counters.unsuitable_answers += 1;
                continue;
            };
            let (table, of_vpc) = (self.learned.vpcs.entry(vni).or_default(), changes.entry(vni).or_default());
            let range = answer.range.trunc();
            let until_ns = clock::monotonic_ns() + NEGATIVE_NS;
            let answer = match what {
                Suitable::Route { peer, name, mac, mtu } => match table.learn(now, range, name, mac) {
                    Ok(evicted) => {
                        vnics.push((vni, mac, peer.0));
                        counters.learned_routes += 1;
                        counters.evicted_routes += evicted.len() as u64;
                        of_vpc.extend(evicted.into_iter().map(|range| LearnedChange { range, answer: None }));
                        Some(LearnedAnswer::Route { peer, mac, mtu })
                    }
                    Err(Full) => {
                        report.full += 1;
                        counters.full_routes += 1;
                        Some(LearnedAnswer::Full { until_ns })
                    }
                },
                Suitable::Nothing => {
                    counters.negative_answers += 1;
                    table.forget(range);
                    Some(LearnedAnswer::Nothing { until_ns })
                }
                Suitable::Forget => {
                    counters.withdrawn_answers += 1;
                    table.forget(range);
                    None
                }
                Suitable::UnknownPeer => {
                    report.unknown_peers.push(place);
                    counters.unknown_peer_answers += 1;
                    table.forget(range);
                    None
                }
            };
            report.taken += u64::from(!report.unknown_peers.contains(&place));
            of_vpc.push(LearnedChange { range, answer });
        }
        for (vni, mac, peer) in vnics {
            self.note_answer(vni, mac, peer)?;
        }
        for (vni, changes) in changes {
            self.change_learned(vni, changes)?;
        }
        Ok(report)
    }

    /// Forgets learned routes that lead to peers which are removed or changed, or that are no longer to be learned.
    pub(crate) fn forget_learned(&mut self, diff: &ConfigDiff, config: &Config) -> Result<()> {
        if self.learned.vpcs.is_empty() {
            return Ok(());
        }
        let removed = diff.peers.removed.iter().map(|peer| peer.name.as_str());
        let peers: BTreeSet<&str> = removed.chain(diff.peers.changed.iter().map(|c| c.old.name.as_str())).collect();
        self.learned.vpcs.retain(|vni, _| config.vpc(*vni).is_some_and(|vpc| !vpc.learned.is_empty()));
        let mut changes = Vec::new();
        for (vni, table) in &mut self.learned.vpcs {
            let within = config.vpc(*vni).map_or(&[][..], |vpc| &vpc.learned);
            let gone = table.retain(|range, entry| {
                !peers.contains(&*entry.peer) && within.iter().any(|prefix| prefix.contains(range))
            });
            if !gone.is_empty() {
                changes.push((*vni, gone));
            }
        }
        for (vni, gone) in changes {
            let gone = gone.into_iter().map(|range| LearnedChange { range, answer: None });
            self.change_learned(vni, gone.collect())?;
        }
        Ok(())
    }

    /// Forgets idle routes. Returns false if the daemon is stopping.
    fn sweep_learned(&mut self) -> Result<bool> {
        if self.workers.is_empty() {
            return Ok(false);
        }
        let vnis: Vec<Vni> = self.learned.vpcs.keys().copied().collect();
        let mut is_near = false;
        for vni in vnis {
            let Some(number) = bifrost_wire::Vni::new(vni.value()) else { continue };
            let mut used = Vec::new();
            for worker in &self.workers {
                let mut next = Some(IpAddr::from([0u8; 16]));
                while let Some(from) = next {
                    let (rest, of_worker) = worker.run(move |worker| {
                        let mut used = Vec::new();
                        let switch = worker.core_mut().switch();
                        (switch.take_used(number, from, LOOKED_AT, &mut used), used)
                    })?;
                    used.extend(of_worker);
                    next = rest;
                }
            }
            let now = self.learned.started.elapsed();
            let Some(table) = self.learned.vpcs.get_mut(&vni) else { continue };
            table.used(now, &used);
            let (gone, may_follow) = table.expire(now);
            is_near |= may_follow;
            self.learned.counters.expired_routes += gone.len() as u64;
            if !gone.is_empty() {
                let gone = gone.into_iter().map(|range| LearnedChange { range, answer: None });
                self.change_learned(vni, gone.collect())?;
            }
        }
        if is_near {
            // Packets of flows with a record do not look at the routes.
            self.on_all(|worker| worker.core_mut().switch_mut().recheck_learned())?;
        }
        Ok(true)
    }

    fn change_learned(&self, vni: Vni, changes: Vec<LearnedChange>) -> Result<()> {
        let Some(vni) = bifrost_wire::Vni::new(vni.value()) else { return Ok(()) };
        let changes: Arc<[LearnedChange]> = changes.into();
        self.on_all(move |worker| worker.core_mut().learn(vni, &changes))?;
        Ok(())
    }
}

/// Forgets idle routes until the daemon ends. Restarts after a panic.
pub(crate) fn run(daemon: &Daemon) {
    loop {
        thread::sleep(SWEEP);
        match panics::contain(|| daemon.state().sweep_learned()) {
            Ok(Ok(true)) => {}
            // The workers have ended.
            Ok(Ok(false) | Err(_)) => return,
            Err(panic) => {
                tracing::error!(%panic, "panic while looking for idle learned routes; retrying");
                thread::sleep(AFTER_PANIC);
            }
        }
    }
}

/// What an answer means for a configuration. `None`: it does not suit it.
fn suitable(config: &Config, names: &crate::names::Names, answer: &RouteAnswer) -> Option<(Vni, Suitable)> {
    let vni = Vni::new(answer.vni)?;
    let vpc = config.vpc(vni)?;
    let is_within = vpc.learned.iter().any(|prefix| prefix.contains(&answer.range));
    if !is_within || (answer.withdrawn && answer.route.is_some()) {
        return None;
    }
    let Some(route) = &answer.route else {
        return Some((vni, if answer.withdrawn { Suitable::Forget } else { Suitable::Nothing }));
    };
    let is_vnic = route.mac != GATEWAY_MAC && !route.mac.is_multicast() && route.mac != Mac::ZERO;
    let is_here = config.ports.iter().any(|port| (port.vni, port.mac) == (vni, route.mac));
    if !is_vnic || is_here {
        return None;
    }
    let peer = config.peers.iter().find(|peer| peer.name == route.peer);
    let Some((peer, id)) = peer.and_then(|peer| Some((peer, names.peer(&peer.name)?))) else {
        return Some((vni, Suitable::UnknownPeer));
    };
    let mtu = config.underlay.guest_mtu(&peer.addresses);
    let name = peer.name.as_str().into();
    Some((vni, Suitable::Route { peer: avs::PeerId(id), name, mac: route.mac, mtu }))
}
