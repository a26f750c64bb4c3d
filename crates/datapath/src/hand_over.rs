//! What arrives at one of several workers and belongs to another.
//!
//! The kernel chooses a worker by the first datagram of a coalesced message (GSO, GRO), while the others in it may be
//! those of other connections; and a RESET names a CID of the peer's, which says nothing about the worker here.

use std::net::SocketAddr;

use bifrost_port::{Datagram, GuestPort, PolledUnderlay, Service, steer};
use bifrost_rte::{Arrival, Time};
use bifrost_wire::bifrost::Reset;

use crate::core::Core;
use crate::handle::Mailbox;
use crate::worker::{Device, Worker};

/// RESETs that wait to be handed to the next worker.
const MAX_STRAY_RESETS: usize = 64;
/// Datagrams handed to a worker that it has not looked at yet; more are dropped, and come again.
const MAX_WAITING: usize = 8192;

/// A host's workers, seen from one of them.
#[derive(Debug)]
pub(crate) struct Neighbours {
    /// Own index.
    pub(crate) index: u16,
    /// How many there are; 1 until they are joined.
    pub(crate) workers: u16,
    stray_resets: Vec<StrayReset>,
    foreign: Vec<(u16, Foreign)>,
}

/// A RESET on its way round the workers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StrayReset {
    /// Number of the peer that sent it.
    pub(crate) peer: u16,
    pub(crate) vni: u32,
    pub(crate) reset: Reset,
    /// Workers that have not seen it yet.
    pub(crate) workers_left: u16,
}

/// A copy of a datagram.
#[derive(Debug)]
struct Foreign {
    bytes: Vec<u8>,
    source: SocketAddr,
    ecn: u8,
    ttl: u8,
    rx_time_ns: u64,
}

impl Neighbours {
    pub(crate) fn new(index: u16) -> Self {
        Neighbours { index, workers: 1, stray_resets: Vec::new(), foreign: Vec::new() }
    }

    /// The other worker that a datagram is for, if it is for another. RESETs go their own way round.
    pub(crate) fn owner_of(&self, datagram: &Datagram<'_>) -> Option<u16> {
        if self.workers < 2 || datagram.service != Service::Bifrost || steer::is_reset(datagram.payload) {
            return None;
        }
        Some(steer::worker_of_bifrost(datagram.payload, self.workers)).filter(|owner| *owner != self.index)
    }

    /// Keeps a copy for its owner.
    pub(crate) fn keep(&mut self, owner: u16, datagram: &Datagram<'_>) {
        let foreign = Foreign {
            bytes: datagram.payload.to_vec(),
            source: datagram.source,
            ecn: datagram.ecn,
            ttl: datagram.ttl,
            rx_time_ns: datagram.rx_time_ns,
        };
        self.foreign.push((owner, foreign));
    }
}

impl<P: GuestPort> Core<P> {
    /// Uses a RESET, or hands it on; the last worker that does not know its CID counts it as stray.
    pub(crate) fn on_reset(&mut self, mut stray: StrayReset) {
        let Some(engine_peer) = self.peers.get(stray.peer).and_then(|p| p.engine) else { return };
        stray.workers_left = stray.workers_left.min(self.neighbours.workers - 1);
        if stray.workers_left > 0 && !self.engine.addresses_peer_by(engine_peer, stray.reset.unknown) {
            // Bounded, for anybody who can forge a peer's address can send these.
            if self.neighbours.stray_resets.len() < MAX_STRAY_RESETS {
                stray.workers_left -= 1;
                self.neighbours.stray_resets.push(stray);
            } else {
                self.counters.reset_overflow_packets += 1;
            }
            return;
        }
        let arrival = Arrival { peer: engine_peer, vni: stray.vni, nic_rx: self.now, hops: 0, marked: false };
        self.engine.on_reset(self.now, &arrival, &stray.reset, &mut self.out);
    }
}

impl<U: PolledUnderlay> Worker<U> {
    /// Gives `others` what is, or may be, theirs.
    pub(crate) fn hand_over(core: &mut Core<Device>, others: &[Mailbox<U>]) {
        let neighbours = &mut core.neighbours;
        if others.is_empty() || (neighbours.stray_resets.is_empty() && neighbours.foreign.is_empty()) {
            return;
        }
        let next = &others[usize::from((neighbours.index + 1) % neighbours.workers)];
        for stray in neighbours.stray_resets.drain(..) {
            // A worker that has ended has no connections either.
            let _ = next.send(Box::new(move |worker: &mut Worker<U>| worker.core.on_reset(stray)));
        }
        // One message for each worker: datagrams of a batch keep their order.
        for (owner, mailbox) in others.iter().enumerate() {
            let datagrams: Vec<Foreign> =
                neighbours.foreign.extract_if(.., |(to, _)| usize::from(*to) == owner).map(|(_, f)| f).collect();
            let count = datagrams.len();
            if count == 0 {
                continue;
            }
            if mailbox.waiting() + count > MAX_WAITING {
                core.counters.hand_over_overflow_packets += count as u64;
                continue;
            }
            core.counters.handed_over_packets += count as u64;
            mailbox.add_waiting(count);
            let _ = mailbox.send(Box::new(move |worker: &mut Worker<U>| worker.take_over(&datagrams)));
        }
    }

    /// Datagrams from another worker, in the order of their arrival there.
    fn take_over(&mut self, datagrams: &[Foreign]) {
        if let Some(own) = self.others.get(usize::from(self.core.neighbours.index)) {
            own.remove_waiting(datagrams.len());
        }
        self.core.now = Time(bifrost_port::clock::monotonic_ns());
        self.core.counters.taken_over_packets += datagrams.len() as u64;
        for d in datagrams {
            let (payload, source, service) = (&d.bytes[..], d.source, Service::Bifrost);
            let datagram = Datagram { payload, source, service, ecn: d.ecn, ttl: d.ttl, rx_time_ns: d.rx_time_ns };
            if self.core.is_captured() {
                self.core.on_own_datagram::<true>(&datagram);
            } else {
                self.core.on_own_datagram::<false>(&datagram);
            }
        }
    }

    /// Makes this one of several workers; `all` of them, in order.
    pub(crate) fn join(&mut self, all: Vec<Mailbox<U>>) {
        self.core.neighbours.workers = all.len().max(1) as u16;
        self.others = all;
    }
}
