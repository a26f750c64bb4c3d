//! A peer host and the table of its paths; which of them are sprayed over (NSDI'26, 4.1).
//!
//! Paths belong to the pair of hosts, not to a connection: all connections to a peer share what is known of its paths,
//! so a new connection starts informed and an idle one costs no probes.

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

/// Measured times of one path, ns; 0 if not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PathTimes {
    /// Smoothed RTT with endpoint delay, and its deviation.
    rtt: (u64, u64),
    /// Until the ACK of a packet that asks for it at once.
    answer_ns: u64,
}

/// A peer host.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) paths: Vec<Path>,
    /// Of [`rtt`](Self::rtt).
    rtt: Option<(u64, u64)>,
    /// Longest time until the ACK of a packet that asks for it at once, ns: the slowest selected path's delay with a margin.
    /// `None` if nothing is measured.
    answer_ns: Option<u64>,
    limits: Limits,
    /// What follows from `rtt`, `answer_ns` and `hold`, which change less often than it is asked for.
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
    /// Before this no connection is set up for the probes alone.
    pub(crate) observe_at: Time,
    /// Until then the peer counts as plain VXLAN.
    pub(crate) plain_until: Time,
    /// Set-ups that it did not answer, since it last did.
    pub(crate) unanswered: u32,
    /// Its longest ACK delay, as it said.
    ack_delay_ns: u64,
    /// How long it lately held ACKs back.
    hold: Hold,
    pub(crate) probe_timer_armed: bool,
    pub(crate) connections: u32,
    /// RESPONSEs sent to it, and attempts to set a connection up, modulo 256: each begins with another path.
    pub(crate) answers: u8,
    pub(crate) attempts: u8,
    /// Some of its connections may be in best effort.
    pub(crate) has_fallen: bool,
    next_forgive: Time,
    /// Connections with packets that wait for room on the paths.
    pub(crate) waiting: Turns,
    /// When a timer looks whether a path has opened; [`Time::NEVER`]: there is none.
    pub(crate) share_armed: Time,
    /// Paths that the selection has found to lose too much, not yet counted.
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

    /// The path for the `turn`-th sending of something that is repeated until it is answered: one path after the other, those
    /// that are sprayed over first. All that are not drained, for the choice may be old, and the best path dead.
    pub(crate) fn path_of_turn(&self, turn: u32) -> PathId {
        let others = || self.choosable().map(|i| PathId::masked(i as u8)).filter(|p| !self.selected().contains(p));
        let turn = turn as usize % (self.selected_len + others().count()).max(1);
        self.selected().iter().copied().chain(others()).nth(turn).unwrap_or_default()
    }

    /// Takes just these paths out of use, bit i for path i. What is in flight on them ends as it would.
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

    /// The selection is to be made again before the next group.
    pub(crate) fn invalidate(&mut self) {
        self.stale = true;
    }

    /// Chooses the best `spray_paths` paths by expected delivery time if the last choice is old. A path keeps its place
    /// against one that is better by no more than the stickiness (APNET'25, 3.2.1).
    pub(crate) fn refresh(&mut self, config: &Config, now: Time) {
        if self.stale || now >= self.next_selection {
            self.select(config, now);
        }
    }

    /// Chooses them now.
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
            // An unmeasured path costs nothing yet: it is tried, and measured by that.
            let reluctance = path.reluctance_ns();
            order[count] = (path.preference_ns().saturating_sub(stay(i)), i, reluctance);
            best = best.min(reluctance);
            count += 1;
        }
        order[..count].sort_unstable();
        // A path several times slower than the best would hold up more than it carries.
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

    /// A path that is none of `not` (bit i is path i), for a packet that left at `sent` and was lost: one that delivers, as far as is
    /// known; of those one that is sprayed over, and has delivered since `sent` or lately, and then one with room and little in flight. One
    /// of `not` if these alone deliver, or no other may be chosen. Where none is known to deliver, the usable come before the suspect, and
    /// those that have not been asked before those that have.
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

    /// Whether a path may be chosen that is not suspect, and from which no answer is waited for.
    pub(crate) fn has_unasked(&self) -> bool {
        self.choosable().any(|i| self.paths[i].is_open && !self.paths[i].is_asked())
    }

    /// Closes the paths that have been asked for an answer and have not given it in `wait_ns`. Returns whether there are any.
    pub(crate) fn close_overdue(&mut self, now: Time, wait_ns: u64) -> bool {
        let mut is_news = false;
        for path in self.paths.iter_mut().filter(|path| path.is_open && path.is_overdue(now, wait_ns)) {
            (path.is_open, path.next_probe) = (false, now);
            is_news = true;
        }
        is_news
    }

    /// Traffic of connection `index` keeps the paths under observation; `leads`: probes may travel on it. Returns whether
    /// the timer that sees to that must be armed.
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

    /// Connection `index` ends or restarts. The answers to probes that travelled on it may never come, and their paths are
    /// not to blame for that.
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

    /// Largest smoothed RTT (with endpoint delay) over the selected paths, its deviation; `None` if nothing is measured.
    #[inline]
    pub(crate) fn rtt(&self) -> Option<(u64, u64)> {
        self.rtt
    }

    /// What [`rtt`](Self::rtt) and the longest answer follow from, of one path; what is not known is 0.
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
        // A path that was below the largest, and is not above it now, changes nothing.
        let (rtt, answer_ns) = (self.rtt.unwrap_or_default(), self.answer_ns.unwrap_or_default());
        let is_below = before.rtt < rtt && before.answer_ns < answer_ns;
        if !(is_below && after.rtt <= rtt && after.answer_ns <= answer_ns) {
            self.update_rtt();
        }
    }

    /// A path was measured, or others were selected.
    fn update_rtt(&mut self) {
        let (mut rtt, mut answer) = ((0, 0), 0);
        for path in self.selected() {
            let times = self.measured_of(*path);
            rtt = rtt.max(times.rtt);
            answer = answer.max(times.answer_ns);
        }
        // What is not known is 0.
        let (rtt, answer) = ((rtt.0 > 0).then_some(rtt), (answer > 0).then_some(answer));
        if (rtt, answer) != (self.rtt, self.answer_ns) {
            (self.rtt, self.answer_ns) = (rtt, answer);
            self.update_timing();
        }
    }

    /// Time until the fastest path would have answered a packet that asks for an ACK at once, ns.
    #[cold]
    pub(crate) fn quickest_answer_ns(&self) -> u64 {
        let known = self.choosable().map(|i| &self.paths[i].fabric).filter(|fabric| fabric.is_known());
        known.map(answer_ns).min().unwrap_or(u64::MAX)
    }

    /// The longest that it holds ACKs back, as it said, ns.
    pub(crate) fn ack_delay_ns(&self) -> u64 {
        self.ack_delay_ns
    }

    /// It says how long it may hold ACKs back.
    pub(crate) fn set_ack_delay(&mut self, ns: u64) {
        self.ack_delay_ns = ns;
        self.update_timing();
    }

    /// An ACK was held back for so long before it was sent.
    pub(crate) fn on_held(&mut self, now: Time, held_ns: u64) {
        if self.hold.sample(now, held_ns) {
            self.update_timing();
        }
    }

    /// How long loss timers wait, without any connection's patience.
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

/// Time until the ACK of a packet that asks for it at once, on a path with this fabric delay.
#[inline(always)]
fn answer_ns(fabric: &Rtt) -> u64 {
    fabric.smoothed_ns() + (fabric.smoothed_ns() / 2).max(4 * fabric.variance_ns()).max(20 * US)
}

/// How long the longest hold of an ACK is remembered, at least; at most twice as long.
const HOLD_WINDOW_NS: u64 = 100 * MS;
/// Holds after which the longest of them is believed.
const HOLDS_FIRST: u8 = 16;

/// The longest hold of an ACK in this window of time and the one before. Before anything is known, whatever was announced
/// is possible.
#[derive(Clone, Copy, Debug, Default)]
struct Hold {
    now_ns: u64,
    before_ns: u64,
    since: Time,
    samples: u8,
}

impl Hold {
    /// Whether the longest may be another one now.
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
    /// The path in use did not deliver in time: the next packet takes another.
    pub(crate) fn leave(&mut self, path: PathId) {
        if self.path == path {
            self.left = 0;
        }
    }

    /// The path in use, if its group goes on, and it is open and has room for `packets` packets, which leave now.
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

    /// A path for the next `packets` packets, and how many of them it takes, which leave now; `None` when congestion control closes
    /// all.
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
            // What is left of the path's room is too small for all.
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

/// First window of a path, packets: what a short queue of a slow link takes. It doubles each round trip.
const FIRST_WINDOW: u16 = 32;

fn swift_config(config: &Config) -> SwiftConfig {
    // Each of k paths starts with its share of the connection's first window, or less.
    let share = (config.initial_window / u16::from(config.spray_paths.max(1))).clamp(1, FIRST_WINDOW);
    let swift = SwiftConfig::new(share, config.max_window, config.swift_noise_ns);
    let swift = SwiftConfig { doubles: true, ..swift };
    match config.heavy_loss_percent {
        0 => swift,
        percent => SwiftConfig { heavy_loss: f32::from(percent) / 100.0, ..swift },
    }
}
