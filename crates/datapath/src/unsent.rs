//! Reasons for dropping a guest's packet before the transport has it: how they are counted, shown in a capture, and how
//! its buffer goes back to the guest.

use bifrost_avs::DropReason;
use bifrost_nic::Malformed;
use bifrost_port::{GuestPort, TxFrame};

use crate::capture::{Note, Stage};
use crate::core::Core;
use crate::counters::Counters;
use crate::departure::Departure;
use crate::ports::Port;

/// Why a guest's packet is dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unsent {
    /// It cannot be parsed.
    Malformed(Malformed),
    /// An injected fault.
    Fault,
    /// The switch drops it, and has counted it.
    Switch(DropReason),
    /// The switch accepts it, but it cannot be segmented.
    Unsegmentable(Malformed),
    /// Too many packets wait for a window to its destination.
    WindowFull(Departure),
    /// Too many packets of its band wait for the port's turn on the link.
    QueueFull(Departure),
}

impl Unsent {
    /// Its name in captures.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Unsent::Malformed(reason) | Unsent::Unsegmentable(reason) => reason.name(),
            Unsent::Fault => "fault",
            Unsent::Switch(reason) => reason.name(),
            Unsent::WindowFull(_) => "window_full",
            Unsent::QueueFull(_) => "queue_full",
        }
    }

    fn count<P: GuestPort>(&self, port: &mut Port<P>, counters: &mut Counters) {
        let of_port = &mut port.outbound;
        let counter = match self {
            Unsent::Malformed(reason) => {
                counters.malformed_guest_frames[reason.index()] += 1;
                &mut of_port.malformed_packets
            }
            Unsent::Fault => {
                counters.fault_dropped_packets += 1;
                counters.fault_guest_dropped_packets += 1;
                &mut of_port.fault_dropped_packets
            }
            Unsent::Switch(_) => return,
            Unsent::Unsegmentable(reason) => {
                counters.malformed_guest_frames[reason.index()] += 1;
                &mut of_port.unsegmentable_packets
            }
            Unsent::WindowFull(_) => &mut of_port.window_full_packets,
            Unsent::QueueFull(_) => &mut of_port.queue_full_packets,
        };
        *counter += 1;
    }

    /// What a capture shows beside the packet.
    fn note<P: GuestPort>(&self, port: &Port<P>) -> Note {
        let note = Note::outwards(self.name(), port.owner);
        match self {
            Unsent::Malformed(_) | Unsent::Fault => note,
            Unsent::Switch(_) | Unsent::Unsegmentable(_) => Note { vni: Some(port.vni.get()), ..note },
            Unsent::WindowFull(to) | Unsent::QueueFull(to) => Note { vni: Some(to.vni), peer: Some(to.peer), ..note },
        }
    }
}

impl<P: GuestPort> Core<P> {
    /// Drops a guest's packet: counts it, shows it to a capture, and returns its buffer.
    #[cold]
    pub(crate) fn drop_unsent<const SEEN: bool>(&mut self, owner: u32, frame: TxFrame, reason: Unsent) {
        let Some(port) = self.ports.get_mut(owner as usize).and_then(Option::as_mut) else { return };
        reason.count(port, &mut self.counters);
        if SEEN && let Some(capture) = &mut self.capture {
            capture.held(Stage::Drop, reason.note(port), &port.port, frame.handle, frame.len);
        }
        match reason {
            Unsent::WindowFull(_) | Unsent::QueueFull(_) => port.drop_undelivered(frame.handle),
            Unsent::Malformed(_) | Unsent::Fault | Unsent::Switch(_) | Unsent::Unsegmentable(_) => {
                port.complete(frame.handle);
            }
        }
    }
}
