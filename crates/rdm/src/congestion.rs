//! How many bytes may be in flight.

use bifrost_transport::cc::Unlimited;

/// What an acknowledgement shows about the network.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Bytes acknowledged.
    pub bytes: u32,
    /// Round trip without the receiver's delay, ns, if it was measured.
    pub rtt_ns: Option<u64>,
    /// Smallest recent round-trip time, ns.
    pub base_rtt_ns: u64,
    /// Smoothed round-trip time, ns.
    pub smoothed_rtt_ns: u64,
    /// The window limited the sender.
    pub window_limited: bool,
}

/// A congestion controller, one for each connection.
pub trait Congestion: std::fmt::Debug {
    /// Called when something is acknowledged.
    fn on_ack(&mut self, now_ns: u64, sample: &Sample);
    /// Called when work requests are lost; `rate` is the recent share of lost packets, `rtt_ns` the round trip.
    fn on_loss(&mut self, now_ns: u64, rate: f32, rtt_ns: u64);
    /// Called when nothing was heard for several round trips.
    fn on_timeout(&mut self, now_ns: u64);
    /// Bytes that may be in flight. Below one unit, the engine sends one unit at a time with pauses.
    fn window(&self) -> u32;
}

/// No limit except the receiver's credits: for NICs with their own congestion control.
impl Congestion for Unlimited {
    fn on_ack(&mut self, _: u64, _: &Sample) {}
    fn on_loss(&mut self, _: u64, _: f32, _: u64) {}
    fn on_timeout(&mut self, _: u64) {}
    fn window(&self) -> u32 {
        u32::MAX
    }
}
