//! Errors.

use std::path::PathBuf;

/// Why a store fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The transaction is invalid or exceeds a limit.
    #[error("{0}")]
    Invalid(String),
    /// A file cannot be read or written.
    #[error("{doing} {}: {why}", path.display())]
    Io {
        /// The operation, such as `reading`.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        why: String,
    },
    /// Another process has the directory open.
    #[error("{} is in use by another process, and only one may open it: stop the other one", .0.display())]
    InUse(PathBuf),
    /// A journal is damaged.
    #[error(
        "{} is damaged at byte {offset}: {what}. Restore it from a backup, or discard everything after that offset \
         (`truncate -s {offset} {}`)", path.display(), path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Offset of the damage, bytes.
        offset: u64,
        /// The damage.
        what: String,
    },
    /// A file is not a journal that this release reads.
    #[error("{}: {what}", path.display())]
    NotAJournal {
        /// The file.
        path: PathBuf,
        /// What the file is, and what to do.
        what: String,
    },
    /// The store was closed.
    #[error("the store was closed")]
    Closed,
    /// The store is full.
    #[error("the store is full ({bytes} of {} bytes): delete keys that are not needed", crate::limits::STORE_BYTES)]
    Full {
        /// Its size.
        bytes: usize,
    },
    /// No response. Nothing was changed.
    #[error("the store does not answer: {0}")]
    Unavailable(String),
    /// The store refuses: user, permission, quota.
    #[error("the store refuses: {0}")]
    Refused(String),
}

/// Why a transaction was not committed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The last change of a key was another revision than expected.
    #[error("{key:?} was changed by another transaction")]
    Conflict {
        /// The first such key of [`crate::Txn::expect`].
        key: String,
    },
    /// The store failed. Nothing was changed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The transaction may have been committed or not: read the keys that it was to change.
    #[error("it is not known whether the transaction was committed: {0}")]
    Unknown(String),
}

/// Why a watch ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WatchError {
    /// The next changes are no longer available, or the revision is not one of this store: take a snapshot, and watch
    /// from its revision.
    #[error("the changes after this revision are no longer available")]
    Compacted,
    /// The store is gone, or does not answer. Start the watch again from its last revision.
    #[error("the watch was lost: {0}")]
    Lost(StoreError),
}
