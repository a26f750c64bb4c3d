//! A peer host, the table of its paths, and which of them are sprayed over (NSDI'26, 4.1).
//!
//! Paths belong to a pair of hosts, not to a connection. All connections to a peer share what is known about its paths,
//! so a new connection starts informed and an idle one needs no probes.

use std::cmp::Reverse;
use std::sync::Arc;

use bifrost_wire::bifrost::PathId;

use crate::config::{CcKind, Config};
use crate::path::{Path, PathState, SUSPECT_LOSS};
use crate::timing::{Limits, Measured, Timing};
use crate::turns::Turns;
use bifrost_transport::cc::{CongestionControl, Swift, SwiftConfig, Unlimited};
use bifrost_transport::rtt::Rtt;
use bifrost_transport::time::{MS, Time, US};

/// Measured times of one path, ns; 0 if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PathTimes {
    /// Smoothed RTT including endpoint delay, and its deviation.
    rtt: (u64, u64),
    /// Until the ACK of a packet that requests an immediate ACK.
    answer_ns: u64,
}

/// A peer host.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) paths: Vec<Path>,
    /// The result of [`rtt`](Self::rtt).
    rtt: Option<(u64, u64)>,
    /// Longest time until the ACK of a packet that requests an immediate ACK, ns: the slowest selected path's delay
    /// plus a margin. `None` if nothing is measured.
    answer_ns: Option<u64>,
    limits: Limits,
    /// Derived from `rtt`, `answer_ns` and `hold`, which change less often than it is read.
    timing: Timing,
    selected: [PathId; PathId::MAX],
    selected_len: usize,
    /// Paths that the operator has taken out of use: bit i is path i.
    drained: u8,
    next_selection: Time,
    stale: bool,
    /// The connection that last sent or received; probes travel on it.
    pub(crate) probe_conn: Option<u32>,
    pub(crate) last_active: Time,
    /// Before this time no connection is set up only for probes.
    pub(crate) observe_at: Time,
    /// Until this time the peer is treated as plain VXLAN.
    pub(crate) plain_until: Time,
    /// Set-ups in a row that the peer did not answer.
    pub(crate) unanswered: u32,
    /// The peer's maximum ACK delay, as announced.
    ack_delay_ns: u64,
    /// How long the peer recently held ACKs back.
    hold: Hold,
    pub(crate) probe_timer_armed: bool,
    pub(crate) connections: u32,
    /// RESPONSEs sent to the peer, and attempts to set up a connection, modulo 256. Each starts on another path.
    pub(crate) answers: u8,
    pub(crate) attempts: u8,
    /// Some of its connections may be in best effort.
    pub(crate) has_fallen: bool,
    next_forgive: Time,
    /// Connections with packets that wait for room on the paths.
    pub(crate) waiting: Turns,
    /// When a timer checks whether a path has opened; [`Time::NEVER`] if none is armed.
    pub(crate) share_armed: Time,
    /// Paths that the selection made suspect because of their loss rate, not yet counted.
    pub(crate) newly_suspect: u64,
}

impl Peer {
    pub(crate) fn new(config: &Config, paths: usize) -> Self {
        let swift = Arc::new(swift_config(config));
        let controller = || -> Box<dyn CongestionControl> {
            match config.congestion_control {
                CcKind::Swift => Box::new(Swift::new(Arc::clone(&swift))),
                CcKind::None => Box::new(Unlimited),
            }
        };
        let paths: Vec<Path> = (0..paths.clamp(1, PathId::MAX)).map(|_| Path::new(controller())).collect();
        let mut peer = Peer {
            paths,
            rtt: None,
            answer_ns: None,
            limits: Limits::new(config),
            timing: Timing::unknown(Limits::new(config)),
            selected: [PathId::default(); PathId::MAX],
            selected_len: 0,
            drained: 0,
            next_selection: Time(0),
            stale: true,
            probe_conn: None,
            last_active: Time(0),
            observe_at: Time(0),
            plain_until: Time(0),
            unanswered: 0,
            ack_delay_ns: MS,
            hold: Hold::default(),
            probe_timer_armed: false,
            connections: 0,
            answers: 0,
            attempts: 0,
            has_fallen: false,
            next_forgive: Time(0),
            waiting: Turns::default(),
            share_armed: Time::NEVER,
            newly_suspect: 0,
        };
        peer.select(config, Time(0));
        peer
    }

    /// The paths that are sprayed over, best first.
    pub(crate) fn selected(&self) -> &[PathId] {
        &self.selected[..self.selected_len]
    }

    /// The path for transmission number `turn` of a packet that is repeated until it is answered. Takes one path after
    /// the other, first those that are sprayed over, then all others that are not drained, because the selection may be
    /// old and its best path dead.
    pub(crate) fn path_of_turn(&self, turn: u32) -> PathId {
        let others = || self.choosable().map(|i| PathId::masked(i as u8)).filter(|p| !self.selected().contains(p));
        let turn = turn as usize % (self.selected_len + others().count()).max(1);
        self.selected().iter().copied().chain(others()).nth(turn).unwrap_or_default()
    }

    /// Takes exactly these paths out of use, bit i for path i. Packets in flight on them are not affected.
    pub(crate) fn drain(&mut self, config: &Config, now: Time, paths: u8) {
        self.drained = paths;
        self.select(config, now);
    }

    /// Whether the operator has taken a path out of use.
    pub(crate) fn is_drained(&self, path: PathId) -> bool {
        self.drained >> path.get() & 1 == 1
    }

    /// Paths that may be chosen: those that are not drained, or all if all are.
    fn choosable(&self) -> impl Iterator<Item = usize> + use<> {
        let all = u8::MAX >> (PathId::MAX - self.paths.len());
        let avoided = if self.drained & all == all { 0 } else { self.drained };
        (0..self.paths.len()).filter(move |i| avoided >> i & 1 == 0)
    }

    /// Makes the next [`refresh`](Self::refresh) select again.
    pub(crate) fn invalidate(&mut self) {
        self.stale = true;
    }

    /// If the last selection is old, selects the best `spray_paths` paths by expected delivery time. A path stays
    /// selected unless another is better by more than the stickiness (APNET'25, 3.2.1).
    pub(crate) fn refresh(&mut self, config: &Config, now: Time) {
        if self.stale || now >= self.next_selection {
            self.select(config, now);
        }
    }

    /// Selects them now.
    pub(crate) fn select(&mut self, config: &Config, now: Time) {
        self.stale = false;
        let known = self.paths.iter().filter(|p| p.fabric.is_known());
        let fastest = known.map(|p| p.fabric.smoothed_ns()).min().unwrap_or(0);
        self.next_selection = now.after((2 * fastest).clamp(100 * US, 10 * MS));
        let least_loss = self.choosable().map(|i| self.paths[i].loss).fold(1.0f32, f32::min);
        for path in &mut self.paths {
            if path.state == PathState::Usable && path.loss > SUSPECT_LOSS && path.loss > 3.0 * least_loss + 0.01 {
                self.newly_suspect += u64::from(path.suspect(now));
            }
        }
        if now >= self.next_forgive {
            self.next_forgive = now.after(10_000 * MS);
            self.paths.iter_mut().filter(|p| p.state == PathState::Usable).for_each(Path::forgive);
        }
        let trusted = self.choosable().map(|i| self.paths[i].trust()).max();
        let stay = |i: usize| if self.selected().iter().any(|p| p.index() == i) { config.stickiness_ns } else { 0 };
        let mut order: [(u64, usize, u64); PathId::MAX] = [(u64::MAX, usize::MAX, u64::MAX); PathId::MAX];
        let mut best = u64::MAX;
        let mut count = 0;
        for i in self.choosable() {
            let path = &self.paths[i];
            if Some(path.trust()) < trusted {
                continue;
            }
            // An unmeasured path costs nothing yet, so it is tried and thereby measured.
            let reluctance = path.reluctance_ns();
            order[count] = (path.preference_ns().saturating_sub(stay(i)), i, reluctance);
            best = best.min(reluctance);
            count += 1;
        }
        order[..count].sort_unstable();
        // A path several times slower than the best one would delay more than it carries.
        let limit = best.saturating_mul(3).saturating_add(config.stickiness_ns).saturating_add(200 * US);
        let mut selected = [PathId::default(); PathId::MAX];
        let (mut len, mut chosen) = (0, 0u8);
        for &(_, i, reluctance) in &order[..count] {
            if len < usize::from(config.spray_paths.max(1)) && reluctance <= limit {
                selected[len] = PathId::masked(i as u8);
                len += 1;
                chosen |= 1 << i;
            }
        }
        (self.selected, self.selected_len) = (selected, len);
        for (i, path) in self.paths.iter_mut().enumerate() {
            path.is_left = false;
            if chosen >> i & 1 == 0 && path.state == PathState::Usable {
                path.leave(now);
            }
        }
        self.update_rtt();
    }

    /// The best path for the retransmission of a packet that left at `sent` and was lost. `not`: paths to avoid, bit i
    /// is path i. Prefers, in this order: an open path, one that is not in `not`, a usable one to a suspect one, one
    /// that was not asked for an answer, a selected one, one that delivered since `sent` or recently, one with room,
    /// the one with the fewest packets in flight, and the latest arrival. So the result is in `not` only if no other
    /// path is open, or none may be chosen.
    pub(crate) fn other_than(&self, now: Time, not: u8, sent: Time) -> PathId {
        let rank = |i: &usize| {
            let path = &self.paths[*i];
            let is_selected = self.selected().iter().any(|p| p.index() == *i);
            let known = (!path.is_open, not >> i & 1 == 1, path.state == PathState::Suspect, path.is_asked());
            let is_heard = path.is_heard(now, sent);
            (known, !is_selected, !is_heard, !path.has_room(now), path.in_flight, Reverse(path.last_arrival))
        };
        self.choosable().min_by_key(rank).map_or(PathId::default(), |i| PathId::masked(i as u8))
    }

    /// Whether an open path may be chosen that has not been asked for an answer.
    pub(crate) fn has_unasked(&self) -> bool {
        self.choosable().any(|i| self.paths[i].is_open && !self.paths[i].is_asked())
    }

    /// Closes the paths that were asked for an answer at least `wait_ns` ago and have not given it. Returns whether
    /// there are any.
    pub(crate) fn close_overdue(&mut self, now: Time, wait_ns: u64) -> bool {
        let mut is_news = false;
        for path in self.paths.iter_mut().filter(|path| path.is_open && path.is_overdue(now, wait_ns)) {
            (path.is_open, path.next_probe) = (false, now);
            is_news = true;
        }
        is_news
    }

    /// Traffic of connection `index` keeps the paths under observation; `leads`: it may carry probes. Returns whether
    /// the probe timer must be armed.
    #[inline]
    pub(crate) fn touch(&mut self, now: Time, index: u32, leads: bool) -> bool {
        self.last_active = now;
        if leads {
            self.probe_conn = Some(index);
        }
        let is_news = !self.probe_timer_armed;
        if is_news {
            self.probe_timer_armed = true;
        }
        is_news
    }

    /// Connection `index` ends or restarts. Probes sent on it may never be answered, which is not their paths' fault.
    pub(crate) fn forget_probes_of(&mut self, index: u32) {
        if self.probe_conn == Some(index) {
            self.probe_conn = None;
            self.paths.iter_mut().for_each(|path| path.probe = None);
        }
    }

    /// Whether `path` is one of this peer's paths.
    pub(crate) fn has_path(&self, path: PathId) -> bool {
        path.index() < self.paths.len()
    }

    /// Largest smoothed RTT (with endpoint delay) over the selected paths, and its deviation; `None` if nothing is
    /// measured.
    #[inline]
    pub(crate) fn rtt(&self) -> Option<(u64, u64)> {
        self.rtt
    }

    /// Times of one path from which [`rtt`](Self::rtt) and the longest answer are computed; 0 if unknown.
    #[inline]
    pub(crate) fn measured_of(&self, path: PathId) -> PathTimes {
        let Some(path) = self.paths.get(path.index()) else { return PathTimes::default() };
        let answer_ns = if path.fabric.is_known() { answer_ns(&path.fabric) } else { 0 };
        PathTimes { rtt: (path.total.smoothed_ns(), path.total.variance_ns()), answer_ns }
    }

    /// A path was measured; its times were `before`.
    #[inline]
    pub(crate) fn on_measured(&mut self, path: PathId, before: PathTimes) {
        let after = self.measured_of(path);
        if after == before {
            return;
        }
        // A path that was below the maximum, and is not above it now, changes nothing.
        let (rtt, answer_ns) = (self.rtt.unwrap_or_default(), self.answer_ns.unwrap_or_default());
        let is_below = before.rtt < rtt && before.answer_ns < answer_ns;
        if !(is_below && after.rtt <= rtt && after.answer_ns <= answer_ns) {
            self.update_rtt();
        }
    }

    /// A path was measured, or the selection changed.
    fn update_rtt(&mut self) {
        let (mut rtt, mut answer) = ((0, 0), 0);
        for path in self.selected() {
            let times = self.measured_of(*path);
            rtt = rtt.max(times.rtt);
            answer = answer.max(times.answer_ns);
        }
        // 0 means unknown.
        let (rtt, answer) = ((rtt.0 > 0).then_some(rtt), (answer > 0).then_some(answer));
        if (rtt, answer) != (self.rtt, self.answer_ns) {
            (self.rtt, self.answer_ns) = (rtt, answer);
            self.update_timing();
        }
    }

    /// Time until the fastest path would have answered a packet that requests an immediate ACK, ns.
    #[cold]
    pub(crate) fn quickest_answer_ns(&self) -> u64 {
        let known = self.choosable().map(|i| &self.paths[i].fabric).filter(|fabric| fabric.is_known());
        known.map(answer_ns).min().unwrap_or(u64::MAX)
    }

    /// The peer's maximum ACK delay, as announced, ns.
    pub(crate) fn ack_delay_ns(&self) -> u64 {
        self.ack_delay_ns
    }

    /// The peer announces its maximum ACK delay.
    pub(crate) fn set_ack_delay(&mut self, ns: u64) {
        self.ack_delay_ns = ns;
        self.update_timing();
    }

    /// The peer held an ACK back for `held_ns` before sending it.
    pub(crate) fn on_held(&mut self, now: Time, held_ns: u64) {
        if self.hold.sample(now, held_ns) {
            self.update_timing();
        }
    }

    /// Timeouts of loss detection, without any connection's patience.
    pub(crate) fn timing(&self) -> Timing {
        self.timing
    }

    fn update_timing(&mut self) {
        let hold = self.hold.longest_ns().min(self.ack_delay_ns);
        self.timing = match self.rtt {
            Some((rtt, variance)) => Timing::of(Measured { rtt, variance, answer: self.answer_ns, hold }, self.limits),
            None => Timing::unknown(self.limits),
        };
    }
}

/// Time until the ACK of a packet that requests an immediate ACK, on a path with this fabric delay.
#[inline(always)]
fn answer_ns(fabric: &Rtt) -> u64 {
    fabric.smoothed_ns() + (fabric.smoothed_ns() / 2).max(4 * fabric.variance_ns()).max(20 * US)
}

/// The longest hold of an ACK is remembered for at least this long, and at most twice as long.
const HOLD_WINDOW_NS: u64 = 100 * MS;
/// Number of samples from which on the longest hold is used.
const HOLDS_FIRST: u8 = 16;

/// The longest hold of an ACK in the current time window and the previous one. Until enough is known, the announced
/// maximum applies.
#[derive(Clone, Copy, Debug, Default)]
struct Hold {
    now_ns: u64,
    before_ns: u64,
    since: Time,
    samples: u8,
}

impl Hold {
    /// Returns whether the longest hold may have changed.
    fn sample(&mut self, now: Time, held_ns: u64) -> bool {
        let is_next_window = now.since(self.since) >= HOLD_WINDOW_NS;
        if is_next_window {
            (self.before_ns, self.now_ns, self.since) = (self.now_ns, 0, now);
        }
        let is_longer = held_ns > self.now_ns;
        self.now_ns = self.now_ns.max(held_ns);
        let is_first = self.samples < HOLDS_FIRST;
        self.samples += u8::from(is_first);
        is_next_window || is_longer || is_first
    }

    fn longest_ns(&self) -> u64 {
        if self.samples < HOLDS_FIRST { u64::MAX } else { self.now_ns.max(self.before_ns) }
    }
}

/// Which path a connection's packets take: groups, round robin (NSDI'26, 4.1).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spray {
    path: PathId,
    left: u16,
    turn: u8,
}

impl Spray {
    /// The path in use did not deliver in time: the next packet takes another one.
    pub(crate) fn leave(&mut self, path: PathId) {
        if self.path == path {
            self.left = 0;
        }
    }

    /// Sends `packets` packets on the path in use, if its group has not ended, and it is open and has room for them.
    #[inline(always)]
    pub(crate) fn keep(&mut self, peer: &mut Peer, now: Time, packets: u16) -> Option<PathId> {
        if self.left == 0 {
            return None;
        }
        let path = peer.paths.get_mut(self.path.index())?;
        if !path.is_open || !path.fits(packets) {
            return None;
        }
        self.left = self.left.saturating_sub(packets);
        path.on_sent(now, u32::from(packets));
        Some(self.path)
    }

    /// Selects a path for the next `packets` packets and sends as many of them as it has room for; returns both. `None`
    /// if congestion control has closed all paths.
    #[inline(always)]
    pub(crate) fn take(&mut self, peer: &mut Peer, config: &Config, now: Time, packets: u16) -> Option<(PathId, u16)> {
        if let Some(path) = self.keep(peer, now, packets) {
            return Some((path, packets));
        }
        let (path, taken) = self.next_group(peer, config, now, packets)?;
        peer.paths[path.index()].on_sent(now, u32::from(taken));
        Some((path, taken))
    }

    #[cold]
    fn next_group(&mut self, peer: &mut Peer, config: &Config, now: Time, packets: u16) -> Option<(PathId, u16)> {
        if self.left > 0 {
            // The path's room is too small for all of them.
            let path = &peer.paths[self.path.index()];
            let room = path.room(now);
            if path.is_open && room > 0 {
                let taken = u32::from(packets).min(room) as u16;
                self.left = self.left.saturating_sub(taken);
                return Some((self.path, taken));
            }
        }
        peer.refresh(config, now);
        let n = peer.selected().len();
        for _ in 0..n {
            self.turn = (self.turn + 1) % n as u8;
            let candidate = peer.selected()[usize::from(self.turn)];
            let room = peer.paths[candidate.index()].room(now);
            if room > 0 {
                let taken = u32::from(packets).min(room) as u16;
                self.path = candidate;
                self.left = config.group_packets.saturating_sub(taken);
                return Some((candidate, taken));
            }
        }
        None
    }
}

/// Initial window of a path, packets: what a short queue of a slow link can hold. It doubles each round trip.
const FIRST_WINDOW: u16 = 32;

fn swift_config(config: &Config) -> SwiftConfig {
    // Each of k paths starts with its share of the connection's initial window, or less.
    let share = (config.initial_window / u16::from(config.spray_paths.max(1))).clamp(1, FIRST_WINDOW);
    let swift = SwiftConfig::new(share, config.max_window, config.swift_noise_ns);
    let swift = SwiftConfig { doubles: true, ..swift };
    match config.heavy_loss_percent {
        0 => swift,
        percent => SwiftConfig { heavy_loss: f32::from(percent) / 100.0, ..swift },
    }
}
