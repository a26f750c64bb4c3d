//! Where intent is kept: keys with values, changed by transactions, watched from any revision that is still known.
//!
//! A [`Store`] is one of two with the same meaning: embedded in one process, in memory or with a journal on disk; or etcd, for many.
//! Each transaction that changes something makes a revision of the whole store, higher than all before. A reader takes a
//! [`Snapshot`] and watches what comes after its revision; when a [`Watch`] tells [`WatchError::Compacted`], it takes another.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod embedded;
mod error;
mod etcd;
mod types;

use std::path::Path;

pub use error::{CommitError, StoreError, WatchError};
pub use etcd::{EtcdOptions, EtcdTls, EtcdUser};
pub use types::{Events, Record, Revision, Snapshot, Txn, Write, limits};

/// A store. Clones are the same store.
#[derive(Clone, Debug)]
pub struct Store(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Embedded(embedded::Embedded),
    Etcd(etcd::Etcd),
}

/// Changes under a prefix, in the order in which they were made. See [`Store::watch`].
#[derive(Debug)]
pub struct Watch(Watching);

#[derive(Debug)]
enum Watching {
    Embedded(embedded::Watch),
    Etcd(Box<etcd::Watch>),
}

impl Store {
    /// An empty store in memory, which ends with this process.
    pub fn memory() -> Store {
        Store(Kind::Embedded(embedded::Embedded::memory()))
    }

    /// The store of a directory, which is made if it is not there. What was committed outlives a crash of the host. When the last clone is
    /// dropped, others may open it.
    ///
    /// # Errors
    /// Another process has it open, it cannot be read or written, or it was damaged: then nothing of it is used.
    pub fn open(directory: impl AsRef<Path>) -> Result<Store, StoreError> {
        embedded::Embedded::open(directory.as_ref()).map(|embedded| Store(Kind::Embedded(embedded)))
    }

    /// A store in etcd, 3.6 or later, started with `--max-txn-ops=1025 --max-request-bytes=6291456`: it has to take the largest transaction
    /// of [`limits`].
    ///
    /// # Errors
    /// Nobody answers, or refuses; or the options make no sense.
    pub async fn etcd(options: EtcdOptions) -> Result<Store, StoreError> {
        etcd::Etcd::connect(options).await.map(|etcd| Store(Kind::Etcd(etcd)))
    }

    /// All keys that begin with `prefix` (all, if it is empty), in order, as of one revision. It is the newest: it has what was committed, by
    /// this or another process, before this was called.
    ///
    /// # Errors
    /// The store does not answer, or refuses.
    pub async fn snapshot(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        match &self.0 {
            Kind::Embedded(embedded) => Ok(embedded.snapshot(prefix)),
            Kind::Etcd(etcd) => etcd.snapshot(prefix).await,
        }
    }

    /// Makes all changes of a transaction if its keys were last changed as it expects, or none. Returns its revision; that of
    /// the store, if it changes nothing. Which is so when it only deletes what is not there: that is no conflict. When this returns, a
    /// store that is not in memory alone keeps it over crashes.
    ///
    /// A future that is dropped before it is ready may have committed.
    ///
    /// # Errors
    /// [`CommitError::Conflict`]: another was first; list again. [`CommitError::Unknown`]: it may have been made or not; read what it
    /// was to change. After all other errors nothing was changed.
    pub async fn commit(&self, txn: &Txn) -> Result<Revision, CommitError> {
        txn.check()?;
        match &self.0 {
            Kind::Embedded(embedded) => embedded.commit(txn).await,
            Kind::Etcd(etcd) => etcd.commit(txn).await,
        }
    }

    /// Tells what changes after revision `after` under a prefix. `after` is that of a [`Snapshot`] or of [`Events`]. If the store has no such
    /// revision, because it was restored from a backup, the watch tells [`WatchError::Compacted`].
    ///
    /// # Errors
    /// The store does not answer, or refuses.
    pub async fn watch(&self, prefix: &str, after: Revision) -> Result<Watch, StoreError> {
        match &self.0 {
            Kind::Embedded(embedded) => Ok(Watch(Watching::Embedded(embedded.watch(prefix, after)))),
            Kind::Etcd(etcd) => Ok(Watch(Watching::Etcd(Box::new(etcd.watch(prefix, after).await?)))),
        }
    }
}

impl Watch {
    /// Waits for the next revision with changes under the prefix. Nothing is left out, and nothing told twice, also if a future of this is
    /// dropped before it is ready.
    ///
    /// # Errors
    /// See [`WatchError`]. Each further call gives an error, too.
    pub async fn next(&mut self) -> Result<Events, WatchError> {
        match &mut self.0 {
            Watching::Embedded(watch) => watch.next().await,
            Watching::Etcd(watch) => watch.next().await,
        }
    }

    /// The revision up to which everything under the prefix was told.
    pub fn revision(&self) -> Revision {
        match &self.0 {
            Watching::Embedded(watch) => watch.revision(),
            Watching::Etcd(watch) => watch.revision(),
        }
    }
}
