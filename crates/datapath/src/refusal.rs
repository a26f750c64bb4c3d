//! Why a frame from the underlay, or of a neighbour, is not placed: the one place where that is counted, shown, and told to its sender.

use bifrost_avs::DropReason;
use bifrost_nic::Malformed;
use bifrost_port::GuestPort;
use bifrost_rte::{Engine, Output, Slot, Time};

use crate::counters::Counters;
use crate::ports::Port;

/// Why a frame is not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// A wrong transport checksum.
    BadChecksum,
    /// More than its guest's share, while the worker cannot keep up.
    Overload,
    /// It cannot be parsed.
    Malformed(Malformed),
    /// It is not for the vNIC of its connection.
    WrongVnic,
    /// The switch refuses it, and has counted it.
    Switch(DropReason),
    /// Plain VXLAN that met congestion, whose sender would not learn of it (RFC 6040).
    MarkedNotEct,
    /// Its port, or that port's queue on this worker, is not here any more.
    Gone,
    /// It has to wait for others, and they need the room.
    ReorderFull,
    /// More than its guest may get.
    RateLimited,
    /// Its guest's port rests, for it has kept the worker.
    SlowPort,
    /// The guest has no buffer, and the packet comes again.
    NoGuestBuffer,
    /// The guest has no buffer, and nobody sends the packet again.
    NoBuffer,
    /// No buffer of the guest can have it.
    TooLarge,
    /// The transport has no memory to remember it.
    NoPage,
}

impl Refusal {
    /// As a capture shows it.
    pub(crate) fn name(self) -> &'static str {
        match self {
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

    /// Counts it. `port`: the one that the frame is for, if it is known and here.
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
            Refusal::BadChecksum => &mut counters.bad_checksum_frames,
            Refusal::Malformed(reason) => &mut counters.malformed_underlay_frames[reason.index()],
            Refusal::WrongVnic => &mut counters.wrong_vnic_packets,
            Refusal::MarkedNotEct => &mut counters.marked_not_ect_packets,
            Refusal::Gone | Refusal::Overload | Refusal::RateLimited | Refusal::SlowPort => &mut counters.gone_packets,
            Refusal::ReorderFull => &mut counters.reorder_full_packets,
            Refusal::NoBuffer => &mut counters.no_buffer_packets,
            Refusal::TooLarge => &mut counters.too_large_packets,
            Refusal::NoPage => &mut counters.discarded_packets,
            // By the switch, and by the transport.
            Refusal::Switch(_) | Refusal::NoGuestBuffer => return,
        };
        *counter += 1;
    }

    /// Tells the transport, which tells the packet's sender what to do about it.
    pub(crate) fn tell(self, now: Time, slot: Slot, engine: &mut Engine, out: &mut Output) {
        match self {
            // The datagram's own checksum was right, so the network is not to blame (PROTOCOL §7.1).
            Refusal::BadChecksum => engine.damaged(slot),
            // It slows down, and sends it again.
            Refusal::Overload | Refusal::RateLimited | Refusal::SlowPort => engine.rate_limited(slot),
            // It would be refused again: it must not be repeated (NSDI'26, 7.1).
            Refusal::Malformed(_)
            | Refusal::WrongVnic
            | Refusal::Switch(_)
            | Refusal::MarkedNotEct
            | Refusal::TooLarge => engine.policy_dropped(now, slot, out),
            Refusal::Gone => engine.gone(slot),
            Refusal::ReorderFull | Refusal::NoGuestBuffer | Refusal::NoBuffer => engine.not_placed(slot),
            // The transport has found that itself.
            Refusal::NoPage => {}
        }
    }
}
