//! Routes of a network that are learned when a packet needs them, instead of being configured.
//!
//! They are looked up only after the configured routes, so packets with a configured route cost nothing more. Ranges
//! are disjoint: a new answer replaces the earlier ones that it overlaps. The caller bounds the number of routes;
//! negative answers are bounded here.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};

use bifrost_tables::IpNet;
use bifrost_wire::Mac;
use foldhash::fast::RandomState;

use crate::ids::PeerId;
use crate::location::{Location, NextHop, Path};

/// Most negative answers that a network keeps. At the bound, all of them are forgotten, and asked for again.
const MOST_NEGATIVE: usize = 4096;

/// A learned answer about a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LearnedAnswer {
    /// A vNIC on another host.
    Route {
        /// The host.
        peer: PeerId,
        /// The vNIC.
        mac: Mac,
        /// Path MTU, bytes.
        mtu: u16,
    },
    /// No vNIC has these addresses, as of now; asked again after this time, ns.
    Nothing {
        /// On the clock of [`Switch::advance`](crate::Switch::advance).
        until_ns: u64,
    },
    /// The network has as many learned routes as it may have; asked again after this time, ns.
    Full {
        /// On the clock of [`Switch::advance`](crate::Switch::advance).
        until_ns: u64,
    },
}

/// A change of a network's learned routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearnedChange {
    /// The range of addresses.
    pub range: IpNet,
    /// `None`: what was learned about the range, and about parts of it, is forgotten.
    pub answer: Option<LearnedAnswer>,
}

/// What is known of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    Route(NextHop),
    Nothing,
    Full,
    /// It must be asked.
    Unknown,
    /// It is not learned in this network.
    NotLearned,
}

/// The learned routes of a network.
#[derive(Clone, Debug, Default)]
pub(crate) struct Learned {
    /// Prefixes in which routes are learned.
    within: Vec<IpNet>,
    /// By first address.
    ranges: BTreeMap<u128, Range>,
    /// The vNICs of the routes, each with the number of its routes.
    vnics: HashMap<Mac, (Path, u32), RandomState>,
    negative: usize,
}

#[derive(Debug)]
struct Range {
    last: u128,
    answer: LearnedAnswer,
    /// Whether a packet has used it since [`Learned::take_used`].
    used: AtomicBool,
}

impl Clone for Range {
    fn clone(&self) -> Self {
        Range { last: self.last, answer: self.answer, used: AtomicBool::new(self.used.load(Ordering::Relaxed)) }
    }
}

impl Learned {
    pub(crate) fn new(within: &[IpNet]) -> Self {
        Learned { within: within.to_vec(), ..Learned::default() }
    }

    /// Takes over what an earlier configuration has learned, as far as it is still to be learned.
    pub(crate) fn adopt(&mut self, former: &mut Learned) {
        let within = std::mem::take(&mut self.within);
        let is_same = within == former.within;
        *self = std::mem::take(former);
        self.within = within;
        if !is_same {
            let outside = |&(&first, _): &(&u128, &Range)| !self.has(address(first));
            let gone: Vec<u128> = self.ranges.iter().filter(outside).map(|(first, _)| *first).collect();
            for first in gone {
                self.remove(first);
            }
        }
    }

    /// Whether routes to an address are learned.
    pub(crate) fn has(&self, addr: IpAddr) -> bool {
        self.within.iter().any(|prefix| prefix.contains(&addr))
    }

    /// What is known of an address at a time on the clock of negative answers.
    pub(crate) fn look_up(&self, addr: IpAddr, now_ns: u64) -> Known {
        match self.range(addr).map(|range| range.answer) {
            Some(LearnedAnswer::Nothing { until_ns }) if now_ns < until_ns => return Known::Nothing,
            Some(LearnedAnswer::Full { until_ns }) if now_ns < until_ns => return Known::Full,
            _ => {}
        }
        match self.route(addr) {
            Some(hop) => Known::Route(hop),
            None if self.has(addr) => Known::Unknown,
            None => Known::NotLearned,
        }
    }

    /// The learned route to an address, which counts as used.
    pub(crate) fn route(&self, addr: IpAddr) -> Option<NextHop> {
        let range = self.range(addr)?;
        let LearnedAnswer::Route { peer, mac, mtu } = range.answer else { return None };
        range.used.store(true, Ordering::Relaxed);
        Some(NextHop { mac, path: Path::new(Location::Remote(peer), mtu) })
    }

    fn range(&self, addr: IpAddr) -> Option<&Range> {
        let place = number(addr);
        self.ranges.range(..=place).next_back().map(|(_, range)| range).filter(|range| range.last >= place)
    }

    /// The location of a vNIC that a learned route leads to.
    pub(crate) fn path(&self, mac: Mac) -> Option<Path> {
        self.vnics.get(&mac).map(|(path, _)| *path)
    }

    /// Applies a change. Returns whether packets may now go elsewhere that had a route before.
    pub(crate) fn change(&mut self, change: &LearnedChange) -> bool {
        let range = change.range.trunc();
        let (first, last) = (number(range.network()), number(range.broadcast()));
        // Ranges are disjoint, so at most one begins before this one and reaches into it.
        let before = self.ranges.range(..first).next_back().filter(|(_, range)| range.last >= first);
        let mut stale: Vec<u128> = before.map(|(first, _)| *first).into_iter().collect();
        stale.extend(self.ranges.range((Bound::Included(first), Bound::Included(last))).map(|(first, _)| *first));
        let mut is_other = false;
        for place in stale {
            // The part of a former range outside of the new one is not known any more.
            let is_within = place >= first && self.ranges.get(&place).is_some_and(|range| range.last <= last);
            let former = self.remove(place);
            is_other |= former.is_some_and(|former| is_route(&former) && !(is_within && change.answer == Some(former)));
        }
        let Some(answer) = change.answer else { return is_other };
        match answer {
            LearnedAnswer::Route { peer, mac, mtu } => {
                let path = Path::new(Location::Remote(peer), mtu);
                let (known, count) = self.vnics.entry(mac).or_insert((path, 0));
                is_other |= *count > 0 && *known != path;
                (*known, *count) = (path, *count + 1);
            }
            LearnedAnswer::Nothing { .. } | LearnedAnswer::Full { .. } => {
                if self.negative >= MOST_NEGATIVE {
                    self.ranges.retain(|_, range| is_route(&range.answer));
                    self.negative = 0;
                }
                self.negative += 1;
            }
        }
        self.ranges.insert(first, Range { last, answer, used: AtomicBool::new(false) });
        is_other
    }

    /// The first addresses of routes that packets have used since the last call, for at most `most` routes from `from`
    /// on; and where to go on.
    pub(crate) fn take_used(&self, from: IpAddr, most: usize, out: &mut Vec<IpAddr>) -> Option<IpAddr> {
        let mut rest = self.ranges.range(number(from)..);
        for (first, range) in rest.by_ref().take(most) {
            if range.used.swap(false, Ordering::Relaxed) {
                out.push(address(*first));
            }
        }
        rest.next().map(|(first, _)| address(*first))
    }

    fn remove(&mut self, first: u128) -> Option<LearnedAnswer> {
        let answer = self.ranges.remove(&first)?.answer;
        match answer {
            LearnedAnswer::Route { mac, .. } => {
                if let Some((_, count)) = self.vnics.get_mut(&mac) {
                    *count -= 1;
                    if *count == 0 {
                        self.vnics.remove(&mac);
                    }
                }
            }
            LearnedAnswer::Nothing { .. } | LearnedAnswer::Full { .. } => self.negative -= 1,
        }
        Some(answer)
    }
}

fn is_route(answer: &LearnedAnswer) -> bool {
    matches!(answer, LearnedAnswer::Route { .. })
}

/// IPv4 addresses as IPv4-mapped ones (RFC 4291, section 2.5.5.2), which no packet has as its address.
fn number(addr: IpAddr) -> u128 {
    match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped().to_bits(),
        IpAddr::V6(addr) => addr.to_bits(),
    }
}

fn address(number: u128) -> IpAddr {
    std::net::Ipv6Addr::from_bits(number).to_canonical()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().expect("a prefix")
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn route(peer: u32) -> Option<LearnedAnswer> {
        Some(LearnedAnswer::Route { peer: PeerId(peer), mac: Mac([2, 0, 0, 0, 0, peer as u8]), mtu: 1500 })
    }

    fn peer(learned: &Learned, addr: &str) -> Option<u32> {
        match learned.look_up(ip(addr), 0) {
            Known::Route(NextHop { path, .. }) => path.location().peer().map(|peer| peer.0),
            _ => None,
        }
    }

    #[test]
    fn an_answer_holds_for_its_range_and_a_negative_one_for_its_time() {
        let mut learned = Learned::new(&[net("10.0.0.0/8"), net("fd00::/8")]);
        assert_eq!(learned.look_up(ip("10.0.0.1"), 0), Known::Unknown);
        assert_eq!(learned.look_up(ip("11.0.0.1"), 0), Known::NotLearned);
        assert!(!learned.change(&LearnedChange { range: net("10.0.0.0/30"), answer: route(1) }), "it was unknown");
        assert!(!learned.change(&LearnedChange { range: net("fd00::1/128"), answer: route(2) }));
        let expected = [("10.0.0.0", Some(1)), ("10.0.0.3", Some(1)), ("10.0.0.4", None), ("fd00::1", Some(2))];
        expected.into_iter().for_each(|(addr, to)| assert_eq!(peer(&learned, addr), to, "{addr}"));
        let nothing = Some(LearnedAnswer::Nothing { until_ns: 10 });
        assert!(learned.change(&LearnedChange { range: net("10.0.0.0/31"), answer: nothing }), "a route is gone");
        assert_eq!(learned.look_up(ip("10.0.0.1"), 0), Known::Nothing);
        assert_eq!(learned.look_up(ip("10.0.0.2"), 0), Known::Unknown, "the wider answer is gone as a whole");
        assert_eq!(learned.look_up(ip("10.0.0.1"), 10), Known::Unknown);
        assert_eq!(learned.path(Mac([2, 0, 0, 0, 0, 1])), None);
        assert_eq!(learned.path(Mac([2, 0, 0, 0, 0, 2])).map(|path| path.mtu), Some(1500));
        assert!(learned.change(&LearnedChange { range: net("fd00::/16"), answer: None }));
        assert_eq!(learned.look_up(ip("fd00::1"), 0), Known::Unknown);
    }

    #[test]
    fn used_routes_are_reported_once() {
        let mut learned = Learned::new(&[net("0.0.0.0/0")]);
        for n in 0..5 {
            learned.change(&LearnedChange { range: net(&format!("10.0.0.{n}/32")), answer: route(1) });
        }
        learned.look_up(ip("10.0.0.1"), 0);
        learned.look_up(ip("10.0.0.4"), 0);
        let mut used = Vec::new();
        let next = learned.take_used(ip("::"), 3, &mut used);
        assert_eq!((used.as_slice(), next), (&[ip("10.0.0.1")][..], Some(ip("10.0.0.3"))));
        assert_eq!(learned.take_used(ip("10.0.0.3"), 3, &mut used), None);
        assert_eq!(used, [ip("10.0.0.1"), ip("10.0.0.4")]);
        used.clear();
        learned.take_used(ip("::"), 10, &mut used);
        assert!(used.is_empty());
    }

    #[test]
    fn negative_answers_are_bounded() {
        let mut learned = Learned::new(&[net("0.0.0.0/0")]);
        learned.change(&LearnedChange { range: net("9.0.0.1/32"), answer: route(1) });
        for n in 0..3 * MOST_NEGATIVE as u32 {
            let range = IpNet::from(IpAddr::from((0x0a00_0000 + n).to_be_bytes()));
            learned.change(&LearnedChange { range, answer: Some(LearnedAnswer::Nothing { until_ns: 1 }) });
            assert!(learned.ranges.len() <= MOST_NEGATIVE + 1 && learned.negative < learned.ranges.len());
        }
        assert_eq!(peer(&learned, "9.0.0.1"), Some(1));
    }

    proptest! {
        /// The last change that covers an address, unless a later one has overlapped its range, says what is known.
        #[test]
        fn the_last_answer_counts(changes in prop::collection::vec((0u8..64, 26u8..=32, prop::option::of(0u32..3)), 0..40)) {
            let mut learned = Learned::new(&[net("10.0.0.0/8")]);
            let mut oracle: Vec<(IpNet, u32)> = Vec::new();
            for (host, len, to) in changes {
                let range = IpNet::new_assert(IpAddr::from([10, 0, 0, host]), len).trunc();
                let before: Vec<_> = (0..64u8).map(|n| peer(&learned, &format!("10.0.0.{n}"))).collect();
                let changed = learned.change(&LearnedChange { range, answer: to.and_then(route) });
                oracle.retain(|(known, _)| !known.contains(&range) && !range.contains(known));
                oracle.extend(to.map(|to| (range, to)));
                let mut has_moved = false;
                for n in 0..64u8 {
                    let addr = IpAddr::from([10, 0, 0, n]);
                    let expected = oracle.iter().find(|(range, _)| range.contains(&addr)).map(|(_, to)| *to);
                    let now = peer(&learned, &addr.to_string());
                    prop_assert_eq!(now, expected);
                    has_moved |= before[usize::from(n)].is_some() && before[usize::from(n)] != now;
                }
                // It may say so without need, but not the other way round.
                prop_assert!(changed || !has_moved);
                for to in 0..3u32 {
                    let count = oracle.iter().filter(|(_, known)| *known == to).count() as u32;
                    let known = learned.vnics.get(&Mac([2, 0, 0, 0, 0, to as u8])).map_or(0, |(_, count)| *count);
                    prop_assert_eq!(known, count);
                }
            }
        }
    }
}
