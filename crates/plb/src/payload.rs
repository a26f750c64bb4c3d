//! Ownership of payload slots: the pipeline's record, which no pod can write.

/// Number of slots to try before allocation fails: bounds the search.
const TRIES: u32 = 8;

/// Identifies the packet that a slot belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// The order queue, or [`Owner::UNORDERED`].
    queue: u8,
    psn: u32,
}

impl Owner {
    const UNORDERED: u8 = u8::MAX;

    pub(crate) fn ordered(queue: u8, psn: u32) -> Self {
        Owner { queue, psn }
    }

    pub(crate) fn unordered(stamp: u32) -> Self {
        Owner { queue: Self::UNORDERED, psn: stamp }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    /// By a packet that has an entry in an order queue.
    Bound,
    /// Kept until another packet needs the slot.
    Kept,
}

/// Slots, allocated round robin, so that a payload kept for a late header survives for nearly a round of all slots.
#[derive(Clone, Debug)]
pub(crate) struct PayloadSlots {
    slots: Box<[(Owner, Use)]>,
    next: u32,
}

impl PayloadSlots {
    pub(crate) fn new(count: u32) -> Self {
        PayloadSlots { slots: vec![(Owner::unordered(0), Use::Free); count as usize].into(), next: 0 }
    }

    /// A slot for a packet with an entry, until [`free`](Self::free) or [`keep`](Self::keep).
    pub(crate) fn bind(&mut self, owner: Owner) -> Option<u32> {
        self.give(owner, Use::Bound)
    }

    /// A slot for a packet without an entry, until it is [taken](Self::take) or allocated again.
    pub(crate) fn lend(&mut self, owner: Owner) -> Option<u32> {
        self.give(owner, Use::Kept)
    }

    fn give(&mut self, owner: Owner, how: Use) -> Option<u32> {
        let count = self.slots.len() as u32;
        for _ in 0..TRIES.min(count) {
            let slot = self.next;
            self.next = if slot + 1 == count { 0 } else { slot + 1 };
            let record = &mut self.slots[slot as usize];
            if record.1 != Use::Bound {
                *record = (owner, how);
                return Some(slot);
            }
        }
        None
    }

    /// Frees a bound slot.
    pub(crate) fn free(&mut self, slot: u32) {
        self.slots[slot as usize].1 = Use::Free;
    }

    /// Turns a bound slot into a kept one, which another packet may take.
    pub(crate) fn keep(&mut self, slot: u32) {
        self.slots[slot as usize].1 = Use::Kept;
    }

    /// Frees a kept slot if it still belongs to that owner. `slot` may be any number, because it comes from a pod.
    pub(crate) fn take(&mut self, slot: u32, owner: Owner) -> bool {
        match self.slots.get_mut(slot as usize) {
            Some(record) if *record == (owner, Use::Kept) => {
                record.1 = Use::Free;
                true
            }
            _ => false,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.slots.iter_mut().for_each(|record| record.1 = Use::Free);
    }
}
