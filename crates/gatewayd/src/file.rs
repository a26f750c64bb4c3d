//! Configuration files: TOML, with the line of each error.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use toml::Spanned;

/// The errors of a file.
#[derive(Debug)]
pub struct FileErrors {
    path: PathBuf,
    /// Line, from 1 (0: the file as a whole), and error.
    pub list: Vec<(usize, String)>,
}

impl fmt::Display for FileErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (line, text)) in self.list.iter().enumerate() {
            let end = if n + 1 < self.list.len() { "\n" } else { "" };
            match line {
                0 => write!(f, "{}: {text}{end}", self.path.display())?,
                line => write!(f, "{}:{line}: {text}{end}", self.path.display())?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for FileErrors {}

/// Collects errors.
#[derive(Debug)]
pub struct Checker<'a> {
    text: &'a str,
    list: Vec<(usize, String)>,
}

impl Checker<'_> {
    /// Adds an error about a value.
    pub fn error<T>(&mut self, value: &Spanned<T>, text: impl Into<String>) {
        self.list.push((line(self.text, value.span().start), text.into()));
    }

    /// Adds an error about the file as a whole.
    pub fn general(&mut self, text: impl Into<String>) {
        self.list.push((0, text.into()));
    }

    /// Returns the value, or adds the error with its line.
    pub fn check<T, U, E: fmt::Display>(&mut self, value: &Spanned<T>, result: Result<U, E>) -> Option<U> {
        result.map_err(|error| self.error(value, error.to_string())).ok()
    }
}

/// Reads a file of type `T` and converts it to a `U`. All errors that `check` adds are reported together.
///
/// # Errors
/// All errors in the file.
pub fn load<T: DeserializeOwned, U>(
    path: &Path,
    check: impl FnOnce(T, &mut Checker<'_>) -> Option<U>,
) -> Result<U, FileErrors> {
    let fail = |error: io::Error| FileErrors { path: path.to_owned(), list: vec![(0, error.to_string())] };
    parse(path, &fs::read_to_string(path).map_err(fail)?, check)
}

/// Like [`load`], for a text. Errors name `path`.
///
/// # Errors
/// All errors in the text.
pub fn parse<T: DeserializeOwned, U>(
    path: &Path,
    text: &str,
    check: impl FnOnce(T, &mut Checker<'_>) -> Option<U>,
) -> Result<U, FileErrors> {
    let fail = |list| FileErrors { path: path.to_owned(), list };
    let file: T = toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(0, |span| line(text, span.start));
        fail(vec![(line, error.message().to_owned())])
    })?;
    let mut checker = Checker { text, list: Vec::new() };
    let value = check(file, &mut checker);
    match value {
        Some(value) if checker.list.is_empty() => Ok(value),
        _ => {
            checker.list.sort();
            Err(fail(checker.list))
        }
    }
}

/// The line of an offset in a text.
fn line(text: &str, at: usize) -> usize {
    1 + text.as_bytes().iter().take(at).filter(|b| **b == b'\n').count()
}

/// Loads a configuration from a text. Errors do not name a path.
#[cfg(test)]
pub(crate) fn load_text<C>(text: &str, load: fn(&Path) -> Result<C, FileErrors>) -> Result<C, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.toml");
    fs::write(&path, text).unwrap();
    let prefix = format!("{}:", path.display());
    load(&path).map_err(|errors| errors.to_string().replace(&prefix, ""))
}
