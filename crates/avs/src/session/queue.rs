//! The sessions of one port, in the order in which they make room for others.
//!
//! There is a list for each direction, class and source; its first session is the one whose remote end has been silent longest. Sources
//! are spread over a few lists by a secret hash (stochastic fairness queueing, McKenney, INFOCOM 1990), so that finding the one with
//! most sessions takes the same time however many there are.
//!
//! Who gives, when there is no room for a newcomer:
//! 1. The newcomer's own source, if it has more than an eighth of the port's sessions ([`FAIR_SHARE`]).
//! 2. Otherwise the lowest class that has more than it is guaranteed, and within it the source with most. Each class of each direction is
//!    guaranteed a 64th of the port's sessions, established TCP connections an eighth. If both directions have more than that, the one
//!    with more gives; of established connections the newcomer's own.
//!
//! Guarantees add up to less than the whole, so there is always somebody who gives.

use std::fmt;

use super::list::{Links, List, NONE};
use super::state::Class;
use crate::ids::Direction;

/// Lists of one direction and class, over which sources are spread. A power of two.
const SOURCES: usize = 128;
const CLASSES: usize = Class::ALL.len();
/// A source with more than this part of a port's sessions gives for its own newcomers.
const FAIR_SHARE: u32 = 8;

impl Class {
    /// The part of a port's sessions that other classes, and this class of the other direction, leave to it.
    const fn guarantee(self) -> u32 {
        match self {
            Class::Established => 8,
            _ => 64,
        }
    }
}

/// Where a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) origin: Direction,
    pub(crate) class: Class,
    /// As [`Queues::source`] says.
    pub(crate) source: u8,
}

/// The sessions of a port.
pub(crate) struct Queues {
    total: u32,
    by_class: [[u32; CLASSES]; 2],
    by_source: [[u32; SOURCES]; 2],
    lengths: [[[u32; SOURCES]; CLASSES]; 2],
    lists: [[[List; SOURCES]; CLASSES]; 2],
}

impl Queues {
    /// None.
    pub(crate) fn new() -> Box<Self> {
        Box::new(Queues {
            total: 0,
            by_class: [[0; CLASSES]; 2],
            by_source: [[0; SOURCES]; 2],
            lengths: [[[0; SOURCES]; CLASSES]; 2],
            lists: [[[List::EMPTY; SOURCES]; CLASSES]; 2],
        })
    }

    /// The list of a source, by its hash.
    pub(crate) fn source(hash: u64) -> u8 {
        (hash >> 32) as u8 % SOURCES as u8
    }

    /// Session `index` is in no list: it becomes the last one at its place.
    pub(crate) fn push<T>(&mut self, items: &mut [T], index: u32, at: Place, links: fn(&mut T) -> &mut Links) {
        let (origin, class, source) = (at.origin as usize, at.class as usize, usize::from(at.source));
        self.total += 1;
        self.by_class[origin][class] += 1;
        self.by_source[origin][source] += 1;
        self.lengths[origin][class][source] += 1;
        self.lists[origin][class][source].push_back(items, index, links);
    }

    /// Takes session `index` out.
    pub(crate) fn remove<T>(&mut self, items: &mut [T], index: u32, at: Place, links: fn(&mut T) -> &mut Links) {
        let (origin, class, source) = (at.origin as usize, at.class as usize, usize::from(at.source));
        self.total -= 1;
        self.by_class[origin][class] -= 1;
        self.by_source[origin][source] -= 1;
        self.lengths[origin][class][source] -= 1;
        self.lists[origin][class][source].remove(items, index, links);
    }

    /// Session `index` becomes the last one at its place.
    pub(crate) fn renew<T>(&mut self, items: &mut [T], index: u32, at: Place, links: fn(&mut T) -> &mut Links) {
        let list = &mut self.lists[at.origin as usize][at.class as usize][usize::from(at.source)];
        list.remove(items, index, links);
        list.push_back(items, index, links);
    }

    /// The session that makes room; `None` without any. `newcomer`: direction and source of the one that needs it, if it is of this port.
    pub(crate) fn victim(&self, newcomer: Option<(Direction, u8)>) -> Option<u32> {
        let own = newcomer.and_then(|(origin, source)| self.of_own_source(origin, usize::from(source)));
        let (origin, class, source) = own.or_else(|| self.of_lowest_class(newcomer.map(|(origin, _)| origin)))?;
        Some(self.lists[origin][class][source].head).filter(|index| *index != NONE)
    }

    /// A list of the newcomer's own source, if that has more than its share.
    fn of_own_source(&self, origin: Direction, source: usize) -> Option<(usize, usize, usize)> {
        let origin = origin as usize;
        let own = self.by_source[origin][source];
        if own <= self.total / FAIR_SHARE {
            return None;
        }
        let exceeds = |class: &Class| self.lengths[origin][*class as usize][source] > own / class.guarantee();
        Class::ALL.into_iter().find(exceeds).map(|class| (origin, class as usize, source))
    }

    /// The longest list of the lowest class that has more than it is guaranteed.
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
