//! Indexes into a ring and its tables: slots, descriptors, buffer ids, records.
//!
//! They come from memory that the guest or its front-end can write. [`Index`] is the only type that ring code indexes
//! with, and checking a number against the ring's [`Size`] is the only way to make one from such a number.

use std::ops;

/// Maximum ring size (virtio 1.3, sections 2.7 and 2.8.10.1).
pub(crate) const MAX_SIZE: u16 = 32_768;

/// Number of descriptors of a ring: 1 to [`MAX_SIZE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(u16);

/// A number below the [`Size`] that it was checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Index(u16);

/// One `T` per [`Index`] of a ring.
#[derive(Clone, Debug)]
pub(crate) struct Table<T>(Box<[T]>);

impl Size {
    /// `None`: not a valid ring size.
    pub(crate) fn new(descriptors: u16) -> Option<Size> {
        (1..=MAX_SIZE).contains(&descriptors).then_some(Size(descriptors))
    }

    #[inline]
    pub(crate) fn get(self) -> u16 {
        self.0
    }

    /// `number` as an index, if it is below the size.
    #[inline]
    pub(crate) fn check(self, number: u16) -> Option<Index> {
        (number < self.0).then_some(Index(number))
    }

    /// The same for a data path handle.
    #[inline]
    pub(crate) fn check_handle(self, handle: u32) -> Option<Index> {
        (handle < u32::from(self.0)).then_some(Index(handle as u16))
    }

    /// All indexes, in order.
    pub(crate) fn indexes(self) -> impl DoubleEndedIterator<Item = Index> {
        (0..self.0).map(Index)
    }

    pub(crate) fn table<T: Clone>(self, value: T) -> Table<T> {
        Table(vec![value; usize::from(self.0)].into())
    }

    /// The index `count` positions after `from`, and whether it wrapped. `count`: at most the ring's size.
    #[inline]
    pub(super) fn forward(self, from: Index, count: u16) -> (Index, bool) {
        let (to, size) = (u32::from(from.0) + u32::from(count), u32::from(self.0));
        if to < size { (Index(to as u16), false) } else { (Index(((to - size) % size) as u16), true) }
    }

    /// The index `count` positions before `from`, and whether it wrapped. `count`: at most the ring's size.
    #[inline]
    pub(super) fn back(self, from: Index, count: u16) -> (Index, bool) {
        let (to, wrapped) = self.forward(from, self.0.saturating_sub(count));
        (to, !wrapped)
    }
}

impl Index {
    /// The first index, which every ring has.
    pub(crate) const ZERO: Index = Index(0);

    #[inline]
    pub(crate) fn get(self) -> u16 {
        self.0
    }

    /// Offset of the entry in a table of entries of `len` bytes.
    #[inline]
    pub(crate) fn at(self, len: usize) -> usize {
        len * usize::from(self.0)
    }
}

impl<T> Table<T> {
    /// Memory used by the table itself, bytes.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }
}

/// Panics only for an index of a larger ring: tables are private to a ring, as are its indexes.
impl<T> ops::Index<Index> for Table<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: Index) -> &T {
        &self.0[usize::from(index.0)]
    }
}

impl<T> ops::IndexMut<Index> for Table<T> {
    #[inline]
    fn index_mut(&mut self, index: Index) -> &mut T {
        &mut self.0[usize::from(index.0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_stay_below_the_size_of_their_ring() {
        assert_eq!([0, 1, 32_768, 32_769].map(|n| Size::new(n).is_some()), [false, true, true, false]);
        for size in [1, 2, 10, MAX_SIZE] {
            let ring = Size::new(size).expect("a size");
            assert_eq!(ring.check(size - 1).map(Index::get), Some(size - 1));
            assert_eq!([ring.check(size), ring.check(u16::MAX), ring.check_handle(u32::from(size))], [None; 3]);
            assert_eq!(ring.check_handle(1 << 16), None, "handles are not truncated");
            for from in [0, size / 2, size - 1].into_iter().filter_map(|n| ring.check(n)) {
                for count in [0, 1, size / 2, size - 1, size] {
                    let (to, wrapped) = ring.forward(from, count);
                    assert!(to.get() < size);
                    assert_eq!(wrapped, u32::from(from.get()) + u32::from(count) >= u32::from(size));
                    assert_eq!(ring.back(to, count), (from, wrapped), "size {size}, from {from:?}, {count}");
                }
            }
        }
    }
}
