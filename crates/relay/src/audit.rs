//! The audit log: who has changed what, or was refused, as a JSON object a line.
//!
//! There is a line for each change of a batch, written before the answer is given. The file is only appended to. When it is renamed
//! or removed, as logrotate does, a new one begins.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bifrost_intent::api::Applied;
use bifrost_intent::{Batch, Key, MAX_CHANGES, Op, PlanError};
use serde::Serialize;

use crate::caller::Caller;
use crate::relay::SubmitError;

/// The longest line, bytes with its end. What does not fit is cut off from the reason.
const MAX_LINE: usize = 3072;
/// The longest name of a relay, bytes as JSON has them.
const MAX_RELAY: usize = 256;
/// The longest names and roles of who holds a certificate, and of who gets one, bytes as JSON has them.
const MAX_NAME: usize = 128;
const MAX_ROLES: usize = 256;
/// The longest serial number, bytes: RFC 5280, 4.1.2.2, has at most 20 octets.
const MAX_SERIAL: usize = 40;
/// The longest reason, bytes as JSON has them. All else takes less than the rest.
const MAX_WHY: usize = MAX_LINE - MAX_RELAY - 2 * (MAX_NAME + MAX_ROLES + MAX_SERIAL) - 640;
/// The same trouble is told once in this time.
const TROUBLE_AGAIN: Duration = Duration::from_secs(60);

/// The log of a relay.
#[derive(Debug)]
pub(crate) struct Audit {
    relay: String,
    /// Whether nothing is changed that cannot be logged.
    is_required: bool,
    file: Mutex<LogFile>,
    written: AtomicU64,
    lost: AtomicU64,
}

/// A request to change something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    number: u64,
    caller: &'a Caller,
    batch: &'a Batch,
}

impl<'a> Request<'a> {
    /// With a number of its own.
    pub(crate) fn new(batch: &'a Batch, caller: &'a Caller) -> Self {
        Request { number: fastrand::u64(..), caller, batch }
    }
}

impl Audit {
    /// The log of a relay in a file.
    ///
    /// # Errors
    /// The file cannot be opened or made.
    pub(crate) fn open(path: &Path, relay: &str, is_required: bool) -> io::Result<Audit> {
        let mut file = LogFile { path: path.to_owned(), open: None, trouble: None };
        file.reopen()?;
        let relay = shorten(relay, MAX_RELAY);
        Ok(Audit { relay, is_required, file: Mutex::new(file), written: AtomicU64::new(0), lost: AtomicU64::new(0) })
    }

    /// Lines that were written, and that were not.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.written.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed))
    }

    /// Before something is changed: if nothing may be changed without a log, it says what is to be.
    ///
    /// # Errors
    /// The log cannot be written, and nothing may be changed.
    pub(crate) fn begin(&self, request: &Request<'_>, now_ms: u64) -> Result<(), SubmitError> {
        if !self.is_required {
            return Ok(());
        }
        let lines = self.lines(request, now_ms, |line, _| line.outcome = "begun");
        self.write(&lines).map_err(|error| SubmitError::Audit(error.to_string()))
    }

    /// Says what has become of it. `before` has the generations that the objects had, in the order of the batch; empty: not known.
    pub(crate) fn end(
        &self,
        request: &Request<'_>,
        before: &[u64],
        result: &Result<Applied, SubmitError>,
        now_ms: u64,
    ) {
        let generations: HashMap<&Key, u64> = match result {
            Ok(applied) => applied.changed.iter().map(|changed| (&changed.key, changed.generation)).collect(),
            Err(_) => HashMap::new(),
        };
        let mut reasons = HashMap::new();
        if let Err(SubmitError::Plan(error)) = result {
            reasons = by_key(error);
        }
        let lines = self.lines(request, now_ms, |line, item| {
            line.generation_before = item.and_then(|item| before.get(item).copied());
            match result {
                Ok(applied) => {
                    line.revision = Some(applied.revision);
                    let generation = line.key.and_then(|key| generations.get(key).copied());
                    line.outcome = if generation.is_some() { "made" } else { "unchanged" };
                    line.generation = generation.or(line.generation_before);
                }
                Err(error) => {
                    line.outcome = if matches!(error, SubmitError::Unknown(_)) { "unknown" } else { "refused" };
                    let why = match (error, line.key.and_then(|key| reasons.get(key))) {
                        (_, Some(why)) => why.clone(),
                        (SubmitError::Plan(PlanError(problems)), None) => {
                            problems.first().map_or(String::new(), |first| format!("with the batch: {first}"))
                        }
                        (error, None) => error.to_string(),
                    };
                    line.why = Some(shorten(&why, MAX_WHY));
                }
            }
        });
        // It was told and counted; what was changed is changed.
        let _ = self.write(&lines);
    }

    /// Says that a request was refused because it is no batch.
    pub(crate) fn unreadable(&self, caller: &Caller, why: &str, now_ms: u64) {
        let batch = Batch::default();
        let lines = self.lines(&Request::new(&batch, caller), now_ms, |line, _| {
            line.outcome = "refused";
            line.why = Some(shorten(why, MAX_WHY));
        });
        // As above.
        let _ = self.write(&lines);
    }

    /// Says what has become of something that concerns a certificate. `why` is why it was refused.
    ///
    /// # Errors
    /// The log cannot be written, and nothing may be done without it.
    pub(crate) fn event(
        &self,
        event: Event,
        caller: Option<&Caller>,
        what: About<'_>,
        why: Option<&str>,
        now_ms: u64,
    ) -> Result<(), String> {
        let mut line = self.line(fastrand::u64(..), caller, now_ms);
        line.op = Some(event.name());
        match what {
            About::Host(key) => line.key = Some(key),
            About::Operator { name, roles, serial } => {
                line.for_name = Some(shorten(name, MAX_NAME));
                line.for_roles = Some(shorten(roles, MAX_ROLES));
                line.for_serial = serial.map(|serial| shorten(serial, MAX_SERIAL));
            }
        }
        line.outcome = if why.is_some() { "refused" } else { "made" };
        line.why = why.map(|why| shorten(why, MAX_WHY));
        match self.write(&[line]) {
            Err(error) if self.is_required => Err(SubmitError::Audit(error.to_string()).to_string()),
            // It was told and counted.
            _ => Ok(()),
        }
    }

    /// A line for each change, which `finish` completes; one without a key for a batch that has none, or more than are allowed.
    fn lines<'a>(
        &'a self,
        request: &Request<'a>,
        now_ms: u64,
        finish: impl Fn(&mut Line<'a>, Option<usize>),
    ) -> Vec<Line<'a>> {
        let Request { number, caller, batch } = *request;
        let line = self.line(number, Some(caller), now_ms);
        let one_by_one = if (1..=MAX_CHANGES).contains(&batch.changes.len()) { &*batch.changes } else { &[] };
        let mut lines: Vec<_> =
            one_by_one.iter().map(|c| Line { op: Some(name(c.op)), key: Some(&c.key), ..line.clone() }).collect();
        lines.iter_mut().enumerate().for_each(|(item, line)| finish(line, Some(item)));
        if lines.is_empty() {
            let mut line = line;
            finish(&mut line, None);
            lines.push(line);
        }
        lines
    }

    /// A line that says when and who.
    fn line<'a>(&'a self, number: u64, caller: Option<&Caller>, now_ms: u64) -> Line<'a> {
        let (peer, holder) = match caller {
            Some(Caller::User(peer)) => (Some(peer), None),
            Some(Caller::Holder(holder)) => (None, Some(holder)),
            None => (None, None),
        };
        Line {
            time_ms: now_ms,
            relay: &self.relay,
            batch: format!("{number:016x}"),
            uid: peer.map(|peer| peer.uid),
            gid: peer.map(|peer| peer.gid),
            pid: peer.and_then(|peer| peer.pid),
            name: holder.map(|holder| shorten(&holder.name, MAX_NAME)),
            roles: holder.map(|holder| shorten(&holder.granted(), MAX_ROLES)),
            serial: holder.map(|holder| shorten(&holder.serial, MAX_SERIAL)),
            for_name: None,
            for_roles: None,
            for_serial: None,
            op: None,
            key: None,
            generation_before: None,
            generation: None,
            revision: None,
            outcome: "",
            why: None,
        }
    }

    fn write(&self, lines: &[Line<'_>]) -> io::Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let written = file.write(lines);
        let counted = if written.is_ok() { &self.written } else { &self.lost };
        counted.fetch_add(lines.len() as u64, Ordering::Relaxed);
        if let Err(error) = &written
            && file.trouble.is_none_or(|last| last.elapsed() >= TROUBLE_AGAIN)
        {
            file.trouble = Some(Instant::now());
            let effect = if self.is_required { "nothing is changed" } else { "lines are lost" };
            tracing::error!(path = %file.path.display(), %error, "the audit log cannot be written; {effect}");
        }
        written
    }
}

/// Whose certificate something concerns.
#[derive(Clone, Copy, Debug)]
pub(crate) enum About<'a> {
    /// That of a host.
    Host(&'a Key),
    /// That of an operator; without a serial number there is none.
    Operator { name: &'a str, roles: &'a str, serial: Option<&'a str> },
}

/// What concerns a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A token was made.
    Token,
    /// The host's first certificate.
    Enrolled,
    /// A further one.
    Renewed,
    /// An operator's certificate.
    Certified,
}

impl Event {
    fn name(self) -> &'static str {
        match self {
            Event::Token => "token",
            Event::Enrolled => "enroll",
            Event::Renewed => "renew",
            Event::Certified => "certificate",
        }
    }
}

fn name(op: Op) -> &'static str {
    match op {
        Op::Set => "set",
        Op::Delete => "delete",
    }
}

/// The first problem of each object, and how many more it has.
fn by_key(error: &PlanError) -> HashMap<&Key, String> {
    let mut first: HashMap<&Key, (String, u64)> = HashMap::new();
    for problem in &error.0 {
        let Some(key) = &problem.key else { continue };
        first.entry(key).and_modify(|(_, more)| *more += 1).or_insert_with(|| (problem.to_string(), 0));
    }
    let told = |(why, more)| if more > 0 { format!("{why}, and {more} more") } else { why };
    first.into_iter().map(|(key, problems)| (key, told(problems))).collect()
}

/// A change, as the log has it. What is absent is not known, or is nothing.
#[derive(Clone, Debug, Serialize)]
struct Line<'a> {
    time_ms: u64,
    relay: &'a str,
    /// The same in all lines of a batch.
    batch: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    /// Of the certificate of who asks.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    roles: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    serial: Option<String>,
    /// Of the certificate that is asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    for_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    for_roles: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    for_serial: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    op: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a Key>,
    /// 0: it did not exist.
    #[serde(skip_serializing_if = "Option::is_none")]
    generation_before: Option<u64>,
    /// 0: it is gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    revision: Option<u64>,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

/// Shortens a text to at most `most` bytes of JSON; a shortened text ends with "...".
fn shorten(text: &str, most: usize) -> String {
    let mut bytes = 0;
    for (at, c) in text.char_indices() {
        // The most that is written for it.
        bytes += match c {
            '"' | '\\' => 2,
            c if c.is_ascii_control() => 6,
            c => c.len_utf8(),
        };
        if bytes > most.saturating_sub(3) {
            return format!("{}...", &text[..at]);
        }
    }
    text.to_owned()
}

/// The file, and which one is open.
#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    open: Option<(File, (u64, u64))>,
    trouble: Option<Instant>,
}

impl LogFile {
    fn write(&mut self, lines: &[Line<'_>]) -> io::Result<()> {
        let mut text = Vec::with_capacity(lines.len() * 256);
        for line in lines {
            serde_json::to_writer(&mut text, line)?;
            text.push(b'\n');
        }
        let there = std::fs::metadata(&self.path).map(|m| (m.dev(), m.ino())).ok();
        if self.open.as_ref().is_none_or(|(_, opened)| there != Some(*opened)) {
            self.reopen()?;
        }
        let written = self.open.as_mut().map_or(Ok(()), |(file, _)| file.write_all(&text));
        if written.is_err() {
            self.open = None;
        }
        written
    }

    /// Opens the file of that name. A line that was written in part stays for itself.
    fn reopen(&mut self) -> io::Result<()> {
        self.open = None;
        let mut file = OpenOptions::new().create(true).read(true).append(true).mode(0o640).open(&self.path)?;
        let metadata = file.metadata()?;
        if metadata.is_file() && metadata.len() > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                file.write_all(b"\n")?;
            }
        }
        self.open = Some((file, (metadata.dev(), metadata.ino())));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
