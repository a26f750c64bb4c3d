//! Errors of a configuration, each with its line and field.

use std::fmt;

/// One error of a configuration file. Displays as `bifrostd.toml:17: route[2].peer: no peer named "host-x"; …`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The file's name as given.
    pub file: String,
    /// Line, from 1; 0: the file as a whole.
    pub line: usize,
    /// The field, such as `route[2].peer`; elements count from 0. Empty: the file as a whole.
    pub field: String,
    /// What is wrong and, if possible, what would be right.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for ConfigError {}

/// All errors of a configuration, in the order of their lines; never empty. Displays one per line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigErrors(Vec<ConfigError>);

impl ConfigErrors {
    /// The errors, in the order of their lines.
    pub fn errors(&self) -> &[ConfigError] {
        &self.0
    }

    pub(super) fn new(mut errors: Vec<ConfigError>) -> ConfigErrors {
        errors.sort_by_key(|e| e.line);
        errors.dedup();
        ConfigErrors(errors)
    }

    pub(super) fn of_file(file: &str, message: String) -> ConfigErrors {
        ConfigErrors(vec![ConfigError { file: file.to_owned(), line: 0, field: String::new(), message }])
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            fmt::Display::fmt(error, f)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}
