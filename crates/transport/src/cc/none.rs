//! No congestion control: only the connection's window limits.

use super::{AckSample, CongestionControl, Loss};
use crate::time::Time;

/// No limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unlimited;

impl CongestionControl for Unlimited {
    fn on_ack(&mut self, _now: Time, _sample: &AckSample) {}
    fn on_loss(&mut self, _now: Time, _loss: &Loss) {}
    fn on_spurious(&mut self, _now: Time) {}
    fn on_timeout(&mut self, _now: Time, _rtt_ns: u64) {}
    fn restart(&mut self) {}

    fn window(&self) -> f32 {
        f32::MAX
    }

    fn wire_type(&self) -> u8 {
        bifrost_wire::bifrost::cc::NONE
    }
}
