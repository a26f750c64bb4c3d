//! The state of a pod's links that its threads share: which links work, the known next hops of each, and the link by
//! which packets leave.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use bifrost_tables::{ExactMap, exact_map};
use bifrost_wire::Mac;

/// Link-layer addresses by the next hops of the pod's tables.
pub(super) type Known = Arc<ExactMap<IpAddr, Mac>>;

/// The state of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LinkState {
    /// It is not connected, or its router does not answer.
    Down,
    /// Its router answers, but BFD is up with none of its proxies.
    Unwatched,
    /// It works.
    Up,
}

impl LinkState {
    pub(super) fn name(self) -> &'static str {
        match self {
            LinkState::Down => "down",
            LinkState::Unwatched => "unwatched",
            LinkState::Up => "up",
        }
    }
}

/// All links.
#[derive(Debug)]
pub(super) struct Links {
    all: Vec<Link>,
    /// Incremented with every change of known next hops.
    generation: AtomicU64,
}

#[derive(Debug)]
struct Link {
    pipeline: u16,
    /// Number of connected interfaces.
    connected: AtomicUsize,
    /// The link by which packets leave that arrived by this one.
    egress: AtomicUsize,
    known: RwLock<Known>,
}

impl Links {
    /// `pipelines`: the pipeline of each link. Nothing is connected yet.
    pub(super) fn new(pipelines: impl Iterator<Item = u16>) -> Self {
        let link = |(number, pipeline)| Link {
            pipeline,
            connected: AtomicUsize::new(0),
            egress: AtomicUsize::new(number),
            known: RwLock::new(Arc::new(exact_map(0))),
        };
        Links { all: pipelines.enumerate().map(link).collect(), generation: AtomicU64::new(0) }
    }

    /// An interface of a link has connected or disconnected.
    pub(super) fn connect(&self, link: usize, connected: bool) {
        match connected {
            true => self.all[link].connected.fetch_add(1, Ordering::Relaxed),
            false => self.all[link].connected.fetch_sub(1, Ordering::Relaxed),
        };
    }

    pub(super) fn is_connected(&self, link: usize) -> bool {
        self.all[link].connected.load(Ordering::Relaxed) > 0
    }

    /// Chooses the egress of each link from the states of all links.
    pub(super) fn set_states(&self, states: &[LinkState]) {
        for (number, link) in self.all.iter().enumerate() {
            let best = egress(states, number, |other| self.are_behind_one_pipeline(number, other));
            link.egress.store(best, Ordering::Relaxed);
        }
    }

    /// The link by which packets leave that arrived by `link`.
    #[inline]
    pub(super) fn egress(&self, link: usize) -> usize {
        self.all[link].egress.load(Ordering::Relaxed)
    }

    /// Whether a packet that arrived by one link can return by the other one and keep its place in an order queue.
    pub(super) fn are_behind_one_pipeline(&self, one: usize, other: usize) -> bool {
        self.all[one].pipeline == self.all[other].pipeline
    }

    /// Replaces the known next hops of a link.
    pub(super) fn set_known(&self, link: usize, known: impl Iterator<Item = (IpAddr, Mac)>) {
        let mut map = exact_map(fastrand::u64(..));
        map.extend(known);
        *self.all[link].known.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(map);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Changes when [`known`](Self::known) does.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The known next hops of each link.
    pub(super) fn known(&self) -> Vec<Known> {
        let known = |link: &Link| Arc::clone(&link.known.read().unwrap_or_else(PoisonError::into_inner));
        self.all.iter().map(known).collect()
    }
}

/// The link by which packets leave that arrived by link `of`: `of` itself, if no other link is in a better state;
/// otherwise one of the links in the best state, preferably one behind the same pipeline (`is_near`).
fn egress(states: &[LinkState], of: usize, is_near: impl Fn(usize) -> bool) -> usize {
    let Some(best) = states.iter().max().filter(|best| states[of] < **best) else { return of };
    let good: Vec<usize> = (0..states.len()).filter(|link| states[*link] == *best).collect();
    let near: Vec<usize> = good.iter().copied().filter(|link| is_near(*link)).collect();
    let choice = if near.is_empty() { &good } else { &near };
    // Spreads the traffic of several failed links over the working ones.
    choice[of % choice.len()]
}

#[cfg(test)]
mod tests {
    use super::LinkState::{Down, Unwatched, Up};
    use super::*;

    #[test]
    fn packets_leave_by_the_link_they_came_by_if_it_works() {
        let links = Links::new([0, 0, 1, 1].into_iter());
        let egress = |states: [LinkState; 4]| {
            links.set_states(&states);
            [0, 1, 2, 3].map(|link| links.egress(link))
        };
        assert_eq!(egress([Up, Up, Up, Up]), [0, 1, 2, 3]);
        assert_eq!(egress([Down, Up, Up, Up]), [1, 1, 2, 3], "the other one of the same pipeline");
        assert_eq!(egress([Down, Down, Up, Up]), [2, 3, 2, 3], "both of the other pipeline");
        assert_eq!(egress([Unwatched, Down, Down, Up]), [3, 3, 3, 3]);
        // Without any proxy, packets still leave by links whose router answers.
        assert_eq!(egress([Unwatched, Unwatched, Unwatched, Down]), [0, 1, 2, 2]);
        assert_eq!(egress([Down, Down, Down, Down]), [0, 1, 2, 3]);
    }

    #[test]
    fn an_interface_more_or_less() {
        let links = Links::new([0].into_iter());
        links.connect(0, true);
        links.connect(0, true);
        links.connect(0, false);
        assert!(links.is_connected(0));
        links.connect(0, false);
        assert!(!links.is_connected(0));
        let before = links.generation();
        links.set_known(0, [([10, 0, 0, 1].into(), Mac([2, 0, 0, 0, 0, 1]))].into_iter());
        assert!(links.generation() != before && links.known()[0].len() == 1);
    }
}
