//! The message engine with an arbitrary peer: the input determines arrivals, control datagrams, completions and time.
//!
//! Invariants: a message is delivered once, and only when each of its bytes has been written to its buffer; nothing is
//! placed, sent or granted outside a buffer; a sent buffer is returned once; and the work requests of one call are
//! bounded.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

use bifrost_rdm::{
    Adaptive, Arrival, BufferId, Class, Config, ConnectionConfig, ConnectionId, Engine, Event, Memory, Order, Output,
    SendError, Service, Swift, SwiftConfig, Work,
};
use bifrost_wire::rdm::{
    Ack, Close, CloseReason, Control, Grant, Immediate, Lane, LanePhase, MAX_EAGER, MessageId, Number, Numbers,
    SendHeader, SendKind, Tag, UNIT,
};

use crate::Input;

/// The peer's control queue pair.
const CONTROL: u32 = 7;
/// Maximum length of a received or sent message, bytes.
const LONGEST: u32 = 40 * UNIT;
/// Maximum number of work requests of one call: all credits of a connection, repeated grants, and control datagrams.
const WORK_MAX: usize = 1024;

pub(crate) fn run(bytes: &[u8]) {
    let input = &mut Input::new(bytes);
    let service = match input.u8() {
        192.. => Service::Rc,
        128.. => Service::Both,
        _ => Service::Uc,
    };
    let order = if input.chance(128) { Order::Complete } else { Order::Sent };
    let mut world = World::new(service, order);
    for _ in 0..200 {
        if input.is_empty() || world.closed {
            break;
        }
        world.act(input);
        world.check();
    }
}

/// A buffer of an incoming message.
struct Incoming {
    len: u32,
    /// By unit: whether it was placed, or could have been written.
    filled: Vec<bool>,
}

#[derive(Default)]
struct Buffers {
    next: u32,
    incoming: HashMap<u32, Incoming>,
    /// Buffers with a grant, by the granted address.
    granted: HashMap<u64, u32>,
}

impl Memory for Buffers {
    fn allocate(&mut self, _: ConnectionId, len: u32, remote: bool) -> Option<(BufferId, u64, u32)> {
        assert!(len <= LONGEST.max(MAX_EAGER), "{len} bytes for one message");
        if self.incoming.len() >= 64 {
            return None;
        }
        let id = self.next;
        self.next += 1;
        self.incoming.insert(id, Incoming { len, filled: vec![false; len.div_ceil(UNIT).max(1) as usize] });
        let address = u64::from(id) << 32;
        if remote {
            self.granted.insert(address, id);
        }
        Some((BufferId(id), address, id))
    }
}

struct World {
    engine: Engine,
    id: ConnectionId,
    service: Service,
    now: u64,
    out: Output,
    buffers: Buffers,
    /// Sent messages that have not completed: length by buffer.
    sent: HashMap<u32, u32>,
    /// Tokens of work requests that have not completed.
    posted: Vec<u64>,
    /// Messages that were granted, and their buffers.
    grants: HashMap<u32, u32>,
    /// Delivered and not consumed, bytes.
    unread: Vec<u32>,
    /// Messages that were delivered: the next ones have numbers near this.
    delivered: u32,
    /// Lengths of all messages that were sent, by number.
    lengths: Vec<u32>,
    /// Length and next byte of arriving messages, by number.
    arriving: HashMap<u32, (u32, u32)>,
    closed: bool,
}

impl World {
    fn new(service: Service, order: Order) -> World {
        let mut engine = Engine::new(Config { inbound: 64 * 1024, ..Config::new(2, 1) });
        let (id, _) = engine.reserve().expect("room");
        let mut config = ConnectionConfig::new(service, 1024);
        (config.order, config.longest, config.peer_longest) = (order, LONGEST, LONGEST);
        (config.window, config.budget, config.credits) = (16, u64::from(8 * LONGEST), 32);
        let swift = Box::new(Swift::new(SwiftConfig::new(50_000)));
        let chunking = Box::new(Adaptive::default());
        engine.open(0, id, (peer(), CONTROL), Tag(1), config, chunking, swift).expect("it was reserved");
        World {
            engine,
            id,
            service,
            now: 0,
            out: Output::new(),
            buffers: Buffers::default(),
            sent: HashMap::new(),
            posted: Vec::new(),
            grants: HashMap::new(),
            unread: Vec::new(),
            delivered: 0,
            lengths: Vec::new(),
            arriving: HashMap::new(),
            closed: false,
        }
    }

    fn act(&mut self, input: &mut Input<'_>) {
        self.now += [0, 100, 10_000, 1_000_000, 200_000_000][input.below(5)];
        let now = self.now;
        match input.below(8) {
            0 => {
                let len = length(input);
                self.buffers.next += 1;
                let buffer = self.buffers.next;
                match self.engine.send(now, self.id, BufferId(buffer), len, Class::Message, 0) {
                    Ok(_) => {
                        self.sent.insert(buffer, len);
                        self.lengths.push(len);
                    }
                    Err(SendError::Full) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            1 | 2 => self.send_arrives(input),
            3 => self.write_arrives(input),
            4 | 5 => {
                let mut bytes = [0; Control::MAX_LEN];
                let len = if input.chance(240) { self.control(input).emit_into(&mut bytes) } else { bytes.len() };
                let from = (peer(), if input.chance(250) { CONTROL } else { 8 });
                if input.chance(8) {
                    bytes[input.below(len.max(1))] = input.u8();
                }
                self.engine.on_control(now, from, &bytes[..len], now, &mut self.out);
            }
            6 if !self.posted.is_empty() => {
                let token = self.posted.swap_remove(input.below(self.posted.len()));
                self.engine.on_sent(now, token, !input.chance(16), now, &mut self.out);
                if input.chance(16) {
                    self.engine.on_sent(now, token, true, now, &mut self.out);
                }
            }
            7 if !self.unread.is_empty() => {
                let len = self.unread.swap_remove(0);
                self.engine.consumed(now, self.id, len, &mut self.buffers, &mut self.out);
            }
            _ => {
                if self.service == Service::Both && input.chance(128) {
                    let other = if input.chance(128) { Service::Rc } else { Service::Uc };
                    assert!(self.engine.switch(now, self.id, other, &mut self.out));
                }
                self.engine.turn(now, &mut self.buffers, &mut self.out);
            }
        }
    }

    fn send_arrives(&mut self, input: &mut Input<'_>) {
        let message = self.near(input);
        let fresh = (length(input), 0);
        let known = self.arriving.get(&message.0).copied();
        let (length, next) = if input.chance(16) { fresh } else { known.unwrap_or(fresh) };
        let kind = match (length > MAX_EAGER, known.is_some()) {
            _ if input.chance(24) => [SendKind::Eager, SendKind::Announce, SendKind::Repair][input.below(3)],
            (false, _) => SendKind::Eager,
            (true, false) => SendKind::Announce,
            (true, true) => SendKind::Repair,
        };
        let offset = match kind {
            SendKind::Announce => 0,
            _ if input.chance(48) => input.below(1 + (length / UNIT) as usize) as u32 * UNIT,
            _ => next,
        };
        let after =
            if kind == SendKind::Announce { 0 } else { (offset + UNIT) % length.next_multiple_of(UNIT).max(UNIT) };
        self.arriving.insert(message.0, (length, after));
        let header = SendHeader {
            kind,
            class: if input.chance(8) { Class::Request } else { Class::Message },
            hint: input.chance(64),
            message,
            length,
            offset,
            global: u64::from(input.u16()),
            call: u32::from(input.u8()),
        };
        let head = header.emit();
        let payload = if kind == SendKind::Announce { 0 } else { header.payload_len() };
        let total = SendHeader::LEN as u32 + if input.chance(240) { payload } else { input.u32() >> 16 };
        let arrival = Arrival::Send { head: &head, len: total };
        let place = self.engine.on_arrival(self.now, self.id, arrival, self.now, &mut self.buffers, &mut self.out);
        let Some(place) = place else { return };
        let buffer = self.buffers.incoming.get_mut(&place.buffer.0).expect("a buffer that is being filled");
        assert!(u64::from(place.offset) + u64::from(place.len) <= u64::from(buffer.len), "placed outside a buffer");
        if place.len > 0 {
            let units = (place.offset / UNIT) as usize..=((place.offset + place.len - 1) / UNIT) as usize;
            buffer.filled[units].fill(true);
        }
    }

    /// The number of a message that could arrive now.
    fn near(&self, input: &mut Input<'_>) -> MessageId {
        let ahead = if input.chance(24) { u32::from(input.u8()) } else { [0, 0, 0, 1, 2][input.below(5)] };
        MessageId(self.delivered.wrapping_add(ahead).wrapping_sub(u32::from(input.chance(16))))
    }

    /// A WRITE: the NIC passes only addresses inside a grant; the immediate data may be anything.
    fn write_arrives(&mut self, input: &mut Input<'_>) {
        let message = self.near(input);
        let (length, next) = self.arriving.get(&message.0).copied().unwrap_or((LONGEST, 0));
        let offset = if input.chance(48) { u32::from(input.u8() & 63) * UNIT } else { next };
        let len = match input.below(4) {
            0 => input.u32() >> 14,
            1 => length.saturating_sub(offset),
            _ => ((1 + u32::from(input.u8() & 7)) * UNIT).min(length.saturating_sub(offset)),
        };
        if let Some((length, next)) = self.arriving.get_mut(&message.0) {
            *next = if offset + len < *length { offset + len } else { 0 };
        }
        let immediate = Immediate::new(message, offset, input.chance(64)).bits();
        let immediate = if input.chance(16) { input.u32() } else { immediate };
        if let Some(id) = self.grants.get(&message.0)
            && let Some(buffer) = self.buffers.incoming.get_mut(id)
        {
            let last = buffer.filled.len();
            let to = ((offset + len).div_ceil(UNIT) as usize).min(last);
            buffer.filled[((offset / UNIT) as usize).min(to)..to].fill(true);
        }
        let arrival = Arrival::Write { immediate, len };
        let place = self.engine.on_arrival(self.now, self.id, arrival, self.now, &mut self.buffers, &mut self.out);
        assert_eq!(place, None, "a WRITE needs no placing");
    }

    /// Executes the engine's requests in order.
    fn check(&mut self) {
        assert!(self.out.work.len() <= WORK_MAX, "{} work requests at once", self.out.work.len());
        for work in std::mem::take(&mut self.out.work) {
            match work {
                Work::Send { token, buffer, offset, len, .. } => {
                    self.posted.push(token);
                    self.inside(buffer, offset, len);
                }
                Work::Write { token, buffer, offset, len, .. } => {
                    self.posted.push(token);
                    self.inside(buffer, offset, len);
                }
                Work::Control { control: Control::Grant(grant), .. } => {
                    let buffer = self.buffers.granted[&grant.address];
                    self.grants.insert(grant.message.0, buffer);
                    let len = self.buffers.incoming.get(&buffer).expect("it is being filled").len;
                    assert_eq!(grant.length, len, "more is granted than the buffer has");
                }
                Work::Control { .. } | Work::Repath { .. } | Work::Reset { .. } | Work::Connect { .. } => {}
            }
        }
        for event in std::mem::take(&mut self.out.events) {
            match event {
                Event::Delivered { buffer, len, .. } => {
                    let whole = self.buffers.incoming.remove(&buffer.0).expect("delivered once");
                    assert_eq!(len, whole.len);
                    // With wrong immediate data a peer can only corrupt its own messages, whose memory it may write
                    // anyway.
                    let granted = self.buffers.granted.values().any(|id| *id == buffer.0);
                    assert!(granted || len == 0 || whole.filled.iter().all(|unit| *unit), "delivered with holes");
                    self.unread.push(len);
                    self.delivered += 1;
                }
                Event::Sent { buffer, .. } => assert!(self.sent.remove(&buffer.0).is_some(), "returned twice"),
                Event::Closed { .. } => self.closed = true,
            }
        }
        assert!(self.engine.connection_bytes(self.id) < 1 << 20, "a connection's memory is bounded");
    }

    /// A control datagram for the connection.
    fn control(&self, input: &mut Input<'_>) -> Control {
        let tag = Tag((self.id.token() >> 32) as u32);
        let messages = self.lengths.len();
        match input.below(8) {
            0..=3 => {
                let mut numbers = Numbers::new();
                for _ in 0..input.below(Numbers::MAX) {
                    let number = u32::from(input.u8() & 31);
                    let message = MessageId(input.below(messages + 1) as u32);
                    numbers.push(if input.chance(128) {
                        Number::Send(u64::from(number))
                    } else {
                        Number::Write(Immediate::new(message, u32::from(input.u8() & 15) * UNIT, false).name())
                    });
                }
                Control::Ack(Ack {
                    tag,
                    sequence: u16::from(input.u8()),
                    fresh: (numbers.as_slice().len() as u8).min(input.u8()),
                    held_ns: (!numbers.as_slice().is_empty() && input.chance(200)).then(|| input.u32() >> 8),
                    base: MessageId(if input.chance(200) { 0 } else { input.below(messages + 1) as u32 }),
                    limit: MessageId(u32::from(input.u16())),
                    numbers,
                })
            }
            4 | 5 => {
                let message = input.below(messages + 1);
                let length = self.lengths.get(message).copied().filter(|len| *len > 0 && !input.chance(32));
                let length = length.unwrap_or_else(|| 1 + input.below(LONGEST as usize) as u32);
                let (address, key) = (u64::from(input.u32()), input.u32());
                Control::Grant(Grant { tag, message: MessageId(message as u32), address, key, length })
            }
            6 if input.chance(128) => Control::Lane(Lane {
                tag,
                index: input.below(self.service.lanes()) as u8,
                phase: if input.chance(128) { LanePhase::Request } else { LanePhase::Response },
                generation: u16::from(input.u8() & 3),
                sequence: input.u32() & 0xff_ffff,
            }),
            7 if input.chance(4) => Control::Close(Close { tag, reason: CloseReason::Done }),
            _ => Control::Probe(tag),
        }
    }

    fn inside(&self, buffer: BufferId, offset: u32, len: u32) {
        // Data acknowledged while it waited may still be requested; it is not checked here.
        if let Some(whole) = self.sent.get(&buffer.0) {
            assert!(u64::from(offset) + u64::from(len) <= u64::from(*whole), "more is sent than the message has");
        }
    }
}

fn peer() -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2))
}

fn length(input: &mut Input<'_>) -> u32 {
    let most = if input.chance(128) { LONGEST } else { MAX_EAGER };
    match input.below(4) {
        0 => input.below(2) as u32,
        1 => most.min((9 + input.below(32) as u32) * UNIT),
        2 => 1 + input.below(most as usize) as u32,
        _ => (1 + input.below(9) as u32) * UNIT,
    }
}
