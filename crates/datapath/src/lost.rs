//! Reasons for dropping a datagram of the underlay before a connection or the switch has seen it: how they are counted
//! and shown in a capture.

use bifrost_port::{Datagram, GuestPort};
use bifrost_wire::bifrost;

use crate::capture::Stage;
use crate::core::Core;

/// Why a datagram, or a packet of a bundle, is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    /// It comes from no peer, or the transport's packet from a peer without it.
    UnknownPeer,
    /// Its VXLAN header is wrong.
    BadVxlan,
    /// The parser of the transport refuses it.
    Refused(bifrost::Refusal),
    /// An injected fault drops it.
    FaultDropped,
    /// An injected fault corrupts it, which the kernel would have noticed.
    FaultCorrupted,
}

impl Lost {
    fn name(self) -> &'static str {
        match self {
            Lost::UnknownPeer => "unknown_peer",
            Lost::BadVxlan => "bad_vxlan",
            Lost::Refused(reason) => reason.name(),
            Lost::FaultDropped | Lost::FaultCorrupted => "fault",
        }
    }
}

impl<P: GuestPort> Core<P> {
    /// Counts a dropped datagram, and shows it to a capture.
    #[cold]
    pub(crate) fn lose<const SEEN: bool>(&mut self, lost: Lost, datagram: &Datagram<'_>) {
        let counters = &mut self.counters;
        match lost {
            Lost::UnknownPeer => counters.unknown_peer_packets += 1,
            Lost::BadVxlan => counters.bad_vxlan_packets += 1,
            Lost::Refused(reason) => counters.refused_packets[reason.index()] += 1,
            Lost::FaultDropped => counters.fault_dropped_packets += 1,
            Lost::FaultCorrupted => {
                counters.fault_corrupted_packets += 1;
                counters.fault_rx_corrupted_packets += 1;
            }
        }
        if SEEN && let Some(capture) = &mut self.capture {
            capture.arrived(Stage::Drop, lost.name(), datagram, &self.peers);
        }
    }
}
