//! One path to a peer: its delay, its losses, and its state (NSDI'26, 4.1).

mod estimate;

use bifrost_wire::bifrost::Tick;

use bifrost_transport::cc::{AckSample, CongestionControl, Loss, PACE_MAX_NS};
use bifrost_transport::rtt::{Rtt, Standing};
use bifrost_transport::time::{MS, Time, US};

pub use estimate::PathEstimate;

/// Whether a path is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathState {
    /// May carry data.
    Usable,
    /// Lossy or slow; carries only probes until enough of them return.
    Suspect,
}

/// How much a path is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Trust {
    /// Suspect, and the latest probe has not returned.
    Silent,
    /// Suspect, and the latest probe has returned.
    Answers,
    /// Not suspect yet, but the answer to a packet sent on it is overdue.
    Quiet,
    /// In use.
    Usable,
}

/// Consecutive losses, without an arrival between them, that make a path suspect.
const SUSPECT_LOSSES: u16 = 4;
/// Loss rate that makes a path suspect if others do better. The estimate of a path that loses 1 % exceeds 3 % by chance
/// once in about 4,500 packets, and 4 % once in about 74,000.
pub(crate) const SUSPECT_LOSS: f32 = 0.04;
/// Weight of one packet in the loss rate.
const LOSS_WEIGHT: f32 = 1.0 / 128.0;
/// Weight of a lost probe: probes are rare, but a single one proves nothing, so this stays below [`SUSPECT_LOSS`].
const PROBE_LOSS_WEIGHT: f32 = 1.0 / 32.0;
/// A path silent for less time may be due to the peer not being scheduled: software hosts have scheduling noise of this
/// size.
const SILENCE_MIN_NS: u64 = MS;
/// Consecutive probes that make a suspect path usable again, initially and at most.
const CLEAN_PROBES_MIN: u16 = 4;
const CLEAN_PROBES_MAX: u16 = 64;
/// Initial probe interval of a suspect path.
const SUSPECT_PROBE_NS: u64 = 2 * MS;
/// Maximum factor of the probe interval during a long trial: the longest trial takes half a second.
const TRIAL_SLOWDOWN: u64 = 4;
/// After this many unanswered probes in a row the interval doubles, and again after as many more, at most this often:
/// all paths of a host that is gone are probed for a minute.
const UNANSWERED_PROBES: u16 = 8;
const UNANSWERED_DOUBLINGS: u16 = 4;

/// A probe is lost if its answer takes longer than its path's round trips, within these bounds.
const PROBE_TIMEOUT_MIN_NS: u64 = 4 * MS;
const PROBE_TIMEOUT_MAX_NS: u64 = 100 * MS;
/// Before the first answer: a path of 44 ms or less is measured before four probes in a row are lost.
const UNMEASURED_DOUBLINGS: u16 = 2;

/// Half-life of the count of recently sent packets, ns.
const RECENT_NS: u64 = 250 * MS;

/// Minimum delay that a standing queue adds to a path: twice the smallest delay, within these bounds.
const QUEUE_MIN_NS: u64 = 125 * US;
const QUEUE_MAX_NS: u64 = 500 * US;
/// A queue below which a path is not abandoned.
const QUEUE_ACCEPTED_NS: u64 = 4 * MS;

/// What an ACK reports about a path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acked {
    /// Packets that were sent once, on this path.
    pub(crate) packets: u16,
    /// Of these: with a congestion mark.
    pub(crate) marked: u16,
    /// Delay of the network and of the two endpoints, ns, if this path was measured.
    pub(crate) fabric_ns: Option<u64>,
    pub(crate) endpoint_ns: Option<u64>,
    /// Hops to the peer.
    pub(crate) hops: u8,
}

/// State of one path, shared by all connections to the peer.
#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) state: PathState,
    /// Network delay without endpoints, by which paths are compared.
    pub(crate) fabric: Rtt,
    /// The smallest network delay of the last round trip.
    standing: Standing,
    /// The full round trip including the peer's ACK delay, used by timers.
    pub(crate) total: Rtt,
    /// Age of the newest packet that was acknowledged last, ns.
    pub(crate) latest_ns: u64,
    pub(crate) loss: f32,
    pub(crate) in_flight: u32,
    cc: Box<dyn CongestionControl>,
    /// The controller's latest window.
    window: f32,
    /// The same in whole packets, rounded up; 0 for a window below one, which opens by time.
    window_packets: u32,
    pub(crate) last_sent: Time,
    pub(crate) last_arrival: Time,
    pub(crate) pace_until: Time,
    /// Usable, and no answer is overdue: packets sent for the first time may use it.
    pub(crate) is_open: bool,
    /// There is state that an arrival clears: losses in a row, or an awaited answer.
    is_troubled: bool,
    /// When the first packet left that is overdue, or that requests an answer because others are.
    asked: Option<Tick>,
    losses_in_a_row: u16,
    /// When the first packet left that was lost since the last arrival, whether or not the path is at fault.
    lost_since: Option<Tick>,
    /// Not selected because of its queue.
    pub(crate) is_left: bool,
    /// When the loss rate last rose.
    late_at: Time,
    /// When the row of losses began.
    losses_since: Time,
    pub(crate) probe: Option<(Tick, Time)>,
    pub(crate) next_probe: Time,
    clean_probes: u16,
    clean_needed: u16,
    /// Probes in a row.
    unanswered: u16,
    pub(crate) tx_packets: u64,
    /// The average of recently sent packets at `recent_at`; excludes those sent since, counted from `recent_from`.
    recent_packets: f64,
    recent_at: Time,
    recent_from: u64,
    pub(crate) lost_packets: u64,
    pub(crate) probes_sent: u64,
    pub(crate) probes_lost: u64,
}

impl Path {
    pub(crate) fn new(cc: Box<dyn CongestionControl>) -> Self {
        Path {
            state: PathState::Usable,
            fabric: Rtt::default(),
            standing: Standing::default(),
            latest_ns: 0,
            total: Rtt::default(),
            loss: 0.0,
            in_flight: 0,
            window: cc.window(),
            window_packets: whole_packets(cc.window()),
            cc,
            last_sent: Time(0),
            last_arrival: Time(0),
            pace_until: Time(0),
            is_open: true,
            is_troubled: false,
            asked: None,
            losses_in_a_row: 0,
            lost_since: None,
            is_left: false,
            late_at: Time(0),
            losses_since: Time(0),
            probe: None,
            next_probe: Time(0),
            clean_probes: 0,
            clean_needed: CLEAN_PROBES_MIN,
            unanswered: 0,
            tx_packets: 0,
            recent_packets: 0.0,
            recent_at: Time(0),
            recent_from: 0,
            lost_packets: 0,
            probes_sent: 0,
            probes_lost: 0,
        }
    }

    /// Expected delivery time of a packet sent now, ns: the delay, plus the cost of losses. `allowed_ns` of the queue
    /// measured last do not count: congestion control maintains a queue itself.
    fn cost_ns(&self, allowed_ns: u64) -> u64 {
        let queue = self.standing.ns().saturating_sub(self.fabric.min_ns());
        let rtt = self.fabric.min_ns() + queue.saturating_sub(allowed_ns);
        if self.loss < 0.001 {
            // Noise of the estimate; not a reason to choose.
            return rtt;
        }
        let recovery = (3 * self.total.smoothed_ns().max(rtt)).max(300 * US) as f32;
        let loss = self.loss.min(0.9);
        rtt + (recovery * loss / (1.0 - loss)) as u64
    }

    /// The cost by which paths are selected, ns.
    pub(crate) fn preference_ns(&self) -> u64 {
        self.cost_ns(4 * self.stands_ns())
    }

    /// The cost by which a path is excluded, ns: ignores queues that drain in milliseconds.
    pub(crate) fn reluctance_ns(&self) -> u64 {
        self.cost_ns(QUEUE_ACCEPTED_NS)
    }

    /// The path is usable but was not selected: measures it again as soon as its queue may have drained.
    pub(crate) fn leave(&mut self, now: Time) {
        let queue = self.standing.ns().saturating_sub(self.fabric.min_ns());
        self.is_left = queue >= 4 * self.stands_ns();
        if self.is_left {
            self.next_probe = self.next_probe.min(now.after(2 * queue + MS));
        }
    }

    /// Whether congestion control allows this many packets, with a window of at least one; otherwise there may be room,
    /// too.
    #[inline(always)]
    pub(crate) fn fits(&self, packets: u16) -> bool {
        self.in_flight + u32::from(packets) <= self.window_packets
    }

    /// Packets that congestion control allows now.
    #[inline(always)]
    pub(crate) fn room(&self, now: Time) -> u32 {
        if self.window_packets == 0 {
            u32::from(self.in_flight == 0 && now >= self.pace_until)
        } else {
            self.window_packets.saturating_sub(self.in_flight)
        }
    }

    /// Whether congestion control allows another packet.
    #[inline]
    pub(crate) fn has_room(&self, now: Time) -> bool {
        self.room(now) > 0
    }

    /// When pacing of a window below one packet allows the next one, if the path waits for that.
    pub(crate) fn opens_at(&self) -> Option<Time> {
        (self.window_packets == 0 && self.in_flight == 0).then_some(self.pace_until)
    }

    /// Processes a packet's network delay; returns it if it is plausible.
    pub(crate) fn measured(&mut self, now: Time, fabric_ns: i64) -> Option<u64> {
        let fabric = self.fabric.sample(now, fabric_ns)?;
        self.standing.sample(now, fabric, self.total.smoothed_ns());
        Some(fabric)
    }

    /// Delay that the queue added to the packets measured last, ns.
    fn queue_ns(&self) -> u64 {
        self.standing.latest_ns().saturating_sub(self.fabric.min_ns())
    }

    /// Minimum delay that counts as a standing queue, ns.
    fn stands_ns(&self) -> u64 {
        (2 * self.fabric.min_ns()).clamp(QUEUE_MIN_NS, QUEUE_MAX_NS)
    }

    /// Whether a queue stands on the path and the path delivers: then the queue has dropped lost packets. A silent path
    /// may be dead, whatever its queue was.
    fn is_congested(&self, now: Time) -> bool {
        self.queue_ns() >= self.stands_ns() && now.since(self.last_arrival) < self.silence_ns()
    }

    /// Packets that congestion control allows in flight.
    pub(crate) fn window(&self) -> f32 {
        self.window
    }

    /// The congestion control's number on the wire.
    pub(crate) fn wire_type(&self) -> u8 {
        self.cc.wire_type()
    }

    /// `packets` were acknowledged, `marked` of them with a congestion mark. `fabric_ns` and `endpoint_ns`: the delays,
    /// if the ACK has measured this path.
    pub(crate) fn on_acked(&mut self, now: Time, acked: &Acked) {
        // Decayed in steps: an exponential per packet is too expensive.
        if now.since(self.recent_at) >= RECENT_NS {
            self.recent_packets = self.recent_packets(now);
            (self.recent_at, self.recent_from) = (now, self.tx_packets);
        }
        let sample = AckSample {
            packets: acked.packets,
            marked_packets: acked.marked,
            fabric_delay_ns: acked.fabric_ns,
            standing_delay_ns: self.standing.ns(),
            endpoint_delay_ns: acked.endpoint_ns,
            base_delay_ns: self.fabric.min_ns(),
            rtt_ns: self.total.smoothed_ns(),
            hops: acked.hops,
            in_flight: self.in_flight + u32::from(acked.packets),
        };
        self.congestion(|cc| cc.on_ack(now, &sample));
    }

    /// Informs congestion control of a lost packet. Returns whether a queue dropped it.
    pub(crate) fn on_congestion_loss(&mut self, now: Time, sent_ago_ns: u64) -> bool {
        let congestion = self.is_congested(now);
        let loss = Loss {
            sent: Time(now.0.saturating_sub(sent_ago_ns)),
            rtt_ns: self.total.smoothed_ns(),
            base_delay_ns: self.fabric.min_ns(),
            queue_ns: self.queue_ns(),
            congestion,
        };
        self.congestion(|cc| cc.on_loss(now, &loss));
        congestion
    }

    /// Informs congestion control of an event.
    pub(crate) fn congestion(&mut self, tell: impl FnOnce(&mut dyn CongestionControl)) {
        tell(&mut *self.cc);
        let window = self.cc.window();
        if window != self.window {
            self.window = window;
            self.window_packets = whole_packets(window);
        }
    }

    /// `packets` are sent on the path.
    #[inline(always)]
    pub(crate) fn on_sent(&mut self, now: Time, packets: u32) {
        self.in_flight += packets;
        self.tx_packets += u64::from(packets);
        self.last_sent = now;
        if self.window_packets == 0 {
            let rtt = self.total.smoothed_ns().max(100 * US) as f32;
            self.pace_until = now.after(((rtt / self.window.max(1e-3)) as u64).min(PACE_MAX_NS));
        }
    }

    /// Recently sent packets: an average with half-life [`RECENT_NS`].
    pub(crate) fn recent_packets(&self, now: Time) -> f64 {
        let halvings = (now.since(self.recent_at) / RECENT_NS).min(60);
        (self.recent_packets + (self.tx_packets - self.recent_from) as f64) / (1u64 << halvings) as f64
    }

    /// `packets` are no longer in flight on the path, delivered or not.
    pub(crate) fn on_done(&mut self, packets: u32) {
        self.in_flight = self.in_flight.saturating_sub(packets);
    }

    /// `packets` that were sent once, on this path, have arrived.
    pub(crate) fn on_arrivals(&mut self, now: Time, packets: u16) {
        self.last_arrival = now;
        if self.is_troubled {
            self.end_trouble();
        }
        if self.loss > 0.0 {
            self.loss *= (1.0 - LOSS_WEIGHT).powi(i32::from(packets));
        }
    }

    #[cold]
    fn end_trouble(&mut self) {
        self.is_troubled = false;
        self.is_open = self.state == PathState::Usable;
        (self.asked, self.lost_since, self.losses_in_a_row) = (None, None, 0);
    }

    /// A packet that left at `sent` is known to have arrived on this path, without further information.
    #[cold]
    pub(crate) fn hear(&mut self, now: Time, sent: Tick) {
        self.last_arrival = now;
        if self.asked.is_some_and(|asked| sent.since(asked) >= 0) {
            self.asked = None;
            self.is_open = self.state == PathState::Usable;
        }
    }

    /// A packet is sent that requests an answer, because others are overdue.
    pub(crate) fn ask(&mut self, now: Time) {
        self.is_troubled = true;
        self.asked.get_or_insert(now.tick());
    }

    /// Whether a packet sent since `sent` was acknowledged, or any packet recently: a path with nothing in flight is
    /// silent, and has no queue.
    pub(crate) fn is_heard(&self, now: Time, sent: Time) -> bool {
        self.last_arrival >= sent || now.since(self.last_arrival) < SILENCE_MIN_NS
    }

    /// Whether an answer was requested and has not arrived.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.is_some()
    }

    /// Whether the requested answer is overdue after `wait_ns`.
    pub(crate) fn is_overdue(&self, now: Time, wait_ns: u64) -> bool {
        self.asked.is_some_and(|asked| now.tick().since(asked) >= wait_ns as i64)
    }

    /// The answer to a packet that left `sent_ago_ns` ago is overdue: the path carries nothing new until it is heard
    /// again. Returns whether this is new. Does nothing if an acknowledgement has arrived since: then only the packet
    /// is lost.
    pub(crate) fn close(&mut self, now: Time, sent_ago_ns: u64) -> bool {
        if now.since(self.last_arrival) < sent_ago_ns {
            return false;
        }
        self.is_troubled = true;
        self.asked.get_or_insert(Time(now.0.saturating_sub(sent_ago_ns)).tick());
        let is_news = std::mem::replace(&mut self.is_open, false);
        if is_news {
            self.next_probe = now;
        }
        is_news
    }

    /// When the first packet lost since the last arrival left, given that a lost one left at `sent`.
    pub(crate) fn lost_since(&mut self, sent: Tick) -> Tick {
        self.is_troubled = true;
        *self.lost_since.get_or_insert(sent)
    }

    /// A packet was lost on this path, and not by its queue; `overtaken`: a packet that left later has arrived. Returns
    /// whether the path became suspect.
    pub(crate) fn on_loss(&mut self, now: Time, sent_ago_ns: u64, overtaken: bool) -> bool {
        // A loss detected by time may be a late packet, and a whole queue may be late at once: until the path has been
        // silent for a long time, count one packet per round trip.
        let silent = now.since(self.last_arrival) >= self.silence_ns();
        if overtaken || silent || now.since(self.late_at) >= self.total.smoothed_ns() {
            self.loss += (1.0 - self.loss) * LOSS_WEIGHT;
            self.late_at = now;
        }
        // Losses of one burst count only if no packet that left later has arrived.
        if now.since(self.last_arrival) >= sent_ago_ns {
            if self.losses_in_a_row == 0 {
                self.losses_since = now;
            }
            self.losses_in_a_row = self.losses_in_a_row.saturating_add(1);
            self.is_troubled = true;
        }
        // One burst may be late as a whole; a dead path keeps losing.
        let lasting = now.since(self.losses_since) >= self.total.smoothed_ns().max(200 * US);
        self.losses_in_a_row >= SUSPECT_LOSSES && lasting && self.suspect(now)
    }

    /// Stops using the path until probes return. Returns whether this is new.
    pub(crate) fn suspect(&mut self, now: Time) -> bool {
        if self.state == PathState::Suspect {
            return false;
        }
        self.state = PathState::Suspect;
        self.is_open = false;
        self.clean_probes = 0;
        self.probe = None;
        self.next_probe = now;
        true
    }

    /// How much the path is trusted.
    pub(crate) fn trust(&self) -> Trust {
        match self.state {
            PathState::Usable if self.is_open => Trust::Usable,
            PathState::Usable => Trust::Quiet,
            PathState::Suspect if self.clean_probes > 0 => Trust::Answers,
            PathState::Suspect => Trust::Silent,
        }
    }

    /// The peer, all of whose paths had failed, is heard on this path: stop waiting for a probe that is long overdue.
    pub(crate) fn hear_again(&mut self, now: Time) {
        if self.state == PathState::Suspect
            && self.probe.is_none_or(|(_, sent)| now.since(sent) >= self.probe_timeout_ns())
        {
            self.probe = None;
            self.next_probe = now;
        }
    }

    /// A probe is sent.
    pub(crate) fn on_probe_sent(&mut self, now: Time, interval_ns: u64) {
        self.probe = Some((now.tick(), now));
        self.probes_sent += 1;
        self.next_probe = now.after(match self.state {
            PathState::Suspect => {
                let doublings = (self.unanswered / UNANSWERED_PROBES).min(UNANSWERED_DOUBLINGS);
                self.trial_interval_ns().max(SUSPECT_PROBE_NS << doublings).min(interval_ns)
            }
            PathState::Usable => interval_ns,
        });
    }

    /// Probe interval of a suspect path whose probes return: the more often the path has failed, the longer its trial
    /// and the interval.
    fn trial_interval_ns(&self) -> u64 {
        SUSPECT_PROBE_NS * u64::from(self.clean_needed / CLEAN_PROBES_MIN).min(TRIAL_SLOWDOWN)
    }

    /// A probe returned. Returns whether the path became usable again.
    pub(crate) fn on_probe_returned(&mut self, now: Time) -> bool {
        self.probe = None;
        self.unanswered = 0;
        self.on_arrivals(now, 1);
        if self.state == PathState::Usable {
            return false;
        }
        self.loss -= self.loss / 16.0;
        self.clean_probes += 1;
        if self.clean_probes < self.clean_needed {
            // Without answers, the interval may have grown.
            self.next_probe = self.next_probe.min(now.after(self.trial_interval_ns()));
            return false;
        }
        self.state = PathState::Usable;
        self.is_open = true;
        self.congestion(|cc| cc.restart());
        self.loss = self.loss.min(SUSPECT_LOSS / 2.0);
        self.clean_needed = (self.clean_needed * 2).min(CLEAN_PROBES_MAX);
        true
    }

    /// A probe did not return. Returns whether the path became suspect.
    pub(crate) fn on_probe_lost(&mut self, now: Time) -> bool {
        self.probe = None;
        self.probes_lost += 1;
        self.unanswered = self.unanswered.saturating_add(1);
        self.clean_probes = 0;
        self.loss += (1.0 - self.loss) * PROBE_LOSS_WEIGHT;
        self.losses_in_a_row = self.losses_in_a_row.saturating_add(1);
        self.is_troubled = true;
        if self.state == PathState::Usable {
            self.is_open = false;
            self.next_probe = self.next_probe.min(now.after(SUSPECT_PROBE_NS));
        }
        self.losses_in_a_row >= SUSPECT_LOSSES && self.suspect(now)
    }

    /// Silence after which packets in flight are more likely lost than late, ns.
    fn silence_ns(&self) -> u64 {
        (2 * self.total.smoothed_ns() + 4 * self.total.variance_ns()).max(SILENCE_MIN_NS)
    }

    /// Probe timeout, ns. The delay is unknown before the first answer, so the timeout doubles until then.
    pub(crate) fn probe_timeout_ns(&self) -> u64 {
        if !self.total.is_known() {
            return PROBE_TIMEOUT_MIN_NS << self.unanswered.min(UNMEASURED_DOUBLINGS);
        }
        let wait = 3 * self.total.smoothed_ns() + 4 * self.total.variance_ns();
        wait.clamp(PROBE_TIMEOUT_MIN_NS, PROBE_TIMEOUT_MAX_NS)
    }

    /// A long time without failures resets earlier ones.
    pub(crate) fn forgive(&mut self) {
        self.clean_needed = (self.clean_needed / 2).max(CLEAN_PROBES_MIN);
    }
}

fn whole_packets(window: f32) -> u32 {
    if window < 1.0 { 0 } else { window.ceil() as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Closed;

    impl CongestionControl for Closed {
        fn on_ack(&mut self, _: Time, _: &bifrost_transport::cc::AckSample) {}
        fn on_loss(&mut self, _: Time, _: &Loss) {}
        fn on_spurious(&mut self, _: Time) {}
        fn restart(&mut self) {}
        fn on_timeout(&mut self, _: Time, _: u64) {}
        fn wire_type(&self) -> u8 {
            1
        }
        fn window(&self) -> f32 {
            0.01
        }
    }

    #[test]
    fn a_closed_window_opens_in_time_whatever_was_measured() {
        let mut path = Path::new(Box::new(Closed));
        path.total.sample(Time(0), 9_000 * MS as i64);
        path.on_sent(Time(0), 1);
        path.on_done(1);
        assert!(!path.has_room(Time(50 * MS)), "a pause");
        assert!(path.has_room(Time(100 * MS)), "but no more than that");
    }

    #[test]
    fn a_silent_path_is_probed_less_and_less_often_and_used_again_once_it_answers() {
        let mut path = Path::new(Box::new(Closed));
        path.suspect(Time(0));
        path.total.sample(Time(0), 100 * US as i64);
        // As the peer's timer does, every 2 ms.
        let mut probes_sent_in = |from_ms: u64, to_ms: u64, answered: bool| {
            let mut recovered_at = None;
            let before = path.probes_sent;
            for ms in (from_ms..to_ms).step_by(2) {
                let now = Time(ms * MS);
                if path.probe.is_some_and(|(_, sent)| now.since(sent) >= path.probe_timeout_ns()) {
                    path.on_probe_lost(now);
                }
                if path.state == PathState::Suspect && path.probe.is_none() && now >= path.next_probe {
                    path.on_probe_sent(now, 100 * MS);
                    if answered && path.on_probe_returned(now) {
                        recovered_at = recovered_at.or(Some(ms - from_ms));
                    }
                }
            }
            (path.probes_sent - before, recovered_at)
        };
        assert_eq!(probes_sent_in(0, 32, false), (8, None));
        let (second, minute) = (probes_sent_in(32, 1_000, false).0, probes_sent_in(1_000, 60_000, false).0);
        assert!(second < 80 && minute < 2_000, "{second} in the first second, {minute} in the first minute");
        let (_, recovered_at) = probes_sent_in(60_000, 61_000, true);
        assert!(recovered_at.is_some_and(|ms| ms < 45), "{recovered_at:?}");
    }

    #[test]
    fn a_path_that_loses_one_percent_rarely_becomes_suspect_by_chance() {
        let mut path = Path::new(Box::new(Closed));
        let (mut state, mut crossings, mut is_above) = (1u64, 0, false);
        for i in 1..1_000_000u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            match (state >> 33) % 100 {
                0 => drop(path.on_loss(Time(i * US), US, true)),
                _ => path.on_arrivals(Time(i * US), 1),
            }
            crossings += u32::from(!is_above && path.loss > SUSPECT_LOSS);
            is_above = path.loss > if is_above { 0.015 } else { SUSPECT_LOSS };
        }
        assert!((1..30).contains(&crossings), "{crossings}");
    }

    #[test]
    fn an_unmeasured_path_may_be_long() {
        let mut path = Path::new(Box::new(Closed));
        let mut now = Time(0);
        while path.state == PathState::Usable {
            path.on_probe_sent(now, 100 * MS);
            now = now.after(path.probe_timeout_ns());
            path.on_probe_lost(now);
        }
        assert!(now >= Time(40 * MS), "{now:?}: no time for an answer");
        path.total.sample(now, 100 * US as i64);
        assert!(path.probe_timeout_ns() < 5 * MS, "the timeout of a measured path is shorter");
    }

    #[test]
    fn a_queue_that_is_late_as_a_whole_is_not_a_lossy_path() {
        let after = |now_ms: u64, overtaken| {
            let mut path = Path::new(Box::new(Closed));
            path.total.sample(Time(0), MS as i64);
            path.on_arrivals(Time(5 * MS), 1);
            (0..60).for_each(|_| assert!(!path.on_loss(Time(now_ms * MS), 3 * MS, overtaken)));
            path.loss
        };
        assert!(after(6, false) < SUSPECT_LOSS, "late");
        assert!(after(6, true) > SUSPECT_LOSS, "a later packet has arrived");
        assert!(after(12, false) > SUSPECT_LOSS, "silent");
    }
}
