//! Congestion control: one small controller per path, behind one trait.

mod none;
mod swift;

pub use none::Unlimited;
pub use swift::{Swift, SwiftConfig};

use crate::time::Time;

/// What one ACK says about a path.
#[derive(Clone, Copy, Debug)]
pub struct AckSample {
    /// Packets newly acknowledged on the path, at least 1.
    pub packets: u16,
    /// Of all packets that the ACK reports, how many carried a congestion mark.
    pub marked_packets: u16,
    /// Time in the network both ways, ns; `None` when the ACK did not measure this path.
    pub fabric_delay_ns: Option<u64>,
    /// Time in the two endpoints, ns, when measured, without that for which the receiver may hold back an ACK.
    pub endpoint_delay_ns: Option<u64>,
    /// Smallest fabric delay seen on the path, ns.
    pub base_delay_ns: u64,
    /// Smoothed round-trip time, ns.
    pub rtt_ns: u64,
    /// Hops to the peer as it counted them.
    pub hops: u8,
    /// The sender had more to send than the window allowed.
    pub window_limited: bool,
}

/// A congestion controller of one path. Windows count packets and may be below 1.
pub trait CongestionControl: std::fmt::Debug + Send {
    /// Packets were acknowledged.
    fn on_ack(&mut self, now: Time, sample: &AckSample);
    /// Packets were found lost and are sent again (at most one reaction per RTT).
    fn on_loss(&mut self, now: Time, rtt_ns: u64);
    /// A retransmission timeout.
    fn on_timeout(&mut self, now: Time, rtt_ns: u64);
    /// Packets that may be in flight on the path; below 1: one packet each `rtt / window`.
    fn window(&self) -> f32;
    /// Its number on the wire (`CC Type`).
    fn wire_type(&self) -> u8;
}
