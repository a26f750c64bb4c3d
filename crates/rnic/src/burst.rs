//! Packets to send: one arena, so that packets to one destination leave in few system calls.

use bifrost_wire::roce::{Header, ICRC_LEN, IcrcStarts, Route};

/// A packet in a burst: a UDP payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// Addresses and ports.
    pub route: Route,
    /// Offset in the arena, bytes.
    pub start: u32,
    /// Length, bytes.
    pub len: u16,
}

/// Packets to send.
#[derive(Debug, Default)]
pub struct Burst {
    bytes: Vec<u8>,
    packets: Vec<Outgoing>,
    starts: IcrcStarts,
}

impl Burst {
    /// An empty burst.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The packets, in sending order.
    #[must_use]
    pub fn packets(&self) -> &[Outgoing] {
        &self.packets
    }

    /// All bytes; consecutive packets are adjacent.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes of a packet.
    #[must_use]
    pub fn payload(&self, packet: &Outgoing) -> &[u8] {
        &self.bytes[packet.start as usize..packet.start as usize + usize::from(packet.len)]
    }

    /// Removes all packets and keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.packets.clear();
    }

    /// Appends a packet: headers, payload in up to two pieces, pad bytes, ICRC.
    pub(crate) fn push(&mut self, route: Route, mut header: Header, pieces: [&[u8]; 2]) {
        let len = pieces[0].len() + pieces[1].len();
        let pad = len.wrapping_neg() & 3;
        header.bth.pad = pad as u8;
        let mut head = [0; Header::MAX_LEN];
        let head_len = header.emit_into(&mut head);
        let total = head_len + len + pad + ICRC_LEN;
        let start = self.bytes.len();
        let mut icrc = self.starts.begin(&route, total);
        icrc.header(&head[..head_len]);
        self.bytes.extend_from_slice(&head[..head_len]);
        for piece in [pieces[0], pieces[1], &[0; 3][..pad]] {
            icrc.payload(piece);
            self.bytes.extend_from_slice(piece);
        }
        self.bytes.extend_from_slice(&icrc.finish());
        self.packets.push(Outgoing { route, start: start as u32, len: total as u16 });
    }
}
