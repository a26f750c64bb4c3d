//! The switch's decision about a frame, in either direction. It is one type, which the caches also store.

use std::net::IpAddr;

use bifrost_wire::{Mac, Vni};

use crate::drop_reason::DropReason;
use crate::ids::{PeerId, PortId, WorkerId};
use crate::rewrite::Rewrite;
use crate::tables::Ordering;

/// The decision about a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Where it goes.
    pub action: Action,
    /// Header changes, to be applied to every frame that leaves or is delivered: the frame itself, its segments, or
    /// its fragments.
    pub rewrite: Option<Rewrite>,
    /// The path MTU, bytes, if the frame is larger and must be fragmented
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
        /// The receiving vNIC. Together, `vni`, `local` and `remote` identify the transport's connection.
        remote: Mac,
        /// Whether the reliable transport carries it; otherwise plain VXLAN does.
        reliable: bool,
        /// The network's policy for the order in which the receiver delivers packets.
        ordering: Ordering,
    },
    /// To a port of this host.
    Deliver {
        /// The port.
        port: PortId,
        /// The other worker of this host that must handle the frame: it applies the receiver's rules
        /// ([`Switch::from_worker`](crate::Switch::from_worker)). `None`: the rules have been applied.
        worker: Option<WorkerId>,
    },
    /// The frame ends here; [`Switch::answer`](crate::Switch::answer) goes back to the guest or peer that sent it.
    Answer {
        /// The sender's network.
        vni: Vni,
    },
    /// A copy of the frame goes to each vNIC of [`Switch::copies`](crate::Switch::copies), as if the guest had sent
    /// it there. The frame itself is dropped.
    Copy,
    /// To the daemon of this host, for the service at the frame's destination ([`METADATA`](crate::METADATA)).
    Host,
    /// The route to an address must be learned ([`Switch::learn`](crate::Switch::learn)); then the frame may be given
    /// to the switch again.
    Ask {
        /// The network in which the address is looked up: the sender's, or a peered one.
        vni: Vni,
        /// The address.
        address: IpAddr,
    },
    /// The frame is dropped.
    Drop(DropReason),
}

impl Verdict {
    /// A verdict to drop the frame.
    pub const fn drop(reason: DropReason) -> Self {
        Verdict::unchanged(Action::Drop(reason))
    }

    /// A verdict without header changes.
    pub const fn unchanged(action: Action) -> Self {
        Verdict { action, rewrite: None, fragment_to: None }
    }

    /// The drop reason, if the frame is dropped.
    pub const fn drop_reason(&self) -> Option<DropReason> {
        match self.action {
            Action::Drop(reason) => Some(reason),
            _ => None,
        }
    }

    /// Whether the frame goes on to another host or to a port of this host.
    pub const fn passes(&self) -> bool {
        matches!(self.action, Action::Forward { .. } | Action::Deliver { .. })
    }
}
