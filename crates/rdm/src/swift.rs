//! A controller after Swift (SIGCOMM'20): the window follows the delay.
//!
//! The reliable transport for frames has another one ([`bifrost_transport::cc::Swift`]) with the same arithmetic. It
//! counts packets on paths that many connections share, and uses ECN marks and endpoint delays. This one counts bytes,
//! because chunks differ in length, and a connection has one path.
//!
//! The paper sets the window to its minimum when a packet is dropped. If losses are not caused by congestion, one
//! connection then keeps 16 % of 25 Gbit/s at a loss rate of 1/256. Here a loss counts only if the delay is also above
//! the target, or if more packets are lost than on bad links.

use bifrost_transport::cc::window::{grown, kept_share};

use crate::congestion::{Congestion, Sample};

/// Parameters of the controller.
#[derive(Clone, Copy, Debug)]
pub struct SwiftConfig {
    /// Target of the queueing delay, above the smallest round trip, ns.
    pub queue_ns: u64,
    /// Growth of the window per round trip below the target, bytes.
    pub additive: u32,
    /// Weight of the excess delay in a decrease.
    pub beta: f32,
    /// Largest decrease at a time, as a share of the window.
    pub max_decrease: f32,
    /// Initial window, bytes.
    pub initial: u32,
    /// Smallest window, bytes.
    pub min: u32,
    /// Largest window, bytes.
    pub max: u32,
    /// A larger share of lost packets is congestion, whatever the delay.
    pub heavy_loss: f32,
}

impl SwiftConfig {
    /// Parameters for a queueing delay of `queue_ns`, which must cover the hosts' own delays.
    #[must_use]
    pub const fn new(queue_ns: u64) -> Self {
        Self {
            queue_ns,
            additive: 8192,
            beta: 0.8,
            max_decrease: 0.5,
            initial: 128 * 1024,
            min: 1024,
            max: 64 << 20,
            heavy_loss: 0.05,
        }
    }
}

/// The controller.
#[derive(Clone, Debug)]
pub struct Swift {
    config: SwiftConfig,
    window: f32,
    starting: bool,
    above: bool,
    decreased: u64,
    timeouts: u8,
}

impl Swift {
    /// A controller with its initial window.
    #[must_use]
    pub fn new(config: SwiftConfig) -> Self {
        let window = config.initial as f32;
        Self { config, window, starting: true, above: false, decreased: 0, timeouts: 0 }
    }

    fn decrease(&mut self, now_ns: u64, rtt_ns: u64, factor: f32) {
        self.starting = false;
        if now_ns.saturating_sub(self.decreased) >= rtt_ns {
            self.decreased = now_ns;
            self.window *= factor.max(1.0 - self.config.max_decrease);
            self.clamp();
        }
    }

    fn clamp(&mut self) {
        self.window = self.window.clamp(self.config.min as f32, self.config.max as f32);
    }
}

impl Congestion for Swift {
    fn on_ack(&mut self, now_ns: u64, sample: &Sample) {
        self.timeouts = 0;
        if let Some(rtt) = sample.rtt_ns {
            // Small windows of many connections that share a link get a higher target (Swift's flow scaling).
            let scaling = (1.0 / (self.window / 65_536.0).max(0.01).sqrt()).min(4.0);
            let target = sample.base_rtt_ns + (self.config.queue_ns as f32 * scaling.max(1.0)) as u64;
            self.above = rtt > target;
            if self.above {
                let share = kept_share(rtt, target, self.config.beta, self.config.max_decrease);
                self.decrease(now_ns, sample.smoothed_rtt_ns, share);
            } else if rtt > sample.base_rtt_ns + self.config.queue_ns / 2 {
                self.starting = false;
            }
        }
        if !self.above && sample.window_limited {
            let bytes = sample.bytes as f32;
            let grown = grown(self.window, self.config.additive as f32, bytes);
            self.window = if self.starting { self.window + bytes } else { grown };
            self.clamp();
        }
    }

    fn on_loss(&mut self, now_ns: u64, rate: f32, rtt_ns: u64) {
        if self.above || rate > self.config.heavy_loss {
            self.decrease(now_ns, rtt_ns, 1.0 - self.config.max_decrease);
        }
    }

    fn on_timeout(&mut self, now_ns: u64) {
        self.timeouts = self.timeouts.saturating_add(1);
        // One timeout may be a lost tail; several are not.
        if self.timeouts >= 3 {
            self.decrease(now_ns, 0, 0.0);
        }
    }

    fn window(&self) -> u32 {
        self.window as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(rtt_ns: u64) -> Sample {
        Sample {
            bytes: 64 * 1024,
            rtt_ns: Some(rtt_ns),
            base_rtt_ns: 50_000,
            smoothed_rtt_ns: rtt_ns,
            window_limited: true,
        }
    }

    #[test]
    fn starts_fast_and_then_grows_slowly() {
        let mut swift = Swift::new(SwiftConfig::new(50_000));
        swift.on_ack(0, &sample(50_000));
        assert_eq!(swift.window(), 192 * 1024);
        swift.on_ack(1, &sample(80_000));
        let before = swift.window();
        // A window of acknowledgements adds one additive increase.
        for n in 0..before / (64 * 1024) {
            swift.on_ack(2 + u64::from(n), &sample(60_000));
        }
        assert!((7500..=8300).contains(&(swift.window() - before)), "{}", swift.window() - before);
    }

    #[test]
    fn shrinks_once_per_round_trip_and_not_below_its_minimum() {
        let mut swift = Swift::new(SwiftConfig::new(50_000));
        swift.on_ack(1_000_000, &sample(1_000_000));
        assert_eq!(swift.window(), 64 * 1024);
        swift.on_ack(1_500_000, &sample(1_000_000));
        assert_eq!(swift.window(), 64 * 1024);
        for n in 3..30 {
            swift.on_ack(n * 1_000_000, &sample(1_000_000));
        }
        assert_eq!(swift.window(), 1024);
    }

    #[test]
    fn losses_without_a_queue_cost_nothing() {
        let mut swift = Swift::new(SwiftConfig::new(50_000));
        swift.on_ack(0, &sample(50_000));
        let before = swift.window();
        swift.on_loss(10_000_000, 1.0 / 256.0, 50_000);
        swift.on_timeout(20_000_000);
        assert_eq!(swift.window(), before);
        swift.on_loss(30_000_000, 0.2, 50_000);
        assert_eq!(swift.window(), before / 2, "one in five is congestion");
        swift.on_ack(40_000_000, &sample(500_000));
        let queued = swift.window();
        swift.on_loss(50_000_000, 0.001, 50_000);
        assert_eq!(swift.window(), queued / 2, "so is a loss with a queue");
    }
}
