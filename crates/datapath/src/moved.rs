//! Guests that have moved between hosts. For a limited time the old host forwards what peers still send to it, as plain
//! VXLAN, and the new host accepts it. A packet is forwarded at most once.

use bifrost_avs::PeerId;
use bifrost_nic::Parsed;
use bifrost_port::GuestPort;
use bifrost_rte::Time;
use bifrost_wire::{Mac, Vni};
use foldhash::fast::RandomState;
use hashbrown::HashMap;

use crate::capture::Note;
use crate::core::Core;

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

impl<P: GuestPort> Core<P> {
    /// Until `until`, plain VXLAN for the guest of this vNIC is forwarded to its new host, or accepted from its old
    /// one.
    pub fn note_moved(&mut self, vni: Vni, mac: Mac, moved: Moved, until: Time) {
        self.moved.note(self.now, (vni, mac), moved, until);
    }

    /// The guest behind a port runs here now: until `until`, its old host may forward packets that still arrive there.
    pub fn note_arrived(&mut self, owner: u32, until: Time) {
        let port = self.ports.get(owner as usize).and_then(Option::as_ref);
        let Some(vnic) = port.map(|port| (port.vni, port.mac)) else { return };
        if let Some(moved @ (Moved::From(_) | Moved::Here)) = self.moved.find(self.now, vnic) {
            self.moved.note(self.now, vnic, moved, until);
        }
    }

    /// The host that sent a frame for a guest that may have moved; `None`: the frame was forwarded to the guest's new
    /// host. For a frame that the guest's former host forwards, it is the host of the original sender. Such a frame is
    /// not forwarded again, because it does not come from its sender's host.
    #[cold]
    pub(crate) fn follow<const SEEN: bool>(
        &mut self,
        (peer, vni, ecn): (u32, Vni, u8),
        note: Note,
        frame: &[u8],
        parsed: &Parsed,
    ) -> Option<u32> {
        match self.moved.find(self.now, (vni, parsed.dst_mac)) {
            Some(arrived @ (Moved::From(_) | Moved::Here)) if arrived.peer().is_none_or(|host| host == peer) => {
                Some(self.switch.host_of_sender(vni, parsed).map_or(peer, |sender| sender.0))
            }
            Some(Moved::To(host))
                if host != peer && self.switch.admits_from_underlay(vni, PeerId(peer), frame, parsed) =>
            {
                let note = Note { peer: Some(host), ..note.saying("follows its guest") };
                let is_sent = self.send_frame::<SEEN>(host, (vni, parsed.flow_hash, ecn), note, Some(frame));
                self.counters.followed_packets += u64::from(is_sent);
                if is_sent { None } else { Some(peer) }
            }
            _ => Some(peer),
        }
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
