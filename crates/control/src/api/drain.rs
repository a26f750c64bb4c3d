//! Draining of paths, for example before work on a cable.

use serde::{Deserialize, Serialize};

/// A path: the body of `POST /v1/paths/drain` and `POST /v1/paths/restore`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrainSpec {
    /// The peer's name.
    pub peer: String,
    /// The path's number, 0 to 7.
    pub path: u8,
}

/// The outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DrainReport {
    /// The peer's name.
    pub peer: String,
    /// The path's number.
    pub path: u8,
    /// Whether it is drained now.
    pub drained: bool,
    /// Whether this changed its state.
    pub changed: bool,
    /// The paths to the peer that are not drained now.
    pub in_use_paths: Vec<u8>,
}
