//! DNS messages (RFC 1035, section 4): one question in, and what answers it out.
//!
//! Written here, as a name server needs little of it: questions have one name, which is not compressed, and types that nobody knows have
//! to be answered, too (RFC 3597). Nothing is followed, so that a message is read in one pass.

use std::net::IpAddr;

/// Bytes of a message's header.
const HEADER: usize = 12;
/// Longest name and longest label, bytes (RFC 1035, section 2.3.4).
pub(super) const LONGEST_NAME: usize = 255;
pub(super) const LONGEST_LABEL: usize = 63;
/// What every client accepts, and the most that crosses every link with IPv6, bytes of a message (RFC 1035, section 4.2.1; RFC 8200,
/// section 5).
pub(super) const LEAST_LIMIT: usize = 512;
pub(super) const MOST_LIMIT: usize = 1232;
/// How long an answer, and that there is none, may be kept, s.
const TTL: u32 = 60;
const CLASS_IN: u16 = 1;
/// A pointer to the name of the question (RFC 1035, section 4.1.4).
const QUESTION_NAME: u16 = 0xc000 | HEADER as u16;

/// Types of records.
pub(super) mod kind {
    pub(crate) const A: u16 = 1;
    pub(crate) const SOA: u16 = 6;
    pub(crate) const PTR: u16 = 12;
    pub(crate) const AAAA: u16 = 28;
    pub(crate) const OPT: u16 = 41;
    pub(crate) const ANY: u16 = 255;
}

/// How a question is answered (RFC 1035, section 4.1.1; RFC 6891, section 9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    NoError = 0,
    FormatError = 1,
    NoSuchName = 3,
    NotImplemented = 4,
    Refused = 5,
    BadVersion = 16,
}

/// A question.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Query<'a> {
    header: [u8; 4],
    /// Name, type and class, as they came.
    question: &'a [u8],
    /// The name, in lower case.
    pub(super) name: Vec<u8>,
    pub(super) kind: u16,
    /// Whether it is about the Internet, or about any class.
    pub(super) is_internet: bool,
    /// Its size of messages and version, if there is an OPT record (RFC 6891, section 6.1).
    edns: Option<(u16, u8)>,
}

/// Why a message is no question that can be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// It is no question at all.
    NoQuestion,
    /// Its sender is told: first four bytes of its header, and how.
    Told([u8; 4], Code),
}

/// A record in an answer. It is about the name of the question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Record<'a> {
    Address(IpAddr),
    /// A name.
    Pointer(&'a [u8]),
}

impl Record<'_> {
    pub(super) fn kind(&self) -> u16 {
        match self {
            Record::Address(IpAddr::V4(_)) => kind::A,
            Record::Address(IpAddr::V6(_)) => kind::AAAA,
            Record::Pointer(_) => kind::PTR,
        }
    }
}

impl<'a> Query<'a> {
    /// Reads a message.
    pub(super) fn parse(message: &'a [u8]) -> Result<Self, Unreadable> {
        let header = message.first_chunk::<HEADER>().ok_or(Unreadable::NoQuestion)?;
        let begin = [header[0], header[1], header[2], header[3]];
        // An answer is never answered, so that two servers do not answer each other endlessly.
        if header[2] & 0x80 != 0 {
            return Err(Unreadable::NoQuestion);
        }
        if header[2] & 0x78 != 0 {
            return Err(Unreadable::Told(begin, Code::NotImplemented));
        }
        let wrong = Unreadable::Told(begin, Code::FormatError);
        let count = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
        if (count(4), count(6), count(8)) != (1, 0, 0) {
            return Err(wrong);
        }
        let mut rest = &message[HEADER..];
        let name = name(&mut rest).ok_or(wrong)?;
        let kind = take16(&mut rest).ok_or(wrong)?;
        let class = take16(&mut rest).ok_or(wrong)?;
        let question = &message[HEADER..message.len() - rest.len()];
        let edns = edns(rest, count(10)).ok_or(wrong)?;
        let is_internet = class == CLASS_IN || class == kind::ANY;
        Ok(Query { header: begin, question, name, kind, is_internet, edns })
    }

    /// Whether the question is of a version of EDNS that is known.
    pub(super) fn is_known_version(&self) -> bool {
        self.edns.is_none_or(|(_, version)| version == 0)
    }

    /// The message that answers it, of at most `limit` bytes, or of 512 if the asker takes no more. `zone`: bytes of the question's name that
    /// name the zone; then there is a record of the zone if there is no other (RFC 2308, section 3).
    pub(super) fn answer(&self, code: Code, records: &[Record<'_>], zone: Option<usize>, limit: usize) -> Vec<u8> {
        let asked = self.edns.map_or(LEAST_LIMIT, |(size, _)| usize::from(size).max(LEAST_LIMIT));
        let opt = if self.edns.is_some() { 11 } else { 0 };
        let limit = limit.min(asked).saturating_sub(opt);
        let mut out = header(self.header, code);
        out.extend_from_slice(self.question);
        let mut count = 0u16;
        for record in records {
            let before = out.len();
            push(&mut out, record);
            if out.len() > limit {
                out.truncate(before);
                // What fits is there, and that something is missing is said.
                out[2] |= 2;
                break;
            }
            count += 1;
        }
        out[5] = 1;
        out[6..8].copy_from_slice(&count.to_be_bytes());
        if let Some(zone) = zone {
            // Authoritative.
            out[2] |= 4;
            if records.is_empty() {
                push_zone(&mut out, HEADER + self.name.len() - zone);
                out[9] = 1;
            }
        }
        if self.edns.is_some() {
            out.push(0);
            put16(&mut out, kind::OPT);
            put16(&mut out, MOST_LIMIT as u16);
            out.extend([(code as u16 >> 4) as u8, 0, 0, 0, 0, 0]);
            out[11] = 1;
        }
        out
    }
}

/// The message that says no more than how a question was wrong.
pub(super) fn error(begin: [u8; 4], code: Code) -> Vec<u8> {
    header(begin, code)
}

/// A header without records, of an answer to a question whose header begins so.
fn header([a, b, flags, _]: [u8; 4], code: Code) -> Vec<u8> {
    let mut out = Vec::with_capacity(MOST_LIMIT);
    // An answer; kind of question and "recursion desired" are copied.
    out.extend([a, b, 0x80 | flags & 0x79, code as u8 & 15]);
    out.resize(HEADER, 0);
    out
}

fn push(out: &mut Vec<u8>, record: &Record<'_>) {
    put16(out, QUESTION_NAME);
    put16(out, record.kind());
    put16(out, CLASS_IN);
    out.extend(TTL.to_be_bytes());
    let data: &[u8] = match record {
        Record::Address(IpAddr::V4(address)) => &address.octets(),
        Record::Address(IpAddr::V6(address)) => &address.octets(),
        Record::Pointer(name) => name,
    };
    put16(out, data.len() as u16);
    out.extend_from_slice(data);
}

/// The record of a zone, whose name is at `at` in the message: it says how long there is nothing.
fn push_zone(out: &mut Vec<u8>, at: usize) {
    const MAILBOX: &[u8] = b"\x0ahostmaster";
    let pointer = 0xc000 | at as u16;
    put16(out, pointer);
    put16(out, kind::SOA);
    put16(out, CLASS_IN);
    out.extend(TTL.to_be_bytes());
    put16(out, 2 + MAILBOX.len() as u16 + 2 + 20);
    put16(out, pointer);
    out.extend_from_slice(MAILBOX);
    put16(out, pointer);
    // Serial number, refresh, retry, expire, and how long a name may be taken not to exist.
    [1, 3600, 600, 86_400, TTL].iter().for_each(|number: &u32| out.extend(number.to_be_bytes()));
}

/// A name that is not compressed, in lower case.
fn name(rest: &mut &[u8]) -> Option<Vec<u8>> {
    let mut name = Vec::with_capacity(64);
    loop {
        let (&len, after) = rest.split_first()?;
        let (label, after) = after.split_at_checked(usize::from(len))?;
        if usize::from(len) > LONGEST_LABEL || name.len() + 1 + label.len() > LONGEST_NAME {
            return None;
        }
        *rest = after;
        name.push(len);
        name.extend(label.iter().map(u8::to_ascii_lowercase));
        if len == 0 {
            return Some(name);
        }
    }
}

/// The OPT record among `count` additional ones; `Some(None)`: there is none. Others, such as signatures, mean nothing here.
#[allow(clippy::option_option)]
fn edns(mut rest: &[u8], count: u16) -> Option<Option<(u16, u8)>> {
    let mut found = None;
    for _ in 0..count {
        // Those have at least eleven bytes each, so that a count says little.
        let is_root = rest.first() == Some(&0);
        skip_name(&mut rest)?;
        let (kind, class) = (take16(&mut rest)?, take16(&mut rest)?);
        let (ttl, after) = rest.split_first_chunk::<4>()?;
        rest = after;
        let len = take16(&mut rest)?;
        rest = rest.split_at_checked(usize::from(len))?.1;
        if kind == kind::OPT {
            if found.is_some() || !is_root {
                return None;
            }
            found = Some((class, ttl[1]));
        }
    }
    Some(found)
}

fn skip_name(rest: &mut &[u8]) -> Option<()> {
    loop {
        let (&len, after) = rest.split_first()?;
        let skipped = match len {
            0 => 0,
            0xc0.. => 1,
            _ if usize::from(len) <= LONGEST_LABEL => usize::from(len),
            _ => return None,
        };
        *rest = after.split_at_checked(skipped)?.1;
        if len == 0 || len >= 0xc0 {
            return Some(());
        }
    }
}

fn take16(rest: &mut &[u8]) -> Option<u16> {
    let (number, after) = rest.split_first_chunk::<2>()?;
    *rest = after;
    Some(u16::from_be_bytes(*number))
}

fn put16(out: &mut Vec<u8>, number: u16) {
    out.extend(number.to_be_bytes());
}
