//! After a panic: finds out whose work it was, takes that port out of use, and makes everything else usable again.
//!
//! A turn that panics unwinds to its worker, which calls [`Core::recover`]. What a step may leave half done:
//!
//! * lists that a step works off (what is to be published, emitted, unpacked) keep how far they have come; the rest goes on in the
//!   next turn, without the step that panicked;
//! * the batch may end with half a datagram, which is cut off;
//! * the transport's connection at work is dropped and its indexes are rebuilt (`rte/src/engine/mend.rs`);
//! * the switch's notes and flow records, which can be made again at any time, are forgotten;
//! * the port's device is not touched any more: it is put aside, and dropped by the caller that gives the port another one.

use std::io;

use bifrost_avs::PortId;
use bifrost_port::GuestPort;
use bifrost_port::panics::Panic;
use bifrost_rte::Time;

use crate::core::Core;
use crate::ports::Port;
use crate::work::{Stage, Work};

/// So many panics in [`WINDOW_NS`] while packets for a port, or its connections, were worked on, and it is out of use.
const MAX_STRIKES: u32 = 4;
/// So many panics in [`WINDOW_NS`] that are nobody's, and the process had better start again.
const MAX_UNOWNED: u32 = 10;
const WINDOW_NS: u64 = 10_000_000_000;

/// A fault that has taken a port out of use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortFault {
    /// What was being done.
    pub stage: Stage,
    /// The panic's message and place.
    pub panic: Panic,
    /// When, on the worker's clock.
    pub at: Time,
}

/// How it goes on after a panic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// The packet, or the connection, that was worked on is gone; nothing else.
    Dropped,
    /// A port is out of use.
    PortOut(u16, PortFault),
    /// It happens again and again, and is no port's doing: the process has to start again.
    Hopeless,
}

/// Panics in the current window.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Strikes {
    count: u32,
    since: Time,
}

impl Strikes {
    /// One more. Whether these are more than `max`.
    fn add(&mut self, now: Time, max: u32) -> bool {
        if now.since(self.since) > WINDOW_NS {
            *self = Strikes { count: 0, since: now };
        }
        self.count += 1;
        self.count > max
    }
}

impl<P: GuestPort> Core<P> {
    /// Makes the core usable again after a panic in [`turn`](Self::turn), or in anything else that it was asked to do, and takes the port
    /// out of use whose work it was. `spare` makes the device that such a port gets: one without a guest.
    pub fn recover(&mut self, panic: Panic, spare: impl FnOnce() -> io::Result<P>) -> Recovery {
        let work = self.work.take();
        self.counters.caught_panics += 1;
        self.count_in_hand(&work);
        self.finish_half_done(&work);
        let culprit = self.culprit(&work);
        let of_connection = self.mend_engine(&work, culprit);
        if matches!(work.stage(), Stage::Switch | Stage::Judge) {
            self.switch.distrust_notes();
        }
        let culprit = culprit.or_else(|| {
            // Dropping one connection is enough, until it is one after the other.
            let owner = of_connection.or_else(|| self.receiver(&work))?;
            let now = self.now;
            self.port_mut(owner).is_some_and(|port| !port.failed && port.strikes.add(now, MAX_STRIKES)).then_some(owner)
        });
        let fault = PortFault { stage: work.stage(), panic, at: self.now };
        let Some(owner) = culprit else {
            tracing::error!(stage = fault.stage.name(), panic = %fault.panic, "a panic while a packet was worked on; it is dropped");
            let is_shared = of_connection.is_none() && matches!(work.stage(), Stage::Loop | Stage::Timer | Stage::Send);
            return if is_shared && self.unowned_panics.add(self.now, MAX_UNOWNED) {
                Recovery::Hopeless
            } else {
                Recovery::Dropped
            };
        };
        match spare() {
            Ok(device) => {
                self.take_out(owner, fault.clone(), device);
                Recovery::PortOut(owner, fault)
            }
            Err(error) => {
                tracing::error!(port = owner, %error, panic = %fault.panic, "a port has to be taken out of use, and cannot be");
                Recovery::Hopeless
            }
        }
    }

    /// Takes a port out of use after a fault, here or on another worker that serves it: its device is left alone from now on, its guest
    /// gets and sends nothing, until the port gets another device. `device` stands in for it.
    pub fn take_out(&mut self, owner: u16, fault: PortFault, device: P) {
        if self.ports.get(usize::from(owner)).is_none_or(|port| port.as_ref().is_none_or(|port| port.failed)) {
            return;
        }
        tracing::error!(
            port = owner, stage = fault.stage.name(), panic = %fault.panic,
            "a fault: the port is out of use until it gets another device (its machine reconnects) or a reload"
        );
        #[cfg(debug_assertions)]
        self.work.inject(None);
        if fault.stage.is_of_port() {
            self.count_decided(owner);
        }
        self.engine.mend(self.now, Some(owner), None, &mut self.out);
        let Some(port) = self.port_mut(owner) else { return };
        port.fault_times += 1;
        port.fault = Some(fault);
        let mut broken = port.exchange(device);
        broken.abandon();
        port.broken = Some(broken);
        (port.failed, port.readable) = (true, false);
        self.watch(usize::from(owner));
    }

    /// Keeps a fault of a port that came while something else than its packets was worked on, elsewhere.
    pub fn note_fault(&mut self, owner: u16, fault: PortFault) {
        if let Some(port) = self.port_mut(owner) {
            port.fault_times += 1;
            port.fault = Some(fault);
        }
    }

    /// Whose doing it was for sure.
    fn culprit(&self, work: &Work) -> Option<u16> {
        let owner = work.owner().filter(|_| work.stage().is_of_port())?;
        let port = self.ports.get(usize::from(owner))?.as_ref()?;
        (!port.failed).then_some(owner)
    }

    /// The port that the packet in hand is for.
    fn receiver(&self, work: &Work) -> Option<u16> {
        work.owner().or_else(|| self.vnics.get(&work.to?).copied())
    }

    /// The packet in hand is lost, and counted.
    fn count_in_hand(&mut self, work: &Work) {
        if work.stage().has_packet_for_guest() {
            self.counters.faulted_packets += 1;
        } else if work.stage().has_packet_for_underlay() {
            self.counters.faulted_tx_packets += 1;
        } else if work.stage() == Stage::Send {
            self.counters.faulted_tx_packets += self.batch.len() as u64;
        }
    }

    /// The packet of a guest that was in hand, if there was one: up to where the switch or the port had counted it.
    fn count_decided(&mut self, owner: u16) {
        let Some(switch) = self.switch.port_counters(PortId(owner)) else { return };
        let routed = switch.to_remote_packets + switch.to_local_packets;
        let decided = routed
            + switch.answered_packets
            + switch.copied_packets
            + switch.to_host_packets
            + switch.dropped.total_packets();
        let Some(port) = self.port_mut(owner) else { return };
        let (undecided, waiting) = port.waiting();
        let outbound = &mut port.outbound;
        // One packet at most is in hand: whatever else is missing stays so, for a balance to show it.
        let at_switch = (port.tx_packets + outbound.copy_packets)
            .saturating_sub(decided + outbound.fault_dropped_packets + outbound.faulted_packets)
            .min(1);
        outbound.faulted_packets += at_switch;
        let passed = outbound.accepted_packets
            + outbound.plain_packets
            + outbound.local_packets
            + outbound.unsegmentable_packets;
        let gone =
            outbound.gone_switched_packets + outbound.faulted_switched_packets + outbound.window_full_packets + waiting;
        let behind = routed.saturating_sub(passed + gone + outbound.reswitched_packets).min(1);
        outbound.faulted_switched_packets += behind;
        let counted = port.tx_packets + outbound.malformed_packets + undecided + outbound.gone_unswitched_packets;
        let before = (outbound.fetched_packets + outbound.reswitched_packets)
            .saturating_sub(counted + outbound.faulted_unswitched_packets);
        outbound.faulted_unswitched_packets += before.min(1);
    }

    /// What was half done is finished, or undone.
    fn finish_half_done(&mut self, work: &Work) {
        self.out.publish.drain(..self.published.min(self.out.publish.len()));
        self.published = 0;
        self.bundler.undo(&mut self.batch);
        if work.stage() == Stage::Send {
            // Nobody knows how far it came, and what it did not like would come again.
            self.batch.clear();
        }
        // A packet that was being given to others of this host is its sender's again, unless the sender is at fault.
        if let Some((from, handle)) = work.local
            && work.owner() != Some(from)
            && let Some(port) = self.port_mut(from)
        {
            port.complete(handle);
        }
        for port in self.ports.iter_mut().flatten() {
            port.unfinished |= !port.backlog.is_empty();
        }
    }

    /// Returns the port of the connection that was worked on.
    fn mend_engine(&mut self, work: &Work, culprit: Option<u16>) -> Option<u16> {
        let in_engine = matches!(
            work.stage(),
            Stage::Control | Stage::Data | Stage::Judge | Stage::Timer | Stage::Acknowledge | Stage::Transport
        );
        let cid = matches!(work.stage(), Stage::Control | Stage::Data | Stage::Judge).then_some(work.cid);
        if in_engine { self.engine.mend(self.now, culprit, cid, &mut self.out) } else { None }
    }
}

impl<P: GuestPort> Port<P> {
    /// Puts another device behind the port and returns the one that was there. What went through that one is forgotten.
    pub(crate) fn exchange(&mut self, device: P) -> P {
        self.held = Vec::new();
        self.forget_waiting();
        self.held_back_until = None;
        (self.readable, self.watched, self.failed) = (true, true, false);
        (self.dirty, self.completed) = (false, false);
        std::mem::replace(&mut self.port, device)
    }
}
