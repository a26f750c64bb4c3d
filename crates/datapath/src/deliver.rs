//! To guests of this host, without the transport: frames of other guests here, answers of the switch, plain VXLAN.

use bifrost_avs::WorkerId;
use bifrost_nic::{Parsed, Segments};
use bifrost_port::{GuestPort, PlaceError, RxHandle, TxFrame};
use bifrost_rte::{Output, Time};

use crate::capture::{Capture, Note};
use crate::changes::Changes;
use crate::core::Core;
use crate::counters::Counters;
use crate::ports::Port;
use crate::refusal::Refusal;
use crate::rx_queue::admits;
use crate::stage::Stage as At;

/// Maximum unsolicited router advertisements per turn.
const ADVERTISEMENTS: usize = 16;

impl<P: GuestPort> Core<P> {
    /// Continues with a frame as its guest will see it.
    #[inline(always)]
    pub(crate) fn with_changes(
        &mut self,
        frame: &[u8],
        parsed: &Parsed,
        changes: Changes,
        go_on: impl FnOnce(&mut Self, &[u8]),
    ) {
        if changes.is_none() {
            return go_on(self, frame);
        }
        let mut changed = std::mem::take(&mut self.changed);
        go_on(self, changes.apply(&mut changed, frame, parsed));
        self.changed = changed;
    }

    /// Gives guests the router advertisements that are due, a limited number per turn.
    pub(crate) fn advertise<const SEEN: bool>(&mut self) -> bool {
        let mut busy = false;
        for _ in 0..ADVERTISEMENTS {
            if self.switch.next_advertisement_ns().is_none_or(|at| at > self.now.0) {
                break;
            }
            let Some(port) = self.switch.advertise() else { break };
            self.answer::<SEEN>(port.0);
            busy = true;
        }
        busy
    }

    /// Gives a guest the switch's answer, or an unsolicited message of the switch.
    pub(crate) fn answer<const SEEN: bool>(&mut self, owner: u32) {
        self.counters.answered_packets += 1;
        let Some(port) = self.ports.get_mut(owner as usize).and_then(Option::as_mut) else {
            return self.drop_answer::<SEEN>(owner, Refusal::Gone);
        };
        self.work.at(At::Place, owner);
        match port.port.place(self.switch.answer(), true) {
            Ok(handle) => {
                port.hidden += 1;
                port.outbound.answer_packets += 1;
                self.counters.guest_rx_packets += 1;
                if SEEN && let Some(capture) = &mut self.capture {
                    let note = Note { port: Some(owner), ..Note::inwards("the switch's answer") };
                    capture.placed(note, handle.0, self.switch.answer());
                }
                self.out.publish.push((owner, handle.0));
            }
            Err(PlaceError::NoBuffer) => self.drop_answer::<SEEN>(owner, Refusal::NoBuffer),
            Err(PlaceError::TooLarge) => self.drop_answer::<SEEN>(owner, Refusal::TooLarge),
        }
    }

    /// The guest does not get the switch's answer.
    #[cold]
    fn drop_answer<const SEEN: bool>(&mut self, owner: u32, refusal: Refusal) {
        let mut answer = std::mem::take(&mut self.scratch);
        answer.clear();
        answer.extend_from_slice(self.switch.answer());
        self.refuse::<SEEN>(refusal, Some(owner), None, Note::inwards("the switch's answer"), &answer);
        self.scratch = answer;
    }

    /// Delivers a frame to another port of this host, possibly on another worker: without transport and encapsulation.
    pub(crate) fn deliver_locally<const SEEN: bool>(
        &mut self,
        from: u32,
        frame: TxFrame,
        segments: &Segments,
        (to, worker): (u32, Option<WorkerId>),
        rewrite: Option<&bifrost_avs::Rewrite>,
    ) {
        let as_it_is = rewrite.is_none() && segments.is_unchanged() && worker.is_none();
        if as_it_is && self.deliver_as_it_is::<SEEN>(from, frame, to) {
            return;
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        self.work.local = Some((from, frame.handle));
        // Checksums completed here are known to be right.
        let checksummed = frame.offload != bifrost_nic::Offload::default();
        for i in 0..segments.count() {
            let Some(port) = self.ports[from as usize].as_mut() else { break };
            self.work.at(At::Copy, from);
            scratch.clear();
            segments.write(i, |from, to, out| port.port.copy(frame.handle, from, to, out), &mut scratch);
            if let Some(rewrite) = rewrite {
                rewrite.apply(&mut scratch);
            }
            self.counters.local_packets += 1;
            match worker {
                None => self.deliver_plain::<SEEN>(to, &scratch, checksummed),
                Some(worker) => self.siblings.keep_frame(worker, (from, to), &scratch, checksummed),
            }
        }
        self.scratch = scratch;
        self.work.local = None;
        self.work.at(At::Release, from);
        if let Some(port) = self.ports[from as usize].as_mut() {
            port.complete(frame.handle);
        }
    }

    /// The same for a contiguous frame that does not change, without assembling it first. Returns false, and does
    /// nothing, if that is not possible.
    fn deliver_as_it_is<const SEEN: bool>(&mut self, from: u32, frame: TxFrame, to: u32) -> bool {
        let both = self.ports.get_disjoint_mut([from as usize, to as usize]);
        let Ok([Some(source), Some(target)]) = both else { return false };
        let (head, _) = source.port.bytes(frame.handle);
        if head.len() != frame.len as usize {
            return false;
        }
        self.counters.local_packets += 1;
        self.work.local = Some((from, frame.handle));
        self.work.at(At::Place, to);
        let (out, counters, capture) = (&mut self.out, &mut self.counters, &mut self.capture);
        if let Err(refusal) = place_plain::<SEEN, P>(target, self.now, head, false, out, counters, capture) {
            let mut copy = std::mem::take(&mut self.scratch);
            copy.clear();
            copy.extend_from_slice(head);
            self.not_placed::<SEEN>(to, &copy, false, refusal);
            self.scratch = copy;
        }
        self.work.local = None;
        self.work.at(At::Release, from);
        if let Some(source) = self.port_mut(from) {
            source.complete(frame.handle);
        }
        true
    }

    /// Places a frame that was not carried reliably; it is published with this batch.
    pub(crate) fn deliver_plain<const SEEN: bool>(&mut self, owner: u32, frame: &[u8], checksum_valid: bool) {
        let Some(port) = self.ports.get_mut(owner as usize).and_then(Option::as_mut) else {
            // Its device has no queue on this worker.
            return self.refuse::<SEEN>(Refusal::Gone, Some(owner), None, Note::inwards("plain"), frame);
        };
        self.work.at(At::Place, owner);
        let (out, counters, capture) = (&mut self.out, &mut self.counters, &mut self.capture);
        if let Err(refusal) = place_plain::<SEEN, P>(port, self.now, frame, checksum_valid, out, counters, capture) {
            self.not_placed::<SEEN>(owner, frame, checksum_valid, refusal);
        }
    }

    /// A frame that nobody retransmits cannot be placed now: it waits, or it is dropped.
    #[cold]
    fn not_placed<const SEEN: bool>(&mut self, owner: u32, frame: &[u8], checksum_valid: bool, refusal: Refusal) {
        if let Err(refusal) = self.queue_for_guest(owner, frame, checksum_valid, refusal) {
            let vni = self.port_mut(owner).map(|port| port.vni.get());
            self.refuse::<SEEN>(refusal, Some(owner), None, Note { vni, ..Note::inwards("plain") }, frame);
        }
    }
}

fn place_plain<const SEEN: bool, P: GuestPort>(
    port: &mut Port<P>,
    now: Time,
    frame: &[u8],
    checksum_valid: bool,
    out: &mut Output,
    counters: &mut Counters,
    capture: &mut Option<Box<Capture>>,
) -> Result<(), Refusal> {
    let handle = place_unasked(port, now, frame, checksum_valid)?;
    if SEEN && let Some(capture) = capture {
        let note = Note { port: Some(port.owner), vni: Some(port.vni.get()), ..Note::inwards("plain") };
        capture.placed(note, handle.0, frame);
    }
    port.rx_packets += 1;
    counters.guest_rx_packets += 1;
    port.rx_bytes += frame.len() as u64;
    port.hidden += 1;
    out.publish.push((port.owner, handle.0));
    Ok(())
}

/// Places a frame, unless a limit or a rest of the port forbids it.
#[inline(always)]
fn place_unasked<P: GuestPort>(
    port: &mut Port<P>,
    now: Time,
    frame: &[u8],
    checksum_valid: bool,
) -> Result<RxHandle, Refusal> {
    if port.limits.rx.as_ref().is_some_and(|limit| !admits(limit, port.rx_queue.as_deref(), now, frame)) {
        return Err(Refusal::RateLimited);
    }
    if port.slowness.rests(now) {
        return Err(Refusal::SlowPort);
    }
    port.port.place(frame, checksum_valid).map_err(|error| match error {
        PlaceError::NoBuffer => Refusal::NoBuffer,
        PlaceError::TooLarge => Refusal::TooLarge,
    })
}
