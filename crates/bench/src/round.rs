//! The whole round: send, wire header, receive, placed, published, acknowledged, released; in steady state.

use std::time::{Duration, Instant};

use bifrost_rte::{Config, MS, Ordering, S, Time, US};

use crate::account::{Account, charge};
use crate::end::{Batch, End, Offer};
use crate::link::Link;

/// One way through a fabric of 100 us round trip.
pub const ONE_WAY_NS: u64 = 50 * US;

/// A workload; by default a packet per microsecond.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Flows, taken in turns.
    pub flows: u32,
    /// Connections, taken in turns.
    pub conns: u32,
    /// Packets on the wire in one turn of the worker.
    pub batch: u32,
    /// Packets on the wire of one buffer.
    pub segments: u8,
    /// Time between turns, ns.
    pub every_ns: u64,
    /// How they become visible.
    pub ordering: Ordering,
    /// Connections beside that do nothing.
    pub idle: u32,
    /// Difference in delay of one path to the next: packets arrive out of order.
    pub skew_ns: u64,
}

impl Default for Load {
    fn default() -> Self {
        Load {
            flows: 8,
            conns: 1,
            batch: 32,
            every_ns: 32 * US,
            segments: 1,
            ordering: Ordering::Flow,
            idle: 0,
            skew_ns: 0,
        }
    }
}

/// Two ends and the network between them.
#[derive(Debug)]
pub struct Round {
    /// Now.
    pub now: Time,
    /// Sends data.
    pub sender: End,
    /// Sends acknowledgements.
    pub receiver: End,
    forward: Link,
    back: Link,
    leaving: Batch,
    load: Load,
    offers: Vec<Offer>,
    offered: u32,
    /// Time that measured turns took.
    spent: Duration,
}

impl Round {
    /// Two ends without any connection.
    pub fn new(load: Load) -> Self {
        Self::with_config(load, Config::default())
    }

    /// The same, with settings.
    pub fn with_config(load: Load, config: Config) -> Self {
        let peers = (load.idle / 100).clamp(1, 1000) as u16;
        let delays = [0, 1, 2, 3].map(|i| ONE_WAY_NS + i * load.skew_ns);
        charge(Account::Sender);
        let sender = End::new(0, config.clone(), load.ordering, peers);
        charge(Account::Receiver);
        let receiver = End::new(1, config, load.ordering, peers);
        charge(Account::Other);
        Round {
            now: Time(S),
            sender,
            receiver,
            forward: Link::new(delays),
            back: Link::new(delays),
            leaving: Batch::default(),
            load,
            offers: Vec::new(),
            offered: 0,
            spent: Duration::ZERO,
        }
    }

    /// Opens the idle connections and the busy ones, and lets the load run until everything has its working size.
    pub fn steady(load: Load) -> Self {
        let mut round = Self::new(load);
        round.open(load.conns..load.conns + load.idle, false);
        for _ in 0..(8192 / load.batch).max(64) {
            round.step(false);
        }
        // While windows grew, they may have refused some.
        round.sender.blocked_packets = 0;
        round
    }

    /// Sets up connections, one packet each, and waits until they are idle. `count`: as measured.
    pub fn open(&mut self, conns: std::ops::Range<u32>, count: bool) {
        if conns.is_empty() {
            return;
        }
        let mut first = conns.start;
        while first < conns.end {
            let end = (first + 256).min(conns.end);
            self.offers.clear();
            self.offers.extend((first..end).map(|conn| self.sender.offer(conn, conn, 1)));
            first = end;
            self.turn(count);
            self.offers.clear();
            // Set-up and first packet need two round trips, and the ACK its delay.
            self.pass(6 * ONE_WAY_NS + MS, count);
        }
        self.settle();
    }

    /// Time passes until nothing is under way and traffic state has gone back to the pools.
    pub fn settle(&mut self) {
        self.pass(3 * S, false);
    }

    /// Nothing is sent for `nanos`; whatever arrives or becomes due meanwhile is seen to at once.
    fn pass(&mut self, nanos: u64, count: bool) {
        self.offers.clear();
        let end = self.now.after(nanos);
        loop {
            let timers = [&self.sender, &self.receiver].map(|end| end.engine.next_timeout());
            let links = [&self.forward, &self.back].map(Link::next);
            let next = timers.into_iter().chain(links).flatten().min().unwrap_or(Time::NEVER);
            if next > end {
                self.now = end;
                return;
            }
            self.now = self.now.max(next);
            self.turn(count);
        }
    }

    /// Puts what a single step has sent on its way to the receiver.
    pub fn carry(&mut self, leaving: &mut Batch) {
        self.forward.send(self.now, leaving);
    }

    /// The next packets of the load. `count`: as measured.
    pub fn step(&mut self, count: bool) {
        let Load { flows, conns, batch, segments, every_ns, .. } = self.load;
        self.offers.clear();
        for _ in 0..(batch / u32::from(segments)).max(1) {
            self.offered = self.offered.wrapping_add(1);
            self.offers.push(self.sender.offer(self.offered % conns, self.offered % flows, segments));
        }
        self.turn(count);
        // A busy worker sees what has arrived at its next turn; an idle one at once.
        if every_ns > ONE_WAY_NS {
            self.pass(every_ns, count);
        } else {
            self.now = self.now.after(every_ns);
        }
    }

    /// How long the turns of both ends take that send `packets`.
    pub fn timed(&mut self, packets: u32) -> Duration {
        self.spent = Duration::ZERO;
        self.run(packets);
        self.spent
    }

    /// Runs the load for `packets`, counted; returns the packets that were released meanwhile.
    pub fn run(&mut self, packets: u32) -> u64 {
        let before = self.sender.released_packets;
        let mut sent = 0;
        while sent < packets {
            self.step(true);
            sent += self.load.batch.max(u32::from(self.load.segments));
        }
        self.sender.released_packets - before
    }

    fn turn(&mut self, count: bool) {
        let Round { now, sender, receiver, forward, back, leaving, offers, spent, .. } = self;
        let mut one = |leaving: &mut Batch, account, end: &mut End, arrived: &[_], offers: &[_]| {
            charge(account);
            if count {
                let start = Instant::now();
                end.measured(*now, arrived, offers, leaving);
                *spent += start.elapsed();
            } else {
                end.turn(*now, arrived, offers, leaving);
            }
            charge(Account::Other);
        };
        one(leaving, Account::Receiver, receiver, forward.arrived(*now), &[]);
        back.send(*now, leaving);
        one(leaving, Account::Sender, sender, back.arrived(*now), offers);
        forward.send(*now, leaving);
    }
}
