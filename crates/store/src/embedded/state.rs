//! Content of an embedded store: records, and the changes of recent revisions. No I/O.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use crate::limits;
use crate::{CommitError, Events, Record, Revision, Snapshot, StoreError, Txn, Write};

/// A key, and its new value.
pub(super) type Change = (Arc<str>, Option<Arc<[u8]>>);

/// The store's content.
#[derive(Debug, Default)]
pub(super) struct State {
    revision: Revision,
    records: BTreeMap<Arc<str>, Stored>,
    /// Size of the records.
    bytes: usize,
    /// One for each revision after `compacted`, without gaps.
    recent: VecDeque<Planned>,
    recent_bytes: usize,
    compacted: Revision,
}

/// A value.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) value: Arc<[u8]>,
    pub(super) revision: Revision,
}

/// A valid transaction.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    /// The revision that it creates; the current one, if it has no changes.
    pub(super) revision: Revision,
    /// In order of keys.
    pub(super) changes: Vec<Change>,
}

/// The effects of transactions that are planned but not yet applied.
#[derive(Debug)]
pub(super) struct Ahead {
    revision: Revision,
    bytes: usize,
    /// The last change of keys, and their counted size; 0 and 0: deleted.
    keys: HashMap<Arc<str>, (Revision, usize)>,
}

/// The next result of a watch.
pub(super) enum Next {
    Events(Events),
    /// Nothing up to this revision, the newest.
    Nothing(Revision),
    Compacted,
}

impl State {
    /// A store with these records, without history.
    pub(super) fn with(records: BTreeMap<Arc<str>, Stored>, revision: Revision) -> State {
        let bytes = records.iter().map(|(key, stored)| size(key, &stored.value)).sum();
        State { revision, records, bytes, compacted: revision, ..State::default() }
    }

    pub(super) fn revision(&self) -> Revision {
        self.revision
    }

    /// All records, sharing their values.
    pub(super) fn records(&self) -> &BTreeMap<Arc<str>, Stored> {
        &self.records
    }

    pub(super) fn snapshot(&self, prefix: &str) -> Snapshot {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let under = self.records.range::<str, _>(from).take_while(|(key, _)| key.starts_with(prefix));
        let record = |(key, stored): (&Arc<str>, &Stored)| Record {
            key: key.to_string(),
            value: stored.value.to_vec(),
            revision: stored.revision,
        };
        Snapshot { revision: self.revision, records: under.map(record).collect() }
    }

    pub(super) fn ahead(&self) -> Ahead {
        Ahead { revision: self.revision, bytes: self.bytes, keys: HashMap::new() }
    }

    /// Plans a transaction after those of `ahead`, to which it is added.
    pub(super) fn plan(&self, ahead: &mut Ahead, txn: &Txn) -> Result<Planned, CommitError> {
        for (key, expected) in &txn.expect {
            if self.last_change(ahead, key).0 != *expected {
                return Err(CommitError::Conflict { key: key.clone() });
            }
        }
        let mut bytes = ahead.bytes;
        let mut changes: Vec<(Change, usize)> = Vec::with_capacity(txn.writes.len());
        for write in &txn.writes {
            let (revision, before) = self.last_change(ahead, write.key());
            let (value, after) = match write {
                Write::Put { key, value } => (Some(Arc::from(value.as_slice())), size(key, value)),
                Write::Delete { .. } if revision == 0 => continue,
                Write::Delete { .. } => (None, 0),
            };
            bytes = bytes + after - before;
            changes.push(((Arc::from(write.key()), value), after));
        }
        // Deleting is always possible.
        if bytes > limits::STORE_BYTES && bytes > ahead.bytes {
            return Err(StoreError::Full { bytes: ahead.bytes }.into());
        }
        if changes.is_empty() {
            return Ok(Planned { revision: ahead.revision, changes: Vec::new() });
        }
        ahead.revision += 1;
        ahead.bytes = bytes;
        for ((key, value), after) in &changes {
            ahead.keys.insert(key.clone(), (value.as_ref().map_or(0, |_| ahead.revision), *after));
        }
        changes.sort_unstable_by(|((a, _), _), ((b, _), _)| a.cmp(b));
        Ok(Planned { revision: ahead.revision, changes: changes.into_iter().map(|(change, _)| change).collect() })
    }

    /// Applies a plan. Plans must be applied in their order.
    pub(super) fn apply(&mut self, planned: Planned) {
        if planned.changes.is_empty() {
            return;
        }
        debug_assert_eq!(planned.revision, self.revision + 1, "applied in the order of plans");
        self.revision = planned.revision;
        for (key, value) in &planned.changes {
            let before = match value {
                Some(value) => {
                    self.bytes += size(key, value);
                    let stored = Stored { value: value.clone(), revision: self.revision };
                    self.records.insert(key.clone(), stored)
                }
                None => self.records.remove(key),
            };
            self.bytes -= before.map_or(0, |before| size(key, &before.value));
        }
        self.recent_bytes += weight(&planned);
        self.recent.push_back(planned);
        while self.recent.len() > limits::RECENT_REVISIONS || self.recent_bytes > limits::RECENT_BYTES {
            let Some(oldest) = self.recent.pop_front() else { break };
            self.recent_bytes -= weight(&oldest);
            self.compacted = oldest.revision;
        }
    }

    /// The first changes after a revision under a prefix.
    pub(super) fn next(&self, prefix: &str, after: Revision) -> Next {
        if after < self.compacted || after > self.revision {
            return Next::Compacted;
        }
        // At most as many as there are revisions.
        let known = usize::try_from(after - self.compacted).unwrap_or(usize::MAX);
        for planned in self.recent.iter().skip(known) {
            let from = planned.changes.partition_point(|(key, _)| **key < *prefix);
            let under =
                planned.changes.get(from..).unwrap_or_default().iter().take_while(|(key, _)| key.starts_with(prefix));
            let changes: Vec<_> =
                under.map(|(key, value)| (key.to_string(), value.as_ref().map(|v| v.to_vec()))).collect();
            if !changes.is_empty() {
                return Next::Events(Events { revision: planned.revision, changes });
            }
        }
        Next::Nothing(self.revision)
    }

    fn last_change(&self, ahead: &Ahead, key: &str) -> (Revision, usize) {
        ahead.keys.get(key).copied().unwrap_or_else(|| {
            self.records.get(key).map_or((0, 0), |stored| (stored.revision, size(key, &stored.value)))
        })
    }
}

fn size(key: &str, value: &[u8]) -> usize {
    key.len() + value.len() + limits::RECORD_OVERHEAD
}

fn weight(planned: &Planned) -> usize {
    planned.changes.iter().map(|(key, value)| size(key, value.as_deref().unwrap_or_default())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(state: &mut State, key: &str, value: &[u8]) -> Result<Revision, CommitError> {
        let writes = vec![Write::Put { key: key.into(), value: value.to_vec() }];
        let planned = state.plan(&mut state.ahead(), &Txn { expect: vec![], writes })?;
        let revision = planned.revision;
        state.apply(planned);
        Ok(revision)
    }

    #[test]
    fn history_for_watches_is_bounded_in_number_and_bytes() {
        let mut state = State::default();
        for i in 0..limits::RECENT_REVISIONS + 5 {
            put(&mut state, "k", &[0; 8]).unwrap();
            assert_eq!(state.recent.len(), (i + 1).min(limits::RECENT_REVISIONS));
        }
        assert!(matches!(state.next("", 4), Next::Compacted));
        assert!(matches!(state.next("", 5), Next::Events(Events { revision: 6, .. })));
        for _ in 0..100 {
            put(&mut state, "k", &vec![0; limits::VALUE_BYTES]).unwrap();
            assert!(state.recent_bytes <= limits::RECENT_BYTES);
        }
        assert!(state.recent.len() < 64, "{}", state.recent.len());
        assert_eq!(state.recent_bytes, state.recent.iter().map(weight).sum::<usize>());
    }

    #[test]
    fn a_full_store_accepts_deletions_and_smaller_values() {
        let mut state = State { bytes: limits::STORE_BYTES - 1000, ..State::default() };
        put(&mut state, "a", &[0; 500]).unwrap();
        assert!(matches!(put(&mut state, "b", &[0; 500]), Err(CommitError::Store(StoreError::Full { .. }))));
        put(&mut state, "a", &[0; 400]).unwrap();
        let writes = vec![Write::Delete { key: "a".into() }];
        let planned = state.plan(&mut state.ahead(), &Txn { expect: vec![], writes }).unwrap();
        state.apply(planned);
        assert_eq!(state.bytes, limits::STORE_BYTES - 1000);
        put(&mut state, "b", &[0; 500]).unwrap();
    }

    #[test]
    fn plans_see_earlier_plans() {
        let mut state = State::default();
        let mut ahead = state.ahead();
        let txn = |expect: Revision, write: Write| Txn { expect: vec![("k".into(), expect)], writes: vec![write] };
        let value = Write::Put { key: "k".into(), value: vec![1] };
        let one = state.plan(&mut ahead, &txn(0, value.clone())).unwrap();
        assert!(matches!(state.plan(&mut ahead, &txn(0, value.clone())), Err(CommitError::Conflict { .. })));
        let two = state.plan(&mut ahead, &txn(1, Write::Delete { key: "k".into() })).unwrap();
        let nothing = state.plan(&mut ahead, &txn(0, Write::Delete { key: "k".into() })).unwrap();
        let three = state.plan(&mut ahead, &txn(0, value)).unwrap();
        assert_eq!([&one, &two, &nothing, &three].map(|p| p.revision), [1, 2, 2, 3]);
        for planned in [one, two, nothing, three] {
            state.apply(planned);
        }
        assert_eq!((state.revision, state.bytes, ahead.bytes), (3, size("k", &[1]), size("k", &[1])));
    }
}
