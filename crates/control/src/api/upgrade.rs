//! Another program goes on with the work of a running daemon.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Which program: the body of `POST /v1/upgrade`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UpgradeSpec {
    /// A `bifrostd`; none: the one that lies where the running one was started from.
    pub binary: Option<PathBuf>,
}

/// What became of it: the new daemon runs, and the old one ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpgradeReport {
    /// The new daemon's process.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// The old one's version.
    pub former_version: String,
    /// How long the new one took to prepare, while the old one worked, microseconds.
    pub prepared_us: u64,
    /// How long nothing was fetched from guests, microseconds; of that, the time in which nothing was carried at all.
    pub held_us: u64,
    /// In which no packet was carried, microseconds.
    pub stopped_us: u64,
    /// Sessions and translated connections that were handed over.
    pub sessions: u64,
    /// Guests' packets that were handed over, for they were not acknowledged.
    pub packets: u64,
    /// Packets and sessions that could not be.
    pub left_out: u64,
}

impl fmt::Display for UpgradeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, version, former_version, sessions, packets, left_out, .. } = self;
        let ms = |us: u64| us as f64 / 1000.0;
        write!(
            f,
            "bifrostd {version} (process {pid}) goes on with the work of {former_version}: prepared for {:.0} ms, guests held for {:.1} ms, \
             of which nothing was carried for {:.1} ms\n{sessions} sessions and {packets} packets handed over, {left_out} left out",
            ms(self.prepared_us),
            ms(self.held_us),
            ms(self.stopped_us),
        )
    }
}
