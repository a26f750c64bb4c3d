//! A peer host and the table of its paths; which of them are sprayed over (NSDI'26, 4.1).
//!
//! Paths belong to the pair of hosts, not to a connection: all connections to a peer share what is known of its paths,
//! so a new connection starts informed and an idle one costs no probes.

use bifrost_wire::bifrost::PathId;

use crate::cc::{CongestionControl, Swift, SwiftConfig, Unlimited};
use crate::config::{CcKind, Config};
use crate::path::{Path, PathState, SUSPECT_LOSS};
use crate::time::{MS, Time, US};

/// A peer host.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) paths: Vec<Path>,
    selected: [PathId; PathId::MAX],
    selected_len: usize,
    next_selection: Time,
    stale: bool,
    /// The connection that last sent or received; probes travel on it.
    pub(crate) probe_conn: Option<u32>,
    pub(crate) last_active: Time,
    /// Until then the peer counts as plain VXLAN.
    pub(crate) plain_until: Time,
    /// Set-ups that it did not answer, since it last did.
    pub(crate) unanswered: u32,
    /// Its longest ACK delay, as it said.
    pub(crate) ack_delay_ns: u64,
    pub(crate) probe_timer_armed: bool,
    pub(crate) connections: u32,
    next_forgive: Time,
    /// Paths that the selection has found to lose too much, not yet counted.
    pub(crate) newly_suspect: u64,
}

impl Peer {
    pub(crate) fn new(config: &Config, paths: usize) -> Self {
        let paths: Vec<Path> = (0..paths.clamp(1, PathId::MAX)).map(|_| Path::new(controller(config))).collect();
        let mut peer = Peer {
            paths,
            selected: [PathId::default(); PathId::MAX],
            selected_len: 0,
            next_selection: Time(0),
            stale: true,
            probe_conn: None,
            last_active: Time(0),
            plain_until: Time(0),
            unanswered: 0,
            ack_delay_ns: MS,
            probe_timer_armed: false,
            connections: 0,
            next_forgive: Time(0),
            newly_suspect: 0,
        };
        peer.select(config, Time(0));
        peer
    }

    /// The paths that are sprayed over, best first.
    pub(crate) fn selected(&self) -> &[PathId] {
        &self.selected[..self.selected_len]
    }

    /// The selection is to be made anew before the next group.
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

    fn select(&mut self, config: &Config, now: Time) {
        self.stale = false;
        let known = self.paths.iter().filter(|p| p.fabric.is_known());
        let fastest = known.map(|p| p.fabric.smoothed_ns()).min().unwrap_or(0);
        self.next_selection = now.after((2 * fastest).clamp(100 * US, 10 * MS));
        let least_loss = self.paths.iter().map(|p| p.loss).fold(1.0f32, f32::min);
        for path in &mut self.paths {
            if path.state == PathState::Usable && path.loss > SUSPECT_LOSS && path.loss > 3.0 * least_loss + 0.01 {
                self.newly_suspect += u64::from(path.suspect(now));
            }
        }
        if now >= self.next_forgive {
            self.next_forgive = now.after(10_000 * MS);
            self.paths.iter_mut().filter(|p| p.state == PathState::Usable).for_each(Path::forgive);
        }
        let any_usable = self.paths.iter().any(|p| p.state == PathState::Usable);
        let stay = |i: usize| if self.selected().iter().any(|p| p.index() == i) { config.stickiness_ns } else { 0 };
        let mut order: [(u64, usize); PathId::MAX] = [(u64::MAX, usize::MAX); PathId::MAX];
        let mut count = 0;
        for (i, path) in self.paths.iter().enumerate() {
            if any_usable && path.state != PathState::Usable {
                continue;
            }
            // An unmeasured path costs nothing yet: it is tried, and measured by that.
            order[count] = (path.cost_ns().saturating_sub(stay(i)), i);
            count += 1;
        }
        order[..count].sort_unstable();
        let best = order[0].0;
        // A path several times slower than the best would hold up more than it carries.
        let limit = best.saturating_mul(3).saturating_add(config.stickiness_ns).saturating_add(200 * US);
        self.selected_len = 0;
        for &(cost, i) in order[..count].iter().take(usize::from(config.spray_paths.max(1))) {
            if self.selected_len > 0 && cost > limit {
                break;
            }
            self.selected[self.selected_len] = PathId::masked(i as u8);
            self.selected_len += 1;
        }
    }

    /// A path other than `not`, for what was lost on `not`: a selected one with little in flight; if there is none, the
    /// usable or else the suspect one from which something arrived last. `not` itself only if it is the only path.
    pub(crate) fn other_than(&self, not: PathId) -> PathId {
        let selected = self.selected().iter().copied().filter(|p| *p != not);
        let selected = selected.min_by_key(|p| self.paths[p.index()].in_flight);
        let others = || {
            let others = (0..self.paths.len()).filter(|i| *i != not.index());
            let best = others.max_by_key(|i| {
                let path = &self.paths[*i];
                (path.state == PathState::Usable, path.last_arrival)
            });
            best.map(|i| PathId::masked(i as u8))
        };
        selected.or_else(others).unwrap_or(not)
    }

    /// Whether `path` is one of this peer's paths.
    pub(crate) fn has_path(&self, path: PathId) -> bool {
        path.index() < self.paths.len()
    }

    /// Largest smoothed RTT (with endpoint delay) over the selected paths, its deviation; `None` if nothing is measured.
    pub(crate) fn rtt(&self) -> Option<(u64, u64)> {
        self.selected()
            .iter()
            .map(|p| &self.paths[p.index()].total)
            .filter(|r| r.is_known())
            .map(|r| (r.smoothed_ns(), r.variance_ns()))
            .max()
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

    /// A path for the next `packets` packets, which stay together; `None` when congestion control closes all of them.
    pub(crate) fn choose(&mut self, peer: &mut Peer, config: &Config, now: Time, packets: u16) -> Option<PathId> {
        if self.left > 0 {
            let path = &peer.paths[self.path.index()];
            if path.state == PathState::Usable && path.has_room(now) {
                self.left = self.left.saturating_sub(packets);
                return Some(self.path);
            }
        }
        peer.refresh(config, now);
        let n = peer.selected().len();
        for _ in 0..n {
            self.turn = (self.turn + 1) % n as u8;
            let candidate = peer.selected()[usize::from(self.turn)];
            if peer.paths[candidate.index()].has_room(now) {
                self.path = candidate;
                self.left = config.group_packets.saturating_sub(packets);
                return Some(candidate);
            }
        }
        None
    }
}

fn controller(config: &Config) -> Box<dyn CongestionControl> {
    match config.congestion_control {
        CcKind::Swift => {
            // Each of k paths starts with its share of the connection's first window.
            let share = (config.initial_window / u16::from(config.spray_paths.max(1))).max(64);
            Box::new(Swift::new(SwiftConfig::new(share, config.max_window, config.swift_noise_ns)))
        }
        CcKind::None => Box::new(Unlimited),
    }
}
