//! The cost of the message engine: two of them, connected in virtual time. The NICs between them do nothing and lose
//! nothing: the engines' part of a message is counted, at both ends, including acknowledgements and timers.

use bifrost_rdm::{
    Adaptive, Arrival, BufferId, Class, Config, ConnectionConfig, ConnectionId, Engine, Event, Memory, Output, Service,
    Swift, SwiftConfig, Work,
};
use bifrost_wire::rdm::{Control, Immediate, SendHeader};

/// Short messages per measurement.
pub const SHORT: u32 = 8192;
/// Chunks of long messages per measurement.
pub const CHUNKS: u32 = 2048;
/// Number of outstanding messages.
const OPEN: usize = 16;
/// Bytes of a long message.
const LONG: u32 = 1 << 20;
/// Interval of turns.
const TURN_NS: u64 = 5_000;
const CONTROL: u32 = 7;

/// Buffers without memory: the engine never accesses their content.
#[derive(Debug, Default)]
struct Buffers(u32);

impl Memory for Buffers {
    fn allocate(&mut self, _: ConnectionId, _: u32, _: bool) -> Option<(BufferId, u64, u32)> {
        self.0 = self.0.wrapping_add(1);
        Some((BufferId(self.0), u64::from(self.0) << 32, self.0))
    }
}

#[derive(Debug)]
struct Side {
    engine: Engine,
    id: ConnectionId,
    out: Output,
    buffers: Buffers,
}

/// One connection, on which the first end sends messages of one length.
#[derive(Debug)]
pub struct Messages {
    sides: [Side; 2],
    now: u64,
    len: u32,
    open: usize,
    /// Messages delivered.
    pub delivered: u32,
    /// Chunks written.
    pub chunks: u32,
}

impl Messages {
    /// In steady state.
    pub fn short() -> Self {
        let mut messages = Self::new(64);
        messages.run_short(SHORT);
        messages
    }

    /// In steady state.
    pub fn long() -> Self {
        let mut messages = Self::new(LONG);
        messages.run_chunks(CHUNKS);
        messages
    }

    fn new(len: u32) -> Self {
        let address = std::net::IpAddr::V6(std::net::Ipv6Addr::LOCALHOST);
        let mut engines = [1, 2].map(|seed| Engine::new(Config::new(4, seed)));
        let ids = engines.each_mut().map(|engine| engine.reserve().unwrap_or_else(|e| unreachable!("{e}")));
        for (at, engine) in engines.iter_mut().enumerate() {
            let (id, tag) = (ids[at].0, ids[1 - at].1);
            let config = ConnectionConfig::new(Service::Uc, 4096);
            let swift = Box::new(Swift::new(SwiftConfig::new(50_000)));
            let opened = engine.open(0, id, (address, CONTROL), tag, config, Box::new(Adaptive::default()), swift);
            opened.unwrap_or_else(|e| unreachable!("{e}"));
        }
        let mut ids = ids.into_iter();
        let sides = engines.map(|engine| {
            let (id, _) = ids.next().unwrap_or_else(|| unreachable!("one for each"));
            Side { engine, id, out: Output::new(), buffers: Buffers::default() }
        });
        Messages { sides, now: 0, len, open: 0, delivered: 0, chunks: 0 }
    }

    /// Runs until `messages` more messages have been delivered.
    pub fn run_short(&mut self, messages: u32) {
        let until = self.delivered + messages;
        while self.delivered < until {
            self.turn();
        }
    }

    /// Runs until `chunks` more chunks have been written.
    pub fn run_chunks(&mut self, chunks: u32) {
        let until = self.chunks + chunks;
        while self.chunks < until {
            self.turn();
        }
    }

    /// One turn of both ends: 5 us.
    fn turn(&mut self) {
        self.now += TURN_NS;
        let sender = &mut self.sides[0];
        while self.open < OPEN {
            sender.buffers.0 = sender.buffers.0.wrapping_add(1);
            let buffer = BufferId(sender.buffers.0);
            let sent = sender.engine.send(self.now, sender.id, buffer, self.len, Class::Message, 0);
            sent.unwrap_or_else(|e| unreachable!("{e}"));
            self.open += 1;
        }
        for from in 0..2 {
            let side = &mut self.sides[from];
            side.engine.turn(self.now, &mut side.buffers, &mut side.out);
            self.carry(from);
        }
    }

    /// Carries out the requests of an end, and reports their completions.
    fn carry(&mut self, from: usize) {
        let now = self.now;
        let address = std::net::IpAddr::V6(std::net::Ipv6Addr::LOCALHOST);
        let [a, b] = &mut self.sides;
        let (side, peer) = if from == 0 { (a, b) } else { (b, a) };
        let mut out = std::mem::take(&mut side.out);
        for work in out.work.drain(..) {
            let (arrival, token) = match &work {
                Work::Send { token, header, len, .. } => {
                    (Arrival::Send { head: header, len: SendHeader::LEN as u32 + len }, *token)
                }
                Work::Write { token, len, immediate, .. } => {
                    debug_assert!(Immediate::from_bits(*immediate).offset() < self.len);
                    self.chunks += 1;
                    (Arrival::Write { immediate: *immediate, len: *len }, *token)
                }
                Work::Control { control, .. } => {
                    let mut bytes = [0; Control::MAX_LEN];
                    let len = control.emit_into(&mut bytes);
                    peer.engine.on_control(now, (address, CONTROL), &bytes[..len], now, &mut peer.out);
                    continue;
                }
                Work::Repath { .. } | Work::Reset { .. } | Work::Connect { .. } => continue,
            };
            peer.engine.on_arrival(now, peer.id, arrival, now, &mut peer.buffers, &mut peer.out);
            side.engine.on_sent(now, token, true, now, &mut side.out);
        }
        for event in out.events.drain(..) {
            match event {
                Event::Delivered { len, .. } => {
                    self.delivered += 1;
                    side.engine.consumed(now, side.id, len, &mut side.buffers, &mut side.out);
                }
                Event::Sent { .. } => self.open -= 1,
                Event::Closed { reason, .. } => unreachable!("nothing is lost: {reason:?}"),
            }
        }
        // Both ends keep their memory.
        out.work.append(&mut side.out.work);
        out.events.append(&mut side.out.events);
        side.out = out;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_pass() {
        let mut short = Messages::short();
        short.run_short(SHORT);
        assert!(short.delivered >= 2 * SHORT && short.chunks == 0);
        let mut long = Messages::long();
        long.run_chunks(CHUNKS);
        assert!(long.chunks >= 2 * CHUNKS && long.delivered > 64, "{long:?}");
    }
}
