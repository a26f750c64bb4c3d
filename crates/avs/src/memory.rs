//! Memory of a switch's tables.
//!
//! The kernel provides a page when it is touched first, and clears it before. For a page of 2 MiB, a worker would wait
//! for a tenth of a millisecond to several milliseconds, and all its guests with it. So another thread makes the
//! kernel provide the memory before the worker needs it; it learns from here where that is.

/// Reserved memory that is used from its beginning on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Address of the first byte.
    pub address: usize,
    /// Bytes in use.
    pub used_bytes: usize,
    /// Reserved bytes; 0: none.
    pub reserved_bytes: usize,
}

impl Extent {
    /// Number of extents of a switch: three arrays for sessions, five for connections, and two for the flow records of
    /// each direction.
    pub const OF_SWITCH: usize = 12;

    /// Of elements that are added at the end.
    pub(crate) fn filled<T>(elements: &Vec<T>) -> Self {
        Extent {
            address: elements.as_ptr().addr(),
            used_bytes: size_of_val(elements.as_slice()),
            reserved_bytes: size_of::<T>() * elements.capacity(),
        }
    }

    /// Of elements that are used in any order, so that all of them are as good as used.
    pub(crate) fn scattered<T>(elements: &[T]) -> Self {
        let bytes = size_of_val(elements);
        Extent { address: elements.as_ptr().addr(), used_bytes: bytes, reserved_bytes: bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_the_memory_of_their_elements() {
        let mut elements: Vec<u64> = Vec::with_capacity(10);
        elements.extend([1, 2, 3]);
        let address = elements.as_ptr().addr();
        let reserved_bytes = elements.capacity() * 8;
        assert_eq!(Extent::filled(&elements), Extent { address, used_bytes: 24, reserved_bytes });
        assert_eq!(Extent::scattered(&elements), Extent { address, used_bytes: 24, reserved_bytes: 24 });
        assert_eq!(Extent::filled::<u64>(&Vec::new()).reserved_bytes, 0);
    }
}
