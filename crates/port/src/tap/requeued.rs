//! Devices whose packets go to another number of queues.
//!
//! If a process takes a device over for more queues, these exist from the beginning. If it needs fewer, the others exist
//! until the former process has ended. The steering program says which get packets, so one call for each device changes
//! the number; but packets that wait may be in the queue of another worker.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use super::Steering;
use super::queue::VIRTIO;

/// Longest packet of a guest with its virtio header, bytes.
const LONGEST: usize = 128 << 10;

/// A device, and the queues in which packets may wait.
#[derive(Debug)]
pub struct Requeued {
    queues: Vec<OwnedFd>,
}

impl Requeued {
    /// The device of these queues.
    pub fn new(queues: Vec<OwnedFd>) -> Requeued {
        Requeued { queues }
    }

    /// Directs the guest's packets to the queues that `steering` is for. No process may be fetching.
    ///
    /// # Errors
    /// The device is gone.
    pub fn begin(&self, steering: &Steering) -> io::Result<()> {
        self.queues.first().map_or(Ok(()), |first| steering.attach(first.as_fd()))
    }

    /// Takes waiting packets of up to `most_bytes`: they may belong to other queues now. In the order of each queue, with
    /// virtio headers.
    pub fn fetch(&self, most_bytes: usize) -> Vec<Vec<u8>> {
        let mut buffer = vec![0; LONGEST];
        let (mut packets, mut bytes) = (Vec::new(), 0);
        for queue in &self.queues {
            while bytes + LONGEST <= most_bytes {
                match rustix::io::read(queue, &mut buffer) {
                    Ok(len) if len > VIRTIO => {
                        bytes += len;
                        packets.push(buffer[..len].to_vec());
                    }
                    Err(rustix::io::Errno::INTR) => {}
                    Ok(_) | Err(_) => break,
                }
            }
        }
        packets
    }
}

/// The frame in a packet with a virtio header; empty if there is none.
pub fn frame(packet: &[u8]) -> &[u8] {
    packet.get(VIRTIO..).unwrap_or_default()
}
