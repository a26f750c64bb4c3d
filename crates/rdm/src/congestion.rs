//! How much may be in flight.

use bifrost_transport::cc::Unlimited;

/// What an acknowledgement says about the network.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Bytes that it acknowledges.
    pub bytes: u32,
    /// The round trip without the receiver's delay, ns, if it was measured.
    pub rtt_ns: Option<u64>,
    /// The smallest round-trip time lately, ns.
    pub base_rtt_ns: u64,
    /// Smoothed, ns.
    pub smoothed_rtt_ns: u64,
    /// The window was what held the sender up.
    pub window_limited: bool,
}

/// A congestion controller, one for each connection.
pub trait Congestion: std::fmt::Debug {
    /// Something was acknowledged.
    fn on_ack(&mut self, now_ns: u64, sample: &Sample);
    /// Work requests were lost; `rate` is the share of packets that is lost lately, `rtt_ns` the round trip.
    fn on_loss(&mut self, now_ns: u64, rate: f32, rtt_ns: u64);
    /// Nothing was heard for several round trips.
    fn on_timeout(&mut self, now_ns: u64);
    /// Bytes that may be in flight. Below a unit, the engine sends one unit at a time and waits between.
    fn window(&self) -> u32;
}

/// No limit but the receiver's credits: where the NIC has a controller of its own.
impl Congestion for Unlimited {
    fn on_ack(&mut self, _: u64, _: &Sample) {}
    fn on_loss(&mut self, _: u64, _: f32, _: u64) {}
    fn on_timeout(&mut self, _: u64) {}
    fn window(&self) -> u32 {
        u32::MAX
    }
}
