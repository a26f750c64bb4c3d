//! Offloads that a guest requests: virtio network headers, checked against their frames.

use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};
use bifrost_wire::{tcp, udp, virtio_net};

use crate::checksum;
use crate::malformed::Malformed;
use crate::parse::{L3, Parsed};

/// Work that a guest left to the switch, from its virtio header (virtio 1.3, 5.1.6.2), checked against the frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// The transport checksum is partial: start of the summed area and offset of the field from there, bytes.
    pub checksum: Option<(u16, u16)>,
    /// The frame is to be segmented.
    pub segment: Option<Segment>,
}

/// How a frame is to be segmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Payload bytes per segment, 1..=65535.
    pub mss: u16,
    /// Which protocol.
    pub kind: SegmentKind,
}

/// Protocol of a frame to be segmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentKind {
    /// TCP over IPv4.
    TcpV4,
    /// TCP over IPv6.
    TcpV6,
    /// UDP (USO), either IP version.
    Udp,
}

impl Offload {
    /// Checks the header that a guest wrote against the frame it describes; `len` is the frame's length in bytes.
    ///
    /// `hdr_len` is ignored (the frame's own headers decide), and so is `DATA_VALID`, which a guest cannot vouch for.
    ///
    /// # Errors
    /// [`Malformed::ChecksumRange`] when the checksum area is not inside the frame behind the Ethernet header, or when,
    /// without segmentation, the field is not the transport's checksum and is before the payload, in an ICMP message or
    /// in a fragment: writing it would change bytes that the switch has filtered by;
    /// [`Malformed::GsoType`] for an unknown type or one that does not fit the frame's protocols;
    /// [`Malformed::GsoChecksum`] when a frame to be segmented does not have a partial transport checksum;
    /// [`Malformed::GsoSize`] for a segment size of zero.
    pub fn from_virtio(hdr: virtio_net::Header, parsed: &Parsed, len: usize) -> Result<Self, Malformed> {
        let checksum = (hdr.flags & virtio_net::F_NEEDS_CSUM != 0).then_some((hdr.csum_start, hdr.csum_offset));
        if let Some((start, offset)) = checksum {
            let end = usize::from(start) + usize::from(offset) + 2;
            if start < parsed.l3 || end > len {
                return Err(Malformed::ChecksumRange);
            }
        }
        let kind = match hdr.gso_type & !virtio_net::GSO_ECN {
            virtio_net::GSO_NONE if hdr.gso_type == virtio_net::GSO_NONE => {
                if checksum.is_some_and(|field| !may_be_written(parsed, field)) {
                    return Err(Malformed::ChecksumRange);
                }
                return Ok(Self { checksum, segment: None });
            }
            virtio_net::GSO_TCPV4 => SegmentKind::TcpV4,
            virtio_net::GSO_TCPV6 => SegmentKind::TcpV6,
            virtio_net::GSO_UDP_L4 if hdr.gso_type == virtio_net::GSO_UDP_L4 => SegmentKind::Udp,
            _ => return Err(Malformed::GsoType),
        };
        let offload = Self { checksum, segment: Some(Segment { mss: hdr.gso_size, kind }) };
        offload.check_segment(parsed)?;
        Ok(offload)
    }

    /// Bytes of the largest IP packet that a frame of `len` bytes becomes; if it is not to be segmented, all bytes from
    /// the start of the network header.
    pub fn largest_packet(&self, parsed: &Parsed, len: usize) -> usize {
        let l3 = usize::from(parsed.l3);
        match self.segment {
            None => len.saturating_sub(l3),
            Some(segment) => {
                let (payload, end) = (usize::from(parsed.payload), parsed.end as usize);
                end.min(payload + usize::from(segment.mss)).saturating_sub(l3)
            }
        }
    }

    /// Whether the requested segmentation, if any, fits the frame.
    pub(crate) fn check_segment(&self, parsed: &Parsed) -> Result<(), Malformed> {
        let Some(segment) = self.segment else { return Ok(()) };
        let (fits, field) = match segment.kind {
            SegmentKind::TcpV4 => (parsed.kind == L3::V4 && parsed.protocol == TCP, tcp::CHECKSUM_OFFSET),
            SegmentKind::TcpV6 => (parsed.kind == L3::V6 && parsed.protocol == TCP, tcp::CHECKSUM_OFFSET),
            SegmentKind::Udp => (parsed.is_ip() && parsed.protocol == UDP, udp::CHECKSUM_OFFSET),
        };
        if !fits || parsed.is_fragment() {
            return Err(Malformed::GsoType);
        }
        if self.checksum != Some((parsed.l4, field as u16)) {
            return Err(Malformed::GsoChecksum);
        }
        if segment.mss == 0 {
            return Err(Malformed::GsoSize);
        }
        Ok(())
    }
}

/// Whether a checksum may be written at this position: it is the transport's, or belongs to something inside the
/// payload, such as a tunnel's. The bytes that the switch filters by must not change afterwards: the headers, the
/// packet that an ICMP error quotes, and in a later fragment everything.
fn may_be_written(parsed: &Parsed, (start, offset): (u16, u16)) -> bool {
    if !parsed.is_ip() || parsed.is_fragment() {
        return false;
    }
    let own = checksum::field(parsed).is_some_and(|field| (start, usize::from(offset)) == (parsed.l4, field));
    let inside = !matches!(parsed.protocol, ICMP | ICMPV6)
        && start >= parsed.l4
        && u32::from(start) + u32::from(offset) >= u32::from(parsed.payload);
    own || inside
}
