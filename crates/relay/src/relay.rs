//! The relay around its core: follows the store, and writes to it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use bifrost_intent::api::{Applied, ChangedObject, Overview};
use bifrost_intent::{Batch, Plan, PlanError};
use bifrost_relay_api::traces::Traces;
use bifrost_store::{CommitError, Revision, Snapshot, Store, StoreError, WatchError};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::audit::{Audit, Request};
use crate::caller::Caller;
use crate::fleet::{ALL, Fleet, SERIAL};
use crate::liveness::Followed;
use crate::overview::Latest;
use crate::spans;

/// How often a batch is planned again, because another relay was first.
const TRIES: u32 = 20;
/// How long a change may take to come back from the store.
const RETURN_TIME: Duration = Duration::from_secs(10);
/// How long it is waited for a change of which it is not known whether it was made. With the time that the store itself takes, and with
/// that for earlier changes, an answer comes before those who asked give up.
const FIND_TIME: Duration = Duration::from_secs(4);
/// How long a change waits for earlier ones.
const TURN_TIME: Duration = Duration::from_secs(10);
/// How many answers about routes are corrected at a time, and how long others have then to get their turn.
pub(crate) const CORRECTED: usize = 250;
const CORRECTION_PAUSE: Duration = Duration::from_millis(1);
/// Between attempts to reach the store.
const LEAST_PAUSE: Duration = Duration::from_millis(100);
const MOST_PAUSE: Duration = Duration::from_secs(1);

/// A relay.
#[derive(Debug)]
pub(crate) struct Relay {
    /// Its name among relays: a text that no other process has.
    name: String,
    store: Store,
    store_name: String,
    fleet: Mutex<Fleet>,
    /// One batch at a time: a second one would only be planned again.
    gate: tokio::sync::Mutex<()>,
    position: watch::Sender<Position>,
    /// Changes whenever it may have become known that a host has more.
    progress: watch::Sender<()>,
    /// Its name with a number that each start has of its own.
    instance: String,
    audit: Option<Audit>,
    traces: Option<Traces>,
    overview: Latest,
    pub(crate) counts: Counts,
    pub(crate) followed: Followed,
}

/// What was counted since the start.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) commits: AtomicU64,
    pub(crate) conflicts: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) forbidden: AtomicU64,
    pub(crate) store_losses: AtomicU64,
    /// First certificates that hosts got, further ones, and those that they did not get.
    pub(crate) enrolled: AtomicU64,
    pub(crate) renewed: AtomicU64,
    pub(crate) certificates_refused: AtomicU64,
}

/// How far the relay has followed the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) revision: Revision,
    /// Whether it follows; otherwise what it has may be old.
    pub(crate) in_sync: bool,
}

/// Why a batch was not made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SubmitError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("the relay does not follow the store now, and makes no changes; see its log")]
    NotInSync,
    #[error("changes that came before take longer than {} s; the store may not answer. Nothing was changed", TURN_TIME.as_secs())]
    NoTurn,
    #[error("other relays were first {TRIES} times; try again")]
    Busy,
    #[error("the store does not answer: {0}; nothing was changed")]
    Store(StoreError),
    #[error(
        "the store did not say whether the change was made ({0}); look, and try again: to make a change twice does no harm"
    )]
    Unknown(String),
    #[error("{0}")]
    Forbidden(String),
    #[error("the audit log cannot be written: {0}; without it this relay changes nothing (--audit-required)")]
    Audit(String),
}

/// Why it is not known whether the relay has everything.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotCaughtUp {
    #[error("the relay's store does not answer now: {0}; try another, or again soon")]
    Store(#[from] StoreError),
    #[error("the relay is behind its store; try another, or again soon")]
    Late,
}

impl Relay {
    /// A relay that keeps objects in a store. It has none until [`follow`](Self::follow) runs.
    pub(crate) fn new(
        name: String,
        store_name: String,
        store: Store,
        audit: Option<Audit>,
        traces: Option<Traces>,
    ) -> Arc<Relay> {
        let (position, _) = watch::channel(Position::default());
        let (progress, _) = watch::channel(());
        let instance = format!("{name}:{:08x}", fastrand::u32(..));
        Arc::new(Relay {
            name,
            instance,
            progress,
            store,
            store_name,
            fleet: Mutex::default(),
            gate: tokio::sync::Mutex::default(),
            position,
            audit,
            traces,
            overview: Latest::default(),
            counts: Counts::default(),
            followed: Followed::default(),
        })
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Its name, another one with each start.
    pub(crate) fn instance(&self) -> &str {
        &self.instance
    }

    /// Where it is logged who has changed what.
    pub(crate) fn audit(&self) -> Option<&Audit> {
        self.audit.as_ref()
    }

    /// Where traces of changes go.
    pub(crate) fn traces(&self) -> Option<&Traces> {
        self.traces.as_ref()
    }

    /// Where objects are kept.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Where objects are kept, in words.
    pub(crate) fn store_name(&self) -> &str {
        &self.store_name
    }

    /// Looks at what it knows, or changes it. Must not wait.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut Fleet) -> T) -> T {
        f(&mut self.fleet.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A summary of all objects, as JSON.
    pub(crate) fn overview(&self) -> Bytes {
        self.with(|fleet| self.overview.get(Instant::now(), fleet)).json
    }

    /// The part of it that is about some projects.
    pub(crate) fn overview_of(&self, projects: &BTreeSet<&str>) -> Overview {
        let whole_and_counts =
            |fleet: &mut Fleet| (self.overview.get(Instant::now(), fleet).overview, fleet.counts_of(projects));
        let (whole, objects) = self.with(whole_and_counts);
        // Without the lock, because there may be many networks.
        let vpcs = whole.vpcs.iter().filter(|vpc| projects.contains(vpc.key.project())).cloned().collect();
        Overview { revision: whole.revision, objects, vpcs }
    }

    /// Changes what is known of hosts, and tells those who wait for that. Must not wait.
    pub(crate) fn update<T>(&self, f: impl FnOnce(&mut Fleet) -> T) -> T {
        let result = self.with(f);
        self.progress.send_replace(());
        result
    }

    /// Tells agents which answers about routes are wrong now. Others get their turn in between.
    pub(crate) async fn correct(&self) {
        while self.with(|fleet| fleet.correct(CORRECTED)) {
            tokio::time::sleep(CORRECTION_PAUSE).await;
        }
    }

    /// Changes with what is known of hosts.
    pub(crate) fn progress(&self) -> watch::Receiver<()> {
        self.progress.subscribe()
    }

    /// How far it has come; waits for changes of that.
    pub(crate) fn position(&self) -> watch::Receiver<Position> {
        self.position.subscribe()
    }

    /// Follows the store, forever.
    pub(crate) async fn follow(self: Arc<Self>) {
        let mut pause = LEAST_PAUSE;
        loop {
            match self.follow_once().await {
                // What was compacted away is in the next list.
                WatchError::Compacted => pause = LEAST_PAUSE,
                WatchError::Lost(why) => {
                    tracing::warn!("the store is lost: {why}; hosts keep what they have, and changes wait");
                    self.counts.store_losses.fetch_add(1, Ordering::Relaxed);
                    if self.position.borrow().in_sync {
                        pause = LEAST_PAUSE;
                    }
                }
            }
            self.position.send_modify(|position| position.in_sync = false);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MOST_PAUSE);
        }
    }

    /// Lists everything, and follows from there; gives why that ended.
    async fn follow_once(&self) -> WatchError {
        let snapshot = match self.store.snapshot(ALL).await {
            Ok(snapshot) => snapshot,
            Err(error) => return WatchError::Lost(error),
        };
        let (revision, records) = (snapshot.revision, snapshot.records.len());
        // Many objects take a while.
        if tokio::task::block_in_place(|| self.update(|fleet| fleet.load(snapshot))) {
            tracing::warn!(
                revision,
                "the store has gone back: it was restored from a backup; hosts are told what it has"
            );
        }
        self.correct().await;
        let mut watch = match self.store.watch(ALL, revision).await {
            Ok(watch) => watch,
            Err(error) => return WatchError::Lost(error),
        };
        tracing::info!(revision, records, "following the store");
        self.position.send_replace(Position { revision, in_sync: true });
        loop {
            match watch.next().await {
                Ok(events) => {
                    let (begun, at) = (SystemTime::now(), events.revision);
                    let revision = self.update(|fleet| {
                        fleet.follow(events);
                        fleet.position().0
                    });
                    self.correct().await;
                    self.position.send_replace(Position { revision, in_sync: true });
                    self.traced(|traces| spans::passed_on(traces, at, begun));
                }
                Err(error) => return error,
            }
        }
    }

    /// Says what a batch would change.
    pub(crate) fn try_out(&self, batch: &Batch) -> Result<Applied, SubmitError> {
        if !self.position.borrow().in_sync {
            return Err(SubmitError::NotInSync);
        }
        let (plan, revision) = self.with(|fleet| {
            let (plan, _) = fleet.plan(batch, now_ms(), b"")?;
            Ok::<_, PlanError>((plan, fleet.position().0))
        })?;
        Ok(applied(plan, revision))
    }

    /// Makes a batch of changes: when it returns, the store has them, and this relay has told all hosts that are connected.
    ///
    /// It must run to its end, also when those who asked are gone: otherwise they could change something without a line in the log.
    pub(crate) async fn submit(&self, batch: &Batch, caller: &Caller) -> Result<Applied, SubmitError> {
        let begun = SystemTime::now();
        let result = self.submit_in_turn(batch, caller).await;
        if let Ok(applied) = &result {
            self.traced(|traces| spans::changed(traces, applied, caller, begun));
        }
        let counted = if result.is_ok() { &self.counts.commits } else { &self.counts.refused };
        counted.fetch_add(1, Ordering::Relaxed);
        result
    }

    /// Refuses a batch that those who ask may not make; with a line in the log, unless they only
    /// try it. It may wait for a disk.
    pub(crate) fn forbid(&self, batch: &Batch, caller: &Caller, why: String, is_tried: bool) -> SubmitError {
        self.counts.forbidden.fetch_add(1, Ordering::Relaxed);
        let result = Err(SubmitError::Forbidden(why.clone()));
        if let Some(audit) = self.audit.as_ref().filter(|_| !is_tried) {
            audit.end(&Request::new(batch, caller), &[], &result, now_ms());
        }
        SubmitError::Forbidden(why)
    }

    async fn submit_in_turn(&self, batch: &Batch, caller: &Caller) -> Result<Applied, SubmitError> {
        // Held until the log has it, so that lines are in the order of revisions.
        let turn = tokio::time::timeout(TURN_TIME, self.gate.lock()).await;
        let turn = turn.map_err(|_| SubmitError::NoTurn);
        let mut before = Vec::new();
        let Some(audit) = &self.audit else {
            let _alone = turn?;
            return self.submit_one(batch, &mut before).await;
        };
        let request = Request::new(batch, caller);
        // A disk may be slow.
        let begun = turn.and_then(|alone| {
            tokio::task::block_in_place(|| audit.begin(&request, now_ms()))?;
            Ok(alone)
        });
        let (result, _alone) = match begun {
            Ok(alone) => (self.submit_one(batch, &mut before).await, Some(alone)),
            Err(error) => (Err(error), None),
        };
        tokio::task::block_in_place(|| audit.end(&request, &before, &result, now_ms()));
        result
    }

    /// `before` gets the generations that the objects of the batch have.
    async fn submit_one(&self, batch: &Batch, before: &mut Vec<u64>) -> Result<Applied, SubmitError> {
        for _ in 0..TRIES {
            if !self.position.borrow().in_sync {
                return Err(SubmitError::NotInSync);
            }
            let by = format!("{} {:016x}", self.name, fastrand::u64(..));
            let (planned, seen) = self.with(|fleet| {
                *before = fleet.generations(batch);
                (fleet.plan(batch, now_ms(), by.as_bytes()), fleet.position().0)
            });
            let (plan, txn) = match planned {
                Ok(planned) => planned,
                // Another relay may have committed what is missing here.
                Err(_) if self.follows_up(seen).await => continue,
                Err(refused) => return Err(refused.into()),
            };
            if plan.writes.is_empty() {
                return Ok(applied(plan, seen));
            }
            let begun = SystemTime::now();
            match self.store.commit(&txn).await {
                Ok(revision) => {
                    self.traced(|traces| spans::committed(traces, revision, begun));
                    if !self.reached(revision).await {
                        return Err(SubmitError::Unknown("it does not come back from the store".to_owned()));
                    }
                    return Ok(applied(plan, revision));
                }
                Err(CommitError::Conflict { .. }) => {
                    self.counts.conflicts.fetch_add(1, Ordering::Relaxed);
                    if !self.reached(seen + 1).await {
                        return Err(SubmitError::NotInSync);
                    }
                }
                Err(CommitError::Store(error)) => return Err(SubmitError::Store(error)),
                Err(CommitError::Unknown(error)) => return self.find_out(plan, &by, seen, &error.to_string()).await,
            }
        }
        Err(SubmitError::Busy)
    }

    fn traced(&self, record: impl FnOnce(&Traces)) {
        if let Some(traces) = &self.traces {
            record(traces);
        }
    }

    /// Waits for commits of other relays that the store has and this relay has not, if there are any.
    async fn follows_up(&self, seen: Revision) -> bool {
        let Ok(now) = self.store.snapshot(SERIAL).await else { return false };
        let serial = serial(&now);
        serial > seen && self.reached(serial).await
    }

    /// After a commit whose answer was lost: every commit says who wrote it, and none can follow without having seen it.
    async fn find_out(&self, plan: Plan, by: &str, seen: Revision, why: &str) -> Result<Applied, SubmitError> {
        if self.reached_within(seen + 1, FIND_TIME).await {
            let (revision, ours) = self.with(|fleet| {
                let (revision, last) = fleet.position();
                (revision, last == by.as_bytes())
            });
            if ours {
                return Ok(applied(plan, revision));
            }
        }
        Err(SubmitError::Unknown(why.to_owned()))
    }

    /// Has everything up to a revision that somebody has seen. Gives whether there is no such revision: the store was restored from a
    /// backup.
    ///
    /// Only what concerns objects moves the relay's position, and the store's revision may grow by other things.
    pub(crate) async fn catch_up(&self, revision: Revision) -> Result<bool, NotCaughtUp> {
        if self.with(|fleet| fleet.position().0) >= revision {
            return Ok(false);
        }
        let now = self.store.snapshot(SERIAL).await?;
        if now.revision < revision {
            return Ok(true);
        }
        let serial = serial(&now);
        if !self.reached(serial).await || !self.with(|fleet| fleet.advance(now.revision, serial)) {
            return Err(NotCaughtUp::Late);
        }
        Ok(false)
    }

    /// Waits until the relay has come so far; whether it has.
    async fn reached(&self, revision: Revision) -> bool {
        self.reached_within(revision, RETURN_TIME).await
    }

    async fn reached_within(&self, revision: Revision, time: Duration) -> bool {
        let mut position = self.position.subscribe();
        let reached = position.wait_for(|position| position.revision >= revision);
        tokio::time::timeout(time, reached).await.is_ok_and(|result| result.is_ok())
    }
}

/// The revision of the last commit that a snapshot has.
fn serial(snapshot: &Snapshot) -> Revision {
    snapshot.records.iter().find(|record| record.key == SERIAL).map_or(0, |record| record.revision)
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn applied(plan: Plan, revision: Revision) -> Applied {
    let changed = |(key, stored): (_, Option<bifrost_intent::Stored>)| ChangedObject {
        key,
        generation: stored.as_ref().map_or(0, |stored| stored.generation),
        spec: stored.map(|stored| stored.spec.value()),
    };
    Applied { revision, changed: plan.writes.into_iter().map(changed).collect(), unchanged: plan.unchanged }
}
