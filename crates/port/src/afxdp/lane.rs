//! Outer headers of one destination: built once, completed for each datagram.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bifrost_wire::checksum;

use super::next_hop::NextHop;
use super::parse::{IPV4_PAYLOAD, IPV6_PAYLOAD};

/// Initial TTL and hop limit, as on the UDP sockets: receivers count hops from it.
const INITIAL_TTL: u8 = 64;

/// A lane of the underlay.
#[derive(Debug)]
pub(crate) struct Lane {
    /// The next hop of its frames.
    pub(crate) hop: Arc<NextHop>,
    headers: Headers,
}

impl Lane {
    pub(crate) fn new(local: SocketAddr, remote: SocketAddr, hop: Arc<NextHop>) -> Self {
        Self { hop, headers: Headers::new(local, remote) }
    }

    /// Length of the headers, bytes, Ethernet included.
    pub(crate) fn header_bytes(&self) -> usize {
        self.headers.len
    }

    /// [`Headers::write`].
    pub(crate) fn write(&self, macs: Macs, traffic_class: u8, payload: &[u8], frame: &mut [u8]) -> Option<usize> {
        self.headers.write(macs, traffic_class, payload, frame)
    }
}

/// The two MAC addresses of a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Macs {
    pub(crate) destination: [u8; 6],
    pub(crate) source: [u8; 6],
}

/// Outer headers without MAC addresses, lengths, traffic class and checksums.
#[derive(Clone, Debug)]
struct Headers {
    bytes: [u8; IPV6_PAYLOAD],
    len: usize,
    /// Sum of the UDP pseudo-header and the ports, without the length, which enters twice.
    udp_sum: u32,
    /// Sum of the IPv4 header, without its length and traffic class.
    ip_sum: u32,
}

impl Headers {
    /// `local` and `remote` must be of one family.
    fn new(local: SocketAddr, remote: SocketAddr) -> Self {
        let mut bytes = [0; IPV6_PAYLOAD];
        let (len, pseudo) = match (local.ip(), remote.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                bytes[12..16].copy_from_slice(&[0x08, 0x00, 0x45, 0]);
                // Don't fragment, so the identification may be 0 (RFC 6864).
                bytes[20..24].copy_from_slice(&[0x40, 0, INITIAL_TTL, 17]);
                bytes[26..30].copy_from_slice(&from.octets());
                bytes[30..34].copy_from_slice(&to.octets());
                (IPV4_PAYLOAD, checksum::sum(&bytes[26..34]))
            }
            (from, to) => {
                bytes[12..15].copy_from_slice(&[0x86, 0xdd, 0x60]);
                bytes[20..22].copy_from_slice(&[17, INITIAL_TTL]);
                bytes[22..38].copy_from_slice(&in_v6(from));
                bytes[38..54].copy_from_slice(&in_v6(to));
                (IPV6_PAYLOAD, checksum::sum(&bytes[22..54]))
            }
        };
        bytes[len - 8..len - 6].copy_from_slice(&local.port().to_be_bytes());
        bytes[len - 6..len - 4].copy_from_slice(&remote.port().to_be_bytes());
        let udp_sum = pseudo + 17 + u32::from(local.port()) + u32::from(remote.port());
        Self { bytes, len, udp_sum, ip_sum: checksum::sum(&bytes[14..34]) }
    }

    /// Writes the whole frame to the start of `frame`, checksums included, and returns its length. `None` if it does
    /// not fit there or exceeds the IP length field.
    fn write(&self, macs: Macs, traffic_class: u8, payload: &[u8], frame: &mut [u8]) -> Option<usize> {
        let udp_bytes = u16::try_from(payload.len() + 8).ok()?;
        let total = udp_bytes.checked_add(20)?;
        let (header, rest) = frame.split_at_mut_checked(self.len)?;
        let body = rest.get_mut(..payload.len())?;
        header.copy_from_slice(&self.bytes[..self.len]);
        header[..6].copy_from_slice(&macs.destination);
        header[6..12].copy_from_slice(&macs.source);
        if self.len == IPV4_PAYLOAD {
            header[15] = traffic_class;
            header[16..18].copy_from_slice(&total.to_be_bytes());
            let sum = checksum::finish(self.ip_sum + u32::from(traffic_class) + u32::from(total));
            header[24..26].copy_from_slice(&sum.to_be_bytes());
        } else {
            header[14] |= traffic_class >> 4;
            header[15] = traffic_class << 4;
            header[18..20].copy_from_slice(&udp_bytes.to_be_bytes());
        }
        let sum = checksum::copy_and_sum(payload, body) + self.udp_sum + 2 * u32::from(udp_bytes);
        let udp = self.len - 8;
        header[udp + 4..udp + 6].copy_from_slice(&udp_bytes.to_be_bytes());
        header[udp + 6..].copy_from_slice(&checksum::udp_nonzero(checksum::finish(sum)).to_be_bytes());
        Some(self.len + payload.len())
    }
}

fn in_v6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::parse::{Outer, Ports};
    use super::*;
    use crate::underlay::Service;

    fn ends(v6: bool, source_port: u16) -> (SocketAddr, SocketAddr) {
        let (from, to) = if v6 { ("fd00::1", "fd00::2") } else { ("192.0.2.1", "198.51.100.7") };
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        (SocketAddr::new(address(from), source_port), SocketAddr::new(address(to), 4794))
    }

    proptest! {
        /// The parsers read back what was written: this module's, and `bifrost_nic`'s, which verifies checksums.
        #[test]
        fn headers_are_what_the_parsers_read(
            v6: bool, port in 1024u16.., class: u8, payload in proptest::collection::vec(any::<u8>(), 0..1600), flip: usize,
        ) {
            let (local, remote) = ends(v6, port);
            let macs = Macs { destination: [2, 0, 0, 0, 0, 9], source: [2, 0, 0, 0, 0, 8] };
            let mut frame = vec![0xaa; 2048];
            let len = Headers::new(local, remote).write(macs, class, &payload, &mut frame).expect("it fits");
            let frame = &mut frame[..len];
            let outer = Outer::parse(frame, Ports { bifrost: 4794, vxlan: 4789 }).expect("ours");
            prop_assert_eq!((outer.source, outer.service, outer.ecn, outer.ttl), (local, Service::Bifrost, class & 3, 64));
            let written = if v6 { frame[14] << 4 | frame[15] >> 4 } else { frame[15] };
            prop_assert_eq!(written, class);
            prop_assert_eq!(&frame[outer.payload..], &payload[..]);
            prop_assert!(outer.is_intact(frame));
            let parsed = bifrost_nic::parse(frame, frame.len()).expect("a whole packet");
            prop_assert!(bifrost_nic::verify_transport_checksum(frame, &parsed));
            if !v6 {
                prop_assert!(checksum::is_valid(&frame[14..34]));
            }
            if !v6 {
                let mut other = frame.to_vec();
                other[14 + flip % 20] ^= 1 << (flip % 8);
                prop_assert!(!outer.is_intact(&other), "the header's own checksum");
            }
            // A flipped bit in the UDP part is detected.
            let at = outer.payload - 8 + flip % (frame.len() - outer.payload + 8);
            frame[at] ^= 1 << (flip % 8);
            let none = !v6 && frame[outer.payload - 2..outer.payload] == [0, 0];
            prop_assert!(!outer.is_intact(frame) || none || outer.is_unfinished(frame), "byte {}", at);
        }
    }

    #[test]
    fn oversized_frames_are_not_written() {
        let (local, remote) = ends(false, 50_000);
        let headers = Headers::new(local, remote);
        let macs = Macs { destination: [0; 6], source: [0; 6] };
        assert_eq!(headers.write(macs, 0, &[0; 100], &mut [0; 141]), None);
        assert_eq!(headers.write(macs, 0, &[0; 100], &mut [0; 142]), Some(142));
        assert_eq!(headers.write(macs, 0, &[], &mut [0; 10]), None);
        assert_eq!(headers.write(macs, 0, &vec![0; 65_508], &mut vec![0; 70_000]), None, "exceeds the IP length field");
    }
}
