//! Routes that are learned when a packet needs them (`[[vpc]] learned`).
//!
//! Workers ask: their questions go through a bounded queue, and wait there for a client of the API, which answers them
//! (`bifrost-agent`). Nobody waits for the client: without one, packets that need a new route are dropped and counted,
//! and learned routes stay. Learned routes are not objects: they are neither in the journal nor handed over by an
//! upgrade, but asked for again.

pub(crate) mod answers;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use bifrost_avs::{self as avs};
use bifrost_control::api::{ApiError, LearnedRoute, RouteQuestion};
use bifrost_control::config::{Mac, Vni};
use bifrost_datapath::{RouteQuestionQueue, RouteQuestions, route_questions};
use bifrost_port::clock;
use ipnet::IpNet;

use table::Table;

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
