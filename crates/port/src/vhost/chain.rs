//! Descriptors, and the pieces of memory that a chain of them stands for.

use super::memory::Memory;
use super::ring::{BadChain, Piece};

/// Most pieces of a buffer, whatever the ring's size: no driver for network cards comes near.
const MAX_PIECES: usize = 1024;

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

/// Collects the pieces of one buffer, and what they must all have in common.
pub(super) struct Pieces<'a> {
    memory: &'a Memory,
    writable: bool,
    limit: u32,
    out: &'a mut Vec<Piece>,
    total: u32,
    count: usize,
}

impl<'a> Pieces<'a> {
    #[inline]
    pub(super) fn new(memory: &'a Memory, writable: bool, limit: u32, out: &'a mut Vec<Piece>) -> Self {
        out.clear();
        Pieces { memory, writable, limit, out, total: 0, count: 0 }
    }

    /// Adds what a descriptor describes; it must not be a table.
    #[inline]
    pub(super) fn add(&mut self, at: Descriptor) -> Result<(), BadChain> {
        self.count += 1;
        if self.count > MAX_PIECES {
            return Err(BadChain::Link);
        }
        if at.flags & F_INDIRECT != 0 {
            return Err(BadChain::Indirect);
        }
        if (at.flags & F_WRITE != 0) != self.writable {
            return Err(BadChain::Direction);
        }
        self.total = self.total.checked_add(at.len).filter(|t| *t <= self.limit).ok_or(BadChain::Length)?;
        if !self.memory.contains(at.guest, u64::from(at.len)) {
            return Err(BadChain::Address);
        }
        if at.len > 0 {
            self.out.push(Piece { guest: at.guest, len: at.len });
        }
        Ok(())
    }

    /// Bytes of all pieces.
    #[inline]
    pub(super) fn total(&self) -> u32 {
        self.total
    }
}
