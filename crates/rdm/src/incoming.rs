//! Messages that come in.

use std::collections::VecDeque;

use bifrost_wire::rdm::{Class, Grant, MAX_EAGER, MessageId, SendHeader, SendKind, Tag};

use crate::config::{ConnectionConfig, Order};
use crate::inbound::Inbound;
use crate::mutation::mutated;
use crate::output::{BufferId, ConnectionId, Event, Memory, Output};
use crate::units::Units;

/// A message of which something is known.
#[derive(Debug)]
struct Incoming {
    len: u32,
    class: Class,
    call: u32,
    long: bool,
    /// Where it goes; none while it waits for a grant, and none after it was delivered out of order.
    place: Option<Placed>,
    units: Units,
    /// Where the next chunk is expected, if nothing is missing.
    next: u32,
    /// What it counts of the host's budget, bytes.
    charge: u32,
    delivered: bool,
}

impl Incoming {
    /// Counts no more than what is missing; how much less that is.
    fn release(&mut self) -> u64 {
        let missing = self.charge.min(self.units.missing_bytes());
        u64::from(std::mem::replace(&mut self.charge, missing) - missing)
    }
}

/// What came of a wish to grant a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Granting {
    /// One was granted.
    Granted,
    /// None waits, or the connection's own budget is used up, or there is no memory.
    None,
    /// The host's budget is used up.
    Full,
}

#[derive(Clone, Copy, Debug)]
struct Placed {
    buffer: BufferId,
    address: u64,
    key: u32,
}

/// What to do with an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Acknowledge; `urgent`: at once.
    Taken { urgent: bool },
    /// Acknowledge, and copy the payload there.
    Place { buffer: BufferId, urgent: bool },
    /// It was there already: acknowledge at once.
    Repeated,
    /// Neither.
    NoRoom,
    /// Against the protocol.
    Refused,
}

/// The messages of a connection that are not yet the application's, in order.
#[derive(Debug)]
pub(crate) struct Inbox {
    connection: ConnectionId,
    config: ConnectionConfig,
    list: VecDeque<Option<Incoming>>,
    /// All before have arrived.
    pub(crate) base: MessageId,
    /// The sender was allowed to begin those before.
    pub(crate) limit: MessageId,
    /// Delivered and not consumed.
    unread: u32,
    /// Bytes of long messages that are granted or delivered, and not consumed.
    reserved: u64,
    /// Announced messages that wait for a grant, in order.
    ungranted: VecDeque<MessageId>,
    /// The message that is expected next, for gaps.
    pub(crate) expected: MessageId,
    /// What its messages count of the host's budget, bytes, and how much of it has been released lately.
    pub(crate) charged: u64,
    released: u64,
    /// Bytes of long messages that came in since it was last looked at.
    came: u64,
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
            came: 0,
            delivered_messages: 0,
            delivered_bytes: 0,
        }
    }

    /// A SEND whose header is sound.
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
        let Some(placed) = incoming.place else {
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
        Verdict::Place { buffer: placed.buffer, urgent: urgent || full && long }
    }

    fn open(&mut self, header: &SendHeader, gap: bool, memory: &mut impl Memory, out: &mut Output) -> Verdict {
        let ahead = header.message.distance(self.base) as usize;
        let urgent = header.hint || gap || header.offset != 0;
        let mut incoming = Incoming {
            len: header.length,
            class: header.class,
            call: header.call,
            long: header.kind == SendKind::Announce,
            place: None,
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
                // In the order of messages: were one that is announced late granted last, those before it could use the budget
                // up and wait for it.
                let before = self.ungranted.iter().rposition(|other| header.message.distance(*other) > 0);
                self.ungranted.insert(before.map_or(0, |at| at + 1), header.message);
                Verdict::Taken { urgent }
            }
            SendKind::Eager => {
                let Some((buffer, address, key)) = memory.allocate(self.connection, header.length, false) else {
                    return Verdict::NoRoom;
                };
                incoming.place = Some(Placed { buffer, address, key });
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

    /// A chunk of `len` bytes at `offset` was written.
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
        if !incoming.long || incoming.place.is_none() || len == 0 || end > u64::from(incoming.len) || !whole {
            return Verdict::Refused;
        }
        let gap = offset != incoming.next;
        incoming.next = end as u32;
        self.came += u64::from(len);
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

    /// An announced message waits.
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
            // In order, nothing else can be delivered before the first; and one at least is always taken.
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
            incoming.place = Some(Placed { buffer, address, key });
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

    /// What has arrived counts no more: how many bytes.
    pub(crate) fn take_released(&mut self) -> u64 {
        let released = std::mem::take(&mut self.released).min(self.charged);
        self.charged -= released;
        released
    }

    /// From now on the connection counts with no more than twice what came in since the last time.
    pub(crate) fn settle(&mut self, inbound: &mut Inbound) {
        let at_most = 2 * std::mem::take(&mut self.came);
        let less = self.charged.saturating_sub(at_most);
        self.charged -= less;
        inbound.release(less);
    }

    /// Nothing of the connection counts any more.
    pub(crate) fn forgive(&mut self, inbound: &mut Inbound) {
        for incoming in self.list.iter_mut().flatten() {
            incoming.charge = 0;
        }
        self.released = 0;
        inbound.release(std::mem::take(&mut self.charged));
    }

    /// Grants that nothing was written for, at most `max`: they may be lost.
    pub(crate) fn unused_grants(&self, tag: Tag, max: usize) -> impl Iterator<Item = Grant> {
        let grant = move |(at, incoming): (usize, &Option<Incoming>)| {
            let incoming = incoming.as_ref().filter(|incoming| incoming.long && incoming.next == 0)?;
            let placed = incoming.place.filter(|_| !incoming.delivered)?;
            let message = self.base.plus(at as u32);
            Some(Grant { tag, message, address: placed.address, key: placed.key, length: incoming.len })
        };
        self.list.iter().enumerate().filter_map(grant).take(max)
    }

    /// The application has done with a delivered message.
    pub(crate) fn consumed(&mut self, len: u32) {
        if !mutated!(self.config, ConsumedForgotten) {
            self.unread = self.unread.saturating_sub(1);
        }
        if !mutated!(self.config, BudgetLeaks) {
            self.reserved = self.reserved.saturating_sub(counted(len));
        }
    }

    /// Raises the limit as far as the window allows; whether the sender should be told now.
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

    /// Buffers that were not delivered.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = BufferId> {
        self.list.drain(..).flatten().filter(|incoming| !incoming.delivered).filter_map(|i| Some(i.place?.buffer))
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
        let Some(placed) = incoming.place.take() else { return };
        self.unread += 1;
        self.delivered_messages += 1;
        self.delivered_bytes += u64::from(incoming.len);
        out.events.push(Event::Delivered {
            connection: self.connection,
            message: self.base.plus(at as u32),
            buffer: placed.buffer,
            len: incoming.len,
            class: incoming.class,
            call: incoming.call,
        });
    }
}

/// Whether all of a message is there.
#[cfg_attr(not(any(test, feature = "mutations")), allow(unused_variables))]
fn is_whole(config: &ConnectionConfig, incoming: &Incoming) -> bool {
    let one_is_enough = mutated!(config, DeliveredEarly);
    incoming.units.is_full() || one_is_enough && incoming.units.missing_bytes() == bifrost_wire::rdm::UNIT
}

/// What counts against the budget: short messages are bounded by the window.
fn counted(len: u32) -> u64 {
    if len > MAX_EAGER { u64::from(len) } else { 0 }
}
