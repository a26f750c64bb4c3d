//! Records of the flow log.

use std::net::IpAddr;
use std::sync::Arc;

use bifrost_wire::Vni;

use crate::drop_reason::DropReason;
use crate::ids::{Direction, PortId};

/// A conversation of a port's guest, or the part of it since the previous record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowRecord {
    /// Name of the flow log.
    pub log: Arc<str>,
    /// The port.
    pub port: PortId,
    /// The network of the port at that time.
    pub vni: Vni,
    /// Direction of the first packet: from the guest, or to it.
    pub origin: Direction,
    /// The guest's address.
    pub local: IpAddr,
    /// The guest's port; for ICMP the identifier or type, for protocols without ports 0.
    pub local_port: u16,
    /// The other end's address.
    pub remote: IpAddr,
    /// The other end's port.
    pub remote_port: u16,
    /// IP protocol.
    pub protocol: u8,
    /// Why its packets were dropped; `None`: they passed.
    pub rejected: Option<DropReason>,
    /// From the guest, since the previous record.
    pub sent: Traffic,
    /// To the guest, since the previous record.
    pub received: Traffic,
    /// First packet of this record, ns of the switch's time.
    pub start_ns: u64,
    /// Last packet of this record, ns of the switch's time.
    pub end_ns: u64,
    /// Why the record was made.
    pub end: FlowEnd,
    /// Time from the first SYN to the ACK that completes the handshake as seen by this switch, ns; `None`: not seen,
    /// or the SYN was retransmitted.
    pub handshake_ns: Option<u64>,
}

/// Packets of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// IP packets; a frame that is to be segmented counts as its segments.
    pub packets: u64,
    /// Bytes of IP packets, headers included.
    pub bytes: u64,
    /// All flags of its TCP segments, combined.
    pub tcp_flags: u8,
}

/// Why a record was made (RFC 5102, section 5.11.3: `flowEndReason`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowEnd {
    /// The conversation was idle for too long.
    Idle,
    /// The conversation continues; this is an interim record.
    Active,
    /// Both sides have closed it, or one has reset it.
    Closed,
    /// The conversation is no longer logged.
    Forced,
}

impl FlowEnd {
    /// The value in IPFIX.
    pub const fn number(self) -> u8 {
        match self {
            FlowEnd::Idle => 1,
            FlowEnd::Active => 2,
            FlowEnd::Closed => 3,
            FlowEnd::Forced => 4,
        }
    }

    /// The end with this [number](Self::number).
    pub(crate) fn of_number(number: u8) -> Option<FlowEnd> {
        [FlowEnd::Idle, FlowEnd::Active, FlowEnd::Closed, FlowEnd::Forced]
            .into_iter()
            .find(|end| end.number() == number)
    }

    /// The name in logs.
    pub const fn name(self) -> &'static str {
        match self {
            FlowEnd::Idle => "idle",
            FlowEnd::Active => "active",
            FlowEnd::Closed => "closed",
            FlowEnd::Forced => "forced",
        }
    }
}
