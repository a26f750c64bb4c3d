//! The kernel's headers around a datagram, reconstructed so that tools can read a capture from the outermost header on.

use std::net::{IpAddr, SocketAddr};

use bifrost_wire::checksum;

/// Ethernet, IPv6 and UDP.
const MAX_LEN: usize = 14 + 40 + 8;

/// Outer headers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outer {
    bytes: [u8; MAX_LEN],
    len: usize,
}

impl Outer {
    /// The headers of a datagram with `payload` bytes and this traffic class. MAC addresses are 0 because they are
    /// unknown here. The UDP checksum is 0 (none), because the kernel computes and verifies the real one.
    pub(crate) fn new(source: SocketAddr, destination: SocketAddr, class: u8, ttl: u8, payload: usize) -> Self {
        let udp_len = (8 + payload).min(65_535) as u16;
        let mut outer = Outer { bytes: [0; MAX_LEN], len: 14 };
        match (source.ip(), destination.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                outer.bytes[12..14].copy_from_slice(&[0x08, 0x00]);
                let total = udp_len.saturating_add(20).to_be_bytes();
                let mut header =
                    [0x45, class, total[0], total[1], 0, 0, 0x40, 0, ttl, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
                header[12..16].copy_from_slice(&from.octets());
                header[16..].copy_from_slice(&to.octets());
                let sum = checksum::checksum(&header);
                header[10..12].copy_from_slice(&sum.to_be_bytes());
                outer.add(&header);
            }
            (from, to) => {
                let v6 = |ip: IpAddr| match ip {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                };
                outer.bytes[12..14].copy_from_slice(&[0x86, 0xdd]);
                let len = udp_len.to_be_bytes();
                outer.add(&[0x60 | class >> 4, class << 4, 0, 0, len[0], len[1], 17, ttl]);
                outer.add(&v6(from).octets());
                outer.add(&v6(to).octets());
            }
        }
        outer.add(&source.port().to_be_bytes());
        outer.add(&destination.port().to_be_bytes());
        outer.add(&udp_len.to_be_bytes());
        outer.add(&[0, 0]);
        outer
    }

    /// The headers.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn add(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }
}

#[cfg(test)]
mod tests {
    use bifrost_nic::parse;

    use super::*;

    #[test]
    fn the_headers_say_what_they_were_made_of() {
        for (from, to) in [("192.0.2.1:49152", "192.0.2.2:4794"), ("[fd00::1]:49152", "[fd00::2]:4789")] {
            let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
            let mut frame = Outer::new(from, to, 2, 64, 100).bytes().to_vec();
            frame.extend_from_slice(&[7; 100]);
            let parsed = parse(&frame, frame.len()).unwrap();
            assert_eq!((parsed.src_ip, parsed.src_port), (from.ip(), from.port()));
            assert_eq!((parsed.dst_ip, parsed.dst_port), (to.ip(), to.port()));
            assert_eq!(parsed.end as usize, frame.len());
            assert_eq!(&frame[usize::from(parsed.payload)..], &[7; 100]);
        }
    }
}
