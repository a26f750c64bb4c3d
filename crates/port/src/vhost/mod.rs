//! A virtio network device in a guest's own memory, as the back-end of a vhost-user front-end (QEMU, Cloud Hypervisor,
//! user-mode Linux, DPDK).
//!
//! [`VhostPort`] serves a socket on its own thread; `device` handles the messages. Once a guest's rings are complete,
//! it hands a [`VhostQueue`] to its [`QueueOwner`], which gives it to a worker; when they no longer are, it takes it
//! back. `helper` holds the descriptors that a front-end sends, `call` notifies through them: nothing that a front-end
//! does with the other end of a descriptor delays anyone else. `queue` is one queue pair, `pairs` several. `ring` is
//! the interface of a ring; `split` and `packed` implement the two formats, `receive` and `transmit` the handling of
//! packets; `memory` checks every access.

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
mod position;
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
pub use device::HandedMessage;
pub use dirty_log::{DirtyLog, LOG_PAGE};
pub use memory::{Memory, MemoryError, RegionSpec};
#[cfg(feature = "mutations")]
pub use mutation::{Mutation, interfere};
pub use queue::{GuestQueue, VhostQueue};
pub use server::{HandedPort, VhostError, VhostPort};
pub use unplugged::Unplugged;

/// Maximum queue pairs of a device.
pub const MAX_QUEUES: u16 = 16;

/// Configuration of a vhost-user port.
#[derive(Clone, Debug)]
pub struct VhostConfig {
    /// Its name, for log messages.
    pub name: String,
    /// The socket's path.
    pub socket: PathBuf,
    /// Which side listens.
    pub mode: Mode,
    /// The guest's MAC address.
    pub mac: [u8; 6],
    /// The guest's MTU, bytes.
    pub mtu: u16,
    /// Queue pairs that the driver may use, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Whether the driver may choose packed rings.
    pub packed: bool,
    /// Header-payload slicing: only the head of a packet is copied when it is fetched (SIGCOMM'24, section 5.2).
    /// Without it, the whole packet is, and a driver may reuse buffers that are in flight.
    pub slicing: bool,
    /// Whether TCP segments are merged for a driver that accepts large packets.
    pub merged: bool,
    /// File for the inflight record, for front-ends that keep none; `None`: no record, and a guest of such a front-end
    /// does not survive a kill of this process.
    pub record: Option<PathBuf>,
    /// Messages per second that a front-end may send on average, with a burst of 4096; faster ones are delayed. 0: no
    /// limit.
    pub message_rate: u32,
}

/// A [`VhostConfig::message_rate`] that exceeds the needs of any front-end, and at which none keeps a processor or a
/// worker busy.
pub const MESSAGE_RATE: u32 = 1000;

/// Which side creates the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// This side; front-ends connect.
    Server,
    /// The front-end; this side connects, with retries.
    Client,
}

/// Runs the queues of a port. All methods are called from the port's own thread.
pub trait QueueOwner: Send {
    /// A guest has started: run its queues from now on.
    fn start(&mut self, queue: VhostQueue);
    /// The guest stops: the started queue must be dropped before this returns.
    fn stop(&mut self);
    /// Makes the started queue [log](crate::GuestPort::log_writes) all writes after this returns, or stop logging.
    /// `false`: not possible; the queue is then stopped, and another one started.
    fn log_writes(&mut self, _log: Option<DirtyLog>) -> bool {
        false
    }
    /// The guest has migrated here and runs now.
    fn arrived(&mut self) {}
    /// The handler of a front-end's message panicked; the device was [stopped](Self::stop), and starts from scratch.
    fn fault(&mut self, _panic: &Panic) {}
}
