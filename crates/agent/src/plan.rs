//! Changes in batches that can be applied one after the other.
//!
//! `bifrostd` takes a batch as a whole, so changes that fit into one need no order. Of more than that, the sets before a batch and
//! after it both have to be consistent: what an object needs comes before it and goes after it, and changes that hand something on
//! (an address from one port to another) stay together.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use bifrost_control::api::{ApplyItem, ApplyOp, MAX_APPLY_ITEMS};
use bifrost_control::config::{Kind, Object};
use bifrost_control::objects::Id;

use crate::OWNER;
use crate::relations::{Claim, claims, needs};

/// The most bytes of specs of a batch: half of what a request may have, since names and keys come on top.
pub const BATCH_BYTES: usize = bifrost_control::api::MAX_APPLY_BYTES / 2;
/// About how many bytes an item has beside its spec and key.
const ITEM_BYTES: usize = 120;

/// A change of one object.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Which object.
    pub id: Id,
    /// What it is; none: it does not exist.
    pub old: Option<Arc<Object>>,
    /// What it is to be; none: it is to go.
    pub new: Option<Arc<Object>>,
}

impl Change {
    /// As `bifrostd` is asked for it.
    pub fn item(&self) -> ApplyItem {
        ApplyItem {
            op: if self.new.is_some() { ApplyOp::Set } else { ApplyOp::Delete },
            kind: self.id.kind,
            key: Some(self.id.key.clone()),
            generation: None,
            owner: OWNER.to_owned(),
            spec: self.new.as_ref().map(|object| object.spec()),
        }
    }
}

/// How large batches are to be. What has to stay together may be more, up to what `bifrostd` takes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Items.
    pub items: usize,
    /// Bytes.
    pub bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { items: MAX_APPLY_ITEMS, bytes: BATCH_BYTES }
    }
}

/// The changes in batches, in the order in which they are to be applied. Of an object there is one change.
pub fn batches(changes: Vec<Change>, limits: Limits) -> Vec<Vec<Change>> {
    let groups = Graph::new(&changes).order();
    let mut changes: Vec<Option<Change>> = changes.into_iter().map(Some).collect();
    let mut all = Vec::new();
    let mut batch = Vec::new();
    let (mut items, mut bytes) = (0, 0);
    for group in groups {
        let group: Vec<Change> = group.into_iter().filter_map(|place| changes[place].take()).collect();
        let sizes: Vec<usize> = group.iter().map(size).collect();
        let whole: usize = sizes.iter().sum();
        if items > 0 && (items + group.len() > limits.items || bytes + whole > limits.bytes) {
            all.push(std::mem::take(&mut batch));
            (items, bytes) = (0, 0);
        }
        for (change, size) in group.into_iter().zip(sizes) {
            // Only what belongs together and is more than a request may have is torn apart.
            if items > 0 && (items == MAX_APPLY_ITEMS || bytes + size > limits.bytes.max(BATCH_BYTES)) {
                all.push(std::mem::take(&mut batch));
                (items, bytes) = (0, 0);
            }
            batch.push(change);
            (items, bytes) = (items + 1, bytes + size);
        }
    }
    all.extend((!batch.is_empty()).then_some(batch));
    all
}

fn size(change: &Change) -> usize {
    let spec = change.new.as_ref().map_or(0, |object| object.spec().to_string().len());
    ITEM_BYTES + change.id.key.len() + spec
}

/// Which changes belong together, and which come before others.
struct Graph<'a> {
    changes: &'a [Change],
    /// Union-find: a place whose parent it is itself stands for its group.
    parents: Vec<usize>,
    /// Pairs of places: the first one before the second one.
    before: Vec<(usize, usize)>,
}

impl<'a> Graph<'a> {
    fn new(changes: &'a [Change]) -> Graph<'a> {
        let mut graph = Graph { changes, parents: (0..changes.len()).collect(), before: Vec::new() };
        graph.join_claims();
        graph.follow_needs();
        graph
    }

    /// Those that hand something on.
    fn join_claims(&mut self) {
        struct Claimed {
            value: String,
            first: usize,
            others: Vec<usize>,
            is_contested: bool,
        }
        let mut claimed: HashMap<Claim, Claimed> = HashMap::new();
        for (place, change) in self.changes.iter().enumerate() {
            for (claim, value) in change.old.iter().chain(&change.new).flat_map(|object| claims(object)) {
                match claimed.get_mut(&claim) {
                    None => {
                        let one = Claimed { value, first: place, others: Vec::new(), is_contested: false };
                        claimed.insert(claim, one);
                    }
                    Some(known) => {
                        known.is_contested |= known.value != value;
                        known.others.push(place);
                    }
                }
            }
        }
        for Claimed { first, others, .. } in claimed.into_values().filter(|claimed| claimed.is_contested) {
            others.into_iter().for_each(|other| self.join(first, other));
        }
    }

    fn follow_needs(&mut self) {
        let places: HashMap<&Id, usize> = self.changes.iter().enumerate().map(|(i, c)| (&c.id, i)).collect();
        let changed = |ids: &HashSet<Id>| ids.iter().filter_map(|id| places.get(id).copied()).collect::<Vec<_>>();
        for (place, change) in self.changes.iter().enumerate() {
            let of = |object: &Option<Arc<Object>>| object.iter().flat_map(|o| needs(o)).collect::<HashSet<_>>();
            let (old, new) = (of(&change.old), of(&change.new));
            for needed in changed(&new) {
                // What a gateway is to a port may change with both.
                if old.contains(&self.changes[needed].id) && change.id.kind != Kind::Route {
                    self.join(place, needed);
                } else {
                    self.before.push((needed, place));
                }
            }
            let no_longer = changed(&old).into_iter().filter(|needed| !new.contains(&self.changes[*needed].id));
            let pairs: Vec<_> = no_longer.map(|needed| (place, needed)).collect();
            self.before.extend(pairs);
        }
    }

    fn root(&mut self, mut place: usize) -> usize {
        while self.parents[place] != place {
            self.parents[place] = self.parents[self.parents[place]];
            place = self.parents[place];
        }
        place
    }

    fn join(&mut self, one: usize, other: usize) {
        let (one, other) = (self.root(one), self.root(other));
        self.parents[one.max(other)] = one.min(other);
    }

    /// The groups in an order that respects all pairs. What goes round in a circle is one group.
    fn order(mut self) -> Vec<Vec<usize>> {
        for circle in circles(&self.followers()) {
            circle[1..].iter().for_each(|place| self.join(circle[0], *place));
        }
        let followers = self.followers();
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let mut ranks = vec![None; self.changes.len()];
        for place in 0..self.changes.len() {
            let (root, rank) = (self.root(place), rank(&self.changes[place], place));
            groups.entry(root).or_default().push(place);
            ranks[root] = ranks[root].map_or(Some(rank), |known: Rank| Some(known.min(rank)));
        }
        let mut waits = vec![0usize; self.changes.len()];
        followers.iter().flatten().for_each(|follower| waits[*follower] += 1);
        let mut ready: BTreeSet<(Option<Rank>, usize)> =
            groups.keys().filter(|root| waits[**root] == 0).map(|root| (ranks[*root], *root)).collect();
        let mut order = Vec::new();
        while let Some((_, root)) = ready.pop_first() {
            order.extend(groups.remove(&root));
            for follower in &followers[root] {
                waits[*follower] -= 1;
                if waits[*follower] == 0 {
                    ready.insert((ranks[*follower], *follower));
                }
            }
        }
        order
    }

    /// By group: those that come after it.
    fn followers(&mut self) -> Vec<Vec<usize>> {
        let mut followers = vec![Vec::new(); self.changes.len()];
        for (first, second) in self.before.clone() {
            let (first, second) = (self.root(first), self.root(second));
            if first != second {
                followers[first].push(second);
            }
        }
        followers
    }
}

/// The strongly connected components of more than one node (Tarjan's algorithm, without recursion).
fn circles(followers: &[Vec<usize>]) -> Vec<Vec<usize>> {
    const NEW: usize = usize::MAX;
    let count = followers.len();
    let (mut numbers, mut lows, mut is_open) = (vec![NEW; count], vec![NEW; count], vec![false; count]);
    let (mut open, mut found, mut next) = (Vec::new(), Vec::new(), 0);
    for start in 0..count {
        // Each with how many of its followers were looked at.
        let mut walk = if numbers[start] == NEW { vec![(start, 0)] } else { Vec::new() };
        while let Some((node, seen)) = walk.last_mut() {
            let node = *node;
            if *seen == 0 && numbers[node] == NEW {
                (numbers[node], lows[node], is_open[node]) = (next, next, true);
                next += 1;
                open.push(node);
            }
            if let Some(follower) = followers[node].get(*seen).copied() {
                *seen += 1;
                if numbers[follower] == NEW {
                    walk.push((follower, 0));
                } else if is_open[follower] {
                    lows[node] = lows[node].min(numbers[follower]);
                }
                continue;
            }
            walk.pop();
            if let Some((parent, _)) = walk.last() {
                lows[*parent] = lows[*parent].min(lows[node]);
            }
            if lows[node] == numbers[node] {
                let at = open.iter().rposition(|other| *other == node).unwrap_or(0);
                let component = open.split_off(at);
                component.iter().for_each(|node| is_open[*node] = false);
                if component.len() > 1 {
                    found.push(component);
                }
            }
        }
    }
    found
}

/// Deletions come first, the last kinds before the first ones; then the rest, the first kinds first.
type Rank = (bool, Reverse<usize>, usize, usize);

fn rank(change: &Change, place: usize) -> Rank {
    let kind = Kind::ALL.iter().position(|kind| *kind == change.id.kind).unwrap_or(0);
    // Groups name sets.
    let kind = if change.id.kind == Kind::SecurityGroup { 3 } else { kind * 2 };
    match change.new {
        None => (false, Reverse(kind), 0, place),
        Some(_) => (true, Reverse(0), kind, place),
    }
}
