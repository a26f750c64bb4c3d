//! The objects of other owners than the file, on disk: they outlive the daemon. What is written is in `control::objects::journal`.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use bifrost_control::objects::journal::{self, Loaded};
use bifrost_control::objects::{Entry, Id, Plan};
use std::collections::BTreeMap;

/// The file's name in the daemon's directory.
const NAME: &str = "objects.journal";
/// The largest file that is read, bytes.
const MAX_BYTES: u64 = 1 << 30;
/// The journal is written again, without what was replaced, when it has grown by its own length and this, bytes.
const SLACK: u64 = 4 << 20;

/// Where objects are kept; nowhere, if the daemon has no directory.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    file: Option<Open>,
}

#[derive(Debug)]
struct Open {
    path: PathBuf,
    file: File,
    len: u64,
    /// Its length when it had nothing that was replaced.
    whole: u64,
}

impl Snapshot {
    /// Opens the journal in a directory, and reads it. A damaged one is put aside, and told.
    ///
    /// # Errors
    /// The file cannot be opened, read or written.
    pub(crate) fn open(directory: &Path, workers: usize) -> Result<(Snapshot, BTreeMap<Id, Entry>)> {
        let path = directory.join(NAME);
        let doing = |what: &str| format!("{what} {}", path.display());
        let mut file = open(&path).with_context(|| doing("opening"))?;
        let mut bytes = Vec::new();
        (&file).take(MAX_BYTES + 1).read_to_end(&mut bytes).with_context(|| doing("reading"))?;
        if bytes.len() as u64 > MAX_BYTES {
            bail!("{} has more than {MAX_BYTES} bytes; move it away", path.display());
        }
        let loaded = match journal::read(&bytes, workers) {
            Ok(loaded) => loaded,
            Err(error) => {
                let aside = path.with_extension("journal.damaged");
                std::fs::rename(&path, &aside).with_context(|| doing("putting aside"))?;
                tracing::error!(
                    "{}: {error}; it is now {}, and the daemon starts with the objects of its file alone: have the \
                     others applied again",
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
            tracing::warn!("{}: its last batch was not written to the end, and is left out", path.display());
        }
        let mut open = Open { path, file, len: loaded.len as u64, whole: 0 };
        open.cut().with_context(|| format!("writing {}", open.path.display()))?;
        let mut snapshot = Snapshot { file: Some(open) };
        snapshot.rewrite(&loaded.objects)?;
        Ok((snapshot, loaded.objects))
    }

    /// Keeps what a batch changes. When this returns, it outlives a crash of the host.
    ///
    /// # Errors
    /// It cannot be written; then nothing of it is kept.
    pub(crate) fn append(&mut self, plan: &Plan) -> Result<()> {
        let changes = plan.changes().iter().map(|(id, entry)| (id, entry.as_ref()));
        let (Some(open), Some(line)) = (&mut self.file, journal::line(changes)) else { return Ok(()) };
        let written = open.file.write_all(line.as_bytes()).and_then(|()| open.file.sync_data());
        if let Err(error) = written {
            // The next line has to begin where this one did.
            open.cut().with_context(|| format!("cutting {}", open.path.display()))?;
            return Err(error).with_context(|| format!("writing {}", open.path.display()));
        }
        open.len += line.len() as u64;
        Ok(())
    }

    /// Writes the journal without what was replaced, if there is much of that.
    pub(crate) fn tidy(&mut self, objects: &BTreeMap<Id, Entry>) {
        let due = self.file.as_ref().is_some_and(|open| open.len > open.whole * 2 + SLACK);
        if due && let Err(error) = self.rewrite(objects) {
            // What there is stays good, only longer.
            tracing::error!("{error:#}");
        }
    }

    fn rewrite(&mut self, objects: &BTreeMap<Id, Entry>) -> Result<()> {
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
            // The name, too, has to outlive a crash.
            path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())?;
            Ok(Open { path: path.clone(), file, len, whole: len })
        };
        *former = write().with_context(|| format!("writing {}", next.display()))?;
        Ok(())
    }
}

impl Open {
    /// Cuts off what is not a whole line.
    fn cut(&mut self) -> std::io::Result<()> {
        self.file.set_len(self.len)?;
        self.file.seek(SeekFrom::Start(self.len)).map(drop)
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}
