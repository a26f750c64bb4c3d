//! What is wrong with a batch.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::key::Key;

/// The most problems that are told of a batch.
const MAX_TOLD: usize = 20;

/// Why a batch changes nothing; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError(pub Vec<Problem>);

/// What is wrong with a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The object; none: the batch as a whole.
    pub key: Option<Key>,
    /// The field of it; empty: the object.
    pub field: String,
    /// What is wrong, and what to do.
    pub what: String,
    /// Whether it contradicts what there is; otherwise it is wrong by itself.
    pub is_conflict: bool,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(key) = &self.key {
            write!(f, "{key}: ")?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.what)
    }
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().take(MAX_TOLD).enumerate() {
            write!(f, "{}{problem}", if i > 0 { "\n" } else { "" })?;
        }
        match self.0.len().saturating_sub(MAX_TOLD) {
            0 => Ok(()),
            more => write!(f, "\nand {more} more"),
        }
    }
}

impl std::error::Error for PlanError {}
