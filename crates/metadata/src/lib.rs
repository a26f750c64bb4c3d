//! The instance metadata service at 169.254.169.254: instance id, names, addresses, keys, and user data, in the layout
//! of Amazon EC2.
//!
//! [`Server`] answers HTTP over TCP (smoltcp). It receives IP packets of guests and returns packets for them; it does
//! no I/O and reads no clock. Each guest has its own network and connections here. Guests are identified by the number
//! passed with their packets, not by the contents, so tenants may use the same addresses.
//!
//! # Bounds
//!
//! A guest has at most [`CONNECTIONS`] connections at a time, each for at most [`LONGEST_MS`] and one request of at
//! most [`MAX_REQUEST`] bytes. Further connections are refused until one has ended, without effect on other guests. At
//! most [`GUESTS`] guests are served at a time; a guest that is silent for [`IDLE_MS`] is removed.

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

/// Maximum number of connections of a guest.
pub const CONNECTIONS: usize = 4;
/// Maximum duration of a connection, ms.
pub const LONGEST_MS: u64 = 10_000;
/// Maximum size of a request, headers included, bytes.
pub const MAX_REQUEST: usize = 4096;
/// Maximum number of guests that are served at a time.
pub const GUESTS: usize = 256;
/// Idle time after which a guest's state is removed, ms.
pub const IDLE_MS: u64 = 30_000;
/// Maximum size of a guest's user data, bytes, as in EC2.
pub const MAX_USER_DATA: usize = 16 << 10;

/// Counters of the service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests that got a document.
    pub answered_requests: u64,
    /// Requests that got an error.
    pub refused_requests: u64,
    /// Connections aborted after [`LONGEST_MS`].
    pub expired_connections: u64,
    /// Packets of guests dropped at a bound: too many guests, or too many queued packets of one.
    pub refused_packets: u64,
}

impl Counters {
    /// Adds the difference between `before` and `now`.
    pub fn add(&mut self, now: Counters, before: Counters) {
        self.answered_requests += now.answered_requests - before.answered_requests;
        self.refused_requests += now.refused_requests - before.refused_requests;
        self.expired_connections += now.expired_connections - before.expired_connections;
        self.refused_packets += now.refused_packets - before.refused_packets;
    }

    /// All counters by name; names end in the unit.
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
    guests: BTreeMap<u32, Guest>,
    counters: Counters,
}

impl Server {
    /// A service at these addresses. `secret`: any random number, for sequence numbers.
    pub fn new(addresses: (Ipv4Addr, Ipv6Addr), secret: u64) -> Server {
        Server { addresses, secret, guests: BTreeMap::new(), counters: Counters::default() }
    }

    /// Receives an IP packet of a guest. `now_ms`: time on any monotonic clock. `about`: the guest's documents.
    pub fn receive(&mut self, now_ms: u64, guest: u32, about: &Arc<Documents>, packet: Vec<u8>) {
        if !self.guests.contains_key(&guest) {
            if self.guests.len() >= GUESTS {
                self.counters.refused_packets += 1;
                return;
            }
            // SplitMix64's increment, so that guests get different sequence numbers.
            self.secret = self.secret.wrapping_add(0x9e37_79b9_7f4a_7c15);
        }
        let (addresses, secret) = (self.addresses, self.secret);
        let known = self.guests.entry(guest).or_insert_with(|| Guest::new(addresses, secret, Arc::clone(about)));
        if !known.receive(now_ms, about, packet) {
            self.counters.refused_packets += 1;
        }
    }

    /// Processes packets and timers, and adds IP packets for guests to `out`. Returns the latest time of the next call,
    /// ms on the same clock; `None`: not before the next packet.
    pub fn poll(&mut self, now_ms: u64, out: &mut Vec<(u32, Vec<u8>)>) -> Option<u64> {
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

    /// Removes the state of a guest that is gone, or whose number was reused.
    pub fn forget(&mut self, guest: u32) {
        self.guests.remove(&guest);
    }

    /// The counters.
    pub fn counters(&self) -> Counters {
        self.counters
    }
}

#[cfg(test)]
mod tests;
