//! Frames from guests to services of this host's daemon, and from those to guests.

mod frames;

use std::sync::mpsc::SyncSender;

/// A frame of a guest for a service of the daemon: unsegmented, with correct checksums if the guest's were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFrame {
    /// The worker that fetched it, which gives the guest the answers.
    pub worker: u16,
    /// The port's number.
    pub port: u32,
    /// From the Ethernet header on.
    pub frame: Vec<u8>,
}

/// The queue of frames for services of the daemon.
pub type HostQueue = SyncSender<HostFrame>;
