//! Why a call failed.

use crate::ffi::{INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, Result as Code, SYSTEM_ERROR};

/// Why a call failed, by NCCL's status codes.
#[derive(Debug)]
pub(crate) enum Fail {
    Argument(String),
    Usage(String),
    System(String),
    Internal(String),
    Remote(String),
}

impl Fail {
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Argument(_) => INVALID_ARGUMENT,
            Self::Usage(_) => INVALID_USAGE,
            Self::System(_) => SYSTEM_ERROR,
            Self::Internal(_) => INTERNAL_ERROR,
            Self::Remote(_) => REMOTE_ERROR,
        }
    }
}

impl std::fmt::Display for Fail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = match self {
            Self::Argument(text) | Self::Usage(text) | Self::System(text) => text,
            Self::Internal(text) | Self::Remote(text) => text,
        };
        f.write_str(text)
    }
}
