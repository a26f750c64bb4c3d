//! Descriptions of all counters, and what to do when they grow: one table for `bifrostctl drops`, for Prometheus and
//! for `docs/COUNTERS.md`.
//!
//! The counters themselves are in the crates of the data path. A test of the daemon, which depends on both, checks that
//! every counter is described and that every described counter exists.

mod devices;
mod pipeline;
mod reasons;
mod switch;
mod transport;

use std::borrow::Cow;
use std::fmt::Write;

use reasons::Reason;

/// The kind of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Dropped packets (datagrams, frames, messages); it only grows.
    Drop,
    /// Any other event; it only grows.
    Count,
    /// A current value.
    Gauge,
}

/// The description of a counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meaning {
    /// Its kind.
    pub kind: Kind,
    /// What is counted, in a line.
    pub what: Cow<'static, str>,
    /// What to do if it grows unexpectedly; empty: nothing.
    pub advice: &'static str,
}

/// One counter.
struct Entry {
    name: &'static str,
    kind: Kind,
    what: &'static str,
    advice: &'static str,
}

/// A family of counters, one for each reason.
struct Family {
    prefix: &'static str,
    suffix: &'static str,
    kind: Kind,
    /// Text before the reason.
    what: &'static str,
    /// Advice for reasons without their own.
    advice: &'static str,
    reasons: &'static [Reason],
}

const fn drop(name: &'static str, what: &'static str, advice: &'static str) -> Entry {
    Entry { name, kind: Kind::Drop, what, advice }
}

const fn count(name: &'static str, what: &'static str, advice: &'static str) -> Entry {
    Entry { name, kind: Kind::Count, what, advice }
}

const fn gauge(name: &'static str, what: &'static str, advice: &'static str) -> Entry {
    Entry { name, kind: Kind::Gauge, what, advice }
}

/// A section of the table.
struct Chapter {
    title: &'static str,
    entries: &'static [Entry],
    families: &'static [Family],
}

const CHAPTERS: [Chapter; 4] = [pipeline::CHAPTER, switch::CHAPTER, transport::CHAPTER, devices::CHAPTER];

impl Family {
    fn name(&self, reason: &Reason) -> String {
        format!("{}{}{}", self.prefix, reason.name, self.suffix)
    }

    fn meaning(&self, reason: &Reason) -> Meaning {
        let advice = if reason.advice.is_empty() { self.advice } else { reason.advice };
        Meaning { kind: self.kind, what: format!("{}: {}", self.what, reason.what).into(), advice }
    }
}

impl Chapter {
    fn all(&self) -> impl Iterator<Item = (String, Meaning)> {
        let entries = self.entries.iter().map(|e| {
            let meaning = Meaning { kind: e.kind, what: e.what.into(), advice: e.advice };
            (e.name.to_owned(), meaning)
        });
        let of_family = |f: &'static Family| f.reasons.iter().map(move |r| (f.name(r), f.meaning(r)));
        entries.chain(self.families.iter().flat_map(of_family))
    }
}

/// All known counters, with their descriptions.
pub fn all() -> impl Iterator<Item = (String, Meaning)> {
    CHAPTERS.iter().flat_map(Chapter::all)
}

/// The description of a counter. `None`: the counter is unknown.
pub fn meaning(name: &str) -> Option<Meaning> {
    let chapters = || CHAPTERS.iter();
    if let Some(entry) = chapters().flat_map(|c| c.entries).find(|e| e.name == name) {
        return Some(Meaning { kind: entry.kind, what: entry.what.into(), advice: entry.advice });
    }
    chapters().flat_map(|c| c.families).find_map(|family| {
        let reason = name.strip_prefix(family.prefix)?.strip_suffix(family.suffix)?;
        family.reasons.iter().find(|r| r.name == reason).map(|r| family.meaning(r))
    })
}

/// A counter's unit: the last word of its name.
pub fn unit(name: &str) -> &str {
    name.rsplit_once(['_', '.']).map_or("", |(_, unit)| unit)
}

/// The whole table in Markdown, for `docs/COUNTERS.md`.
pub fn markdown() -> String {
    let mut text = String::new();
    for chapter in &CHAPTERS {
        let _ =
            write!(text, "## {}\n\n| Counter | | What it counts | What to do |\n|---|---|---|---|\n", chapter.title);
        for (name, meaning) in chapter.all() {
            let kind = match meaning.kind {
                Kind::Drop => "drop",
                Kind::Count => "",
                Kind::Gauge => "now",
            };
            let _ = writeln!(text, "| `{name}` | {kind} | {} | {} |", meaning.what, meaning.advice);
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_counter_is_listed_once_and_found_by_name() {
        let mut seen = BTreeSet::new();
        for (name, expected) in all() {
            assert_eq!(meaning(&name), Some(expected.clone()), "{name}");
            assert!(seen.insert(name.clone()), "{name} twice");
            assert!(!expected.what.is_empty() && !expected.what.contains(['|', '\n']), "{name}");
            assert!(expected.kind != Kind::Drop || !expected.advice.is_empty(), "{name}: no advice");
            assert!(name.contains('.') && !unit(&name).is_empty(), "{name}");
        }
        assert_eq!(meaning("drop.nothing_packets"), None);
        assert_eq!(meaning("malformed.guest_nothing_frames"), None);
    }

    #[test]
    fn the_document_matches_this_table() {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/COUNTERS.md");
        let document = std::fs::read_to_string(&file).unwrap();
        let start = document.find("## ").unwrap();
        if std::env::var_os("BIFROST_WRITE_DOCS").is_some() {
            std::fs::write(&file, document[..start].to_owned() + &markdown()).unwrap();
        } else {
            assert!(document[start..] == markdown(), "run this test again with BIFROST_WRITE_DOCS=1 to write {file:?}");
        }
    }
}
