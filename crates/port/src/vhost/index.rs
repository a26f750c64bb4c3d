//! Numbers below the size of a ring: slots, descriptors, buffer ids, records.
//!
//! They come from memory that the guest or its front-end can write. [`Index`] is the only type that ring code indexes with,
//! and a comparison with the ring's [`Size`] is the only way to make one from such a number.

use std::ops;

/// Largest ring (virtio 1.3, sections 2.7 and 2.8.10.1).
pub(crate) const MAX_SIZE: u16 = 32_768;

/// Descriptors of a ring: 1 to [`MAX_SIZE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(u16);

/// A number below the [`Size`] that it was checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Index(u16);

/// One `T` for each [`Index`] of a ring.
#[derive(Clone, Debug)]
pub(crate) struct Table<T>(Box<[T]>);

impl Size {
    /// `None`: no ring has this size.
    pub(crate) fn new(descriptors: u16) -> Option<Size> {
        (1..=MAX_SIZE).contains(&descriptors).then_some(Size(descriptors))
    }

    #[inline]
    pub(crate) fn get(self) -> u16 {
        self.0
    }

    /// `number` as an index, if the ring has that many.
    #[inline]
    pub(crate) fn check(self, number: u16) -> Option<Index> {
        (number < self.0).then_some(Index(number))
    }

    /// The same for a handle of the data path.
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

    /// The index `count` further, and whether the end of the ring lies between. `count`: at most the ring's size.
    #[inline]
    pub(super) fn forward(self, from: Index, count: u16) -> (Index, bool) {
        let (to, size) = (u32::from(from.0) + u32::from(count), u32::from(self.0));
        if to < size { (Index(to as u16), false) } else { (Index(((to - size) % size) as u16), true) }
    }

    /// The index `count` before `from`, and whether the end of the ring lies between. `count`: at most the ring's size.
    #[inline]
    pub(super) fn back(self, from: Index, count: u16) -> (Index, bool) {
        let (to, wrapped) = self.forward(from, self.0.saturating_sub(count));
        (to, !wrapped)
    }
}

impl Index {
    /// Every ring has it.
    pub(crate) const ZERO: Index = Index(0);

    #[inline]
    pub(crate) fn get(self) -> u16 {
        self.0
    }

    /// Where the entry is in a table of entries of `len` bytes each.
    #[inline]
    pub(crate) fn at(self, len: usize) -> usize {
        len * usize::from(self.0)
    }
}

impl<T> Table<T> {
    /// Bytes of the table itself.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }
}

/// Panics only if the index is one of a larger ring: tables are private to a ring, as its indexes are.
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
            assert_eq!(ring.check_handle(1 << 16), None, "handles are not cut");
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
