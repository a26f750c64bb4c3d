//! Packets delayed by an injected fault. Bounded; used only by faults.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::SocketAddr;

use bifrost_port::{Datagram, LaneId, Service};
use bifrost_rte::Time;

/// Maximum number of delayed packets.
const MAX_PACKETS: usize = 65_536;

/// A delayed packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Packet {
    /// To be sent.
    Out {
        /// Destination.
        lane: LaneId,
        /// Outer DSCP and ECN codepoint.
        class: u8,
        /// UDP payload.
        bytes: Vec<u8>,
    },
    /// Received; faults before the port have been applied, and also those at the port if `at_port`.
    In {
        /// UDP payload.
        bytes: Vec<u8>,
        /// Outer source.
        source: SocketAddr,
        /// BIFROST or plain VXLAN.
        plain: bool,
        /// ECN codepoint.
        ecn: u8,
        /// Received TTL.
        ttl: u8,
        /// The port's faults have been applied, too.
        at_port: bool,
    },
}

impl Packet {
    /// A copy of a received datagram.
    pub(crate) fn copy_of(datagram: &Datagram<'_>) -> Self {
        Self::come_in(datagram, datagram.payload.to_vec(), false)
    }

    /// A packet received in a datagram for a port whose faults have been applied, as the UDP payload of its own
    /// datagram.
    pub(crate) fn at_port(datagram: &Datagram<'_>, bytes: Vec<u8>) -> Self {
        Self::come_in(datagram, bytes, true)
    }

    fn come_in(datagram: &Datagram<'_>, bytes: Vec<u8>, at_port: bool) -> Self {
        Packet::In {
            bytes,
            source: datagram.source,
            plain: datagram.service == Service::Vxlan,
            ecn: datagram.ecn,
            ttl: datagram.ttl,
            at_port,
        }
    }
}

/// Delayed packets, by time.
#[derive(Debug, Default)]
pub(crate) struct Delayed {
    heap: BinaryHeap<Reverse<(Time, u64)>>,
    packets: std::collections::HashMap<u64, Packet>,
    order: u64,
}

impl Delayed {
    /// Adds a packet; returns false if there are too many.
    pub(crate) fn push(&mut self, at: Time, packet: Packet) -> bool {
        if self.packets.len() >= MAX_PACKETS {
            return false;
        }
        self.order += 1;
        self.heap.push(Reverse((at, self.order)));
        self.packets.insert(self.order, packet);
        true
    }

    /// Number of delayed packets.
    pub(crate) fn len(&self) -> usize {
        self.packets.len()
    }

    /// When the next one is due.
    pub(crate) fn next(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    /// The next one that is due.
    pub(crate) fn pop(&mut self, now: Time) -> Option<Packet> {
        if self.next()? > now {
            return None;
        }
        let Reverse((_, order)) = self.heap.pop()?;
        self.packets.remove(&order)
    }
}
