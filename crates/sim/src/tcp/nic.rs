//! A guest's vNIC for smoltcp: its ring, and a transmit queue before it, as in a guest's kernel.
//!
//! smoltcp forgets a fast retransmission if the device has no room for it, and then has no timer running: the
//! connection stalls forever. So a frame that smoltcp may create is never refused. It may create frames only while the
//! ring has room and the queue is empty; the queue gets at most the frames of one pass over the connections.

use std::collections::VecDeque;

use bifrost_nic::{Offload, Segment, SegmentKind};
use bifrost_port::GuestPort as _;
use bifrost_wire::checksum;
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;

use super::HEADERS;
use crate::build::mac_of;
use crate::port::SimPort;

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

/// Frames that wait for room in the ring, in order.
pub(super) type Queue = VecDeque<(Offload, Vec<u8>)>;

/// A vNIC.
pub(super) struct Nic<'a> {
    pub(super) port: &'a mut SimPort,
    pub(super) queue: &'a mut Queue,
    /// Payload of a packet on the wire.
    pub(super) mss: usize,
    /// Maximum length of an IP packet that the guest hands over.
    pub(super) largest: usize,
    pub(super) mac: [u8; 6],
    /// Number of frames that may be received.
    pub(super) frames: usize,
}

impl Nic<'_> {
    /// Moves waiting frames into the ring as far as there is room.
    pub(super) fn flush(&mut self) {
        while self.port.room() > 0
            && let Some((offload, frame)) = self.queue.pop_front()
        {
            self.port.send(offload, |buffer| *buffer = frame);
        }
    }

    /// Whether frames may be created.
    pub(super) fn has_room(&self) -> bool {
        self.queue.is_empty() && self.port.room() > 0
    }

    fn sending(&mut self) -> Sending<'_> {
        Sending { port: self.port, queue: self.queue, mac: self.mac, mss: self.mss }
    }
}

impl Device for Nic<'_> {
    type RxToken<'a>
        = Received
    where
        Self: 'a;
    type TxToken<'a>
        = Sending<'a>
    where
        Self: 'a;

    fn receive(&mut self, _: Instant) -> Option<(Received, Sending<'_>)> {
        if self.frames == 0 {
            return None;
        }
        let frame = self.port.receive(|frame, _| frame.to_vec())?;
        self.frames -= 1;
        Some((Received(frame), self.sending()))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sending<'_>> {
        Some(self.sending())
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.largest;
        capabilities.checksum.tcp = Checksum::Rx;
        capabilities.max_burst_size = Some(self.port.tx_capacity() as usize);
        capabilities
    }
}

/// A received frame for smoltcp.
pub(super) struct Received(Vec<u8>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0.get(ETHERNET..).unwrap_or_default())
    }
}

/// Permission to create a frame.
pub(super) struct Sending<'a> {
    port: &'a mut SimPort,
    queue: &'a mut Queue,
    mac: [u8; 6],
    mss: usize,
}

impl Sending<'_> {
    /// Fills `frame` with an Ethernet frame around the IP packet of `len` bytes that `write` makes.
    fn write<R>(mac: [u8; 6], len: usize, write: impl FnOnce(&mut [u8]) -> R, frame: &mut Vec<u8>) -> R {
        frame.resize(ETHERNET + len, 0);
        let result = write(&mut frame[ETHERNET..]);
        let address = |at: usize| frame.get(ETHERNET + at..ETHERNET + at + 4).and_then(|ip| ip.try_into().ok());
        let (from, to): ([u8; 4], [u8; 4]) = (address(12).unwrap_or_default(), address(16).unwrap_or_default());
        frame[..6].copy_from_slice(&mac_of(to));
        frame[6..12].copy_from_slice(&mac);
        frame[12..14].copy_from_slice(&[0x08, 0x00]);
        let pseudo = checksum::pseudo_v4(from.into(), to.into(), 6, len.saturating_sub(20) as u32);
        if let Some(field) = frame.get_mut(ETHERNET + 36..ETHERNET + 38) {
            field.copy_from_slice(&checksum::fold(pseudo).to_be_bytes());
        }
        result
    }
}

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        // The guest offloads the checksum to the host, as it must for frames to be segmented.
        let payload = len.saturating_sub(HEADERS);
        let mss = self.mss as u16;
        let segment = (payload > self.mss).then_some(Segment { mss, kind: SegmentKind::TcpV4 });
        let offload = Offload { checksum: Some(((ETHERNET + 20) as u16, 16)), segment };
        if self.queue.is_empty() && self.port.room() > 0 {
            let mut result = None;
            self.port.send(offload, |buffer| result = Some(Self::write(self.mac, len, f, buffer)));
            // There is room, so the frame was written.
            result.expect("room for a frame")
        } else {
            let mut frame = Vec::new();
            let result = Self::write(self.mac, len, f, &mut frame);
            self.queue.push_back((offload, frame));
            result
        }
    }
}
