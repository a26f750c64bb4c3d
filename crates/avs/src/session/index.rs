//! Hash index of sessions: chains through two arrays.
//!
//! A hash table with open addressing leaves a tombstone for each removed element, and is rebuilt when it is full of
//! tombstones. For a million sessions, this takes tens of milliseconds, in which all guests wait. Chains need no
//! tombstones, so no removal makes guests wait.

use crate::memory::Extent;

/// End of a chain. Other values are a session's index plus one, so that the pages of an empty array need not be
/// written.
const END: u32 = 0;
/// Minimum number of chains per possible session. At the limit, half of all sessions are alone in their chain.
const CHAINS_EACH: usize = 2;

/// Maps hashes of keys to sessions. The keys themselves are in the sessions.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// First session of each chain. The number of chains is a power of two, or 0.
    heads: Vec<u32>,
    /// Next session in the chain, by session.
    next: Vec<u32>,
}

impl Index {
    /// Allocates room for `total` sessions, so that chains stay short. `present`: hash and index of each current
    /// session.
    pub(crate) fn make_room(&mut self, total: usize, present: impl Iterator<Item = (u64, u32)>) {
        let chains = (CHAINS_EACH * total).next_power_of_two();
        if chains > self.heads.len() {
            self.heads = vec![END; chains];
            present.for_each(|(hash, index)| self.insert(hash, index));
        }
        self.next.reserve_exact(total.saturating_sub(self.next.len()));
    }

    /// Memory of the chains.
    pub(crate) fn memory(&self) -> [Extent; 2] {
        [Extent::scattered(&self.heads), Extent::filled(&self.next)]
    }

    /// Looks up a session by the hash of its key. `is_it` compares the key of a candidate.
    #[inline(always)]
    pub(crate) fn find(&self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut at = *self.heads.get(self.chain(hash))?;
        while at != END {
            let index = at - 1;
            if is_it(index) {
                return Some(index);
            }
            at = self.next[index as usize];
        }
        None
    }

    /// Inserts a session that is not in the index. There must be [room](Self::make_room).
    pub(crate) fn insert(&mut self, hash: u64, index: u32) {
        let chain = self.chain(hash);
        if self.next.len() <= index as usize {
            self.next.resize(index as usize + 1, END);
        }
        self.next[index as usize] = std::mem::replace(&mut self.heads[chain], index + 1);
    }

    /// Removes a session, if it is in the index.
    pub(crate) fn remove(&mut self, hash: u64, index: u32) {
        let chain = self.chain(hash);
        let Some(head) = self.heads.get_mut(chain) else { return };
        let (mut before, mut at) = (END, *head);
        while at != END && at != index + 1 {
            (before, at) = (at, self.next[at as usize - 1]);
        }
        if at == END {
            return;
        }
        let after = self.next[index as usize];
        match before {
            END => *head = after,
            before => self.next[before as usize - 1] = after,
        }
    }

    /// Allocated bytes.
    #[cfg(test)]
    pub(crate) fn capacity_bytes(&self) -> usize {
        size_of::<u32>() * (self.heads.capacity() + self.next.capacity())
    }

    /// Number of sessions in all chains.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        let links = self.heads.iter().map(|head| {
            std::iter::successors(Some(*head), |at| self.next.get((*at as usize).wrapping_sub(1)).copied())
                .take_while(|at| *at != END)
                .count()
        });
        links.sum()
    }

    #[inline(always)]
    fn chain(&self, hash: u64) -> usize {
        hash as usize & self.heads.len().wrapping_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_index_agrees_with_a_set_for_any_hashes() {
        let mut rng = fastrand::Rng::with_seed(5);
        // All sessions have one hash, few hashes, or many.
        for hashes in [1, 7, 1 << 40] {
            let hash_of = |index: u32| u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15) % hashes;
            let mut index = Index::default();
            assert_eq!(index.find(3, |_| true), None);
            index.remove(3, 3);
            let mut set = HashSet::new();
            for total in [40, 41, 90, 20] {
                index.make_room(total, set.iter().map(|i| (hash_of(*i), *i)).collect::<Vec<_>>().into_iter());
                for _ in 0..2_000 {
                    let one = rng.u32(..total as u32);
                    if rng.bool() && set.insert(one) {
                        index.insert(hash_of(one), one);
                    } else {
                        set.remove(&one);
                        index.remove(hash_of(one), one);
                    }
                    let one = rng.u32(..total as u32);
                    assert_eq!(index.find(hash_of(one), |i| i == one), set.contains(&one).then_some(one));
                    assert_eq!(index.len(), set.len());
                }
                set.retain(|i| {
                    *i < 20 || {
                        index.remove(hash_of(*i), *i);
                        false
                    }
                });
            }
        }
    }
}
