//! What guests learn about themselves at 169.254.169.254: instance id, names, addresses, keys, and user data, in the
//! layout of Amazon EC2.
//!
//! [`Server`] answers HTTP over TCP. It gets IP packets of guests and returns packets for them; it does no I/O and
//! reads no clock. TCP is smoltcp's. Each guest has a network of its own here, with its own connections: who asks
//! follows from the number under which its packets come, never from what they contain, so tenants may have the same
//! addresses.
//!
//! # Bounds
//!
//! A guest has [`CONNECTIONS`] connections at a time, each for [`LONGEST_MS`], and each for one request of at most
//! [`MAX_REQUEST`] bytes. At most [`GUESTS`] guests are served at a time; one that is silent for [`IDLE_MS`] makes
//! room. A guest whose connections are all in use is refused until one has ended, and no other guest notices.

#![forbid(unsafe_code)]

mod documents;
mod guest;
mod http;
mod link;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

pub use documents::Documents;

use crate::guest::Guest;

/// Connections of a guest at a time.
pub const CONNECTIONS: usize = 4;
/// How long a connection may last, ms.
pub const LONGEST_MS: u64 = 10_000;
/// Bytes of a request, headers included, at most.
pub const MAX_REQUEST: usize = 4096;
/// Guests that are served at a time.
pub const GUESTS: usize = 256;
/// How long a guest is remembered that sends nothing, ms.
pub const IDLE_MS: u64 = 30_000;
/// Bytes of user data of a guest, at most, as in EC2.
pub const MAX_USER_DATA: usize = 16 << 10;

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests that got a document.
    pub answered_requests: u64,
    /// Requests that got an error.
    pub refused_requests: u64,
    /// Connections that were ended because they lasted too long.
    pub expired_connections: u64,
    /// Packets of guests for which there was no room.
    pub refused_packets: u64,
}

impl Counters {
    /// Adds what was counted from `before` to `now`.
    pub fn add(&mut self, now: Counters, before: Counters) {
        self.answered_requests += now.answered_requests - before.answered_requests;
        self.refused_requests += now.refused_requests - before.refused_requests;
        self.expired_connections += now.expired_connections - before.expired_connections;
        self.refused_packets += now.refused_packets - before.refused_packets;
    }

    /// Every counter by name; names end in their unit.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("answered_requests", self.answered_requests),
            ("refused_requests", self.refused_requests),
            ("expired_connections", self.expired_connections),
            ("refused_packets", self.refused_packets),
        ]
        .into_iter()
    }
}

/// The service.
#[derive(Debug)]
pub struct Server {
    addresses: (Ipv4Addr, Ipv6Addr),
    secret: u64,
    guests: BTreeMap<u16, Guest>,
    counters: Counters,
}

impl Server {
    /// A service at these addresses. `secret`: any random number, for sequence numbers.
    pub fn new(addresses: (Ipv4Addr, Ipv6Addr), secret: u64) -> Server {
        Server { addresses, secret, guests: BTreeMap::new(), counters: Counters::default() }
    }

    /// An IP packet of a guest, at `now_ms` of any clock that goes on. `about` is what the guest may learn.
    pub fn receive(&mut self, now_ms: u64, guest: u16, about: &Arc<Documents>, packet: Vec<u8>) {
        if !self.guests.contains_key(&guest) {
            if self.guests.len() >= GUESTS {
                self.counters.refused_packets += 1;
                return;
            }
            // SplitMix64's increment: guests do not get the same sequence numbers.
            self.secret = self.secret.wrapping_add(0x9e37_79b9_7f4a_7c15);
        }
        let (addresses, secret) = (self.addresses, self.secret);
        let known = self.guests.entry(guest).or_insert_with(|| Guest::new(addresses, secret, Arc::clone(about)));
        if !known.receive(now_ms, about, packet) {
            self.counters.refused_packets += 1;
        }
    }

    /// Does what is due, and adds the IP packets for guests to `out`. Returns when to call it again at the latest, in
    /// ms of the same clock; `None`: not before the next packet.
    pub fn poll(&mut self, now_ms: u64, out: &mut Vec<(u16, Vec<u8>)>) -> Option<u64> {
        let mut next: Option<u64> = None;
        let counters = &mut self.counters;
        self.guests.retain(|&number, guest| {
            let due = guest.poll(now_ms, counters);
            out.extend(guest.sent().map(|packet| (number, packet)));
            let end = guest.last_ms().saturating_add(IDLE_MS);
            let at = due.map_or(end, |due| due.min(end));
            next = Some(next.map_or(at, |next| next.min(at)));
            now_ms < end
        });
        next.filter(|_| !self.guests.is_empty())
    }

    /// Ends what goes on with a guest that is gone, or whose number another one has now.
    pub fn forget(&mut self, guest: u16) {
        self.guests.remove(&guest);
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }
}

#[cfg(test)]
mod tests;
