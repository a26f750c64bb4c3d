//! Flow logs: what each conversation of some ports was (Triton paper, section 2.3), accepted or rejected.
//!
//! The switch counts; somebody takes the records away now and then ([`Switch::take_flow_records`](crate::Switch::take_flow_records)), and it
//! is then that conversations end by their timeouts: packets pay for one look-up and for nothing else. Without logs they pay for nothing.
//! All is bounded: what finds no room is counted and not logged.

pub(crate) mod observe;
mod record;
mod table;

pub use record::{FlowEnd, FlowRecord, Traffic};
pub(crate) use table::FlowLog;

/// Counters of flow logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowLogCounters {
    /// Conversations that are being counted.
    pub current_flows: u64,
    /// Records that were made.
    pub created_records: u64,
    /// Records that were lost, because nobody took them in time.
    pub lost_records: u64,
    /// Packets of conversations for which there was no room.
    pub unlogged_packets: u64,
}

impl FlowLogCounters {
    /// The sum of two.
    pub(crate) fn and(self, other: &FlowLogCounters) -> FlowLogCounters {
        FlowLogCounters {
            current_flows: self.current_flows + other.current_flows,
            created_records: self.created_records + other.created_records,
            lost_records: self.lost_records + other.lost_records,
            unlogged_packets: self.unlogged_packets + other.unlogged_packets,
        }
    }

    /// Every counter by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("current_flows", self.current_flows),
            ("created_records", self.created_records),
            ("lost_records", self.lost_records),
            ("unlogged_packets", self.unlogged_packets),
        ]
        .into_iter()
    }
}
