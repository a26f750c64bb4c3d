//! Packets that arrive at one worker and belong to another.
//!
//! The kernel chooses a worker by the first datagram of a coalesced message (GSO, GRO), but the others in it may belong
//! to other connections. It chooses by the pair of vNICs, but some vNICs have their own worker for all senders. Packets
//! that guests of this host send to those are fetched by the sender's worker. And a RESET has a CID of the peer's,
//! which does not identify the worker here.

use bifrost_avs::{Action, PortId, Verdict};
use bifrost_nic::parse;
use bifrost_port::{Datagram, GuestPort, PolledUnderlay};
use bifrost_rte::{Arrival, Time};
use bifrost_wire::bifrost::Cid;

use crate::capture::Note;
use crate::changes::Changes;
use crate::core::Core;
use crate::refusal::Refusal;
use crate::siblings::{Kind, Parcel, StrayReset};
use crate::stage::Stage as At;
use crate::worker::{Device, Mailbox, Worker};

/// Maximum RESETs that wait to be passed to the next worker.
const MAX_STRAY_RESETS: usize = 64;
/// Maximum packets handed over to a worker that it has not processed yet; more are dropped, and the transport
/// retransmits its own.
const MAX_WAITING: usize = 8192;

/// A parcel that is being unpacked. When dropped, it leaves the rest to the core: nothing, unless a panic has occurred.
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

impl<P: GuestPort> Core<P> {
    /// Processes packets that another worker has handed over, except the first `done`.
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

    /// Continues after an interruption by a panic.
    pub(crate) fn unpack_rest<const SEEN: bool>(&mut self) {
        if let Some((parcel, done)) = self.siblings.rest.take() {
            self.unpack::<SEEN>(parcel, done);
        }
    }

    /// Processes a frame that another worker fetched from the guest behind `from`, for the guest behind `port`, which
    /// is served here.
    fn on_handed_frame<const SEEN: bool>(&mut self, (from, port): (u32, u32), frame: &[u8], checksum_valid: bool) {
        self.work.cid = Cid::NONE;
        self.work.at(At::Judge, port);
        let parsed = match parse(frame, frame.len()) {
            Ok(parsed) => parsed,
            Err(reason) => {
                let refusal = Refusal::Malformed(reason);
                return self.refuse::<SEEN>(refusal, Some(port), None, Note::inwards(""), frame);
            }
        };
        let &Verdict { action, rewrite, .. } = self.switch.from_worker(PortId(from), PortId(port), frame, &parsed);
        if let Action::Drop(reason) = action {
            return self.refuse::<SEEN>(Refusal::Switch(reason), Some(port), None, Note::inwards(""), frame);
        }
        // From an uplink it may have to continue to another guest of this host.
        let Action::Deliver { port: PortId(to), worker } = action else { return };
        self.with_changes(frame, &parsed, Changes { ecn: None, rewrite }, |core, frame| match worker {
            None => core.deliver_plain::<SEEN>(to, frame, checksum_valid),
            Some(worker) => core.siblings.keep_frame(worker, (port, to), frame, checksum_valid),
        });
    }

    /// Processes a RESET, or passes it on; the last worker counts it as stray if it does not know its CID.
    pub(crate) fn on_reset(&mut self, mut stray: StrayReset) {
        let Some(engine_peer) = self.peers.get(stray.peer).and_then(|p| p.engine) else { return };
        stray.workers_left = stray.workers_left.min(self.siblings.workers - 1);
        if stray.workers_left > 0 && !self.engine.addresses_peer_by(engine_peer, stray.reset.unknown) {
            // Bounded, because anybody who can forge a peer's address can send RESETs.
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
    /// Gives `others` the packets that are, or may be, theirs.
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
        // One message per worker, so that packets of a batch stay in order.
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

    /// Processes packets from another worker, in the order of their arrival there.
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

    /// Makes this worker one of several; `all` of them, in order.
    pub(crate) fn join(&mut self, all: Vec<Mailbox<U>>) {
        self.core.siblings.workers = all.len().max(1) as u16;
        self.core.siblings.parcels.resize_with(all.len(), Parcel::default);
        self.others = all;
    }
}
