//! Routes that are learned when a packet needs them (`[[vpc]] learned`).
//!
//! Workers ask: their questions go through a bounded queue, and wait there for a client of the API, which answers them
//! (`bifrost-agent`). Nobody waits for the client: without one, packets that need a new route are dropped and counted,
//! and learned routes stay. Learned routes are not objects: they are neither in the journal nor handed over by an
//! upgrade, but asked for again.

mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use bifrost_avs::{self as avs, LearnedAnswer, LearnedChange};
use bifrost_control::api::{ApiError, LearnReport, LearnSpec, LearnedRoute, RouteAnswer, RouteQuestion};
use bifrost_control::config::{Config, GATEWAY_MAC, Mac, Vni};
use bifrost_control::diff::ConfigDiff;
use bifrost_datapath::{RouteQuestionQueue, RouteQuestions, route_questions};
use bifrost_port::{clock, panics};
use ipnet::IpNet;

use crate::daemon::{Daemon, State};
use table::{Full, Table};

/// Most questions that wait for the client.
const QUEUE: usize = 1024;
/// Most questions of one answer to the client.
const BATCH: usize = 1000;
/// A question that waited longer is not asked any more: its packets have given up.
const STALE_NS: u64 = 1_000_000_000;
/// How long a negative answer holds, ns.
const NEGATIVE_NS: u64 = 1_000_000_000;
/// Interval at which idle routes are looked for.
const SWEEP: Duration = Duration::from_secs(10);
/// Routes that a worker looks at between two batches of packets.
const LOOKED_AT: usize = 1024;
/// Pause after a panic, which may recur.
const AFTER_PANIC: Duration = Duration::from_secs(10);

/// Questions of the workers.
#[derive(Debug)]
pub(crate) struct Questions {
    sender: RouteQuestions,
    /// Only one client at a time gets them.
    receiver: Mutex<RouteQuestionQueue>,
    is_over: AtomicBool,
}

impl Questions {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = route_questions(QUEUE);
        Questions { sender, receiver: Mutex::new(receiver), is_over: AtomicBool::new(false) }
    }

    /// Nobody waits for questions any longer, because the daemon is ending.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        // Wakes the one that waits. If the queue is full, nobody does.
        let (vni, address) = (bifrost_wire::Vni::default(), IpAddr::from([0; 4]));
        self.sender.ask(bifrost_datapath::RouteQuestion { vni, address, asked_ns: 0 });
    }

    /// The end for a worker.
    pub(crate) fn sender(&self) -> RouteQuestions {
        self.sender.clone()
    }

    /// Waits for a question, and returns all that wait.
    pub(crate) fn take(&self, wait: Duration) -> Result<Vec<RouteQuestion>, ApiError> {
        let receiver = match self.receiver.try_lock() {
            Ok(receiver) => receiver,
            Err(std::sync::TryLockError::Poisoned(error)) => PoisonError::into_inner(error),
            Err(std::sync::TryLockError::WouldBlock) => {
                let error = ApiError::conflict("another client waits for questions");
                return Err(error.hint("only one bifrost-agent may run"));
            }
        };
        let mut all = BTreeSet::new();
        let until = Instant::now() + wait;
        while all.len() < BATCH && !self.is_over.load(Ordering::Relaxed) {
            let next = match receiver.take() {
                None if all.is_empty() => receiver.wait(until.saturating_duration_since(Instant::now())),
                next => next,
            };
            let Some(question) = next else { break };
            if clock::monotonic_ns().saturating_sub(question.asked_ns) < STALE_NS {
                all.insert(RouteQuestion { vni: question.vni.get(), address: question.address });
            }
        }
        Ok(all.into_iter().collect())
    }
}

/// Everything learned.
#[derive(Debug)]
pub(crate) struct Learned {
    started: Instant,
    vpcs: BTreeMap<Vni, Table>,
    pub(crate) counters: Counters,
}

impl Default for Learned {
    fn default() -> Self {
        Learned { started: Instant::now(), vpcs: BTreeMap::new(), counters: Counters::default() }
    }
}

/// What happened to answers and learned routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Answers with a route.
    pub(crate) learned_routes: u64,
    /// Answers that nobody has the addresses.
    pub(crate) negative_answers: u64,
    /// Answers that forget.
    pub(crate) withdrawn_answers: u64,
    /// Answers that do not suit the configuration.
    pub(crate) unsuitable_answers: u64,
    /// Answers whose peer is unknown.
    pub(crate) unknown_peer_answers: u64,
    /// Routes that were not taken because the VPC has too many.
    pub(crate) full_routes: u64,
    /// Routes that made room for others.
    pub(crate) evicted_routes: u64,
    /// Routes that were idle for too long.
    pub(crate) expired_routes: u64,
}

impl Counters {
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        [
            ("learned_routes", self.learned_routes),
            ("negative_answers", self.negative_answers),
            ("withdrawn_answers", self.withdrawn_answers),
            ("unsuitable_answers", self.unsuitable_answers),
            ("unknown_peer_answers", self.unknown_peer_answers),
            ("full_routes", self.full_routes),
            ("evicted_routes", self.evicted_routes),
            ("expired_routes", self.expired_routes),
        ]
        .into_iter()
    }
}

impl Learned {
    /// Number of learned routes.
    pub(crate) fn len(&self) -> usize {
        self.vpcs.values().map(Table::len).sum()
    }

    /// All learned routes.
    pub(crate) fn list(&self) -> Vec<LearnedRoute> {
        let now = self.started.elapsed();
        let of_vpc = |(vni, table): (&Vni, &Table)| {
            let vni = vni.value();
            let route = move |(range, entry): (&IpNet, &table::Entry)| LearnedRoute {
                vni,
                range: *range,
                peer: entry.peer.to_string(),
                mac: entry.mac,
                age_s: now.saturating_sub(entry.since).as_secs_f64(),
                idle_s: now.saturating_sub(entry.used).as_secs_f64(),
            };
            table.iter().map(route).collect::<Vec<_>>()
        };
        self.vpcs.iter().flat_map(of_vpc).collect()
    }
}

/// An answer that suits the configuration.
enum Suitable {
    Route { peer: avs::PeerId, name: Arc<str>, mac: Mac, mtu: u16 },
    Nothing,
    Forget,
    UnknownPeer,
}

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
