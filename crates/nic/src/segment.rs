//! The Post-Processor: segmentation (TSO, USO), fragmentation and checksum completion, the last steps before a frame
//! leaves.

mod fragment;

use std::net::IpAddr;

use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::tcp::Flags;
use bifrost_wire::{checksum, ipv4, ipv6, tcp, udp};

use crate::checksum::pseudo;
use crate::malformed::Malformed;
use crate::offload::{Offload, Segment, SegmentKind};
use crate::parse::{L3, parse};

pub use fragment::TooLarge;

/// How one frame of a guest leaves. The plan is made once; every resulting frame can be written any number of times (a
/// retransmission writes it again), in any order.
///
/// The plan keeps offsets only. [`Self::write`] reads the bytes again and trusts none of their lengths, so a guest that
/// rewrites its buffer meanwhile gets a corrupted frame, but no out-of-bounds access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    /// Bytes of the whole frame.
    len: u32,
    /// Payload bytes per segment, 0 when the frame is not to be segmented.
    mss: u16,
    count: u16,
    l3: u16,
    l4: u16,
    /// Bytes of all headers.
    header: u16,
    /// End of the payload.
    end: u32,
    v6: bool,
    udp: bool,
    /// Partial checksum of a frame that is not segmented: start, offset.
    partial: Option<(u16, u16)>,
    /// Bytes after the IP header of each fragment but the last, a multiple of 8; 0: no fragmentation.
    fragment: u16,
    /// Fragments of each datagram but the last.
    fragments: u8,
}

impl Segments {
    /// Maximum number of frames that one frame may become.
    pub const MAX: u16 = 255;

    /// Plans a frame of `len` bytes that starts with `head` (at least all headers); `offload` is checked against it
    /// again.
    ///
    /// # Errors
    /// The errors of [`parse`] and [`Offload::from_virtio`], and [`Malformed::GsoSegments`] for more than [`Self::MAX`]
    /// segments.
    #[inline]
    pub fn plan(head: &[u8], len: usize, offload: Offload) -> Result<Self, Malformed> {
        if len > crate::parse::MAX_FRAME_LEN {
            return Err(Malformed::FrameTooLong);
        }
        let plain = Self {
            len: len as u32,
            mss: 0,
            count: 1,
            l3: 0,
            l4: 0,
            header: 0,
            end: len as u32,
            v6: false,
            udp: false,
            partial: offload.checksum,
            fragment: 0,
            fragments: 0,
        };
        match (offload.segment, offload.checksum) {
            (Some(segment), _) => plain.segmented(head, offload, segment),
            (None, Some((start, offset))) if usize::from(start) + usize::from(offset) + 2 > len => {
                Err(Malformed::ChecksumRange)
            }
            (None, _) => Ok(plain),
        }
    }

    /// How many frames leave: 1 for a frame that is neither segmented nor fragmented, at most [`Self::MAX`].
    pub fn count(&self) -> u16 {
        self.count
    }

    /// Bytes of frame `index`; 0 when there is none.
    pub fn len(&self, index: u16) -> usize {
        if index >= self.count {
            return 0;
        }
        if self.fragment != 0 {
            return self.fragment_len(index);
        }
        if self.mss == 0 {
            return self.len as usize;
        }
        let (from, to) = self.slice(index);
        usize::from(self.header) + to - from
    }

    /// Whether the frames are fragments.
    pub fn is_fragmented(&self) -> bool {
        self.fragment != 0
    }

    /// Whether the frame leaves unchanged.
    pub fn is_unchanged(&self) -> bool {
        self.mss == 0 && self.partial.is_none() && self.fragment == 0
    }

    /// The plan with segmentation.
    fn segmented(self, head: &[u8], offload: Offload, segment: Segment) -> Result<Self, Malformed> {
        let parsed = parse(head, self.len as usize)?;
        offload.check_segment(&parsed)?;
        let udp = segment.kind == SegmentKind::Udp;
        if udp {
            let field = usize::from(parsed.l4) + 4;
            let said = head.get(field..field + 2).map_or(0, |b| u32::from(be16(b)));
            if u32::from(parsed.l4) + said != parsed.end {
                return Err(Malformed::UdpHeader);
            }
        }
        let payload = parsed.end - u32::from(parsed.payload);
        let count = payload.div_ceil(u32::from(segment.mss)).max(1);
        if count > u32::from(Self::MAX) {
            return Err(Malformed::GsoSegments);
        }
        Ok(Self {
            mss: segment.mss,
            count: count as u16,
            l3: parsed.l3,
            l4: parsed.l4,
            header: parsed.payload,
            end: parsed.end,
            v6: parsed.kind == L3::V6,
            udp,
            partial: None,
            ..self
        })
    }

    /// Length of the planned frame, bytes.
    pub fn frame_len(&self) -> usize {
        self.len as usize
    }

    /// Always false: a plan makes at least one frame.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Appends frame `index` to `out`, complete: lengths, IPv4 identification and header checksum, TCP sequence number
    /// and flags, UDP length, transport checksum. Appends nothing when there is no such frame.
    ///
    /// `copy` appends bytes from..to of the original frame; bytes that it omits become zeros. Checksums cover the bytes
    /// that it appended, so concurrent writes to the original do no harm.
    pub fn write(&self, index: u16, mut copy: impl FnMut(usize, usize, &mut Vec<u8>), out: &mut Vec<u8>) {
        if index >= self.count {
            return;
        }
        let mut copy = |from: usize, to: usize, out: &mut Vec<u8>| {
            let end = out.len() + (to - from);
            copy(from, to, out);
            out.resize(end, 0);
        };
        if self.fragment == 0 {
            self.write_segment(index, &mut copy, out);
        } else {
            self.write_fragment(index, &mut copy, out);
        }
    }

    /// Appends segment `index`, or the frame, before fragmentation.
    fn write_segment(&self, index: u16, copy: &mut impl FnMut(usize, usize, &mut Vec<u8>), out: &mut Vec<u8>) {
        let start = out.len();
        if self.mss == 0 {
            copy(0, self.len as usize, out);
            if let Some((from, offset)) = self.partial {
                finish_partial(&mut out[start..], usize::from(from), usize::from(offset));
            }
            return;
        }
        let (from, to) = self.slice(index);
        out.reserve(usize::from(self.header) + to - from);
        copy(0, usize::from(self.header), out);
        copy(from, to, out);
        let frame = &mut out[start..];
        self.patch_ip(index, frame);
        self.patch_transport(index, frame);
    }

    /// Payload bytes of frame `index`, from the start of the original frame.
    fn slice(&self, index: u16) -> (usize, usize) {
        let from = usize::from(self.header) + usize::from(index) * usize::from(self.mss);
        (from, (from + usize::from(self.mss)).min(self.end as usize))
    }

    fn patch_ip(&self, index: u16, frame: &mut [u8]) {
        let ip = &mut frame[usize::from(self.l3)..];
        let len = ip.len();
        if self.v6 {
            put16(ip, 4, (len - ipv6::HEADER_LEN) as u16);
        } else {
            put16(ip, 2, len as u16);
            put16(ip, 4, be16(&ip[4..]).wrapping_add(index));
            ipv4::fill_checksum(&mut ip[..usize::from(self.l4 - self.l3)]);
        }
    }

    fn patch_transport(&self, index: u16, frame: &mut [u8]) {
        let (ip, l4) = frame.split_at_mut(usize::from(self.l4));
        let (src, dst) = addresses(&ip[usize::from(self.l3)..], self.v6);
        let (protocol, field) = if self.udp { (UDP, udp::CHECKSUM_OFFSET) } else { (TCP, tcp::CHECKSUM_OFFSET) };
        if self.udp {
            put16(l4, 4, l4.len() as u16);
        } else {
            let seq = u32::from_be_bytes([l4[4], l4[5], l4[6], l4[7]]);
            let seq = seq.wrapping_add(u32::from(index) * u32::from(self.mss));
            l4[4..8].copy_from_slice(&seq.to_be_bytes());
            if index != 0 {
                l4[13] &= !Flags::CWR.0;
            }
            if index + 1 != self.count {
                l4[13] &= !(Flags::FIN.0 | Flags::PSH.0);
            }
        }
        put16(l4, field, 0);
        let sum = pseudo(src, dst, protocol, l4.len()) + checksum::sum(l4);
        // Zero would mean "none" to UDP; TCP takes both.
        put16(l4, field, checksum::udp_nonzero(checksum::finish(sum)));
    }
}

/// Completes a partial checksum: the field holds the sum of the pseudo header, the rest is summed now (virtio 1.3,
/// 5.1.6.2.1).
fn finish_partial(frame: &mut [u8], start: usize, offset: usize) {
    let Some(area) = frame.get_mut(start..) else { return };
    if area.len() >= offset + 2 {
        let sum = checksum::checksum(area);
        // For any protocol, all ones is equivalent to zero; and UDP requires it.
        put16(area, offset, checksum::udp_nonzero(sum));
    }
}

/// Source and destination of an IP header.
fn addresses(ip: &[u8], v6: bool) -> (IpAddr, IpAddr) {
    if v6 { (addr::<16>(ip, 8), addr::<16>(ip, 24)) } else { (addr::<4>(ip, 12), addr::<4>(ip, 16)) }
}

fn addr<const N: usize>(ip: &[u8], at: usize) -> IpAddr
where
    IpAddr: From<[u8; N]>,
{
    let mut octets = [0; N];
    octets.copy_from_slice(&ip[at..at + N]);
    octets.into()
}

/// Appends bytes `from..to` of `head` followed by `tail`, as far as they exist: a `copy` for [`Segments::write`].
pub fn copy_of(head: &[u8], tail: &[u8], from: usize, to: usize, out: &mut Vec<u8>) {
    let split = head.len();
    if from < split {
        out.extend_from_slice(&head[from..to.min(split)]);
    }
    if to > split {
        let from = from.saturating_sub(split).min(tail.len());
        out.extend_from_slice(&tail[from..(to - split).min(tail.len())]);
    }
}

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}
