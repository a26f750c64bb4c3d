//! The receiving half of a queue pair: takes packets, writes memory, completes receive requests.

use std::collections::VecDeque;

use bifrost_wire::roce::{Header, Operation, Sequence};

use crate::completion::CompletionKind;
use crate::region::Regions;
use crate::verbs::{Connect, Domain, Key, ReceiveRequest, Slice};

/// A message whose last packet has not arrived.
#[derive(Clone, Copy, Debug)]
struct Partial {
    write: bool,
    slice: Slice,
    filled: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Responder {
    /// The current message uses the first one, if it is a SEND; the last packet consumes it.
    pub(crate) queue: VecDeque<ReceiveRequest>,
    /// Requests that are posted and not polled.
    pub(crate) outstanding: u16,
    pub(crate) expected: Sequence,
    partial: Option<Partial>,
    /// Number of completed messages, modulo 2^24.
    pub(crate) messages: u32,
    /// RC: the gap has been reported.
    pub(crate) gap_reported: bool,
    /// RC: packets since the last acknowledgement.
    pub(crate) unanswered: u16,
}

/// Why a packet is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Not a continuation, or the payload length does not match the position.
    OutOfPlace,
    /// No receive request.
    NotReady,
    /// Longer than the receive request's memory.
    TooLong,
    /// Wrong key, address or length.
    Access,
}

/// An arrived message that completes a receive request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) request: ReceiveRequest,
    pub(crate) kind: CompletionKind,
    pub(crate) len: u32,
}

impl Responder {
    pub(crate) fn begin(&mut self, peer: &Connect) {
        self.expected = peer.receive_sequence;
        self.partial = None;
        self.messages = 0;
        self.gap_reported = false;
        self.unanswered = 0;
    }

    /// Discards the current message; returns whether there was one.
    pub(crate) fn tear(&mut self) -> bool {
        self.partial.take().is_some()
    }

    pub(crate) fn is_amid_message(&self) -> bool {
        self.partial.is_some()
    }

    /// Takes an RC or UC packet that is next in sequence. Changes nothing with [`Fault::NotReady`].
    pub(crate) fn take(
        &mut self,
        regions: &mut Regions,
        domain: Domain,
        mtu: u16,
        operation: Operation,
        header: &Header,
        payload: &[u8],
    ) -> Result<Option<Received>, Fault> {
        let (first, last, write) = (operation.is_first(), operation.is_last(), operation.is_write());
        let Partial { slice, filled, .. } = match (first, self.partial) {
            (true, None) => self.open(regions, domain, header)?,
            (false, Some(partial)) if partial.write == write => partial,
            _ => return Err(Fault::OutOfPlace),
        };
        let full = payload.len() == usize::from(mtu);
        let fits = match (first, last) {
            (_, false) => full,
            (false, true) => !payload.is_empty() && payload.len() <= usize::from(mtu),
            (true, true) => payload.len() <= usize::from(mtu),
        };
        if !fits {
            return Err(Fault::OutOfPlace);
        }
        let len = payload.len() as u32;
        let end = filled + len;
        if end > slice.len {
            return Err(if write { Fault::Access } else { Fault::TooLong });
        }
        if last && write && end != slice.len {
            return Err(Fault::Access);
        }
        let takes_request = last && (!write || operation.has_immediate());
        if takes_request && self.queue.is_empty() {
            return Err(Fault::NotReady);
        }
        if len > 0 {
            let place = Slice { offset: slice.offset + filled, len, ..slice };
            regions.bytes_mut(place).ok_or(Fault::Access)?.copy_from_slice(payload);
        }
        if !last {
            self.partial = Some(Partial { write, slice, filled: end });
            return Ok(None);
        }
        self.partial = None;
        self.messages = self.messages.wrapping_add(1) & 0xff_ffff;
        if !takes_request {
            return Ok(None);
        }
        let kind = if write { CompletionKind::ReceiveWrite } else { CompletionKind::Receive };
        Ok(self.queue.pop_front().map(|request| Received { request, kind, len: end }))
    }

    /// The destination of a message that starts.
    fn open(&self, regions: &Regions, domain: Domain, header: &Header) -> Result<Partial, Fault> {
        match header.reth {
            // No memory is accessed, so no key is required (IBTA 9.4.3).
            Some(reth) if reth.length == 0 => {
                Ok(Partial { write: true, slice: Slice { key: Key(0), offset: 0, len: 0 }, filled: 0 })
            }
            Some(reth) => {
                let slice = regions.remote(domain, reth.key, reth.address, reth.length).ok_or(Fault::Access)?;
                Ok(Partial { write: true, slice, filled: 0 })
            }
            None => {
                let request = self.queue.front().ok_or(Fault::NotReady)?;
                Ok(Partial { write: false, slice: request.slice, filled: 0 })
            }
        }
    }
}
