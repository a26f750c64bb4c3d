//! What a core does with packets for guests that have moved.

use bifrost_avs::PeerId;
use bifrost_nic::Parsed;
use bifrost_port::GuestPort;
use bifrost_rte::Time;
use bifrost_wire::{Mac, Vni};

use super::Moved;
use crate::capture::Note;
use crate::core::Core;

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
