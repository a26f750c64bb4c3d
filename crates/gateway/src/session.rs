//! One conversation through the translation.

use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::Relaxed};

use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::tcp;

use crate::rewrite::End;

/// How often a core tells a session of packets, s: sessions last that much longer.
pub(crate) const NOTED_EVERY_S: u32 = 4;

// Seconds without a packet after which a session is over.
/// RFC 5382, section 5.
const TCP_ESTABLISHED_S: u32 = 7440;
const TCP_OPENING_S: u32 = 30;
const TCP_CLOSING_S: u32 = 30;
/// RFC 4787, section 4.3.
const UDP_S: u32 = 120;
/// RFC 5508, section 3.2.
const ICMP_S: u32 = 60;

// What was seen of a session.
const REPLIED: u8 = 1;
const FIN_INSIDE: u8 = 2;
const FIN_OUTSIDE: u8 = 4;
const RESET: u8 = 8;

/// Packets from one end to another, in a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) network: u32,
    pub(crate) protocol: u8,
    pub(crate) source: End,
    pub(crate) destination: End,
}

impl Flow {
    /// That of the answers.
    pub(crate) fn reversed(self) -> Self {
        Flow { source: self.destination, destination: self.source, ..self }
    }
}

/// In few, large pieces: three for IPv4.
impl Hash for Flow {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Flow { network, protocol, source, destination } = self;
        let ports = u64::from(source.port) << 16 | u64::from(destination.port);
        state.write_u64(u64::from(*network) << 32 | ports);
        match (source.address, destination.address) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                state.write_u64(u64::from(source.to_bits()) << 32 | u64::from(destination.to_bits()));
            }
            (source, destination) => [source, destination].hash(state),
        }
        state.write_u8(*protocol);
    }
}

/// A conversation, which all cores share.
#[derive(Debug)]
pub(crate) struct Session {
    /// As the tenant's packets look.
    pub(crate) inside: Flow,
    /// As they leave.
    pub(crate) outside: Flow,
    /// When the last packet was seen, s.
    seen_s: AtomicU32,
    seen: AtomicU8,
    gone: AtomicBool,
}

impl Session {
    /// One that begins now.
    pub(crate) fn new(inside: Flow, outside: Flow, now_s: u32) -> Self {
        let (seen_s, seen, gone) = (AtomicU32::new(now_s), AtomicU8::new(0), AtomicBool::new(false));
        Session { inside, outside, seen_s, seen, gone }
    }

    /// Notes a packet.
    pub(crate) fn touch(&self, now_s: u32, flags: tcp::Flags, from_inside: bool) {
        if self.seen_s.load(Relaxed) != now_s {
            self.seen_s.store(now_s, Relaxed);
        }
        let mut bits = if from_inside { 0 } else { REPLIED };
        if self.inside.protocol == TCP && flags.intersects(tcp::Flags::FIN.with(tcp::Flags::RST)) {
            bits |= if flags.contains(tcp::Flags::RST) {
                RESET
            } else if from_inside {
                FIN_INSIDE
            } else {
                FIN_OUTSIDE
            };
        }
        if self.seen.load(Relaxed) & bits != bits {
            self.seen.fetch_or(bits, Relaxed);
        }
    }

    /// Whether no packet was seen for so long that it is over.
    pub(crate) fn is_over(&self, now_s: u32) -> bool {
        let seen = self.seen.load(Relaxed);
        let patience = match self.inside.protocol {
            TCP if seen & RESET != 0 || seen & (FIN_INSIDE | FIN_OUTSIDE) == FIN_INSIDE | FIN_OUTSIDE => TCP_CLOSING_S,
            TCP if seen & REPLIED != 0 => TCP_ESTABLISHED_S,
            TCP => TCP_OPENING_S,
            UDP => UDP_S,
            _ => ICMP_S,
        };
        now_s.saturating_sub(self.seen_s.load(Relaxed)) > patience + NOTED_EVERY_S
    }

    /// It is not to be found any more.
    pub(crate) fn end(&self) {
        self.gone.store(true, Relaxed);
    }

    /// Whether it has ended: cores may still know it.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Relaxed)
    }

    #[cfg(test)]
    pub(crate) fn seen_s(&self) -> u32 {
        self.seen_s.load(Relaxed)
    }
}
