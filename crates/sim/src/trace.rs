//! A capture of all links in pcapng (draft-ietf-opsawg-pcapng) for Wireshark: one interface for each link that a packet
//! entered, timestamps in nanoseconds of virtual time, and comments on lost packets.

use std::io::{self, Write};

use bifrost_wire::checksum;
use bifrost_wire::pcapng::{self, Notes};

use crate::packet::Packet;

/// Writes a capture.
pub struct Trace {
    out: Box<dyn Write>,
    /// By link: its interface, plus 1.
    interfaces: Vec<u32>,
    count: u32,
    frame: Vec<u8>,
    blocks: Vec<u8>,
    failed: Option<io::Error>,
}

impl Trace {
    /// Starts a capture.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn new(mut out: Box<dyn Write>) -> io::Result<Self> {
        let mut blocks = Vec::new();
        pcapng::section(&mut blocks, concat!("bifrost-sim ", env!("CARGO_PKG_VERSION")));
        out.write_all(&blocks)?;
        Ok(Trace { out, interfaces: Vec::new(), count: 0, frame: Vec::new(), blocks, failed: None })
    }

    /// A packet enters a link, or is dropped there for the reason given.
    pub fn packet(&mut self, at: u64, link: u32, name: &str, packet: &Packet, comment: Option<&str>) {
        if self.failed.is_none()
            && let Err(error) = self.write(at, link, name, packet, comment)
        {
            self.failed = Some(error);
        }
    }

    /// Ends the capture.
    ///
    /// # Errors
    /// The first one that occurred.
    pub fn finish(mut self) -> io::Result<()> {
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.out.flush(),
        }
    }

    fn write(&mut self, at: u64, link: u32, name: &str, packet: &Packet, comment: Option<&str>) -> io::Result<()> {
        self.blocks.clear();
        let interface = self.interface(link, name);
        self.frame.clear();
        frame(packet, &mut self.frame);
        let (len, notes) = (self.frame.len() as u32, Notes { flow: None, comment });
        pcapng::packet(&mut self.blocks, interface, at, len, &self.frame, notes);
        self.out.write_all(&self.blocks)
    }

    /// The interface of a link. Its description is written before its first packet.
    fn interface(&mut self, link: u32, name: &str) -> u32 {
        let at = link as usize;
        if self.interfaces.len() <= at {
            self.interfaces.resize(at + 1, 0);
        }
        if self.interfaces[at] == 0 {
            pcapng::interface(&mut self.blocks, name, "a link", 0);
            self.count += 1;
            self.interfaces[at] = self.count;
        }
        self.interfaces[at] - 1
    }
}

/// A datagram with its outer Ethernet, IPv4 and UDP headers.
fn frame(packet: &Packet, out: &mut Vec<u8>) {
    let mac = |host: u32| [0x02, 0, (host >> 24) as u8, (host >> 16) as u8, (host >> 8) as u8, host as u8];
    let ip = |host: u32| [10, (host >> 16) as u8, (host >> 8) as u8, host as u8];
    out.extend_from_slice(&mac(packet.dst));
    out.extend_from_slice(&mac(packet.src));
    out.extend_from_slice(&[0x08, 0x00, 0x45, packet.dscp << 2 | packet.ecn]);
    out.extend_from_slice(&((28 + packet.bytes.len()) as u16).to_be_bytes());
    out.extend_from_slice(&[0, 0, 0x40, 0, packet.ttl, 17, 0, 0]);
    out.extend_from_slice(&ip(packet.src));
    out.extend_from_slice(&ip(packet.dst));
    let sum = checksum::checksum(&out[14..34]);
    out[24..26].copy_from_slice(&sum.to_be_bytes());
    out.extend_from_slice(&packet.source_port.to_be_bytes());
    out.extend_from_slice(&packet.dest_port.to_be_bytes());
    let len = (8 + packet.bytes.len()) as u16;
    out.extend_from_slice(&len.to_be_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(&packet.bytes);
    let pseudo = checksum::pseudo_v4(ip(packet.src).into(), ip(packet.dst).into(), 17, u32::from(len));
    let sum = checksum::udp_nonzero(checksum::finish(pseudo + checksum::sum(&out[34..])));
    out[40..42].copy_from_slice(&sum.to_be_bytes());
}
