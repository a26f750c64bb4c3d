//! Congestion control: one small controller for each path, behind one trait. It knows nothing of paths and connections.

mod none;
mod swift;
pub mod window;

pub use none::Unlimited;
pub use swift::{Swift, SwiftConfig};

use crate::time::{MS, Time};

/// Longest pause between packets of a path with a window below one, ns: a peer that slept for seconds, and so raised the
/// RTT to seconds, must not close its paths for minutes.
pub const PACE_MAX_NS: u64 = 100 * MS;

/// What one ACK says about a path.
#[derive(Clone, Copy, Debug)]
pub struct AckSample {
    /// Packets newly acknowledged on the path; 0 if the ACK has only measured it.
    pub packets: u16,
    /// Of these, how many carried a congestion mark (ECN CE), as far as the ACK tells.
    pub marked_packets: u16,
    /// Time in the network both ways, ns; `None` when the ACK did not measure this path.
    pub fabric_delay_ns: Option<u64>,
    /// The smallest fabric delay of the last round trip, ns: what a queue that stands adds to every packet, and a host that
    /// was late adds to some. At most `fabric_delay_ns` where that is known.
    pub standing_delay_ns: u64,
    /// Time in the two endpoints, ns, when measured, without that for which the receiver may hold back an ACK.
    pub endpoint_delay_ns: Option<u64>,
    /// Smallest fabric delay seen on the path, ns.
    pub base_delay_ns: u64,
    /// Smoothed round-trip time, ns.
    pub rtt_ns: u64,
    /// Hops to the peer as it counted them.
    pub hops: u8,
    /// Packets that were in flight on the path before the ACK.
    pub in_flight: u32,
}

/// A packet that was found lost.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// When it left.
    pub sent: Time,
    /// Smoothed round-trip time, ns.
    pub rtt_ns: u64,
    /// Smallest fabric delay seen on the path, ns.
    pub base_delay_ns: u64,
    /// What a queue added to that for the packets that were measured last, ns.
    pub queue_ns: u64,
    /// The path delivers, and its queue stands: the queue has dropped the packet. Otherwise the link has damaged it.
    pub congestion: bool,
}

/// A congestion controller of one path. Windows count packets and may be below 1.
pub trait CongestionControl: std::fmt::Debug + Send {
    /// Packets were acknowledged.
    fn on_ack(&mut self, now: Time, sample: &AckSample);
    /// A packet was found lost and is sent again (at most one reaction per RTT).
    fn on_loss(&mut self, now: Time, loss: &Loss);
    /// A packet that was found lost has arrived after all: what was done because of it was wrong.
    fn on_spurious(&mut self, now: Time);
    /// A retransmission timeout.
    fn on_timeout(&mut self, now: Time, rtt_ns: u64);
    /// The path has failed and is used again: nothing is known of it.
    fn restart(&mut self);
    /// Another controller had this window, a finite number, on the path moments ago. By default it means nothing.
    fn resume(&mut self, _window: f32) {}
    /// Packets that may be in flight on the path; below 1: one packet each `rtt / window`.
    fn window(&self) -> f32;
    /// Its number on the wire (`CC Type`).
    fn wire_type(&self) -> u8;
}
