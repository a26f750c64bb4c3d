//! A virtio network device in a guest's own memory, as the back-end of a vhost-user front-end (QEMU, Cloud Hypervisor,
//! user-mode Linux, DPDK).
//!
//! [`VhostPort`] serves a socket on a thread of its own; `device` understands the messages. Once a guest's rings are
//! complete it hands a [`VhostQueue`] to its [`QueueOwner`], which gives it to a worker; when they are not any more it
//! takes it back. What a front-end has sent as a descriptor is `helper`'s, what is written to one `call`'s: nothing that
//! a front-end does with the other end of one holds up anybody else. `queue` is one queue pair, `pairs` several. `ring` says what a ring does, `split` and `packed` have the rules of the two formats, `receive` and
//! `transmit` what they mean for packets; `memory` checks every access.

mod arena;
#[cfg(test)]
mod backend_tests;
mod call;
mod chain;
mod comeback;
pub(crate) mod counter;
mod counters;
mod credit;
mod device;
mod dirty_log;
mod features;
pub(crate) mod helper;
#[cfg(test)]
mod hostile_tests;
mod index;
mod inflight;
#[cfg(debug_assertions)]
pub mod inject;
#[cfg(test)]
mod kill_tests;
pub(crate) mod mapping;
mod memory;
#[cfg(test)]
mod message_tests;
mod messages;
#[cfg(test)]
mod migration_tests;
#[cfg(test)]
mod mock;
mod moved;
#[cfg(test)]
mod moved_tests;
mod mutation;
mod owner;
mod pace;
mod packed;
mod packed_inflight;
#[cfg(test)]
mod packed_tests;
mod pairs;
#[cfg(test)]
mod pairs_tests;
mod queue;
mod receive;
mod record;
mod ring;
mod server;
mod socket;
mod split;
mod staging;
#[cfg(test)]
mod tests;
mod transmit;
mod unplugged;

use std::path::PathBuf;

use crate::panics::Panic;

pub use counters::VhostCounters;
pub use dirty_log::{DirtyLog, LOG_PAGE};
pub use memory::{Memory, MemoryError, RegionSpec};
#[cfg(feature = "mutations")]
pub use mutation::{Mutation, interfere};
pub use queue::{GuestQueue, VhostQueue};
pub use server::{VhostError, VhostPort};
pub use unplugged::Unplugged;

/// Most queue pairs of a device.
pub const MAX_QUEUES: u16 = 16;

/// How to make a vhost-user port.
#[derive(Clone, Debug)]
pub struct VhostConfig {
    /// Its name, for messages.
    pub name: String,
    /// The socket's path.
    pub socket: PathBuf,
    /// Who listens there.
    pub mode: Mode,
    /// The guest's MAC address.
    pub mac: [u8; 6],
    /// The guest's MTU, bytes.
    pub mtu: u16,
    /// Queue pairs that its driver may use, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Whether its driver may choose packed rings.
    pub packed: bool,
    /// Whether of what the guest sends only the head is copied when it is fetched (SIGCOMM'24, section 5.2); otherwise all
    /// of it is, and a driver may use its buffers before it has got them back.
    pub slicing: bool,
    /// Whether TCP segments are merged for a driver that takes large packets.
    pub merged: bool,
    /// Where to note what is in flight for a front-end that does not keep that itself; `None`: nowhere, and a guest of
    /// such a front-end does not survive that this process is killed.
    pub record: Option<PathBuf>,
    /// Messages a second that a front-end may send in the long run; 4096 may come at once. What comes faster waits. 0: as
    /// fast as it likes.
    pub message_rate: u32,
}

/// A [`VhostConfig::message_rate`] that no front-end needs, and that keeps neither a processor nor a worker busy.
pub const MESSAGE_RATE: u32 = 1000;

/// Who makes the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// This side does; front-ends connect.
    Server,
    /// The front-end does; this side connects, again and again.
    Client,
}

/// What runs the queues of a port. Both are called from the port's own thread.
pub trait QueueOwner: Send {
    /// A guest has started: from now on its queues are to be worked on.
    fn start(&mut self, queue: VhostQueue);
    /// The guest stops: the queue that was started must have been dropped when this returns.
    fn stop(&mut self);
    /// Has the queue that was started [log](crate::GuestPort::log_writes) what it writes from when this returns, or no more.
    /// `false`: that cannot be; the queue is then stopped, and another one started.
    fn log_writes(&mut self, _log: Option<DirtyLog>) -> bool {
        false
    }
    /// The guest has come from another host and runs here now.
    fn arrived(&mut self) {}
    /// A message of the front-end made its handler panic; the device was [stopped](Self::stop), and starts from nothing.
    fn fault(&mut self, _panic: &Panic) {}
}
