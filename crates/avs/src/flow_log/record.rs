//! What is told of a conversation.

use std::net::IpAddr;

use bifrost_wire::Vni;

use crate::drop_reason::DropReason;
use crate::ids::{Direction, PortId};

/// A conversation of a port's guest, or what there was of it since the record before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRecord {
    /// The port.
    pub port: PortId,
    /// The network that the port was in.
    pub vni: Vni,
    /// Who sent the first packet: the guest, or the other end.
    pub origin: Direction,
    /// The guest's address.
    pub local: IpAddr,
    /// The guest's port; of ICMP what stands for it, 0 for protocols without.
    pub local_port: u16,
    /// The other end's address.
    pub remote: IpAddr,
    /// The other end's port.
    pub remote_port: u16,
    /// IP protocol.
    pub protocol: u8,
    /// Why its packets were dropped; `None`: they passed.
    pub rejected: Option<DropReason>,
    /// From the guest, since the record before.
    pub sent: Traffic,
    /// To the guest, since the record before.
    pub received: Traffic,
    /// First packet of this record, ns of the switch's time.
    pub start_ns: u64,
    /// Last packet of this record, ns of the switch's time.
    pub end_ns: u64,
    /// Why there is a record.
    pub end: FlowEnd,
    /// From the first SYN to the ACK that completes the handshake, ns, as seen by this switch; `None`: not seen, or the SYN was repeated.
    pub handshake_ns: Option<u64>,
}

/// Packets of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// IP packets; what a guest leaves to be segmented counts as what it becomes.
    pub packets: u64,
    /// Bytes of IP packets, headers included.
    pub bytes: u64,
    /// All flags of its TCP segments.
    pub tcp_flags: u8,
}

/// Why there is a record (RFC 5102, section 5.11.3: `flowEndReason`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowEnd {
    /// Nothing was heard for a while.
    Idle,
    /// It goes on; this is what there was of it so far.
    Active,
    /// Both sides have closed it, or one has reset it.
    Closed,
    /// It is no longer logged.
    Forced,
}

impl FlowEnd {
    /// Its number in IPFIX.
    pub const fn number(self) -> u8 {
        match self {
            FlowEnd::Idle => 1,
            FlowEnd::Active => 2,
            FlowEnd::Closed => 3,
            FlowEnd::Forced => 4,
        }
    }

    /// What it is called.
    pub const fn name(self) -> &'static str {
        match self {
            FlowEnd::Idle => "idle",
            FlowEnd::Active => "active",
            FlowEnd::Closed => "closed",
            FlowEnd::Forced => "forced",
        }
    }
}
