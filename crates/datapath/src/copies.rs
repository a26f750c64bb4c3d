//! Frames that are sent without a guest's buffer: copies of frames that a guest sends to a group, and announcements of
//! shared addresses.

use bifrost_avs::{Action, PortId, Verdict};
use bifrost_nic::{Offload, dscp, parse};
use bifrost_port::{GuestPort, TxFrame};
use bifrost_wire::{Mac, Vni};

use crate::capture::Note;
use crate::core::Core;
use crate::stage::Stage as At;

impl<P: GuestPort> Core<P> {
    /// Sends a guest's frame to each member of a group: the switch decides about each copy as if the guest had sent it
    /// to that vNIC. Copies are plain VXLAN in every network, and small enough for the paths to have room.
    #[cold]
    #[inline(never)]
    pub(crate) fn copy_to_group<const SEEN: bool>(&mut self, owner: u32, frame: TxFrame) {
        let mut copy = std::mem::take(&mut self.scratch);
        copy.clear();
        if let Some(port) = self.port_mut(owner) {
            port.port.copy(frame.handle, 0, frame.len as usize, &mut copy);
            port.complete(frame.handle);
        }
        let mut next = 0;
        while let Some(&member) = self.switch.copies(PortId(owner)).get(next) {
            next += 1;
            self.copy_to::<SEEN>(owner, member, &mut copy);
        }
        self.scratch = copy;
    }

    /// Sends one copy.
    fn copy_to<const SEEN: bool>(&mut self, owner: u32, member: Mac, frame: &mut [u8]) {
        if let Some(to) = frame.first_chunk_mut() {
            *to = member.0;
        }
        // The frame was parsed before, and differs only in the destination.
        let Ok(parsed) = parse(frame, frame.len()) else { return };
        self.work.at(At::Switch, owner);
        let Some(port) = self.port_mut(owner) else { return };
        port.outbound.copy_packets += 1;
        let class = port.marking.outer(dscp::class_of(frame, &parsed), false);
        let &Verdict { action, .. } =
            self.switch.from_guest(PortId(owner), frame, frame.len(), Offload::default(), &parsed);
        match action {
            Action::Forward { vni, peer, .. } => {
                if let Some(port) = self.port_mut(owner) {
                    port.outbound.plain_packets += 1;
                }
                let note = Note { peer: Some(peer.0), what: "a copy for a group", ..Note::default() };
                self.send_frame::<SEEN>(peer.0, (vni, parsed.flow_hash, class), note, Some(frame));
            }
            Action::Deliver { port: to, worker } => {
                if let Some(port) = self.port_mut(owner) {
                    port.outbound.local_packets += 1;
                }
                self.counters.local_packets += 1;
                match worker {
                    None => self.deliver_plain::<SEEN>(to.0, frame, false),
                    Some(worker) => self.siblings.keep_frame(worker, (owner, to.0), frame, false),
                }
            }
            Action::Answer { .. } | Action::Host | Action::Copy | Action::Ask { .. } | Action::Drop(_) => {}
        }
    }

    /// Sends a frame to several hosts as plain VXLAN in the next turn. Unknown peers are skipped.
    pub fn send_to_peers(&mut self, vni: Vni, peers: &[u32], frame: &[u8]) {
        let Ok(parsed) = parse(frame, frame.len()) else { return };
        let flow = (vni, parsed.flow_hash, self.control_class);
        for &peer in peers {
            let note = Note { peer: Some(peer), what: "a shared address", ..Note::default() };
            if self.is_captured() {
                self.send_frame::<true>(peer, flow, note, Some(frame));
            } else {
                self.send_frame::<false>(peer, flow, note, Some(frame));
            }
        }
    }
}
