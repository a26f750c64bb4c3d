//! The search tree of the classifier.

use crate::prefetch::prefetch;

/// Fields of a packet: source, destination, destination port, source port, protocol.
pub(super) const FIELDS: usize = 5;

/// A packet: one coordinate for each field.
pub(super) type Point = [u32; FIELDS];

/// The full range.
pub(super) const FULL: (u32, u32) = (0, u32::MAX);

/// Stands for no part, or no rule.
pub(super) const NONE: u32 = u32::MAX;

/// The ranges of a rule: an inclusive range for each field.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    low: [u32; FIELDS],
    high: [u32; FIELDS],
}

impl Region {
    pub(super) fn new(ranges: [(u32, u32); FIELDS]) -> Self {
        Region { low: ranges.map(|r| r.0), high: ranges.map(|r| r.1) }
    }

    pub(super) fn range(&self, field: usize) -> (u32, u32) {
        (self.low[field], self.high[field])
    }

    fn contains(&self, point: &Point) -> bool {
        // All at once: comparing five values costs less than a branch misprediction.
        (0..FIELDS).fold(true, |all, i| all & (self.low[i] <= point[i]) & (point[i] <= self.high[i]))
    }
}

/// How a set of rules is searched.
#[derive(Clone, Copy, Debug)]
pub(super) enum Node {
    /// Linearly: `lists[start..start + len]`, ascending.
    List { start: u32, len: u32 },
    /// By a field: `edges[start..start + len]` are the starts of its intervals, ascending from 0, and `innermost` has a
    /// part for each.
    Split { field: u8, start: u32, len: u32 },
}

/// Rules that share a segment of a field.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// The next wider part that contains this one, or [`NONE`].
    pub(super) up: u32,
    /// The first rule of this part and of all that contain it.
    pub(super) first_up: u32,
    /// The first rule of this part.
    pub(super) first: u32,
    /// The node that searches its rules by the other fields.
    pub(super) node: u32,
}

/// Rules of one family.
#[derive(Clone, Debug, Default)]
pub(super) struct Tree {
    /// By index in the list; rules of the other family are left out.
    pub(super) regions: Vec<Region>,
    /// The number of each rule in the complete list.
    pub(super) numbers: Vec<u32>,
    /// The last one is the root.
    pub(super) nodes: Vec<Node>,
    pub(super) lists: Vec<u32>,
    pub(super) edges: Vec<u32>,
    pub(super) innermost: Vec<u32>,
    pub(super) parts: Vec<Part>,
}

impl Tree {
    /// The number of the first rule that contains a point.
    pub(super) fn first(&self, point: &Point) -> Option<u32> {
        let mut best = NONE;
        if let Some(&root) = self.nodes.last() {
            self.search(root, point, &mut best);
        }
        self.numbers.get(best as usize).copied()
    }

    /// Prefetches the root and what it names.
    #[inline]
    pub(super) fn fetch_ahead(&self) {
        self.nodes.last().into_iter().for_each(prefetch);
        self.lists.first().into_iter().for_each(prefetch);
        self.edges.first().into_iter().for_each(prefetch);
        self.innermost.first().into_iter().for_each(prefetch);
        self.regions.iter().take(4).step_by(2).for_each(prefetch);
        self.numbers.first().into_iter().for_each(prefetch);
    }

    /// Lowers `best` to the first rule below `node` that contains the point, if that rule is earlier.
    fn search(&self, node: Node, point: &Point, best: &mut u32) {
        match node {
            Node::List { start, len } => {
                let list = &self.lists[start as usize..][..len as usize];
                let earlier = list.iter().take_while(|&&rule| rule < *best);
                if let Some(&rule) = earlier.into_iter().find(|&&rule| self.regions[rule as usize].contains(point)) {
                    *best = rule;
                }
            }
            Node::Split { field, start, len } => {
                let coordinate = point[usize::from(field)];
                let edges = &self.edges[start as usize..][..len as usize];
                // The first edge is 0.
                let interval = edges.partition_point(|&edge| edge <= coordinate) - 1;
                let mut next = self.innermost[start as usize + interval];
                while next != NONE {
                    let part = self.parts[next as usize];
                    if part.first_up >= *best {
                        break;
                    }
                    if part.first < *best {
                        self.search(self.nodes[part.node as usize], point, best);
                    }
                    next = part.up;
                }
            }
        }
    }

    pub(super) fn shrink(&mut self) {
        self.nodes.shrink_to_fit();
        self.lists.shrink_to_fit();
        self.edges.shrink_to_fit();
        self.innermost.shrink_to_fit();
        self.parts.shrink_to_fit();
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let words = self.numbers.capacity() + self.lists.capacity() + self.edges.capacity() + self.innermost.capacity();
        words * size_of::<u32>()
            + self.regions.capacity() * size_of::<Region>()
            + self.nodes.capacity() * size_of::<Node>()
            + self.parts.capacity() * size_of::<Part>()
    }
}
