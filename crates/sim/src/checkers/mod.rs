//! Invariants of every run, in addition to those that the world itself checks ([`Flows`](crate::Flows): every packet of
//! a flow once, in order, unchanged, at its guest; every byte of TCP; every handle).
//!
//! | checker | what it checks |
//! |---|---|
//! | [`Conversation`] | packets on the wire: PSNs, retransmissions, ACKs that never claim too much or come too late, giving up |
//! | [`Bounds`] | windows, pages, connections, timers within their bounds at any time; nothing left at the end |
//! | [`Account`] | every packet that was sent reliably is counted as received, given up, or retransmitted by a connection that restarted |
//! | [`Blame`] | no path is suspect in a network that lost nothing |
//! | [`Patience`] | no buffer is held forever, and without faults everything arrives in time |
//!
//! A packet of a light guest's flow may fail to arrive only in these cases (everything else is a violation):
//!
//! - it left as plain VXLAN: its network or pair is not carried reliably, no connection could be set up, it was given
//!   up after three timeouts (PROTOCOL §14.1), or all paths were silent (§14.3);
//! - a daemon crashed that had taken it from its guest and not released it, or that had placed it for its guest and not
//!   published it (it may have acknowledged it already, §9.2);
//! - it was lost on purpose between its guest and the switch.
//!
//! It may arrive twice if it left as plain VXLAN, or was retransmitted on a connection that restarted (§4.6), which the
//! wire shows by another CID. Such a packet may also arrive after later ones of its flow: packets held behind it are
//! published when the receiver restarts, because they were acknowledged. Otherwise order breaks only with plain VXLAN,
//! or in a network without order.

mod account;
mod blame;
mod bounds;
mod calm;
mod conversation;
mod patience;
mod seen;

pub use account::Account;
pub use blame::Blame;
pub use bounds::Bounds;
pub use conversation::Conversation;
pub use patience::Patience;

use crate::checker::Checker;
use crate::world::World;

/// Longest time, ns, from the end of all faults, or from the fetch of a packet, until it reaches its guest.
///
/// The longest chain of delays: the packet is behind a full window, of which eight packets are retransmitted per RTO; a
/// path is suspect, and is probed every 100 ms at worst; the RTO is at its ceiling (50 ms by default, 100 ms in the
/// swarm) and doubles three times until the packet is given up (1 + 2 + 4 + 8 = 15 RTOs: 1.5 s); SKIPs back off to 1 s.
pub const LIVENESS_NS: u64 = 5_000_000_000;

/// Longest time, ns, for which a running host holds a guest's buffer, whatever happens to the network and the peer.
///
/// Like [`LIVENESS_NS`], but every 8 packets of a window of 4096 wait for a separate timeout, because the peer responds
/// but its guest receives nothing.
pub const HELD_NS: u64 = 60_000_000_000;

/// Adds all checkers to a world.
pub fn watch(world: &mut World) {
    for checker in all(world) {
        world.add_checker(checker);
    }
}

fn all(world: &World) -> [Box<dyn Checker>; 5] {
    [
        Box::new(Conversation::new(world)),
        Box::new(Bounds::new(world)),
        Box::new(Patience::new(world)),
        Box::new(Blame::new(world)),
        Box::new(Account::default()),
    ]
}
