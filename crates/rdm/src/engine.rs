//! The engine: connections and their timers.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::IpAddr;

use bifrost_wire::rdm::{Class, Close, CloseReason, Control, Immediate, Number, SendHeader, Service, Tag};

use crate::chunking::Chunking;
use crate::clock::Clock;
use crate::config::{Config, ConnectionConfig};
use crate::congestion::Congestion;
use crate::connection::{Connection, Context, LaneFailure, Peer};
use crate::counters::Counters;
use crate::inbound::Inbound;
use crate::incoming::{Granting, Verdict};
use crate::output::{BufferId, ConnectionId, Event, Memory, Output, Work};
use crate::{MessageId, NEVER};

/// Messages that an application may have open on a connection: accepted, but not yet reported as sent.
const OPEN_MAX: usize = 1024;

/// Why a message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// No such connection, or it is closed.
    #[error("connection is closed")]
    Closed,
    /// 1024 messages are open; wait for [`Event::Sent`].
    #[error("1024 messages are open on the connection")]
    Full,
    /// Longer than the peer accepts.
    #[error("message is longer than the peer accepts")]
    TooLong,
}

/// Why a connection cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// All connections of the engine are in use.
    #[error("all connections of the engine are in use")]
    Exhausted,
    /// The identifier was not reserved, or is already in use.
    #[error("connection was not reserved")]
    NotReserved,
}

/// A completion of a receive request.
#[derive(Clone, Copy, Debug)]
pub enum Arrival<'a> {
    /// A SEND: its first bytes, at least [`SendHeader::LEN`] if it is that long, and its length.
    Send {
        /// The first bytes.
        head: &'a [u8],
        /// Length, including the header, bytes.
        len: u32,
    },
    /// A WRITE with immediate data.
    Write {
        /// The immediate data.
        immediate: u32,
        /// Length, bytes.
        len: u32,
    },
}

/// Destination of a SEND's payload. The caller copies it before it processes the output's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The buffer.
    pub buffer: BufferId,
    /// Offset in the buffer, bytes.
    pub offset: u32,
    /// Bytes to copy, those after the header.
    pub len: u32,
}

#[derive(Debug)]
enum Slot {
    Free { tag: u16 },
    Reserved { tag: u16 },
    Open(Box<Connection>),
}

/// All connections of one thread.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    slots: Vec<Slot>,
    free: Vec<u16>,
    ready: VecDeque<ConnectionId>,
    /// A heap, not the wheel of `bifrost_transport::timer`, whose lists allocate long after the start.
    timers: BinaryHeap<Reverse<(u64, u32)>>,
    clock: Clock,
    inbound: Inbound,
    counters: Counters,
    random: fastrand::Rng,
}

impl Engine {
    /// Creates an engine without connections.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            slots: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            timers: BinaryHeap::new(),
            clock: Clock::default(),
            inbound: Inbound::new(config.inbound),
            counters: Counters::default(),
            random: fastrand::Rng::with_seed(config.seed),
        }
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The alignment of the NIC's clock.
    pub fn clock_mut(&mut self) -> &mut Clock {
        &mut self.clock
    }

    /// Reserves a connection: returns its identifier, and the tag that the peer must use.
    ///
    /// # Errors
    /// [`OpenError::Exhausted`].
    pub fn reserve(&mut self) -> Result<(ConnectionId, Tag), OpenError> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < self.config.connections.min(1 << 16) as usize => {
                self.slots.push(Slot::Free { tag: self.random.u16(..) });
                (self.slots.len() - 1) as u16
            }
            None => return Err(OpenError::Exhausted),
        };
        let slot = &mut self.slots[usize::from(index)];
        let Slot::Free { tag } = *slot else { return Err(OpenError::NotReserved) };
        // Differs from the last tag, and cannot be predicted from it.
        let tag = tag.wrapping_add(self.random.u16(1..));
        *slot = Slot::Reserved { tag };
        let id = u32::from(tag) << 16 | u32::from(index);
        Ok((ConnectionId(id), Tag(id)))
    }

    /// Opens a reserved connection to the peer at `address` whose control queue pair is `control` and whose tag is
    /// `tag`.
    ///
    /// # Errors
    /// [`OpenError::NotReserved`].
    #[allow(clippy::too_many_arguments)]
    pub fn open(
        &mut self,
        now_ns: u64,
        id: ConnectionId,
        (address, control): (IpAddr, u32),
        tag: Tag,
        config: ConnectionConfig,
        chunking: Box<dyn Chunking>,
        congestion: Box<dyn Congestion>,
    ) -> Result<(), OpenError> {
        let slot = self.slots.get_mut(id.index()).ok_or(OpenError::NotReserved)?;
        match slot {
            Slot::Reserved { tag } if u32::from(*tag) == id.0 >> 16 => {}
            _ => return Err(OpenError::NotReserved),
        }
        let peer = Peer { address, control, tag };
        *slot = Slot::Open(Box::new(Connection::new(id, peer, config, chunking, congestion, now_ns)));
        Ok(())
    }

    /// Closes a reserved or open connection and informs the peer; [`Event::Closed`] is not issued. Buffers of incoming
    /// messages that were not delivered are added to `buffers`; the caller knows those of outgoing messages.
    pub fn close(
        &mut self,
        id: ConnectionId,
        reason: CloseReason,
        out: &mut Output,
        mut buffers: impl FnMut(BufferId),
    ) {
        let Some(slot) = self.slots.get_mut(id.index()) else { return };
        let tag = (id.0 >> 16) as u16;
        match slot {
            Slot::Open(connection) if connection.id == id => {
                let control = Control::Close(Close { tag: connection.peer.tag, reason });
                out.work.push(Work::Control { connection: id, control });
                connection.inbox.release_all(&mut self.inbound);
                connection.inbox.drain().for_each(&mut buffers);
            }
            Slot::Reserved { tag: reserved } if *reserved == tag => {}
            _ => return,
        }
        *slot = Slot::Free { tag };
        self.free.push(id.index() as u16);
    }

    /// The connection that a token identifies.
    #[must_use]
    pub fn connection_of(token: u64) -> ConnectionId {
        ConnectionId((token >> 32) as u32)
    }

    /// Accepts a message. The engine owns the buffer until [`Event::Sent`].
    ///
    /// # Errors
    /// A [`SendError`]; the caller keeps the buffer.
    pub fn send(
        &mut self,
        now_ns: u64,
        id: ConnectionId,
        buffer: BufferId,
        len: u32,
        class: Class,
        call: u32,
    ) -> Result<MessageId, SendError> {
        let connection = self.find(id).ok_or(SendError::Closed)?;
        if connection.open_messages() >= OPEN_MAX {
            return Err(SendError::Full);
        }
        if len > bifrost_wire::rdm::MAX_MESSAGE || !connection.takes(len) {
            return Err(SendError::TooLong);
        }
        let message = connection.push(now_ns, buffer, len, class, call);
        self.counters.sent_messages += 1;
        self.wake(id);
        Ok(message)
    }

    /// Sends on lanes of `service`, UC or RC, from now on, including the rest of messages already begun. Nothing is
    /// lost, duplicated or reordered. Returns whether the connection has such lanes: one of [`Service::Both`] has both,
    /// and begins with UC.
    pub fn switch(&mut self, now_ns: u64, id: ConnectionId, service: Service, out: &mut Output) -> bool {
        let (Some(connection), mut context) = self.with(id, now_ns, out) else { return false };
        let switched = connection.switch(&mut context, service);
        self.wake(id);
        switched
    }

    /// The service in use: UC or RC.
    #[must_use]
    pub fn service_in_use(&self, id: ConnectionId) -> Option<Service> {
        match self.slots.get(id.index())? {
            Slot::Open(connection) if connection.id == id => Some(connection.in_use()),
            _ => None,
        }
    }

    /// The application has consumed a delivered message of `len` bytes.
    pub fn consumed(&mut self, now_ns: u64, id: ConnectionId, len: u32, memory: &mut impl Memory, out: &mut Output) {
        let nic_now_ns = self.clock.nic_ns(now_ns);
        let (Some(connection), mut context) = self.with(id, now_ns, out) else { return };
        connection.inbox.consumed(len);
        if connection.inbox.raise_limit() {
            connection.send_ack(&mut context, nic_now_ns);
        }
        self.grant(now_ns, id, memory, out);
    }

    /// Handles the completion of a receive on a lane, at `arrived_ns` of the NIC's clock. Returns the destination of a
    /// SEND's payload.
    pub fn on_arrival(
        &mut self,
        now_ns: u64,
        id: ConnectionId,
        arrival: Arrival<'_>,
        arrived_ns: u64,
        memory: &mut impl Memory,
        out: &mut Output,
    ) -> Option<Place> {
        let nic_now_ns = self.clock.nic_ns(now_ns);
        let (Some(connection), mut context) = self.with(id, now_ns, out) else { return None };
        connection.heard(now_ns);
        let mut came_after_ns = None;
        let (number, len, offset, verdict) = match arrival {
            Arrival::Send { head, len } => {
                let Ok(header) = SendHeader::parse(head, len as usize) else {
                    context.counters.refused += 1;
                    return None;
                };
                let verdict = connection.inbox.on_send(&header, memory, context.out);
                (Number::Send(header.global), len - SendHeader::LEN as u32, header.offset, verdict)
            }
            Arrival::Write { immediate, len } => {
                let immediate = Immediate::from_bits(immediate);
                let message = immediate.message(connection.inbox.base);
                let offset = immediate.offset();
                let verdict = connection.inbox.on_write(message, offset, len, immediate.hint, context.out);
                if std::mem::take(&mut connection.awaits_data) {
                    came_after_ns = Some(now_ns.saturating_sub(connection.granted_ns));
                }
                (Number::Write(immediate.name()), len, offset, verdict)
            }
        };
        let (urgent, place) = match verdict {
            Verdict::Taken { urgent } => (urgent, None),
            Verdict::Place { buffer, urgent } => (urgent, Some(Place { buffer, offset, len })),
            Verdict::Repeated => {
                context.counters.repeated_units += 1;
                (true, None)
            }
            Verdict::NoRoom => {
                context.counters.no_room += 1;
                return None;
            }
            Verdict::Refused => {
                context.counters.refused += 1;
                return None;
            }
        };
        connection.note(&mut context, number, len, arrived_ns, nic_now_ns, urgent);
        let (messages, bytes) = (&mut connection.inbox.delivered_messages, &mut connection.inbox.delivered_bytes);
        context.counters.delivered_messages += std::mem::take(messages);
        context.counters.delivered_bytes += std::mem::take(bytes);
        let released = connection.inbox.take_released();
        self.inbound.release(released);
        if let Some(after_ns) = came_after_ns {
            self.inbound.record_first_data(after_ns);
        }
        self.wake(id);
        // Grants announced messages that could not be granted before.
        self.grant(now_ns, id, memory, out);
        place
    }

    /// Handles the completion of a send request, at `left_ns` of the NIC's clock.
    pub fn on_sent(&mut self, now_ns: u64, token: u64, success: bool, left_ns: u64, out: &mut Output) {
        let id = Self::connection_of(token);
        let (Some(connection), mut context) = self.with(id, now_ns, out) else { return };
        connection.on_sent(&mut context, token as u32, success, left_ns);
        self.wake(id);
    }

    /// Handles a lane in error, as shown by a flushed receive request.
    pub fn on_lane_error(&mut self, now_ns: u64, id: ConnectionId, lane: u8, out: &mut Output) {
        let (Some(connection), mut context) = self.with(id, now_ns, out) else { return };
        connection.fail_lane(&mut context, lane, LaneFailure::Error);
        self.wake(id);
    }

    /// Handles a control datagram from queue pair `from`, received at `arrived_ns` of the NIC's clock.
    pub fn on_control(&mut self, now_ns: u64, from: (IpAddr, u32), bytes: &[u8], arrived_ns: u64, out: &mut Output) {
        let Ok(control) = Control::parse(bytes) else {
            self.counters.refused += 1;
            return;
        };
        let tag = match &control {
            Control::Ack(ack) => ack.tag,
            Control::Grant(grant) => grant.tag,
            Control::Probe(tag) => *tag,
            Control::Close(close) => close.tag,
            Control::Lane(lane) => lane.tag,
        };
        let id = ConnectionId(tag.0);
        let nic_now_ns = self.clock.nic_ns(now_ns);
        let (Some(connection), mut context) = self.with(id, now_ns, out) else {
            self.counters.refused += 1;
            return;
        };
        if (connection.peer.address, connection.peer.control) != from {
            context.counters.refused += 1;
            return;
        }
        match &control {
            Control::Ack(ack) => connection.on_ack(&mut context, ack, arrived_ns),
            Control::Grant(grant) => connection.on_grant(&mut context, grant),
            Control::Probe(_) => connection.on_probe(&mut context, nic_now_ns),
            Control::Lane(lane) => connection.on_lane(&mut context, lane),
            Control::Close(close) => {
                context.out.events.push(Event::Closed { connection: id, reason: close.reason, by_peer: true });
            }
        }
        self.wake(id);
    }

    /// Runs due timers and posts what may be posted.
    pub fn turn(&mut self, now_ns: u64, memory: &mut impl Memory, out: &mut Output) {
        if self.inbound.is_due(now_ns) {
            self.settle_charges(now_ns, out);
            self.grant_waiting(now_ns, memory, out);
        }
        while let Some(&Reverse((due, id))) = self.timers.peek() {
            if due > now_ns {
                break;
            }
            self.timers.pop();
            let id = ConnectionId(id);
            let Some(connection) = self.find(id) else { continue };
            if connection.is_armed_for(due) {
                self.wake(id);
            }
        }
        for _ in 0..self.ready.len() {
            let Some(id) = self.ready.pop_front() else { break };
            self.turn_of(now_ns, id, out);
        }
    }

    fn turn_of(&mut self, now_ns: u64, id: ConnectionId, out: &mut Output) {
        let nic_now_ns = self.clock.nic_ns(now_ns);
        let (Some(connection), mut context) = self.with(id, now_ns, out) else { return };
        connection.ready = false;
        if connection.deadline().min(connection.silence_ns()) <= now_ns
            && let Some(reason) = connection.advance(&mut context, nic_now_ns)
        {
            context.out.events.push(Event::Closed { connection: id, reason, by_peer: false });
            return;
        }
        connection.emit(&mut context);
        for due in connection.arm().into_iter().flatten() {
            self.timers.push(Reverse((due, id.0)));
        }
    }

    /// When [`Engine::turn`] is due, ns; [`NEVER`]: after the next event.
    #[must_use]
    pub fn next_deadline(&self) -> u64 {
        if !self.ready.is_empty() {
            return 0;
        }
        self.timers.peek().map_or(NEVER, |Reverse((due, _))| *due).min(self.inbound.deadline())
    }

    /// Measurements of a connection: smoothed and smallest round trip, ns; window, bytes; share of packets lost; lane.
    #[must_use]
    pub fn measured(&self, id: ConnectionId) -> Option<(u64, u64, u32, f32, u8)> {
        match self.slots.get(id.index())? {
            Slot::Open(c) if c.id == id => {
                let rtt = c.rtt();
                Some((rtt.smoothed_ns().unwrap_or(0), rtt.base_ns(), c.window(), c.loss_rate(), c.primary()))
            }
            _ => None,
        }
    }

    /// Whether the connection has the maximum number of open messages.
    #[must_use]
    pub fn is_full(&self, id: ConnectionId) -> bool {
        self.open_messages(id) >= OPEN_MAX
    }

    /// Open messages of a connection.
    #[must_use]
    pub fn open_messages(&self, id: ConnectionId) -> usize {
        match self.slots.get(id.index()) {
            Some(Slot::Open(connection)) if connection.id == id => connection.open_messages(),
            _ => 0,
        }
    }

    /// Work requests of a connection that are neither acknowledged nor considered lost: at most the peer's credits.
    #[must_use]
    pub fn open_requests(&self, id: ConnectionId) -> u32 {
        match self.slots.get(id.index()) {
            Some(Slot::Open(connection)) if connection.id == id => connection.flights.open(),
            _ => 0,
        }
    }

    /// Memory of a connection, bytes, excluding its messages.
    #[must_use]
    pub fn connection_bytes(&self, id: ConnectionId) -> usize {
        match self.slots.get(id.index()) {
            Some(Slot::Open(connection)) if connection.id == id => connection.bytes(),
            _ => 0,
        }
    }

    /// Queues a connection with announced messages for the budget.
    fn grant(&mut self, now_ns: u64, id: ConnectionId, memory: &mut impl Memory, out: &mut Output) {
        if let Some(connection) = self.find(id)
            && connection.inbox.wants_grant()
            && !std::mem::replace(&mut connection.waits_for_budget, true)
        {
            self.inbound.waiting.push_back(id);
        }
        if !self.inbound.waiting.is_empty() {
            self.grant_waiting(now_ns, memory, out);
        }
    }

    /// Grants one message of each waiting connection in turn, while the budget lasts.
    fn grant_waiting(&mut self, now: u64, memory: &mut impl Memory, out: &mut Output) {
        while let Some(&id) = self.inbound.waiting.front() {
            let Some(Slot::Open(connection)) = self.slots.get_mut(id.index()) else {
                self.inbound.waiting.pop_front();
                continue;
            };
            if connection.id != id {
                self.inbound.waiting.pop_front();
                continue;
            }
            let mut context = Context { now, out, counters: &mut self.counters, random: &mut self.random };
            let granting = connection.grant(&mut context, &mut self.inbound, memory);
            if granting == Granting::Full {
                break;
            }
            self.inbound.waiting.pop_front();
            if granting == Granting::Granted && connection.inbox.wants_grant() {
                self.inbound.waiting.push_back(id);
            } else {
                connection.waits_for_budget = false;
            }
            if connection.inbox.charged > 0 && !std::mem::replace(&mut connection.is_charged, true) {
                self.inbound.charging.push_back(id);
            }
        }
    }

    /// Reduces the charge of slow senders to what they send. The list is at most as long as the budget has units.
    fn settle_charges(&mut self, now: u64, out: &mut Output) {
        for _ in 0..self.inbound.charging.len() {
            let Some(id) = self.inbound.charging.pop_front() else { break };
            let Some(Slot::Open(connection)) = self.slots.get_mut(id.index()) else { continue };
            if connection.id != id {
                continue;
            }
            // Data of a recent grant has not had time to arrive.
            if now.saturating_sub(connection.granted_ns) >= self.inbound.patience_ns() {
                connection.inbox.settle(&mut self.inbound);
                if std::mem::take(&mut connection.awaits_data) {
                    let mut context = Context { now, out, counters: &mut self.counters, random: &mut self.random };
                    connection.repeat_grants(&mut context);
                }
            }
            if connection.inbox.charged > 0 {
                self.inbound.charging.push_back(id);
            } else {
                connection.is_charged = false;
            }
        }
    }

    fn find(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        match self.slots.get_mut(id.index())? {
            Slot::Open(connection) if connection.id == id => Some(connection),
            _ => None,
        }
    }

    /// A connection, and the context for its calls.
    fn with<'a>(
        &'a mut self,
        id: ConnectionId,
        now: u64,
        out: &'a mut Output,
    ) -> (Option<&'a mut Connection>, Context<'a>) {
        let connection = match self.slots.get_mut(id.index()) {
            Some(Slot::Open(connection)) if connection.id == id => Some(&mut **connection),
            _ => None,
        };
        (connection, Context { now, out, counters: &mut self.counters, random: &mut self.random })
    }

    fn wake(&mut self, id: ConnectionId) {
        if let Some(connection) = self.find(id)
            && !std::mem::replace(&mut connection.ready, true)
        {
            self.ready.push_back(id);
        }
    }
}
