//! What can go wrong.

use std::path::PathBuf;

/// Why a store does not do what it is told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// It is beyond a limit, or not a transaction.
    #[error("{0}")]
    Invalid(String),
    /// A file cannot be read or written.
    #[error("{doing} {}: {why}", path.display())]
    Io {
        /// What was being done, such as `reading`.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        why: String,
    },
    /// Another process has the directory open.
    #[error("{} is in use by another process, and only one can have it open: stop that one", .0.display())]
    InUse(PathBuf),
    /// A journal is not what was written.
    #[error(
        "{} is damaged at byte {offset}: {what}. Restore it from a backup, or give up what follows there \
         (`truncate -s {offset} {}`)", path.display(), path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where what cannot be read begins, bytes.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// A file is not a journal that this release reads.
    #[error("{}: {what}", path.display())]
    NotAJournal {
        /// The file.
        path: PathBuf,
        /// What it is, and what to do.
        what: String,
    },
    /// It was closed.
    #[error("the store was closed")]
    Closed,
    /// There is no room.
    #[error("the store has {bytes} bytes and takes at most {}: delete what is not needed", crate::limits::STORE_BYTES)]
    Full {
        /// What it has.
        bytes: usize,
    },
    /// Nobody answers. Nothing was changed.
    #[error("the store does not answer: {0}")]
    Unavailable(String),
    /// The store says no: user, permission, quota.
    #[error("the store refuses: {0}")]
    Refused(String),
}

/// Why a transaction was not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// A key was last changed by another revision than expected.
    #[error("{key:?} was changed by another")]
    Conflict {
        /// The first such key of [`crate::Txn::expect`].
        key: String,
    },
    /// The store does not do it. Nothing was changed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It may have been made, or not: read what it was to change.
    #[error("whether the transaction was made is not known: {0}")]
    Unknown(String),
}

/// Why a watch ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WatchError {
    /// What came next is not known any more, or the revision is not one of this store: take a snapshot, and watch from its revision.
    #[error("what changed after this revision is not known any more")]
    Compacted,
    /// The store is gone, or does not answer. The watch may be begun again from its last revision.
    #[error("the watch was lost: {0}")]
    Lost(StoreError),
}
