//! Where the objects of a network of many hosts are kept: keys and values with revisions, transactions, and watches.
//!
//! [`Store`] is one of several stores that behave alike: one in memory or in a directory, of one process ([`Store::memory`],
//! [`Store::open`]). The semantics are those of etcd: a revision counts the transactions of the whole store, a transaction
//! names what it expects of keys, and a watch brings all changes after a revision, those of a transaction together.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod embedded;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embedded::Embedded;

/// Counts the transactions of a store, from 1; 0: there was none.
pub type Revision = u64;

/// The longest key, bytes.
pub const MAX_KEY: usize = 1024;
/// The largest value, bytes.
pub const MAX_VALUE: usize = 1 << 20;
/// The most writes and expectations of a transaction.
pub const MAX_TXN: usize = 1024;

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// The revision of its last change.
    pub revision: Revision,
}

/// What a transaction does with a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// The key is to have this value.
    Put {
        /// The key.
        key: String,
        /// The value, at most [`MAX_VALUE`] bytes.
        value: Vec<u8>,
    },
    /// The key is to be gone; that it is gone already is no error.
    Delete {
        /// The key.
        key: String,
    },
}

impl Write {
    /// The key.
    pub fn key(&self) -> &str {
        match self {
            Write::Put { key, .. } | Write::Delete { key } => key,
        }
    }
}

/// Writes of which all are done, if everything is as expected, or none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Txn {
    /// Keys, and the revisions of their last changes; 0: the key is absent.
    pub expect: Vec<(String, Revision)>,
    /// What is written; each key once.
    pub writes: Vec<Write>,
}

/// Everything with a prefix, at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The revision.
    pub revision: Revision,
    /// The records, by key.
    pub records: Vec<Record>,
}

/// What a transaction has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Events {
    /// Its revision.
    pub revision: Revision,
    /// Keys with their values; none: gone.
    pub changes: Vec<(String, Option<Vec<u8>>)>,
}

/// Why a store is of no use now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StoreError(pub String);

/// Why a transaction was not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// Something is not as expected; nothing was written.
    #[error("{key} is not as expected")]
    Conflict {
        /// One of the keys that differ.
        key: String,
    },
    /// Nothing was written.
    #[error(transparent)]
    Store(StoreError),
    /// It may have been made, or not.
    #[error("it is not known whether the transaction was made: {0}")]
    Unknown(StoreError),
}

/// Why a watch has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WatchError {
    /// Changes after its revision are no longer kept: take a [`Snapshot`], and go on from there.
    #[error("changes that old are no longer kept")]
    Compacted,
    /// The store is lost.
    #[error(transparent)]
    Lost(StoreError),
}

/// A store. A clone is the same store.
#[derive(Clone, Debug)]
pub struct Store(Arc<Embedded>);

/// Changes after a revision, as they come.
#[derive(Debug)]
pub struct Watch(embedded::Watch);

impl Store {
    /// A store that is gone with the process.
    pub fn memory() -> Store {
        Store(Arc::new(Embedded::memory()))
    }

    /// A store in a directory, which is made if need be. A transaction is on disk when it is acknowledged.
    ///
    /// # Errors
    /// Another process has it open; the system refuses; or its file is damaged, and where.
    pub fn open(directory: impl AsRef<Path>) -> Result<Store, OpenError> {
        Ok(Store(Arc::new(Embedded::open(directory.as_ref())?)))
    }

    /// Everything with a prefix.
    ///
    /// # Errors
    /// The store is of no use now.
    pub async fn snapshot(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        Ok(self.0.snapshot(prefix))
    }

    /// Makes a transaction, and gives its revision.
    ///
    /// # Errors
    /// Something is not as expected, or the store is of no use now.
    pub async fn commit(&self, txn: &Txn) -> Result<Revision, CommitError> {
        check(txn).map_err(CommitError::Store)?;
        let (store, txn) = (Arc::clone(&self.0), txn.clone());
        // It waits for the disk.
        let made = tokio::task::spawn_blocking(move || store.commit(&txn)).await;
        made.unwrap_or_else(|e| Err(CommitError::Unknown(StoreError(e.to_string()))))
    }

    /// Follows changes of keys with a prefix, after a revision.
    ///
    /// # Errors
    /// The store is of no use now.
    pub async fn watch(&self, prefix: &str, after: Revision) -> Result<Watch, StoreError> {
        Ok(Watch(embedded::Watch::new(Arc::clone(&self.0), prefix, after)))
    }
}

impl Watch {
    /// The next transaction that has changed something.
    ///
    /// # Errors
    /// The watch has ended.
    pub async fn next(&mut self) -> Result<Events, WatchError> {
        self.0.next().await
    }
}

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it open.
    #[error("another process uses it; stop that one, or name another directory")]
    InUse,
    /// The file is not what was written.
    #[error("{}, line {line}: {what}; restore the file from a backup, or keep what is before that line: head -n {} ...", path.display(), line - 1)]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// The system refuses.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
}

/// That a transaction is within the limits, and makes sense.
fn check(txn: &Txn) -> Result<(), StoreError> {
    let count = txn.writes.len().max(txn.expect.len());
    if count > MAX_TXN {
        return Err(StoreError(format!("a transaction of {count} keys; at most {MAX_TXN} are possible")));
    }
    let mut seen = std::collections::HashSet::new();
    for write in &txn.writes {
        let key = write.key();
        if key.is_empty() || key.len() > MAX_KEY {
            return Err(StoreError(format!("a key of {} bytes; there are 1 to {MAX_KEY}", key.len())));
        }
        if !seen.insert(key) {
            return Err(StoreError(format!("{key} is written twice")));
        }
        match write {
            Write::Put { value, .. } if value.len() > MAX_VALUE => {
                return Err(StoreError(format!("{key}: {} bytes are more than {MAX_VALUE}", value.len())));
            }
            _ => {}
        }
    }
    Ok(())
}
