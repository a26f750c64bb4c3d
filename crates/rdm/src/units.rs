//! Which units of a message have arrived.

use bifrost_wire::rdm::UNIT;

/// Words stored inline: 256 units, 1 MiB.
const INLINE: usize = 4;

/// A set of the units of a message of up to 256 MiB.
#[derive(Clone, Debug, Default)]
pub(crate) struct Units {
    first: [u64; INLINE],
    more: Vec<u64>,
    left: u32,
}

impl Units {
    /// An empty set for a message of `len` bytes; an empty message has one unit.
    pub(crate) fn new(len: u32) -> Self {
        let count = len.div_ceil(UNIT).max(1);
        let more = (count as usize).div_ceil(64).saturating_sub(INLINE);
        Self { first: [0; INLINE], more: vec![0; more], left: count }
    }

    /// Adds a unit of the message. Returns whether it was missing.
    pub(crate) fn insert(&mut self, unit: u32) -> bool {
        let at = unit as usize / 64;
        let word = match at.checked_sub(INLINE) {
            None => self.first.get_mut(at),
            Some(at) => self.more.get_mut(at),
        };
        let Some(word) = word else { return false };
        let bit = 1 << (unit % 64);
        let missing = *word & bit == 0;
        *word |= bit;
        self.left -= u32::from(missing);
        missing
    }

    /// Adds the units of `len` bytes at `offset`. Returns how many were missing.
    pub(crate) fn insert_range(&mut self, offset: u32, len: u32) -> u32 {
        let first = offset / UNIT;
        let count = len.div_ceil(UNIT).max(1);
        (first..first + count).map(|unit| u32::from(self.insert(unit))).sum()
    }

    pub(crate) fn contains(&self, unit: u32) -> bool {
        let at = unit as usize / 64;
        let word = match at.checked_sub(INLINE) {
            None => self.first.get(at),
            Some(at) => self.more.get(at),
        };
        word.is_some_and(|word| word & 1 << (unit % 64) != 0)
    }

    /// Bytes of the missing units; the last unit may be partial.
    pub(crate) fn missing_bytes(&self) -> u32 {
        self.left * UNIT
    }

    pub(crate) fn is_full(&self) -> bool {
        self.left == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_a_set(len in 0u32..300 * UNIT, units in prop::collection::vec(0u32..300, 0..400)) {
            let count = len.div_ceil(UNIT).max(1);
            let mut set = Units::new(len);
            let mut oracle = std::collections::HashSet::new();
            for unit in units.into_iter().filter(|unit| *unit < count) {
                prop_assert_eq!(set.insert(unit), oracle.insert(unit));
                prop_assert!(set.contains(unit));
                prop_assert_eq!(set.is_full(), oracle.len() == count as usize);
            }
            for unit in 0..count {
                prop_assert_eq!(set.contains(unit), oracle.contains(&unit));
            }
            prop_assert_eq!(set.insert_range(0, len) as usize, count as usize - oracle.len());
            prop_assert!(set.is_full());
        }
    }
}
