//! What an engine has measured on a path, for another engine that continues on the same path.

use bifrost_transport::rtt::{Estimate, Rtt};
use bifrost_transport::time::Time;

use super::{Path, PathState};

/// Measurements of one path. Values from another process need no check:
/// [`Engine::resume_paths`](crate::Engine::resume_paths) bounds them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PathEstimate {
    /// The full round trip including the peer's ACK delay.
    pub total: Estimate,
    /// The same without both endpoints.
    pub fabric: Estimate,
    /// Share of packets that were lost, 0 to 1.
    pub loss: f32,
    /// Packets that congestion control allowed in flight.
    pub window: f32,
    /// The path carried only probes.
    pub is_suspect: bool,
}

impl Path {
    pub(crate) fn estimate(&self) -> PathEstimate {
        PathEstimate {
            total: self.total.estimate(),
            fabric: self.fabric.estimate(),
            loss: self.loss,
            window: self.window,
            is_suspect: self.state == PathState::Suspect,
        }
    }

    pub(crate) fn resume(&mut self, now: Time, estimate: &PathEstimate) {
        self.total = Rtt::of(now, estimate.total);
        self.fabric = Rtt::of(now, estimate.fabric);
        self.loss = if estimate.loss.is_finite() { estimate.loss.clamp(0.0, 1.0) } else { 0.0 };
        if estimate.window.is_finite() {
            self.congestion(|cc| cc.resume(estimate.window));
        }
        if estimate.is_suspect {
            self.suspect(now);
        }
    }
}
