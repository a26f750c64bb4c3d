//! Errors of the API: what was wrong, where, and what to do.

use serde::{Deserialize, Serialize};

/// A request that failed. On the wire: `{"error": {"what": …, "where": …, "hint": …}}` with the status of its kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// Its kind, which determines the HTTP status.
    pub kind: ErrorKind,
    /// What was wrong, a sentence without its full stop.
    pub what: String,
    /// Where: a field, a name, a path; may be empty.
    pub location: String,
    /// What to do about it; may be empty.
    pub hint: String,
}

/// The kinds of [`ApiError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is wrong: 400.
    BadRequest,
    /// The client is not permitted to do this: 403.
    Forbidden,
    /// A named object does not exist: 404.
    NotFound,
    /// The request conflicts with the daemon's state: 409.
    Conflict,
    /// The daemon failed: 500.
    Internal,
    /// The daemon cannot answer now: 503.
    Unavailable,
}

impl ErrorKind {
    /// The HTTP status code.
    pub fn status(self) -> u16 {
        match self {
            ErrorKind::BadRequest => 400,
            ErrorKind::Forbidden => 403,
            ErrorKind::NotFound => 404,
            ErrorKind::Conflict => 409,
            ErrorKind::Internal => 500,
            ErrorKind::Unavailable => 503,
        }
    }

    /// The kind of an HTTP status code; other codes count as the nearest kind.
    pub fn from_status(status: u16) -> ErrorKind {
        match status {
            403 => ErrorKind::Forbidden,
            404 => ErrorKind::NotFound,
            409 => ErrorKind::Conflict,
            400..=499 => ErrorKind::BadRequest,
            503 => ErrorKind::Unavailable,
            _ => ErrorKind::Internal,
        }
    }
}

impl ApiError {
    /// An error of any kind; add [`at`](Self::at) and [`hint`](Self::hint).
    pub fn new(kind: ErrorKind, what: impl Into<String>) -> ApiError {
        ApiError { kind, what: what.into(), location: String::new(), hint: String::new() }
    }

    /// The request is wrong.
    pub fn bad_request(what: impl Into<String>) -> ApiError {
        ApiError::new(ErrorKind::BadRequest, what)
    }

    /// A named object does not exist.
    pub fn not_found(what: impl Into<String>) -> ApiError {
        ApiError::new(ErrorKind::NotFound, what)
    }

    /// The request conflicts with the daemon's state.
    pub fn conflict(what: impl Into<String>) -> ApiError {
        ApiError::new(ErrorKind::Conflict, what)
    }

    /// The daemon failed.
    pub fn internal(what: impl Into<String>) -> ApiError {
        ApiError::new(ErrorKind::Internal, what)
    }

    /// The daemon cannot answer now.
    pub fn unavailable(what: impl Into<String>) -> ApiError {
        ApiError::new(ErrorKind::Unavailable, what)
    }

    /// Sets the location.
    pub fn at(mut self, location: impl Into<String>) -> ApiError {
        self.location = location.into();
        self
    }

    /// Sets the hint.
    pub fn hint(mut self, hint: impl Into<String>) -> ApiError {
        self.hint = hint.into();
        self
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.location.is_empty() {
            write!(f, "{}: ", self.location)?;
        }
        f.write_str(&self.what)?;
        if !self.hint.is_empty() {
            write!(f, " ({})", self.hint)?;
        }
        Ok(())
    }
}

impl std::error::Error for ApiError {}

/// The body of an error response.
#[derive(Serialize, Deserialize)]
pub(crate) struct ErrorBody {
    pub(crate) error: ErrorFields,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct ErrorFields {
    pub(crate) what: String,
    #[serde(rename = "where", default)]
    pub(crate) location: String,
    #[serde(default)]
    pub(crate) hint: String,
}

impl From<ApiError> for ErrorBody {
    fn from(e: ApiError) -> ErrorBody {
        ErrorBody { error: ErrorFields { what: e.what, location: e.location, hint: e.hint } }
    }
}

impl ErrorBody {
    pub(crate) fn into_error(self, status: u16) -> ApiError {
        let ErrorFields { what, location, hint } = self.error;
        ApiError { kind: ErrorKind::from_status(status), what, location, hint }
    }
}
