//! What relays that share a store say to each other: which agents follow them, and what is in force on those hosts.
//!
//! Each relay keeps a record for each of its hosts, and one for itself that says up to which revision those are true. A relay that
//! writes nothing for [`SILENCE`] is gone, and with it what it said. No I/O and no clock.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bifrost_intent::api::HostStatus;
use bifrost_store::{Events, Revision, Snapshot};
use serde::{Deserialize, Serialize};

/// Everything of this in the store. It is not below that of objects: it is no intent, and no backup needs it.
pub(crate) const PREFIX: &str = "/bifrost/agents/v1/";
/// How long a relay may be silent.
pub(crate) const SILENCE: Duration = Duration::from_secs(30);
/// How many problems of a host are told.
const MAX_PROBLEMS: usize = 10;

/// What a relay says of a host whose agent follows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct HostRecord {
    /// The relay that says it; another name with each start.
    by: String,
    /// Up to which revision this is true.
    position: Revision,
    #[serde(flatten)]
    status: HostStatus,
}

/// What a relay says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RelayRecord {
    /// Up to which revision all that it says of hosts is true.
    position: Revision,
}

/// What is known of other relays, and of their hosts.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    /// With the revision of the record.
    hosts: BTreeMap<String, (HostRecord, Revision)>,
    relays: BTreeMap<String, (Revision, Instant)>,
}

impl HostRecord {
    pub(crate) fn new(relay: &str, position: Revision, mut status: HostStatus) -> HostRecord {
        let more = status.problems.len().saturating_sub(MAX_PROBLEMS);
        status.problems.truncate(MAX_PROBLEMS);
        status.more_problems += more as u64;
        let more = status.paths.impaired.len().saturating_sub(MAX_PROBLEMS);
        status.paths.impaired.truncate(MAX_PROBLEMS);
        status.paths.more_impaired += more as u64;
        HostRecord { by: relay.to_owned(), position, status }
    }
}

impl RelayRecord {
    pub(crate) fn new(position: Revision) -> RelayRecord {
        RelayRecord { position }
    }
}

/// The key of what is said of a host.
pub(crate) fn host_key(host: &str) -> String {
    format!("{PREFIX}hosts/{host}")
}

/// The key of what a relay says of itself.
pub(crate) fn relay_key(relay: &str) -> String {
    format!("{PREFIX}relays/{relay}")
}

impl Peers {
    /// Takes over all that the store has.
    pub(crate) fn load(&mut self, snapshot: Snapshot, now: Instant) {
        *self = Peers::default();
        for record in snapshot.records {
            self.take(&record.key, Some(&record.value), record.revision, now);
        }
    }

    /// Takes over what the store's watch brings.
    pub(crate) fn follow(&mut self, events: Events, now: Instant) {
        for (key, value) in events.changes {
            self.take(&key, value.as_deref(), events.revision, now);
        }
    }

    /// Forgets relays that have been silent for long; gives their names.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<String> {
        let is_gone = |heard: &Instant| now.saturating_duration_since(*heard) > SILENCE;
        let gone: Vec<_> =
            self.relays.iter().filter(|(_, (_, heard))| is_gone(heard)).map(|(name, _)| name.clone()).collect();
        self.relays.retain(|name, _| !gone.contains(name));
        gone
    }

    /// Whether a relay has said something lately.
    pub(crate) fn knows(&self, relay: &str) -> bool {
        self.relays.contains_key(relay)
    }

    /// A host whose agent follows another relay. `changed` is the revision of the last change that concerns it, as far as is known here.
    pub(crate) fn host(&self, name: &str, changed: Revision) -> Option<HostStatus> {
        let (HostRecord { by, position, status }, _) = self.hosts.get(name)?;
        let position = self.relays.get(by)?.0.max(*position);
        let mut status = status.clone();
        // A relay that has begun later takes all that there was for one change.
        if status.applied >= status.changed {
            status.applied = status.applied.max(position.min(changed));
        }
        status.changed = status.changed.max(changed);
        status.relay = Some(by.clone());
        Some(status)
    }

    /// Whether the agent of a host follows a relay that has said so lately.
    pub(crate) fn is_connected(&self, host: &str) -> bool {
        let record = self.hosts.get(host).map(|(record, _)| record);
        record.is_some_and(|record| record.status.connected && self.relays.contains_key(&record.by))
    }

    /// Whether some relay speaks for a host.
    pub(crate) fn has_record(&self, host: &str) -> bool {
        self.hosts.contains_key(host)
    }

    /// The hosts for which a relay speaks, with the revisions of the records.
    pub(crate) fn records_of(&self, relay: &str) -> impl Iterator<Item = (&str, Revision)> {
        self.hosts.iter().filter(move |(_, (record, _))| record.by == relay).map(|(host, (_, at))| (host.as_str(), *at))
    }

    fn take(&mut self, key: &str, value: Option<&[u8]>, revision: Revision, now: Instant) {
        if let Some(name) = key.strip_prefix(&host_key("")) {
            match value.and_then(|value| serde_json::from_slice::<HostRecord>(value).ok()) {
                Some(record) => drop(self.hosts.insert(name.to_owned(), (record, revision))),
                None => drop(self.hosts.remove(name)),
            }
        } else if let Some(name) = key.strip_prefix(&relay_key("")) {
            match value.and_then(|value| serde_json::from_slice::<RelayRecord>(value).ok()) {
                Some(record) => drop(self.relays.insert(name.to_owned(), (record.position, now))),
                None => drop(self.relays.remove(name)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bifrost_intent::api::{HostProblem, ImpairedPeer, PathHealth};

    use super::*;

    fn status(changed: u64, applied: u64) -> HostStatus {
        HostStatus { name: "h1".into(), connected: true, changed, applied, ..HostStatus::default() }
    }

    fn put<T: Serialize>(key: String, value: &T) -> Events {
        Events { revision: 9, changes: vec![(key, Some(serde_json::to_vec(value).unwrap()))] }
    }

    #[test]
    fn a_host_has_what_its_relay_says() {
        let (mut peers, now) = (Peers::default(), Instant::now());
        let record = HostRecord::new("r1", 5, status(4, 4));
        peers.follow(put(host_key("h1"), &record), now);
        assert_eq!(peers.host("h1", 4), None, "nobody knows whether that relay is there");
        peers.follow(put(relay_key("r1"), &RelayRecord::new(5)), now);
        let host = peers.host("h1", 4).unwrap();
        assert_eq!((host.changed, host.applied, host.relay.as_deref()), (4, 4, Some("r1")));
        // Here it is known only that it has not changed after 7; its relay has not come so far, and then it has.
        assert_eq!(peers.host("h1", 7).unwrap().applied, 5);
        peers.follow(put(relay_key("r1"), &RelayRecord::new(8)), now);
        assert_eq!(peers.host("h1", 7).unwrap().applied, 7);
        // What it does not have yet counts.
        peers.follow(put(host_key("h1"), &HostRecord::new("r1", 9, status(9, 8))), now);
        peers.follow(put(relay_key("r1"), &RelayRecord::new(9)), now);
        assert_eq!(peers.host("h1", 9).unwrap().applied, 8);
    }

    #[test]
    fn a_relay_that_is_silent_is_gone_with_its_hosts() {
        let (mut peers, now) = (Peers::default(), Instant::now());
        for relay in ["r1", "r2"] {
            peers.follow(put(relay_key(relay), &RelayRecord::new(5)), now);
        }
        peers.follow(put(host_key("h1"), &HostRecord::new("r1", 5, status(4, 4))), now);
        let later = now + SILENCE;
        peers.follow(put(relay_key("r2"), &RelayRecord::new(5)), later);
        assert_eq!(peers.expire(later), Vec::<String>::new());
        let later = later + Duration::from_secs(1);
        assert_eq!(peers.expire(later), ["r1"]);
        assert_eq!((peers.host("h1", 4), peers.knows("r2")), (None, true));
        // Its agent has gone on to another.
        peers.follow(put(host_key("h1"), &HostRecord::new("r2", 5, status(4, 0))), later);
        assert_eq!(peers.host("h1", 4).unwrap().applied, 0);
        let gone = Events { revision: 9, changes: vec![(host_key("h1"), None)] };
        peers.follow(gone, later);
        assert_eq!(peers.host("h1", 4), None);
        // What is no record says nothing.
        peers.follow(Events { revision: 9, changes: vec![(relay_key("r2"), Some(b"{".to_vec()))] }, later);
        assert!(!peers.knows("r2"));
    }

    #[test]
    fn a_record_is_of_bounded_size() {
        let problem = HostProblem { kind: "port".into(), key: "p".into(), what: "x".repeat(1000) };
        let impaired = vec![ImpairedPeer { peer: "h".repeat(63), paths: 8, working: 1 }; 100];
        let paths = PathHealth { peers: 1000, impaired, more_impaired: 1 };
        let many = HostStatus { problems: vec![problem; 100], more_problems: 7, paths, ..status(4, 4) };
        let record = HostRecord::new("r1", 5, many);
        assert_eq!((record.status.problems.len(), record.status.more_problems), (10, 97));
        assert_eq!((record.status.paths.impaired.len(), record.status.paths.more_impaired), (10, 91));
        let text = serde_json::to_vec(&record).unwrap();
        assert!(text.len() < 14_000);
        assert_eq!(serde_json::from_slice::<HostRecord>(&text).unwrap(), record);
    }
}
