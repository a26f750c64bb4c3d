//! Single steps of the round, each prepared so that only the step is counted.

use bifrost_rte::{MS, US};

use crate::end::{Batch, Datagram, Offer};
use crate::round::{Load, Round};

/// Packets per measurement.
pub const PACKETS: u32 = 256;

/// A step that is ready to be measured.
#[derive(Debug)]
pub struct Prepared {
    round: Round,
    offers: Vec<Offer>,
    arrived: Vec<Datagram>,
    leaving: Batch,
}

impl Prepared {
    /// Both ends in steady state, with nothing in flight.
    fn quiet() -> Self {
        let mut round = Round::steady(Load { flows: 8, ..Load::default() });
        round.settle();
        let offers = (0..PACKETS).map(|i| round.sender.offer(0, i % 8, 1)).collect();
        let mut leaving = Batch::default();
        leaving.reserve(2 * PACKETS as usize);
        Prepared { offers, round, arrived: Vec::new(), leaving }
    }

    /// 256 packets are ready to be sent.
    pub fn to_send() -> Self {
        let mut prepared = Self::quiet();
        // Output grows to its working size once.
        prepared.send();
        prepared.round.carry(&mut prepared.leaving);
        prepared.round.settle();
        prepared
    }

    /// 256 packets have arrived, in order, or reordered as by four paths: in overlapping groups of 50.
    pub fn to_receive(reordered: bool) -> Self {
        let mut prepared = Self::to_send();
        prepared.send();
        let now = prepared.round.now;
        let arrived = &mut prepared.arrived;
        prepared.leaving.drain(now, |datagram| arrived.push(datagram));
        if reordered {
            // Every second group is 25 packets late.
            let place = |i: usize| if (i / 50) % 2 == 1 { 2 * i + 50 } else { 2 * i + 1 };
            let mut order: Vec<usize> = (0..arrived.len()).collect();
            order.sort_by_key(|&i| place(i));
            *arrived = order.into_iter().map(|i| arrived[i]).collect();
        }
        prepared.round.now = now.after(50 * US);
        prepared
    }

    /// The receiver has 256 packets to acknowledge. `hole`: one packet before them is missing, so that the bitmap is
    /// full.
    pub fn to_acknowledge(hole: bool) -> Self {
        let mut prepared = Self::to_receive(false);
        let from = usize::from(hole);
        prepared.round.receiver.receive(prepared.round.now, &prepared.arrived[from..]);
        prepared
    }

    /// The ACK of 256 packets has arrived at the sender.
    pub fn to_release(hole: bool) -> Self {
        let mut prepared = Self::to_acknowledge(hole);
        prepared.acknowledge();
        let now = prepared.round.now;
        prepared.arrived.clear();
        let arrived = &mut prepared.arrived;
        prepared.leaving.drain(now, |datagram| arrived.push(datagram));
        prepared.round.now = now.after(50 * US);
        prepared
    }

    /// The sender sends 256 packets.
    #[inline(always)]
    pub fn send(&mut self) {
        self.round.sender.send(self.round.now, &self.offers);
        self.round.sender.emit(&mut self.leaving);
    }

    /// The receiver processes and publishes the packets that have arrived.
    #[inline(always)]
    pub fn receive(&mut self) {
        self.round.receiver.receive(self.round.now, &self.arrived);
    }

    /// The receiver builds its ACK.
    #[inline(always)]
    pub fn acknowledge(&mut self) {
        self.round.receiver.acknowledge(self.round.now);
        self.round.receiver.emit(&mut self.leaving);
    }

    /// The sender processes the ACK.
    #[inline(always)]
    pub fn release(&mut self) {
        self.round.sender.receive(self.round.now, &self.arrived);
        self.round.sender.emit(&mut self.leaving);
    }
}

/// Number of turns of [`advance`].
pub const TURNS: u32 = 1000;

/// `idle` connections, and one that has stopped sending.
pub fn resting(idle: u32) -> Round {
    let mut round = Round::steady(Load { idle, ..Load::default() });
    round.settle();
    round
}

/// A second passes in which nothing is sent: the timers are checked [`TURNS`] times.
#[inline(always)]
pub fn advance(round: &mut Round) {
    for _ in 0..TURNS {
        round.now = round.now.after(MS);
        round.sender.tick(round.now);
    }
}

/// Two ends with pools, tables and peers like those of a daemon that has run for a while.
pub fn acquainted() -> Round {
    let mut round = Round::new(Load::default());
    round.open(0..PACKETS, false);
    round
}

/// Sets up 256 connections, each for one packet, which is delivered and acknowledged.
pub fn open(round: &mut Round) {
    round.open(PACKETS..2 * PACKETS, true);
}
