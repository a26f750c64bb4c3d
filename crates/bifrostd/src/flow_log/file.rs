//! Files with records.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

/// A file with one JSON object per line. After it was renamed or removed, for example by logrotate, a new one is
/// created.
pub(super) struct LogFile {
    pub(super) path: PathBuf,
    /// Size from which it is renamed; none: it may grow.
    most_bytes: Option<u64>,
    open: Option<(File, (u64, u64))>,
}

impl LogFile {
    pub(super) fn new(path: PathBuf, most_bytes: Option<u64>) -> LogFile {
        LogFile { path, most_bytes, open: None }
    }

    /// Appends lines.
    pub(super) fn write(&mut self, lines: impl ExactSizeIterator<Item: Serialize>) -> std::io::Result<()> {
        let mut text = Vec::with_capacity(lines.len() * 400);
        for line in lines {
            serde_json::to_writer(&mut text, &line)?;
            text.push(b'\n');
        }
        if self.most_bytes.is_some_and(|most| self.len().saturating_add(text.len() as u64) > most) {
            self.set_aside()?;
        }
        let there = identity(&self.path).ok();
        if self.open.as_ref().is_none_or(|(_, opened)| there != Some(*opened)) {
            let file = OpenOptions::new().create(true).append(true).mode(0o640).open(&self.path)?;
            let opened = file.metadata().map(|m| (m.dev(), m.ino()))?;
            self.open = Some((file, opened));
        }
        let written = self.open.as_mut().map_or(Ok(()), |(file, _)| file.write_all(&text));
        if written.is_err() {
            self.open = None;
        }
        written
    }

    /// Its size, bytes; 0: there is none.
    fn len(&self) -> u64 {
        std::fs::metadata(&self.path).map_or(0, |file| file.len())
    }

    /// Renames it, if it is not empty, to a name with `.1` at its end.
    fn set_aside(&mut self) -> std::io::Result<()> {
        self.open = None;
        if self.len() == 0 {
            return Ok(());
        }
        let mut aside = self.path.clone().into_os_string();
        aside.push(".1");
        std::fs::rename(&self.path, aside)
    }
}

fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|m| (m.dev(), m.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_full_is_set_aside() {
        let directory = std::env::temp_dir().join(format!("bifrostd-flow-log-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("flows.jsonl");
        let mut file = LogFile::new(path.clone(), Some(100));
        let read = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap_or_default();
        // A line of 30 bytes: quotes, and the end of the line.
        let mut write = |of: &str| file.write([of.repeat(27)].iter()).unwrap();
        ["a", "b", "c"].into_iter().for_each(&mut write);
        assert_eq!((read("flows.jsonl").len(), read("flows.jsonl.1").len()), (90, 0));
        write("d");
        assert_eq!((read("flows.jsonl").len(), read("flows.jsonl.1").len()), (30, 90));
        // Also what was written by a daemon before; and what is larger than a file is written all the same.
        let mut file = LogFile::new(path.clone(), Some(50));
        file.write(["e".repeat(200)].iter()).unwrap();
        assert_eq!((read("flows.jsonl").len(), read("flows.jsonl.1").len()), (203, 30));
        let mut unlimited = LogFile::new(path, None);
        unlimited.write(["f".repeat(1000)].iter()).unwrap();
        assert_eq!((read("flows.jsonl").len(), read("flows.jsonl.1").len()), (1206, 30));
        std::fs::remove_dir_all(directory).unwrap();
    }
}
