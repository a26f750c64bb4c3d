//! Nested ranges as adjacent intervals, and a fast search for the interval of a key.

use crate::pages::on_huge_pages;
use crate::prefetch::prefetch;
use crate::rank::rank;

/// An unsigned integer.
pub(crate) trait Key: Copy + Ord {
    const MIN: Self;
    const MAX: Self;
    fn next(self) -> Option<Self>;
    /// How many of these keys, in ascending order, are not above this one.
    fn rank<const N: usize>(self, keys: &[Self; N]) -> usize;
}

impl Key for u32 {
    const MIN: Self = u32::MIN;
    const MAX: Self = u32::MAX;

    fn next(self) -> Option<Self> {
        self.checked_add(1)
    }

    #[inline(always)]
    fn rank<const N: usize>(self, keys: &[Self; N]) -> usize {
        rank(keys, self)
    }
}

impl Key for u128 {
    const MIN: Self = u128::MIN;
    const MAX: Self = u128::MAX;

    fn next(self) -> Option<Self> {
        self.checked_add(1)
    }

    #[inline(always)]
    fn rank<const N: usize>(self, keys: &[Self; N]) -> usize {
        // Compares all keys: there is no branch to predict.
        keys.iter().fold(0, |count, &k| count + usize::from(k <= self))
    }
}

/// Slot of a key that is in no range.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// A static B-tree of nodes of `N` keys, without pointers: below key i of a level is node i of the next.
#[derive(Clone, Debug)]
pub(crate) struct Intervals<K, const N: usize> {
    /// The last level has the start of each interval, the level above it the first key of each of those nodes, and so
    /// on. The last node of a level is padded with the largest key.
    levels: Vec<Level<K, N>>,
    /// By interval: the slot of the narrowest range that contains it.
    slots: Vec<u32>,
}

/// Keys of a node, aligned to cache lines: a node that crosses one costs another miss.
#[derive(Clone, Debug)]
#[repr(align(64))]
struct Node<K, const N: usize>([K; N]);

#[derive(Clone, Debug)]
struct Level<K, const N: usize> {
    nodes: Vec<Node<K, N>>,
    /// Number of keys without padding.
    keys: usize,
}

impl<K: Key, const N: usize> Intervals<K, N> {
    /// Builds from (first, last, slot). Ranges must nest or be disjoint, and be in ascending order; a range comes
    /// before those inside it.
    pub(crate) fn new(ranges: impl IntoIterator<Item = (K, K, u32)>) -> Self {
        let mut starts = Starts { keys: vec![K::MIN], slots: vec![NO_SLOT] };
        // Ranges around the current position, the narrowest last.
        let mut around: Vec<(K, u32)> = Vec::new();
        let close = |around: &mut Vec<(K, u32)>, starts: &mut Starts<K>, before: Option<K>| {
            while let Some((last, _)) = around.pop_if(|&mut (last, _)| before.is_none_or(|key| last < key)) {
                if let Some(start) = last.next() {
                    starts.push(start, around.last().map_or(NO_SLOT, |&(_, slot)| slot));
                }
            }
        };
        for (first, last, slot) in ranges {
            close(&mut around, &mut starts, Some(first));
            starts.push(first, slot);
            around.push((last, slot));
        }
        close(&mut around, &mut starts, None);
        starts.slots.shrink_to_fit();
        Intervals { levels: levels(starts.keys), slots: on_huge_pages(starts.slots) }
    }

    /// The slot of the narrowest range that contains `key`, or [`NO_SLOT`].
    pub(crate) fn slot(&self, key: K) -> u32 {
        let mut index = 0;
        for level in &self.levels {
            index = level.below(index, key);
        }
        self.slots[index]
    }

    /// [`slot`](Self::slot) of several keys, level by level, with overlapping memory accesses.
    pub(crate) fn slots<const B: usize>(&self, keys: &[K; B]) -> [u32; B] {
        let mut indexes = [0; B];
        for (depth, level) in self.levels.iter().enumerate() {
            let next = self.levels.get(depth + 1);
            for (index, key) in indexes.iter_mut().zip(keys) {
                *index = level.below(*index, *key);
                match next {
                    Some(next) => prefetch(&next.nodes[*index]),
                    None => prefetch(&self.slots[*index]),
                }
            }
        }
        indexes.map(|index| self.slots[index])
    }

    /// [`slot`](Self::slot) of keys in different tables, with overlapping memory accesses: first to the tables' lists
    /// of levels, then to all tables level by level.
    pub(crate) fn slots_of<const B: usize>(asked: &[Option<(&Self, K)>; B]) -> [u32; B] {
        let tables = || asked.iter().flatten().map(|(table, _)| *table);
        tables().for_each(|table| [table.levels.first(), table.levels.last()].into_iter().flatten().for_each(prefetch));
        tables().filter_map(|table| table.levels.first()?.nodes.first()).for_each(prefetch);
        let depth = tables().map(|table| table.levels.len()).max().unwrap_or(0);
        let mut places = [0; B];
        for depth in 0..depth {
            for (place, asked) in places.iter_mut().zip(asked) {
                let Some((table, key)) = asked else { continue };
                let Some(level) = table.levels.get(depth) else { continue };
                *place = level.below(*place, *key);
                match table.levels.get(depth + 1) {
                    Some(next) => prefetch(&next.nodes[*place]),
                    None => prefetch(&table.slots[*place]),
                }
            }
        }
        let mut slots = [NO_SLOT; B];
        for ((slot, place), asked) in slots.iter_mut().zip(places).zip(asked) {
            if let Some((table, _)) = asked {
                *slot = table.slots[place];
            }
        }
        slots
    }
}

impl<K: Key, const N: usize> Level<K, N> {
    /// Index of the key's node in the level below, or, in the last one, its interval.
    #[inline]
    fn below(&self, index: usize, key: K) -> usize {
        let rank = key.rank(&self.nodes[index].0);
        // The first key of a node equals the one above it, which is not larger than `key`.
        (index * N + rank - 1).min(self.keys - 1)
    }
}

/// Starts of the intervals, ascending.
struct Starts<K> {
    keys: Vec<K>,
    slots: Vec<u32>,
}

impl<K: Key> Starts<K> {
    fn push(&mut self, key: K, slot: u32) {
        match (self.keys.last(), self.slots.last_mut()) {
            // An interval without addresses disappears.
            (Some(&last), Some(old)) if last == key => *old = slot,
            (_, Some(&mut old)) if old == slot => {}
            _ => {
                self.keys.push(key);
                self.slots.push(slot);
            }
        }
    }
}

fn levels<K: Key, const N: usize>(mut keys: Vec<K>) -> Vec<Level<K, N>> {
    let mut levels = Vec::new();
    loop {
        let node = |chunk: &[K]| Node(std::array::from_fn(|i| chunk.get(i).copied().unwrap_or(K::MAX)));
        let nodes = keys.chunks(N).map(node);
        levels.push(Level { nodes: on_huge_pages(nodes.collect()), keys: keys.len() });
        if keys.len() <= N {
            break;
        }
        keys = keys.into_iter().step_by(N).collect();
    }
    levels.reverse();
    levels
}
