//! Ethernet II headers with up to two VLAN tags (IEEE 802.3, 802.1Q, 802.1ad).

use crate::{Mac, Malformed};

/// EtherTypes.
pub mod ethertype {
    /// IPv4.
    pub const IPV4: u16 = 0x0800;
    /// ARP.
    pub const ARP: u16 = 0x0806;
    /// 802.1Q customer tag.
    pub const VLAN: u16 = 0x8100;
    /// IPv6.
    pub const IPV6: u16 = 0x86dd;
    /// 802.1ad service tag.
    pub const SERVICE_VLAN: u16 = 0x88a8;
}

/// Length of a header without tags, bytes.
pub const HEADER_LEN: usize = 14;
/// Length of one tag, bytes.
pub const TAG_LEN: usize = 4;
/// The longest header parsed here, bytes.
pub const MAX_HEADER_LEN: usize = HEADER_LEN + 2 * TAG_LEN;

/// A VLAN tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// Whether it is an 802.1ad service tag rather than an 802.1Q one.
    pub service: bool,
    /// Priority code point, 0..=7.
    pub priority: u8,
    /// Drop eligible indicator.
    pub drop_eligible: bool,
    /// VLAN identifier, 0..=4095; 0 is a priority tag.
    pub vid: u16,
}

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// Destination address.
    pub destination: Mac,
    /// Source address.
    pub source: Mac,
    /// Outer tag.
    pub outer: Option<Tag>,
    /// Second tag; never without an outer one in a parsed header.
    pub inner: Option<Tag>,
    /// EtherType after the tags. A third tag is not parsed: its TPID is reported here.
    pub ethertype: u16,
}

impl Header {
    /// A header without tags.
    #[must_use]
    pub const fn new(destination: Mac, source: Mac, ethertype: u16) -> Self {
        Self { destination, source, outer: None, inner: None, ethertype }
    }

    /// Parses the header at the start of `frame`.
    ///
    /// # Errors
    /// [`Malformed::Truncated`].
    #[inline]
    pub fn parse(frame: &[u8]) -> Result<Self, Malformed> {
        let (fixed, rest) = frame.split_first_chunk::<HEADER_LEN>().ok_or(Malformed::Truncated)?;
        let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, t0, t1] = *fixed;
        let destination = Mac([d0, d1, d2, d3, d4, d5]);
        let source = Mac([s0, s1, s2, s3, s4, s5]);
        let mut header = Self::new(destination, source, u16::from_be_bytes([t0, t1]));
        let mut rest = rest;
        for slot in [&mut header.outer, &mut header.inner] {
            let service = match header.ethertype {
                ethertype::VLAN => false,
                ethertype::SERVICE_VLAN => true,
                _ => break,
            };
            let (tag, behind) = rest.split_first_chunk::<TAG_LEN>().ok_or(Malformed::Truncated)?;
            *slot = Some(Tag::from_control(service, u16::from_be_bytes([tag[0], tag[1]])));
            header.ethertype = u16::from_be_bytes([tag[2], tag[3]]);
            rest = behind;
        }
        Ok(header)
    }

    /// Length, bytes: 14, 18 or 22.
    #[must_use]
    pub const fn header_len(&self) -> usize {
        HEADER_LEN + TAG_LEN * (self.outer.is_some() as usize + self.inner.is_some() as usize)
    }

    /// The header without its tags.
    #[must_use]
    pub fn emit(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[..6].copy_from_slice(&self.destination.0);
        out[6..12].copy_from_slice(&self.source.0);
        out[12..].copy_from_slice(&self.ethertype.to_be_bytes());
        out
    }

    /// Writes the header with its tags to the start of `out`; returns its length.
    pub fn emit_into(&self, out: &mut [u8; MAX_HEADER_LEN]) -> usize {
        out[..6].copy_from_slice(&self.destination.0);
        out[6..12].copy_from_slice(&self.source.0);
        let mut at = 12;
        for tag in [self.outer, self.inner].into_iter().flatten() {
            let ethertype = if tag.service { ethertype::SERVICE_VLAN } else { ethertype::VLAN };
            out[at..at + 2].copy_from_slice(&ethertype.to_be_bytes());
            out[at + 2..at + 4].copy_from_slice(&tag.control().to_be_bytes());
            at += TAG_LEN;
        }
        out[at..at + 2].copy_from_slice(&self.ethertype.to_be_bytes());
        at + 2
    }
}

impl Tag {
    /// The tag that an 802.1Q tag control field describes.
    #[must_use]
    pub const fn from_control(service: bool, control: u16) -> Self {
        Self { service, priority: (control >> 13) as u8, drop_eligible: control & 0x1000 != 0, vid: control & 0x0fff }
    }

    /// The tag control field; only the low 3 bits of `priority` and 12 of `vid` count.
    #[must_use]
    pub const fn control(&self) -> u16 {
        ((self.priority as u16) << 13) | ((self.drop_eligible as u16) << 12) | (self.vid & 0x0fff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACS: [u8; 12] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];

    fn frame(tail: &[u8]) -> alloc::vec::Vec<u8> {
        [&MACS[..], tail].concat()
    }

    #[test]
    fn tags() {
        let plain = Header::parse(&frame(&[8, 0])).unwrap();
        assert_eq!(plain, Header::new(Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]), ethertype::IPV4));
        assert_eq!(plain.header_len(), 14);

        let tagged = frame(&[0x88, 0xa8, 0xb0, 0x07, 0x81, 0x00, 0x0f, 0xff, 0x86, 0xdd]);
        let header = Header::parse(&tagged).unwrap();
        assert_eq!(header.outer, Some(Tag { service: true, priority: 5, drop_eligible: true, vid: 7 }));
        assert_eq!(header.inner, Some(Tag { service: false, priority: 0, drop_eligible: false, vid: 4095 }));
        assert_eq!((header.ethertype, header.header_len()), (ethertype::IPV6, 22));
        let mut out = [0; MAX_HEADER_LEN];
        assert_eq!(header.emit_into(&mut out), 22);
        assert_eq!(out[..], tagged[..]);
    }

    #[test]
    fn a_third_tag_is_left_alone() {
        let tag = [0x81, 0x00, 0, 1];
        let header = Header::parse(&frame(&[&tag[..], &tag, &tag, &[8, 0]].concat())).unwrap();
        assert_eq!((header.ethertype, header.header_len()), (ethertype::VLAN, 22));
    }

    #[test]
    fn truncated() {
        let tagged = frame(&[0x81, 0x00, 0, 7, 0x81, 0x00, 0, 8, 0x08, 0x00]);
        for len in 0..tagged.len() {
            assert_eq!(Header::parse(&tagged[..len]), Err(Malformed::Truncated), "{len}");
        }
    }
}
