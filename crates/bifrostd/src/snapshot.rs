//! Journal on disk of the objects that are not in the file, so that they survive a restart. `control::objects::journal`
//! defines the format.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use bifrost_control::objects::journal::{self, Loaded};
use bifrost_control::objects::{Objects, Plan};

/// The journal's name in the daemon's directory.
const NAME: &str = "objects.journal";
/// Maximum size of the journal, bytes.
const MAX_BYTES: u64 = 1 << 30;
/// The journal is compacted when it is longer than twice its length after the last compaction, plus this, bytes.
const SLACK: u64 = 4 << 20;

/// The journal; none if the daemon has no directory.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    file: Option<Open>,
}

#[derive(Debug)]
struct Open {
    path: PathBuf,
    file: File,
    len: u64,
    /// Its length after the last compaction, bytes.
    compact_len: u64,
}

impl Snapshot {
    /// Opens and reads the journal in a directory. A damaged journal is renamed, and an error logged.
    ///
    /// # Errors
    /// The file cannot be opened, read or written.
    pub(crate) fn open(directory: &Path, workers: usize) -> Result<(Snapshot, Objects)> {
        let path = directory.join(NAME);
        let doing = |what: &str| format!("{what} {}", path.display());
        let mut file = open(&path).with_context(|| doing("opening"))?;
        let mut bytes = Vec::new();
        (&file).take(MAX_BYTES + 1).read_to_end(&mut bytes).with_context(|| doing("reading"))?;
        if bytes.len() as u64 > MAX_BYTES {
            bail!("{} has more than {MAX_BYTES} bytes; move it elsewhere", path.display());
        }
        let loaded = match journal::read(&bytes, workers) {
            Ok(loaded) => loaded,
            Err(error) => {
                let aside = path.with_extension("journal.damaged");
                std::fs::rename(&path, &aside).with_context(|| doing("renaming"))?;
                tracing::error!(
                    "{}: {error}; renamed to {}; the daemon starts with only the objects of its file: apply the others \
                     again",
                    path.display(),
                    aside.display()
                );
                file = open(&path).with_context(|| doing("opening"))?;
                Loaded::default()
            }
        };
        for what in &loaded.not_understood {
            tracing::error!("{}: left out: {what}", path.display());
        }
        if (loaded.len as u64) < bytes.len() as u64 && loaded.len > 0 {
            tracing::warn!("{}: the last batch is incomplete, and is left out", path.display());
        }
        let mut open = Open { path, file, len: loaded.len as u64, compact_len: 0 };
        open.truncate().with_context(|| format!("writing {}", open.path.display()))?;
        let mut snapshot = Snapshot { file: Some(open) };
        snapshot.rewrite(&loaded.objects)?;
        Ok((snapshot, loaded.objects))
    }

    /// Saves the changes of a batch. When this returns, they survive a crash of the host.
    ///
    /// # Errors
    /// The journal cannot be written; then none of the changes is saved.
    pub(crate) fn append(&mut self, plan: &Plan) -> Result<()> {
        let changes = plan.changes().iter().map(|(id, entry)| (id, entry.as_ref()));
        let (Some(open), Some(line)) = (&mut self.file, journal::line(changes)) else { return Ok(()) };
        let written = open.file.write_all(line.as_bytes()).and_then(|()| open.file.sync_data());
        if let Err(error) = written {
            // Remove a partly written line.
            open.truncate().with_context(|| format!("truncating {}", open.path.display()))?;
            return Err(error).with_context(|| format!("writing {}", open.path.display()));
        }
        open.len += line.len() as u64;
        Ok(())
    }

    /// Compacts the journal if it has many replaced entries.
    pub(crate) fn compact(&mut self, objects: &Objects) {
        let due = self.file.as_ref().is_some_and(|open| open.len > open.compact_len * 2 + SLACK);
        if due && let Err(error) = self.rewrite(objects) {
            // The existing journal stays valid.
            tracing::error!("{error:#}");
        }
    }

    /// Replaces everything by these objects.
    ///
    /// # Errors
    /// The journal cannot be written; the existing one stays.
    pub(crate) fn rewrite(&mut self, objects: &Objects) -> Result<()> {
        let Some(former) = &mut self.file else { return Ok(()) };
        let path = former.path.clone();
        let next = path.with_extension("journal.next");
        let write = || -> std::io::Result<Open> {
            let file = open(&next)?;
            file.set_len(0)?;
            let mut buffered = std::io::BufWriter::new(&file);
            let mut len = 0;
            for piece in journal::whole(objects) {
                buffered.write_all(piece.as_bytes())?;
                len += piece.len() as u64;
            }
            buffered.flush()?;
            drop(buffered);
            file.sync_all()?;
            std::fs::rename(&next, &path)?;
            // The new name must survive a crash, too.
            path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())?;
            Ok(Open { path: path.clone(), file, len, compact_len: len })
        };
        *former = write().with_context(|| format!("writing {}", next.display()))?;
        Ok(())
    }
}

impl Open {
    /// Truncates the file to its complete lines.
    fn truncate(&mut self) -> std::io::Result<()> {
        self.file.set_len(self.len)?;
        self.file.seek(SeekFrom::Start(self.len)).map(drop)
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}
