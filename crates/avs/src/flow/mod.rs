//! Flow records: the decision about a packet that passed, compiled into one entry, so that later packets of its flow
//! need not walk the tables again (Triton paper, section 4).
//!
//! A record is found by the flow's hash. It applies to a packet if all fields that the tables look at are equal: both
//! MAC addresses, the five-tuple, and the port, or the peer and network, that it came from. It is valid as long as
//! the configuration is current and the sessions that it refers to exist. Its effect is the same as that of the
//! tables, including the updates of the sessions.
//!
//! Only ordinary packets have records: unfragmented UDP, and TCP without SYN. Where conversations are tracked, the
//! first packet of a conversation has none, so a flood of SYNs creates no records. All other packets (fragments,
//! ICMP, neighbor discovery, too large ones, expired TTLs) use the tables.
//!
//! A table has a fixed number of records in sets of four, and its hash is secret. Guests can only displace each
//! other's records within a set; a flow whose record is displaced uses the tables again, at no other cost.

mod key;
mod table;

pub(crate) use key::{Key, Source};
pub(crate) use table::{Flows, Inserted, NONE, Record, RecordId, Touched};

/// Counters of flow records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCounters {
    /// Packets that had a flow record.
    pub found_packets: u64,
    /// Packets that were not looked up, because another packet of their flow came in the same turn.
    pub batched_packets: u64,
    /// Records created, in total.
    pub created_records: u64,
    /// Packets for which no record was created, because other flows occupied their set.
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
