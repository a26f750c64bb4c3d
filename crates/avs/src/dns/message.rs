//! DNS messages (RFC 1035, section 4): parsing of queries with one question, and building of responses.
//!
//! This is our own code, because a name server needs only a small part of DNS: the question has one uncompressed
//! name, and unknown types must be answered too (RFC 3597). Compression pointers are not followed, so a message is
//! read in one pass.

use std::net::IpAddr;

/// Length of a message header, bytes.
const HEADER: usize = 12;
/// Maximum lengths of a name and of a label, bytes (RFC 1035, section 2.3.4).
pub(super) const LONGEST_NAME: usize = 255;
pub(super) const LONGEST_LABEL: usize = 63;
/// Message size that every client accepts, and maximum size that crosses every IPv6 link, bytes (RFC 1035,
/// section 4.2.1; RFC 8200, section 5).
pub(super) const LEAST_LIMIT: usize = 512;
pub(super) const MOST_LIMIT: usize = 1232;
/// TTL of answers and of negative answers, s.
const TTL: u32 = 60;
const CLASS_IN: u16 = 1;
/// A pointer to the name of the question (RFC 1035, section 4.1.4).
const QUESTION_NAME: u16 = 0xc000 | HEADER as u16;

/// Record types.
pub(super) mod kind {
    pub(crate) const A: u16 = 1;
    pub(crate) const SOA: u16 = 6;
    pub(crate) const PTR: u16 = 12;
    pub(crate) const AAAA: u16 = 28;
    pub(crate) const OPT: u16 = 41;
    pub(crate) const ANY: u16 = 255;
}

/// Response codes (RFC 1035, section 4.1.1; RFC 6891, section 9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    NoError = 0,
    FormatError = 1,
    NoSuchName = 3,
    NotImplemented = 4,
    Refused = 5,
    BadVersion = 16,
}

/// A parsed query.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Query<'a> {
    header: [u8; 4],
    /// Name, type and class as received.
    question: &'a [u8],
    /// The name, in lower case.
    pub(super) name: Vec<u8>,
    pub(super) kind: u16,
    /// Whether the class is IN or ANY.
    pub(super) is_internet: bool,
    /// Its UDP payload size and EDNS version, if there is an OPT record (RFC 6891, section 6.1).
    edns: Option<(u16, u8)>,
}

/// Why a message cannot be answered normally.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// It is not a query; it gets no response.
    NoQuestion,
    /// It gets an error response: the first four bytes of its header, and the code.
    Told([u8; 4], Code),
}

/// A record of the answer section. Its owner is the name of the question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Record<'a> {
    Address(IpAddr),
    /// A name in wire format.
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
    /// Parses a message.
    pub(super) fn parse(message: &'a [u8]) -> Result<Self, Unreadable> {
        let header = message.first_chunk::<HEADER>().ok_or(Unreadable::NoQuestion)?;
        let begin = [header[0], header[1], header[2], header[3]];
        // A response is never answered, so that two servers do not answer each other endlessly.
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

    /// Whether the EDNS version of the query is supported.
    pub(super) fn is_known_version(&self) -> bool {
        self.edns.is_none_or(|(_, version)| version == 0)
    }

    /// Builds the response, of at most `limit` bytes, or of the size that the query accepts if that is smaller (at
    /// least 512). `zone`: length of the part of the question's name that is the zone's name; a response without
    /// records then gets the zone's SOA record (RFC 2308, section 3).
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
                // The records that fit are included, and TC is set.
                out[2] |= 2;
                break;
            }
            count += 1;
        }
        out[5] = 1;
        out[6..8].copy_from_slice(&count.to_be_bytes());
        if let Some(zone) = zone {
            // AA: authoritative.
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

/// A response that contains only an error code.
pub(super) fn error(begin: [u8; 4], code: Code) -> Vec<u8> {
    header(begin, code)
}

/// The header of a response without records, from the first four bytes of the query's header.
fn header([a, b, flags, _]: [u8; 4], code: Code) -> Vec<u8> {
    let mut out = Vec::with_capacity(MOST_LIMIT);
    // QR is set; opcode and RD are copied.
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

/// Appends the SOA record of a zone, whose name is at offset `at` of the message. It determines how long a negative
/// answer may be cached.
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
    // Serial, refresh, retry, expire, and TTL of negative answers.
    [1, 3600, 600, 86_400, TTL].iter().for_each(|number: &u32| out.extend(number.to_be_bytes()));
}

/// Parses an uncompressed name, in lower case.
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

/// The OPT record among `count` additional records; `Some(None)`: there is none. Others, such as signatures, are
/// ignored.
#[allow(clippy::option_option)]
fn edns(mut rest: &[u8], count: u16) -> Option<Option<(u16, u8)>> {
    let mut found = None;
    for _ in 0..count {
        // A record has at least eleven bytes, so the message's length bounds the loop, whatever the count says.
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
