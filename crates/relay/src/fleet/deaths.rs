//! Hosts that are dead: what a look finds, and what follows from marks.

use std::collections::BTreeMap;
use std::sync::Arc;

use bifrost_intent::api::Frozen;
use bifrost_intent::{HostChanges, Key, Kind};
use bifrost_store::{Events, Revision, Snapshot};

use super::Fleet;
use crate::alive::{Seen, State};

impl Fleet {
    /// Takes over all marks that the store has.
    pub(crate) fn load_marks(&mut self, snapshot: Snapshot) {
        let changed = self.marks.load(snapshot);
        self.withdraw(changed);
    }

    /// Takes over marks that the store's watch brings.
    pub(crate) fn follow_marks(&mut self, events: Events) {
        let changed = self.marks.follow(events);
        self.withdraw(changed);
    }

    /// All hosts that are known, in the order of their names.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        let state = |name: &str| match self.marks.get(name) {
            None => State::New,
            Some((mark, _)) if mark.dead.is_some() => State::Dead,
            Some(_) => State::Alive,
        };
        let seen = |name: &str| Seen {
            name: name.to_owned(),
            is_connected: self.is_here(name) || self.peers.is_connected(name),
            state: state(name),
        };
        self.host_names().map(seen).collect()
    }

    /// Hosts whose agents follow this relay, and that are not alive by their marks.
    pub(crate) fn unmarked(&self) -> Vec<String> {
        let is_alive = |name: &str| self.marks.get(name).is_some_and(|(mark, _)| mark.dead.is_none());
        let unmarked = self.host_names().filter(|name| self.is_here(name) && !is_alive(name));
        unmarked.map(str::to_owned).collect()
    }

    /// Hosts that have marks and do not exist.
    pub(crate) fn marked_in_vain(&self) -> Vec<String> {
        self.marks.iter().filter(|(host, _)| !self.has_host(host)).map(|(host, _)| host.to_owned()).collect()
    }

    /// The revision of the mark of a host; 0: it has none.
    pub(crate) fn marked_at(&self, host: &str) -> Revision {
        self.marks.get(host).map_or(0, |(_, revision)| *revision)
    }

    /// How many hosts have vanished, if these are too many to take any of them for dead.
    pub(crate) fn frozen(&self) -> Option<Frozen> {
        self.frozen
    }

    /// Sets how many hosts have vanished, if these are too many to take any of them for dead. Returns the former value.
    pub(crate) fn set_frozen(&mut self, frozen: Option<Frozen>) -> Option<Frozen> {
        std::mem::replace(&mut self.frozen, frozen)
    }

    /// Adds changes to what waits for hosts.
    pub(super) fn tell(&mut self, concerned: BTreeMap<Arc<str>, HostChanges>) {
        for (host, changes) in concerned {
            let entry = self.hosts.entry(Arc::clone(&host)).or_default();
            entry.changed = self.revision;
            if let Some((_, feed)) = &entry.connection {
                feed.add(changes, self.revision);
                self.untold.insert(host);
            }
        }
        self.note_rerouted();
    }

    /// Whether the agent of a host follows this relay.
    fn is_here(&self, host: &str) -> bool {
        self.hosts.get(host).is_some_and(|host| host.connection.is_some())
    }

    fn host_names(&self) -> impl Iterator<Item = &str> {
        let hosts = self.model.iter().map(|(key, _)| key).take_while(|key| key.kind() == Kind::Host);
        hosts.map(Key::name)
    }

    /// Marks of hosts have changed.
    fn withdraw(&mut self, changed: Vec<String>) {
        for host in changed {
            let now = self.marks.death(&host).map(|death| death.withdrawn);
            if self.model.set_withdrawn(&host, now) == now {
                continue;
            }
            let hosts = &self.hosts;
            let is_connected = |host: &str| hosts.get(host).is_some_and(|host| host.connection.is_some());
            let concerned = self.spans.withdraw(&self.model, &host, &is_connected);
            self.tell(concerned);
        }
    }
}
