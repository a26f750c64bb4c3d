//! Frames between guests of a core and services of the daemon.

use bifrost_port::{GuestPort, TxFrame};
use bifrost_wire::Mac;

use super::{HostFrame, HostQueue};
use crate::core::Core;
use crate::guest::plan;

impl<P: GuestPort> Core<P> {
    /// Sets the queue of frames for services of the daemon.
    pub fn set_host_queue(&mut self, queue: HostQueue) {
        self.host_queue = Some(queue);
    }

    /// Copies a guest's frame into the daemon's queue. Never waits: frames without room are dropped and counted.
    #[cold]
    #[inline(never)]
    pub(crate) fn give_to_host(&mut self, owner: u32, frame: TxFrame) {
        let worker = self.siblings.index;
        let Some(port) = self.ports.get_mut(owner as usize).and_then(Option::as_mut) else { return };
        // A frame that cannot be segmented is dropped here, after it has been counted.
        let segments = plan(port.port.bytes(frame.handle).0, frame, None);
        for number in 0..segments.as_ref().map_or(0, bifrost_nic::Segments::count) {
            let (Ok(segments), Some(queue)) = (&segments, &self.host_queue) else { break };
            let mut whole = Vec::new();
            segments.write(number, |from, to, out| port.port.copy(frame.handle, from, to, out), &mut whole);
            let is_lost = queue.try_send(HostFrame { worker, port: owner, frame: whole }).is_err();
            self.counters.host_queue_full_packets += u64::from(is_lost);
        }
        port.complete(frame.handle);
    }

    /// Gives a guest a frame of a service of the daemon, with correct checksums, in the next turn. `mac`: the guest's,
    /// as the service knows it; if the port meanwhile belongs to another guest, the frame is dropped.
    pub fn give_from_host(&mut self, port: u32, mac: Mac, frame: &[u8]) {
        let is_it = self.switch.port(bifrost_avs::PortId(port)).is_some_and(|port| port.mac == mac);
        if !is_it {
            return;
        }
        self.counters.local_packets += 1;
        if self.is_captured() {
            self.deliver_plain::<true>(port, frame, true);
        } else {
            self.deliver_plain::<false>(port, frame, true);
        }
    }
}
