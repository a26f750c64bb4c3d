//! Packets larger than the path MTU: TCP becomes smaller segments, IPv4 becomes fragments (RFC 791).

use bifrost_wire::ipv4;

use super::{Segments, be16, put16};
use crate::malformed::Malformed;
use crate::offload::{Offload, Segment, SegmentKind};
use crate::parse::{L3, Parsed, parse};

/// Why a frame cannot be made to fit the path MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TooLarge {
    /// Only its sender may make it smaller: IPv4 with DF, or IPv6. Send it an ICMP error (RFC 1191, RFC 8201).
    DontFragment,
    /// It is not an IP packet, or it would become more than [`Segments::MAX`] frames, a fragment beyond the maximum
    /// packet length, or a first fragment without the whole transport header.
    Uncuttable,
    /// It would be refused with any MTU.
    Malformed(Malformed),
}

impl Segments {
    /// [`plan`](Self::plan) for a path that takes IP packets of at most `mtu` bytes.
    ///
    /// - A packet that fits stays whole; bytes behind the IP packet are removed.
    /// - A TCP packet that is to be segmented becomes smaller segments, with or without DF. It is not fragmented, and
    ///   the receiver sees segments as the sender could have made them.
    /// - Any other IPv4 packet without DF becomes fragments, a fragment becomes smaller ones, and each datagram of a
    ///   UDP packet that is to be segmented becomes fragments. Transport checksums are completed first, over the whole
    ///   datagram.
    ///
    /// # Errors
    /// [`TooLarge`].
    pub fn plan_within(head: &[u8], len: usize, offload: Offload, mtu: u16) -> Result<Self, TooLarge> {
        let parsed = parse(head, len).map_err(TooLarge::Malformed)?;
        if offload.largest_packet(&parsed, len) <= usize::from(mtu) {
            return Self::plan(head, len, offload).map_err(TooLarge::Malformed);
        }
        let packet = parsed.end - u32::from(parsed.l3);
        if offload.segment.is_none() && packet <= u32::from(mtu) {
            return Self::plan(head, parsed.end as usize, offload).map_err(TooLarge::Malformed);
        }
        // An error of the plan without an MTU holds for any MTU.
        let may_cut = parsed.kind == L3::V4 && !has_dont_fragment(head, &parsed);
        let refused = if may_cut || !parsed.is_ip() { TooLarge::Uncuttable } else { TooLarge::DontFragment };
        match offload.segment {
            Some(segment) if segment.kind != SegmentKind::Udp => {
                let headers = parsed.payload - parsed.l3;
                let mss = mtu.checked_sub(headers).filter(|mss| *mss > 0).ok_or(refused)?;
                let segment = Segment { mss: mss.min(segment.mss), ..segment };
                Self::plan(head, len, Offload { segment: Some(segment), ..offload }).map_err(|reason| match reason {
                    Malformed::GsoSegments => refused,
                    other => TooLarge::Malformed(other),
                })
            }
            _ if may_cut => Self::plan(head, len, offload).map_err(TooLarge::Malformed)?.fragmented(head, &parsed, mtu),
            _ => Err(refused),
        }
    }

    /// The plan, with each frame fragmented.
    fn fragmented(self, head: &[u8], parsed: &Parsed, mtu: u16) -> Result<Self, TooLarge> {
        let fragment = mtu.saturating_sub(parsed.l4 - parsed.l3) & !7;
        let base = head.get(usize::from(parsed.l3) + 6..).filter(|b| b.len() >= 2).map_or(0, be16);
        let behind = u32::from(base & OFFSET) * 8 + (parsed.end - u32::from(parsed.l4));
        // The first one must contain the whole transport header: filters on the path need it.
        let header = parsed.as_whole(head).map_or(parsed.payload, |whole| whole.parsed.payload) - parsed.l4;
        if fragment == 0 || fragment < header || behind > u32::from(u16::MAX) {
            return Err(TooLarge::Uncuttable);
        }
        let whole = Self { l3: parsed.l3, l4: parsed.l4, end: parsed.end, ..self };
        let of = |datagram| whole.ip_payload(datagram).div_ceil(usize::from(fragment)).max(1);
        let count = (usize::from(self.count) - 1) * of(0) + of(self.count - 1);
        if count > usize::from(Self::MAX) {
            return Err(TooLarge::Uncuttable);
        }
        // Both are at most MAX.
        Ok(Self { fragment, fragments: of(0) as u8, count: count as u16, ..whole })
    }

    /// Bytes after the IP header of datagram `index`, before fragmentation.
    fn ip_payload(&self, datagram: u16) -> usize {
        if self.mss == 0 {
            return self.end as usize - usize::from(self.l4);
        }
        let (from, to) = self.slice(datagram);
        usize::from(self.header - self.l4) + to - from
    }

    /// The datagram that fragment `index` belongs to, and which of the bytes after the IP header it carries.
    fn fragment(&self, index: u16) -> (u16, usize, usize) {
        let (datagram, number) = (index / u16::from(self.fragments), index % u16::from(self.fragments));
        let from = usize::from(number) * usize::from(self.fragment);
        (datagram, from, (from + usize::from(self.fragment)).min(self.ip_payload(datagram)))
    }

    /// Length of the frame with fragment `index`, bytes.
    pub(super) fn fragment_len(&self, index: u16) -> usize {
        let (_, from, to) = self.fragment(index);
        usize::from(self.l4) + to - from
    }

    /// As [`write`](Self::write).
    pub(super) fn write_fragment(
        &self,
        index: u16,
        copy: &mut impl FnMut(usize, usize, &mut Vec<u8>),
        out: &mut Vec<u8>,
    ) {
        let (datagram, from, to) = self.fragment(index);
        let (start, l3, l4) = (out.len(), usize::from(self.l3), usize::from(self.l4));
        if self.is_finished_in(from, to) {
            // The whole datagram, because the checksum covers it.
            self.write_segment(datagram, copy, out);
            let payload = start + l4;
            out.copy_within(payload + from..payload + to, payload);
            out.truncate(payload + to - from);
        } else {
            // Where the bytes after the datagram's IP header would start if each datagram had its own copy of the UDP
            // header.
            let begin = if self.mss == 0 { l4 } else { l4 + usize::from(datagram) * usize::from(self.mss) };
            copy(0, l4, out);
            copy(begin + from, begin + to, out);
            let id = be16(&out[start + l3 + 4..]).wrapping_add(datagram);
            put16(&mut out[start + l3..], 4, id);
        }
        let more = to < self.ip_payload(datagram);
        let ip = &mut out[start + l3..];
        put16(ip, 2, ip.len() as u16);
        let field = be16(&ip[6..]);
        // A packet that was a fragment already keeps its offset and "more fragments" flag.
        let offset = (field & OFFSET).wrapping_add((from / 8) as u16) & OFFSET;
        put16(ip, 6, field & !OFFSET | if more { MORE } else { 0 } | offset);
        let header = &mut ip[..l4 - l3];
        if from > 0 {
            blank_options(&mut header[ipv4::HEADER_LEN..]);
        }
        ipv4::fill_checksum(header);
    }

    /// Whether bytes from..to after the IP header contain a field that is known only when the datagram is complete.
    fn is_finished_in(&self, from: usize, to: usize) -> bool {
        if self.mss != 0 {
            return from == 0;
        }
        let l4 = usize::from(self.l4);
        self.partial.is_some_and(|(start, offset)| {
            let field = usize::from(start) + usize::from(offset);
            field < l4 + to && field + 2 > l4 + from
        })
    }
}

/// Whether an IPv4 packet has DF.
fn has_dont_fragment(head: &[u8], parsed: &Parsed) -> bool {
    head.get(usize::from(parsed.l3) + 6).is_some_and(|flags| flags & 0x40 != 0)
}

/// The field of flags and fragment offset (RFC 791, section 3.1).
const MORE: u16 = 0x2000;
const OFFSET: u16 = 0x1fff;

/// Overwrites the options of a first fragment that later ones must not carry (RFC 791, section 3.1: the copied flag)
/// with no-operation options, so that all fragments have headers of one length. Malformed options stay as they are.
fn blank_options(options: &mut [u8]) {
    const END: u8 = 0;
    const NO_OPERATION: u8 = 1;
    const COPIED: u8 = 0x80;
    let mut at = 0;
    while let Some(&kind) = options.get(at) {
        let len = match kind {
            END => return,
            NO_OPERATION => 1,
            _ => options.get(at + 1).map_or(0, |len| usize::from(*len)),
        };
        let Some(option) = options.get_mut(at..at + len).filter(|o| o.len() > usize::from(kind != NO_OPERATION)) else {
            return;
        };
        if kind & COPIED == 0 {
            option.fill(NO_OPERATION);
        }
        at += len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_without_the_copied_flag_are_blanked() {
        // Record route (7) is not copied, loose source route (131) is.
        let cases: &[(&[u8], &[u8])] = &[
            (&[], &[]),
            (&[1, 1, 1, 1], &[1, 1, 1, 1]),
            (&[7, 3, 4, 0], &[1, 1, 1, 0]),
            (&[131, 3, 4, 7, 4, 5, 6, 1], &[131, 3, 4, 1, 1, 1, 1, 1]),
            (&[1, 68, 4, 5, 0, 131, 3, 4], &[1, 1, 1, 1, 1, 131, 3, 4]),
            // Too short, too long, truncated: what follows is unknown.
            (&[7, 1, 4, 0], &[7, 1, 4, 0]),
            (&[7, 0, 4, 0], &[7, 0, 4, 0]),
            (&[7, 5, 4, 0], &[7, 5, 4, 0]),
            (&[1, 1, 1, 7], &[1, 1, 1, 7]),
            (&[0, 7, 3, 4], &[0, 7, 3, 4]),
        ];
        for (given, expected) in cases {
            let mut options = given.to_vec();
            blank_options(&mut options);
            assert_eq!(options, *expected, "{given:?}");
        }
    }
}
