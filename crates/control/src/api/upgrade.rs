//! Upgrade of a running daemon by another program.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The program: the body of `POST /v1/upgrade`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UpgradeSpec {
    /// Path of a `bifrostd`; none: the path from which the running one was started.
    pub binary: Option<PathBuf>,
}

/// The outcome: the new daemon runs, and the old one exits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpgradeReport {
    /// The new daemon's process id.
    pub pid: u32,
    /// The new daemon's version.
    pub version: String,
    /// The old daemon's version.
    pub former_version: String,
    /// How long the new daemon prepared while the old one worked, µs.
    pub prepared_us: u64,
    /// How long no packets were fetched from guests, µs; includes `stopped_us`.
    pub held_us: u64,
    /// How long no packets were carried at all, µs.
    pub stopped_us: u64,
    /// Sessions and translated connections that were handed over.
    pub sessions: u64,
    /// Unacknowledged packets of guests that were handed over.
    pub packets: u64,
    /// Packets and sessions that could not be handed over.
    pub left_out: u64,
}

impl fmt::Display for UpgradeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, version, former_version, sessions, packets, left_out, .. } = self;
        let ms = |us: u64| us as f64 / 1000.0;
        write!(
            f,
            "bifrostd {version} (process {pid}) has replaced {former_version}: prepared for {:.0} ms, guests held for {:.1} ms, \
             no packets carried for {:.1} ms of these\n{sessions} sessions and {packets} packets handed over, {left_out} left out",
            ms(self.prepared_us),
            ms(self.held_us),
            ms(self.stopped_us),
        )
    }
}
