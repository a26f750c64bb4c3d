//! Outgoing messages.

use std::collections::VecDeque;

use bifrost_wire::rdm::{Class, MAX_EAGER, MessageId, UNIT};

use crate::output::BufferId;
use crate::units::Units;

/// Progress of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Short: sent immediately.
    Short,
    /// Long: must be announced.
    Long,
    /// Announced: waits for a grant.
    Announced,
    /// May be written to this memory.
    Granted { address: u64, key: u32 },
}

#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) buffer: BufferId,
    pub(crate) len: u32,
    pub(crate) class: Class,
    pub(crate) call: u32,
    pub(crate) stage: Stage,
    /// Bytes that have been posted at least once.
    pub(crate) next: u32,
    pub(crate) arrived: Units,
    /// Work requests for which the NIC may still read the buffer.
    pub(crate) in_nic: u32,
    /// The application has been notified.
    pub(crate) reported: bool,
}

impl Outgoing {
    pub(crate) fn is_granted(&self) -> bool {
        matches!(self.stage, Stage::Granted { .. })
    }
}

/// Data to retransmit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Repair {
    pub(crate) message: MessageId,
    pub(crate) offset: u32,
    pub(crate) len: u32,
    /// The lane that lost it, if that lane has delivered later requests.
    pub(crate) lane: Option<u8>,
}

/// The open messages, and what must be posted next.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    messages: VecDeque<Outgoing>,
    pub(crate) first: MessageId,
    /// The first message that the peer's limit does not admit.
    admitted: MessageId,
    /// Messages with a short unit or an announcement to post.
    pub(crate) short: VecDeque<MessageId>,
    /// Granted messages with chunks to post.
    pub(crate) long: VecDeque<MessageId>,
    /// Data to retransmit.
    pub(crate) repairs: VecDeque<Repair>,
    /// Announced messages without a grant.
    pub(crate) ungranted: u32,
}

impl Outbox {
    pub(crate) fn len(&self) -> usize {
        self.messages.len()
    }

    pub(crate) fn push(&mut self, buffer: BufferId, len: u32, class: Class, call: u32) -> MessageId {
        let message = self.first.plus(self.messages.len() as u32);
        let stage = if len <= MAX_EAGER { Stage::Short } else { Stage::Long };
        self.messages.push_back(Outgoing {
            buffer,
            len,
            class,
            call,
            stage,
            next: 0,
            arrived: Units::new(len),
            in_nic: 0,
            reported: false,
        });
        message
    }

    pub(crate) fn get_mut(&mut self, message: MessageId) -> Option<&mut Outgoing> {
        self.messages.get_mut(usize::try_from(message.distance(self.first)).ok()?)
    }

    /// Admits messages before `limit`.
    pub(crate) fn admit(&mut self, limit: MessageId) {
        let end = self.first.plus(self.messages.len() as u32);
        while limit.distance(self.admitted) > 0 && end.distance(self.admitted) > 0 {
            self.short.push_back(self.admitted);
            self.admitted = self.admitted.plus(1);
        }
    }

    /// Whether messages wait for the peer's limit.
    pub(crate) fn is_limited(&self) -> bool {
        self.admitted != self.first.plus(self.messages.len() as u32)
    }

    /// Takes the next unit to retransmit, skipping those that have arrived.
    pub(crate) fn next_repair(&mut self) -> Option<Repair> {
        while let Some(repair) = self.repairs.pop_front() {
            let Repair { message, offset, len, .. } = repair;
            if len > UNIT {
                self.repairs.push_front(Repair { offset: offset + UNIT, len: len - UNIT, ..repair });
            }
            if self.get_mut(message).is_some_and(|outgoing| !outgoing.arrived.contains(offset / UNIT)) {
                return Some(Repair { len: len.min(UNIT), ..repair });
            }
        }
        None
    }

    /// Marks bytes as arrived. Returns whether this completes the message.
    pub(crate) fn arrived(&mut self, message: MessageId, offset: u32, len: u32) -> bool {
        self.get_mut(message)
            .is_some_and(|outgoing| outgoing.arrived.insert_range(offset, len) > 0 && outgoing.arrived.is_full())
    }

    /// Removes reported messages from the front.
    pub(crate) fn trim(&mut self) {
        while self.messages.front().is_some_and(|outgoing| outgoing.reported) {
            self.messages.pop_front();
            self.first = self.first.plus(1);
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.messages.capacity() * size_of::<Outgoing>()
            + (self.short.capacity() + self.long.capacity()) * size_of::<MessageId>()
            + self.repairs.capacity() * size_of::<Repair>()
    }
}
