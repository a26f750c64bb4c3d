//! Tracks which places of a table differ from their copies in another process.

/// Two bits for each place of a table: whether it changed since it was last copied, and whether the other process has
/// a copy of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes {
    changed: Vec<u64>,
    copied: Vec<u64>,
}

impl Changes {
    /// For a table with this number of places, of which nothing has been copied yet.
    pub(crate) fn of_all(places: u32) -> Self {
        let mut changes = Changes::default();
        (0..places).for_each(|place| changes.mark(place));
        changes
    }

    /// Marks a place whose content has changed, or that has become empty.
    pub(crate) fn mark(&mut self, place: u32) {
        set(&mut self.changed, place);
    }

    /// Whether a place changed since it was copied.
    pub(crate) fn is_changed(&self, place: u32) -> bool {
        get(&self.changed, place)
    }

    /// Marks a place as copied.
    pub(crate) fn copied(&mut self, place: u32) {
        clear(&mut self.changed, place);
        set(&mut self.copied, place);
    }

    /// Marks a changed place that is empty, so that there is nothing to copy.
    pub(crate) fn skip(&mut self, place: u32) {
        clear(&mut self.changed, place);
    }

    /// Takes the places whose copies are outdated. The other process must discard these copies.
    pub(crate) fn take_outdated(&mut self) -> Vec<u32> {
        let outdated: Vec<u64> =
            self.changed.iter().zip(&self.copied).map(|(changed, copied)| changed & copied).collect();
        self.copied.iter_mut().zip(&outdated).for_each(|(copied, outdated)| *copied &= !outdated);
        places(&outdated).collect()
    }

    /// The changed places in ascending order.
    pub(crate) fn changed(&self) -> impl Iterator<Item = u32> {
        places(&self.changed)
    }

    /// The number of changed places.
    pub(crate) fn left(&self) -> usize {
        self.changed.iter().map(|bits| bits.count_ones() as usize).sum()
    }
}

fn set(bits: &mut Vec<u64>, place: u32) {
    let word = place as usize / 64;
    if bits.len() <= word {
        bits.resize(word + 1, 0);
    }
    bits[word] |= 1 << (place % 64);
}

fn clear(bits: &mut [u64], place: u32) {
    if let Some(word) = bits.get_mut(place as usize / 64) {
        *word &= !(1 << (place % 64));
    }
}

fn get(bits: &[u64], place: u32) -> bool {
    bits.get(place as usize / 64).is_some_and(|word| word & 1 << (place % 64) != 0)
}

fn places(words: &[u64]) -> impl Iterator<Item = u32> {
    (0u32..).zip(words).flat_map(|(word, bits)| {
        std::iter::successors(Some(*bits), |bits| Some(bits & bits.wrapping_sub(1)))
            .take_while(|bits| *bits != 0)
            .map(move |bits| word * 64 + bits.trailing_zeros())
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn places_are_tracked_like_in_two_sets() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut changes = Changes::of_all(70);
        let (mut changed, mut copied): (BTreeSet<u32>, BTreeSet<u32>) = ((0..70).collect(), BTreeSet::new());
        for _ in 0..20_000 {
            let place = random.u32(..300);
            match random.u8(..8) {
                0..3 => {
                    changes.mark(place);
                    changed.insert(place);
                }
                3..6 => {
                    changes.copied(place);
                    changed.remove(&place);
                    copied.insert(place);
                }
                6 => {
                    changes.skip(place);
                    changed.remove(&place);
                }
                _ => {
                    let outdated: BTreeSet<u32> = changed.intersection(&copied).copied().collect();
                    copied.retain(|place| !outdated.contains(place));
                    assert_eq!(changes.take_outdated(), outdated.into_iter().collect::<Vec<_>>());
                }
            }
            assert_eq!(changes.is_changed(place), changed.contains(&place));
            assert_eq!(changes.left(), changed.len());
        }
        assert_eq!(changes.changed().collect::<BTreeSet<_>>(), changed);
    }
}
