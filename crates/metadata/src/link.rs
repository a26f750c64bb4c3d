//! A network device for smoltcp: queues of IP packets.

use std::collections::VecDeque;

use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;

/// Maximum number of packets queued in each direction.
const QUEUE: usize = 64;

/// A link to one guest.
#[derive(Debug)]
pub(crate) struct Link {
    received: VecDeque<Vec<u8>>,
    pub(crate) sent: VecDeque<Vec<u8>>,
    /// Maximum size of an IP packet, bytes.
    pub(crate) mtu: usize,
}

impl Link {
    pub(crate) fn new(mtu: usize) -> Link {
        Link { received: VecDeque::new(), sent: VecDeque::new(), mtu }
    }

    /// Queues a packet of the guest; false if the queue is full.
    pub(crate) fn receive(&mut self, packet: Vec<u8>) -> bool {
        let has_room = self.received.len() < QUEUE;
        if has_room {
            self.received.push_back(packet);
        }
        has_room
    }
}

impl Device for Link {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received, Sending<'_>)> {
        if self.sent.len() >= QUEUE {
            return None;
        }
        let packet = self.received.pop_front()?;
        Some((Received(packet), Sending(&mut self.sent)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sending<'_>> {
        (self.sent.len() < QUEUE).then_some(Sending(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.mtu;
        capabilities
    }
}

#[derive(Debug)]
pub(crate) struct Received(Vec<u8>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

#[derive(Debug)]
pub(crate) struct Sending<'a>(&'a mut VecDeque<Vec<u8>>);

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut packet = vec![0; len];
        let result = f(&mut packet);
        self.0.push_back(packet);
        result
    }
}
