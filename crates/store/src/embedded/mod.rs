//! A store of one process: everything in memory, and a journal on disk if there is a directory.

mod journal;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use crate::{CommitError, Events, OpenError, Record, Revision, Snapshot, StoreError, Txn, WatchError, Write};
use journal::Journal;

/// How many transactions are kept for watches that come back, and how many bytes of them.
const KEPT_TRANSACTIONS: usize = 10_000;
const KEPT_BYTES: usize = 64 << 20;

#[derive(Debug)]
pub(crate) struct Embedded {
    state: Mutex<State>,
    revision: watch::Sender<Revision>,
}

/// What there is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Records {
    pub(crate) revision: Revision,
    pub(crate) all: BTreeMap<String, (Arc<[u8]>, Revision)>,
    /// How many bytes keys and values are.
    pub(crate) bytes: usize,
}

#[derive(Debug, Default)]
struct State {
    records: Records,
    /// The last transactions, in order.
    kept: VecDeque<Arc<Kept>>,
    kept_bytes: usize,
    journal: Option<Journal>,
}

/// A transaction that was made.
#[derive(Debug)]
struct Kept {
    revision: Revision,
    changes: Vec<(String, Option<Arc<[u8]>>)>,
    bytes: usize,
}

impl Records {
    pub(crate) fn apply(&mut self, revision: Revision, writes: &[Write]) {
        self.revision = revision;
        for write in writes {
            match write {
                Write::Put { key, value } => self.put(key, value, revision),
                Write::Delete { key } => {
                    if let Some((value, _)) = self.all.remove(key) {
                        self.bytes -= key.len() + value.len();
                    }
                }
            }
        }
    }

    pub(crate) fn put(&mut self, key: &str, value: &[u8], revision: Revision) {
        self.bytes += key.len() + value.len();
        if let Some((before, _)) = self.all.insert(key.to_owned(), (value.into(), revision)) {
            self.bytes -= key.len() + before.len();
        }
    }
}

impl Embedded {
    pub(crate) fn memory() -> Embedded {
        Embedded::with(State::default())
    }

    pub(crate) fn open(directory: &Path) -> Result<Embedded, OpenError> {
        let (journal, records) = Journal::open(directory)?;
        Ok(Embedded::with(State { records, journal: Some(journal), ..State::default() }))
    }

    fn with(state: State) -> Embedded {
        let (revision, _) = watch::channel(state.records.revision);
        Embedded { state: Mutex::new(state), revision }
    }

    pub(crate) fn snapshot(&self, prefix: &str) -> Snapshot {
        let records = {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let with_prefix =
                state.records.all.range(prefix.to_owned()..).take_while(|(key, _)| key.starts_with(prefix));
            let all: Vec<_> = with_prefix.map(|(key, value)| (key.clone(), value.clone())).collect();
            (state.records.revision, all)
        };
        // Copied without the lock.
        let record =
            |(key, (value, revision)): (String, (Arc<[u8]>, Revision))| Record { key, value: value.to_vec(), revision };
        Snapshot { revision: records.0, records: records.1.into_iter().map(record).collect() }
    }

    /// Waits for the disk.
    pub(crate) fn commit(&self, txn: &Txn) -> Result<Revision, CommitError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_not = |(key, expected): &&(String, Revision)| {
            state.records.all.get(key).map_or(0, |(_, revision)| *revision) != *expected
        };
        if let Some((key, _)) = txn.expect.iter().find(is_not) {
            return Err(CommitError::Conflict { key: key.clone() });
        }
        let revision = state.records.revision + 1;
        let State { journal, records, .. } = &mut *state;
        if let Some(journal) = journal {
            journal.append(revision, &txn.writes, records).map_err(|e| CommitError::Store(StoreError(e)))?;
        }
        state.records.apply(revision, &txn.writes);
        state.keep(revision, &txn.writes);
        drop(state);
        self.revision.send_replace(revision);
        Ok(revision)
    }
}

impl State {
    fn keep(&mut self, revision: Revision, writes: &[Write]) {
        let change = |write: &Write| match write {
            Write::Put { key, value } => (key.clone(), Some(Arc::from(&**value))),
            Write::Delete { key } => (key.clone(), None),
        };
        let changes: Vec<(String, Option<Arc<[u8]>>)> = writes.iter().map(change).collect();
        let bytes = changes.iter().map(|(key, value)| key.len() + value.as_ref().map_or(0, |value| value.len())).sum();
        self.kept.push_back(Arc::new(Kept { revision, changes, bytes }));
        self.kept_bytes += bytes;
        while self.kept.len() > KEPT_TRANSACTIONS || self.kept_bytes > KEPT_BYTES && self.kept.len() > 1 {
            self.kept_bytes -= self.kept.pop_front().map_or(0, |kept| kept.bytes);
        }
    }
}

/// Changes after a revision.
#[derive(Debug)]
pub(crate) struct Watch {
    store: Arc<Embedded>,
    prefix: String,
    after: Revision,
    news: watch::Receiver<Revision>,
}

impl Watch {
    pub(crate) fn new(store: Arc<Embedded>, prefix: &str, after: Revision) -> Watch {
        let news = store.revision.subscribe();
        Watch { store, prefix: prefix.to_owned(), after, news }
    }

    pub(crate) async fn next(&mut self) -> Result<Events, WatchError> {
        loop {
            // Marked as seen before the look, so that nothing is missed in between.
            self.news.borrow_and_update();
            while let Some(kept) = self.one()? {
                self.after = kept.revision;
                let wanted = kept.changes.iter().filter(|(key, _)| key.starts_with(&self.prefix));
                let changes: Vec<_> =
                    wanted.map(|(key, value)| (key.clone(), value.as_ref().map(|value| value.to_vec()))).collect();
                if !changes.is_empty() {
                    return Ok(Events { revision: kept.revision, changes });
                }
            }
            if self.news.changed().await.is_err() {
                return Err(WatchError::Lost(StoreError("the store was closed".to_owned())));
            }
        }
    }

    /// The first transaction after the last one that was looked at.
    fn one(&self) -> Result<Option<Arc<Kept>>, WatchError> {
        let state = self.store.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.after >= state.records.revision {
            return Ok(None);
        }
        // Revisions are without gaps.
        let first = state.records.revision + 1 - state.kept.len() as u64;
        match (self.after + 1).checked_sub(first) {
            None => Err(WatchError::Compacted),
            Some(at) => Ok(state.kept.get(at as usize).cloned()),
        }
    }
}
