//! Reads TOML tables field by field, and collects every error with its place.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use bifrost_wire::Mac;
use ipnet::IpNet;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::ConfigError;

/// Collects errors, and knows the line of every field that was read.
pub(super) struct Sink<'a> {
    file: &'a str,
    text: &'a str,
    line_starts: Vec<usize>,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    lines: HashMap<String, usize>,
    failed: HashSet<String>,
    errors: Vec<ConfigError>,
}

impl<'a> Sink<'a> {
    pub(super) fn new(file: &'a str, text: &'a str) -> Sink<'a> {
        let line_starts = std::iter::once(0).chain(text.match_indices('\n').map(|(i, _)| i + 1)).collect();
        Sink { file, text, line_starts, state: RefCell::default() }
    }

    /// Reports an error of a field; its line is that of the field, or of the nearest table around it.
    pub(super) fn error(&self, field: &str, message: impl Into<String>) {
        let line = self.line_of_field(field);
        self.push(line, field, message.into());
    }

    /// Reports an error at a byte offset of the text.
    pub(super) fn error_at(&self, offset: usize, field: &str, message: impl Into<String>) {
        self.push(self.line_of_offset(offset), field, message.into());
    }

    /// Whether a field already has an error, so that its value means nothing.
    pub(super) fn failed(&self, field: &str) -> bool {
        self.state.borrow().failed.contains(field)
    }

    /// Whether a field, or one inside it, has an error.
    pub(super) fn failed_within(&self, field: &str) -> bool {
        self.state.borrow().failed.iter().any(|f| f.starts_with(field))
    }

    /// Whether a field was written in the file.
    pub(super) fn written(&self, field: &str) -> bool {
        self.state.borrow().lines.contains_key(field)
    }

    /// The line of a field that was written, or of the nearest table around it; 0: the file as a whole.
    pub(super) fn line_of_field(&self, field: &str) -> usize {
        let state = self.state.borrow();
        let mut field = field;
        loop {
            if let Some(line) = state.lines.get(field) {
                return *line;
            }
            match field.rfind(['.', '[']) {
                Some(end) => field = &field[..end],
                None => return 0,
            }
        }
    }

    pub(super) fn into_errors(self) -> Vec<ConfigError> {
        self.state.into_inner().errors
    }

    fn push(&self, line: usize, field: &str, message: String) {
        let mut state = self.state.borrow_mut();
        state.failed.insert(field.to_owned());
        state.errors.push(ConfigError { file: self.file.to_owned(), line, field: field.to_owned(), message });
    }

    fn place(&self, field: &str, offset: usize) {
        let line = self.line_of_offset(offset);
        self.state.borrow_mut().lines.insert(field.to_owned(), line);
    }

    fn line_of_offset(&self, offset: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= offset.min(self.text.len()))
    }
}

/// A value that a single TOML value gives.
pub(super) trait FromValue: Sized {
    /// What a placeholder is after an error; it never leaves this module's callers.
    fn placeholder() -> Self;
    /// Reads it; the error says what is wrong with the value.
    fn from_value(value: &DeValue<'_>) -> Result<Self, String>;
}

impl FromValue for String {
    fn placeholder() -> String {
        String::new()
    }
    fn from_value(value: &DeValue<'_>) -> Result<String, String> {
        text(value).map(str::to_owned)
    }
}

impl FromValue for bool {
    fn placeholder() -> bool {
        false
    }
    fn from_value(value: &DeValue<'_>) -> Result<bool, String> {
        value.as_bool().ok_or_else(|| mismatch("true or false", value))
    }
}

impl FromValue for IpAddr {
    fn placeholder() -> IpAddr {
        IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED)
    }
    fn from_value(value: &DeValue<'_>) -> Result<IpAddr, String> {
        let text = text(value)?;
        text.parse().map_err(|_| format!("{text:?} is not an IP address"))
    }
}

impl FromValue for IpNet {
    fn placeholder() -> IpNet {
        IpNet::from(IpAddr::placeholder())
    }
    fn from_value(value: &DeValue<'_>) -> Result<IpNet, String> {
        let text = text(value)?;
        text.parse().map_err(|_| match text.parse::<IpAddr>() {
            Ok(address) => format!("{text:?} lacks a prefix length; for this address alone write {:?}", {
                IpNet::from(address).to_string()
            }),
            Err(_) => format!("{text:?} is not an address with a prefix length, such as 10.0.0.1/24"),
        })
    }
}

impl FromValue for Mac {
    fn placeholder() -> Mac {
        Mac::default()
    }
    fn from_value(value: &DeValue<'_>) -> Result<Mac, String> {
        let text = text(value)?;
        let mac = text.parse::<Mac>().map_err(|e| format!("{text:?}: {e}"))?;
        if mac.is_unicast() { Ok(mac) } else { Err(format!("{mac} is no address of one interface")) }
    }
}

/// One table, read field by field. What was never asked for is unknown: [`finish`](Self::finish) says so.
pub(super) struct Section<'a, 'i> {
    sink: &'a Sink<'a>,
    path: String,
    table: Option<&'a DeTable<'i>>,
    asked: Vec<&'static str>,
}

impl<'a, 'i> Section<'a, 'i> {
    /// The whole document.
    pub(super) fn root(sink: &'a Sink<'a>, table: &'a DeTable<'i>) -> Section<'a, 'i> {
        Section { sink, path: String::new(), table: Some(table), asked: Vec::new() }
    }

    /// The full name of one of its fields.
    pub(super) fn field(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// Reports an error of one of its fields.
    pub(super) fn error(&self, key: &str, message: impl Into<String>) {
        self.sink.error(&self.field(key), message);
    }

    /// Whether one of its fields already has an error.
    pub(super) fn has_failed(&self, key: &str) -> bool {
        self.sink.failed(&self.field(key))
    }

    /// A field that may be absent.
    pub(super) fn optional<T: FromValue>(&mut self, key: &'static str) -> Option<T> {
        let value = self.take(key)?;
        match T::from_value(value.get_ref()) {
            Ok(value) => Some(value),
            Err(message) => {
                self.error(key, message);
                Some(T::placeholder())
            }
        }
    }

    /// A field that must be there.
    pub(super) fn required<T: FromValue>(&mut self, key: &'static str) -> T {
        self.optional(key).unwrap_or_else(|| {
            self.error(key, "missing");
            T::placeholder()
        })
    }

    /// An integer in a range; absent: `default`.
    pub(super) fn int(&mut self, key: &'static str, range: RangeInclusive<u64>, default: u64) -> u64 {
        self.optional_int(key, range).unwrap_or(default)
    }

    /// An integer in a range that may be absent. After an error: the range's start.
    pub(super) fn optional_int(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        let value = self.take(key)?;
        Some(integer(value.get_ref(), &range).unwrap_or_else(|message| {
            self.error(key, message);
            *range.start()
        }))
    }

    /// An integer in a range that must be there.
    pub(super) fn required_int(&mut self, key: &'static str, range: RangeInclusive<u64>) -> u64 {
        let start = *range.start();
        self.optional_int(key, range).unwrap_or_else(|| {
            self.error(key, "missing");
            start
        })
    }

    /// `"auto"` (gives none) or an integer in a range; absent: as `"auto"`.
    pub(super) fn auto_int(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        let value = self.take(key)?;
        if value.get_ref().as_str() == Some("auto") {
            return None;
        }
        if value.get_ref().is_str() {
            self.error(key, format!("expected \"auto\" or an integer in {}..={}", range.start(), range.end()));
            return None;
        }
        match integer(value.get_ref(), &range) {
            Ok(value) => Some(value),
            Err(message) => {
                self.error(key, message);
                None
            }
        }
    }

    /// One of some words; absent: the first.
    pub(super) fn choice<T: Copy>(&mut self, key: &'static str, choices: &[(&str, T)]) -> T {
        let default = choices[0].1;
        let Some(value) = self.take(key) else { return default };
        let found = match text(value.get_ref()) {
            Ok(text) => choices.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
                let words: Vec<_> = choices.iter().map(|(word, _)| format!("{word:?}")).collect();
                format!("{text:?} is not one of {}", words.join(", "))
            }),
            Err(message) => Err(message),
        };
        found.unwrap_or_else(|message| {
            self.error(key, message);
            default
        })
    }

    /// One of some words, which must be there. After an error: the first.
    pub(super) fn required_choice<T: Copy>(&mut self, key: &'static str, choices: &[(&str, T)]) -> T {
        if self.table.is_some_and(|table| !table.contains_key(key)) {
            let words: Vec<_> = choices.iter().map(|(word, _)| format!("{word:?}")).collect();
            self.error(key, format!("missing: one of {}", words.join(", ")));
        }
        self.choice(key, choices)
    }

    /// A list; absent: empty. After an error in one element, a placeholder stands for it.
    pub(super) fn list<T: FromValue>(&mut self, key: &'static str, max: usize) -> Vec<T> {
        self.elements(key, max, T::from_value, T::placeholder)
    }

    /// A list of integers in a range; absent: empty.
    pub(super) fn int_list(&mut self, key: &'static str, max: usize, range: RangeInclusive<u64>) -> Vec<u64> {
        let start = *range.start();
        self.elements(key, max, |value| integer(value, &range), || start)
    }

    /// A table inside; absent: an empty one.
    pub(super) fn section(&mut self, key: &'static str) -> Section<'a, 'i> {
        let table = self.take(key).and_then(|value| {
            let table = value.get_ref().as_table();
            if table.is_none() {
                self.error(key, mismatch(&format!("a table [{key}]"), value.get_ref()));
            }
            table
        });
        Section { sink: self.sink, path: self.field(key), table, asked: Vec::new() }
    }

    /// An array of tables; absent: none.
    pub(super) fn sections(&mut self, key: &'static str) -> Vec<Section<'a, 'i>> {
        let Some(value) = self.take(key) else { return Vec::new() };
        let Some(array) = value.get_ref().as_array() else {
            self.error(key, mismatch(&format!("an array of tables [[{key}]]"), value.get_ref()));
            return Vec::new();
        };
        let mut sections = Vec::new();
        for (i, element) in array.iter().enumerate() {
            let path = format!("{}[{i}]", self.field(key));
            self.sink.place(&path, element.span().start);
            let table = element.get_ref().as_table();
            if table.is_none() {
                self.error(key, mismatch(&format!("an array of tables [[{key}]]"), element.get_ref()));
                return Vec::new();
            }
            sections.push(Section { sink: self.sink, path, table, asked: Vec::new() });
        }
        sections
    }

    /// Reports the keys that nobody asked for.
    pub(super) fn finish(self) {
        let Some(table) = self.table else { return };
        for key in table.keys() {
            let name = key.get_ref().as_ref();
            if self.asked.contains(&name) {
                continue;
            }
            let message = match nearest(name, &self.asked) {
                Some(known) => format!("unknown key; did you mean {known:?}?"),
                None => format!("unknown key; known keys: {}", self.asked.join(", ")),
            };
            self.sink.error_at(key.span().start, &self.field(name), message);
        }
    }

    fn take(&mut self, key: &'static str) -> Option<&'a Spanned<DeValue<'i>>> {
        self.asked.push(key);
        let (name, value) = self.table?.get_key_value(key)?;
        // The key's line, for a value may span several.
        self.sink.place(&self.field(key), name.span().start);
        Some(value)
    }

    fn elements<T>(
        &mut self,
        key: &'static str,
        max: usize,
        read: impl Fn(&DeValue<'_>) -> Result<T, String>,
        placeholder: impl Fn() -> T,
    ) -> Vec<T> {
        let Some(value) = self.take(key) else { return Vec::new() };
        let Some(array) = value.get_ref().as_array() else {
            self.error(key, mismatch("a list", value.get_ref()));
            return Vec::new();
        };
        if array.len() > max {
            self.error(key, format!("{} elements are more than {max}", array.len()));
        }
        let mut elements = Vec::new();
        for (i, element) in array.iter().enumerate() {
            let path = format!("{}[{i}]", self.field(key));
            self.sink.place(&path, element.span().start);
            elements.push(read(element.get_ref()).unwrap_or_else(|message| {
                self.sink.error(&path, message);
                placeholder()
            }));
        }
        elements
    }
}

/// The known word that a mistyped one most likely means.
pub(super) fn nearest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    // A third of the letters may be wrong; beyond that a suggestion would mislead.
    let limit = (word.chars().count() / 3).max(1);
    let distances = known.iter().map(|k| (strsim::damerau_levenshtein(word, k), *k));
    distances.filter(|(distance, _)| *distance <= limit).min_by_key(|(distance, _)| *distance).map(|(_, k)| k)
}

fn text<'v>(value: &'v DeValue<'_>) -> Result<&'v str, String> {
    value.as_str().ok_or_else(|| mismatch("a string", value))
}

/// An integer in a range; `None` if the value is no number at all.
pub(super) fn whole_number(value: &DeValue<'_>, range: &RangeInclusive<u64>) -> Option<Result<u64, String>> {
    value.as_integer().map(|_| integer(value, range))
}

fn integer(value: &DeValue<'_>, range: &RangeInclusive<u64>) -> Result<u64, String> {
    let number = value.as_integer().ok_or_else(|| mismatch("an integer", value))?;
    let refused = || format!("{} is not in {}..={}", number.as_str(), range.start(), range.end());
    let number = i128::from_str_radix(number.as_str(), number.radix()).map_err(|_| refused())?;
    u64::try_from(number).ok().filter(|n| range.contains(n)).ok_or_else(refused)
}

fn mismatch(expected: &str, found: &DeValue<'_>) -> String {
    let found = match found.type_str() {
        "array" => "a list",
        "integer" => "an integer",
        "float" => "a fractional number",
        "boolean" => "true or false",
        "datetime" => "a date",
        "table" => "a table",
        _ => "a string",
    };
    format!("expected {expected}, found {found}")
}
