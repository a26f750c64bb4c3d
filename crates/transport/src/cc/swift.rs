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
    /// Where a queue was full lately, and its delay is not below a quarter of that now, windows below this grow by an eighth of themselves
    /// in a round trip if it is 8, and so on, so that many small ones together grow no faster than large ones do. 1 is the paper's.
    pub gentle_window: f32,
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
            gentle_window: 1.0,
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
    /// Share of the last packets that was lost: a mean over [`LOSS_PACKETS`], at first over fewer.
    lost: f32,
    /// Over how many.
    judged: f32,
    /// The longest delay at which all paths lost much, ns, and when the last of them did; 0: not lately.
    full_ns: u64,
    full_at: Time,
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

/// Packets over which the share of lost ones is averaged, and how many a new path is granted that were not lost: it is judged
/// within its first window, and not by its first loss.
const LOSS_PACKETS: f32 = 32.0;
const GRANTED_PACKETS: f32 = 8.0;

/// What is left of a window when all paths lose much.
const OVERFLOW_KEEPS: f32 = 0.25;

/// Rounds without a sign of a queue after which the window doubles again.
const CALM_ROUNDS: u8 = 8;

/// How long it is remembered at which delay a queue was full, ns.
const FULL_NS: u64 = 1_000_000_000;

/// The queue that is kept up at least, ns, however short a full one is.
const LEAST_QUEUE_NS: u64 = 30_000;

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
            judged: GRANTED_PACKETS,
            full_ns: 0,
            full_at: Time(0),
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

    /// A packet is known to be delivered or lost.
    fn judge(&mut self, packets: f32) {
        self.judged = (self.judged + packets).min(LOSS_PACKETS);
    }

    /// Packets were delivered: the share of lost ones falls.
    #[inline(never)]
    fn on_delivered(&mut self, packets: f32) {
        self.judge(packets);
        self.lost -= self.lost * (packets / self.judged).min(1.0);
    }

    /// What is shared by all paths has no room: the window falls to a packet, and to a quarter of what it is each time that this is too
    /// much. The queue is full at the delay of now.
    fn overflow(&mut self, now: Time, loss: &Loss) {
        self.full_ns = self.full_ns.max(loss.base_delay_ns + loss.queue_ns);
        self.full_at = now;
        // What left before the last cut does not know of it.
        if self.last_fabric_decrease < loss.sent {
            self.last_fabric_decrease = now;
            self.before_loss = Some(self.before_loss.unwrap_or(0.0).max(self.fabric));
            self.fabric = (self.fabric * OVERFLOW_KEEPS).min(1.0);
            self.end_doubling();
            self.clamp();
        }
    }

    /// Half way from a base delay to that of the full queue, ns, if one was full lately. A sender that has never seen the queue
    /// empty would take most of it for the way.
    fn below_full_ns(&self, base_delay_ns: u64) -> u64 {
        match self.full_ns {
            0 => u64::MAX,
            full => base_delay_ns + (full.saturating_sub(base_delay_ns) / 2).max(LEAST_QUEUE_NS),
        }
    }

    /// What is left of a window above the target: the less the nearer the delay is to that of a full queue, if one was full lately.
    fn kept_below_full(&self, delay_ns: u64, target_ns: u64) -> f32 {
        match self.full_ns.checked_sub(target_ns) {
            None | Some(0) => 1.0,
            Some(way) => 1.0 - self.config.max_decrease * (((delay_ns - target_ns) as f32 / way as f32).min(1.0)),
        }
    }

    /// Windows below this grow gently.
    fn gentle_window(&self, sample: &AckSample) -> f32 {
        let is_full = self.full_ns > 0 && sample.standing_delay_ns >= self.full_ns / 4;
        if is_full { self.config.gentle_window } else { 1.0 }
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
            let packets = f32::from(sample.packets);
            self.fabric += self.config.additive * packets / self.fabric.max(self.gentle_window(sample));
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
        if self.full_ns > 0 && now.since(self.full_at) > FULL_NS {
            self.full_ns = 0;
        }
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
        // As a rule nothing was lost lately, and there is nothing to average.
        if self.lost > 0.0 || self.judged < LOSS_PACKETS {
            self.on_delivered(f32::from(sample.packets));
        }
        let mut queue_ns = 0;
        let mut margin = u64::MAX;
        if let Some(latest) = sample.fabric_delay_ns {
            let delay = sample.standing_delay_ns;
            self.longer_way_ns = self.longer_way_ns.min(delay);
            let base = sample.base_delay_ns.max(self.longer_way_ns);
            margin = self.margin_ns(base);
            let full = self.below_full_ns(base);
            // The target is at least this; the rest of it is not worth its price for each ACK.
            let target = match delay >= (base + margin).min(full) {
                true => self.target_ns(base, margin, sample.hops).min(full),
                false => u64::MAX,
            };
            self.above_target = delay >= target;
            self.on_floor(now, delay, sample.rtt_ns);
            queue_ns = delay.saturating_sub(base);
            // While the window doubles, a round trip is too long to wait for certainty.
            if self.doubling && latest.saturating_sub(base) >= self.config.noise_ns / 4 {
                self.end_doubling();
            }
            if self.above_target && self.may_cut(now, sample.rtt_ns) {
                self.last_fabric_decrease = now;
                self.before_loss = None;
                self.fabric =
                    self.decrease(self.fabric, delay, target).min(self.fabric * self.kept_below_full(delay, target));
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
        self.judge(1.0);
        self.lost += (1.0 - self.lost) / self.judged;
        if loss.everywhere {
            return self.overflow(now, loss);
        }
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
        // Where packets are merely late, what is counted as lost proves nothing.
        self.lost = 0.0;
        self.full_ns = 0;
        if let Some(before) = self.before_loss.take() {
            self.fabric = self.fabric.max(before);
            self.clamp();
        }
    }

    fn lost(&self) -> f32 {
        self.lost
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
        self.fabric = self.fabric.min(1.0);
    }

    fn window(&self) -> f32 {
        self.fabric.min(self.endpoint)
    }

    fn wire_type(&self) -> u8 {
        bifrost_wire::bifrost::cc::SWIFT
    }
}

#[cfg(test)]
mod tests;
