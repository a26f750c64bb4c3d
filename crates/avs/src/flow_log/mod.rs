//! Flow logs: a record of each conversation of some ports, accepted or rejected (Triton paper, section 2.3). A switch
//! may have several, each with ports, limits and records of its own.
//!
//! The switch counts packets. The caller takes the records from time to time
//! ([`Switch::take_flow_records`](crate::Switch::take_flow_records)); timeouts of conversations are evaluated then,
//! so a packet costs one lookup and nothing else. Without a flow log there is no cost. All memory is bounded: packets
//! of conversations without room are counted and not logged.

mod handed;
mod logs;
pub(crate) mod observe;
mod record;
mod sample;
mod table;

pub(crate) use handed::COUNT_MAX;
pub use handed::HandedFlow;
pub(crate) use logs::FlowLogs;
pub use record::{FlowEnd, FlowRecord, Traffic};
pub(crate) use table::{Flow, Handshake, Name};

/// Counters of flow logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowLogCounters {
    /// Conversations in the table now.
    pub current_flows: u64,
    /// Records created.
    pub created_records: u64,
    /// Records lost because they were not taken in time.
    pub lost_records: u64,
    /// Packets of conversations for which the table had no room.
    pub unlogged_packets: u64,
    /// Packets of conversations that sampling leaves out.
    pub unsampled_packets: u64,
}

impl FlowLogCounters {
    /// The sum of two.
    pub(crate) fn and(self, other: &FlowLogCounters) -> FlowLogCounters {
        FlowLogCounters {
            current_flows: self.current_flows + other.current_flows,
            created_records: self.created_records + other.created_records,
            lost_records: self.lost_records + other.lost_records,
            unlogged_packets: self.unlogged_packets + other.unlogged_packets,
            unsampled_packets: self.unsampled_packets + other.unsampled_packets,
        }
    }

    /// Every counter by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("current_flows", self.current_flows),
            ("created_records", self.created_records),
            ("lost_records", self.lost_records),
            ("unlogged_packets", self.unlogged_packets),
            ("unsampled_packets", self.unsampled_packets),
        ]
        .into_iter()
    }
}
