//! Passes completions of the provider to the engine.

use bifrost_rdm::{Arrival, Engine};
use bifrost_verbs::{Completion, CompletionKind, Provider, Qpn, Slice, Status};
use bifrost_wire::rdm::SendHeader;

use super::Host;
use super::lanes::lane_token;
use crate::buffers::Store;

/// Maximum number of completions per poll.
const BATCH: usize = 256;

impl<P: Provider> Host<P> {
    pub(super) fn poll_data(&mut self, now_ns: u64) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        self.provider.poll(self.queue, BATCH, &mut completions);
        for completion in &completions {
            self.on_completion(now_ns, completion);
        }
        let any = !completions.is_empty();
        completions.clear();
        self.completions = completions;
        any
    }

    /// A reset discards completions that were not polled. RC has acknowledged those messages, so the peer does not
    /// retransmit them. Errors of the queue pair itself are already known, and skipped.
    pub(super) fn take_before_reset(&mut self, queue_pair: Qpn) {
        let mut completions = Vec::new();
        while self.provider.poll(self.queue, BATCH, &mut completions) > 0 {
            for completion in completions.drain(..) {
                if completion.queue_pair != queue_pair || completion.status == Status::Success {
                    self.on_completion(self.now_ns, &completion);
                }
            }
        }
    }

    fn on_completion(&mut self, now_ns: u64, completion: &Completion) {
        let success = completion.status == Status::Success;
        if completion.kind == CompletionKind::Send {
            self.engine.on_sent(now_ns, completion.token, success, completion.time_ns, &mut self.out);
            return;
        }
        let id = Engine::connection_of(completion.token);
        let (lane, slot) = (completion.token >> 16 & 0xff, completion.token as u32 & 0xffff);
        let Some(local) = self.bound(id).and_then(|bound| bound.lanes.get(lane as usize).copied()) else { return };
        if !success {
            self.engine.on_lane_error(now_ns, id, lane as u8, &mut self.out);
            return;
        }
        let slice = local.slots.slice(slot);
        let mut head = [0; SendHeader::LEN];
        let arrival = match (completion.kind, completion.immediate) {
            (CompletionKind::Receive, _) => {
                let len = completion.len.min(head.len() as u32);
                if let Some(bytes) = self.provider.bytes(Slice { len, ..slice }) {
                    head[..bytes.len()].copy_from_slice(bytes);
                }
                Arrival::Send { head: &head[..len as usize], len: completion.len }
            }
            (_, immediate) => Arrival::Write { immediate: immediate.unwrap_or_default(), len: completion.len },
        };
        let mut store = Store { provider: &mut self.provider, buffers: &mut self.buffers };
        let place = self.engine.on_arrival(now_ns, id, arrival, completion.time_ns, &mut store, &mut self.out);
        if let Some(place) = place
            && let Some(to) = self.buffers.slice(place.buffer, place.offset, place.len)
        {
            let offset = slice.offset + SendHeader::LEN as u32;
            self.provider.copy(Slice { offset, len: place.len, ..slice }, to);
        }
        // Events are handled only when all data of the message is in its buffer.
        self.collect();
        let _ = local.slots.post(&mut self.provider, local.queue_pair, lane_token(id, lane as u8), slot);
    }
}
