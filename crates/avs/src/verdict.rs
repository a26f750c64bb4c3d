//! What the switch says about a frame, in either direction: one type, which the caches hold too.

use bifrost_wire::{Mac, Vni};

use crate::drop_reason::DropReason;
use crate::ids::{PeerId, PortId, WorkerId};
use crate::rewrite::Rewrite;
use crate::tables::Ordering;

/// What is to happen with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Where it goes.
    pub action: Action,
    /// To be applied to every frame that leaves or is delivered: the frame itself, its segments, or its fragments.
    pub rewrite: Option<Rewrite>,
    /// The largest IP packet that gets there, bytes, if the frame's is larger and is to be fragmented
    /// ([`Segments::plan_within`](bifrost_nic::Segments)).
    pub fragment_to: Option<u16>,
}

/// Where a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// To another host.
    Forward {
        /// The network of the receiving vNIC.
        vni: Vni,
        /// The host.
        peer: PeerId,
        /// The sending vNIC.
        local: Mac,
        /// The receiving vNIC: with `vni` and `local` this names the transport's connection.
        remote: Mac,
        /// Whether the transport carries it, or plain VXLAN.
        reliable: bool,
        /// In which order the receiver shows it; the network's policy.
        ordering: Ordering,
    },
    /// To a port of this host.
    Deliver {
        /// The port.
        port: PortId,
        /// The other worker of this host that serves the port. It decides whether the frame may come in
        /// ([`Switch::from_worker`](crate::Switch::from_worker)). `None`: that is decided.
        worker: Option<WorkerId>,
    },
    /// Nowhere: [`Switch::answer`](crate::Switch::answer) goes back to the guest or the peer that sent the frame.
    Answer {
        /// The sender's network.
        vni: Vni,
    },
    /// A copy of the frame goes to each vNIC of [`Switch::copies`](crate::Switch::copies), as if the guest had sent it
    /// there; the frame itself goes nowhere.
    Copy,
    /// To the daemon of this host, for the service at the frame's destination ([`METADATA`](crate::METADATA)).
    Host,
    /// Nowhere.
    Drop(DropReason),
}

impl Verdict {
    /// The frame goes no further.
    pub const fn drop(reason: DropReason) -> Self {
        Verdict::unchanged(Action::Drop(reason))
    }

    /// The frame stays as it is.
    pub const fn unchanged(action: Action) -> Self {
        Verdict { action, rewrite: None, fragment_to: None }
    }

    /// Why the frame is dropped, if it is.
    pub const fn drop_reason(&self) -> Option<DropReason> {
        match self.action {
            Action::Drop(reason) => Some(reason),
            _ => None,
        }
    }

    /// Whether the frame goes on, to another host or to a port of this one.
    pub const fn passes(&self) -> bool {
        matches!(self.action, Action::Forward { .. } | Action::Deliver { .. })
    }
}
