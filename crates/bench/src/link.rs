//! The network between two ends: four paths of fixed delay. Never counted.

use std::collections::VecDeque;

use bifrost_rte::Time;

use crate::end::{Batch, Datagram};

/// One direction.
#[derive(Debug)]
pub struct Link {
    delays_ns: [u64; 4],
    under_way: VecDeque<Datagram>,
    arrived: Vec<Datagram>,
}

impl Link {
    /// Paths with these delays, ns.
    pub fn new(delays_ns: [u64; 4]) -> Self {
        Link { delays_ns, under_way: VecDeque::with_capacity(4096), arrived: Vec::with_capacity(4096) }
    }

    /// Sends everything in `batch`.
    pub fn send(&mut self, now: Time, batch: &mut Batch) {
        let Link { delays_ns, under_way, .. } = self;
        batch.drain(now, |mut datagram| {
            datagram.at = now.after(delays_ns[usize::from(datagram.path) % 4]);
            let place = under_way.partition_point(|other| other.at <= datagram.at);
            under_way.insert(place, datagram);
        });
    }

    /// Arrival time of the next datagram.
    pub fn next(&self) -> Option<Time> {
        self.under_way.front().map(|datagram| datagram.at)
    }

    /// Datagrams that have arrived since the last call.
    pub fn arrived(&mut self, now: Time) -> &[Datagram] {
        self.arrived.clear();
        let count = self.under_way.partition_point(|datagram| datagram.at <= now);
        self.arrived.extend(self.under_way.drain(..count));
        &self.arrived
    }
}
