//! Which hosts are dead: no relay has had a connection of their agent for long.
//!
//! The store has a [`Mark`] for each host that any relay has ever seen. All relays obey the marks, so that they tell hosts the same. A
//! mark is made by a relay that has followed the store, and through it all other relays, for the whole time: while it does not, time
//! does not count. So nothing expires while the store is down, or a relay begins or stands still. No I/O and no clock.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bifrost_intent::Withdrawn;
use bifrost_intent::api::Frozen;
use bifrost_store::{Events, Revision, Snapshot};
use serde::{Deserialize, Serialize};

/// Everything of this in the store. It is not below that of objects: it is no intent.
pub(crate) const PREFIX: &str = "/bifrost/alive/v1/";
/// The longest time between two looks. After a longer one it is not known what happened in between.
pub(crate) const MOST_BETWEEN: Duration = Duration::from_secs(5);

/// What the store says of a host that was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    /// Absent: it is alive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dead: Option<Death>,
}

/// That a host is dead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Death {
    /// When it was marked, milliseconds since 1970.
    pub(crate) since_ms: u64,
    /// The relay that did it.
    pub(crate) by: String,
    pub(crate) withdrawn: Withdrawn,
}

/// The marks of all hosts, with the revisions of their records.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    hosts: BTreeMap<String, (Mark, Revision)>,
}

impl Marks {
    /// Takes over all that the store has. Gives the hosts whose marks differ from before.
    pub(crate) fn load(&mut self, snapshot: Snapshot) -> Vec<String> {
        let before = std::mem::take(&mut self.hosts);
        for record in snapshot.records {
            self.take(&record.key, Some(&record.value), record.revision);
        }
        let names = before.keys().chain(self.hosts.keys().filter(|name| !before.contains_key(*name)));
        let differs = |name: &&String| before.get(*name).map(|(mark, _)| mark) != self.get(name).map(|(mark, _)| mark);
        names.filter(differs).cloned().collect()
    }

    /// Takes over what the store's watch brings. Gives the hosts that it is about.
    pub(crate) fn follow(&mut self, events: Events) -> Vec<String> {
        let take = |(key, value): (String, Option<Vec<u8>>)| {
            self.take(&key, value.as_deref(), events.revision).map(str::to_owned)
        };
        events.changes.into_iter().filter_map(take).collect()
    }

    /// The mark of a host, and the revision of its record.
    pub(crate) fn get(&self, host: &str) -> Option<&(Mark, Revision)> {
        self.hosts.get(host)
    }

    /// Why a host is dead, if it is.
    pub(crate) fn death(&self, host: &str) -> Option<&Death> {
        self.hosts.get(host)?.0.dead.as_ref()
    }

    /// The hosts that have marks, with the revisions of the records.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, Revision)> {
        self.hosts.iter().map(|(host, (_, revision))| (host.as_str(), *revision))
    }

    fn take<'k>(&mut self, key: &'k str, value: Option<&[u8]>, revision: Revision) -> Option<&'k str> {
        let name = key.strip_prefix(PREFIX)?;
        // A later version may write something else: that says nothing of a death.
        match value.map(|value| serde_json::from_slice::<Mark>(value).unwrap_or_default()) {
            Some(mark) => drop(self.hosts.insert(name.to_owned(), (mark, revision))),
            None => drop(self.hosts.remove(name)),
        }
        Some(name)
    }
}

/// The key of the mark of a host.
pub(crate) fn key(host: &str) -> String {
    format!("{PREFIX}{host}")
}

/// When hosts are dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// How long no agent must have been connected. Zero: no host is marked.
    pub(crate) after: Duration,
    /// Of how many in a hundred hosts this is believed.
    pub(crate) most_percent: u32,
    pub(crate) withdrawn: Withdrawn,
}

/// A host, as a look finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) name: String,
    /// Whether its agent follows a relay, as far as this one knows.
    pub(crate) is_connected: bool,
    pub(crate) state: State,
}

/// What the store says of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// No relay has seen it ever.
    New,
    Alive,
    Dead,
}

/// What follows from a look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Hosts that are dead now.
    pub(crate) dead: Vec<String>,
    /// Too many hosts have vanished: none of them is taken for dead.
    pub(crate) frozen: Option<Frozen>,
}

/// For how long hosts have been absent.
#[derive(Debug)]
pub(crate) struct Absence {
    settings: Settings,
    /// When it was looked last, if all was known then.
    last: Option<Instant>,
    /// Hosts that are alive by their marks, and not connected: since when.
    absent: BTreeMap<String, Instant>,
    /// Hosts that have died since the first look, and when.
    died: BTreeMap<String, Instant>,
    /// Those that were dead at the last look.
    dead: Vec<String>,
}

impl Absence {
    pub(crate) fn new(settings: Settings) -> Absence {
        Absence { settings, last: None, absent: BTreeMap::new(), died: BTreeMap::new(), dead: Vec::new() }
    }

    /// Looks at all hosts; in the order of their names. `is_sure`: all that relays have said up to now is known.
    pub(crate) fn look(&mut self, now: Instant, is_sure: bool, hosts: &[Seen]) -> Verdict {
        let Settings { after, most_percent, .. } = self.settings;
        if !is_sure || after.is_zero() {
            self.last = None;
            self.absent.clear();
            return Verdict::default();
        }
        let is_first = self.last.is_none();
        if self.last.replace(now).is_some_and(|last| now.saturating_duration_since(last) > MOST_BETWEEN) {
            self.absent.clear();
        }
        self.note_deaths(now, is_first, hosts);
        let is_absent = |host: &&Seen| host.state == State::Alive && !host.is_connected;
        let before = std::mem::take(&mut self.absent);
        let since = |host: &Seen| before.get(&host.name).copied().unwrap_or(now);
        self.absent = hosts.iter().filter(is_absent).map(|host| (host.name.clone(), since(host))).collect();
        let is_over = |since: &Instant| now.saturating_duration_since(*since) >= after;
        let dead: Vec<String> =
            self.absent.iter().filter(|(_, since)| is_over(since)).map(|(name, _)| name.clone()).collect();
        if dead.is_empty() {
            return Verdict::default();
        }
        let alive = hosts.iter().filter(|host| host.state == State::Alive).count();
        let (vanished, of) = (self.absent.len() + self.died.len(), alive + self.died.len());
        // One host does not vanish together with another.
        if vanished > 1 && vanished as u64 * 100 > of as u64 * u64::from(most_percent) {
            let frozen = Frozen { vanished: vanished as u64, of: of as u64 };
            return Verdict { dead: Vec::new(), frozen: Some(frozen) };
        }
        Verdict { dead, frozen: None }
    }

    /// Hosts that have died lately have vanished together with those that do now.
    fn note_deaths(&mut self, now: Instant, is_first: bool, hosts: &[Seen]) {
        let dead: Vec<String> =
            hosts.iter().filter(|host| host.state == State::Dead).map(|host| host.name.clone()).collect();
        let was_dead = |name: &String| self.dead.binary_search(name).is_ok();
        let is_dead = |name: &String| dead.binary_search(name).is_ok();
        if !is_first {
            self.died.extend(dead.iter().filter(|name| !was_dead(name)).map(|name| (name.clone(), now)));
        }
        let after = self.settings.after;
        self.died.retain(|name, at| is_dead(name) && now.saturating_duration_since(*at) < after);
        self.dead = dead;
    }
}

#[cfg(test)]
mod tests;
