//! What arrives at one of several workers and belongs to another.
//!
//! The kernel chooses a worker by the first datagram of a coalesced message (GSO, GRO), while the others in it may be
//! those of other connections. It chooses by the pair of vNICs, while some vNICs have a worker of their own, for all senders. What
//! guests of this host send to those is fetched by the sender's worker. And a RESET names a CID of the peer's, which says nothing about
//! the worker here.

use std::net::SocketAddr;

use bifrost_avs::{Action, PortId, Switch, Verdict, WorkerId};
use bifrost_nic::parse;
use bifrost_port::{Datagram, GuestPort, PolledUnderlay, Service, steer};
use bifrost_rte::{Arrival, Time};
use bifrost_wire::bifrost::{self, Cid, Packet, Reset};
use bifrost_wire::{Mac, vxlan};

use crate::capture::Note;
use crate::changes::Changes;
use crate::core::Core;
use crate::handle::Mailbox;
use crate::work::Stage as At;
use crate::worker::{Device, Worker};

/// RESETs that wait to be handed to the next worker.
const MAX_STRAY_RESETS: usize = 64;
/// Packets handed to a worker that it has not looked at yet; more are dropped, and the transport's come again.
const MAX_WAITING: usize = 8192;

/// A host's workers, seen from one of them.
#[derive(Debug)]
pub(crate) struct Siblings {
    /// Own index.
    pub(crate) index: u16,
    /// How many there are; 1 until they are joined.
    pub(crate) workers: u16,
    stray_resets: Vec<StrayReset>,
    /// By worker.
    parcels: Vec<Parcel>,
    /// What is left of a parcel whose unpacking a panic has interrupted, and how many items of it are done.
    rest: Option<(Parcel, usize)>,
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

/// Copies of packets for one worker, in the order of their coming.
#[derive(Debug, Default)]
struct Parcel {
    bytes: Vec<u8>,
    items: Vec<Item>,
}

/// A packet in a parcel.
#[derive(Debug)]
struct Item {
    /// Where it ends; it begins where the one before it ends.
    end: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A datagram from the underlay.
    Datagram { source: SocketAddr, service: Service, ecn: u8, ttl: u8, rx_time_ns: u64 },
    /// A frame of the guest behind one port of this host to the one behind another.
    Frame { from: u16, port: u16, checksum_valid: bool },
}

impl Parcel {
    fn add(&mut self, packet: &[u8], kind: Kind) {
        self.bytes.extend_from_slice(packet);
        self.items.push(Item { end: self.bytes.len(), kind });
    }

    fn get(&self, index: usize) -> Option<(Kind, &[u8])> {
        let item = self.items.get(index)?;
        let begin = index.checked_sub(1).map_or(0, |before| self.items[before].end);
        Some((item.kind, &self.bytes[begin..item.end]))
    }
}

impl Siblings {
    pub(crate) fn new(index: u16) -> Self {
        Siblings { index, workers: 1, stray_resets: Vec::new(), parcels: Vec::new(), rest: None }
    }

    /// The other worker that a datagram is for, if it is for another. RESETs go their own way round.
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

    /// Whether a parcel is half unpacked.
    pub(crate) fn has_rest(&self) -> bool {
        self.rest.is_some()
    }

    /// Keeps a copy of a datagram for its owner.
    pub(crate) fn keep(&mut self, owner: u16, datagram: &Datagram<'_>) {
        let &Datagram { payload, source, service, ecn, ttl, rx_time_ns } = datagram;
        self.add(owner, payload, Kind::Datagram { source, service, ecn, ttl, rx_time_ns });
    }

    /// Keeps a copy of a frame that the guest behind the port `from` has sent to the one behind `port`, for the worker of that one.
    pub(crate) fn keep_frame(
        &mut self,
        WorkerId(owner): WorkerId,
        (from, port): (u16, u16),
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

/// A parcel that is being unpacked. Dropped, it leaves the core what has not been: nothing, unless a panic has come.
struct Unpacking<'a, P> {
    core: &'a mut Core<P>,
    parcel: Parcel,
    done: usize,
}

impl<P> Drop for Unpacking<'_, P> {
    fn drop(&mut self) {
        if self.done < self.parcel.items.len() {
            self.core.siblings.rest = Some((std::mem::take(&mut self.parcel), self.done));
        }
    }
}

/// The worker that alone serves the vNIC for which a connection is asked for.
fn home_of_request(payload: &[u8], switch: &Switch) -> Option<u16> {
    let (vni, packet) = vxlan::parse(payload).ok()?;
    let Ok(Packet::Setup(setup)) = bifrost::parse(packet) else { return None };
    switch.home(vni, setup.to).map(|worker| worker.0)
}

impl<P: GuestPort> Core<P> {
    /// What another worker has handed over, but for the first `done` items.
    fn unpack<const SEEN: bool>(&mut self, parcel: Parcel, done: usize) {
        let mut unpacking = Unpacking { core: self, parcel, done };
        while let Some((kind, payload)) = unpacking.parcel.get(unpacking.done) {
            unpacking.done += 1;
            let core = &mut *unpacking.core;
            core.work.at_shared(At::Arrival);
            match kind {
                Kind::Datagram { source, service, ecn, ttl, rx_time_ns } => {
                    core.on_own_datagram::<SEEN>(&Datagram { payload, source, service, ecn, ttl, rx_time_ns });
                }
                Kind::Frame { from, port, checksum_valid } => {
                    core.on_handed_frame::<SEEN>((from, port), payload, checksum_valid);
                }
            }
        }
        unpacking.core.work.at_shared(At::Loop);
    }

    /// Goes on where a panic has interrupted it.
    pub(crate) fn unpack_rest<const SEEN: bool>(&mut self) {
        if let Some((parcel, done)) = self.siblings.rest.take() {
            self.unpack::<SEEN>(parcel, done);
        }
    }

    /// A frame that another worker has fetched from the guest behind `from`, for the one behind `port`, which is served here.
    fn on_handed_frame<const SEEN: bool>(&mut self, (from, port): (u16, u16), frame: &[u8], checksum_valid: bool) {
        self.work.cid = Cid::NONE;
        self.work.at(At::Judge, port);
        let seen = |what| Note { port: Some(port), ..Note::inwards(what) };
        let parsed = match parse(frame, frame.len()) {
            Ok(parsed) => parsed,
            Err(reason) => {
                self.counters.malformed_underlay_frames[reason.index()] += 1;
                return self.see_dropped::<SEEN>(seen(reason.name()), frame);
            }
        };
        let &Verdict { action, rewrite, .. } = self.switch.from_worker(PortId(from), PortId(port), frame, &parsed);
        if let Action::Drop(reason) = action {
            return self.see_dropped::<SEEN>(seen(reason.name()), frame);
        }
        // Through an uplink it may have to go on to another guest of this host.
        let Action::Deliver { port: PortId(to), worker } = action else { return };
        self.with_changes(frame, &parsed, Changes { ecn: None, rewrite }, |core, frame| match worker {
            None => core.deliver_plain::<SEEN>(to, frame, checksum_valid),
            Some(worker) => core.siblings.keep_frame(worker, (port, to), frame, checksum_valid),
        });
    }

    /// Uses a RESET, or hands it on; the last worker that does not know its CID counts it as stray.
    pub(crate) fn on_reset(&mut self, mut stray: StrayReset) {
        let Some(engine_peer) = self.peers.get(stray.peer).and_then(|p| p.engine) else { return };
        stray.workers_left = stray.workers_left.min(self.siblings.workers - 1);
        if stray.workers_left > 0 && !self.engine.addresses_peer_by(engine_peer, stray.reset.unknown) {
            // Bounded, for anybody who can forge a peer's address can send these.
            if self.siblings.stray_resets.len() < MAX_STRAY_RESETS {
                stray.workers_left -= 1;
                self.siblings.stray_resets.push(stray);
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
        let siblings = &mut core.siblings;
        if others.is_empty() {
            return;
        }
        let next = &others[usize::from((siblings.index + 1) % siblings.workers)];
        for stray in siblings.stray_resets.drain(..) {
            // A worker that has ended has no connections either.
            let _ = next.send(Box::new(move |worker: &mut Worker<U>| worker.core.on_reset(stray)));
        }
        // One message for each worker: packets of a batch keep their order.
        for (parcel, mailbox) in siblings.parcels.iter_mut().zip(others) {
            let count = parcel.items.len();
            if count == 0 {
                continue;
            }
            let parcel = std::mem::take(parcel);
            if mailbox.waiting() + count > MAX_WAITING {
                core.counters.hand_over_overflow_packets += count as u64;
                continue;
            }
            core.counters.handed_over_packets += count as u64;
            mailbox.add_waiting(count);
            let _ = mailbox.send(Box::new(move |worker: &mut Worker<U>| worker.take_over(parcel)));
        }
    }

    /// Packets from another worker, in the order of their arrival there.
    fn take_over(&mut self, parcel: Parcel) {
        if let Some(own) = self.others.get(usize::from(self.core.siblings.index)) {
            own.remove_waiting(parcel.items.len());
        }
        self.core.advance(Time(bifrost_port::clock::monotonic_ns()));
        self.core.counters.taken_over_packets += parcel.items.len() as u64;
        if self.core.is_captured() {
            self.core.unpack_rest::<true>();
            self.core.unpack::<true>(parcel, 0);
        } else {
            self.core.unpack_rest::<false>();
            self.core.unpack::<false>(parcel, 0);
        }
    }

    /// Makes this one of several workers; `all` of them, in order.
    pub(crate) fn join(&mut self, all: Vec<Mailbox<U>>) {
        self.core.siblings.workers = all.len().max(1) as u16;
        self.core.siblings.parcels.resize_with(all.len(), Parcel::default);
        self.others = all;
    }
}
