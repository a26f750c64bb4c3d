//! The journal: what the store is, line by line.
//!
//! Each line is the CRC-32 (IEEE 802.3) of the rest in 8 hexadecimal digits, a space, and JSON. First comes a base: a `record` line
//! for each record, and a `base` line that ends it. Then a `commit` line for each transaction. A last line that is not whole was never
//! acknowledged, and is cut off; anything else that is not as written is an error.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufRead as _, BufReader, BufWriter, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Records;
use crate::{OpenError, Revision, Write};

const FILE: &str = "journal";
const NEW_FILE: &str = "journal.new";
const LOCK: &str = "lock";
/// The journal is written again when it is larger than this, bytes, and than so many times what it says.
const LEAST_REWRITE: u64 = 4 << 20;
const REWRITE_FACTOR: u64 = 4;
/// The longest line, bytes: the largest transaction, in hexadecimal digits.
const MAX_LINE: u64 = 4 << 30;

#[derive(Debug)]
pub(super) struct Journal {
    directory: PathBuf,
    file: File,
    bytes: u64,
    /// The file may have part of a line that was not acknowledged; nothing more can be written.
    is_broken: bool,
    /// Held as long as the store is open.
    _lock: File,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Line {
    Record { key: String, value: Bytes, revision: Revision },
    Base { revision: Revision, records: u64 },
    Commit { revision: Revision, writes: Vec<(String, Option<Bytes>)> },
}

/// Bytes as a text, which they mostly are; otherwise as hexadecimal digits.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Bytes {
    Text(String),
    Hex(String),
}

impl Bytes {
    fn of(bytes: &[u8]) -> Bytes {
        match std::str::from_utf8(bytes) {
            Ok(text) => Bytes::Text(text.to_owned()),
            Err(_) => Bytes::Hex(bytes.iter().map(|byte| format!("{byte:02x}")).collect()),
        }
    }

    fn bytes(self) -> Option<Vec<u8>> {
        match self {
            Bytes::Text(text) => Some(text.into_bytes()),
            Bytes::Hex(digits) => {
                let digit = |digit: u8| char::from(digit).to_digit(16).map(|digit| digit as u8);
                let byte = |pair: &[u8]| match *pair {
                    [high, low] => Some(digit(high)? << 4 | digit(low)?),
                    _ => None,
                };
                digits.as_bytes().chunks(2).map(byte).collect()
            }
        }
    }
}

impl Journal {
    /// Opens the journal of a directory, or begins one.
    pub(super) fn open(directory: &Path) -> Result<(Journal, Records), OpenError> {
        let failed = |what, path: &Path| {
            let path = path.to_owned();
            move |source| OpenError::Io { what, path, source }
        };
        std::fs::create_dir_all(directory).map_err(failed("cannot make the directory", directory))?;
        let lock_path = directory.join(LOCK);
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path);
        let lock = lock.map_err(failed("cannot open", &lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(OpenError::InUse),
            Err(TryLockError::Error(source)) => {
                return Err(OpenError::Io { what: "cannot lock", path: lock_path, source });
            }
        }
        let path = directory.join(FILE);
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let mut file = file.map_err(failed("cannot open", &path))?;
        let (records, good) = read(&path, &file)?;
        let length = file.metadata().map_err(failed("cannot look at", &path))?.len();
        if good < length {
            let cut = length - good;
            tracing::warn!(path = %path.display(), "the last {cut} bytes are part of a change that was never acknowledged; cut off");
            file.set_len(good).and_then(|()| file.sync_all()).map_err(failed("cannot cut", &path))?;
        }
        file.seek(SeekFrom::Start(good)).map_err(failed("cannot go to the end of", &path))?;
        let mut journal = Journal { directory: directory.to_owned(), file, bytes: good, is_broken: false, _lock: lock };
        if good == 0 {
            journal.rewrite(&records).map_err(failed("cannot write", &path))?;
        }
        Ok((journal, records))
    }

    /// Puts a transaction on disk. `before` is what there is without it.
    ///
    /// # Errors
    /// It is not on disk, and why.
    pub(super) fn append(&mut self, revision: Revision, writes: &[Write], before: &Records) -> Result<(), String> {
        if self.is_broken {
            self.rewrite(before).map_err(|e| format!("cannot write the store's file: {e}"))?;
        }
        let write = |write: &Write| match write {
            Write::Put { key, value } => (key.clone(), Some(Bytes::of(value))),
            Write::Delete { key } => (key.clone(), None),
        };
        let line = line(&Line::Commit { revision, writes: writes.iter().map(write).collect() });
        let written = line.and_then(|line| {
            self.file.write_all(&line)?;
            self.file.sync_data()?;
            Ok(line.len() as u64)
        });
        match written {
            Ok(bytes) => self.bytes += bytes,
            Err(error) => {
                // What of it is on disk is not known: it must not be there, because it is not acknowledged.
                self.is_broken = true;
                let again = self.rewrite(before);
                return Err(match again {
                    Ok(()) => format!("cannot write to the store's file: {error}"),
                    Err(again) => format!("cannot write to the store's file: {error}; nor write it again: {again}"),
                });
            }
        }
        if self.bytes > LEAST_REWRITE.max(before.bytes as u64 * REWRITE_FACTOR) {
            let mut after = before.clone();
            after.apply(revision, writes);
            if let Err(error) = self.rewrite(&after) {
                // The one there is has everything.
                tracing::warn!(%error, "cannot write the store's file again; it goes on growing");
            }
        }
        Ok(())
    }

    /// Writes a new file that says what there is, and puts it in place of the old one.
    fn rewrite(&mut self, records: &Records) -> io::Result<()> {
        let path = self.directory.join(NEW_FILE);
        let mut out = BufWriter::new(File::create(&path)?);
        let mut bytes = 0;
        let mut put = |out: &mut BufWriter<File>, said: &Line| {
            let line = line(said)?;
            bytes += line.len() as u64;
            out.write_all(&line)
        };
        for (key, (value, revision)) in &records.all {
            put(&mut out, &Line::Record { key: key.clone(), value: Bytes::of(value), revision: *revision })?;
        }
        put(&mut out, &Line::Base { revision: records.revision, records: records.all.len() as u64 })?;
        let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        std::fs::rename(&path, self.directory.join(FILE))?;
        File::open(&self.directory)?.sync_all()?;
        (self.file, self.bytes, self.is_broken) = (file, bytes, false);
        Ok(())
    }
}

fn line(said: &Line) -> io::Result<Vec<u8>> {
    let json = serde_json::to_string(said)?;
    Ok(format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes())).into_bytes())
}

/// Everything that a journal says, and how many bytes of it are whole lines.
fn read(path: &Path, file: &File) -> Result<(Records, u64), OpenError> {
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let mut records = Records::default();
    let (mut good, mut number, mut has_base) = (0, 0, false);
    let mut text = Vec::new();
    loop {
        number += 1;
        text.clear();
        let io = |source| OpenError::Io { what: "cannot read", path: path.to_owned(), source };
        let bytes = io::Read::take(&mut reader, MAX_LINE).read_until(b'\n', &mut text).map_err(io)?;
        if bytes == 0 {
            break;
        }
        let damaged = |what: &str| OpenError::Damaged { path: path.to_owned(), line: number, what: what.to_owned() };
        let is_last = reader.fill_buf().map_err(io)?.is_empty();
        let said = match parse(&text) {
            Ok(said) => said,
            // A line that was being written when the machine stopped.
            Err(_) if is_last && has_base => break,
            Err(what) => return Err(damaged(what)),
        };
        match said {
            Line::Record { key, value, revision } if !has_base => {
                let value = value.bytes().ok_or_else(|| damaged("has digits that are not hexadecimal"))?;
                records.put(&key, &value, revision);
            }
            Line::Base { revision, records: count } if !has_base && count == records.all.len() as u64 => {
                records.revision = revision;
                has_base = true;
            }
            Line::Commit { revision, writes } if has_base && revision == records.revision + 1 => {
                let write = |(key, value): (String, Option<Bytes>)| match value {
                    None => Some(Write::Delete { key }),
                    Some(value) => value.bytes().map(|value| Write::Put { key, value }),
                };
                let writes: Option<Vec<Write>> = writes.into_iter().map(write).collect();
                let writes = writes.ok_or_else(|| damaged("has digits that are not hexadecimal"))?;
                records.apply(revision, &writes);
            }
            _ => return Err(damaged("does not follow the line before it")),
        }
        good += bytes as u64;
    }
    if !has_base && good > 0 {
        // A base is put in place as a whole.
        let what = "the file ends before its base does".to_owned();
        return Err(OpenError::Damaged { path: path.to_owned(), line: number, what });
    }
    Ok((records, good))
}

fn parse(line: &[u8]) -> Result<Line, &'static str> {
    let line = line.strip_suffix(b"\n").ok_or("is not whole")?;
    let (checksum, json) = line.split_at_checked(9).ok_or("is not whole")?;
    let checksum = std::str::from_utf8(checksum).ok().and_then(|text| text.strip_suffix(' '));
    let checksum = checksum.and_then(|text| u32::from_str_radix(text, 16).ok()).ok_or("has no checksum")?;
    if crc32fast::hash(json) != checksum {
        return Err("its checksum is not that of its text");
    }
    serde_json::from_slice(json).map_err(|_| "is not of the store's format")
}
