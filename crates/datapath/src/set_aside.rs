//! A worker stops, and returns what a worker of another process needs to continue with its guests and sockets.
//!
//! The order, with each step completed on all workers before the next: [`Worker::hold_guests`], so that packets in
//! flight can be acknowledged; [`Worker::pause`], after which only commands are run; [`Worker::set_aside`]. Until the
//! very end, [`Worker::resume`] continues as before, except that connections with traffic are set up again.

use std::collections::HashSet;

use bifrost_port::clock::monotonic_ns;
use bifrost_port::{GuestPort, PolledUnderlay, TxHandle, Underlay};
use bifrost_rte::Time;

use crate::core::Core;
use crate::ports::Port;
use crate::worker::Worker;

/// Maximum turns for processing what has been received; more than enough for a batch of the underlay.
const MOST_TURNS: usize = 4096;
/// Maximum bytes of guests' packets that a worker hands over. More are dropped, and the guests repair that like any
/// loss.
const MOST_BYTES: usize = 32 << 20;

/// Packets that a worker has fetched from guests and not finished.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetAside {
    /// By port number; those of a port in the order in which they must be sent: see [`GuestPort::raw`].
    pub packets: Vec<(u32, Vec<u8>)>,
    /// Packets beyond the limit, or that their port cannot hand over, and frames that wait for a guest.
    pub left_out: u64,
}

impl<P: GuestPort> Core<P> {
    /// Restarts connections, publishes packets held for guests, and returns all packets of guests that have not been
    /// acknowledged. These also stay here.
    fn set_aside(&mut self, now: Time, underlay: &mut impl Underlay) -> SetAside {
        self.now = self.now.max(now);
        self.publish::<false>();
        self.engine.acknowledge_all();
        self.engine.flush_acks(self.now, &mut self.out);
        self.emit::<false>(underlay);
        // The resulting packets to peers are sent if this core continues.
        self.engine.start_all_over(self.now, &mut self.out);
        self.publish::<false>();
        self.unfinished()
    }

    fn unfinished(&self) -> SetAside {
        let mut seen = HashSet::new();
        let mut buffers: Vec<(u32, u32)> =
            self.engine.waiting_buffers().filter(|buffer| seen.insert(*buffer)).collect();
        for port in self.ports.iter().flatten() {
            let asking = port.learning.iter().flat_map(|learning| learning.frames());
            let waiting = port.waiting.frames().chain(asking).chain(&port.backlog);
            buffers.extend(waiting.map(|frame| (port.owner, frame.handle.0)));
        }
        let left_out = self.ports.iter().flatten().map(Port::rx_queued).sum();
        let (mut aside, mut bytes) = (SetAside { left_out, ..SetAside::default() }, 0);
        for (owner, handle) in buffers {
            let Some(port) = self.ports.get(owner as usize).and_then(Option::as_ref) else { continue };
            if port.port.stays(TxHandle(handle)) {
                continue;
            }
            let mut packet = Vec::new();
            let is_raw = port.port.raw(TxHandle(handle), &mut packet);
            bytes += packet.len();
            if is_raw && bytes <= MOST_BYTES {
                aside.packets.push((owner, packet));
            } else {
                aside.left_out += 1;
            }
        }
        aside
    }
}

impl<U: PolledUnderlay> Worker<U> {
    /// Stops fetching from guests, or starts it again.
    pub fn hold_guests(&mut self, hold: bool) {
        self.core.guests_wait = hold;
    }

    /// Packets of guests that the transport holds and that are not acknowledged.
    pub fn unfinished_packets(&self) -> u64 {
        self.core.engine.unfinished_packets()
    }

    /// Processes what has been received, and then runs only commands.
    pub fn pause(&mut self) {
        self.paused = true;
        self.core.guests_wait = true;
        self.core.underlay_readable = false;
        for _ in 0..MOST_TURNS {
            if !self.core.has_arrivals() {
                break;
            }
            self.turn();
        }
    }

    /// Returns the [`SetAside`] of a worker that [pauses](Self::pause).
    pub fn set_aside(&mut self) -> SetAside {
        let now = Time(monotonic_ns());
        self.core.set_aside(now, &mut self.underlay)
    }

    /// Puts a packet of another process's [`SetAside`] in front of the packets that the port's guest has sent since.
    /// Returns false if the port does not exist, or does not accept it.
    pub fn put_in_front(&mut self, owner: u32, packet: Vec<u8>) -> bool {
        self.core.device_mut(owner).is_some_and(|device| device.put_in_front(packet))
    }

    /// Continues after a pause.
    pub fn resume(&mut self) {
        self.paused = false;
        self.core.guests_wait = false;
        self.core.underlay_readable = true;
        self.core.ports.iter_mut().flatten().for_each(|port| port.readable = true);
    }
}
