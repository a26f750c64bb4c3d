//! Copies of the descriptors of chains in flight. Sized for the whole ring, so that no chain allocates memory.

use super::chain::Descriptor;
use super::index::{Index, Size, Table};
use super::mutation::mutated;

/// Descriptors in linked lists; the free ones form a list, too.
#[derive(Debug)]
pub(super) struct Arena {
    entries: Table<Entry>,
    free: Option<Index>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    descriptor: Descriptor,
    next: Option<Index>,
}

/// The descriptors of one chain, in order.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct List {
    /// First and last entry.
    ends: Option<(Index, Index)>,
}

impl Arena {
    pub(super) fn new(size: Size) -> Arena {
        let mut entries = size.table(Entry::default());
        let mut free = None;
        for index in size.indexes().rev() {
            entries[index].next = free.replace(index);
        }
        Arena { entries, free }
    }

    /// Appends a descriptor. `false` if as many are in flight as the ring has.
    pub(super) fn push(&mut self, list: &mut List, descriptor: Descriptor) -> bool {
        let Some(index) = self.free else { return false };
        self.free = self.entries[index].next;
        self.entries[index] = Entry { descriptor, next: None };
        match &mut list.ends {
            Some((_, last)) => {
                self.entries[*last].next = Some(index);
                *last = index;
            }
            empty => *empty = Some((index, index)),
        }
        true
    }

    /// Frees the entries of a list.
    #[inline]
    pub(super) fn free(&mut self, list: List) {
        if let Some((first, last)) = list.ends
            && !mutated!(DescriptorsLeak)
        {
            self.entries[last].next = self.free;
            self.free = Some(first);
        }
    }

    #[inline]
    pub(super) fn iter(&self, list: List) -> impl Iterator<Item = Descriptor> {
        std::iter::successors(list.ends.map(|(first, _)| first), |index| self.entries[*index].next)
            .map(|index| self.entries[index].descriptor)
    }

    /// Memory used, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.entries.bytes()
    }
}
