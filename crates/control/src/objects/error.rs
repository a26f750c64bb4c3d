//! Errors of a batch: for each item, the field and what to do.

use std::fmt;

use crate::api::{ApiError, ErrorKind};
use crate::config::Kind;

/// Maximum number of errors that are displayed.
const MAX_SHOWN: usize = 20;

/// Errors of a batch, which then changes nothing; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApplyError(pub Vec<ItemError>);

/// An error of one item, or of an object that depends on the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemError {
    /// The item's index in the batch; none: the object is not in the batch.
    pub item: Option<usize>,
    /// The object, if known.
    pub object: Option<(Kind, String)>,
    /// The field of the object or item; empty: the object as a whole.
    pub field: String,
    /// What is wrong.
    pub what: String,
    /// What to do; empty if `what` already says it.
    pub hint: String,
    /// Whether it conflicts with other objects; otherwise it is invalid by itself.
    pub is_conflict: bool,
}

impl ItemError {
    /// The location, such as `items[2]: port "web1": mac`.
    fn location(&self) -> String {
        let mut parts = Vec::new();
        parts.extend(self.item.map(|item| format!("items[{item}]")));
        parts.extend(self.object.as_ref().map(|(kind, key)| format!("{kind} {key:?}")));
        if !self.field.is_empty() {
            parts.push(self.field.clone());
        }
        parts.join(": ")
    }
}

impl fmt::Display for ItemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let location = self.location();
        let separator = if location.is_empty() { "" } else { ": " };
        write!(f, "{location}{separator}{}", self.what)?;
        if self.hint.is_empty() { Ok(()) } else { write!(f, " ({})", self.hint) }
    }
}

impl fmt::Display for ApplyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().take(MAX_SHOWN).enumerate() {
            write!(f, "{}{error}", if i > 0 { "\n" } else { "" })?;
        }
        match self.0.len().saturating_sub(MAX_SHOWN) {
            0 => Ok(()),
            more => write!(f, "\nand {more} more"),
        }
    }
}

impl std::error::Error for ApplyError {}

impl From<ApplyError> for ApiError {
    fn from(error: ApplyError) -> ApiError {
        let is_conflict = error.0.iter().all(|e| e.is_conflict);
        let kind = if is_conflict { ErrorKind::Conflict } else { ErrorKind::BadRequest };
        match &error.0[..] {
            [only] => ApiError::new(kind, &only.what).at(only.location()).hint(match &*only.hint {
                "" => "nothing was changed".to_owned(),
                hint => format!("{hint}; nothing was changed"),
            }),
            all => ApiError::new(kind, format!("{} errors\n{error}", all.len())).hint("nothing was changed"),
        }
    }
}
