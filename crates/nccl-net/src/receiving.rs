//! Receives that NCCL has posted, and data that has arrived for them.

use std::collections::VecDeque;

use crate::frame::{Data, GROUP_MAX};

/// Memory that the application does not use until the receive is done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    data: *mut u8,
    size: usize,
}

/// A receive of a group.
#[derive(Clone, Copy, Debug)]
struct Entry {
    target: Target,
    received: u64,
    total: Option<u64>,
    done: bool,
}

/// Receives that were posted together.
#[derive(Debug)]
struct Open {
    /// The caller's identifier.
    request: u8,
    entries: [Entry; GROUP_MAX],
    /// Receives that are not yet done.
    left: u8,
}

/// A group that is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Complete {
    pub(crate) request: u8,
    pub(crate) sizes: [u64; GROUP_MAX],
}

/// The open groups, by number.
#[derive(Debug, Default)]
pub(crate) struct Receiving {
    open: VecDeque<Open>,
    first: u32,
}

impl Target {
    /// Describes memory to receive into.
    ///
    /// # Safety
    /// `data` must be writable for `size` bytes, and not be used by others, until the receive is
    /// complete or the [`Receiving`] is dropped. It may be null if `size` is 0.
    pub(crate) unsafe fn new(data: *mut u8, size: usize) -> Self {
        Self { data, size }
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Copies data into the memory. Returns whether it fits.
    fn put(&self, offset: u64, bytes: &[u8]) -> bool {
        let Some(offset) = usize::try_from(offset).ok().filter(|offset| *offset <= self.size) else { return false };
        if bytes.len() > self.size - offset {
            return false;
        }
        if !bytes.is_empty() {
            // SAFETY: the range is inside the memory that the caller of `new` guarantees; the
            // library owns the message, so they do not overlap.
            unsafe { self.data.add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        true
    }
}

impl Receiving {
    /// The number of the next group.
    pub(crate) fn next(&self) -> u32 {
        self.first.wrapping_add(self.open.len() as u32)
    }

    /// Posts a group of up to eight receives.
    pub(crate) fn post(&mut self, request: u8, targets: &[Target]) {
        let none = Target { data: std::ptr::null_mut(), size: 0 };
        let entry = |at: usize| Entry {
            target: targets.get(at).copied().unwrap_or(none),
            received: 0,
            total: None,
            done: at >= targets.len(),
        };
        self.open.push_back(Open { request, entries: std::array::from_fn(entry), left: targets.len() as u8 });
    }

    /// Handles a part of a send. Returns the group if it is now complete, or an error text if the
    /// part is invalid.
    pub(crate) fn arrived(&mut self, data: &Data<'_>) -> Result<Option<Complete>, &'static str> {
        let at = data.group.wrapping_sub(self.first) as usize;
        let open = self.open.get_mut(at).ok_or("the peer sent data for a receive that is not open")?;
        let entry = open.entries.get_mut(usize::from(data.index)).filter(|entry| !entry.done);
        let entry = entry.ok_or("the peer sent data for a receive that is done")?;
        let len = data.bytes.len() as u64;
        let fits = data.offset == entry.received
            && entry.total.is_none_or(|total| total == data.total)
            && len <= data.total.saturating_sub(data.offset)
            && (len > 0 || data.total == 0)
            && data.total <= entry.target.size as u64;
        if !fits || !entry.target.put(data.offset, data.bytes) {
            return Err("the peer sent data that does not fit");
        }
        entry.received += len;
        entry.total = Some(data.total);
        if entry.received < data.total {
            return Ok(None);
        }
        entry.done = true;
        open.left -= 1;
        if open.left > 0 {
            return Ok(None);
        }
        let complete = Complete { request: open.request, sizes: open.entries.map(|entry| entry.received) };
        while self.open.front().is_some_and(|open| open.left == 0) {
            self.open.pop_front();
            self.first = self.first.wrapping_add(1);
        }
        Ok(Some(complete))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn target(memory: &mut [u8]) -> Target {
        // SAFETY: tests keep the memory long enough.
        unsafe { Target::new(memory.as_mut_ptr(), memory.len()) }
    }

    fn data(group: u32, index: u8, offset: u64, total: u64, bytes: &[u8]) -> Data<'_> {
        Data { group, index, offset, total, bytes }
    }

    #[test]
    fn data_is_stored_correctly_in_any_order_of_receives() {
        let (mut a, mut b, mut c) = (vec![0; 4], vec![0; 6], vec![]);
        let mut receiving = Receiving::default();
        receiving.post(9, &[target(&mut a), target(&mut b)]);
        receiving.post(3, &[target(&mut c)]);
        assert_eq!(receiving.next(), 2);
        assert_eq!(receiving.arrived(&data(0, 1, 0, 5, b"abc")), Ok(None));
        let complete = receiving.arrived(&data(1, 0, 0, 0, b"")).unwrap().unwrap();
        assert_eq!((complete.request, complete.sizes[0]), (3, 0));
        assert_eq!(receiving.arrived(&data(0, 0, 0, 4, b"wxyz")), Ok(None));
        let complete = receiving.arrived(&data(0, 1, 3, 5, b"de")).unwrap().unwrap();
        assert_eq!((complete.request, &complete.sizes[..3]), (9, &[4, 5, 0][..]));
        assert_eq!((&a[..], &b[..]), (&b"wxyz"[..], &b"abcde\0"[..]));
        assert!(receiving.open.is_empty() && receiving.next() == 2);
        assert!(receiving.arrived(&data(0, 0, 0, 4, b"wxyz")).is_err());
    }

    proptest! {
        /// Whatever a peer sends, nothing is written outside the targets, and no receive is done
        /// before all its data has arrived.
        #[test]
        fn hostile_pieces_stay_inside(
            pieces in prop::collection::vec(
                (
                    0..4u32,
                    0..10u8,
                    prop_oneof![0..12u64, any::<u64>()],
                    prop_oneof![0..12u64, any::<u64>()],
                    0..12usize,
                ),
                1..80,
            ),
        ) {
            // The bytes around each target must not change.
            let mut memory = [[7u8; 24]; 4];
            let mut receiving = Receiving::default();
            for (request, pair) in memory.chunks_mut(2).enumerate() {
                let targets: Vec<Target> = pair.iter_mut().map(|bytes| target(&mut bytes[8..16])).collect();
                receiving.post(request as u8, &targets);
            }
            let mut done = 0;
            for (group, index, offset, total, len) in pieces {
                if let Ok(Some(complete)) = receiving.arrived(&data(group, index, offset, total, &vec![1; len])) {
                    prop_assert!(complete.sizes.iter().all(|size| *size <= 8));
                    done += 1;
                }
            }
            prop_assert!(done <= 2);
            for bytes in memory {
                prop_assert!(bytes[..8] == [7; 8] && bytes[16..] == [7; 8]);
            }
        }
    }
}
