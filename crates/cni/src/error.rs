//! The error result for a runtime (specification, section "Error").

use serde::Serialize;

/// A failure, and its code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The code.
    pub code: Code,
    /// The error, its position, and the remedy.
    pub message: String,
}

/// Kinds of failures, with the codes of the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    /// The configuration has an unsupported version.
    Version = 1,
    /// The configuration has an unknown key.
    Unsupported = 2,
    /// The container is unknown, or does not have this attachment.
    UnknownContainer = 3,
    /// An environment variable is missing or invalid.
    Environment = 4,
    /// Something cannot be read, written or run.
    Io = 5,
    /// Something is not JSON, or has the wrong structure.
    Decoding = 6,
    /// The configuration is wrong.
    Configuration = 7,
    /// `bifrostd` does not answer: the runtime may retry later.
    Later = 11,
    /// No container can be attached now.
    Unavailable = 50,
    /// `bifrostd` refuses. The first code that a plugin may define.
    Refused = 100,
    /// The attachment has changed since the container was attached.
    Changed = 101,
    /// The container has such an attachment already.
    Exists = 102,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    cni_version: &'a str,
    code: u32,
    msg: &'a str,
}

impl Error {
    /// A failure.
    pub fn new(code: Code, message: impl Into<String>) -> Error {
        Error { code, message: message.into() }
    }

    /// The JSON for standard output.
    pub fn to_json(&self, version: &str) -> String {
        let body = Body { cni_version: version, code: self.code as u32, msg: &self.message };
        serde_json::to_string(&body).unwrap_or_default()
    }
}
