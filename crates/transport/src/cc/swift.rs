//! Swift (SIGCOMM'20): the window follows delay, split into fabric and endpoint. Marks count as in DCTCP (RFC 8257).
//!
//! Departures for software hosts and for links that lose packets:
//!
//! - The base target is the smallest delay seen on the path plus a margin that grows with it ([`SwiftConfig::margin_ns`]).
//! - What is compared with the target is the delay that stands for a round trip, not that of one packet, which a host may
//!   have held up.
//! - A loss is congestion only while a queue stands; on a lossy link without one (the very case BIFROST is for) nothing is
//!   cut. The cut is no larger than what the queue asks for, and is taken back if the packet turns out to have been late.
//! - Marks alone do not close a path on which no queue is measured.
//! - A path starts with a small window that doubles each round trip until the first sign of a queue, and does so again after
//!   some round trips without one.
//!
//! The smallest delay is believed for ten seconds, and a way may become longer sooner. A sender that has sent with its
//! smallest window for a while, and measures no less for it, has learnt that the delay is not its own queue's: the smallest
//! delay of that time is the base from then on.

use std::sync::Arc;

use super::window::{grown, kept_share};
use super::{AckSample, CongestionControl, Loss, PACE_MAX_NS};
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
    /// Largest margin, which is added to the smallest delay seen to give the base target.
    pub noise_ns: u64,
    /// Added per hop.
    pub per_hop_ns: u64,
    /// Flow scaling is full at or below this window: it then adds the margin once more (NSDI'26, appendix D).
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
    /// The window doubles each round trip until the first sign of a queue, and again once none has been seen for a while.
    pub doubles: bool,
    /// A path that loses more than this share of its packets is congested whatever its delay; 1: never.
    pub heavy_loss: f32,
    /// RTOs in a row from which the window falls to one packet.
    pub timeout_threshold: u8,
}

impl SwiftConfig {
    /// Constants for a window of at most `max_window` packets and a margin of at most `noise_ns`; the window does not double.
    pub fn new(initial_window: u16, max_window: u16, noise_ns: u64) -> Self {
        SwiftConfig {
            additive: 1.0,
            beta: 0.8,
            max_decrease: 0.5,
            noise_ns,
            per_hop_ns: 3_000,
            scaling_min_window: 0.1,
            scaling_max_window: 100.0,
            endpoint_target_ns: 4 * noise_ns,
            min_window: 0.01,
            max_window: f32::from(max_window),
            initial_window: f32::from(initial_window),
            doubles: false,
            heavy_loss: 1.0,
            timeout_threshold: 3,
        }
    }

    /// What the target lies above a base delay, ns: four times that, and what hosts lately were late at most, within half of the
    /// largest margin and all of it. A queue of that length bridges their pauses.
    pub fn margin_ns(&self, base_delay_ns: u64, late_ns: u64) -> u64 {
        base_delay_ns.saturating_mul(4).saturating_add(late_ns).clamp(self.noise_ns / 2, self.noise_ns)
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
    /// The longest endpoint delay; forgotten by a 64th with each sample.
    longest_endpoint_ns: u64,
    timeouts: u8,
    above_target: bool,
    /// The window doubles each round trip.
    doubling: bool,
    /// Packets acknowledged since the path was measured.
    unmeasured: u16,
    round: Round,
    /// Share of marked packets: a mean over rounds (DCTCP's alpha).
    marked: f32,
    /// What the window was before the last loss cut it.
    before_loss: Option<f32>,
    /// Learnt with the smallest window, ns: what the way takes at least; 0: nothing.
    longer_way_ns: u64,
    floor: Floor,
    /// Share of the last packets that was lost: a mean over [`LOSS_PACKETS`].
    lost: f32,
}

/// What has been seen since a round trip began.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    since: Time,
    packets: u32,
    marked: u32,
    /// A queue was seen, or the window was not used.
    busy: bool,
    /// Rounds before this one in a row in which that was not so.
    calm: u8,
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

/// Rounds without a sign of a queue after which the window doubles again.
const CALM_ROUNDS: u8 = 8;

/// Endpoint delays up to this are no reason for a longer queue, ns.
const ON_TIME_NS: u64 = 50_000;

/// Round trips after which a cut is not taken back any more.
const UNDO_ROUNDS: u64 = 4;

/// Weight of a round in the share of marked packets (RFC 8257, 4.2).
const MARKED_WEIGHT: f32 = 1.0 / 16.0;

impl Swift {
    /// A controller at its initial window.
    pub fn new(config: impl Into<Arc<SwiftConfig>>) -> Self {
        let config = config.into();
        Swift {
            fabric: config.initial_window,
            endpoint: config.initial_window,
            last_fabric_decrease: Time(0),
            last_endpoint_decrease: Time(0),
            smoothed_endpoint_ns: 0,
            longest_endpoint_ns: 0,
            timeouts: 0,
            above_target: false,
            doubling: config.doubles,
            unmeasured: 0,
            round: Round::default(),
            marked: 1.0,
            before_loss: None,
            longer_way_ns: 0,
            floor: Floor::default(),
            lost: 0.0,
            config,
        }
    }

    /// The fabric delay that Swift steers to, ns.
    pub fn fabric_target_ns(&self, base_delay_ns: u64, hops: u8) -> u64 {
        self.target_ns(base_delay_ns, self.margin_ns(base_delay_ns), hops)
    }

    fn target_ns(&self, base_delay_ns: u64, margin: u64, hops: u8) -> u64 {
        let c = &self.config;
        let range = margin as f32;
        let alpha = range / (1.0 / c.scaling_min_window.sqrt() - 1.0 / c.scaling_max_window.sqrt());
        let beta = -alpha / c.scaling_max_window.sqrt();
        let scaling = (alpha / self.fabric.max(1e-3).sqrt() + beta).clamp(0.0, range);
        base_delay_ns + margin + u64::from(hops) * c.per_hop_ns + scaling as u64
    }

    fn margin_ns(&self, base_delay_ns: u64) -> u64 {
        self.config.margin_ns(base_delay_ns, self.longest_endpoint_ns.saturating_sub(ON_TIME_NS))
    }

    fn decrease(&self, window: f32, delay_ns: u64, target_ns: u64) -> f32 {
        window * kept_share(delay_ns, target_ns, self.config.beta, self.config.max_decrease)
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

    /// Whether the window may be cut: at most once in a round trip.
    fn may_cut(&self, now: Time, rtt_ns: u64) -> bool {
        now.since(self.last_fabric_decrease) >= rtt_ns
    }

    /// Cuts the window to `share` of it, and stops doubling.
    fn cut(&mut self, now: Time, share: f32) {
        self.last_fabric_decrease = now;
        self.fabric *= share;
        self.end_doubling();
        self.clamp();
    }

    /// Whether the window is used, that is, at least half of it was in flight (RFC 7661).
    fn is_used(&self, sample: &AckSample) -> bool {
        sample.in_flight as f32 >= self.window() / 2.0
    }

    /// Packets were acknowledged while the window was used.
    fn grow(&mut self, sample: &AckSample) {
        // What no measurement vouches for is no reason to double.
        self.unmeasured = self.unmeasured.saturating_add(sample.packets);
        if self.doubling && sample.fabric_delay_ns.is_some() {
            self.fabric += f32::from(self.unmeasured);
        } else if !self.above_target {
            self.fabric = grown(self.fabric, self.config.additive, f32::from(sample.packets));
        }
        if sample.fabric_delay_ns.is_some() {
            self.unmeasured = 0;
        }
        if self.smoothed_endpoint_ns < self.config.endpoint_target_ns {
            self.endpoint = grown(self.endpoint, self.config.additive, f32::from(sample.packets));
            if self.config.doubles {
                self.endpoint = self.endpoint.max(self.fabric);
            }
        }
    }

    fn end_doubling(&mut self) {
        self.doubling = false;
        self.round.busy = true;
        self.round.calm = 0;
    }

    /// Counts what an ACK says, and acts on a round trip that has ended: on marks in it, or on round trips without a queue.
    fn on_round(&mut self, now: Time, sample: &AckSample, queue_ns: u64, margin: u64) {
        let marked = sample.marked_packets.min(sample.packets);
        self.round.packets += u32::from(sample.packets);
        self.round.marked += u32::from(marked);
        self.round.busy |= marked > 0 || queue_ns >= margin / 2 || !self.is_used(sample);
        if marked > 0 {
            self.doubling = false;
        }
        if now.since(self.round.since) < sample.rtt_ns {
            return;
        }
        let ended = std::mem::take(&mut self.round);
        self.round.since = now;
        self.round.calm = if ended.busy { 0 } else { ended.calm.saturating_add(1) };
        self.doubling |= self.config.doubles && self.round.calm >= CALM_ROUNDS;
        if now.since(self.last_fabric_decrease) > UNDO_ROUNDS * sample.rtt_ns {
            self.before_loss = None;
        }
        let share = ended.marked as f32 / ended.packets.max(1) as f32;
        self.marked += (share - self.marked) * MARKED_WEIGHT;
        if ended.marked > 0 && self.may_cut(now, sample.rtt_ns) {
            let before = self.fabric;
            self.cut(now, 1.0 - self.marked / 2.0);
            // Marks on a path without a queue are believed down to one packet.
            if queue_ns < margin / 4 {
                self.fabric = self.fabric.max(before.min(1.0));
            }
        }
    }
}

impl CongestionControl for Swift {
    fn on_ack(&mut self, now: Time, sample: &AckSample) {
        self.timeouts = 0;
        if self.lost > 0.0 {
            self.lost -= self.lost * (f32::from(sample.packets) / LOSS_PACKETS).min(1.0);
        }
        let mut queue_ns = 0;
        let mut margin = u64::MAX;
        if let Some(latest) = sample.fabric_delay_ns {
            let delay = sample.standing_delay_ns;
            self.longer_way_ns = self.longer_way_ns.min(delay);
            let base = sample.base_delay_ns.max(self.longer_way_ns);
            margin = self.margin_ns(base);
            // The target is at least this; the rest of it is not worth its price for each ACK.
            let target = match delay >= base + margin {
                true => self.target_ns(base, margin, sample.hops),
                false => u64::MAX,
            };
            self.above_target = delay >= target;
            self.on_floor(now, delay, sample.rtt_ns);
            queue_ns = delay.saturating_sub(base);
            // While the window doubles, a round trip is too long to wait for certainty.
            if self.doubling && latest.saturating_sub(base) >= margin / 2 {
                self.end_doubling();
            }
            if self.above_target && self.may_cut(now, sample.rtt_ns) {
                self.last_fabric_decrease = now;
                self.before_loss = None;
                self.fabric = self.decrease(self.fabric, delay, target);
                self.end_doubling();
            }
        }
        self.on_round(now, sample, queue_ns, margin);
        if let Some(delay) = sample.endpoint_delay_ns {
            self.smoothed_endpoint_ns =
                if self.smoothed_endpoint_ns == 0 { delay } else { (7 * self.smoothed_endpoint_ns + delay) / 8 };
            self.longest_endpoint_ns = delay.max(self.longest_endpoint_ns - self.longest_endpoint_ns / 64);
            let target = self.config.endpoint_target_ns;
            if self.smoothed_endpoint_ns >= target && now.since(self.last_endpoint_decrease) >= sample.rtt_ns {
                self.last_endpoint_decrease = now;
                self.endpoint = self.decrease(self.endpoint, self.smoothed_endpoint_ns, target);
            }
        }
        // An unused window says nothing about the path: it must not grow.
        if self.is_used(sample) {
            self.grow(sample);
        }
        self.clamp();
    }

    fn on_loss(&mut self, now: Time, loss: &Loss) {
        self.lost += (1.0 - self.lost) / LOSS_PACKETS;
        let heavy = self.lost > self.config.heavy_loss;
        // What left before the last cut does not know of it.
        let news = self.last_fabric_decrease < loss.sent || self.last_fabric_decrease == Time(0);
        if !(loss.congestion || self.above_target || heavy) || !news || !self.may_cut(now, loss.rtt_ns) {
            return;
        }
        let delay = (loss.base_delay_ns + loss.queue_ns).max(1);
        let excess = if heavy { 1.0 } else { loss.queue_ns as f32 / delay as f32 };
        self.before_loss = Some(self.fabric);
        self.cut(now, (1.0 - self.config.beta * excess).max(1.0 - self.config.max_decrease));
    }

    fn on_spurious(&mut self, _now: Time) {
        if let Some(before) = self.before_loss.take() {
            self.fabric = self.fabric.max(before);
            self.clamp();
        }
    }

    fn on_timeout(&mut self, now: Time, rtt_ns: u64) {
        self.timeouts = self.timeouts.saturating_add(1);
        if !self.above_target {
            return;
        }
        if self.timeouts >= self.config.timeout_threshold {
            self.fabric = self.fabric.min(1.0);
            self.end_doubling();
        } else if self.may_cut(now, rtt_ns) {
            self.cut(now, 1.0 - self.config.max_decrease);
        }
    }

    fn restart(&mut self) {
        *self = Swift::new(Arc::clone(&self.config));
    }

    /// Half of the window: nothing is in flight, so all of it would leave at once. It doubles until there is a queue.
    fn resume(&mut self, window: f32) {
        let c = &self.config;
        let window = if window > 2.0 * c.initial_window { window / 2.0 } else { window.min(c.initial_window) };
        self.fabric = window.clamp(c.min_window, c.max_window);
        self.endpoint = self.fabric;
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
            standing_delay_ns: delay_ns,
            endpoint_delay_ns: Some(10 * US),
            base_delay_ns: 50 * US,
            rtt_ns: 100 * US,
            hops: 2,
            in_flight: u32::MAX,
        }
    }

    /// A loss on a path without a queue, of what left just now.
    fn damage(now_ns: u64) -> Loss {
        let (rtt_ns, base_delay_ns) = (100 * US, 50 * US);
        Loss { sent: Time(now_ns), rtt_ns, base_delay_ns, queue_ns: 0, congestion: false }
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
        s.on_ack(Time(MS), &AckSample { in_flight: 63, ..sample(60 * US) });
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

    /// Feeds `count` samples: one per round trip, or fewer if the window is below one packet.
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
                    s.on_loss(Time(i * MS), &damage(i * MS));
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
        s.on_loss(Time(2 * MS), &damage(2 * MS));
        s.on_timeout(Time(3 * MS), 100 * US);
        assert_eq!(s.window(), before);
        s.on_ack(Time(10 * MS), &sample(10 * MS));
        let congested = s.window();
        s.on_loss(Time(20 * MS), &Loss { queue_ns: 9 * MS, congestion: true, ..damage(20 * MS) });
        assert_eq!(s.window(), congested / 2.0);
    }

    #[test]
    fn a_queue_s_loss_cuts_what_the_queue_asks_for_and_is_taken_back_if_the_packet_was_late() {
        let mut s = swift();
        let before = s.window();
        let loss = |ms: u64, queue_ns| Loss { base_delay_ns: 900 * US, queue_ns, congestion: true, ..damage(ms * MS) };
        s.on_loss(Time(2 * MS), &loss(2, 100 * US));
        assert!((s.window() / before - 0.92).abs() < 0.001, "{}", s.window());
        s.on_spurious(Time(2 * MS));
        assert_eq!(s.window(), before);
        s.on_loss(Time(4 * MS), &loss(4, 9 * MS));
        assert_eq!(s.window(), before / 2.0);
        // It left before the cut, and does not know of it.
        s.on_loss(Time(6 * MS), &Loss { sent: Time(3 * MS), ..loss(6, 9 * MS) });
        assert_eq!(s.window(), before / 2.0);
    }

    #[test]
    fn marks_cut_by_their_share_and_close_no_path_without_a_queue() {
        let mut s = swift();
        let marks = |s: &mut Swift, rounds: u64, marked: u16, delay_ns| {
            let from = s.round.since.0;
            for i in 1..=rounds {
                let packets = s.window().max(1.0) as u16;
                let marked_packets = (packets * marked).div_ceil(10);
                let sample = AckSample { packets, marked_packets, ..sample(delay_ns) };
                s.on_ack(Time(from + i * MS), &sample);
            }
        };
        marks(&mut s, 100, 1, 60 * US);
        // Where a tenth is marked, a twentieth is cut each round trip, of about as much as it grows.
        assert!((3.0..30.0).contains(&s.window()), "{}", s.window());
        marks(&mut s, 500, 10, 60 * US);
        assert!((1.0..5.0).contains(&s.window()), "{}: a queue is not measured", s.window());
        marks(&mut s, 10, 10, 500 * US);
        assert!(s.window() < 1.0, "{}: it is", s.window());
    }

    #[test]
    fn a_window_doubles_until_a_queue_shows_and_again_when_none_has_for_a_while() {
        let config = SwiftConfig { doubles: true, ..SwiftConfig::new(10, 4096, MS) };
        let mut s = Swift::new(config);
        let mut now = Time(0);
        let mut round = |s: &mut Swift, delay_ns| {
            now = now.after(100 * US);
            s.on_ack(now, &AckSample { packets: s.window() as u16, ..sample(delay_ns) });
        };
        (0..3).for_each(|_| round(&mut s, 60 * US));
        assert_eq!(s.window(), 80.0);
        round(&mut s, 400 * US);
        assert!(s.window() < 82.0, "{}", s.window());
        (0..CALM_ROUNDS).for_each(|_| round(&mut s, 60 * US));
        let before = s.window();
        (0..3).for_each(|_| round(&mut s, 60 * US));
        assert!(s.window() > 4.0 * before, "{before}, {}", s.window());
    }

    #[test]
    fn the_target_gives_small_windows_more_room() {
        let mut s = swift();
        let large = s.fabric_target_ns(50 * US, 0);
        s.fabric = 1.0;
        assert!(s.fabric_target_ns(50 * US, 0) > large);
        s.fabric = 0.01;
        assert_eq!(s.fabric_target_ns(50 * US, 0), 50 * US + 2 * (MS / 10));
        // And longer paths more than short ones, within bounds.
        let margins = [10 * US, 200 * US, 10 * MS].map(|base| SwiftConfig::new(1, 1, MS).margin_ns(base, 0));
        assert_eq!(margins, [500 * US, 800 * US, MS]);
    }
}
