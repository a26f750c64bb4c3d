//! Packets that have left a transmit ring before they were done with.
//!
//! Buffers of some rings have to go back in the order in which they were taken. One packet that waits there would hold up those behind it, for
//! any destination. So when such a ring runs short, its oldest packets are moved here, and their buffers go back. A packet keeps its handle,
//! which is therefore no number of a buffer in these rings.

use super::index::{Index, Size, Table};

/// A packet that is kept here in whole.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) head: Vec<u8>,
    /// The bytes behind the head.
    pub(super) rest: Vec<u8>,
}

#[derive(Debug)]
enum Place {
    Free,
    Ring(Index),
    Own(Box<Own>),
}

/// Where the packets of one ring are, by handle: twice as many as the ring has buffers.
#[derive(Debug)]
pub(super) struct Moved {
    places: Vec<Place>,
    /// By buffer: the handle of the packet that is in it.
    names: Table<u32>,
    free: Vec<u32>,
    own: usize,
    most: usize,
}

impl Moved {
    pub(super) fn new(size: Size) -> Self {
        let most = usize::from(size.get());
        let places: Vec<Place> = (0..2 * most).map(|_| Place::Free).collect();
        Moved { names: size.table(0), free: (0..places.len() as u32).rev().collect(), places, own: 0, most }
    }

    /// A handle for the packet of a buffer. There is always one: no more than one for each buffer, and as many for those that were moved.
    pub(super) fn name(&mut self, slot: Index) -> Option<u32> {
        let handle = self.free.pop()?;
        self.places[handle as usize] = Place::Ring(slot);
        self.names[slot] = handle;
        Some(handle)
    }

    /// The buffer of a packet that is in the ring.
    pub(super) fn slot(&self, handle: u32) -> Option<Index> {
        match self.places.get(handle as usize) {
            Some(Place::Ring(slot)) => Some(*slot),
            _ => None,
        }
    }

    /// The packet, if it was moved.
    pub(super) fn own(&self, handle: u32) -> Option<&Own> {
        match self.places.get(handle as usize) {
            Some(Place::Own(own)) => Some(own),
            _ => None,
        }
    }

    /// The handle of the packet that is in a buffer.
    pub(super) fn name_of(&self, slot: Index) -> u32 {
        self.names[slot]
    }

    /// Whether there is room for one more packet.
    pub(super) fn has_room(&self) -> bool {
        self.own < self.most
    }

    /// A packet is in no buffer any more.
    pub(super) fn put(&mut self, handle: u32, own: Own) {
        if let Some(place) = self.places.get_mut(handle as usize) {
            *place = Place::Own(Box::new(own));
            self.own += 1;
        }
    }

    /// A packet is done with.
    pub(super) fn free(&mut self, handle: u32) {
        let Some(place) = self.places.get_mut(handle as usize) else { return };
        match std::mem::replace(place, Place::Free) {
            Place::Free => return,
            Place::Ring(_) => {}
            Place::Own(_) => self.own -= 1,
        }
        self.free.push(handle);
    }

    /// All handles that there can be.
    pub(super) fn handles(&self) -> u32 {
        self.places.len() as u32
    }

    /// Handles that are free.
    pub(super) fn free_handles(&self) -> u32 {
        self.free.len() as u32
    }

    /// Bytes of packets that are kept here.
    pub(super) fn bytes(&self) -> u64 {
        let own = self.places.iter().filter_map(|place| if let Place::Own(own) = place { Some(own) } else { None });
        own.map(|own| (own.head.len() + own.rest.len()) as u64).sum()
    }
}

impl Own {
    /// Bytes `from..to` of the frame, as far as they are behind its head.
    pub(super) fn behind_head(&self, from: usize, to: usize) -> &[u8] {
        let (from, to) = (from.saturating_sub(self.head.len()), to.saturating_sub(self.head.len()));
        self.rest.get(from..to.min(self.rest.len())).unwrap_or_default()
    }
}
