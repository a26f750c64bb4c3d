//! Makes a core usable again after a panic.

use std::io;

use bifrost_avs::PortId;
use bifrost_port::GuestPort;
use bifrost_port::panics::Panic;

use super::{MAX_STRIKES, MAX_UNOWNED, PortFault, Recovery};
use crate::core::Core;
use crate::ports::Port;
use crate::stage::Stage;
use crate::work::Work;

impl<P: GuestPort> Core<P> {
    /// Makes the core usable again after a panic in [`turn`](Self::turn) or in another call, and takes the port that
    /// caused it out of use. `spare` creates the device that such a port gets instead: one without a guest.
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
            // Dropping one connection is enough, unless that happens again and again.
            let owner = of_connection.or_else(|| self.receiver(&work))?;
            let now = self.now;
            self.port_mut(owner).is_some_and(|port| !port.failed && port.strikes.add(now, MAX_STRIKES)).then_some(owner)
        });
        let fault = PortFault { stage: work.stage(), panic, at: self.now };
        let Some(owner) = culprit else {
            tracing::error!(stage = fault.stage.name(), panic = %fault.panic, "a panic while a packet was processed; the packet is dropped");
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
                tracing::error!(port = owner, %error, panic = %fault.panic, "cannot take a port out of use after a panic");
                Recovery::Hopeless
            }
        }
    }

    /// Takes a port out of use after a fault, here or on another worker that serves it: its device is not used any
    /// longer, and its guest neither sends nor receives, until the port gets another device. `device` stands in for it.
    pub fn take_out(&mut self, owner: u32, fault: PortFault, device: P) {
        if self.ports.get(owner as usize).is_none_or(|port| port.as_ref().is_none_or(|port| port.failed)) {
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
        self.drop_rx_queued(owner);
        self.engine.mend(self.now, Some(owner), None, &mut self.out);
        let Some(port) = self.port_mut(owner) else { return };
        port.fault_times += 1;
        port.fault = Some(fault);
        let mut broken = port.exchange(device);
        broken.abandon();
        port.broken = Some(broken);
        (port.failed, port.readable) = (true, false);
        self.watch(owner as usize);
    }

    /// Records a fault of a port that occurred elsewhere, not while its packets were being processed.
    pub fn note_fault(&mut self, owner: u32, fault: PortFault) {
        if let Some(port) = self.port_mut(owner) {
            port.fault_times += 1;
            port.fault = Some(fault);
        }
    }

    /// The port that certainly caused the panic.
    fn culprit(&self, work: &Work) -> Option<u32> {
        let owner = work.owner().filter(|_| work.stage().is_of_port())?;
        let port = self.ports.get(owner as usize)?.as_ref()?;
        (!port.failed).then_some(owner)
    }

    /// The destination port of the packet being processed.
    fn receiver(&self, work: &Work) -> Option<u32> {
        work.owner().or_else(|| self.vnics.get(&work.to?).copied())
    }

    /// Counts the packet being processed as lost.
    fn count_in_hand(&mut self, work: &Work) {
        if work.stage().has_packet_for_guest() {
            self.counters.faulted_packets += 1;
        } else if work.stage().has_packet_for_underlay() {
            self.counters.faulted_tx_packets += 1;
        } else if work.stage() == Stage::Send {
            self.counters.faulted_tx_packets += self.batch.len() as u64;
        }
    }

    /// Counts the guest's packet being processed, if any, by how far the counters of switch and port show it to have
    /// come.
    fn count_decided(&mut self, owner: u32) {
        let Some(switch) = self.switch.port_counters(PortId(owner)) else { return };
        let routed = switch.to_remote_packets + switch.to_local_packets;
        let decided = routed
            + switch.answered_packets
            + switch.copied_packets
            + switch.to_host_packets
            + switch.asked_packets
            + switch.dropped.total_packets();
        let Some(port) = self.port_mut(owner) else { return };
        let (undecided, waiting) = port.waiting();
        let outbound = &mut port.outbound;
        // At most one packet is being processed: any other difference stays visible in the balance.
        let at_switch = (port.tx_packets + outbound.copy_packets)
            .saturating_sub(decided + outbound.fault_dropped_packets + outbound.faulted_packets)
            .min(1);
        outbound.faulted_packets += at_switch;
        let passed = outbound.accepted_packets
            + outbound.plain_packets
            + outbound.local_packets
            + outbound.unsegmentable_packets;
        let gone = outbound.gone_switched_packets
            + outbound.faulted_switched_packets
            + outbound.window_full_packets
            + outbound.queue_full_packets
            + waiting;
        let behind = routed.saturating_sub(passed + gone + outbound.reswitched_packets).min(1);
        outbound.faulted_switched_packets += behind;
        let counted = port.tx_packets + outbound.malformed_packets + undecided + outbound.gone_unswitched_packets;
        let before = (outbound.fetched_packets + outbound.reswitched_packets + outbound.resumed_packets)
            .saturating_sub(counted + outbound.faulted_unswitched_packets);
        outbound.faulted_unswitched_packets += before.min(1);
    }

    /// Finishes or undoes what was half finished.
    fn finish_half_done(&mut self, work: &Work) {
        self.out.publish.drain(..self.published.min(self.out.publish.len()));
        self.published = 0;
        self.bundler.undo(&mut self.batch);
        if work.stage() == Stage::Send {
            // It is unknown how much was sent, and whatever caused the panic would cause it again.
            self.batch.clear();
        }
        // A packet that was being delivered to others on this host is returned to its sender, unless the sender is at
        // fault.
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

    /// Repairs the transport. Returns the port of the connection that was being processed.
    fn mend_engine(&mut self, work: &Work, culprit: Option<u32>) -> Option<u32> {
        let in_engine = matches!(
            work.stage(),
            Stage::Control | Stage::Data | Stage::Judge | Stage::Timer | Stage::Acknowledge | Stage::Transport
        );
        let cid = matches!(work.stage(), Stage::Control | Stage::Data | Stage::Judge).then_some(work.cid);
        if in_engine { self.engine.mend(self.now, culprit, cid, &mut self.out) } else { None }
    }
}

impl<P: GuestPort> Port<P> {
    /// Puts another device behind the port and returns the previous one. Everything about that one is forgotten.
    pub(crate) fn exchange(&mut self, device: P) -> P {
        self.held = Vec::new();
        self.forget_waiting();
        self.held_back_until = None;
        (self.readable, self.watched, self.failed) = (true, true, false);
        (self.dirty, self.completed) = (false, false);
        std::mem::replace(&mut self.port, device)
    }
}
