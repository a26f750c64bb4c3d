//! A host's underlay: the daemon's `Underlay`, with packets instead of sockets.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use bifrost_port::{Datagram, LaneId, Service, TxBatch, Underlay};

use crate::packet::{BIFROST_PORT, INITIAL_TTL, Parcel, Spares, VXLAN_PORT};

/// Datagrams in one receive batch.
const BATCH_PACKETS: usize = 64;

/// The underlay address of a host.
pub(crate) fn address(host: u32) -> IpAddr {
    let [_, a, b, c] = host.to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(10, a, b, c))
}

/// The host that has an underlay address.
pub(crate) fn host_of(address: IpAddr) -> Option<u32> {
    match address {
        IpAddr::V4(v4) => match v4.octets() {
            [10, a, b, c] => Some(u32::from_be_bytes([0, a, b, c])),
            _ => None,
        },
        IpAddr::V6(_) => None,
    }
}

/// A lane to another host.
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    /// The other host.
    pub to: u32,
    /// UDP source port.
    pub source_port: u16,
    /// UDP destination port.
    pub dest_port: u16,
    /// Datagrams sent.
    pub packets: u64,
    /// Bytes of their UDP payload.
    pub bytes: u64,
}

/// A host's underlay.
#[derive(Debug)]
pub struct SimUnderlay {
    host: u32,
    lanes: Vec<Lane>,
    /// Receive buffer size, bytes.
    queue_bytes: u64,
    waiting: VecDeque<Parcel>,
    waiting_bytes: u64,
    /// The rest of the last receive batch.
    batch: Vec<Parcel>,
    /// How many packets of the batch were read, and how many of those are used up.
    seen: Cell<usize>,
    gone: usize,
    /// Packets read in this turn.
    pub(crate) spent: Vec<Parcel>,
    /// Packets sent in this turn.
    pub(crate) outbox: Vec<Parcel>,
    /// Packets for reuse; the world lends them for a turn.
    pub(crate) free: Spares,
    /// The host's clock minus the world's, ns.
    pub(crate) clock_offset: u64,
    /// The world's time.
    pub(crate) now: u64,
}

impl SimUnderlay {
    pub(crate) fn new(host: u32, queue_bytes: u64, clock_offset: u64) -> Self {
        SimUnderlay {
            host,
            lanes: Vec::new(),
            queue_bytes,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            batch: Vec::new(),
            seen: Cell::new(0),
            gone: 0,
            spent: Vec::new(),
            outbox: Vec::new(),
            free: Spares::default(),
            clock_offset,
            now: 0,
        }
    }

    /// A packet reaches the host. It is returned if the receive buffer is full.
    pub(crate) fn arrive(&mut self, now: u64, mut packet: Parcel) -> Result<(), Parcel> {
        let size = packet.bytes.len() as u64;
        if self.waiting_bytes + size > self.queue_bytes {
            return Err(packet);
        }
        packet.entered_at = now;
        self.waiting_bytes += size;
        self.waiting.push_back(packet);
        Ok(())
    }

    /// Whether datagrams wait to be received.
    pub fn is_readable(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The host's clock minus the world's, ns.
    pub fn clock_offset(&self) -> u64 {
        self.clock_offset
    }

    /// The lanes.
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// The host restarts, and waiting packets are lost.
    pub(crate) fn reset(&mut self, free: &mut Spares) {
        let packets = self.waiting.drain(..).chain(self.batch.drain(..)).chain(self.spent.drain(..));
        packets.chain(self.outbox.drain(..)).for_each(|packet| free.give(packet));
        self.waiting_bytes = 0;
        self.seen.set(0);
        self.gone = 0;
        self.lanes.clear();
    }

    /// Ends a turn. Packets read in it are used up.
    pub(crate) fn finish(&mut self) {
        let seen = self.seen.get() - self.gone;
        self.spent.extend(self.batch.drain(..seen));
        self.gone += seen;
    }
}

impl Underlay for SimUnderlay {
    fn lane(&mut self, local: SocketAddr, remote: SocketAddr) -> io::Result<LaneId> {
        let to = host_of(remote.ip()).ok_or_else(|| io::Error::other("no host has this address"))?;
        let lane = Lane { to, source_port: local.port(), dest_port: remote.port(), packets: 0, bytes: 0 };
        self.lanes.push(lane);
        u32::try_from(self.lanes.len() - 1).map(LaneId).map_err(|_| io::Error::other("too many lanes"))
    }

    fn recv(&mut self) -> io::Result<usize> {
        self.spent.append(&mut self.batch);
        self.seen.set(0);
        self.gone = 0;
        while self.batch.len() < BATCH_PACKETS {
            let Some(packet) = self.waiting.pop_front() else { break };
            self.waiting_bytes -= packet.bytes.len() as u64;
            self.batch.push(packet);
        }
        Ok(self.batch.len())
    }

    fn received_at_ns(&self) -> u64 {
        self.now + self.clock_offset
    }

    fn datagram(&self, index: usize) -> Datagram<'_> {
        self.seen.set(self.seen.get().max(index + 1));
        let packet = &self.batch[index - self.gone];
        Datagram {
            payload: &packet.bytes,
            source: SocketAddr::new(address(packet.src), packet.source_port),
            service: if packet.dest_port == VXLAN_PORT { Service::Vxlan } else { Service::Bifrost },
            ecn: packet.ecn,
            ttl: packet.ttl,
            rx_time_ns: packet.entered_at + self.clock_offset,
        }
    }

    fn send(&mut self, batch: &mut TxBatch) {
        for (lane, class, bytes) in batch.iter() {
            let Some(lane) = self.lanes.get_mut(lane.0 as usize) else { continue };
            debug_assert!(matches!(lane.dest_port, BIFROST_PORT | VXLAN_PORT));
            lane.packets += 1;
            lane.bytes += bytes.len() as u64;
            let mut packet = self.free.take(bytes.len());
            packet.bytes.clear();
            packet.bytes.extend_from_slice(bytes);
            packet.src = self.host;
            packet.dst = lane.to;
            (packet.source_port, packet.dest_port) = (lane.source_port, lane.dest_port);
            (packet.dscp, packet.ecn) = (class >> 2, class & 3);
            (packet.ttl, packet.corrupted) = (INITIAL_TTL, false);
            self.outbox.push(packet);
        }
        batch.clear();
    }
}
