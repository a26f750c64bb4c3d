//! Format of the journal: a line that identifies it, then frames, each with a set of changes.
//!
//! A frame is 12 bytes and a body: the body's length, its CRC-32, and the CRC-32 of those 8 bytes (IEEE 802.3), each 32
//! bits, little-endian; then a [`Batch`] encoded as protobuf. Transactions that are committed at the same time share a
//! frame, and none is acknowledged before the whole frame is on disk. So only the last frame can be incomplete: the
//! host crashed during the write. Anything else that cannot be read is damage.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::Arc;

use prost::Message as _;

use super::state::{Planned, State, Stored};
use crate::Revision;

/// First line of a journal.
pub(super) const HEADER: &[u8] = b"bifrost-store 1\n";
/// Common start of the first line in all versions.
const NAME: &[u8] = b"bifrost-store ";
/// Bytes before a body.
const FRAME_HEADER: usize = 12;
/// Maximum length of a body, bytes. Larger than [`Frame::is_full`] plus one transaction allow.
const MAX_BODY: usize = 8 << 20;
/// A frame with this many bytes accepts no more transactions.
const FULL: usize = 2 << 20;
/// Unit of atomic disk writes, bytes.
const SECTOR: u64 = 512;

/// Content of a frame.
#[derive(Clone, PartialEq, prost::Message)]
struct Batch {
    /// The store's revision before it.
    #[prost(uint64, tag = "1")]
    before: u64,
    /// And after it: 0 in all frames except the last one of a compaction.
    #[prost(uint64, tag = "2")]
    after: u64,
    /// In the order in which they were made.
    #[prost(message, repeated, tag = "3")]
    changes: Vec<Changed>,
}

/// A key and its new value.
#[derive(Clone, PartialEq, prost::Message)]
struct Changed {
    #[prost(uint64, tag = "1")]
    revision: u64,
    #[prost(string, tag = "2")]
    key: String,
    /// None: deleted.
    #[prost(bytes = "vec", optional, tag = "3")]
    value: Option<Vec<u8>>,
}

/// A frame under construction.
#[derive(Debug)]
pub(super) struct Frame {
    batch: Batch,
    bytes: usize,
}

/// Why a journal cannot be read.
#[derive(Debug)]
pub(super) enum JournalError {
    Io(io::Error),
    NotAJournal(String),
    Damaged { offset: u64, what: String },
}

/// Content of a journal.
pub(super) struct Loaded {
    pub(super) state: State,
    /// Length of complete frames, bytes: truncate the file there.
    pub(super) len: u64,
}

impl Frame {
    /// An empty frame, for a store of this revision.
    pub(super) fn new(before: Revision) -> Frame {
        Frame { batch: Batch { before, after: before, changes: Vec::new() }, bytes: 0 }
    }

    /// Adds a transaction.
    pub(super) fn add(&mut self, planned: &Planned) {
        self.batch.after = planned.revision;
        for (key, value) in &planned.changes {
            self.push(key, planned.revision, value.as_deref());
        }
    }

    /// Whether the next transaction must go into another frame.
    pub(super) fn is_full(&self) -> bool {
        self.bytes >= FULL
    }

    /// The encoded frame; None, if nothing was added.
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        if self.batch.changes.is_empty() {
            return None;
        }
        Some(self.encode_always())
    }

    fn encode_always(&self) -> Vec<u8> {
        let mut frame = vec![0; FRAME_HEADER];
        frame.reserve(self.batch.encoded_len());
        // It fails only if space is missing, and a `Vec` grows.
        let _ = self.batch.encode(&mut frame);
        let body = &frame[FRAME_HEADER..];
        debug_assert!(body.len() <= MAX_BODY);
        let (len, crc) = (body.len() as u32, crc32fast::hash(body));
        frame[..4].copy_from_slice(&len.to_le_bytes());
        frame[4..8].copy_from_slice(&crc.to_le_bytes());
        let crc = crc32fast::hash(&frame[..8]);
        frame[8..FRAME_HEADER].copy_from_slice(&crc.to_le_bytes());
        frame
    }

    fn push(&mut self, key: &str, revision: Revision, value: Option<&[u8]>) {
        self.bytes += key.len() + value.map_or(0, <[u8]>::len) + 32;
        self.batch.changes.push(Changed { revision, key: key.to_owned(), value: value.map(<[u8]>::to_vec) });
    }
}

/// A whole journal, piece by piece, with only these records.
pub(super) fn whole(records: &BTreeMap<Arc<str>, Stored>, revision: Revision) -> impl Iterator<Item = Vec<u8>> {
    let mut rest = records.iter().peekable();
    let mut is_done = revision == 0;
    let frames = std::iter::from_fn(move || {
        if is_done {
            return None;
        }
        let mut frame = Frame::new(0);
        while !frame.is_full()
            && let Some((key, stored)) = rest.next()
        {
            frame.push(key, stored.revision, Some(&stored.value));
        }
        is_done = rest.peek().is_none();
        frame.batch.after = if is_done { revision } else { 0 };
        Some(frame.encode_always())
    });
    std::iter::once(HEADER.to_vec()).chain(frames)
}

/// Reads a journal of `len` bytes.
pub(super) fn read(mut file: impl Read, len: u64) -> Result<Loaded, JournalError> {
    let mut header = vec![0; HEADER.len().min(usize::try_from(len).unwrap_or(usize::MAX))];
    file.read_exact(&mut header)?;
    if header.len() < HEADER.len() && HEADER.starts_with(&header) {
        // No write was ever completed.
        return Ok(Loaded { state: State::default(), len: 0 });
    }
    if header != HEADER {
        return Err(JournalError::NotAJournal(match header.strip_prefix(NAME) {
            Some(version) => {
                let version = String::from_utf8_lossy(version).trim().to_owned();
                format!(
                    "its format is version {version}, and this release reads version 1: run the release that has written it"
                )
            }
            None => "it is not a journal of a store: move the file away".to_owned(),
        }));
    }
    let mut offset = HEADER.len() as u64;
    let mut records = BTreeMap::new();
    let mut revision = 0;
    let mut is_rewriting_incomplete = false;
    while let Some(body) = body(&mut file, offset, len)? {
        let damaged = |what: &str| JournalError::Damaged { offset, what: what.to_owned() };
        let batch =
            Batch::decode(body.as_slice()).map_err(|error| damaged(&format!("cannot decode a frame: {error}")))?;
        if batch.before != revision {
            return Err(damaged(&format!("it continues after revision {}, not {revision}", batch.before)));
        }
        add(&mut records, batch.changes);
        is_rewriting_incomplete = batch.after == 0;
        revision = batch.after;
        offset += (FRAME_HEADER + body.len()) as u64;
    }
    if is_rewriting_incomplete {
        let what = "the journal is shorter than its first part".to_owned();
        return Err(JournalError::Damaged { offset, what });
    }
    Ok(Loaded { state: State::with(records, revision), len: offset })
}

/// The body of the frame at `offset`; None at the end, or if the file ends before the frame does.
fn body(file: &mut impl Read, offset: u64, len: u64) -> Result<Option<Vec<u8>>, JournalError> {
    let damaged = |what: &str| JournalError::Damaged { offset, what: what.to_owned() };
    let rest = len.saturating_sub(offset);
    if rest < FRAME_HEADER as u64 {
        return Ok(None);
    }
    let mut frame = vec![0; FRAME_HEADER];
    file.read_exact(&mut frame)?;
    let word = |at: usize| u32::from_le_bytes([frame[at], frame[at + 1], frame[at + 2], frame[at + 3]]);
    let (body_len, body_crc, crc) = (word(0) as usize, word(4), word(8));
    if crc32fast::hash(&frame[..8]) != crc {
        // The file was extended, but the data did not reach the disk: zeros, from here or the next sector on.
        let mut limited = file.take(MAX_BODY as u64 + 1);
        limited.read_to_end(&mut frame)?;
        let is_all = frame.len() as u64 == rest;
        let zeros =
            sectors(&frame, offset).map_while(|sector| sector.iter().any(|byte| *byte != 0).then_some(sector.len()));
        let written: usize = zeros.sum();
        let is_torn = written < FRAME_HEADER && frame.iter().skip(written).all(|byte| *byte == 0);
        return if is_all && is_torn { Ok(None) } else { Err(damaged("the header of a frame has a wrong checksum")) };
    }
    if body_len > MAX_BODY {
        return Err(damaged(&format!("a frame of {body_len} bytes; the maximum is {MAX_BODY}")));
    }
    if rest - (FRAME_HEADER as u64) < body_len as u64 {
        return Ok(None);
    }
    frame.resize(FRAME_HEADER + body_len, 0);
    file.read_exact(&mut frame[FRAME_HEADER..])?;
    if crc32fast::hash(&frame[FRAME_HEADER..]) != body_crc {
        // Sectors of the last frame may be missing: the file's length reached the disk before them.
        let is_last = rest == (FRAME_HEADER + body_len) as u64;
        let is_torn = is_last && sectors(&frame, offset).any(|sector| sector.iter().all(|byte| *byte == 0));
        return if is_torn { Ok(None) } else { Err(damaged("a frame has a wrong checksum")) };
    }
    Ok(Some(frame.split_off(FRAME_HEADER)))
}

/// The bytes from `offset` of a file, split at sector boundaries.
fn sectors(mut bytes: &[u8], mut offset: u64) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let len = usize::try_from(SECTOR - offset % SECTOR).unwrap_or(usize::MAX).min(bytes.len());
        let (sector, rest) = bytes.split_at_checked(len)?;
        (bytes, offset) = (rest, offset + len as u64);
        (!sector.is_empty()).then_some(sector)
    })
}

fn add(records: &mut BTreeMap<Arc<str>, Stored>, changes: Vec<Changed>) {
    for Changed { revision, key, value } in changes {
        match value {
            Some(value) => drop(records.insert(key.into(), Stored { value: value.into(), revision })),
            None => drop(records.remove(key.as_str())),
        }
    }
}

impl From<io::Error> for JournalError {
    fn from(error: io::Error) -> JournalError {
        JournalError::Io(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A journal, and the end of each frame.
    fn journal(values: &[&[u8]]) -> (Vec<u8>, Vec<usize>) {
        let mut bytes = HEADER.to_vec();
        let mut ends = vec![bytes.len()];
        for (revision, value) in (1..).zip(values) {
            let mut frame = Frame::new(revision - 1);
            frame.add(&Planned { revision, changes: vec![("key".into(), Some((*value).into()))] });
            bytes.extend(frame.encode().unwrap());
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    fn load(bytes: &[u8]) -> Result<(Revision, u64), JournalError> {
        read(bytes, bytes.len() as u64).map(|loaded| (loaded.state.revision(), loaded.len))
    }

    #[test]
    fn truncated_at_any_byte_it_has_the_complete_frames() {
        let (bytes, ends) = journal(&[b"one", &[7; 1500], b"three"]);
        for len in 0..=bytes.len() {
            let whole = ends.iter().filter(|end| **end <= len).count();
            let expected = if whole == 0 { (0, 0) } else { (whole as u64 - 1, ends[whole - 1] as u64) };
            assert_eq!(load(&bytes[..len]).unwrap(), expected, "{len} bytes");
        }
    }

    #[test]
    fn a_changed_byte_anywhere_is_damage_at_its_frame() {
        let (bytes, ends) = journal(&[b"one", &[7; 1500], b"three"]);
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x20;
            match load(&bytes) {
                Err(JournalError::NotAJournal(_)) => assert!(at < HEADER.len()),
                Err(JournalError::Damaged { offset, .. }) => {
                    let begin = *ends.iter().rev().find(|end| **end <= at).unwrap();
                    assert_eq!(offset, begin as u64, "byte {at}");
                }
                other => panic!("byte {at}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_missing_frame_is_damage() {
        let (bytes, ends) = journal(&[b"one", b"two", b"three"]);
        let without = [&bytes[..ends[1]], &bytes[ends[2]..]].concat();
        assert!(matches!(load(&without), Err(JournalError::Damaged { offset, .. }) if offset == ends[1] as u64));
    }

    #[test]
    fn missing_sectors_are_the_end_in_the_last_frame_and_damage_elsewhere() {
        let (bytes, ends) = journal(&[&[7; 3000], &[8; 3000]]);
        for sector in ends[1].div_ceil(512)..bytes.len() / 512 {
            let mut torn = bytes.clone();
            torn[sector * 512..(sector + 1) * 512].fill(0);
            assert_eq!(load(&torn).unwrap(), (1, ends[1] as u64), "sector {sector}");
            // With another frame behind it, it was complete once, and is damaged now.
            let mut frame = Frame::new(2);
            frame.add(&Planned { revision: 3, changes: vec![("key".into(), None)] });
            torn.extend(frame.encode().unwrap());
            assert!(matches!(load(&torn), Err(JournalError::Damaged { .. })), "sector {sector}");
        }
        for written in (ends[1]..bytes.len()).filter(|at| at % 512 == 0 || *at == ends[1]) {
            let mut torn = bytes.clone();
            torn[written..].fill(0);
            assert_eq!(load(&torn).unwrap(), (1, ends[1] as u64), "from {written}");
        }
    }

    #[test]
    fn a_header_across_sectors_may_be_half_written() {
        // The second frame starts 5 bytes before a sector's end.
        let (bytes, ends) =
            (1..600).map(|len| journal(&[&vec![7; len], &[8; 1000]])).find(|(_, ends)| ends[1] % 512 == 507).unwrap();
        let mut torn = bytes.clone();
        torn[ends[1] + 5..].fill(0);
        assert_eq!(load(&torn).unwrap(), (1, ends[1] as u64));
    }

    #[test]
    fn other_files_and_versions_are_refused_with_a_reason() {
        let told = |bytes: &[u8]| match load(bytes) {
            Err(JournalError::NotAJournal(what)) => what,
            other => panic!("{other:?}"),
        };
        assert!(told(b"bifrost-store 2\nrest").contains("version 2"));
        assert!(told(b"#!/bin/sh and some more").contains("not a journal"));
        assert!(told(b"x").contains("not a journal"));
    }

    #[test]
    fn a_compacted_journal_has_the_same_records_and_revision() {
        let stored = |revision: u64| Stored { value: vec![revision as u8; 1 << 20].into(), revision };
        let records: BTreeMap<Arc<str>, Stored> = (1..=5).map(|i| (Arc::from(format!("k{i}")), stored(i))).collect();
        let pieces: Vec<_> = whole(&records, 9).collect();
        assert_eq!(pieces.len(), 4, "a line and three frames: two records fill one");
        let bytes = pieces.concat();
        let loaded = read(bytes.as_slice(), bytes.len() as u64).ok().unwrap();
        assert_eq!((loaded.state.revision(), loaded.len), (9, bytes.len() as u64));
        let revisions: Vec<u64> = loaded.state.records().values().map(|stored| stored.revision).collect();
        assert_eq!(revisions, [1, 2, 3, 4, 5]);
        // It is written under another name first: a crash does not leave a part of it alone.
        let part = pieces[..3].concat();
        assert!(matches!(load(&part), Err(JournalError::Damaged { .. })));
        // A store whose keys were all deleted keeps its revision.
        assert_eq!(load(&whole(&BTreeMap::new(), 7).collect::<Vec<_>>().concat()).unwrap().0, 7);
        assert_eq!(load(&whole(&BTreeMap::new(), 0).collect::<Vec<_>>().concat()).unwrap(), (0, HEADER.len() as u64));
    }
}
