//! What a runtime is told when something fails (specification, section "Error").

use serde::Serialize;

/// A failure, and its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// What kind it is.
    pub code: Code,
    /// What is wrong, where, and what to do.
    pub message: String,
}

/// Kinds of failures, with the numbers of the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    /// The configuration is of a version that this program does not know.
    Version = 1,
    /// The configuration has a key that this program does not know.
    Unsupported = 2,
    /// The container is not known, or it has no such attachment.
    UnknownContainer = 3,
    /// The environment's variables are wrong.
    Environment = 4,
    /// Something cannot be read, written or run.
    Io = 5,
    /// Something is no JSON, or not what it should be.
    Decoding = 6,
    /// The configuration is wrong.
    Configuration = 7,
    /// `bifrostd` does not answer: the call may be made again later.
    Later = 11,
    /// No container can be attached now.
    Unavailable = 50,
    /// `bifrostd` refuses. The first number that is a plugin's own.
    Refused = 100,
    /// Something is not as it was when the container was attached.
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

    /// What is written to standard output.
    pub fn to_json(&self, version: &str) -> String {
        let body = Body { cni_version: version, code: self.code as u32, msg: &self.message };
        serde_json::to_string(&body).unwrap_or_default()
    }
}
