//! The UD queue pair for control datagrams, mostly ACKs. They are urgent, so it has its own completion queue: ACKs wait
//! neither behind data nor behind completions of data (paper §3.4.3).

use std::net::IpAddr;

use bifrost_rdm::{Engine, Output};
use bifrost_verbs::{
    Completion, CompletionKind, CqId, Datagram, Domain, INLINE_MAX, Operation, Provider, QpInit, Qpn, SendRequest,
    Slice, Status, Transport, VerbsError,
};
use bifrost_wire::rdm::Control;

use crate::slots::Slots;

/// Maximum number of datagrams that are posted and not polled, in each direction.
const DEPTH: u16 = 1024;
/// Length of a slot, enough for the longest datagram.
const SLOT: u32 = 192;

/// The queue pair, and its memory.
#[derive(Debug)]
pub(crate) struct ControlQueue {
    pub(crate) queue_pair: Qpn,
    pub(crate) queue_key: u32,
    queue: CqId,
    incoming: Slots,
    outgoing: Slots,
    next: u32,
    completions: Vec<Completion>,
    /// Datagrams dropped because the queue was full, like losses in the network.
    pub(crate) dropped: u64,
}

impl ControlQueue {
    pub(crate) fn new(provider: &mut impl Provider, queue_key: u32) -> Result<Self, VerbsError> {
        let queue = provider.create_queue()?;
        let domain = Domain(0);
        let init = QpInit {
            transport: Transport::Ud,
            send_queue: queue,
            receive_queue: queue,
            send_depth: DEPTH,
            receive_depth: DEPTH,
            domain,
            queue_key,
            urgent: true,
        };
        let queue_pair = provider.create_queue_pair(init)?;
        let incoming = Slots::new(provider, domain, SLOT, u32::from(DEPTH))?;
        let outgoing = Slots::new(provider, domain, SLOT, u32::from(DEPTH))?;
        incoming.post_all(provider, queue_pair, 0).map_err(|_| VerbsError::Value("depth"))?;
        Ok(Self { queue_pair, queue_key, queue, incoming, outgoing, next: 0, completions: Vec::new(), dropped: 0 })
    }

    /// Passes received datagrams to the engine. Returns whether there were any.
    pub(crate) fn poll(
        &mut self,
        now_ns: u64,
        provider: &mut impl Provider,
        engine: &mut Engine,
        out: &mut Output,
    ) -> bool {
        provider.poll(self.queue, usize::from(DEPTH), &mut self.completions);
        let any = !self.completions.is_empty();
        let mut in_error = false;
        for completion in self.completions.drain(..) {
            if completion.status != Status::Success {
                in_error = true;
                continue;
            }
            let (CompletionKind::Receive, Some((address, from))) = (completion.kind, completion.source) else {
                continue;
            };
            let slot = completion.token as u32;
            let slice = Slice { len: completion.len.min(SLOT), ..self.incoming.slice(slot) };
            if let Some(bytes) = provider.bytes(slice) {
                engine.on_control(now_ns, (address, from.get()), bytes, completion.time_ns, out);
            }
            // This cannot fail: the request was just polled, so the queue has space.
            let _ = self.incoming.post(provider, self.queue_pair, 0, slot);
        }
        if in_error {
            self.repair(provider);
        }
        any
    }

    /// Resets the queue pair and uses it again: datagrams need no connection. Those in flight are lost, as in the
    /// network.
    fn repair(&mut self, provider: &mut impl Provider) {
        // These cannot fail: the queue pair exists, and is empty after the reset.
        let _ = provider.reset(self.queue_pair);
        let _ = self.incoming.post_all(provider, self.queue_pair, 0);
    }

    /// Sends a datagram.
    pub(crate) fn send(&mut self, provider: &mut impl Provider, to: &ControlPeer, control: &Control) {
        let mut bytes = [0; Control::MAX_LEN];
        let len = control.emit_into(&mut bytes);
        let slice = Slice { len: len as u32, ..self.outgoing.slice(self.next) };
        if let Some(memory) = provider.bytes_mut(slice) {
            memory.copy_from_slice(&bytes[..len]);
        }
        let request = SendRequest {
            token: 0,
            operation: Operation::SendTo(Datagram {
                address: to.address,
                port: to.port,
                source_port: to.source_port,
                queue_pair: to.queue_pair,
                queue_key: to.queue_key,
            }),
            immediate: None,
            inline: [0; INLINE_MAX],
            inline_len: 0,
            slice: Some(slice),
        };
        match provider.post_send(self.queue_pair, request) {
            Ok(()) => self.next = (self.next + 1) % u32::from(DEPTH),
            Err(_) => self.dropped += 1,
        }
    }
}

/// Destination of a peer's control datagrams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ControlPeer {
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
    pub(crate) source_port: u16,
    pub(crate) queue_pair: Qpn,
    pub(crate) queue_key: u32,
}
