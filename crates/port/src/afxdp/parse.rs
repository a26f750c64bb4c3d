//! Received frames: parsed in user space when the XDP program could not write a note, and the check of the outer UDP
//! checksum.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bifrost_wire::checksum;

use crate::underlay::Service;

/// Offset of the UDP payload after Ethernet, IPv4 without options and UDP, bytes.
pub(crate) const IPV4_PAYLOAD: usize = 14 + 20 + 8;
/// Offset of the UDP payload after Ethernet, IPv6 without extension headers and UDP, bytes.
pub(crate) const IPV6_PAYLOAD: usize = 14 + 40 + 8;

/// Length of a note, bytes; it is directly in front of the frame.
pub(crate) const NOTE_BYTES: usize = 24;
/// First word of a note. Then come the worker, the offset of the UDP payload, the service, and in two words the time
/// (monotonic clock, ns). All words are in native byte order.
pub(crate) const NOTE_MAGIC: u32 = 0xb1f2_0457;
/// Service in a note: the BIFROST port.
pub(crate) const NOTE_BIFROST: u32 = 0;
/// Service in a note: the plain VXLAN port.
pub(crate) const NOTE_VXLAN: u32 = 1;

const PROTOCOL_UDP: u8 = 17;

/// The two well-known ports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    pub(crate) bifrost: u16,
    pub(crate) vxlan: u16,
}

/// The required fields of a frame's outer headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outer {
    /// Offset of the UDP payload, which ends with the frame.
    pub(crate) payload: usize,
    pub(crate) service: Service,
    pub(crate) source: SocketAddr,
    pub(crate) ecn: u8,
    pub(crate) ttl: u8,
    /// When the program saw it, monotonic clock, ns; [`u64::MAX`] if unknown.
    pub(crate) time_ns: u64,
}

impl Outer {
    /// The contents of the program's note in front of the frame; `None` if there is no note, or if it contradicts the
    /// frame.
    pub(crate) fn from_note(note: &[u8; NOTE_BYTES], frame: &[u8]) -> Option<Self> {
        let (words, _) = note.as_chunks::<4>();
        let word = |i: usize| words.get(i).copied().map(u32::from_ne_bytes);
        if word(0)? != NOTE_MAGIC {
            return None;
        }
        let service = match word(3)? {
            NOTE_BIFROST => Service::Bifrost,
            NOTE_VXLAN => Service::Vxlan,
            _ => return None,
        };
        let payload = word(2)? as usize;
        let ours = frame.len() >= payload && matches!(payload, IPV4_PAYLOAD | IPV6_PAYLOAD);
        let time_ns = u64::from_ne_bytes(*note.last_chunk()?);
        let outer = if ours { Self::read(frame, payload, service) } else { None };
        outer.map(|outer| Outer { time_ns, ..outer })
    }

    /// The same, from the frame alone, by the rules of the program; `None` if the frame violates them. Does not check
    /// whether the destination is a local address.
    pub(crate) fn parse(frame: &[u8], ports: Ports) -> Option<Self> {
        let half = |at: usize| frame.get(at..)?.first_chunk().copied().map(u16::from_be_bytes);
        let (payload, udp_bytes) = match half(12)? {
            0x0800 => {
                let plain = *frame.get(14)? == 0x45 && half(20)? & 0xbfff == 0 && *frame.get(23)? == PROTOCOL_UDP;
                (IPV4_PAYLOAD, plain.then_some(usize::from(half(16)?).checked_sub(20)?)?)
            }
            0x86dd => {
                let plain = *frame.get(14)? & 0xf0 == 0x60 && *frame.get(20)? == PROTOCOL_UDP && half(60)? != 0;
                (IPV6_PAYLOAD, plain.then_some(usize::from(half(18)?))?)
            }
            _ => return None,
        };
        let exact = frame.len() >= payload
            && frame.len() == payload - 8 + udp_bytes
            && usize::from(half(payload - 4)?) == udp_bytes;
        if !exact {
            return None;
        }
        let port = half(payload - 6)?;
        let service = if port == ports.bifrost {
            Service::Bifrost
        } else if port == ports.vxlan {
            Service::Vxlan
        } else {
            return None;
        };
        Self::read(frame, payload, service)
    }

    fn read(frame: &[u8], payload: usize, service: Service) -> Option<Self> {
        let port = u16::from_be_bytes(*frame.get(payload - 8..)?.first_chunk()?);
        let (address, traffic_class, ttl): (IpAddr, u8, u8) = if payload == IPV4_PAYLOAD {
            (Ipv4Addr::from(*frame.get(26..)?.first_chunk::<4>()?).into(), *frame.get(15)?, *frame.get(22)?)
        } else {
            let class = *frame.get(15)? >> 4;
            (Ipv6Addr::from(*frame.get(22..)?.first_chunk::<16>()?).into(), class, *frame.get(21)?)
        };
        let source = SocketAddr::new(address, port);
        Some(Self { payload, service, source, ecn: traffic_class & 3, ttl, time_ns: u64::MAX })
    }

    /// Whether the checksums of the IPv4 header and of UDP are correct. UDP over IPv4 may have none (RFC 768), or an
    /// unfinished one (see `is_unfinished`).
    pub(crate) fn is_intact(&self, frame: &[u8]) -> bool {
        if self.payload == IPV4_PAYLOAD && !frame.get(14..34).is_some_and(checksum::is_valid) {
            return false;
        }
        match self.sums(frame) {
            Some((0, _, _)) => self.payload == IPV4_PAYLOAD,
            Some((stored, pseudo, udp)) => {
                checksum::fold(pseudo) == stored || checksum::fold(pseudo + checksum::sum(udp)) == 0xffff
            }
            None => false,
        }
    }

    /// Whether the UDP checksum covers the pseudo-header only. Such a datagram was never on a wire: the sender is on
    /// this machine and left the checksum to a device. The kernel accepts these, too.
    #[cfg(test)]
    pub(crate) fn is_unfinished(&self, frame: &[u8]) -> bool {
        self.sums(frame).is_some_and(|(stored, pseudo, _)| checksum::fold(pseudo) == stored)
    }

    /// The UDP checksum, the pseudo-header's partial sum, and the UDP header with payload.
    fn sums<'f>(&self, frame: &'f [u8]) -> Option<(u16, u32, &'f [u8])> {
        let udp = frame.get(self.payload - 8..)?;
        let stored = u16::from_be_bytes(*udp.get(6..)?.first_chunk()?);
        let addresses = if self.payload == IPV4_PAYLOAD { frame.get(26..34)? } else { frame.get(22..54)? };
        Some((stored, checksum::sum(addresses) + u32::from(PROTOCOL_UDP) + udp.len() as u32, udp))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_note_is_ignored() {
        let ports = Ports { bifrost: 4794, vxlan: 4789 };
        let frame = vec![0; 100];
        let note = |magic: u32, offset: u32, service: u32| {
            let mut bytes = [0; NOTE_BYTES];
            for (to, word) in bytes.chunks_exact_mut(4).zip([magic, 0, offset, service]) {
                to.copy_from_slice(&word.to_ne_bytes());
            }
            bytes
        };
        assert!(Outer::from_note(&note(NOTE_MAGIC, 42, 1), &frame).is_some());
        for (name, note, len) in [
            ("no note", note(0, 42, 0), 100),
            ("no such offset", note(NOTE_MAGIC, 43, 0), 100),
            ("an absurd offset", note(NOTE_MAGIC, u32::MAX, 0), 100),
            ("no such service", note(NOTE_MAGIC, 42, 2), 100),
            ("beyond the frame", note(NOTE_MAGIC, 62, 0), 61),
        ] {
            assert_eq!(Outer::from_note(&note, &frame[..len]), None, "{name}");
        }
        for len in 0..100 {
            assert_eq!(Outer::parse(&frame[..len], ports), None);
        }
    }
}
