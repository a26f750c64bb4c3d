//! Incoming messages.

use std::collections::VecDeque;

use bifrost_wire::rdm::{Class, Grant, MAX_EAGER, MessageId, SendHeader, SendKind, Tag};

use crate::config::{ConnectionConfig, Order};
use crate::inbound::Inbound;
use crate::mutation::mutated;
use crate::output::{BufferId, ConnectionId, Event, Memory, Output};
use crate::units::Units;

/// A message that was announced or has begun to arrive.
#[derive(Debug)]
struct Incoming {
    len: u32,
    class: Class,
    call: u32,
    long: bool,
    /// Its memory; none while it waits for a grant, and none after delivery out of order.
    target: Option<Target>,
    units: Units,
    /// Offset of the next chunk, if nothing is missing.
    next: u32,
    /// Its charge to the host's budget, bytes.
    charge: u32,
    delivered: bool,
}

impl Incoming {
    /// Reduces the charge to the missing bytes. Returns the difference.
    fn release(&mut self) -> u64 {
        let missing = self.charge.min(self.units.missing_bytes());
        u64::from(std::mem::replace(&mut self.charge, missing) - missing)
    }
}

/// Result of an attempt to grant a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Granting {
    /// A message was granted.
    Granted,
    /// No message waits, or the connection's own budget is exhausted, or there is no memory.
    None,
    /// The host's budget is exhausted.
    Full,
}

#[derive(Clone, Copy, Debug)]
struct Target {
    buffer: BufferId,
    address: u64,
    key: u32,
}

/// What to do with an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Acknowledge; immediately if `urgent`.
    Taken { urgent: bool },
    /// Acknowledge, and copy the payload to this buffer.
    Place { buffer: BufferId, urgent: bool },
    /// Already received: acknowledge immediately.
    Repeated,
    /// Drop without an acknowledgement.
    NoRoom,
    /// A protocol violation.
    Refused,
}

/// The messages of a connection that are not yet delivered, in order.
#[derive(Debug)]
pub(crate) struct Inbox {
    connection: ConnectionId,
    config: ConnectionConfig,
    list: VecDeque<Option<Incoming>>,
    /// All messages before this one have arrived.
    pub(crate) base: MessageId,
    /// The sender may begin messages before this one.
    pub(crate) limit: MessageId,
    /// Messages delivered but not consumed.
    unread: u32,
    /// Bytes of long messages that are granted or delivered, but not consumed.
    reserved: u64,
    /// Announced messages that wait for a grant, in order.
    ungranted: VecDeque<MessageId>,
    /// The message expected next, to detect gaps.
    pub(crate) expected: MessageId,
    /// Charge of its messages to the host's budget, bytes, and how much of it was released since the last call.
    pub(crate) charged: u64,
    released: u64,
    /// Bytes of long messages that arrived since the last adjustment.
    arrived_bytes: u64,
    pub(crate) delivered_messages: u64,
    pub(crate) delivered_bytes: u64,
}

impl Inbox {
    pub(crate) fn new(connection: ConnectionId, config: ConnectionConfig) -> Self {
        Self {
            connection,
            config,
            list: VecDeque::new(),
            base: MessageId(0),
            limit: MessageId(u32::from(config.window)),
            unread: 0,
            reserved: 0,
            ungranted: VecDeque::new(),
            expected: MessageId(0),
            charged: 0,
            released: 0,
            arrived_bytes: 0,
            delivered_messages: 0,
            delivered_bytes: 0,
        }
    }

    /// Handles a SEND with a valid header.
    pub(crate) fn on_send(&mut self, header: &SendHeader, memory: &mut impl Memory, out: &mut Output) -> Verdict {
        let ahead = header.message.distance(self.base);
        if ahead < 0 {
            return Verdict::Repeated;
        }
        if header.message.distance(self.limit) >= 0 {
            return Verdict::NoRoom;
        }
        let ahead = ahead as usize;
        if self.list.len() <= ahead {
            self.list.resize_with(ahead + 1, || None);
        }
        let long = header.kind != SendKind::Eager;
        let gap = header.message.distance(self.expected) > 0;
        if gap || header.message == self.expected {
            self.expected = header.message.plus(1);
        }
        let Some(incoming) = &mut self.list[ahead] else {
            return self.open(header, gap, memory, out);
        };
        if incoming.len != header.length || incoming.long != long || incoming.class != header.class {
            return Verdict::Refused;
        }
        if header.kind == SendKind::Announce {
            return Verdict::Repeated;
        }
        let Some(target) = incoming.target else {
            return if incoming.delivered { Verdict::Repeated } else { Verdict::Refused };
        };
        if !incoming.units.insert(header.offset / bifrost_wire::rdm::UNIT) {
            return Verdict::Repeated;
        }
        let urgent = header.hint || header.offset != incoming.next && !long;
        incoming.next = header.offset + header.payload_len();
        self.released += incoming.release();
        let full = is_whole(&self.config, incoming);
        if full {
            self.complete(ahead, out);
        }
        Verdict::Place { buffer: target.buffer, urgent: urgent || full && long }
    }

    fn open(&mut self, header: &SendHeader, gap: bool, memory: &mut impl Memory, out: &mut Output) -> Verdict {
        let ahead = header.message.distance(self.base) as usize;
        let urgent = header.hint || gap || header.offset != 0;
        let mut incoming = Incoming {
            len: header.length,
            class: header.class,
            call: header.call,
            long: header.kind == SendKind::Announce,
            target: None,
            units: Units::new(header.length),
            next: header.offset + header.payload_len(),
            charge: 0,
            delivered: false,
        };
        match header.kind {
            SendKind::Repair => Verdict::Refused,
            SendKind::Announce if header.length > self.config.longest => Verdict::Refused,
            SendKind::Announce => {
                incoming.next = 0;
                self.list[ahead] = Some(incoming);
                // Sorted by number: otherwise a message that is announced late would be granted last, and those before
                // it could use up the budget and wait for it.
                let before = self.ungranted.iter().rposition(|other| header.message.distance(*other) > 0);
                self.ungranted.insert(before.map_or(0, |at| at + 1), header.message);
                Verdict::Taken { urgent }
            }
            SendKind::Eager => {
                let Some((buffer, address, key)) = memory.allocate(self.connection, header.length, false) else {
                    return Verdict::NoRoom;
                };
                incoming.target = Some(Target { buffer, address, key });
                incoming.units.insert(header.offset / bifrost_wire::rdm::UNIT);
                let full = is_whole(&self.config, &incoming);
                self.list[ahead] = Some(incoming);
                if full {
                    self.complete(ahead, out);
                }
                Verdict::Place { buffer, urgent }
            }
        }
    }

    /// Handles a chunk of `len` bytes at `offset`.
    pub(crate) fn on_write(
        &mut self,
        message: MessageId,
        offset: u32,
        len: u32,
        hint: bool,
        out: &mut Output,
    ) -> Verdict {
        let ahead = message.distance(self.base);
        if ahead < 0 {
            return Verdict::Repeated;
        }
        let Some(Some(incoming)) = self.list.get_mut(ahead as usize) else { return Verdict::Refused };
        if incoming.delivered {
            return Verdict::Repeated;
        }
        let end = u64::from(offset) + u64::from(len);
        let whole = len.is_multiple_of(bifrost_wire::rdm::UNIT) || end == u64::from(incoming.len);
        if !incoming.long || incoming.target.is_none() || len == 0 || end > u64::from(incoming.len) || !whole {
            return Verdict::Refused;
        }
        let gap = offset != incoming.next;
        incoming.next = end as u32;
        self.arrived_bytes += u64::from(len);
        let counts = if mutated!(self.config, ChunkCountsMore) { len + bifrost_wire::rdm::UNIT } else { len };
        if incoming.units.insert_range(offset, counts) == 0 {
            return Verdict::Repeated;
        }
        self.released += incoming.release();
        let full = is_whole(&self.config, incoming);
        if full {
            self.complete(ahead as usize, out);
        }
        Verdict::Taken { urgent: hint || gap || full }
    }

    /// Whether an announced message waits for a grant.
    pub(crate) fn wants_grant(&self) -> bool {
        !self.ungranted.is_empty()
    }

    /// Grants the next message, if both budgets allow it.
    pub(crate) fn grant(
        &mut self,
        tag: Tag,
        inbound: &mut Inbound,
        memory: &mut impl Memory,
        send: impl FnOnce(Grant),
    ) -> Granting {
        while let Some(&message) = self.ungranted.front() {
            let ahead = message.distance(self.base);
            let Some(Some(incoming)) = usize::try_from(ahead).ok().and_then(|at| self.list.get_mut(at)) else {
                self.ungranted.pop_front();
                continue;
            };
            let len = u64::from(incoming.len);
            // With ordered delivery, nothing can be delivered before the first message; and one message is always
            // accepted.
            let first = ahead == 0 && self.config.order == Order::Sent;
            if self.reserved > 0 && !first && self.reserved + len > self.config.budget {
                return Granting::None;
            }
            if !inbound.has_room(incoming.len) {
                return Granting::Full;
            }
            let Some((buffer, address, key)) = memory.allocate(self.connection, incoming.len, true) else {
                return Granting::None;
            };
            incoming.target = Some(Target { buffer, address, key });
            incoming.charge = Inbound::charge_of(incoming.len);
            self.charged += u64::from(incoming.charge);
            inbound.charge(u64::from(incoming.charge));
            self.reserved += counted(incoming.len);
            send(Grant { tag, message, address, key, length: incoming.len });
            self.ungranted.pop_front();
            return Granting::Granted;
        }
        Granting::None
    }

    /// Returns the charge released by arrivals, bytes.
    pub(crate) fn take_released(&mut self) -> u64 {
        let released = std::mem::take(&mut self.released).min(self.charged);
        self.charged -= released;
        released
    }

    /// Reduces the charge to at most twice the bytes that arrived since the last call.
    pub(crate) fn settle(&mut self, inbound: &mut Inbound) {
        let at_most = 2 * std::mem::take(&mut self.arrived_bytes);
        let less = self.charged.saturating_sub(at_most);
        self.charged -= less;
        inbound.release(less);
    }

    /// Releases the connection's whole charge.
    pub(crate) fn release_all(&mut self, inbound: &mut Inbound) {
        for incoming in self.list.iter_mut().flatten() {
            incoming.charge = 0;
        }
        self.released = 0;
        inbound.release(std::mem::take(&mut self.charged));
    }

    /// Grants of messages without any data, at most `max`: the grants may be lost.
    pub(crate) fn unused_grants(&self, tag: Tag, max: usize) -> impl Iterator<Item = Grant> {
        let grant = move |(at, incoming): (usize, &Option<Incoming>)| {
            let incoming = incoming.as_ref().filter(|incoming| incoming.long && incoming.next == 0)?;
            let target = incoming.target.filter(|_| !incoming.delivered)?;
            let message = self.base.plus(at as u32);
            Some(Grant { tag, message, address: target.address, key: target.key, length: incoming.len })
        };
        self.list.iter().enumerate().filter_map(grant).take(max)
    }

    /// The application has consumed a delivered message.
    pub(crate) fn consumed(&mut self, len: u32) {
        if !mutated!(self.config, ConsumedForgotten) {
            self.unread = self.unread.saturating_sub(1);
        }
        if !mutated!(self.config, BudgetLeaks) {
            self.reserved = self.reserved.saturating_sub(counted(len));
        }
    }

    /// Raises the limit as far as the window allows. Returns whether the sender should be informed now.
    pub(crate) fn raise_limit(&mut self) -> bool {
        let room = u32::from(self.config.window).saturating_sub(self.unread);
        let limit = self.base.plus(room);
        if limit.distance(self.limit) <= 0 || mutated!(self.config, LimitNotRaised) {
            return false;
        }
        let near = self.limit.distance(self.base) <= i32::from(self.config.window) / 4;
        self.limit = limit;
        near
    }

    /// Buffers of messages that were not delivered.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = BufferId> {
        self.list.drain(..).flatten().filter(|incoming| !incoming.delivered).filter_map(|i| Some(i.target?.buffer))
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.list.capacity() * size_of::<Option<Incoming>>() + self.ungranted.capacity() * size_of::<MessageId>()
    }

    fn complete(&mut self, at: usize, out: &mut Output) {
        if self.config.order == Order::Complete || mutated!(self.config, OrderIgnored) {
            self.deliver(at, out);
        }
        while let Some(Some(first)) = self.list.front() {
            if !is_whole(&self.config, first) {
                break;
            }
            self.deliver(0, out);
            self.list.pop_front();
            self.base = self.base.plus(1);
        }
    }

    fn deliver(&mut self, at: usize, out: &mut Output) {
        let Some(Some(incoming)) = self.list.get_mut(at) else { return };
        if std::mem::replace(&mut incoming.delivered, true) {
            return;
        }
        let Some(target) = incoming.target.take() else { return };
        self.unread += 1;
        self.delivered_messages += 1;
        self.delivered_bytes += u64::from(incoming.len);
        out.events.push(Event::Delivered {
            connection: self.connection,
            message: self.base.plus(at as u32),
            buffer: target.buffer,
            len: incoming.len,
            class: incoming.class,
            call: incoming.call,
        });
    }
}

/// Whether a message is complete.
#[cfg_attr(not(any(test, feature = "mutations")), allow(unused_variables))]
fn is_whole(config: &ConnectionConfig, incoming: &Incoming) -> bool {
    let one_is_enough = mutated!(config, DeliveredEarly);
    incoming.units.is_full() || one_is_enough && incoming.units.missing_bytes() == bifrost_wire::rdm::UNIT
}

/// Bytes charged to the connection's budget; short messages are bounded by the window.
fn counted(len: u32) -> u64 {
    if len > MAX_EAGER { u64::from(len) } else { 0 }
}
