//! The bitmap of an ACK (PROTOCOL §9.2).

/// Up to 256 bits in words of 32, the most significant bit of a word first: bit `i` stands for PSN_base + `i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Bitmap {
    // Words from `len` on are zero, so the derived equality is correct.
    words: [u32; Self::MAX_WORDS],
    len: u8,
}

impl Bitmap {
    /// Maximum number of words.
    pub const MAX_WORDS: usize = 8;
    /// Maximum number of bits.
    pub const MAX_BITS: usize = Self::MAX_WORDS * 32;

    /// An empty bitmap.
    #[must_use]
    pub const fn empty() -> Self {
        Self { words: [0; Self::MAX_WORDS], len: 0 }
    }

    /// A bitmap of these words, or `None` if there are more than [`Bitmap::MAX_WORDS`].
    #[must_use]
    pub fn from_words(words: &[u32]) -> Option<Self> {
        let mut bitmap = Self::empty();
        bitmap.words.get_mut(..words.len())?.copy_from_slice(words);
        bitmap.len = words.len() as u8;
        Some(bitmap)
    }

    /// A bitmap of these words in network byte order, or `None` if there are more than [`Bitmap::MAX_WORDS`].
    #[inline]
    pub(super) fn from_bytes(words: &[[u8; 4]]) -> Option<Self> {
        let mut bitmap = Self::empty();
        for (slot, bytes) in bitmap.words.get_mut(..words.len())?.iter_mut().zip(words) {
            *slot = u32::from_be_bytes(*bytes);
        }
        bitmap.len = words.len() as u8;
        Some(bitmap)
    }

    /// The words that are sent.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words[..self.len as usize]
    }

    /// How many bits are sent: 32 for each word.
    #[must_use]
    pub const fn len_bits(&self) -> usize {
        self.len as usize * 32
    }

    /// Whether it has no words.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bit `i`; false beyond the last word.
    #[must_use]
    pub fn bit(&self, i: usize) -> bool {
        self.words.get(i / 32).is_some_and(|word| word & mask(i) != 0)
    }

    /// Sets bit `i`, adding words up to it. Does nothing and returns false if `i` is [`Bitmap::MAX_BITS`] or more.
    pub fn set(&mut self, i: usize) -> bool {
        let Some(word) = self.words.get_mut(i / 32) else { return false };
        *word |= mask(i);
        self.len = self.len.max((i / 32 + 1) as u8);
        true
    }

    /// How many bits are set.
    #[must_use]
    pub fn count_ones(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Runs of set bits, ascending: index of the first bit and length. A run ends with its word.
    pub fn runs(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        self.words().iter().enumerate().flat_map(|(w, &word)| {
            let (mut rest, mut at) = (word, 0);
            core::iter::from_fn(move || {
                let zeros = rest.leading_zeros();
                rest = rest.checked_shl(zeros)?;
                let ones = rest.leading_ones();
                rest = rest.checked_shl(ones).unwrap_or(0);
                let first = w * 32 + at + zeros as usize;
                at += (zeros + ones) as usize;
                Some((first, ones))
            })
        })
    }

    /// The indices of the set bits, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.words().iter().enumerate().flat_map(|(w, &word)| {
            let mut rest = word;
            core::iter::from_fn(move || {
                let first = rest.leading_zeros();
                rest &= !0x8000_0000u32.checked_shr(first)?;
                Some(w * 32 + first as usize)
            })
        })
    }
}

const fn mask(i: usize) -> u32 {
    0x8000_0000 >> (i % 32)
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn set_grows_and_is_most_significant_first() {
        let mut bitmap = Bitmap::empty();
        assert!(bitmap.is_empty());
        assert!(bitmap.set(1));
        assert_eq!(bitmap.words(), [0x4000_0000]);
        assert!(bitmap.set(63));
        assert_eq!(bitmap.words(), [0x4000_0000, 1]);
        assert!(bitmap.set(255));
        assert_eq!(bitmap.len_bits(), 256);
        assert!(!bitmap.set(256));
        assert_eq!(bitmap.count_ones(), 3);
        assert_eq!(bitmap.iter().collect::<Vec<_>>(), [1, 63, 255]);
        assert!(bitmap.bit(63) && !bitmap.bit(62) && !bitmap.bit(256) && !bitmap.bit(usize::MAX));
    }

    #[test]
    fn runs_are_the_set_bits() {
        for words in [&[][..], &[0], &[u32::MAX], &[1, 0x8000_0000], &[0xf0f0_0001, 0, 0x7fff_fffe], &[u32::MAX; 8]] {
            let bitmap = Bitmap::from_words(words).expect("at most eight");
            let bits: Vec<usize> = bitmap.runs().flat_map(|(first, count)| first..first + count as usize).collect();
            assert_eq!(bits, bitmap.iter().collect::<Vec<_>>(), "{words:x?}");
            assert!(bitmap.runs().all(|(_, count)| count > 0));
        }
    }

    #[test]
    fn from_words_keeps_the_length() {
        assert_eq!(Bitmap::from_words(&[0, 0]).map(|b| b.len_bits()), Some(64));
        assert_eq!(Bitmap::from_words(&[0; 9]), None);
        assert_eq!(Bitmap::from_words(&[u32::MAX; 8]).map(|b| b.iter().count()), Some(256));
    }
}
