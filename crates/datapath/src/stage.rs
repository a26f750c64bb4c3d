//! The steps of a turn.

/// A step of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Stage {
    /// The loop itself.
    #[default]
    Loop,
    /// A command of another thread.
    Command,
    /// A datagram from the underlay: its headers.
    Arrival,
    /// A packet of the transport without a frame: ACK, probe, SKIP, set-up, RESET.
    Control,
    /// A data packet in the transport.
    Data,
    /// The switch decides about a frame for a guest.
    Judge,
    /// A frame is placed in the guest's ring or queue.
    Place,
    /// The transport's timers.
    Timer,
    /// Placed frames are made visible.
    Publish,
    /// The guest is notified.
    Notify,
    /// The transport builds acknowledgements.
    Acknowledge,
    /// Packets are fetched from the guest's ring or queue.
    Fetch,
    /// A packet of the guest in parser and switch.
    Switch,
    /// A packet of the guest in the transport.
    Transport,
    /// A packet of the guest is copied for another guest of this host.
    Copy,
    /// A packet of the guest is segmented and encapsulated.
    Emit,
    /// A packet of the transport without a frame is encapsulated.
    EmitControl,
    /// A buffer goes back to the guest.
    Release,
    /// The guest is told which buffers it has back.
    Flush,
    /// A batch of datagrams is handed to the underlay.
    Send,
    /// A message of a front-end is processed; not on a worker.
    Message,
}

impl Stage {
    /// All stages.
    pub const ALL: [Stage; 21] = [
        Stage::Loop,
        Stage::Command,
        Stage::Arrival,
        Stage::Control,
        Stage::Data,
        Stage::Judge,
        Stage::Place,
        Stage::Timer,
        Stage::Publish,
        Stage::Notify,
        Stage::Acknowledge,
        Stage::Fetch,
        Stage::Switch,
        Stage::Transport,
        Stage::Copy,
        Stage::Emit,
        Stage::EmitControl,
        Stage::Release,
        Stage::Flush,
        Stage::Send,
        Stage::Message,
    ];

    /// Its name, for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Loop => "loop",
            Stage::Command => "command",
            Stage::Arrival => "arrival",
            Stage::Control => "control",
            Stage::Data => "data",
            Stage::Judge => "judge",
            Stage::Place => "place",
            Stage::Timer => "timer",
            Stage::Publish => "publish",
            Stage::Notify => "notify",
            Stage::Acknowledge => "acknowledge",
            Stage::Fetch => "fetch",
            Stage::Switch => "switch",
            Stage::Transport => "transport",
            Stage::Copy => "copy",
            Stage::Emit => "emit",
            Stage::EmitControl => "emit control",
            Stage::Release => "release",
            Stage::Flush => "flush",
            Stage::Send => "send",
            Stage::Message => "message",
        }
    }

    /// Whether there is a packet for a guest in progress that is not counted yet.
    pub(crate) fn has_packet_for_guest(self) -> bool {
        matches!(self, Stage::Arrival | Stage::Data | Stage::Judge | Stage::Place)
    }

    /// Whether there is a packet for the underlay in progress that is not counted yet.
    pub(crate) fn has_packet_for_underlay(self) -> bool {
        matches!(self, Stage::Emit | Stage::EmitControl)
    }

    /// Whether the step belongs to a port, so that its guest or its device causes whatever happens in it.
    pub fn is_of_port(self) -> bool {
        matches!(
            self,
            Stage::Place
                | Stage::Publish
                | Stage::Notify
                | Stage::Fetch
                | Stage::Switch
                | Stage::Transport
                | Stage::Copy
                | Stage::Emit
                | Stage::Release
                | Stage::Flush
        )
    }
}
