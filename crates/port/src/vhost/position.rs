//! Positions in a packed ring (virtio 1.3, sections 2.8.1 and 2.8.2).

use super::index::{Index, Size};
use super::ring::WRAP;

/// Descriptor flag: available, if it differs from [`F_USED`] and equals the wrap counter.
pub(super) const F_AVAILABLE: u16 = 1 << 7;
/// Descriptor flag: used, if both flags equal the wrap counter.
pub(super) const F_USED: u16 = 1 << 15;

/// A position in the ring: a slot and the wrap counter there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) slot: Index,
    pub(super) wrap: bool,
}

impl Position {
    /// The start of a new ring.
    pub(super) const START: Position = Position { slot: Index::ZERO, wrap: true };

    /// `count` descriptors later, at most once around.
    #[inline]
    pub(super) fn after(self, count: u16, size: Size) -> Position {
        let (slot, wrapped) = size.forward(self.slot, count);
        Position { slot, wrap: self.wrap != wrapped }
    }

    /// `count` descriptors earlier, at most once around.
    pub(super) fn before(self, count: u16, size: Size) -> Position {
        let (slot, wrapped) = size.back(self.slot, count);
        Position { slot, wrap: self.wrap != wrapped }
    }

    /// Whether these flags of a descriptor at this position mean used.
    pub(super) fn is_used(self, flags: u16) -> bool {
        (flags & F_AVAILABLE != 0) == self.wrap && (flags & F_USED != 0) == self.wrap
    }

    #[inline]
    pub(super) fn is_available(self, flags: u16) -> bool {
        (flags & F_AVAILABLE != 0) == self.wrap && (flags & F_USED != 0) != self.wrap
    }

    /// The format of front-ends and of the event suppression structures.
    #[inline]
    pub(super) fn to_bits(self) -> u16 {
        self.slot.get() | if self.wrap { WRAP } else { 0 }
    }

    pub(super) fn from_bits(bits: u16, size: Size) -> Option<Position> {
        Some(Position { slot: size.check(bits & !WRAP)?, wrap: bits & WRAP != 0 })
    }
}
