//! Everything that a relay knows: the objects of the store, which host needs which, and what each host has.
//!
//! No I/O and no clock. The store is the truth: a change is planned here, written to the store, and taken over when the store's
//! watch brings it, as another relay's changes are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bifrost_intent::api::{
    Frozen, HostCounts, HostProblem, HostStatus, MAX_LISTED, ObjectEntry, Objects, ObjectsQuery, Overview, PathHealth,
    Why, WhyHost,
};
use bifrost_intent::key::PREFIX;
use bifrost_intent::{Batch, HostChanges, Key, Kind, Model, Plan, PlanError, Reason, Spans, Stored};
use bifrost_store::{Events, Revision, Snapshot, Txn, Write};

use crate::alive::Marks;
use crate::feed::Feed;
use crate::learned::{Connection, Learned};
use crate::peers::Peers;

mod deaths;
mod learning;

use learning::Resolutions;

/// Everything of ours in the store.
pub(crate) const ALL: &str = "/bifrost/v1/";
/// A record that every commit writes, and of which every commit expects that nobody else has written it: commits are one after
/// the other, so that what was checked holds.
pub(crate) const SERIAL: &str = "/bifrost/v1/serial";

/// What a relay knows.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    model: Model,
    spans: Spans,
    revision: Revision,
    /// Who wrote the last commit, and the revision of it.
    serial: (Vec<u8>, Revision),
    hosts: BTreeMap<Arc<str>, Host>,
    unreadable: BTreeMap<String, String>,
    /// How many connections there were.
    connections: Connection,
    peers: Peers,
    /// Hosts of which other relays are to be told.
    untold: BTreeSet<Arc<str>>,
    /// The answers about routes that agents of this relay have.
    learned: Learned,
    resolved: Resolutions,
    /// Which hosts are dead.
    marks: Marks,
    frozen: Option<Frozen>,
}

/// What other relays are to be told.
#[derive(Debug)]
pub(crate) struct ToTell {
    /// Up to which revision it is true.
    pub(crate) position: Revision,
    /// Hosts whose agents follow this relay.
    pub(crate) here: Vec<HostStatus>,
    /// Hosts whose agents do not, although the store says so, and the revisions of these records.
    pub(crate) gone: Vec<(String, Revision)>,
}

/// A host that is known, or that an agent has spoken for.
#[derive(Debug, Default)]
struct Host {
    /// The connection of its agent: its number, and what is to be sent.
    connection: Option<(Connection, Arc<Feed>)>,
    since_ms: u64,
    software: String,
    changed: Revision,
    applied: Revision,
    objects: u64,
    problems: Vec<HostProblem>,
    more_problems: u64,
    paths: PathHealth,
}

/// What an agent says of its host; its sizes were checked.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    pub(crate) revision: Revision,
    pub(crate) objects: u64,
    pub(crate) problems: Vec<HostProblem>,
    pub(crate) more_problems: u64,
    pub(crate) paths: PathHealth,
}

/// A connection of an agent.
#[derive(Debug)]
pub(crate) struct Attached {
    /// Its number, by which it is told from an earlier one of the host.
    pub(crate) number: Connection,
    /// What is to be sent, after the following.
    pub(crate) feed: Arc<Feed>,
    /// Everything that the host is to have at this revision.
    pub(crate) all: HostChanges,
    pub(crate) revision: Revision,
    /// Whether the host is to learn routes, and its agent cannot.
    pub(crate) misses_learning: bool,
}

impl Fleet {
    /// Takes over all that the store has. Hosts are told what differs from before. Gives whether the store has gone back to an earlier
    /// revision: it was restored from a backup. Connections are ended then, since agents believe no lower revision on them.
    pub(crate) fn load(&mut self, snapshot: Snapshot) -> bool {
        let is_back = snapshot.revision < self.revision;
        if is_back {
            self.go_back(snapshot.revision);
        }
        self.serial = (Vec::new(), 0);
        let mut seen = BTreeSet::new();
        let mut changes = Vec::with_capacity(snapshot.records.len());
        for record in snapshot.records {
            seen.insert(record.key.clone());
            if record.key == SERIAL {
                self.serial = (record.value, record.revision);
            } else {
                changes.push((record.key, Some(record.value)));
            }
        }
        let gone = self.model.iter().map(|(key, _)| key.in_store()).filter(|key| !seen.contains(key));
        changes.extend(gone.collect::<Vec<_>>().into_iter().map(|key| (key, None)));
        self.unreadable.retain(|key, _| seen.contains(key));
        self.take(changes, snapshot.revision);
        is_back
    }

    /// The store is at a revision, and nothing has changed since the serial record of another: that of [`SERIAL`] there. Whether that is
    /// so is known when this has it.
    pub(crate) fn advance(&mut self, revision: Revision, serial: Revision) -> bool {
        let is_here = self.serial.1 >= serial;
        if is_here {
            self.revision = self.revision.max(revision);
        }
        is_here
    }

    /// Takes over what the store's watch brings.
    pub(crate) fn follow(&mut self, events: Events) {
        let (serial, changes) = events.changes.into_iter().partition(|(key, _)| key == SERIAL);
        let serial: Vec<(String, Option<Vec<u8>>)> = serial;
        for (_, value) in serial {
            // Absent: somebody has removed it, and the next commit writes it.
            self.serial = value.map_or((Vec::new(), 0), |value| (value, events.revision));
        }
        self.take(changes, events.revision);
    }

    /// What a batch comes to, and the transaction for it; `by` tells this commit from all others.
    pub(crate) fn plan(&mut self, batch: &Batch, now_ms: u64, by: &[u8]) -> Result<(Plan, Txn), PlanError> {
        let plan = self.model.plan(batch, now_ms)?;
        let mut writes = vec![Write::Put { key: SERIAL.to_owned(), value: by.to_vec() }];
        writes.extend(plan.writes.iter().map(|(key, stored)| match stored {
            Some(stored) => Write::Put { key: key.in_store(), value: stored.encode() },
            None => Write::Delete { key: key.in_store() },
        }));
        Ok((plan, Txn { expect: vec![(SERIAL.to_owned(), self.serial.1)], writes }))
    }

    /// The generations that the objects of a batch have, in its order; 0: there is none.
    pub(crate) fn generations(&self, batch: &Batch) -> Vec<u64> {
        batch.changes.iter().map(|c| self.model.get(&c.key).map_or(0, |stored| stored.generation)).collect()
    }

    /// The revision that is known, and who wrote the last commit.
    pub(crate) fn position(&self) -> (Revision, &[u8]) {
        (self.revision, &self.serial.0)
    }

    /// An agent comes for a host; an earlier one of the host is ended.
    ///
    /// # Errors
    /// The host is not known.
    pub(crate) fn attach(
        &mut self,
        host: &str,
        software: &str,
        can_learn: bool,
        now_ms: u64,
    ) -> Result<Attached, String> {
        let is_known = Key::host(host).is_ok_and(|key| self.model.get(&key).is_some());
        if !is_known {
            return Err(format!("host {host:?} is not known; add it: bifrostctl fleet add host/{host} addresses=..."));
        }
        self.connections += 1;
        let (number, feed) = (self.connections, Arc::new(Feed::default()));
        let name: Arc<str> = host.into();
        let entry = self.hosts.entry(Arc::clone(&name)).or_default();
        if let Some((number, earlier)) = entry.connection.replace((number, Arc::clone(&feed))) {
            earlier.end("another agent has connected for this host");
            self.learned.end(number);
        }
        if can_learn {
            self.learned.begin(number, Arc::clone(&name));
        }
        entry.since_ms = now_ms;
        entry.software = software.to_owned();
        // What is in force is known when the agent says it.
        (entry.applied, entry.objects, entry.more_problems) = (0, 0, 0);
        entry.problems.clear();
        entry.paths = PathHealth::default();
        entry.changed = entry.changed.max(1);
        self.untold.insert(name);
        let misses_learning = !can_learn && self.spans.learns(&self.model, host);
        Ok(Attached { number, feed, all: self.spans.of_host(host), revision: self.revision, misses_learning })
    }

    /// An agent has gone.
    pub(crate) fn detach(&mut self, host: &str, number: Connection, now_ms: u64) {
        self.learned.end(number);
        let Some(entry) = self.hosts.get_mut(host) else { return };
        if entry.connection.as_ref().is_some_and(|(known, _)| *known == number) {
            entry.connection = None;
            entry.since_ms = now_ms;
        }
    }

    /// An agent says what its host has.
    pub(crate) fn report(&mut self, host: &str, number: Connection, report: Report) {
        let revision = self.revision;
        let Some(entry) = self.hosts.get_mut(host) else { return };
        if entry.connection.as_ref().is_none_or(|(known, _)| *known != number) {
            return;
        }
        // It cannot have what there is not yet.
        entry.applied = report.revision.min(revision);
        entry.objects = report.objects;
        entry.problems = report.problems;
        entry.more_problems = report.more_problems;
        entry.paths = report.paths;
        self.untold.insert(host.into());
    }

    /// To take over what other relays say.
    pub(crate) fn peers_mut(&mut self) -> &mut Peers {
        &mut self.peers
    }

    /// Other relays are to be told everything again.
    pub(crate) fn tell_all(&mut self) {
        let here = self.hosts.iter().filter(|(_, host)| host.connection.is_some());
        self.untold = here.map(|(name, _)| Arc::clone(name)).collect();
    }

    /// What other relays are to be told since this was asked last, by a relay of this name.
    pub(crate) fn take_untold(&mut self, me: &str) -> ToTell {
        if !self.peers.knows(me) {
            // The first time; or others took it for gone.
            self.tell_all();
        }
        let is_here = |host: &str| self.hosts.get(host).is_some_and(|host| host.connection.is_some());
        let of_me = self.peers.records_of(me).filter(|(host, _)| !is_here(host));
        let gone = of_me.map(|(host, revision)| (host.to_owned(), revision)).collect();
        let mut untold = std::mem::take(&mut self.untold);
        untold.extend(self.hosts.keys().filter(|host| is_here(host) && !self.peers.has_record(host)).cloned());
        let here = untold.into_iter().filter(|host| is_here(host)).map(|host| self.host(&host)).collect();
        ToTell { position: self.revision, here, gone }
    }

    /// All hosts that are known, or connected.
    pub(crate) fn hosts(&self) -> Vec<HostStatus> {
        let known = self.model.iter().map(|(key, _)| key).take_while(|key| key.kind() == Kind::Host);
        known.map(|key| self.host(key.name())).collect()
    }

    /// Whether a host does not have everything up to a revision.
    pub(crate) fn is_waiting(&self, host: &str, revision: Revision) -> bool {
        let (changed, applied) = match self.hosts.get(host) {
            None => return false,
            Some(host) if host.connection.is_some() => (host.changed, host.applied),
            Some(Host { changed, .. }) => match self.peers.host(host, *changed) {
                Some(status) => (*changed, status.applied),
                None => return *changed > 0,
            },
        };
        applied < changed.min(revision)
    }

    /// The hosts that do not have everything up to a revision.
    pub(crate) fn waiting(&self, revision: Revision) -> Vec<Arc<str>> {
        self.hosts.keys().filter(|host| self.is_waiting(host, revision)).cloned().collect()
    }

    /// Hosts that a change since a revision concerns, and that refuse something.
    pub(crate) fn refusing(&self, since: Revision) -> Vec<HostStatus> {
        let concerned = self.hosts.iter().filter(|(_, host)| host.changed >= since).map(|(name, _)| self.host(name));
        concerned.filter(|host| host.connected && !host.problems.is_empty()).collect()
    }

    /// How many hosts there are; `is_here`: connected to this relay.
    pub(crate) fn host_counts(&self, is_here: bool) -> HostCounts {
        let hosts = self.hosts();
        let counts = |host: &&HostStatus| host.connected && (host.relay.is_none() || !is_here);
        HostCounts {
            known: hosts.len() as u64,
            connected: hosts.iter().filter(counts).count() as u64,
            in_sync: hosts.iter().filter(counts).filter(|host| host.is_in_sync()).count() as u64,
            dead: hosts.iter().filter(|host| host.dead_since_ms.is_some()).count() as u64,
        }
    }

    /// How many changes wait to be sent.
    pub(crate) fn backlog(&self) -> usize {
        self.hosts.values().filter_map(|host| host.connection.as_ref()).map(|(_, feed)| feed.len()).sum()
    }

    /// How many objects there are.
    pub(crate) fn len(&self) -> usize {
        self.model.len()
    }

    /// Records that are not understood, and why.
    pub(crate) fn unreadable(&self) -> impl Iterator<Item = (&String, &String)> {
        self.unreadable.iter()
    }

    /// Objects that may be seen, page by page.
    pub(crate) fn objects(&self, query: &ObjectsQuery, sees: impl Fn(&Key) -> bool) -> Objects {
        let limit = query.limit.unwrap_or(MAX_LISTED).clamp(1, MAX_LISTED);
        let wanted = |key: &&Key| {
            query.kind.is_none_or(|kind| key.kind() == kind)
                && query.project.as_ref().is_none_or(|project| key.project() == project)
                && query.key.as_ref().is_none_or(|wanted| *key == wanted)
                && sees(key)
        };
        let all: Box<dyn Iterator<Item = (&Key, &Stored)>> = match query.from.as_ref().or(query.key.as_ref()) {
            Some(from) => Box::new(self.model.iter_from(from)),
            None => Box::new(self.model.iter()),
        };
        let mut found = all.filter(|(key, _)| wanted(key));
        let objects = found.by_ref().take(limit).map(|(key, stored)| entry(key, stored)).collect();
        Objects { revision: self.revision, objects, next: found.next().map(|(key, _)| key.clone()) }
    }

    /// A summary of all objects.
    pub(crate) fn overview(&self) -> Overview {
        Overview { revision: self.revision, ..self.model.overview() }
    }

    /// How many objects some projects have, and how many hosts there are, by kind.
    pub(crate) fn counts_of(&self, projects: &BTreeSet<&str>) -> BTreeMap<Kind, u64> {
        let count = |kind: Kind| match kind {
            Kind::Host => self.model.count("", kind),
            Kind::Project => projects.iter().filter(|name| self.has_project(name)).count() as u64,
            _ => projects.iter().map(|project| self.model.count(project, kind)).sum(),
        };
        Kind::ALL.into_iter().map(|kind| (kind, count(kind))).filter(|(_, count)| *count > 0).collect()
    }

    fn has_project(&self, name: &str) -> bool {
        Key::new(Kind::Project, "", name).is_ok_and(|key| self.model.get(&key).is_some())
    }

    /// Where an object has come to.
    pub(crate) fn why(&self, key: &Key) -> Option<Why> {
        let stored = self.model.get(key)?;
        let items: BTreeSet<(&str, &str)> =
            self.spans.items_of(key).map(|item| (item.kind.name(), &*item.key)).collect();
        let of_host = |(name, reason): (Arc<str>, Reason)| {
            let host = self.host(&name);
            let about = |problem: &&HostProblem| items.contains(&(&*problem.kind, &*problem.key));
            let state = match host.problems.iter().find(about) {
                Some(problem) => format!("refused: {}", problem.what),
                None if !host.connected => "unknown: the host's agent is not connected".to_owned(),
                None if host.applied < host.changed => "on its way".to_owned(),
                None => "in force".to_owned(),
            };
            let reason = match reason {
                Reason::OnThisHost => "it is on this host",
                Reason::UsedHere => "a port of this host uses it",
                Reason::Reachable => "a port of this host can reach it",
            };
            WhyHost { host: name.to_string(), reason: reason.to_owned(), state }
        };
        let hosts = self.spans.why(&self.model, key).into_iter().map(of_host).collect();
        Some(Why { object: entry(key, stored), hosts })
    }

    /// Whether there is a host of that name.
    pub(crate) fn has_host(&self, name: &str) -> bool {
        Key::new(Kind::Host, "", name).is_ok_and(|key| self.model.get(&key).is_some())
    }

    /// What is known of a host.
    pub(crate) fn host(&self, name: &str) -> HostStatus {
        HostStatus { dead_since_ms: self.marks.death(name).map(|death| death.since_ms), ..self.followed(name) }
    }

    /// What this relay knows of a host, or the one that its agent follows.
    fn followed(&self, name: &str) -> HostStatus {
        let Some(host) = self.hosts.get(name) else {
            return HostStatus { name: name.to_owned(), ..HostStatus::default() };
        };
        if host.connection.is_none()
            && let Some(status) = self.peers.host(name, host.changed)
        {
            return status;
        }
        HostStatus {
            name: name.to_owned(),
            relay: None,
            connected: host.connection.is_some(),
            since_ms: host.since_ms,
            software: host.software.clone(),
            changed: host.changed,
            applied: host.applied,
            objects: host.objects,
            problems: host.problems.clone(),
            more_problems: host.more_problems,
            paths: host.paths.clone(),
            dead_since_ms: None,
        }
    }

    fn take(&mut self, changes: Vec<(String, Option<Vec<u8>>)>, revision: Revision) {
        // Everything at once is less work than change by change. Agents cannot be connected yet.
        let is_first = self.model.is_empty() && self.hosts.is_empty();
        self.revision = self.revision.max(revision);
        let mut wanted = BTreeMap::new();
        for (name, value) in changes {
            match read(&name, value.as_deref()) {
                Ok((key, stored)) => {
                    self.unreadable.remove(&name);
                    if self.model.get(&key) != stored.as_ref() {
                        wanted.insert(key, stored);
                    }
                }
                Err(_) if value.is_none() => drop(self.unreadable.remove(&name)),
                // What was there before stays: a later version may have written what it knows how to read.
                Err(why) => drop(self.unreadable.insert(name, why)),
            }
        }
        let mut changed = Vec::with_capacity(wanted.len());
        // What is referred to comes first, and goes last.
        let (sets, deletions): (Vec<_>, Vec<_>) = wanted.into_iter().partition(|(_, stored)| stored.is_some());
        for (key, _) in deletions.into_iter().rev() {
            let before = self.model.remove(&key);
            changed.push((key, before));
        }
        for (key, stored) in sets {
            if let Some(stored) = stored {
                let before = self.model.set(key.clone(), stored);
                changed.push((key, before));
            }
        }
        if is_first {
            self.spans = Spans::of(&self.model);
            for host in self.spans.hosts() {
                self.hosts.entry(Arc::clone(host)).or_default().changed = self.revision;
            }
            return;
        }
        self.change(&changed);
        self.forget_hosts(&changed);
    }

    fn change(&mut self, changed: &[(Key, Option<Stored>)]) {
        let hosts = &self.hosts;
        let is_connected = |host: &str| hosts.get(host).is_some_and(|host| host.connection.is_some());
        let concerned = self.spans.change(&self.model, changed, &is_connected);
        self.tell(concerned);
    }

    /// The store's revisions begin again after this one.
    fn go_back(&mut self, revision: Revision) {
        self.revision = revision;
        for host in self.hosts.values_mut() {
            host.changed = host.changed.min(revision);
            host.applied = 0;
            if let Some((number, feed)) = host.connection.take() {
                self.learned.end(number);
                feed.end("the store was restored from a backup; connect again");
            }
        }
    }

    /// Hosts that are gone need no connection.
    fn forget_hosts(&mut self, changed: &[(Key, Option<Stored>)]) {
        for (key, _) in changed.iter().filter(|(key, _)| key.kind() == Kind::Host) {
            if self.model.get(key).is_none()
                && let Some(host) = self.hosts.remove(key.name())
                && let Some((number, feed)) = host.connection
            {
                self.learned.end(number);
                feed.end("the host was deleted");
            }
        }
    }
}

/// The object of a record.
fn read(name: &str, value: Option<&[u8]>) -> Result<(Key, Option<Stored>), String> {
    let Some(key) = Key::of_store(name) else {
        return Err(format!("is not the key of an object; those are {PREFIX}KIND/PROJECT/NAME"));
    };
    let stored = value.map(|value| Stored::decode(key.kind(), value)).transpose()?;
    Ok((key, stored))
}

fn entry(key: &Key, stored: &Stored) -> ObjectEntry {
    ObjectEntry {
        key: key.clone(),
        generation: stored.generation,
        committed_ms: stored.committed_ms,
        spec: stored.spec.value(),
    }
}
