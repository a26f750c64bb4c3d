//! Descriptors, and the memory pieces that a chain of them describes.

use super::memory::Memory;
use super::mutation::mutated;
use super::ring::{BadChain, Piece, Walk, Want};

/// Maximum descriptors per buffer, for any ring size. Virtio's limit is the ring's size (1.3, sections 2.7.5.3.1 and
/// 2.8.8); network drivers use far fewer: Linux up to 47, FreeBSD 64, DPDK 33 for 64 KiB.
pub(super) const MAX_PIECES: u32 = 256;

/// Length of a descriptor, bytes: address u64, length u32, then flags and next u16 in a split ring, id and flags in a
/// packed one.
pub(super) const DESCRIPTOR: usize = 16;
pub(super) const F_NEXT: u16 = 1;
pub(super) const F_WRITE: u16 = 2;
pub(super) const F_INDIRECT: u16 = 4;

/// The fields of a descriptor that both formats share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) guest: u64,
    pub(super) len: u32,
    pub(super) flags: u16,
}

impl Descriptor {
    /// Number of entries of the indirect table that this describes.
    #[inline]
    pub(super) fn table_entries(self) -> Result<u32, BadChain> {
        let entries = self.len / DESCRIPTOR as u32;
        let fits = self.len.is_multiple_of(DESCRIPTOR as u32) && (1..=u32::from(u16::MAX)).contains(&entries);
        if fits { Ok(entries) } else { Err(BadChain::Indirect) }
    }

    /// Entry `index` of the indirect table that this describes, in memory format.
    #[inline]
    pub(super) fn table_entry(self, memory: &Memory, index: u16) -> Option<u128> {
        let at = self.guest.checked_add(u64::from(index) * DESCRIPTOR as u64)?;
        let mut bytes = [0; DESCRIPTOR];
        memory.read(at, &mut bytes).then(|| u128::from_le_bytes(bytes))
    }
}

/// Maximum descriptors per chain.
#[inline]
pub(super) fn max_pieces() -> u32 {
    if mutated!(ChainsNotBounded) { 1024 } else { MAX_PIECES }
}

/// Collects the pieces of one buffer, and checks their common properties.
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

    /// Adds a descriptor's memory; the descriptor must not be a table. Returns whether the buffer has enough bytes:
    /// later descriptors are neither read nor used.
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

    /// The result, after all pieces were added or one was rejected.
    #[inline]
    pub(super) fn end(self, outcome: Result<(), BadChain>) -> Walk {
        Walk { descriptors: self.count.max(1), bytes: outcome.map(|()| self.total) }
    }
}
