//! Reception: each packet is checked, counted if it is dropped, and passed to the requester or responder of its queue
//! pair.

use bifrost_wire::roce::{
    Acknowledgement, Bth, DEFAULT_PARTITION, Icrc, Nak, Opcode, Operation as Op, Packet, Qpn, Refusal, Route, Transport,
};

use super::{ACKNOWLEDGE_EVERY, NOT_READY_10US, NOT_READY_TIMER, Nic, arm, find, schedule, sent, slot};
use crate::completion::{Completion, CompletionKind, Status};
use crate::queue_pair::State;
use crate::requester::{Again, Verdict};
use crate::responder::Fault;
use crate::verbs::Slice;

impl Nic {
    /// Takes a UDP payload that arrived on `route`.
    pub fn receive(&mut self, now_ns: u64, route: &Route, payload: &[u8]) {
        if !self.starts.is_valid(route, payload) && Icrc::identification(route, payload).is_none() {
            self.counters.bad_icrc_packets += 1;
            return;
        }
        let packet = match Packet::parse(payload) {
            Ok(packet) if packet.header.bth.partition & 0x7fff == DEFAULT_PARTITION & 0x7fff => packet,
            refused => {
                self.counters.malformed_packets += 1;
                if refused == Err(Refusal::Opcode) {
                    self.refuse_operation(now_ns, route, payload);
                }
                return;
            }
        };
        let number = packet.header.bth.destination;
        let qp = find(&mut self.queue_pairs, number)
            .filter(|qp| qp.state == State::Ready && qp.init.transport == packet.opcode.transport);
        let Some(qp) = qp else {
            self.counters.unknown_queue_pair_packets += 1;
            return;
        };
        if qp.peer.is_some_and(|peer| peer.address != route.source) {
            self.counters.foreign_packets += 1;
            return;
        }
        match packet.opcode {
            Opcode { transport: Transport::Ud, .. } => self.on_datagram(now_ns, route, &packet),
            Opcode { operation: Op::Acknowledge, .. } => self.on_acknowledgement(now_ns, &packet),
            Opcode { transport: Transport::Uc, .. } => self.on_unreliable(now_ns, &packet),
            Opcode { transport: Transport::Rc, .. } => self.on_reliable(now_ns, &packet),
        }
    }

    fn on_datagram(&mut self, now_ns: u64, route: &Route, packet: &Packet<'_>) {
        let (number, Some(deth)) = (packet.header.bth.destination, packet.header.deth) else { return };
        let Some(qp) = find(&mut self.queue_pairs, number) else { return };
        if deth.queue_key != qp.init.queue_key {
            self.counters.bad_queue_key_packets += 1;
            return;
        }
        let Some(request) = qp.responder.queue.front().copied() else {
            self.counters.no_receive_request_messages += 1;
            return;
        };
        let len = packet.payload.len() as u32;
        if len > request.slice.len {
            self.counters.too_long_messages += 1;
            return;
        }
        let Some(memory) = self.regions.bytes_mut(Slice { len, ..request.slice }) else {
            self.counters.access_denied_messages += 1;
            return;
        };
        memory.copy_from_slice(packet.payload);
        qp.responder.queue.pop_front();
        self.counters.received_packets += 1;
        let completion = Completion {
            token: request.token,
            queue_pair: number,
            kind: CompletionKind::Receive,
            status: Status::Success,
            len,
            immediate: packet.header.immediate,
            source: Some((route.source, deth.source)),
            time_ns: now_ns,
        };
        self.completions[usize::from(qp.init.receive_queue.0)].0.push_back(completion);
    }

    fn on_unreliable(&mut self, now_ns: u64, packet: &Packet<'_>) {
        let bth = &packet.header.bth;
        let Some(qp) = find(&mut self.queue_pairs, bth.destination) else { return };
        let in_sequence = bth.sequence == qp.responder.expected;
        qp.responder.expected = bth.sequence.plus(1);
        if packet.opcode.operation.is_first() {
            self.counters.torn_messages += u64::from(qp.responder.tear());
        } else if !in_sequence || !qp.responder.is_amid_message() {
            self.counters.torn_messages += u64::from(qp.responder.tear());
            self.counters.torn_packets += 1;
            return;
        }
        if let Err(fault) = self.take(now_ns, packet) {
            self.count(fault);
            if let Some(qp) = find(&mut self.queue_pairs, bth.destination) {
                qp.responder.tear();
            }
        }
    }

    fn on_reliable(&mut self, now_ns: u64, packet: &Packet<'_>) {
        let bth = &packet.header.bth;
        let Some(qp) = find(&mut self.queue_pairs, bth.destination) else { return };
        let ahead = bth.sequence.distance(qp.responder.expected);
        if ahead < 0 {
            self.counters.repeated_received_packets += 1;
            self.say(bth.destination, Acknowledgement::Ack);
            return;
        }
        if ahead > 0 {
            self.counters.gap_packets += 1;
            if !std::mem::replace(&mut qp.responder.gap_reported, true) {
                self.say(bth.destination, Acknowledgement::Nak(Nak::Sequence));
            }
            return;
        }
        let outcome = self.take(now_ns, packet);
        let Some(qp) = find(&mut self.queue_pairs, bth.destination) else { return };
        match outcome {
            Ok(()) => {
                qp.responder.expected = bth.sequence.plus(1);
                qp.responder.gap_reported = false;
                qp.responder.unanswered += 1;
                if bth.acknowledge || u32::from(qp.responder.unanswered) >= ACKNOWLEDGE_EVERY {
                    qp.responder.unanswered = 0;
                    self.say(bth.destination, Acknowledgement::Ack);
                }
            }
            Err(Fault::NotReady) => {
                self.count(Fault::NotReady);
                self.say(bth.destination, Acknowledgement::NotReady(NOT_READY_TIMER));
            }
            Err(fault) => {
                self.count(fault);
                let nak = if fault == Fault::Access { Nak::RemoteAccess } else { Nak::InvalidRequest };
                self.refuse(now_ns, bth.destination, nak);
            }
        }
    }

    /// An unsupported operation, on a queue pair that must answer it.
    fn refuse_operation(&mut self, now_ns: u64, route: &Route, payload: &[u8]) {
        let Some(bth) = payload.first_chunk().and_then(Bth::parse) else { return };
        let Some(qp) = find(&mut self.queue_pairs, bth.destination) else { return };
        let asked = qp.state == State::Ready
            && qp.init.transport == Transport::Rc
            && bth.opcode >> 5 == Transport::Rc as u8
            && qp.peer.is_some_and(|peer| peer.address == route.source)
            && bth.sequence == qp.responder.expected;
        if asked {
            self.refuse(now_ns, bth.destination, Nak::InvalidRequest);
        }
    }

    /// RC: answers with a NAK, and puts the queue pair into error.
    fn refuse(&mut self, now_ns: u64, number: Qpn, nak: Nak) {
        self.say(number, Acknowledgement::Nak(nak));
        self.fail(now_ns, slot(number), Status::Flushed);
    }

    /// An RC or UC packet that is next in sequence.
    fn take(&mut self, now_ns: u64, packet: &Packet<'_>) -> Result<(), Fault> {
        let number = packet.header.bth.destination;
        let qp = find(&mut self.queue_pairs, number).ok_or(Fault::OutOfPlace)?;
        let mtu = qp.peer.ok_or(Fault::OutOfPlace)?.mtu;
        let (operation, header) = (packet.opcode.operation, &packet.header);
        let received = qp.responder.take(&mut self.regions, qp.init.domain, mtu, operation, header, packet.payload)?;
        self.counters.received_packets += 1;
        if let Some(received) = received {
            let completion = Completion {
                token: received.request.token,
                queue_pair: number,
                kind: received.kind,
                status: Status::Success,
                len: received.len,
                immediate: header.immediate,
                source: None,
                time_ns: now_ns,
            };
            self.completions[usize::from(qp.init.receive_queue.0)].0.push_back(completion);
        }
        Ok(())
    }

    fn on_acknowledgement(&mut self, now_ns: u64, packet: &Packet<'_>) {
        let (bth, Some(aeth)) = (&packet.header.bth, packet.header.aeth) else { return };
        let Some(qp) = find(&mut self.queue_pairs, bth.destination) else { return };
        let Some(peer) = qp.peer else { return };
        let (up_to, again, fatal) = match aeth.what {
            Acknowledgement::Ack => (bth.sequence.plus(1), None, None),
            Acknowledgement::NotReady(timer) => {
                let wait_ns = NOT_READY_10US[usize::from(timer & 0x1f)] * 10_000;
                (bth.sequence, Some(Again::NotReady(wait_ns)), None)
            }
            Acknowledgement::Nak(Nak::Sequence) => (bth.sequence, Some(Again::Gap), None),
            Acknowledgement::Nak(Nak::RemoteAccess) => (bth.sequence, None, Some(Status::RemoteAccess)),
            Acknowledgement::Nak(_) => (bth.sequence, None, Some(Status::RemoteInvalid)),
        };
        let completions = &mut self.completions[usize::from(qp.init.send_queue.0)];
        let verdict = qp.requester.acknowledge(now_ns, up_to, again, &peer, |pending| {
            completions.0.push_back(sent(&pending, bth.destination, Status::Success, now_ns));
        });
        match (verdict, fatal) {
            (Verdict::Stray, _) => self.counters.stray_acknowledgements += 1,
            (_, Some(status)) => self.fail(now_ns, slot(bth.destination), status),
            (Verdict::GiveUp, None) => {
                let status = if matches!(again, Some(Again::NotReady(_))) {
                    Status::ReceiverNotReady
                } else {
                    Status::RetryExceeded
                };
                self.fail(now_ns, slot(bth.destination), status);
            }
            (Verdict::Continue, None) => {
                self.counters.received_packets += 1;
                let Some(qp) = find(&mut self.queue_pairs, bth.destination) else { return };
                if qp.requester.has_work(now_ns) {
                    schedule(qp, &mut self.urgent, &mut self.waiting);
                }
                arm(qp, &mut self.armed);
            }
        }
    }

    /// Records the response of an RC queue pair; a NAK is not overwritten by later ones.
    fn say(&mut self, number: Qpn, what: Acknowledgement) {
        let Some(qp) = find(&mut self.queue_pairs, number) else { return };
        if qp.answer.is_none() {
            self.answering.push_back(slot(number));
        }
        if qp.answer.is_none_or(|answer| answer == Acknowledgement::Ack) {
            qp.answer = Some(what);
        }
    }

    fn count(&mut self, fault: Fault) {
        match fault {
            Fault::OutOfPlace => self.counters.out_of_place_packets += 1,
            Fault::NotReady => self.counters.no_receive_request_messages += 1,
            Fault::TooLong => self.counters.too_long_messages += 1,
            Fault::Access => self.counters.access_denied_messages += 1,
        }
    }
}
