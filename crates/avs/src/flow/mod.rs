//! Flow records: what became of a packet that passed, compiled into one entry, so that the next packet of its flow need not walk
//! the tables again (Triton paper, section 4).
//!
//! A record is found by the flow's hash, and belongs to a packet if all that the tables look at is the same: both MAC addresses,
//! the five-tuple, and the port or the peer and network that it came from. It holds as long as the configuration and the sessions
//! that it names. What is done by it is what the tables would have had done, the steps of the sessions included.
//!
//! Only what is ordinary has records: unfragmented UDP, and TCP without SYN; where conversations are remembered, not the packet
//! that begins one. So a flood of SYNs makes none. Everything else (fragments, ICMP, neighbours, what is too large or at the end of
//! its time to live) goes the way of the tables.
//!
//! A table has a fixed number of records, in sets of four, and its hash is secret. What guests can do is to take each
//! other's places in a set; whose record is gone pays for the tables again, and no more.

mod key;
mod table;

pub(crate) use key::{Key, Source};
pub(crate) use table::{Flows, Inserted, NONE, Record, RecordId, Touched};

/// Counters of flow records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCounters {
    /// Packets that had one.
    pub found_packets: u64,
    /// Packets that nobody looked up, for another one of their flow came with them.
    pub batched_packets: u64,
    /// Records made, ever.
    pub created_records: u64,
    /// Packets for which none was made, since other flows have its places.
    pub collision_packets: u64,
}

impl FlowCounters {
    /// Every counter by name; names end in their unit.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let Self { found_packets, batched_packets, created_records, collision_packets } = *self;
        let all = [
            ("flow_found_packets", found_packets),
            ("flow_batched_packets", batched_packets),
            ("flow_created_records", created_records),
            ("flow_collision_packets", collision_packets),
        ];
        all.into_iter()
    }

    pub(crate) fn count(&mut self, inserted: Inserted) {
        match inserted {
            Inserted::Kept => self.created_records += 1,
            Inserted::Crowded => self.collision_packets += 1,
            Inserted::NoRoom => {}
        }
    }
}
