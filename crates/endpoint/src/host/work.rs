//! Performs the engine's output: work requests for the provider, events for the application.

use bifrost_rdm::{Class, ConnectionId, Event, Work};
use bifrost_verbs::{INLINE_MAX, Operation, Provider, SendRequest};
use bifrost_wire::udp::ephemeral_port;

use super::{Host, HostEvent};
use crate::buffers::Store;

impl<P: Provider> Host<P> {
    pub(super) fn perform(&mut self, now_ns: u64) {
        self.perform_work();
        self.collect();
        // A refused request puts its lane into error.
        if !self.out.work.is_empty() {
            self.turn_engine(now_ns);
        }
    }

    pub(super) fn turn_engine(&mut self, now_ns: u64) {
        let mut store = Store { provider: &mut self.provider, buffers: &mut self.buffers };
        self.engine.turn(now_ns, &mut store, &mut self.out);
    }

    pub(super) fn perform_work(&mut self) {
        let mut work = std::mem::take(&mut self.out.work);
        for work in &work {
            self.perform_one(work);
        }
        work.clear();
        // Then the work that was added meanwhile.
        work.append(&mut self.out.work);
        self.out.work = work;
    }

    fn perform_one(&mut self, work: &Work) {
        match *work {
            Work::Send { connection, lane, token, header, buffer, offset, len } => {
                let mut inline = [0; INLINE_MAX];
                inline[..header.len()].copy_from_slice(&header);
                let slice = self.buffers.slice(buffer, offset, len);
                let (operation, inline_len) = (Operation::Send, header.len() as u8);
                let request = SendRequest { token, operation, immediate: None, inline, inline_len, slice };
                self.post(connection, lane, request);
            }
            Work::Write { connection, lane, token, buffer, offset, len, address, key, immediate } => {
                let slice = self.buffers.slice(buffer, offset, len);
                let operation = Operation::Write { address, key };
                let (inline, inline_len) = ([0; INLINE_MAX], 0);
                let request = SendRequest { token, operation, immediate: Some(immediate), inline, inline_len, slice };
                self.post(connection, lane, request);
            }
            Work::Control { connection, ref control } => {
                let peer = self.bound(connection).and_then(|bound| bound.peer);
                if let Some(peer) = peer {
                    self.control.send(&mut self.provider, &peer.control, control);
                }
            }
            Work::Repath { connection } => {
                let source_port = ephemeral_port(self.random.u16(..0x4000));
                if let Some(peer) = self.bound_mut(connection).and_then(|bound| bound.peer.as_mut()) {
                    peer.control.source_port = source_port;
                }
            }
            Work::Reset { connection, lane } => {
                if let Some(local) = self.bound(connection).map(|bound| bound.lanes[usize::from(lane)]) {
                    self.take_before_reset(local.queue_pair);
                    let _ = self.provider.reset(local.queue_pair);
                }
            }
            Work::Connect { connection, lane, send_sequence, receive_sequence, source_port } => {
                // This fails only because of a bug: the values are valid, and the queue pair was reset. The lane is
                // then silent, and another one is used.
                let _ = self.connect_lane(connection, lane, send_sequence, receive_sequence, source_port);
            }
        }
    }

    fn post(&mut self, connection: ConnectionId, lane: u8, request: SendRequest) {
        let Some(local) = self.bound(connection).map(|bound| bound.lanes[usize::from(lane)]) else { return };
        if self.provider.post_send(local.queue_pair, request).is_err() {
            // It was not posted, so it was not sent: the engine resets the lane and retransmits its requests.
            self.engine.on_sent(0, request.token, false, 0, &mut self.out);
        }
    }

    /// Handles the engine's events; their buffers are deregistered.
    pub(super) fn collect(&mut self) {
        for event in self.out.events.drain(..) {
            match event {
                Event::Delivered { connection, buffer, class, call, .. } => {
                    let Some(data) = self.buffers.deregister(&mut self.provider, buffer) else { continue };
                    if matches!(class, Class::Write | Class::Read) {
                        self.served.execute(connection, class, call, &data);
                        self.buffers.recycle(connection, data);
                        continue;
                    }
                    self.events.push_back(HostEvent::Message { connection, class, call, data });
                }
                Event::Sent { connection, message, buffer } => {
                    if let Some(data) = self.buffers.deregister(&mut self.provider, buffer) {
                        self.buffers.recycle(connection, data);
                    }
                    self.served.on_sent(connection, message);
                    self.events.push_back(HostEvent::Sent { connection, message });
                }
                Event::Closed { connection, reason, by_peer } => {
                    self.events.push_back(HostEvent::Closed { connection, reason, by_peer });
                }
            }
        }
    }
}
