//! The underlay over AF_XDP sockets: frames pass between the device and our memory, bypassing the kernel's IP stack.
//!
//! An XDP program on each device with an underlay address redirects plain datagrams on the two ports to a socket of the
//! worker that owns them (`program.rs`). All other traffic uses the UDP sockets of [`crate::udp`], which stay open as a
//! fallback: frames that the program passes to the kernel (fragments, IP options, extension headers, padding, queues
//! without a socket), and datagrams whose next hop has no MAC address yet. Both paths are counted.
//!
//! Frames are copied between the kernel's buffers and ours, once per direction. There is no segmentation or coalescing:
//! each datagram is a frame. Receive timestamps are those of the batch, not of the device.
//!
//! Needs Linux 5.9 and CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF. Nothing stays attached after the process ends, even if
//! it is killed.

mod counters;
mod error;
mod hand_over;
mod lane;
mod next_hop;
mod open;
mod parse;
mod program;
#[cfg(test)]
mod program_tests;
mod ring;
mod socket;
mod umem;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

pub use counters::AfxdpCounters;
pub use error::AfxdpError;
pub use hand_over::{ClosingSockets, EnteringSockets, HandedDevice, WaitingSockets};

use crate::clock::monotonic_ns;
use crate::udp::{UdpConfig, UdpCounters, UdpUnderlay};
use crate::underlay::{Datagram, LaneId, PolledUnderlay, TxBatch, Underlay};
use lane::{Lane, Macs};
use next_hop::Resolver;
use parse::{NOTE_BYTES, Outer, Ports};
use program::Steering;
pub(crate) use socket::{NoFrame, QueueConfig, Received, XdpSocket};
use umem::Frame;

/// Maximum datagrams per batch.
const BATCH: usize = 256;
/// Every this many batches, the UDP sockets are polled first, so that frames cannot starve them.
const FALLBACK_TURN: u32 = 8;

/// Largest MTU of the underlay's links, bytes: a frame and the kernel's headroom must fit into a page.
pub const MAX_MTU: u16 = 3800;

/// Where the XDP program runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XdpMode {
    /// In the driver if it supports XDP, otherwise generic.
    #[default]
    Auto,
    /// In the driver, or fail.
    Native,
    /// Generic: after the driver, on any device.
    Generic,
}

/// How to open an [`AfxdpUnderlay`].
#[derive(Clone, Debug)]
pub struct AfxdpConfig {
    /// The UDP sockets, with addresses, ports and workers. Their offloads (`gso`, `gro`) are not used.
    pub udp: UdpConfig,
    /// Where the XDP program runs.
    pub mode: XdpMode,
    /// RX frames per device queue, and TX frames per worker: a power of two, 64 to 32768; default 2048. Each takes 2
    /// KiB, or 4 KiB if `mtu` is above 1778.
    pub frames: u32,
    /// MTU of the links, bytes, at most [`MAX_MTU`]; default 1600.
    pub mtu: u16,
}

impl Default for AfxdpConfig {
    fn default() -> Self {
        Self { udp: UdpConfig::default(), mode: XdpMode::Auto, frames: 2048, mtu: 1600 }
    }
}

/// The underlay of one worker, over AF_XDP sockets with UDP sockets as a fallback.
pub struct AfxdpUnderlay {
    /// One for each queue of each device that has been [entered](Self::enter).
    sockets: Vec<XdpSocket>,
    /// By socket: the number of its device, and its index in the map of the XDP program.
    places: Vec<(usize, u32)>,
    /// By device; `None` until its sockets have been entered.
    exits: Vec<Option<Exit>>,
    lanes: Vec<Lane>,
    fallback: UdpUnderlay,
    /// Datagrams of a batch that are sent through `fallback`.
    aside: TxBatch,
    /// The last batch, if it was received in frames.
    arrived: Vec<Arrived>,
    /// Whether the last batch came through `fallback`.
    fell_back: bool,
    /// By socket: frames to return to the kernel.
    spent: Vec<Vec<Frame>>,
    /// The socket to poll first.
    turn: u32,
    received_at_ns: u64,
    ports: Ports,
    /// How many workers there are.
    workers: u16,
    counters: AfxdpCounters,
    resolver: Arc<Resolver>,
    /// By device. Stays attached while a worker holds it.
    steering: Arc<Vec<Steering>>,
}

/// A worker's TX side of a device.
#[derive(Debug)]
struct Exit {
    /// Index among the sockets.
    socket: usize,
    mac: [u8; 6],
    /// The longest frame, bytes.
    longest: usize,
}

/// A datagram in a frame.
struct Arrived {
    socket: usize,
    received: Received,
    outer: Outer,
}

impl AfxdpUnderlay {
    /// Opens the underlays of all `config.udp.workers` workers, in order; `config.udp.worker` is ignored.
    ///
    /// # Errors
    /// The configuration is invalid, or something cannot be opened; nothing stays open then.
    pub fn open_all(config: &AfxdpConfig) -> Result<Vec<Self>, AfxdpError> {
        open::open_all(config)
    }

    /// Counters since it was opened. Includes the kernel's drops, which takes a system call per queue.
    pub fn counters(&self) -> AfxdpCounters {
        let open: u64 = self.sockets.iter().map(XdpSocket::dropped).sum();
        AfxdpCounters { rx_dropped_frames: self.counters.rx_dropped_frames + open, ..self.counters }
    }

    /// Counters of the UDP sockets.
    pub fn udp_counters(&self) -> &UdpCounters {
        self.fallback.counters()
    }

    /// Whether datagrams for `lane` can be sent in frames now, bypassing the kernel's IP stack.
    pub fn is_resolved(&self, lane: LaneId) -> bool {
        self.lanes.get(lane.0 as usize).is_some_and(|lane| lane.hop.resolved().is_some())
    }

    /// Returns the frames of the last batch to the kernel.
    fn give_back(&mut self) {
        for Arrived { socket, received, .. } in self.arrived.drain(..) {
            self.spent[socket].push(received.frame);
        }
        for (socket, spent) in self.sockets.iter_mut().zip(&mut self.spent) {
            if !spent.is_empty() {
                socket.give_back(spent.drain(..));
            }
        }
    }

    /// Receives a batch of frames from all sockets.
    fn recv_frames(&mut self) -> usize {
        let count = self.sockets.len();
        for n in 0..count {
            let index = (n + self.turn as usize) % count;
            let socket = &mut self.sockets[index];
            while self.arrived.len() + self.spent[index].len() < BATCH {
                let Some(mut received) = socket.receive() else { break };
                let outer = look(socket, &mut received, self.ports, &mut self.counters);
                let Some(outer) = outer else {
                    self.spent[index].push(received.frame);
                    continue;
                };
                self.counters.rx_bytes += (received.len - outer.payload) as u64;
                self.arrived.push(Arrived { socket: index, received, outer });
            }
        }
        self.counters.rx_datagrams += self.arrived.len() as u64;
        self.arrived.len()
    }

    fn recv_fallback(&mut self) -> io::Result<usize> {
        let count = self.fallback.recv()?;
        self.fell_back = true;
        self.counters.rx_fallback_datagrams += count as u64;
        Ok(count)
    }
}

/// The required fields of a frame's outer headers. `None`, and counted, if the frame is not a valid datagram for us.
fn look(socket: &XdpSocket, received: &mut Received, ports: Ports, counters: &mut AfxdpCounters) -> Option<Outer> {
    let umem = &socket.queue.umem;
    let mut noted = None;
    if let Some(before) = received.start.checked_sub(NOTE_BYTES) {
        let note = umem.bytes(&received.frame, before, NOTE_BYTES).first_chunk().copied();
        noted =
            note.and_then(|note| Outer::from_note(&note, umem.bytes(&received.frame, received.start, received.len)));
        // A note is valid for one frame only: the next frame in this chunk may have none.
        if let Some(magic) = umem.bytes_mut(&mut received.frame).get_mut(before..before + 4) {
            magic.fill(0);
        }
    }
    let frame = umem.bytes(&received.frame, received.start, received.len);
    let outer = noted.or_else(|| {
        counters.rx_parsed_datagrams += 1;
        Outer::parse(frame, ports)
    });
    let Some(outer) = outer else {
        counters.rx_malformed_frames += 1;
        return None;
    };
    if !outer.is_intact(frame) {
        counters.rx_bad_checksum_frames += 1;
        return None;
    }
    Some(outer)
}

impl Underlay for AfxdpUnderlay {
    fn lane(&mut self, local: SocketAddr, remote: SocketAddr) -> io::Result<LaneId> {
        // Lane numbers are the same in both.
        let id = self.fallback.lane(local, remote)?;
        if id.0 as usize == self.lanes.len() {
            self.lanes.push(Lane::new(local, remote, self.resolver.next_hop(local, remote)));
        }
        Ok(id)
    }

    fn recv(&mut self) -> io::Result<usize> {
        self.give_back();
        self.fell_back = false;
        self.turn = self.turn.wrapping_add(1);
        // Frames that the kernel did not take last time.
        for exit in self.exits.iter().flatten() {
            self.counters.tx_system_calls += self.sockets[exit.socket].flush();
        }
        if self.turn.is_multiple_of(FALLBACK_TURN) {
            let count = self.recv_fallback()?;
            if count > 0 {
                return Ok(count);
            }
        }
        self.fell_back = false;
        let count = self.recv_frames();
        if count > 0 {
            self.received_at_ns = monotonic_ns();
            return Ok(count);
        }
        self.recv_fallback()
    }

    fn received_at_ns(&self) -> u64 {
        if self.fell_back { self.fallback.received_at_ns() } else { self.received_at_ns }
    }

    fn datagram(&self, index: usize) -> Datagram<'_> {
        if self.fell_back {
            return self.fallback.datagram(index);
        }
        let Arrived { socket, received, outer } = &self.arrived[index];
        let umem = &self.sockets[*socket].queue.umem;
        Datagram {
            payload: umem.bytes(&received.frame, received.start + outer.payload, received.len - outer.payload),
            source: outer.source,
            service: outer.service,
            ecn: outer.ecn,
            ttl: outer.ttl,
            rx_time_ns: outer.time_ns.min(self.received_at_ns),
        }
    }

    fn send(&mut self, batch: &mut TxBatch) {
        let Self { sockets, exits, lanes, aside, counters, .. } = self;
        for (id, class, payload) in batch.iter() {
            let known = lanes.get(id.0 as usize).and_then(|lane| Some((lane, lane.hop.resolved()?)));
            let exit = known.and_then(|(lane, way)| Some((lane, way, exits.get(way.device)?.as_ref()?)));
            let exit = exit.filter(|(lane, _, exit)| lane.header_bytes() + payload.len() <= exit.longest);
            let Some((lane, way, exit)) = exit else {
                counters.tx_fallback_datagrams += 1;
                aside.push(id, class, |bytes| bytes.extend_from_slice(payload));
                continue;
            };
            let macs = Macs { destination: way.mac, source: exit.mac };
            let socket = &mut sockets[exit.socket];
            let write = |socket: &mut XdpSocket| socket.send(|frame| lane.write(macs, class, payload, frame));
            let mut result = write(socket);
            if result == Err(NoFrame) {
                counters.tx_system_calls += socket.flush();
                result = write(socket);
            }
            match result {
                Ok(true) => {
                    counters.tx_datagrams += 1;
                    counters.tx_bytes += payload.len() as u64;
                }
                Ok(false) => {
                    counters.tx_fallback_datagrams += 1;
                    aside.push(id, class, |bytes| bytes.extend_from_slice(payload));
                }
                Err(NoFrame) => counters.tx_no_frame_datagrams += 1,
            }
        }
        batch.clear();
        for exit in exits.iter().flatten() {
            counters.tx_system_calls += sockets[exit.socket].flush();
        }
        self.fallback.send(aside);
    }
}

impl PolledUnderlay for AfxdpUnderlay {
    /// The AF_XDP sockets, and the receive sockets of the UDP fallback.
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.sockets.iter().map(AsFd::as_fd).chain(self.fallback.fds()).collect()
    }
}
