//! A capture of all links in pcapng (draft-ietf-opsawg-pcapng), which Wireshark opens: one interface for each link that a
//! packet was on, time stamps in nanoseconds of virtual time, a comment on what was lost.

use std::io::{self, Write};

use bifrost_wire::checksum;

use crate::packet::Packet;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const ETHERNET: u16 = 1;
const OPTION_COMMENT: u16 = 1;
const OPTION_IF_NAME: u16 = 2;
const OPTION_IF_TSRESOL: u16 = 9;

/// Writes a capture.
pub struct Trace {
    out: Box<dyn Write>,
    /// By link: its interface, plus 1.
    interfaces: Vec<u32>,
    count: u32,
    frame: Vec<u8>,
    failed: Option<io::Error>,
}

impl Trace {
    /// Starts a capture.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn new(mut out: Box<dyn Write>) -> io::Result<Self> {
        let mut body = Vec::new();
        body.extend_from_slice(&0x1a2b_3c4du32.to_le_bytes());
        // Version 1.0; length of the section not known.
        body.extend_from_slice(&[1, 0, 0, 0]);
        body.extend_from_slice(&u64::MAX.to_le_bytes());
        block(&mut out, SECTION_HEADER, &body)?;
        Ok(Trace { out, interfaces: Vec::new(), count: 0, frame: Vec::new(), failed: None })
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
        let interface = self.interface(link, name)?;
        self.frame.clear();
        frame(packet, &mut self.frame);
        let len = self.frame.len() as u32;
        let mut body = Vec::with_capacity(self.frame.len() + 64);
        body.extend_from_slice(&interface.to_le_bytes());
        body.extend_from_slice(&((at >> 32) as u32).to_le_bytes());
        body.extend_from_slice(&(at as u32).to_le_bytes());
        body.extend_from_slice(&len.to_le_bytes());
        body.extend_from_slice(&len.to_le_bytes());
        body.extend_from_slice(&self.frame);
        pad(&mut body);
        if let Some(comment) = comment {
            option(&mut body, OPTION_COMMENT, comment.as_bytes());
            end_of_options(&mut body);
        }
        block(&mut self.out, ENHANCED_PACKET, &body)
    }

    fn interface(&mut self, link: u32, name: &str) -> io::Result<u32> {
        let at = link as usize;
        if self.interfaces.len() <= at {
            self.interfaces.resize(at + 1, 0);
        }
        if self.interfaces[at] == 0 {
            let mut body = Vec::new();
            body.extend_from_slice(&ETHERNET.to_le_bytes());
            body.extend_from_slice(&[0, 0]);
            body.extend_from_slice(&0u32.to_le_bytes());
            option(&mut body, OPTION_IF_NAME, name.as_bytes());
            option(&mut body, OPTION_IF_TSRESOL, &[9]);
            end_of_options(&mut body);
            block(&mut self.out, INTERFACE, &body)?;
            self.count += 1;
            self.interfaces[at] = self.count;
        }
        Ok(self.interfaces[at] - 1)
    }
}

fn block(out: &mut impl Write, kind: u32, body: &[u8]) -> io::Result<()> {
    let len = (body.len() as u32 + 12).to_le_bytes();
    out.write_all(&kind.to_le_bytes())?;
    out.write_all(&len)?;
    out.write_all(body)?;
    out.write_all(&len)
}

fn option(body: &mut Vec<u8>, code: u16, value: &[u8]) {
    body.extend_from_slice(&code.to_le_bytes());
    body.extend_from_slice(&(value.len() as u16).to_le_bytes());
    body.extend_from_slice(value);
    pad(body);
}

fn end_of_options(body: &mut Vec<u8>) {
    body.extend_from_slice(&[0; 4]);
}

fn pad(body: &mut Vec<u8>) {
    body.resize(body.len().next_multiple_of(4), 0);
}

/// A datagram with its outer Ethernet, IPv4 and UDP headers.
fn frame(packet: &Packet, out: &mut Vec<u8>) {
    let mac = |host: u32| [0x02, 0, (host >> 24) as u8, (host >> 16) as u8, (host >> 8) as u8, host as u8];
    let ip = |host: u32| [10, (host >> 16) as u8, (host >> 8) as u8, host as u8];
    out.extend_from_slice(&mac(packet.dst));
    out.extend_from_slice(&mac(packet.src));
    out.extend_from_slice(&[0x08, 0x00, 0x45, packet.ecn]);
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
