//! The sessions of one port, in the order in which they are evicted.
//!
//! There is an LRU list for each direction, class and source. Its first session is the one whose remote end has been
//! silent for longest. A secret hash spreads the sources over a few lists (stochastic fairness queueing, McKenney,
//! INFOCOM 1990), so the time to find the source with the most sessions does not depend on the number of sources.
//!
//! When there is no room for a new session, the victim is the first session of a list:
//! 1. If the new session's own source has more than an eighth of the port's sessions ([`FAIR_SHARE`]), a list of this
//!    source, in its lowest class that has more than its guaranteed part of the source's sessions.
//! 2. Otherwise a list of the lowest class that has more sessions than it is guaranteed, and there the longest list.
//!    Each class of each direction is guaranteed a 64th of the port's sessions, established TCP connections an eighth.
//!    If the class exceeds this in both directions, the direction with more sessions gives one up; among established
//!    connections, it is the new session's own direction.
//!
//! The guarantees add up to less than all sessions, so there is always a victim.

use std::fmt;

use super::list::{Links, List, NONE};
use super::state::Class;
use crate::ids::Direction;

/// Number of lists of one direction and class, over which the sources are spread. A power of two.
const SOURCES: usize = 128;
const CLASSES: usize = Class::ALL.len();
/// A source with more than 1/`FAIR_SHARE` of a port's sessions evicts its own ones.
const FAIR_SHARE: u32 = 8;

impl Class {
    /// Divisor of the guarantee: other classes, and this class of the other direction, leave one in this many of the
    /// port's sessions to the class.
    const fn guarantee(self) -> u32 {
        match self {
            Class::Established => 8,
            _ => 64,
        }
    }
}

/// The list in which a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) origin: Direction,
    pub(crate) class: Class,
    /// As computed by [`Queues::source`].
    pub(crate) source: u8,
}

/// The lists of a port's sessions, with counts.
pub(crate) struct Queues {
    total: u32,
    by_class: [[u32; CLASSES]; 2],
    by_source: [[u32; SOURCES]; 2],
    lengths: [[[u32; SOURCES]; CLASSES]; 2],
    lists: [[[List; SOURCES]; CLASSES]; 2],
}

impl Queues {
    /// Creates empty lists.
    pub(crate) fn new() -> Box<Self> {
        Box::new(Queues {
            total: 0,
            by_class: [[0; CLASSES]; 2],
            by_source: [[0; SOURCES]; 2],
            lengths: [[[0; SOURCES]; CLASSES]; 2],
            lists: [[[List::EMPTY; SOURCES]; CLASSES]; 2],
        })
    }

    /// Number of a source's list, by the hash of the source.
    pub(crate) fn source(hash: u64) -> u8 {
        (hash >> 32) as u8 % SOURCES as u8
    }

    /// Appends session `index`, which is in no list, to the list `at`.
    pub(crate) fn push<T>(&mut self, items: &mut [T], index: u32, at: Place, links: fn(&mut T) -> &mut Links) {
        let (origin, class, source) = (at.origin as usize, at.class as usize, usize::from(at.source));
        self.total += 1;
        self.by_class[origin][class] += 1;
        self.by_source[origin][source] += 1;
        self.lengths[origin][class][source] += 1;
        self.lists[origin][class][source].push_back(items, index, links);
    }

    /// Removes session `index` from the list `at`.
    pub(crate) fn remove<T>(&mut self, items: &mut [T], index: u32, at: Place, links: fn(&mut T) -> &mut Links) {
        let (origin, class, source) = (at.origin as usize, at.class as usize, usize::from(at.source));
        self.total -= 1;
        self.by_class[origin][class] -= 1;
        self.by_source[origin][source] -= 1;
        self.lengths[origin][class][source] -= 1;
        self.lists[origin][class][source].remove(items, index, links);
    }

    /// Moves session `index` to the end of the list `at`.
    pub(crate) fn renew<T>(&mut self, items: &mut [T], index: u32, at: Place, links: fn(&mut T) -> &mut Links) {
        let list = &mut self.lists[at.origin as usize][at.class as usize][usize::from(at.source)];
        list.remove(items, index, links);
        list.push_back(items, index, links);
    }

    /// The session to evict; `None`: there are no sessions. `newcomer`: direction and source of the new session, if it
    /// belongs to this port.
    pub(crate) fn victim(&self, newcomer: Option<(Direction, u8)>) -> Option<u32> {
        let own = newcomer.and_then(|(origin, source)| self.of_own_source(origin, usize::from(source)));
        let (origin, class, source) = own.or_else(|| self.of_lowest_class(newcomer.map(|(origin, _)| origin)))?;
        Some(self.lists[origin][class][source].head).filter(|index| *index != NONE)
    }

    /// A list of the new session's own source, if that has more than its share.
    fn of_own_source(&self, origin: Direction, source: usize) -> Option<(usize, usize, usize)> {
        let origin = origin as usize;
        let own = self.by_source[origin][source];
        if own <= self.total / FAIR_SHARE {
            return None;
        }
        let exceeds = |class: &Class| self.lengths[origin][*class as usize][source] > own / class.guarantee();
        Class::ALL.into_iter().find(exceeds).map(|class| (origin, class as usize, source))
    }

    /// The longest list of the lowest class that has more sessions than its guarantee.
    fn of_lowest_class(&self, own: Option<Direction>) -> Option<(usize, usize, usize)> {
        for class in Class::ALL {
            let of_class = self.by_class.map(|counts| counts[class as usize]);
            let larger = usize::from(of_class[1] > of_class[0]);
            let first = own.filter(|_| class == Class::Established).map_or(larger, |origin| origin as usize);
            for origin in [first, 1 - first] {
                if self.by_class[origin][class as usize] > self.total / class.guarantee() {
                    let lengths = &self.lengths[origin][class as usize];
                    let longest = lengths.iter().max()?;
                    let source = lengths.iter().position(|length| length == longest)?;
                    return Some((origin, class as usize, source));
                }
            }
        }
        None
    }
}

impl fmt::Debug for Queues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lists = self.lists.as_flattened().as_flattened().iter().enumerate();
        let used = lists.filter(|(_, list)| list.head != NONE);
        f.debug_struct("Queues").field("by_class", &self.by_class).field("lists", &used.collect::<Vec<_>>()).finish()
    }
}
