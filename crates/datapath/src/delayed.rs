//! Packets that an injected fault holds back. Bounded; used by faults alone.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::SocketAddr;

use bifrost_port::{Datagram, LaneId, Service};
use bifrost_rte::Time;

/// Packets that may wait at once.
const MAX_PACKETS: usize = 65_536;

/// A packet that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Packet {
    /// On its way out.
    Out {
        /// Where to.
        lane: LaneId,
        /// Outer DSCP and ECN codepoint.
        class: u8,
        /// UDP payload.
        bytes: Vec<u8>,
    },
    /// Come in; faults before the port have been applied, and at the port too if `at_port`.
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
        /// The port's faults have been applied too.
        at_port: bool,
    },
}

impl Packet {
    /// A copy of a datagram that came in.
    pub(crate) fn copy_of(datagram: &Datagram<'_>) -> Self {
        Self::come_in(datagram, datagram.payload.to_vec(), false)
    }

    /// What came in a datagram for a port, whose faults have been applied; as the UDP payload of a datagram of its own.
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

/// What waits, by time.
#[derive(Debug, Default)]
pub(crate) struct Delayed {
    heap: BinaryHeap<Reverse<(Time, u64)>>,
    packets: std::collections::HashMap<u64, Packet>,
    order: u64,
}

impl Delayed {
    /// Adds a packet; false when too many wait.
    pub(crate) fn push(&mut self, at: Time, packet: Packet) -> bool {
        if self.packets.len() >= MAX_PACKETS {
            return false;
        }
        self.order += 1;
        self.heap.push(Reverse((at, self.order)));
        self.packets.insert(self.order, packet);
        true
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.packets.len()
    }

    /// When the next one goes on.
    pub(crate) fn next(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    /// The next one whose time has come.
    pub(crate) fn pop(&mut self, now: Time) -> Option<Packet> {
        if self.next()? > now {
            return None;
        }
        let Reverse((_, order)) = self.heap.pop()?;
        self.packets.remove(&order)
    }
}
