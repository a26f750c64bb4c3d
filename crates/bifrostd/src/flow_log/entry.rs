//! A record with the name of its port.

use bifrost_avs::FlowRecord;

/// A record with the port's name and wall-clock times.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a> {
    pub(super) record: &'a FlowRecord,
    /// The port's name.
    pub(super) port: &'a str,
    /// Milliseconds since 1970.
    pub(super) start_ms: u64,
    pub(super) end_ms: u64,
}
