//! A complete round: send, write the header, receive, placed, published, acknowledged, released; in steady state.

use std::time::{Duration, Instant};

use bifrost_rte::{Config, MS, Ordering, S, Time, US};

use crate::account::{Account, charge};
use crate::end::{Batch, End, Offer};
use crate::link::Link;

/// One-way delay of a fabric with a round trip of 100 us.
pub const ONE_WAY_NS: u64 = 50 * US;

/// A workload; by default a packet per microsecond.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Number of flows, used in turn.
    pub flows: u32,
    /// Number of connections, used in turn.
    pub conns: u32,
    /// Packets on the wire per turn of the worker.
    pub batch: u32,
    /// Packets on the wire per buffer.
    pub segments: u8,
    /// Time between turns, ns.
    pub every_ns: u64,
    /// How packets become visible.
    pub ordering: Ordering,
    /// Number of additional idle connections.
    pub idle: u32,
    /// Difference of the delays of successive paths, which reorders packets.
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
    /// The current time.
    pub now: Time,
    /// The end that sends data.
    pub sender: End,
    /// The end that sends acknowledgements.
    pub receiver: End,
    forward: Link,
    back: Link,
    leaving: Batch,
    load: Load,
    offers: Vec<Offer>,
    offered: u32,
    /// Duration of the measured turns.
    spent: Duration,
}

impl Round {
    /// Two ends without any connection.
    pub fn new(load: Load) -> Self {
        Self::with_config(load, Config::default())
    }

    /// Like [`new`](Self::new), with a configuration.
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

    /// Opens the idle connections and the busy ones, and runs the load until all structures have their working size.
    pub fn steady(load: Load) -> Self {
        let mut round = Self::new(load);
        round.open(load.conns..load.conns + load.idle, false);
        for _ in 0..(8192 / load.batch).max(64) {
            round.step(false);
        }
        // While windows grew, they may have refused some packets.
        round.sender.blocked_packets = 0;
        round
    }

    /// Sets up connections, with one packet each, and waits until they are idle. `count`: count these turns.
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

    /// Lets time pass until nothing is in flight and traffic state has been returned to the pools.
    pub fn settle(&mut self) {
        self.pass(3 * S, false);
    }

    /// Sends nothing for `nanos`. Arrivals and timers are handled immediately.
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

    /// Carries the packets of a single step to the receiver.
    pub fn carry(&mut self, leaving: &mut Batch) {
        self.forward.send(self.now, leaving);
    }

    /// Sends the next packets of the load. `count`: count these turns.
    pub fn step(&mut self, count: bool) {
        let Load { flows, conns, batch, segments, every_ns, .. } = self.load;
        self.offers.clear();
        for _ in 0..(batch / u32::from(segments)).max(1) {
            self.offered = self.offered.wrapping_add(1);
            self.offers.push(self.sender.offer(self.offered % conns, self.offered % flows, segments));
        }
        self.turn(count);
        // A busy worker processes arrivals at its next turn, an idle one immediately.
        if every_ns > ONE_WAY_NS {
            self.pass(every_ns, count);
        } else {
            self.now = self.now.after(every_ns);
        }
    }

    /// Duration of the turns of both ends that send `packets`.
    pub fn timed(&mut self, packets: u32) -> Duration {
        self.spent = Duration::ZERO;
        self.run(packets);
        self.spent
    }

    /// Runs the load for `packets`, with counting; returns the number of packets released.
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
