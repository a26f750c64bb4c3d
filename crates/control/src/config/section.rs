//! Reads TOML tables field by field, and collects all errors with their lines.

use std::cell::{OnceCell, RefCell};
use std::collections::HashSet;
use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use bifrost_wire::Mac;
use ipnet::IpNet;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::ConfigError;

/// Maximum number of errors, after which reading stops: a file that is not a configuration at all must not take hours
/// or gigabytes.
const MAX_ERRORS: usize = 1000;
/// Maximum length of a field's name and of a message, characters. Longer ones, which quote the file, are truncated.
const MAX_FIELD: usize = 200;
const MAX_MESSAGE: usize = 2000;

/// Collects errors, and finds the lines of fields. Lines are only computed for errors: most files have none, and some
/// have a hundred thousand routes.
pub(super) struct Sink<'a> {
    file: &'a str,
    text: &'a str,
    document: &'a DeTable<'a>,
    line_starts: OnceCell<Vec<usize>>,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    failed: HashSet<String>,
    errors: Vec<ConfigError>,
}

impl<'a> Sink<'a> {
    /// A sink for `document`, parsed from the `text` of `file`.
    pub(super) fn new(file: &'a str, text: &'a str, document: &'a DeTable<'a>) -> Sink<'a> {
        Sink { file, text, document, line_starts: OnceCell::new(), state: RefCell::default() }
    }

    /// Reports an error of a field, at the line of the field or of the nearest enclosing table.
    pub(super) fn error(&self, field: impl fmt::Display, message: impl Into<String>) {
        let field = field.to_string();
        let line = self.line_of_field(&field);
        self.push(line, field, message.into());
    }

    /// Reports an error at a byte offset of the text.
    pub(super) fn error_at(&self, offset: usize, field: impl fmt::Display, message: impl Into<String>) {
        self.push(self.line_of_offset(offset), field.to_string(), message.into());
    }

    /// Whether a field already has an error, so that its value is meaningless.
    pub(super) fn failed(&self, field: impl fmt::Display) -> bool {
        let failed = &self.state.borrow().failed;
        !failed.is_empty() && failed.contains(&field.to_string())
    }

    /// Whether a field, or one inside it, has an error.
    pub(super) fn failed_within(&self, field: &str) -> bool {
        self.state.borrow().failed.iter().any(|f| f.starts_with(field))
    }

    /// Whether the file sets a field.
    pub(super) fn written(&self, field: &str) -> bool {
        offset_of(self.document, field).is_ok()
    }

    /// The line of a field, or of the nearest enclosing table; 0: the file as a whole.
    pub(super) fn line_of_field(&self, field: &str) -> usize {
        let (Ok(offset) | Err(Some(offset))) = offset_of(self.document, field) else { return 0 };
        self.line_of_offset(offset)
    }

    pub(super) fn into_errors(self) -> Vec<ConfigError> {
        self.state.into_inner().errors
    }

    /// Whether the maximum number of errors is reached: stop reading.
    pub(super) fn is_full(&self) -> bool {
        self.state.borrow().errors.len() >= MAX_ERRORS
    }

    fn push(&self, line: usize, field: String, message: String) {
        let mut state = self.state.borrow_mut();
        if state.errors.len() >= MAX_ERRORS {
            return;
        }
        let message = match state.errors.len() + 1 {
            MAX_ERRORS => {
                format!("{}; errors beyond these {MAX_ERRORS} are not listed", printable(&message, MAX_MESSAGE))
            }
            _ => printable(&message, MAX_MESSAGE),
        };
        let file = self.file.to_owned();
        state.errors.push(ConfigError { file, line, field: printable(&field, MAX_FIELD), message });
        state.failed.insert(field);
    }

    fn line_of_offset(&self, offset: usize) -> usize {
        let starts = || std::iter::once(0).chain(self.text.match_indices('\n').map(|(i, _)| i + 1)).collect();
        self.line_starts.get_or_init(starts).partition_point(|start| *start <= offset)
    }
}

/// Escapes control characters, which a terminal might interpret, and truncates a text to `most` characters.
fn printable(text: &str, most: usize) -> String {
    let mut out = String::new();
    for c in text.chars().take(most) {
        // Messages of the TOML parser contain line ends.
        if c.is_control() && c != '\n' { out.extend(c.escape_debug()) } else { out.push(c) }
    }
    if text.chars().nth(most).is_some() {
        out.push('…');
    }
    out
}

/// The byte offset of a field such as `port[2].addresses[0]`. If the file does not set it, the error is the offset of
/// the nearest enclosing field, if any.
fn offset_of(document: &DeTable<'_>, field: &str) -> Result<usize, Option<usize>> {
    let mut table = Some(document);
    let mut found = None;
    for part in field.split('.') {
        let (key, indexes) = part.split_once('[').map_or((part, None), |(key, rest)| (key, Some(rest)));
        // The offset of the key, because a value may span several lines.
        let (name, mut value) = table.and_then(|table| table.get_key_value(key)).ok_or(found)?;
        found = Some(name.span().start);
        for index in indexes.into_iter().flat_map(|rest| rest.split('[')) {
            let index = index.trim_end_matches(']').parse::<usize>().map_err(|_| found)?;
            value = value.get_ref().as_array().and_then(|array| array.get(index)).ok_or(found)?;
            found = Some(value.span().start);
        }
        table = value.get_ref().as_table();
    }
    found.ok_or(None)
}

/// A type that can be read from a single TOML value.
pub(super) trait FromValue: Sized {
    /// A placeholder after an error; it never leaves this module's callers.
    fn placeholder() -> Self;
    /// Reads a value; the error describes what is wrong with it.
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
            Ok(address) => format!("{text:?} lacks a prefix length; for a single address write {:?}", {
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
        if mac.is_unicast() { Ok(mac) } else { Err(format!("{mac} is not a unicast MAC address")) }
    }
}

/// One table, read field by field. [`finish`](Self::finish) reports keys that were not read as unknown.
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
        self.sink.error(self.field(key), message);
    }

    /// Whether one of its fields already has an error.
    pub(super) fn has_failed(&self, key: &str) -> bool {
        self.sink.failed(self.field(key))
    }

    /// Whether the table contains a field.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.is_some_and(|table| table.contains_key(key))
    }

    /// An optional field.
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

    /// A required field.
    pub(super) fn required<T: FromValue>(&mut self, key: &'static str) -> T {
        self.optional(key).unwrap_or_else(|| {
            self.error(key, "missing");
            T::placeholder()
        })
    }

    /// Refuses a field that other tables of this name may have; `why` says what to do.
    pub(super) fn refuse(&mut self, key: &'static str, why: &str) {
        if self.table.is_some_and(|table| table.contains_key(key)) {
            self.asked.push(key);
            self.error(key, why);
        }
    }

    /// An integer in a range; absent: `default`.
    pub(super) fn int(&mut self, key: &'static str, range: RangeInclusive<u64>, default: u64) -> u64 {
        self.optional_int(key, range).unwrap_or(default)
    }

    /// An optional integer in a range. After an error: the range's start.
    pub(super) fn optional_int(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        let value = self.take(key)?;
        Some(integer(value.get_ref(), &range).unwrap_or_else(|message| {
            self.error(key, message);
            *range.start()
        }))
    }

    /// A required integer in a range.
    pub(super) fn required_int(&mut self, key: &'static str, range: RangeInclusive<u64>) -> u64 {
        let start = *range.start();
        self.optional_int(key, range).unwrap_or_else(|| {
            self.error(key, "missing");
            start
        })
    }

    /// `"auto"` (returns `None`) or an integer in a range; absent: as `"auto"`.
    pub(super) fn auto_int(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        self.int_or_word(key, range, "auto", None)
    }

    /// A word (returns `None`) or an integer in a range; absent: `default`.
    pub(super) fn int_or_word(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        word: &str,
        default: Option<u64>,
    ) -> Option<u64> {
        let Some(value) = self.take(key) else { return default };
        if value.get_ref().as_str() == Some(word) {
            return None;
        }
        if value.get_ref().is_str() {
            self.error(key, format!("expected {word:?} or an integer in {}..={}", range.start(), range.end()));
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

    /// One of several words; absent: the first.
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

    /// One of several words, required. After an error: the first.
    pub(super) fn required_choice<T: Copy>(&mut self, key: &'static str, choices: &[(&str, T)]) -> T {
        if self.table.is_some_and(|table| !table.contains_key(key)) {
            let words: Vec<_> = choices.iter().map(|(word, _)| format!("{word:?}")).collect();
            self.error(key, format!("missing: one of {}", words.join(", ")));
        }
        self.choice(key, choices)
    }

    /// A list; absent: empty. Invalid elements become placeholders.
    pub(super) fn list<T: FromValue>(&mut self, key: &'static str, max: usize) -> Vec<T> {
        self.elements(key, max, T::from_value, T::placeholder)
    }

    /// A list of integers in a range; absent: empty.
    pub(super) fn int_list(&mut self, key: &'static str, max: usize, range: RangeInclusive<u64>) -> Vec<u64> {
        let start = *range.start();
        self.elements(key, max, |value| integer(value, &range), || start)
    }

    /// A nested table; absent: an empty one.
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

    /// An optional nested table.
    pub(super) fn optional_section(&mut self, key: &'static str) -> Option<Section<'a, 'i>> {
        if self.has(key) {
            return Some(self.section(key));
        }
        self.asked.push(key);
        None
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
            if self.sink.is_full() {
                break;
            }
            let path = format!("{}[{i}]", self.field(key));
            let table = element.get_ref().as_table();
            if table.is_none() {
                self.error(key, mismatch(&format!("an array of tables [[{key}]]"), element.get_ref()));
                return Vec::new();
            }
            sections.push(Section { sink: self.sink, path, table, asked: Vec::new() });
        }
        sections
    }

    /// Reports keys that were not read.
    pub(super) fn finish(self) {
        let Some(table) = self.table else { return };
        for key in table.keys() {
            let name = key.get_ref().as_ref();
            if self.asked.contains(&name) {
                continue;
            }
            if self.sink.is_full() {
                return;
            }
            let message = match nearest(name, &self.asked) {
                Some(known) => format!("unknown key; did you mean {known:?}?"),
                None => format!("unknown key; known keys: {}", self.asked.join(", ")),
            };
            self.sink.error_at(key.span().start, self.field(name), message);
        }
    }

    fn take(&mut self, key: &'static str) -> Option<&'a Spanned<DeValue<'i>>> {
        self.asked.push(key);
        self.table?.get(key)
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
            elements.push(read(element.get_ref()).unwrap_or_else(|message| {
                self.sink.error(&path, message);
                placeholder()
            }));
        }
        elements
    }
}

/// The known word that is nearest to a mistyped one.
pub(super) fn nearest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    // Up to a third of the letters may be wrong; beyond that, a suggestion would be misleading.
    let length = word.chars().count();
    let limit = (length / 3).max(1);
    // The distance is at least the difference of the lengths. Computing it takes time and memory for each pair of
    // letters.
    let close = known.iter().filter(|k| k.chars().count().abs_diff(length) <= limit);
    let distances = close.map(|k| (strsim::damerau_levenshtein(word, k), *k));
    distances.filter(|(distance, _)| *distance <= limit).min_by_key(|(distance, _)| *distance).map(|(_, k)| k)
}

fn text<'v>(value: &'v DeValue<'_>) -> Result<&'v str, String> {
    value.as_str().ok_or_else(|| mismatch("a string", value))
}

/// An integer in a range; `None` if the value is not an integer.
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
