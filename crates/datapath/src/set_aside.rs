//! A worker stops, and says what another process's worker needs to go on with its guests and sockets.
//!
//! In this order, each step on all workers before the next: [`Worker::hold_guests`], so that what is on its way can be acknowledged;
//! [`Worker::pause`], after which only commands are run; [`Worker::set_aside`]. Until the very end [`Worker::resume`] goes on as if nothing had
//! been, but that connections with traffic are set up again.

use std::collections::HashSet;

use bifrost_port::clock::monotonic_ns;
use bifrost_port::{GuestPort, PolledUnderlay, TxHandle, Underlay};
use bifrost_rte::Time;

use crate::core::Core;
use crate::worker::Worker;

/// Turns in which what has been received is worked off, at most: a batch of the underlay has less.
const MOST_TURNS: usize = 4096;
/// Bytes of guests' packets that a worker hands over, at most. More is dropped, and repaired by the guests like any loss.
const MOST_BYTES: usize = 32 << 20;

/// What a worker has fetched from guests, and has not got rid of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetAside {
    /// By port number, each port's in the order in which they are to leave: see [`GuestPort::raw`].
    pub packets: Vec<(u16, Vec<u8>)>,
    /// Packets for which there was no room, or that their port cannot hand over.
    pub left_out: u64,
}

impl<P: GuestPort> Core<P> {
    /// Connections start over, what is held for guests is shown, and everything of guests that has not been acknowledged is returned. It
    /// stays here, too.
    fn set_aside(&mut self, now: Time, underlay: &mut impl Underlay) -> SetAside {
        self.now = self.now.max(now);
        self.publish::<false>();
        self.engine.acknowledge_all();
        self.engine.flush_acks(self.now, &mut self.out);
        self.emit::<false>(underlay);
        // What it has to say to peers leaves when this core goes on, if it does.
        self.engine.start_all_over(self.now, &mut self.out);
        self.publish::<false>();
        self.unfinished()
    }

    fn unfinished(&self) -> SetAside {
        let mut seen = HashSet::new();
        let mut buffers: Vec<(u16, u32)> =
            self.engine.waiting_buffers().filter(|buffer| seen.insert(*buffer)).collect();
        for port in self.ports.iter().flatten() {
            let waiting = port.waiting.frames().chain(&port.backlog);
            buffers.extend(waiting.map(|frame| (port.owner, frame.handle.0)));
        }
        let (mut aside, mut bytes) = (SetAside::default(), 0);
        for (owner, handle) in buffers {
            let Some(port) = self.ports.get(usize::from(owner)).and_then(Option::as_ref) else { continue };
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
    /// Fetches nothing from guests any more, or again.
    pub fn hold_guests(&mut self, hold: bool) {
        self.core.guests_wait = hold;
    }

    /// Packets of guests that the transport has, and that are not acknowledged.
    pub fn unfinished_packets(&self) -> u64 {
        self.core.engine.unfinished_packets()
    }

    /// Works off what it has received, and then runs nothing but commands.
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

    /// Of a worker that [pauses](Self::pause): see [`SetAside`].
    pub fn set_aside(&mut self) -> SetAside {
        let now = Time(monotonic_ns());
        self.core.set_aside(now, &mut self.underlay)
    }

    /// Puts a packet of another process's [`SetAside`] in front of what the guest of a port has sent since. Returns false if the port is not there, or
    /// takes none.
    pub fn put_in_front(&mut self, owner: u16, packet: Vec<u8>) -> bool {
        self.core.device_mut(owner).is_some_and(|device| device.put_in_front(packet))
    }

    /// Goes on.
    pub fn resume(&mut self) {
        self.paused = false;
        self.core.guests_wait = false;
        self.core.underlay_readable = true;
        self.core.ports.iter_mut().flatten().for_each(|port| port.readable = true);
    }
}
