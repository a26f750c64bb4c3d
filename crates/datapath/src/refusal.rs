//! Reasons for not placing a frame from the underlay or from a guest of this host: how they are counted, shown in a
//! capture, and reported to the sender.

use bifrost_avs::DropReason;
use bifrost_nic::Malformed;
use bifrost_port::GuestPort;
use bifrost_rte::{Engine, Output, Slot, Time};

use crate::counters::Counters;
use crate::ports::Port;

/// Why a frame is not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// An injected fault.
    Fault,
    /// A wrong transport checksum.
    BadChecksum,
    /// It exceeds its guest's share while the worker cannot keep up.
    Overload,
    /// It cannot be parsed.
    Malformed(Malformed),
    /// It is not for the vNIC of its connection.
    WrongVnic,
    /// The switch drops it, and has counted it.
    Switch(DropReason),
    /// Plain VXLAN with a congestion mark of which its sender would not learn (RFC 6040).
    MarkedNotEct,
    /// Its port, or that port's queue on this worker, no longer exists.
    Gone,
    /// It must wait for others, which need the room.
    ReorderFull,
    /// It exceeds its guest's receive limit.
    RateLimited,
    /// Its guest's port rests, because it has kept the worker busy.
    SlowPort,
    /// The guest has no buffer; the packet will be retransmitted.
    NoGuestBuffer,
    /// The guest has no buffer; nobody retransmits the packet.
    NoBuffer,
    /// It is larger than any buffer of the guest.
    TooLarge,
    /// The transport has no memory to track it.
    NoPage,
}

impl Refusal {
    /// Its name in captures.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Refusal::Fault => "fault",
            Refusal::BadChecksum => "bad_checksum",
            Refusal::Overload => "overload",
            Refusal::Malformed(reason) => reason.name(),
            Refusal::WrongVnic => "wrong_vnic",
            Refusal::Switch(reason) => reason.name(),
            Refusal::MarkedNotEct => "marked_not_ect",
            Refusal::Gone => "gone",
            Refusal::ReorderFull => "reorder_full",
            Refusal::RateLimited => "rate_limited",
            Refusal::SlowPort => "slow_port",
            Refusal::NoGuestBuffer => "no_guest_buffer",
            Refusal::NoBuffer => "no_buffer",
            Refusal::TooLarge => "too_large",
            Refusal::NoPage => "no_page",
        }
    }

    /// Counts it. `port`: the frame's destination, if it is known and here.
    pub(crate) fn count<P: GuestPort>(self, port: Option<&mut Port<P>>, counters: &mut Counters) {
        let of_port = port.map(|port| match self {
            Refusal::Overload => Some(&mut port.overload_dropped),
            Refusal::RateLimited => Some(&mut port.rate_limited),
            Refusal::SlowPort => Some(&mut port.slowness.rest_packets),
            _ => None,
        });
        if let Some(Some(counter)) = of_port {
            *counter += 1;
            counters.guest_rx_packets += 1;
            return;
        }
        let counter = match self {
            Refusal::Fault => &mut counters.fault_dropped_packets,
            Refusal::BadChecksum => &mut counters.bad_checksum_frames,
            Refusal::Malformed(reason) => &mut counters.malformed_underlay_frames[reason.index()],
            Refusal::WrongVnic => &mut counters.wrong_vnic_packets,
            Refusal::MarkedNotEct => &mut counters.marked_not_ect_packets,
            Refusal::Gone | Refusal::Overload | Refusal::RateLimited | Refusal::SlowPort => &mut counters.gone_packets,
            Refusal::ReorderFull => &mut counters.reorder_full_packets,
            Refusal::NoBuffer => &mut counters.no_buffer_packets,
            Refusal::TooLarge => &mut counters.too_large_packets,
            Refusal::NoPage => &mut counters.discarded_packets,
            // Counted by the switch, or by the transport.
            Refusal::Switch(_) | Refusal::NoGuestBuffer => return,
        };
        *counter += 1;
    }

    /// Tells the transport, which tells the packet's sender how to react.
    pub(crate) fn tell(self, now: Time, slot: Slot, engine: &mut Engine, out: &mut Output) {
        match self {
            // The datagram's own checksum was right, so the network is not to blame (PROTOCOL §7.1).
            Refusal::BadChecksum => engine.damaged(slot),
            // The sender slows down, and retransmits it.
            Refusal::Overload | Refusal::RateLimited | Refusal::SlowPort => engine.rate_limited(slot),
            // It would be refused again, so it must not be retransmitted (NSDI'26, 7.1).
            Refusal::Malformed(_)
            | Refusal::WrongVnic
            | Refusal::Switch(_)
            | Refusal::MarkedNotEct
            | Refusal::TooLarge => engine.policy_dropped(now, slot, out),
            Refusal::Gone => engine.gone(slot),
            // As if it had not arrived.
            Refusal::Fault => {}
            Refusal::ReorderFull | Refusal::NoGuestBuffer | Refusal::NoBuffer => engine.not_placed(slot),
            // The transport found that itself.
            Refusal::NoPage => {}
        }
    }
}
