//! The ports of an address that are in use, and the search for a free one.

use std::ops::RangeInclusive;

/// The ports of one address and protocol that are in use: one bit per port, 8 KiB.
///
/// Finding a free port takes at most one step per 64 ports of a block, however full the block is.
#[derive(Clone, Debug)]
pub struct PortSet {
    words: Box<[u64]>,
    used: u32,
}

const WORDS: usize = 1024;
/// The ports of one parity in a word.
const EVEN: u64 = 0x5555_5555_5555_5555;

impl Default for PortSet {
    fn default() -> Self {
        PortSet { words: vec![0; WORDS].into_boxed_slice(), used: 0 }
    }
}

impl PortSet {
    /// Number of ports in use.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Whether a port is in use.
    pub fn contains(&self, port: u16) -> bool {
        let (word, bit) = bit_of(port);
        self.words[word] & bit != 0
    }

    /// Takes a port. Returns false if it is in use already.
    pub fn take(&mut self, port: u16) -> bool {
        let (word, bit) = bit_of(port);
        let is_free = self.words[word] & bit == 0;
        self.words[word] |= bit;
        self.used += u32::from(is_free);
        is_free
    }

    /// Frees a port. Returns false if it was not in use.
    pub fn give_back(&mut self, port: u16) -> bool {
        let (word, bit) = bit_of(port);
        let is_used = self.words[word] & bit != 0;
        self.words[word] &= !bit;
        self.used -= u32::from(is_used);
        is_used
    }

    /// The first free port of a block, from `start` on, wrapping at the block's end. Prefers the parity of `like` (RFC
    /// 4787, REQ-4); otherwise any port.
    pub fn find_free(&self, block: &RangeInclusive<u16>, start: u16, like: u16) -> Option<u16> {
        let same = if like.is_multiple_of(2) { EVEN } else { !EVEN };
        self.find(block, start, same).or_else(|| self.find(block, start, !same))
    }

    /// The same, limited to the ports in `mask` of each word.
    fn find(&self, block: &RangeInclusive<u16>, start: u16, mask: u64) -> Option<u16> {
        let (&first, &last) = (block.start(), block.end());
        let start = if block.contains(&start) { start } else { first };
        let before = start.checked_sub(1).filter(|end| *end >= first);
        let upper = self.find_between(start, last, mask);
        upper.or_else(|| self.find_between(first, before?, mask))
    }

    fn find_between(&self, first: u16, last: u16, mask: u64) -> Option<u16> {
        (first / 64..=last / 64).find_map(|word| {
            let mut free = !self.words[usize::from(word)] & mask;
            if word == first / 64 {
                free &= u64::MAX << (first % 64);
            }
            if word == last / 64 {
                free &= u64::MAX >> (63 - last % 64);
            }
            (free != 0).then(|| word * 64 + free.trailing_zeros() as u16)
        })
    }
}

fn bit_of(port: u16) -> (usize, u64) {
    (usize::from(port / 64), 1 << (port % 64))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn prefers_the_parity() {
        let mut ports = PortSet::default();
        let block = 1000..=1003;
        let taken: Vec<u16> = std::iter::from_fn(|| {
            let port = ports.find_free(&block, 1002, 7)?;
            assert!(ports.take(port) && !ports.take(port));
            Some(port)
        })
        .collect();
        assert_eq!((taken, ports.used()), (vec![1003, 1001, 1002, 1000], 4));
        assert!(ports.give_back(1001) && !ports.give_back(1001));
        assert_eq!(ports.find_free(&block, 9, 2), Some(1001));
        assert_eq!(PortSet::default().find_free(&(65_535..=65_535), 0, 0), Some(65_535));
    }

    proptest! {
        /// Against a set that is searched port by port.
        #[test]
        fn finds_free_ports(
            first in 0u16..=u16::MAX,
            len in 0u16..200,
            used in proptest::collection::vec(0u16..220, 0..250),
            start in 0u16..220,
            like in 0u16..2,
        ) {
            let block = first..=first.saturating_add(len);
            let (mut ports, mut model) = (PortSet::default(), BTreeSet::new());
            for offset in used {
                let port = first.saturating_add(offset);
                prop_assert_eq!(ports.take(port), model.insert(port));
            }
            let start = first.saturating_add(start);
            let from = if block.contains(&start) { start } else { first };
            let round: Vec<u16> = (from..=*block.end()).chain(first..from).filter(|port| !model.contains(port)).collect();
            let expected = round.iter().find(|port| *port % 2 == like).or(round.first()).copied();
            prop_assert_eq!(ports.find_free(&block, start, like), expected);
            prop_assert_eq!(ports.used() as usize, model.len());
        }
    }
}
