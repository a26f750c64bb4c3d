//! The journal on disk.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::journal::{self, JournalError, Loaded};
use super::state::State;
use crate::{CommitError, StoreError};

/// The journal's name in the directory.
const NAME: &str = "journal";
/// File that a process locks while it has the directory open. The journal itself is replaced from time to time.
const LOCK: &str = "lock";
/// The journal is compacted when it is this many times as long as its live records, plus [`SLACK`].
const TIMES: u64 = 3;
/// Bytes.
const SLACK: u64 = 4 << 20;

/// An open journal.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
    len: u64,
    /// Its length when it was last compacted or checked.
    whole: u64,
    /// Why nothing more can be written.
    broken: Option<String>,
    _lock: File,
}

impl Journal {
    /// Opens the journal of a directory, and reads it.
    pub(super) fn open(directory: &Path) -> Result<(Journal, State), StoreError> {
        std::fs::create_dir_all(directory).map_err(failed("making", directory))?;
        let lock_path = directory.join(LOCK);
        let lock = open(&lock_path).map_err(failed("opening", &lock_path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(StoreError::InUse(directory.to_owned())),
            Err(error) => return Err(failed("locking", &lock_path)(error.into())),
        }
        let path = directory.join(NAME);
        let file = open(&path).map_err(failed("opening", &path))?;
        let len = file.metadata().map_err(failed("reading", &path))?.len();
        let Loaded { state, len: whole_frames } =
            journal::read(BufReader::new(&file), len).map_err(|e| told(e, &path))?;
        let mut journal = Journal { path, file, len: whole_frames, whole: whole_frames, broken: None, _lock: lock };
        if whole_frames < len && whole_frames > 0 {
            let path = journal.path.display();
            tracing::warn!("{path}: removing an incomplete write after a host crash: {} bytes", len - whole_frames);
        }
        if whole_frames < len {
            journal.cut().map_err(failed("cutting", &journal.path))?;
        }
        if journal.len == 0 {
            journal.rewrite(&state)?;
        }
        // The rest of a compaction interrupted by a crash.
        let _ = std::fs::remove_file(journal.next());
        Ok((journal, state))
    }

    /// Appends a frame. When this returns, the frame survives a crash of the host.
    pub(super) fn append(&mut self, frame: &[u8]) -> Result<(), CommitError> {
        if let Some(why) = &self.broken {
            return Err(StoreError::Unavailable(why.clone()).into());
        }
        let Err(error) = self.file.write_all(frame).and_then(|()| self.file.sync_data()) else {
            self.len += frame.len() as u64;
            return Ok(());
        };
        // The next frame must start where this one did, and this one must not exist after a crash.
        if let Err(cut) = self.cut() {
            let why = format!("{}: writing failed ({error}), then truncating ({cut}): restart", self.path.display());
            self.broken = Some(why.clone());
            return Err(CommitError::Unknown(why));
        }
        Err(failed("writing", &self.path)(error).into())
    }

    /// Whether much of the journal is outdated.
    pub(super) fn is_rewriting_due(&self) -> bool {
        self.broken.is_none() && self.len > self.whole * TIMES + SLACK
    }

    /// Rewrites the journal with only these records.
    pub(super) fn rewrite(&mut self, state: &State) -> Result<(), StoreError> {
        let next = self.next();
        let write = || -> io::Result<(File, u64)> {
            let file = open(&next)?;
            file.set_len(0)?;
            let mut buffered = BufWriter::new(&file);
            let mut len = 0;
            for piece in journal::whole(state.records(), state.revision()) {
                buffered.write_all(&piece)?;
                len += piece.len() as u64;
            }
            buffered.flush()?;
            drop(buffered);
            file.sync_all()?;
            std::fs::rename(&next, &self.path)?;
            Ok((file, len))
        };
        let (file, len) = write().map_err(failed("writing", &next))?;
        (self.file, self.len, self.whole) = (file, len, len);
        // The rename must survive a crash, too. Until it does, a crash would bring back the old file, which lacks later
        // frames.
        let parent = self.path.parent().unwrap_or_else(|| Path::new("."));
        File::open(parent).and_then(|directory| directory.sync_all()).map_err(|source| {
            self.broken = Some(format!("{}: its rename may not be on disk: restart", self.path.display()));
            failed("writing", parent)(source)
        })
    }

    /// Compaction failed: it is tried again when the journal has grown.
    pub(super) fn put_off(&mut self) {
        self.whole = self.len;
    }

    fn next(&self) -> PathBuf {
        self.path.with_extension("next")
    }

    /// Truncates the file after the last complete frame.
    fn cut(&mut self) -> io::Result<()> {
        self.file.set_len(self.len)?;
        self.file.seek(SeekFrom::Start(self.len))?;
        self.file.sync_all()
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn failed(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> StoreError {
    let path = path.to_owned();
    move |error| StoreError::Io { doing, path: path.clone(), why: error.to_string() }
}

fn told(error: JournalError, path: &Path) -> StoreError {
    let path = path.to_owned();
    match error {
        JournalError::Io(error) => StoreError::Io { doing: "reading", path, why: error.to_string() },
        JournalError::NotAJournal(what) => StoreError::NotAJournal { path, what },
        JournalError::Damaged { offset, what } => StoreError::Damaged { path, offset, what },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_journal_is_compacted_and_a_second_process_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (mut journal, state) = Journal::open(directory.path()).unwrap();
        assert!(matches!(Journal::open(directory.path()), Err(StoreError::InUse(_))));
        assert!(!journal.is_rewriting_due());
        journal.len += TIMES * journal.whole + SLACK;
        assert!(journal.is_rewriting_due());
        journal.put_off();
        assert!(!journal.is_rewriting_due());
        journal.rewrite(&state).unwrap();
        assert!(!journal.is_rewriting_due());
        assert_eq!(journal.len, journal::HEADER.len() as u64);
        drop(journal);
        Journal::open(directory.path()).unwrap();
    }

    #[test]
    fn a_failed_write_is_truncated() {
        let directory = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(directory.path()).unwrap();
        // A read-only file: neither writing nor truncating works.
        let good = std::mem::replace(&mut journal.file, File::open(directory.path().join(NAME)).unwrap());
        assert!(matches!(journal.append(b"frame"), Err(CommitError::Unknown(_))));
        assert!(matches!(journal.append(b"frame"), Err(CommitError::Store(StoreError::Unavailable(_)))));
        journal.file = good;
        assert!(
            matches!(journal.append(b"frame"), Err(CommitError::Store(StoreError::Unavailable(_)))),
            "until it is reopened"
        );
    }
}
