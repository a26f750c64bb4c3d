//! The journal, which makes objects persistent: a text file to which every batch appends a line with a checksum.
//!
//! The first line is [`HEADER`]. Each further line is the CRC-32 (IEEE 802.3) of the rest of the line in 8 hexadecimal
//! digits, a space, and a batch: a JSON list of `Record`s. Applying the batches in order yields the objects. A last
//! line without a line end was being written when the host went down, and is ignored.

use serde::{Deserialize, Serialize};

use super::store::{Entry, Id, Objects};
use crate::config::{Kind, Object};

/// The first line: the name and the version of the format.
pub const HEADER: &str = "bifrost-objects 1\n";
/// Prefix of the first line in all versions.
const NAME: &str = "bifrost-objects ";
/// Maximum number of records in a line that [`whole`] writes.
const PER_LINE: usize = 1000;

/// A change of one object.
#[derive(Serialize, Deserialize)]
struct Record {
    kind: String,
    key: String,
    #[serde(default)]
    owner: String,
    #[serde(default)]
    generation: u64,
    #[serde(default)]
    changed_ms: u64,
    /// None: the object was deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    spec: Option<serde_json::Value>,
}

/// Why a journal cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// It does not begin with the name of the format.
    #[error("it does not begin with {:?}: it is not a journal of objects", HEADER.trim_end())]
    NotAJournal,
    /// It has another version of the format.
    #[error("its format is version {0}, and this release reads version 1")]
    Version(String),
    /// A line is damaged.
    #[error("line {0} is damaged: its checksum or text is wrong")]
    Damaged(usize),
}

/// The contents of a journal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loaded {
    /// The objects.
    pub objects: Objects,
    /// Length of all complete lines, bytes: truncate the file to it.
    pub len: usize,
    /// Records that this release does not understand, with reasons. They are left out.
    pub not_understood: Vec<String>,
}

/// The line of a batch; none if it changes nothing.
pub fn line<'a>(changes: impl Iterator<Item = (&'a Id, Option<&'a Entry>)>) -> Option<String> {
    let record = |(id, entry): (&Id, Option<&Entry>)| Record {
        kind: id.kind.name().to_owned(),
        key: id.key.clone(),
        owner: entry.map(|e| e.owner.clone()).unwrap_or_default(),
        generation: entry.map_or(0, |e| e.generation),
        changed_ms: entry.map_or(0, |e| e.changed_ms),
        spec: entry.map(|e| e.object.spec()),
    };
    let records: Vec<Record> = changes.map(record).collect();
    // Serializing strings and numbers does not fail.
    let text = serde_json::to_string(&records).ok().filter(|_| !records.is_empty())?;
    Some(format!("{:08x} {text}\n", crc32fast::hash(text.as_bytes())))
}

/// The lines of a compact journal with only these objects.
pub fn whole(objects: &Objects) -> impl Iterator<Item = String> {
    let mut rest = objects.iter().map(|(id, entry)| (id, Some(entry)));
    let lines = std::iter::from_fn(move || line(rest.by_ref().take(PER_LINE)));
    std::iter::once(HEADER.to_owned()).chain(lines)
}

/// Reads a journal. `workers` is the host's number of workers, as for [`Object::parse`].
///
/// # Errors
/// It is not a journal, or was damaged after it was written. None of it may be used then.
pub fn read(bytes: &[u8], workers: usize) -> Result<Loaded, JournalError> {
    let mut loaded = Loaded::default();
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').take_while(|line| line.ends_with(b"\n"));
    match lines.next() {
        // Not even the header was written completely.
        None if HEADER.as_bytes().starts_with(bytes) => return Ok(loaded),
        Some(line) if line == HEADER.as_bytes() => loaded.len = line.len(),
        Some(line) => {
            let version = line.strip_prefix(NAME.as_bytes()).map(|v| String::from_utf8_lossy(v).trim().to_owned());
            return Err(version.map_or(JournalError::NotAJournal, JournalError::Version));
        }
        None => return Err(JournalError::NotAJournal),
    }
    for (number, line) in (2..).zip(lines) {
        let records = batch(line).ok_or(JournalError::Damaged(number))?;
        records.into_iter().for_each(|record| add(&mut loaded, record, workers));
        loaded.len += line.len();
    }
    Ok(loaded)
}

/// The records of a line, if its checksum matches.
fn batch(line: &[u8]) -> Option<Vec<Record>> {
    let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let (crc, text) = line.split_once(' ')?;
    let is_good = crc.len() == 8 && u32::from_str_radix(crc, 16).ok() == Some(crc32fast::hash(text.as_bytes()));
    serde_json::from_str(text).ok().filter(|_| is_good)
}

fn add(loaded: &mut Loaded, record: Record, workers: usize) {
    let Record { kind, key, owner, generation, changed_ms, spec } = record;
    let Some(known) = Kind::of_name(&kind) else {
        return loaded.not_understood.push(format!("{kind} {key:?}: unknown kind"));
    };
    let id = Id { kind: known, key };
    let Some(spec) = spec else { return drop(loaded.objects.remove(&id)) };
    match Object::parse(known, &spec, workers) {
        Ok(object) if Id::of(&object) == id => {
            loaded.objects.insert(id, Entry { owner, generation, changed_ms, object });
        }
        Ok(object) => loaded.not_understood.push(format!("{id}: the spec belongs to {:?}", object.key())),
        Err(errors) => {
            // The earlier version is no longer what the owner wants.
            loaded.objects.remove(&id);
            let errors = errors.iter().map(|e| format!("{}: {}", e.field, e.message));
            loaded.not_understood.push(format!("{id}: {}", errors.collect::<Vec<_>>().join("; ")));
        }
    }
}
