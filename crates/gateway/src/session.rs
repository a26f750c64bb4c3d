//! One session of the translation: its flow keys, and when it expires.

use std::hash::{Hash, Hasher};
use std::net::IpAddr;

use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::tcp;

use crate::rewrite::End;

/// Interval for recording packets of a session, s: sessions last up to that much longer.
pub(crate) const NOTED_EVERY_S: u32 = 4;

// Seconds without a packet after which a session expires.
/// RFC 5382, section 5.
const TCP_ESTABLISHED_S: u32 = 7440;
const TCP_OPENING_S: u32 = 30;
const TCP_CLOSING_S: u32 = 30;
/// RFC 4787, section 4.3.
const UDP_S: u32 = 120;
/// RFC 5508, section 3.2.
const ICMP_S: u32 = 60;

// Marks: events seen in a session.
const REPLIED: u8 = 1;
const FIN_INSIDE: u8 = 2;
const FIN_OUTSIDE: u8 = 4;
const RESET: u8 = 8;
/// All of them.
pub(crate) const MARKS: u8 = REPLIED | FIN_INSIDE | FIN_OUTSIDE | RESET;

/// Source and destination of packets, in a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) network: u32,
    pub(crate) protocol: u8,
    pub(crate) source: End,
    pub(crate) destination: End,
}

impl Flow {
    /// The flow of the replies.
    pub(crate) fn reversed(self) -> Self {
        Flow { source: self.destination, destination: self.source, ..self }
    }
}

/// Hashed in few, large pieces: three for IPv4.
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

/// Marks that a packet sets.
pub(crate) fn marks(protocol: u8, flags: tcp::Flags, from_inside: bool) -> u8 {
    let replied = if from_inside { 0 } else { REPLIED };
    if protocol != TCP || !flags.intersects(tcp::Flags::FIN.with(tcp::Flags::RST)) {
        return replied;
    }
    let end = if flags.contains(tcp::Flags::RST) {
        RESET
    } else if from_inside {
        FIN_INSIDE
    } else {
        FIN_OUTSIDE
    };
    replied | end
}

/// Whether a session with these marks has expired, if its last packet was seen at `seen_s`.
pub(crate) fn is_over(protocol: u8, marks: u8, seen_s: u32, now_s: u32) -> bool {
    let timeout = match protocol {
        TCP if marks & RESET != 0 || marks & (FIN_INSIDE | FIN_OUTSIDE) == FIN_INSIDE | FIN_OUTSIDE => TCP_CLOSING_S,
        TCP if marks & REPLIED != 0 => TCP_ESTABLISHED_S,
        TCP => TCP_OPENING_S,
        UDP => UDP_S,
        _ => ICMP_S,
    };
    now_s.saturating_sub(seen_s) > timeout + NOTED_EVERY_S
}
