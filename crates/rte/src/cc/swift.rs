//! Swift (SIGCOMM'20): the window follows delay, split into fabric and endpoint.
//!
//! Two departures for software hosts. The base target is not a constant but the smallest delay seen on the path plus an
//! allowance for scheduling noise, since a fixed target of tens of microseconds would strangle a host whose RTT is that
//! of its scheduler. And a loss by itself halves nothing as long as delay is below target: on lossy links without queues
//! (the very case BIFROST is for) a loss is not congestion; the target decides.
//!
//! The smallest delay is believed for ten seconds, and a way may become longer sooner. A sender that has sent with its
//! smallest window for a while, and measures no less for it, has learnt that the delay is not its own queue's: the smallest
//! delay of that time is the base from then on.

use std::sync::Arc;

use super::{AckSample, CongestionControl};
use crate::path::PACE_MAX_NS;
use crate::time::Time;

/// Constants of Swift. Delays in nanoseconds, windows in packets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SwiftConfig {
    /// Additive increase per RTT, packets.
    pub additive: f32,
    /// Multiplicative decrease factor.
    pub beta: f32,
    /// Largest decrease at once.
    pub max_decrease: f32,
    /// Added to the smallest delay seen to give the base target.
    pub noise_ns: u64,
    /// Added per hop.
    pub per_hop_ns: u64,
    /// Range of flow scaling.
    pub scaling_range_ns: u64,
    /// Flow scaling is full at or below this window.
    pub scaling_min_window: f32,
    /// Flow scaling is zero at or above this window.
    pub scaling_max_window: f32,
    /// Endpoint target.
    pub endpoint_target_ns: u64,
    /// Bounds of the window.
    pub min_window: f32,
    /// Upper bound of the window.
    pub max_window: f32,
    /// First window.
    pub initial_window: f32,
    /// A path that loses more than this share of its packets is congested whatever its delay; 1: never. Queues that are full
    /// before the target is reached can be told from bad links by that alone.
    pub heavy_loss: f32,
    /// RTOs in a row from which the window falls to the minimum.
    pub timeout_threshold: u8,
}

impl SwiftConfig {
    /// Constants for a window of at most `max_window` packets and hosts with `noise_ns` of scheduling noise.
    pub fn new(initial_window: u16, max_window: u16, noise_ns: u64) -> Self {
        SwiftConfig {
            additive: 1.0,
            beta: 0.8,
            max_decrease: 0.5,
            noise_ns,
            per_hop_ns: 3_000,
            scaling_range_ns: noise_ns,
            scaling_min_window: 0.1,
            scaling_max_window: 100.0,
            endpoint_target_ns: 4 * noise_ns,
            min_window: 0.01,
            max_window: f32::from(max_window),
            initial_window: f32::from(initial_window),
            heavy_loss: 1.0,
            timeout_threshold: 3,
        }
    }
}

/// Swift's state for one path.
#[derive(Clone, Debug)]
pub struct Swift {
    /// Shared by all paths of a peer.
    config: Arc<SwiftConfig>,
    fabric: f32,
    endpoint: f32,
    last_fabric_decrease: Time,
    last_endpoint_decrease: Time,
    smoothed_endpoint_ns: u64,
    timeouts: u8,
    above_target: bool,
    /// Learnt with the smallest window, ns: what the way takes at least; 0: nothing.
    longer_way_ns: u64,
    floor: Floor,
    /// Share of the last packets that was lost: a mean over [`LOSS_PACKETS`].
    lost: f32,
}

/// The time for which the window has been the smallest, and no sample below the target.
#[derive(Clone, Copy, Debug, Default)]
struct Floor {
    /// Its begin, or the last of the samples.
    since: Time,
    /// Of packets that were sent with the smallest window.
    samples: u8,
    /// The smallest of these.
    least_ns: u64,
}

/// Samples with the smallest window that say how long the way is.
const FLOOR_SAMPLES: u8 = 4;

/// Packets over which the share of lost ones is averaged.
const LOSS_PACKETS: f32 = 64.0;

impl Swift {
    /// A controller at its initial window.
    pub fn new(config: impl Into<Arc<SwiftConfig>>) -> Self {
        let config = config.into();
        Swift {
            fabric: config.initial_window,
            endpoint: config.initial_window,
            config,
            last_fabric_decrease: Time(0),
            last_endpoint_decrease: Time(0),
            smoothed_endpoint_ns: 0,
            timeouts: 0,
            above_target: false,
            longer_way_ns: 0,
            floor: Floor::default(),
            lost: 0.0,
        }
    }

    /// The fabric delay that Swift steers to, ns.
    pub fn fabric_target_ns(&self, base_delay_ns: u64, hops: u8) -> u64 {
        let c = &self.config;
        let range = c.scaling_range_ns as f32;
        let alpha = range / (1.0 / c.scaling_min_window.sqrt() - 1.0 / c.scaling_max_window.sqrt());
        let beta = -alpha / c.scaling_max_window.sqrt();
        let scaling = (alpha / self.fabric.max(1e-3).sqrt() + beta).clamp(0.0, range);
        base_delay_ns + c.noise_ns + u64::from(hops) * c.per_hop_ns + scaling as u64
    }

    fn increase(window: f32, additive: f32, packets: u16) -> f32 {
        let n = f32::from(packets);
        if window >= 1.0 { window + additive * n / window } else { window + additive * n }
    }

    fn decrease(&self, window: f32, delay_ns: u64, target_ns: u64) -> f32 {
        let excess = delay_ns.saturating_sub(target_ns) as f32 / delay_ns.max(1) as f32;
        window * (1.0 - self.config.beta * excess).max(1.0 - self.config.max_decrease)
    }

    fn clamp(&mut self) {
        self.fabric = self.fabric.clamp(self.config.min_window, self.config.max_window);
        self.endpoint = self.endpoint.clamp(self.config.min_window, self.config.max_window);
    }

    /// A sample that is above the target, or not.
    fn on_floor(&mut self, now: Time, delay_ns: u64, rtt_ns: u64) {
        if !self.above_target || self.fabric > self.config.min_window {
            self.floor = Floor { since: now, samples: 0, least_ns: u64::MAX };
        } else if now.since(self.floor.since) >= self.floor_pace_ns(rtt_ns) / 2 {
            // What comes faster than the smallest window has packets sent, was sent with a larger one.
            self.floor.since = now;
            self.floor.samples += 1;
            self.floor.least_ns = self.floor.least_ns.min(delay_ns);
            if self.floor.samples >= FLOOR_SAMPLES {
                self.longer_way_ns = self.floor.least_ns;
                self.floor.samples = 0;
            }
        }
    }

    /// From one packet to the next with the smallest window.
    fn floor_pace_ns(&self, rtt_ns: u64) -> u64 {
        ((rtt_ns as f32 / self.config.min_window.min(1.0)) as u64).min(PACE_MAX_NS)
    }

    fn cut(&mut self, now: Time, rtt_ns: u64) {
        if now.since(self.last_fabric_decrease) >= rtt_ns {
            self.last_fabric_decrease = now;
            self.fabric *= 1.0 - self.config.max_decrease;
            self.clamp();
        }
    }
}

impl CongestionControl for Swift {
    fn on_ack(&mut self, now: Time, sample: &AckSample) {
        self.timeouts = 0;
        if self.lost > 0.0 {
            self.lost -= self.lost * (f32::from(sample.packets) / LOSS_PACKETS).min(1.0);
        }
        if let Some(delay) = sample.fabric_delay_ns {
            self.longer_way_ns = self.longer_way_ns.min(delay);
            let target = self.fabric_target_ns(sample.base_delay_ns.max(self.longer_way_ns), sample.hops);
            self.above_target = delay >= target;
            self.on_floor(now, delay, sample.rtt_ns);
            if self.above_target && now.since(self.last_fabric_decrease) >= sample.rtt_ns {
                self.last_fabric_decrease = now;
                self.fabric = self.decrease(self.fabric, delay, target);
            }
        }
        if let Some(delay) = sample.endpoint_delay_ns {
            self.smoothed_endpoint_ns =
                if self.smoothed_endpoint_ns == 0 { delay } else { (7 * self.smoothed_endpoint_ns + delay) / 8 };
            let target = self.config.endpoint_target_ns;
            if self.smoothed_endpoint_ns >= target && now.since(self.last_endpoint_decrease) >= sample.rtt_ns {
                self.last_endpoint_decrease = now;
                self.endpoint = self.decrease(self.endpoint, self.smoothed_endpoint_ns, target);
            }
        }
        // An unused window says nothing about the path: it must not grow.
        if sample.window_limited {
            if !self.above_target {
                self.fabric = Self::increase(self.fabric, self.config.additive, sample.packets);
            }
            if self.smoothed_endpoint_ns < self.config.endpoint_target_ns {
                self.endpoint = Self::increase(self.endpoint, self.config.additive, sample.packets);
            }
        }
        self.clamp();
    }

    fn on_loss(&mut self, now: Time, rtt_ns: u64) {
        self.lost += (1.0 - self.lost) / LOSS_PACKETS;
        if self.above_target || self.lost > self.config.heavy_loss {
            self.cut(now, rtt_ns);
        }
    }

    fn on_timeout(&mut self, now: Time, rtt_ns: u64) {
        self.timeouts = self.timeouts.saturating_add(1);
        if self.timeouts >= self.config.timeout_threshold && self.above_target {
            self.fabric = self.config.min_window;
            self.clamp();
        } else if self.above_target {
            self.cut(now, rtt_ns);
        }
    }

    fn window(&self) -> f32 {
        self.fabric.min(self.endpoint)
    }

    fn wire_type(&self) -> u8 {
        bifrost_wire::bifrost::cc::SWIFT
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::{MS, US};

    fn sample(delay_ns: u64) -> AckSample {
        AckSample {
            packets: 10,
            marked_packets: 0,
            fabric_delay_ns: Some(delay_ns),
            endpoint_delay_ns: Some(10 * US),
            base_delay_ns: 50 * US,
            rtt_ns: 100 * US,
            hops: 2,
            window_limited: true,
        }
    }

    fn swift() -> Swift {
        Swift::new(SwiftConfig::new(128, 4096, MS / 10))
    }

    #[test]
    fn grows_below_target_by_one_packet_a_window() {
        let mut s = swift();
        for i in 0..13 {
            s.on_ack(Time(i * 100 * US), &sample(60 * US));
        }
        assert!((s.window() - 129.0).abs() < 0.1, "{}", s.window());
    }

    #[test]
    fn an_unused_window_does_not_grow() {
        let mut s = swift();
        s.on_ack(Time(MS), &AckSample { window_limited: false, ..sample(60 * US) });
        assert_eq!(s.window(), 128.0);
    }

    #[test]
    fn shrinks_above_target_once_an_rtt() {
        let mut s = swift();
        let now = Time(10 * MS);
        s.on_ack(now, &sample(10 * MS));
        assert_eq!(s.window(), 64.0, "the largest decrease is one half");
        s.on_ack(now.after(50 * US), &sample(10 * MS));
        assert_eq!(s.window(), 64.0, "not twice within an RTT");
        s.on_ack(now.after(150 * US), &sample(10 * MS));
        assert_eq!(s.window(), 32.0);
    }

    /// So many samples, one a round trip or as the window's pace has it.
    fn samples(s: &mut Swift, now: &mut Time, count: u32, mut delay_ns: impl FnMut(u32) -> u64) {
        for i in 0..count {
            let delay_ns = delay_ns(i);
            *now = now.after(((delay_ns as f32 / s.window().min(1.0)) as u64).min(100 * MS));
            s.on_ack(*now, &AckSample { packets: s.window().max(1.0) as u16, rtt_ns: delay_ns, ..sample(delay_ns) });
        }
    }

    #[test]
    fn a_way_that_becomes_longer_is_found_out() {
        let (mut s, mut now) = (swift(), Time(0));
        samples(&mut s, &mut now, 10, |_| 60 * US);
        let changed = now;
        let mut closed_for = None;
        for _ in 0..100 {
            samples(&mut s, &mut now, 1, |_| 5 * MS);
            if s.window() >= 10.0 && now.since(changed) > 200 * MS {
                closed_for = closed_for.or(Some(now.since(changed) / MS));
            }
        }
        // Though the smallest delay that is reported is still the old one.
        assert!(closed_for.is_some_and(|ms| ms < 1500), "{closed_for:?} ms");
        assert!(s.window() > 10.0, "{}", s.window());
        // A queue on that way is one as before, and so it is when the way is short again.
        samples(&mut s, &mut now, 3, |_| 8 * MS);
        assert!(s.above_target);
        samples(&mut s, &mut now, 1, |_| 60 * US);
        samples(&mut s, &mut now, 1, |_| 5 * MS);
        assert!(s.above_target);
    }

    #[test]
    fn a_queue_that_many_share_is_no_longer_way() {
        let (mut s, mut now) = (swift(), Time(0));
        // At the floor, half of the time below the target.
        samples(&mut s, &mut now, 1000, |i| if i % 3 == 0 { 60 * US } else { 20 * MS });
        assert_eq!(s.longer_way_ns, 0);
    }

    #[test]
    fn what_was_sent_with_a_larger_window_says_nothing_about_the_way() {
        let mut s = swift();
        s.on_ack(Time(0), &sample(60 * US));
        // A queue that is built up at once is drained for twenty milliseconds, and acknowledged all the while.
        for i in 1..400 {
            s.on_ack(Time(i * 50 * US), &sample(2 * MS));
        }
        assert_eq!((s.window(), s.longer_way_ns), (0.01, 0));
    }

    #[test]
    fn heavy_loss_is_congestion_where_that_is_wanted() {
        // One packet in `every` is lost, below the target.
        let window = |heavy_loss: f32, every: u64| {
            let mut s = Swift::new(SwiftConfig { heavy_loss, ..SwiftConfig::new(128, 4096, MS / 10) });
            for i in 1..=200 {
                s.on_ack(Time(i * MS), &AckSample { packets: 1, ..sample(60 * US) });
                if i % every == 0 {
                    s.on_loss(Time(i * MS), 100 * US);
                }
            }
            s.window()
        };
        assert!(window(0.1, 30) > 128.0, "3 % is a bad link");
        assert!(window(0.1, 5) < 8.0, "20 % is a full queue");
        assert!(window(1.0, 5) > 128.0);
    }

    #[test]
    fn random_loss_without_delay_costs_nothing() {
        let mut s = swift();
        s.on_ack(Time(MS), &sample(60 * US));
        let before = s.window();
        s.on_loss(Time(2 * MS), 100 * US);
        s.on_timeout(Time(3 * MS), 100 * US);
        assert_eq!(s.window(), before);
        s.on_ack(Time(10 * MS), &sample(10 * MS));
        let congested = s.window();
        s.on_loss(Time(20 * MS), 100 * US);
        assert_eq!(s.window(), congested / 2.0);
    }

    #[test]
    fn the_target_gives_small_windows_more_room() {
        let mut s = swift();
        let large = s.fabric_target_ns(50 * US, 0);
        s.fabric = 1.0;
        assert!(s.fabric_target_ns(50 * US, 0) > large);
        s.fabric = 0.01;
        assert_eq!(s.fabric_target_ns(50 * US, 0), 50 * US + 2 * (MS / 10));
    }
}
