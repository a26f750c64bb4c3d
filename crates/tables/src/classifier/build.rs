//! Builds the search tree from a list of rules.

use std::collections::HashMap;

use super::tree::{FIELDS, FULL, NONE, Node, Part, Region, Tree};

/// Up to this number of rules are tried one by one.
const SCANNED: usize = 8;
/// Maximum copies of rules in parts, per rule.
const COPIES: usize = 32;

/// The search structure of a set of rules, each with its number, ascending.
pub(super) fn build(rules: impl Iterator<Item = (u32, Region)>) -> Tree {
    let (numbers, regions): (Vec<u32>, Vec<Region>) = rules.unzip();
    let all = (0..regions.len() as u32).collect();
    let mut builder =
        Builder { copies_left: regions.len() * COPIES, tree: Tree { regions, numbers, ..Tree::default() } };
    let root = builder.node(all, (0..FIELDS).collect());
    let mut tree = builder.tree;
    tree.nodes.push(root);
    tree.shrink();
    tree
}

struct Builder {
    tree: Tree,
    /// How many more copies of rules are allowed.
    copies_left: usize,
}

/// Segments of a field, each with the rules that contain it; wider segments before those inside them.
struct Division {
    /// Starts of the intervals.
    edges: Vec<u32>,
    /// The narrowest segment of each interval, or [`NONE`].
    innermost: Vec<u32>,
    /// Per segment: the next wider segment, or [`NONE`], and the rules.
    segments: Vec<(u32, Vec<u32>)>,
}

impl Builder {
    /// The structure for `rules` (ascending) by `fields`; the other fields are known to match.
    fn node(&mut self, mut rules: Vec<u32>, fields: Vec<usize>) -> Node {
        self.truncate(&mut rules, &fields);
        if rules.len() <= SCANNED {
            return self.list(&rules);
        }
        let different = fields.iter().map(|&field| (self.different(&rules, field), field));
        let Some((ranges, field)) = different.max_by_key(|&(ranges, _)| ranges).filter(|&(ranges, _)| ranges > 1)
        else {
            // All rules are equal here: the first one hides the others.
            return self.list(&rules[..1]);
        };
        let division = self.nested(&rules, field, ranges).unwrap_or_else(|| self.segments(&rules, field));
        let copies: usize = division.segments.iter().map(|(_, rules)| rules.len()).sum();
        if copies > self.copies_left {
            return self.list(&rules);
        }
        self.copies_left -= copies;
        let others: Vec<usize> = fields.into_iter().filter(|&f| f != field).collect();
        self.split(field, division, &others)
    }

    /// Removes the rules after the first one that matches everything.
    fn truncate(&self, rules: &mut Vec<u32>, fields: &[usize]) {
        let regions = &self.tree.regions;
        let everything = |&rule: &u32| fields.iter().all(|&field| regions[rule as usize].range(field) == FULL);
        if let Some(last) = rules.iter().position(everything) {
            rules.truncate(last + 1);
        }
    }

    fn list(&mut self, rules: &[u32]) -> Node {
        let start = self.tree.lists.len() as u32;
        self.tree.lists.extend_from_slice(rules);
        Node::List { start, len: rules.len() as u32 }
    }

    fn split(&mut self, field: usize, division: Division, others: &[usize]) -> Node {
        let base = self.tree.parts.len() as u32;
        let shift = |segment: u32| if segment == NONE { NONE } else { base + segment };
        let start = self.tree.edges.len() as u32;
        let len = division.edges.len() as u32;
        self.tree.edges.extend(division.edges);
        self.tree.innermost.extend(division.innermost.into_iter().map(shift));
        for (up, rules) in &division.segments {
            let first = rules.first().copied().unwrap_or(NONE);
            let around = if *up == NONE { NONE } else { self.tree.parts[(base + up) as usize].first_up };
            self.tree.parts.push(Part { up: shift(*up), first_up: first.min(around), first, node: NONE });
        }
        // Segments of a split range often hold only that range's rule, and are then equal.
        let mut known: HashMap<Vec<u32>, u32> = HashMap::new();
        for (i, (_, rules)) in division.segments.into_iter().enumerate() {
            let node = match known.get(&rules) {
                Some(&node) => node,
                None => {
                    let node = self.node(rules.clone(), others.to_vec());
                    self.tree.nodes.push(node);
                    let index = self.tree.nodes.len() as u32 - 1;
                    known.insert(rules, index);
                    index
                }
            };
            self.tree.parts[base as usize + i].node = node;
        }
        Node::Split { field: field as u8, start, len }
    }

    /// Number of distinct ranges in a field.
    fn different(&self, rules: &[u32], field: usize) -> usize {
        self.ranges(rules, field).len()
    }

    /// Distinct ranges in a field; wider ones before those inside them.
    fn ranges(&self, rules: &[u32], field: usize) -> Vec<(u32, u32)> {
        let mut ranges: Vec<_> = rules.iter().map(|&rule| self.tree.regions[rule as usize].range(field)).collect();
        ranges.sort_unstable_by_key(|&(low, high)| (low, u32::MAX - high));
        ranges.dedup();
        ranges
    }

    /// Uses ranges as segments if they nest, and not deeper than a segment tree would be.
    fn nested(&self, rules: &[u32], field: usize, number: usize) -> Option<Division> {
        let ranges = self.ranges(rules, field);
        let edges = edges(&ranges);
        let deepest = number.ilog2() as usize + 2;
        let mut innermost = vec![NONE; edges.len()];
        let mut segments: Vec<(u32, Vec<u32>)> = Vec::with_capacity(ranges.len());
        let mut around: Vec<u32> = Vec::with_capacity(deepest);
        for (i, &(low, high)) in ranges.iter().enumerate() {
            while around.last().is_some_and(|&outer| ranges[outer as usize].1 < low) {
                around.pop();
            }
            let up = around.last().copied();
            if around.len() >= deepest || up.is_some_and(|outer| ranges[outer as usize].1 < high) {
                return None;
            }
            innermost[intervals(&edges, (low, high))].fill(i as u32);
            segments.push((up.unwrap_or(NONE), Vec::new()));
            around.push(i as u32);
        }
        let indexes: HashMap<(u32, u32), usize> = ranges.into_iter().zip(0..).collect();
        for &rule in rules {
            segments[indexes[&self.tree.regions[rule as usize].range(field)]].1.push(rule);
        }
        Some(Division { edges, innermost, segments })
    }

    /// Splits ranges into the segments of a binary tree over all intervals.
    fn segments(&self, rules: &[u32], field: usize) -> Division {
        let edges = edges(&self.ranges(rules, field));
        let leaves = edges.len();
        // Node 1 is the root, the children of n are 2n and 2n + 1, and the intervals are the nodes from `leaves` on.
        let mut tree: Vec<Vec<u32>> = vec![Vec::new(); 2 * leaves];
        for &rule in rules {
            let range = intervals(&edges, self.tree.regions[rule as usize].range(field));
            let (mut low, mut high) = (range.start + leaves, range.end + leaves);
            while low < high {
                if low % 2 == 1 {
                    tree[low].push(rule);
                    low += 1;
                }
                if high % 2 == 1 {
                    high -= 1;
                    tree[high].push(rule);
                }
                (low, high) = (low / 2, high / 2);
            }
        }
        let mut segments = Vec::new();
        let mut nearest = vec![NONE; 2 * leaves];
        for (i, rules) in tree.into_iter().enumerate().skip(1) {
            nearest[i] = nearest[i / 2];
            if !rules.is_empty() {
                segments.push((nearest[i], rules));
                nearest[i] = segments.len() as u32 - 1;
            }
        }
        Division { edges, innermost: nearest.split_off(leaves), segments }
    }
}

/// Points where a range starts or has just ended, ascending, and 0.
fn edges(ranges: &[(u32, u32)]) -> Vec<u32> {
    let ends = ranges.iter().flat_map(|&(low, high)| [Some(low), high.checked_add(1)]);
    let mut edges: Vec<u32> = ends.flatten().chain([0]).collect();
    edges.sort_unstable();
    edges.dedup();
    edges
}

/// The intervals that a range covers.
fn intervals(edges: &[u32], (low, high): (u32, u32)) -> std::ops::Range<usize> {
    edges.partition_point(|&edge| edge < low)..edges.partition_point(|&edge| edge <= high)
}
