//! Packets that arrive at one worker and belong to another, until they are handed over: which ones, and copies of them.

use std::net::SocketAddr;

use bifrost_avs::{Switch, WorkerId};
use bifrost_port::{Datagram, Service, steer};
use bifrost_wire::bifrost::{self, Packet, Reset};
use bifrost_wire::{Mac, vxlan};

/// A host's workers, seen from one of them.
#[derive(Debug)]
pub(crate) struct Siblings {
    /// Own index.
    pub(crate) index: u16,
    /// Number of workers; 1 until they are joined.
    pub(crate) workers: u16,
    pub(crate) stray_resets: Vec<StrayReset>,
    /// By destination worker.
    pub(crate) parcels: Vec<Parcel>,
    /// The rest of a parcel whose unpacking was interrupted by a panic, and the number of items done.
    pub(crate) rest: Option<(Parcel, usize)>,
}

/// A RESET that is passed from worker to worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StrayReset {
    /// Number of the peer that sent it.
    pub(crate) peer: u32,
    pub(crate) vni: u32,
    pub(crate) reset: Reset,
    /// Workers that have not seen it yet.
    pub(crate) workers_left: u16,
}

/// Copies of packets for one worker, in the order of arrival.
#[derive(Debug, Default)]
pub(crate) struct Parcel {
    bytes: Vec<u8>,
    pub(crate) items: Vec<Item>,
}

/// A packet in a parcel.
#[derive(Debug)]
pub(crate) struct Item {
    /// Where it ends; it starts where the previous one ends.
    end: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// A datagram from the underlay.
    Datagram { source: SocketAddr, service: Service, ecn: u8, ttl: u8, rx_time_ns: u64 },
    /// A frame from the guest behind one port of this host to the guest behind another.
    Frame { from: u32, port: u32, checksum_valid: bool },
}

impl Parcel {
    fn add(&mut self, packet: &[u8], kind: Kind) {
        self.bytes.extend_from_slice(packet);
        self.items.push(Item { end: self.bytes.len(), kind });
    }

    pub(crate) fn get(&self, index: usize) -> Option<(Kind, &[u8])> {
        let item = self.items.get(index)?;
        let begin = index.checked_sub(1).map_or(0, |before| self.items[before].end);
        Some((item.kind, &self.bytes[begin..item.end]))
    }
}

impl Siblings {
    pub(crate) fn new(index: u16) -> Self {
        Siblings { index, workers: 1, stray_resets: Vec::new(), parcels: Vec::new(), rest: None }
    }

    /// The other worker that owns a datagram, if any. RESETs are passed on differently.
    pub(crate) fn owner_of(&self, datagram: &Datagram<'_>, switch: &Switch) -> Option<u16> {
        if self.workers < 2 {
            return None;
        }
        let payload = datagram.payload;
        match datagram.service {
            Service::Vxlan => {
                let (vni, frame) = vxlan::parse(payload).ok()?;
                let (to, rest) = frame.split_first_chunk()?;
                Some(switch.other_worker(vni, Mac(*rest.first_chunk()?), Mac(*to))?.0)
            }
            Service::Bifrost if steer::is_reset(payload) => None,
            Service::Bifrost => {
                let home = if steer::is_first_request(payload) { home_of_request(payload, switch) } else { None };
                let owner = home.unwrap_or_else(|| steer::worker_of_bifrost(payload, self.workers));
                (owner != self.index).then_some(owner)
            }
        }
    }

    /// Whether a parcel is partly unpacked.
    pub(crate) fn has_rest(&self) -> bool {
        self.rest.is_some()
    }

    /// Keeps a copy of a datagram for its owner.
    pub(crate) fn keep(&mut self, owner: u16, datagram: &Datagram<'_>) {
        let &Datagram { payload, source, service, ecn, ttl, rx_time_ns } = datagram;
        self.add(owner, payload, Kind::Datagram { source, service, ecn, ttl, rx_time_ns });
    }

    /// Keeps a copy of a frame from the guest behind port `from` to the one behind `port`, for the worker that serves
    /// `port`.
    pub(crate) fn keep_frame(
        &mut self,
        WorkerId(owner): WorkerId,
        (from, port): (u32, u32),
        frame: &[u8],
        checksum_valid: bool,
    ) {
        self.add(owner, frame, Kind::Frame { from, port, checksum_valid });
    }

    fn add(&mut self, owner: u16, packet: &[u8], kind: Kind) {
        if let Some(parcel) = self.parcels.get_mut(usize::from(owner)) {
            parcel.add(packet, kind);
        }
    }
}

/// The worker that alone serves the vNIC to which a connection is requested.
fn home_of_request(payload: &[u8], switch: &Switch) -> Option<u16> {
    let (vni, packet) = vxlan::parse(payload).ok()?;
    let Ok(Packet::Setup(setup)) = bifrost::parse(packet) else { return None };
    switch.home(vni, setup.to).map(|worker| worker.0)
}
