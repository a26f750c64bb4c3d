//! Descriptors, and the pieces of memory that a chain of them stands for.

use super::memory::Memory;
use super::mutation::mutated;
use super::ring::{BadChain, Piece, Walk, Want};

/// Most descriptors of a buffer, whatever the ring's size. Virtio has the ring's size as the bound (1.3, sections 2.7.5.3.1
/// and 2.8.8); drivers for network cards stay far below: Linux has up to 47, FreeBSD 64, DPDK 33 for 64 KiB.
pub(super) const MAX_PIECES: u32 = 256;

/// Bytes of a descriptor: address u64, length u32, then flags and next u16 in a split ring, id and flags in a packed one.
pub(super) const DESCRIPTOR: usize = 16;
pub(super) const F_NEXT: u16 = 1;
pub(super) const F_WRITE: u16 = 2;
pub(super) const F_INDIRECT: u16 = 4;

/// A descriptor, as far as both formats have the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) guest: u64,
    pub(super) len: u32,
    pub(super) flags: u16,
}

impl Descriptor {
    /// Entries of the indirect table that this describes.
    #[inline]
    pub(super) fn table_entries(self) -> Result<u32, BadChain> {
        let entries = self.len / DESCRIPTOR as u32;
        let fits = self.len.is_multiple_of(DESCRIPTOR as u32) && (1..=u32::from(u16::MAX)).contains(&entries);
        if fits { Ok(entries) } else { Err(BadChain::Indirect) }
    }

    /// Entry `index` of the indirect table that this describes, as it is in memory.
    #[inline]
    pub(super) fn table_entry(self, memory: &Memory, index: u16) -> Option<u128> {
        let at = self.guest.checked_add(u64::from(index) * DESCRIPTOR as u64)?;
        let mut bytes = [0; DESCRIPTOR];
        memory.read(at, &mut bytes).then(|| u128::from_le_bytes(bytes))
    }
}

/// Most descriptors of a chain.
#[inline]
pub(super) fn max_pieces() -> u32 {
    if mutated!(ChainsNotBounded) { 1024 } else { MAX_PIECES }
}

/// Collects the pieces of one buffer, and checks what they must all have in common.
pub(super) struct Pieces<'a> {
    memory: &'a Memory,
    want: Want,
    out: &'a mut Vec<Piece>,
    total: u32,
    count: u32,
}

impl<'a> Pieces<'a> {
    #[inline]
    pub(super) fn new(memory: &'a Memory, want: Want, out: &'a mut Vec<Piece>) -> Self {
        out.clear();
        Pieces { memory, want, out, total: 0, count: 0 }
    }

    /// Adds what a descriptor describes; it must not be a table. Returns whether that is all that is wanted: what comes
    /// behind is neither read nor used.
    #[inline]
    pub(super) fn add(&mut self, at: Descriptor) -> Result<bool, BadChain> {
        self.count += 1;
        if self.count > max_pieces() {
            return Err(BadChain::Pieces);
        }
        if at.flags & F_INDIRECT != 0 {
            return Err(BadChain::Indirect);
        }
        if (at.flags & F_WRITE != 0) != self.want.writable {
            return Err(BadChain::Direction);
        }
        self.total = self.total.checked_add(at.len).filter(|t| *t <= self.want.limit).ok_or(BadChain::Length)?;
        if !self.memory.contains(at.guest, u64::from(at.len)) {
            return Err(BadChain::Address);
        }
        if at.len > 0 {
            self.out.push(Piece { guest: at.guest, len: at.len });
        }
        Ok(self.total >= self.want.enough)
    }

    /// All pieces were added, or one could not be.
    #[inline]
    pub(super) fn end(self, outcome: Result<(), BadChain>) -> Walk {
        Walk { descriptors: self.count.max(1), bytes: outcome.map(|()| self.total) }
    }
}
