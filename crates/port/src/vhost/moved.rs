//! Packets that left a transmit ring before they were completed.
//!
//! Some rings must return buffers in the order in which they were taken, so one waiting packet would block those behind
//! it, for any destination. When such a ring runs short of buffers, its oldest packets are moved here, and their
//! buffers return. A packet keeps its handle, which is therefore not a buffer number in these rings.

use super::index::{Index, Size, Table};

/// A packet stored here completely.
#[derive(Debug, Default)]
pub(super) struct Own {
    pub(super) head: Vec<u8>,
    /// The bytes behind the head.
    pub(super) rest: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Free,
    Ring(Index),
    /// Index in `owns`.
    Own(u32),
}

/// Where the packets of one ring are, by handle. There are twice as many handles as buffers in the ring.
#[derive(Debug)]
pub(super) struct Moved {
    places: Vec<Place>,
    /// By buffer: the handle of its packet.
    names: Table<u32>,
    free: Vec<u32>,
    /// Moved packets, and free entries: a free entry keeps the head's memory for the next packet.
    owns: Vec<Own>,
    /// Free entries of `owns`.
    empty: Vec<u32>,
    most: usize,
}

impl Moved {
    pub(super) fn new(size: Size) -> Self {
        let most = usize::from(size.get());
        let places = vec![Place::Free; 2 * most];
        let free = (0..places.len() as u32).rev().collect();
        Moved { names: size.table(0), free, places, owns: Vec::new(), empty: Vec::new(), most }
    }

    /// A handle for the packet of a buffer. It always exists: there are at most as many packets in buffers, and as many
    /// moved ones, as buffers.
    pub(super) fn name(&mut self, slot: Index) -> Option<u32> {
        let handle = self.free.pop()?;
        self.places[handle as usize] = Place::Ring(slot);
        self.names[slot] = handle;
        Some(handle)
    }

    /// The buffer of a packet in the ring.
    pub(super) fn slot(&self, handle: u32) -> Option<Index> {
        match self.places.get(handle as usize) {
            Some(Place::Ring(slot)) => Some(*slot),
            _ => None,
        }
    }

    /// The packet, if it was moved.
    pub(super) fn own(&self, handle: u32) -> Option<&Own> {
        match self.places.get(handle as usize) {
            Some(Place::Own(at)) => self.owns.get(*at as usize),
            _ => None,
        }
    }

    /// The handle of the packet in a buffer.
    pub(super) fn name_of(&self, slot: Index) -> u32 {
        self.names[slot]
    }

    /// Whether another packet can be moved here.
    pub(super) fn has_room(&self) -> bool {
        self.owns.len() - self.empty.len() < self.most
    }

    /// Moves a packet out of its buffer.
    pub(super) fn put(&mut self, handle: u32, head: &[u8], rest: Vec<u8>) {
        let Some(place) = self.places.get_mut(handle as usize) else { return };
        let at = self.empty.pop().unwrap_or_else(|| {
            self.owns.push(Own::default());
            self.owns.len() as u32 - 1
        });
        *place = Place::Own(at);
        let own = &mut self.owns[at as usize];
        own.head.extend_from_slice(head);
        own.rest = rest;
    }

    /// Frees a completed packet's handle. If the packet was moved, returns the memory that held the bytes behind its
    /// head.
    pub(super) fn free(&mut self, handle: u32) -> Option<Vec<u8>> {
        let place = self.places.get_mut(handle as usize)?;
        let was = std::mem::replace(place, Place::Free);
        if was != Place::Free {
            self.free.push(handle);
        }
        let Place::Own(at) = was else { return None };
        self.empty.push(at);
        let own = &mut self.owns[at as usize];
        own.head.clear();
        Some(std::mem::take(&mut own.rest))
    }

    /// Number of handles.
    pub(super) fn handles(&self) -> u32 {
        self.places.len() as u32
    }

    /// Number of free handles.
    pub(super) fn free_handles(&self) -> u32 {
        self.free.len() as u32
    }

    /// Bytes of packets stored here.
    pub(super) fn bytes(&self) -> u64 {
        self.owns.iter().map(|own| (own.head.len() + own.rest.len()) as u64).sum()
    }
}

impl Own {
    /// Bytes `from..to` of the frame, as far as they are behind its head.
    pub(super) fn behind_head(&self, from: usize, to: usize) -> &[u8] {
        let (from, to) = (from.saturating_sub(self.head.len()), to.saturating_sub(self.head.len()));
        self.rest.get(from..to.min(self.rest.len())).unwrap_or_default()
    }
}
