//! Path identifiers (PROTOCOL §12.1).

/// One of up to eight paths of a connection; each is an outer UDP source port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct PathId(u8);

impl PathId {
    /// How many paths a connection can have: the field has 3 bits.
    pub const MAX: usize = 8;

    /// Path `id`, or `None` above 7.
    #[must_use]
    pub const fn new(id: u8) -> Option<Self> {
        if (id as usize) < Self::MAX { Some(Self(id)) } else { None }
    }

    /// The path in the low 3 bits of `bits`.
    #[must_use]
    pub const fn masked(bits: u8) -> Self {
        Self(bits & 7)
    }

    /// The path's index, below [`PathId::MAX`].
    #[must_use]
    pub const fn index(self) -> usize {
        // Always true; written this way so that the compiler knows it.
        self.0 as usize % Self::MAX
    }

    /// The path's number, 0..=7.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// All eight, in order.
    pub fn all() -> impl ExactSizeIterator<Item = Self> + Clone {
        (0..8u8).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range() {
        assert_eq!(PathId::new(7).map(PathId::index), Some(7));
        assert_eq!(PathId::new(8), None);
        assert_eq!(PathId::masked(0xfa).index(), 2);
        assert!(PathId::all().map(PathId::index).eq(0..PathId::MAX));
    }
}
