//! Guests that have moved between hosts. For a limited time the old host forwards what peers still send to it, as plain
//! VXLAN, and the new host accepts it. A packet is forwarded at most once.

mod follow;

use bifrost_rte::Time;
use bifrost_wire::{Mac, Vni};
use foldhash::fast::RandomState;
use hashbrown::HashMap;

/// Maximum number of remembered guests; packets for others are dropped.
const MOST: usize = 4096;

/// Where a guest has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// It was here, and is now at this peer.
    To(u32),
    /// It was at this peer, and is now here.
    From(u32),
    /// It is now here; at which peer it was is not known, because routes of its network are learned.
    Here,
}

impl Moved {
    fn peer(self) -> Option<u32> {
        match self {
            Moved::To(peer) | Moved::From(peer) => Some(peer),
            Moved::Here => None,
        }
    }
}

/// Guests that have moved recently, by vNIC.
#[derive(Debug, Default)]
pub(crate) struct MovedGuests(HashMap<(Vni, Mac), (Moved, Time), RandomState>);

impl MovedGuests {
    fn note(&mut self, now: Time, vnic: (Vni, Mac), moved: Moved, until: Time) {
        if self.0.len() >= MOST {
            self.0.retain(|_, (_, until)| *until > now);
        }
        if self.0.len() < MOST || self.0.contains_key(&vnic) {
            self.0.insert(vnic, (moved, until));
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Finds an entry; forgets it if it has expired.
    fn find(&mut self, now: Time, vnic: (Vni, Mac)) -> Option<Moved> {
        let (moved, until) = *self.0.get(&vnic)?;
        if until > now {
            return Some(moved);
        }
        self.0.remove(&vnic);
        None
    }

    /// The guest is here, whatever was noted before.
    pub(crate) fn forget(&mut self, vnic: (Vni, Mac)) {
        self.0.remove(&vnic);
    }

    /// A peer is gone: its number may be reused.
    pub(crate) fn forget_peer(&mut self, id: u32) {
        self.0.retain(|_, (moved, _)| moved.peer() != Some(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vnic(n: u16) -> (Vni, Mac) {
        let [high, low] = n.to_be_bytes();
        (Vni::new(7).unwrap(), Mac([2, 0, 0, 0, high, low]))
    }

    #[test]
    fn guests_are_remembered_for_a_time_and_not_too_many() {
        let mut moved = MovedGuests::default();
        moved.note(Time(0), vnic(1), Moved::To(3), Time(10));
        moved.note(Time(0), vnic(2), Moved::From(4), Time(20));
        moved.note(Time(0), vnic(4), Moved::Here, Time(20));
        assert_eq!(moved.find(Time(9), vnic(1)), Some(Moved::To(3)));
        assert_eq!((moved.find(Time(10), vnic(1)), moved.find(Time(10), vnic(3))), (None, None));
        moved.note(Time(0), vnic(3), Moved::To(3), Time(20));
        moved.forget(vnic(3));
        moved.forget_peer(4);
        assert_eq!((moved.find(Time(0), vnic(2)), moved.find(Time(0), vnic(4))), (None, Some(Moved::Here)));
        moved.forget(vnic(4));
        assert!(moved.is_empty());
        for n in 0..MOST as u16 {
            moved.note(Time(0), vnic(n), Moved::To(1), Time(30 + u64::from(n % 2)));
        }
        moved.note(Time(0), vnic(9999), Moved::To(1), Time(50));
        assert_eq!(moved.find(Time(0), vnic(9999)), None, "there is no room");
        moved.note(Time(0), vnic(5), Moved::To(2), Time(50));
        assert_eq!(moved.find(Time(0), vnic(5)), Some(Moved::To(2)), "one that is there may change");
        moved.note(Time(30), vnic(9999), Moved::To(1), Time(50));
        assert_eq!(moved.find(Time(30), vnic(9999)), Some(Moved::To(1)), "the time of others is over");
    }
}
