//! The store of the desired state: keys with values, changed by transactions, watched from any revision that is still
//! known.
//!
//! A [`Store`] has one of two implementations with the same semantics: embedded in one process, in memory or with a
//! journal on disk; or etcd, shared by many processes. Each transaction that changes something creates a revision of
//! the whole store, higher than all before. A reader takes a [`Snapshot`] and watches the changes after its revision;
//! when a [`Watch`] reports [`WatchError::Compacted`], it takes another.

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

    /// The store in a directory, which is created if necessary. Committed changes survive a crash of the host. When the
    /// last clone is dropped, others may open it.
    ///
    /// # Errors
    /// Another process has it open; it cannot be read or written; or it is damaged: then nothing of it is used.
    pub fn open(directory: impl AsRef<Path>) -> Result<Store, StoreError> {
        embedded::Embedded::open(directory.as_ref()).map(|embedded| Store(Kind::Embedded(embedded)))
    }

    /// A store in etcd, 3.6 or later, started with `--max-txn-ops=1025 --max-request-bytes=6291456`: it must accept the
    /// largest transaction of [`limits`].
    ///
    /// # Errors
    /// No response, or a refusal; or the options are invalid.
    pub async fn etcd(options: EtcdOptions) -> Result<Store, StoreError> {
        etcd::Etcd::connect(options).await.map(|etcd| Store(Kind::Etcd(etcd)))
    }

    /// All keys with `prefix` (all keys, if it is empty), in order, as of one revision. That revision includes
    /// everything committed, by this or another process, before the call.
    ///
    /// # Errors
    /// The store does not answer, or refuses.
    pub async fn snapshot(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        match &self.0 {
            Kind::Embedded(embedded) => Ok(embedded.snapshot(prefix)),
            Kind::Etcd(etcd) => etcd.snapshot(prefix).await,
        }
    }

    /// Makes all changes of a transaction if the last changes of its keys were the expected ones; otherwise none.
    /// Returns its revision; the current one, if it changes nothing. A transaction that only deletes keys that do not
    /// exist changes nothing, and is not a conflict. When this returns, the changes survive crashes, except in a store
    /// in memory only.
    ///
    /// A future that is dropped before it is ready may have committed.
    ///
    /// # Errors
    /// [`CommitError::Conflict`]: another transaction was first; list again. [`CommitError::Unknown`]: it may have been
    /// committed or not; read the keys that it was to change. After any other error nothing was changed.
    pub async fn commit(&self, txn: &Txn) -> Result<Revision, CommitError> {
        txn.check()?;
        match &self.0 {
            Kind::Embedded(embedded) => embedded.commit(txn).await,
            Kind::Etcd(etcd) => etcd.commit(txn).await,
        }
    }

    /// Reports changes after revision `after` under a prefix. `after` is that of a [`Snapshot`] or of [`Events`]. If
    /// the store does not have that revision, because it was restored from a backup, the watch reports
    /// [`WatchError::Compacted`].
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
    /// Waits for the next revision with changes under the prefix. Nothing is omitted or reported twice, even if a
    /// future of this is dropped before it is ready.
    ///
    /// # Errors
    /// See [`WatchError`]. Each further call returns an error, too.
    pub async fn next(&mut self) -> Result<Events, WatchError> {
        match &mut self.0 {
            Watching::Embedded(watch) => watch.next().await,
            Watching::Etcd(watch) => watch.next().await,
        }
    }

    /// The revision up to which all changes under the prefix were reported.
    pub fn revision(&self) -> Revision {
        match &self.0 {
            Watching::Embedded(watch) => watch.revision(),
            Watching::Etcd(watch) => watch.revision(),
        }
    }
}
