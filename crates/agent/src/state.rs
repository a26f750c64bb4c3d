//! What is to be done next: the agent's decisions, without I/O or clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bifrost_control::api::{ApplyReport, ApplySpec, ErrorKind, ObjectList, ObjectsDigest, ObjectsQuery, Status};
use bifrost_control::client::ClientError;
use bifrost_control::config::{Object, Vni};
use bifrost_control::objects::{Digest, Id};
use bifrost_relay_api::limits::MAX_PROBLEMS;
use bifrost_relay_api::{Change as Sent, PathHealth, Problem, Report};

use crate::OWNER;
use crate::blame::blame;
use crate::desired::{Desired, Refused};
use crate::plan::{Change, Limits, batches};
use crate::relations::needs;

/// How often what was refused is tried again.
pub const RETRY: Duration = Duration::from_secs(30);
/// How soon it is tried again after something else has changed.
const RETRY_AFTER_CHANGE: Duration = Duration::from_secs(1);
/// How often digests are compared, before the jitter.
pub const COMPARE: Duration = Duration::from_secs(60);
/// How often it is seen whether `bifrostd` was restarted.
const LOOK: Duration = Duration::from_secs(2);
/// The pauses after `bifrostd` did not answer, first and longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// What `bifrostd` says of an object that has another owner: of its field `owner`.
const OF_ANOTHER: &str = ": owner: ";

/// A time since any fixed one.
pub type Time = Duration;

/// What to ask `bifrostd` for.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// Who it is.
    Status,
    /// Objects, from a place on.
    List(ObjectsQuery),
    /// Digests of the objects.
    Digests(ObjectsQuery),
    /// A batch.
    Apply(ApplySpec),
}

/// What it answered.
#[derive(Debug)]
pub enum Answer {
    /// To [`Ask::Status`].
    Status(Box<Status>),
    /// To [`Ask::List`].
    List(ObjectList),
    /// To [`Ask::Digests`].
    Digests(Vec<ObjectsDigest>),
    /// To [`Ask::Apply`].
    Apply(Box<ApplyReport>),
}

/// What to do now.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// Ask that, and bring the answer.
    Ask(Ask),
    /// Nothing until then, unless something comes.
    Wait(Time),
}

/// What has happened since it was asked last, for metrics and log.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observed {
    /// Milliseconds from commit to force, of each object that has changed.
    pub propagation_ms: Vec<u64>,
    /// Objects that somebody else had changed.
    pub drifted: u64,
    /// Objects that were set or deleted.
    pub applied: u64,
    /// Batches that were refused.
    pub refused: u64,
    /// What people should know.
    pub notes: Vec<String>,
}

/// What is known of `bifrostd`.
#[derive(Debug)]
enum Knowledge {
    /// Nothing: it has to be asked.
    None,
    /// Who it is; its objects come.
    Listing { listed: BTreeMap<Id, (u64, Arc<Object>)>, from: Option<String> },
    /// All of its objects that are ours.
    All,
}

/// The agent's state.
#[derive(Debug)]
pub struct Core {
    desired: Desired,
    knowledge: Knowledge,
    /// What `bifrostd` has, with generations.
    actual: BTreeMap<Id, (u64, Arc<Object>)>,
    digests: BTreeMap<Option<Vni>, Digest>,
    /// Process id and uptime of the `bifrostd` that `actual` is of.
    daemon: Option<(u32, f64)>,
    /// Whether differences that the list shows are somebody's doing.
    is_drift: bool,
    /// What may differ.
    dirty: BTreeSet<Id>,
    queue: VecDeque<Vec<Change>>,
    /// The batch that `bifrostd` was asked for, and what `plans` was then.
    asked: Option<(u64, Vec<Change>)>,
    /// How often everything that was planned was put aside.
    plans: u64,
    refused: BTreeMap<Id, String>,
    /// When the intent behind what is not in force yet was committed.
    committed: BTreeMap<Id, u64>,
    limits: Limits,
    is_asking: bool,
    report_due: bool,
    reported: Option<Report>,
    paths: PathHealth,
    failures: u32,
    ask_at: Time,
    look_at: Time,
    compare_at: Time,
    retry_at: Time,
    jitter: fn() -> f64,
    observed: Observed,
}

impl Core {
    /// Knows nothing yet. `jitter` gives numbers of 0 to 1.
    pub fn new(limits: Limits, jitter: fn() -> f64) -> Core {
        Core {
            desired: Desired::default(),
            knowledge: Knowledge::None,
            actual: BTreeMap::new(),
            digests: BTreeMap::new(),
            daemon: None,
            is_drift: false,
            dirty: BTreeSet::new(),
            queue: VecDeque::new(),
            asked: None,
            plans: 0,
            refused: BTreeMap::new(),
            committed: BTreeMap::new(),
            limits,
            is_asking: false,
            report_due: false,
            reported: None,
            paths: PathHealth::default(),
            failures: 0,
            ask_at: Duration::ZERO,
            look_at: Duration::ZERO,
            compare_at: Duration::ZERO,
            retry_at: Duration::ZERO,
            jitter,
            observed: Observed::default(),
        }
    }

    /// What the relay says.
    pub fn desired(&self) -> &Desired {
        &self.desired
    }

    /// A stream with a relay begins. `is_restored`: the store was restored from a backup, and has not come to the last revision.
    pub fn connected(&mut self, is_restored: bool) {
        self.desired.connected(is_restored);
        self.reported = None;
    }

    /// The stream is over.
    pub fn lost(&mut self) {
        self.desired.lost();
        // Deletions wait until a relay confirms them.
        self.redo();
    }

    /// Part of what changes.
    ///
    /// # Errors
    /// There is more than is kept; the stream has to end.
    pub fn changes(&mut self, changes: Vec<Sent>) -> Result<(), Refused> {
        self.desired.take(changes)
    }

    /// All changes up to a revision were sent.
    ///
    /// # Errors
    /// There is more than is kept, or less is known than before; the stream has to end.
    pub fn in_sync(&mut self, revision: u64, now: Time) -> Result<(), Refused> {
        let is_first = !self.desired.is_in_sync();
        let changed = self.desired.in_sync(revision)?;
        self.redo();
        if !changed.is_empty() {
            self.retry_at = self.retry_at.min(now + RETRY_AFTER_CHANGE);
        }
        for change in changed {
            let Some(id) = change.name.id() else { continue };
            self.refused.remove(&id);
            match change.committed_ms {
                Some(at) => drop(self.committed.insert(id.clone(), at)),
                None => drop(self.committed.remove(&id)),
            }
            self.dirty.insert(id);
        }
        if is_first {
            self.compare_all();
        }
        self.report_due = true;
        Ok(())
    }

    /// What to do now.
    pub fn next(&mut self, now: Time) -> Next {
        if self.is_asking {
            return Next::Wait(now + LOOK);
        }
        let ask = match &self.knowledge {
            _ if now < self.ask_at => None,
            Knowledge::None => Some(Ask::Status),
            Knowledge::Listing { from, .. } => Some(Ask::List(ObjectsQuery { from: from.clone(), ..ours() })),
            Knowledge::All => self.next_change(now),
        };
        if let Some(ask) = ask {
            self.is_asking = true;
            return Next::Ask(ask);
        }
        let mut times = vec![self.look_at, self.compare_at];
        times.extend((!self.refused.is_empty()).then_some(self.retry_at));
        let earliest = times.into_iter().min().unwrap_or(self.ask_at);
        Next::Wait(earliest.max(self.ask_at))
    }

    fn next_change(&mut self, now: Time) -> Option<Ask> {
        if self.queue.is_empty() && now >= self.retry_at && !self.refused.is_empty() {
            self.dirty.extend(std::mem::take(&mut self.refused).into_keys());
            self.retry_at = now + RETRY;
        }
        if self.queue.is_empty() {
            self.plan();
        }
        if let Some(batch) = self.queue.pop_front() {
            let items = batch.iter().map(Change::item).collect();
            self.asked = Some((self.plans, batch));
            return Some(Ask::Apply(ApplySpec { items, ..ApplySpec::default() }));
        }
        if now >= self.compare_at {
            self.compare_at = now + COMPARE.mul_f64(0.9 + 0.2 * (self.jitter)());
            return Some(Ask::Digests(ours()));
        }
        (now >= self.look_at).then_some(Ask::Status)
    }

    /// What `bifrostd` said to what was asked, at a time in milliseconds since 1970.
    pub fn answer(&mut self, answer: Result<Answer, ClientError>, now: Time, now_ms: u64) {
        self.is_asking = false;
        let batch = self.asked.take();
        match (answer, batch) {
            (Ok(answer), batch) => {
                self.failures = 0;
                self.look_at = now + LOOK;
                match answer {
                    Answer::Status(status) => self.status(&status),
                    Answer::List(list) => self.list(list),
                    Answer::Digests(digests) => self.digests(digests),
                    Answer::Apply(report) => {
                        self.applied(batch.map(|(_, batch)| batch).unwrap_or_default(), &report, now_ms);
                    }
                }
            }
            (Err(ClientError::Api(error)), Some((plans, batch)))
                if !matches!(error.kind, ErrorKind::Internal | ErrorKind::Unavailable) =>
            {
                self.failures = 0;
                self.refuse(batch, plans == self.plans, &error.to_string(), now);
            }
            (Err(error), batch) => {
                self.dirty.extend(batch.into_iter().flat_map(|(_, batch)| batch).map(|change| change.id));
                self.failed(&error, now);
            }
        }
    }

    /// How the paths to other hosts are; the next report says it.
    pub fn paths(&mut self, paths: PathHealth) {
        self.paths = paths;
    }

    /// What is in force, if the relay is to be told: once after each group, and when problems or the health of paths change.
    pub fn take_report(&mut self) -> Option<Report> {
        let revision = self.desired.revision().filter(|_| self.desired.is_in_sync())?;
        if !self.is_settled() {
            return None;
        }
        let mut problems = self.problems();
        let more_problems = problems.split_off(problems.len().min(MAX_PROBLEMS)).len() as u64;
        let not_in_force = problems.len() as u64 + more_problems;
        let objects = (self.desired.count() as u64).saturating_sub(not_in_force);
        let paths = self.paths.clone();
        let report = Report { revision, objects, problems, more_problems, paths };
        if !self.report_due && self.reported.as_ref() == Some(&report) {
            return None;
        }
        self.report_due = false;
        self.reported = Some(report.clone());
        Some(report)
    }

    /// What has happened since this was asked last.
    pub fn take_observed(&mut self) -> Observed {
        std::mem::take(&mut self.observed)
    }

    /// How many objects are not as they are to be, for reasons that others have to remove.
    pub fn problem_count(&self) -> usize {
        self.refused.len() + self.desired.bad().len()
    }

    /// Whether everything that can be is in force.
    pub fn is_settled(&self) -> bool {
        let is_idle = self.dirty.is_empty() && self.queue.is_empty() && self.asked.is_none();
        matches!(self.knowledge, Knowledge::All) && is_idle
    }

    /// Whether `bifrostd` answered the last question.
    pub fn is_answered(&self) -> bool {
        self.failures == 0 && self.daemon.is_some()
    }

    /// How many objects of ours `bifrostd` has.
    pub fn object_count(&self) -> usize {
        self.actual.len()
    }

    fn problems(&self) -> Vec<Problem> {
        let bad = self.desired.bad().iter();
        let bad =
            bad.map(|(name, what)| Problem { kind: name.kind.clone(), key: name.key.clone(), what: what.clone() });
        let refused = self.refused.iter();
        let refused = refused.map(|(id, what)| Problem {
            kind: id.kind.name().to_owned(),
            key: id.key.clone(),
            what: what.clone(),
        });
        bad.chain(refused).collect()
    }

    /// Plans again what is queued.
    fn redo(&mut self) {
        self.plans += 1;
        for change in self.queue.drain(..).flatten() {
            self.dirty.insert(change.id);
        }
    }

    /// Everything may differ.
    fn compare_all(&mut self) {
        if !matches!(self.knowledge, Knowledge::All) {
            return;
        }
        let differs = |id: &Id, object: &Arc<Object>| self.actual.get(id).is_none_or(|(_, actual)| actual != object);
        let good = self.desired.good().iter().filter(|(id, object)| differs(id, object)).map(|(id, _)| id);
        let gone = self.actual.keys().filter(|id| !self.desired.has(id));
        let ids: Vec<Id> = good.chain(gone).filter(|id| !self.refused.contains_key(id)).cloned().collect();
        self.dirty.extend(ids);
    }

    fn status(&mut self, status: &Status) {
        let is_other = self.daemon.is_none_or(|(pid, uptime)| pid != status.pid || status.uptime_s < uptime);
        if is_other && self.daemon.is_some() {
            self.observed.notes.push("bifrostd was restarted; its objects are compared".to_owned());
        }
        self.daemon = Some((status.pid, status.uptime_s));
        if self.desired.set_workers(status.workers.len().max(1)) {
            self.knowledge = Knowledge::None;
        }
        if is_other || matches!(self.knowledge, Knowledge::None) {
            self.ask_for_all(false);
        }
    }

    fn ask_for_all(&mut self, is_drift: bool) {
        self.redo();
        self.is_drift = is_drift;
        self.knowledge = Knowledge::Listing { listed: BTreeMap::new(), from: None };
    }

    fn list(&mut self, list: ObjectList) {
        let workers = self.desired.workers();
        let Knowledge::Listing { listed, from } = &mut self.knowledge else { return };
        for entry in list.objects {
            let Ok(object) = Object::parse(entry.kind, &entry.spec, workers) else { continue };
            listed.insert(Id { kind: entry.kind, key: entry.key }, (entry.generation, Arc::new(object)));
        }
        if list.next.is_some() {
            *from = list.next;
            return;
        }
        let listed = std::mem::take(listed);
        if self.is_drift {
            let changed = listed.iter().filter(|(id, (_, o))| self.actual.get(id).is_none_or(|(_, known)| known != o));
            let gone = self.actual.keys().filter(|id| !listed.contains_key(id));
            let drifted = changed.count() as u64 + gone.count() as u64;
            if drifted > 0 {
                self.observed.notes.push(format!("{drifted} objects were changed by somebody else; they are repaired"));
            }
            self.observed.drifted += drifted;
        }
        self.actual = BTreeMap::new();
        self.digests = BTreeMap::new();
        for (id, (generation, object)) in listed {
            self.put(id, Some((generation, object)));
        }
        self.knowledge = Knowledge::All;
        if self.desired.revision().is_some() {
            self.compare_all();
        }
    }

    fn digests(&mut self, told: Vec<ObjectsDigest>) {
        let theirs: BTreeMap<Option<u32>, (u64, String)> =
            told.into_iter().filter(|d| d.owner == OWNER).map(|d| (d.vni, (d.objects, d.digest))).collect();
        let ours = self.digests.iter().filter(|(_, digest)| digest.objects() > 0);
        let ours: BTreeMap<_, _> =
            ours.map(|(vni, digest)| (vni.map(Vni::value), (digest.objects(), digest.text()))).collect();
        if ours != theirs {
            self.ask_for_all(true);
        }
    }

    /// Notes what `bifrostd` has.
    fn put(&mut self, id: Id, value: Option<(u64, Arc<Object>)>) {
        if let Some((generation, object)) = self.actual.remove(&id) {
            self.digests.entry(object.vni()).or_default().remove(&object, generation);
        }
        if let Some((generation, object)) = value {
            self.digests.entry(object.vni()).or_default().add(&object, generation);
            self.actual.insert(id, (generation, object));
        }
    }

    /// Makes batches of what differs.
    fn plan(&mut self) {
        let mut changes = Vec::new();
        for id in std::mem::take(&mut self.dirty) {
            let new = self.desired.good().get(&id).cloned();
            let old = self.actual.get(&id).map(|(_, object)| Arc::clone(object));
            if new == old {
                self.settled(&id, None);
            } else if new.is_some() || old.is_some() && self.desired.is_in_sync() && !self.desired.has(&id) {
                changes.push(Change { id, old, new });
            }
        }
        self.leave_out_dependents(&mut changes);
        self.queue = batches(changes, self.limits).into();
    }

    /// An object is as it is to be.
    fn settled(&mut self, id: &Id, now_ms: Option<u64>) {
        let committed = self.committed.remove(id);
        if let (Some(committed), Some(now)) = (committed, now_ms) {
            self.observed.propagation_ms.push(now.saturating_sub(committed));
        }
    }

    fn applied(&mut self, batch: Vec<Change>, report: &ApplyReport, now_ms: u64) {
        let changed = report.set + report.deleted;
        self.observed.applied += changed;
        if changed != batch.len() as u64 {
            // Somebody was faster: what there is is not what was thought.
            self.ask_for_all(false);
            return;
        }
        for Change { id, new, .. } in batch {
            self.settled(&id, Some(now_ms));
            let generation = self.actual.get(&id).map_or(0, |(generation, _)| *generation) + 1;
            self.put(id, new.map(|object| (generation, object)));
        }
    }

    /// A batch was refused: those to blame are left out, or half of it is tried by itself. `is_current`: nothing has changed since.
    fn refuse(&mut self, mut batch: Vec<Change>, is_current: bool, error: &str, now: Time) {
        self.observed.refused += 1;
        let mut blamed = blame(error, &batch, |id| self.actual.get(id).map(|(_, object)| &**object));
        if blamed.is_empty() && batch.len() == 1 {
            blamed.insert(0, error.to_owned());
        }
        if blamed.is_empty() && is_current {
            let rest = batch.split_off(batch.len() / 2);
            self.queue.push_front(rest);
            self.queue.push_front(batch);
            return;
        }
        if self.refused.is_empty() {
            self.retry_at = now + RETRY;
        }
        for (place, change) in batch.into_iter().enumerate() {
            match blamed.remove(&place) {
                // There may be another version by now.
                Some(what) if is_current => self.set_aside(change.id, what),
                _ => drop(self.dirty.insert(change.id)),
            }
        }
        self.redo();
    }

    fn set_aside(&mut self, id: Id, what: String) {
        self.observed.notes.push(format!("{id} is not in force: {what}"));
        self.refused.insert(id, what);
    }

    /// What needs an object that was refused, and is not there in an earlier version, is refused with it.
    fn leave_out_dependents(&mut self, changes: &mut Vec<Change>) {
        if self.refused.is_empty() {
            return;
        }
        loop {
            // What belongs to somebody else was refused, and is there.
            let is_missing = |id: &Id| {
                self.refused.get(id).is_some_and(|what| !what.contains(OF_ANOTHER)) && !self.actual.contains_key(id)
            };
            let lacks = |change: &Change| change.new.as_ref().and_then(|new| needs(new).into_iter().find(is_missing));
            let (lacking, rest): (Vec<_>, Vec<_>) =
                changes.drain(..).map(|c| (lacks(&c), c)).partition(|c| c.0.is_some());
            changes.extend(rest.into_iter().map(|(_, change)| change));
            if lacking.is_empty() {
                return;
            }
            for (missing, change) in lacking {
                let what = missing.map(|id| format!("it needs {id}, which is not in force")).unwrap_or_default();
                self.refused.insert(change.id, what);
            }
        }
    }

    fn failed(&mut self, error: &ClientError, now: Time) {
        if self.failures == 0 {
            self.observed.notes.push(format!("bifrostd cannot be asked, and is tried again: {error}"));
        }
        let doubled = PAUSES.0.saturating_mul(1 << self.failures.min(10)).min(PAUSES.1);
        self.ask_at = now + doubled;
        self.failures += 1;
        if matches!(error, ClientError::Api(_)) && matches!(self.knowledge, Knowledge::All) {
            // It changed nothing, and is asked for again.
            return;
        }
        // Whether a batch was done is not known.
        self.redo();
        self.knowledge = Knowledge::None;
    }
}

fn ours() -> ObjectsQuery {
    ObjectsQuery { owner: Some(OWNER.to_owned()), ..ObjectsQuery::default() }
}
