//! What a guest leaves to the network side: virtio network headers, checked against the frame they came with.

use crate::malformed::Malformed;
use crate::parse::{L3, Parsed, TCP, UDP};

/// Work that a guest left to the network side, from its virtio header (virtio 1.3, 5.1.6.2), checked against the frame.
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

/// The header in front of every frame on a virtio network queue or a TAP device with `IFF_VNET_HDR`
/// (virtio 1.3, 5.1.6), fields as the sender wrote them: nothing in it is checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VirtioNetHdr {
    /// [`Self::NEEDS_CSUM`], [`Self::DATA_VALID`].
    pub flags: u8,
    /// One of the `GSO_` values, perhaps with [`Self::GSO_ECN`].
    pub gso_type: u8,
    /// Length of all headers, bytes; a hint only.
    pub hdr_len: u16,
    /// Payload per segment, bytes.
    pub gso_size: u16,
    /// Where summing starts, bytes from the start of the frame.
    pub csum_start: u16,
    /// Where the checksum is stored, bytes from `csum_start`.
    pub csum_offset: u16,
    /// Receive buffers that the frame occupies; only in the 12-byte form.
    pub num_buffers: u16,
}

impl VirtioNetHdr {
    /// Bytes of the header without `num_buffers`.
    pub const SHORT_LEN: usize = 10;
    /// Bytes of the header with `num_buffers`.
    pub const LEN: usize = 12;
    /// Flag: the checksum is partial, `csum_start` and `csum_offset` say what to finish.
    pub const NEEDS_CSUM: u8 = 1;
    /// Flag: the checksum has been verified.
    pub const DATA_VALID: u8 = 2;
    /// Not to be segmented.
    pub const GSO_NONE: u8 = 0;
    /// Segment TCP over IPv4.
    pub const GSO_TCPV4: u8 = 1;
    /// Segment TCP over IPv6.
    pub const GSO_TCPV6: u8 = 4;
    /// Segment UDP into datagrams (USO).
    pub const GSO_UDP_L4: u8 = 5;
    /// Added to a TCP type: the frame has CWR set.
    pub const GSO_ECN: u8 = 0x80;

    /// Reads a header in little-endian order (virtio 1.x, or a TAP device after `TUNSETVNETLE`).
    /// `num_buffers` is 0 when `bytes` holds the short form only; `None` below [`Self::SHORT_LEN`] bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (short, rest) = bytes.split_first_chunk::<{ Self::SHORT_LEN }>()?;
        let [flags, gso_type, h0, h1, g0, g1, s0, s1, o0, o1] = *short;
        Some(Self {
            flags,
            gso_type,
            hdr_len: u16::from_le_bytes([h0, h1]),
            gso_size: u16::from_le_bytes([g0, g1]),
            csum_start: u16::from_le_bytes([s0, s1]),
            csum_offset: u16::from_le_bytes([o0, o1]),
            num_buffers: rest.first_chunk().map_or(0, |n| u16::from_le_bytes(*n)),
        })
    }

    /// The header in little-endian order; the first [`Self::SHORT_LEN`] bytes are the short form.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let [h0, h1] = self.hdr_len.to_le_bytes();
        let [g0, g1] = self.gso_size.to_le_bytes();
        let [s0, s1] = self.csum_start.to_le_bytes();
        let [o0, o1] = self.csum_offset.to_le_bytes();
        let [n0, n1] = self.num_buffers.to_le_bytes();
        [self.flags, self.gso_type, h0, h1, g0, g1, s0, s1, o0, o1, n0, n1]
    }
}

impl Offload {
    /// Checks the header that a guest wrote against the frame it describes; `len` is the frame's length in bytes.
    ///
    /// `hdr_len` is ignored (the frame's own headers decide), and so is `DATA_VALID`: the guest only speaks for what
    /// it left undone.
    ///
    /// # Errors
    /// [`Malformed::ChecksumRange`] when the checksum area does not lie inside the frame behind the Ethernet header;
    /// [`Malformed::GsoType`] for an unknown type or one that does not fit the frame's protocols;
    /// [`Malformed::GsoChecksum`] when a frame to be segmented does not have its transport checksum left open;
    /// [`Malformed::GsoSize`] for a segment size of zero.
    pub fn from_virtio(hdr: VirtioNetHdr, parsed: &Parsed, len: usize) -> Result<Self, Malformed> {
        let checksum = (hdr.flags & VirtioNetHdr::NEEDS_CSUM != 0).then_some((hdr.csum_start, hdr.csum_offset));
        if let Some((start, offset)) = checksum {
            let end = usize::from(start) + usize::from(offset) + 2;
            if start < parsed.l3 || end > len {
                return Err(Malformed::ChecksumRange);
            }
        }
        let kind = match hdr.gso_type & !VirtioNetHdr::GSO_ECN {
            VirtioNetHdr::GSO_NONE if hdr.gso_type == VirtioNetHdr::GSO_NONE => {
                return Ok(Self { checksum, segment: None });
            }
            VirtioNetHdr::GSO_TCPV4 => SegmentKind::TcpV4,
            VirtioNetHdr::GSO_TCPV6 => SegmentKind::TcpV6,
            VirtioNetHdr::GSO_UDP_L4 if hdr.gso_type == VirtioNetHdr::GSO_UDP_L4 => SegmentKind::Udp,
            _ => return Err(Malformed::GsoType),
        };
        let offload = Self { checksum, segment: Some(Segment { mss: hdr.gso_size, kind }) };
        offload.check_segment(parsed)?;
        Ok(offload)
    }

    /// Whether the segmentation asked for, if any, fits the frame.
    pub(crate) fn check_segment(&self, parsed: &Parsed) -> Result<(), Malformed> {
        let Some(segment) = self.segment else { return Ok(()) };
        let (fits, field) = match segment.kind {
            SegmentKind::TcpV4 => (parsed.kind == L3::V4 && parsed.protocol == TCP, 16),
            SegmentKind::TcpV6 => (parsed.kind == L3::V6 && parsed.protocol == TCP, 16),
            SegmentKind::Udp => (parsed.is_ip() && parsed.protocol == UDP, 6),
        };
        if !fits || parsed.is_fragment {
            return Err(Malformed::GsoType);
        }
        if self.checksum != Some((parsed.l4, field)) {
            return Err(Malformed::GsoChecksum);
        }
        if segment.mss == 0 {
            return Err(Malformed::GsoSize);
        }
        Ok(())
    }
}
