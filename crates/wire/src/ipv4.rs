//! IPv4 headers (RFC 791).

use core::net::Ipv4Addr;

use crate::{Malformed, checksum};

/// Length of a header without options, bytes.
pub const HEADER_LEN: usize = 20;
/// Length of the longest header, bytes.
pub const MAX_HEADER_LEN: usize = 60;

/// A header; options are skipped, not parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// Length of the header with its options, bytes: 20..=60. The transport header starts here.
    pub header_len: u8,
    /// Type of service: DSCP and ECN.
    pub traffic_class: u8,
    /// Length of header and payload, bytes; at least `header_len`.
    pub total_len: u16,
    /// Identification of the fragments of one packet.
    pub identification: u16,
    /// Don't fragment (DF).
    pub dont_fragment: bool,
    /// More fragments (MF).
    pub more_fragments: bool,
    /// Fragment offset, bytes: a multiple of 8, at most 65528.
    pub fragment_offset: u16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the payload; see [`crate::protocol`].
    pub protocol: u8,
    /// Header checksum as received; [`Header::emit`] computes its own.
    pub checksum: u16,
    /// Source address.
    pub source: Ipv4Addr,
    /// Destination address.
    pub destination: Ipv4Addr,
}

impl Header {
    /// The header of an unfragmented packet with `payload_len` bytes of payload and no options. DF is set, so it needs
    /// no identification (RFC 6864, section 4). TTL 64, type of service 0. `payload_len`: 0..=65,515.
    #[must_use]
    pub const fn new(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, payload_len: u16) -> Self {
        Self {
            header_len: HEADER_LEN as u8,
            traffic_class: 0,
            total_len: (HEADER_LEN as u16).saturating_add(payload_len),
            identification: 0,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            ttl: 64,
            protocol,
            checksum: 0,
            source,
            destination,
        }
    }

    /// Parses the header at the start of `packet`, which may have padding behind its end. The checksum is not verified;
    /// see [`checksum_is_valid`].
    ///
    /// # Errors
    /// [`Malformed::Truncated`], [`Malformed::Version`], [`Malformed::HeaderLength`]; [`Malformed::Length`] when
    /// `total_len` is below `header_len` or beyond `packet`.
    pub fn parse(packet: &[u8]) -> Result<Self, Malformed> {
        let header = Self::parse_quoted(packet)?;
        if usize::from(header.total_len) > packet.len() {
            return Err(Malformed::Length);
        }
        Ok(header)
    }

    /// As [`Header::parse`], but the payload may be truncated, as in packets that ICMP errors quote.
    ///
    /// # Errors
    /// As for [`Header::parse`].
    pub fn parse_quoted(packet: &[u8]) -> Result<Self, Malformed> {
        let b = packet.first_chunk::<HEADER_LEN>().ok_or(Malformed::Truncated)?;
        if b[0] >> 4 != 4 {
            return Err(Malformed::Version);
        }
        let header_len = (b[0] & 0x0f) * 4;
        if usize::from(header_len) < HEADER_LEN {
            return Err(Malformed::HeaderLength);
        }
        if usize::from(header_len) > packet.len() {
            return Err(Malformed::Truncated);
        }
        let total_len = u16::from_be_bytes([b[2], b[3]]);
        if total_len < u16::from(header_len) {
            return Err(Malformed::Length);
        }
        let fragment = u16::from_be_bytes([b[6], b[7]]);
        Ok(Self {
            header_len,
            traffic_class: b[1],
            total_len,
            identification: u16::from_be_bytes([b[4], b[5]]),
            dont_fragment: fragment & DF != 0,
            more_fragments: fragment & MF != 0,
            fragment_offset: (fragment & OFFSET) * 8,
            ttl: b[8],
            protocol: b[9],
            checksum: u16::from_be_bytes([b[10], b[11]]),
            source: Ipv4Addr::new(b[12], b[13], b[14], b[15]),
            destination: Ipv4Addr::new(b[16], b[17], b[18], b[19]),
        })
    }

    /// Whether the packet is a fragment, the first one included.
    #[must_use]
    pub const fn is_fragment(&self) -> bool {
        self.more_fragments || self.fragment_offset != 0
    }

    /// ECN codepoint, 0..=3 (RFC 3168).
    #[must_use]
    pub const fn ecn(&self) -> u8 {
        self.traffic_class & 3
    }

    /// Length of the payload, bytes.
    #[must_use]
    pub const fn payload_len(&self) -> u16 {
        self.total_len.saturating_sub(self.header_len as u16)
    }

    /// The header without options (`header_len` is ignored), its checksum computed.
    #[must_use]
    pub fn emit(&self) -> [u8; HEADER_LEN] {
        let fragment = (self.fragment_offset / 8)
            | if self.dont_fragment { DF } else { 0 }
            | if self.more_fragments { MF } else { 0 };
        let mut out = [0; HEADER_LEN];
        out[0] = 0x45;
        out[1] = self.traffic_class;
        out[2..4].copy_from_slice(&self.total_len.to_be_bytes());
        out[4..6].copy_from_slice(&self.identification.to_be_bytes());
        out[6..8].copy_from_slice(&fragment.to_be_bytes());
        out[8] = self.ttl;
        out[9] = self.protocol;
        out[12..16].copy_from_slice(&self.source.octets());
        out[16..].copy_from_slice(&self.destination.octets());
        let checksum = checksum::checksum(&out);
        out[10..12].copy_from_slice(&checksum.to_be_bytes());
        out
    }

    /// Partial checksum of the pseudo header of the payload.
    #[must_use]
    pub fn pseudo_sum(&self) -> u32 {
        checksum::pseudo_v4(self.source, self.destination, self.protocol, u32::from(self.payload_len()))
    }
}

/// Checks the options in `header` (exactly `header_len` bytes).
///
/// # Errors
/// [`Malformed::SourceRoute`] for a loose or strict source route (RFC 791, section 3.1; RFC 7126, sections 4.3 and
/// 4.4): the destination in the header is not the packet's final destination. [`Malformed::Options`] for a length that
/// does not fit.
pub fn check_options(header: &[u8]) -> Result<(), Malformed> {
    let mut options = header.get(HEADER_LEN..).unwrap_or_default();
    loop {
        let len = match *options {
            [] | [END_OF_OPTIONS, ..] => return Ok(()),
            [NO_OPERATION, ..] => 1,
            [LOOSE_SOURCE_ROUTE | STRICT_SOURCE_ROUTE, ..] => return Err(Malformed::SourceRoute),
            [_, len, ..] if len >= 2 => usize::from(len),
            _ => return Err(Malformed::Options),
        };
        options = options.get(len..).ok_or(Malformed::Options)?;
    }
}

/// Whether the checksum of `header` (exactly `header_len` bytes) is valid.
#[must_use]
pub fn checksum_is_valid(header: &[u8]) -> bool {
    checksum::is_valid(header)
}

/// Computes the checksum of `header` (exactly `header_len` bytes) from scratch.
pub fn fill_checksum(header: &mut [u8]) {
    if let Some(fixed) = header.first_chunk_mut::<HEADER_LEN>() {
        fixed[10..12].fill(0);
    }
    let checksum = checksum::checksum(header).to_be_bytes();
    if let Some(fixed) = header.first_chunk_mut::<HEADER_LEN>() {
        fixed[10..12].copy_from_slice(&checksum);
    }
}

/// Changes the total length in place, and the checksum with it.
pub fn set_total_len(header: &mut [u8; HEADER_LEN], total_len: u16) {
    set_u16(header, 2, total_len);
}

/// Changes the identification in place, and the checksum with it.
pub fn set_identification(header: &mut [u8; HEADER_LEN], identification: u16) {
    set_u16(header, 4, identification);
}

/// Changes the flags and the offset (bytes, a multiple of 8) in place, and the checksum with them.
pub fn set_fragment(header: &mut [u8; HEADER_LEN], dont_fragment: bool, more_fragments: bool, offset: u16) {
    let flags = if dont_fragment { DF } else { 0 } | if more_fragments { MF } else { 0 };
    set_u16(header, 6, flags | (offset / 8));
}

/// Changes the time to live in place, and the checksum with it.
pub fn set_ttl(header: &mut [u8; HEADER_LEN], ttl: u8) {
    let protocol = header[9];
    set_u16(header, 8, u16::from_be_bytes([ttl, protocol]));
}

/// Changes the ECN codepoint (0..=3) in place, and the checksum with it.
pub fn set_ecn(header: &mut [u8; HEADER_LEN], ecn: u8) {
    let traffic_class = header[1] & !3 | ecn & 3;
    let version = header[0];
    set_u16(header, 0, u16::from_be_bytes([version, traffic_class]));
}

/// Changes the source address and the header checksum in place; the caller updates the transport checksum.
pub fn set_source(header: &mut [u8; HEADER_LEN], source: Ipv4Addr) {
    let [a, b, c, d] = source.octets();
    set_u16(header, 12, u16::from_be_bytes([a, b]));
    set_u16(header, 14, u16::from_be_bytes([c, d]));
}

/// Changes the destination address and the header checksum in place; the caller updates the transport checksum.
pub fn set_destination(header: &mut [u8; HEADER_LEN], destination: Ipv4Addr) {
    let [a, b, c, d] = destination.octets();
    set_u16(header, 16, u16::from_be_bytes([a, b]));
    set_u16(header, 18, u16::from_be_bytes([c, d]));
}

const END_OF_OPTIONS: u8 = 0;
const NO_OPERATION: u8 = 1;
const LOOSE_SOURCE_ROUTE: u8 = 131;
const STRICT_SOURCE_ROUTE: u8 = 137;

const DF: u16 = 0x4000;
const MF: u16 = 0x2000;
const OFFSET: u16 = 0x1fff;

/// `at` is a constant even offset below 20.
fn set_u16(header: &mut [u8; HEADER_LEN], at: usize, new: u16) {
    let old = u16::from_be_bytes([header[at], header[at + 1]]);
    let checksum = checksum::update_u16(u16::from_be_bytes([header[10], header[11]]), old, new);
    header[at..at + 2].copy_from_slice(&new.to_be_bytes());
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: Header = Header {
        header_len: 20,
        traffic_class: 0x02,
        total_len: 24,
        identification: 0x1c46,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        ttl: 64,
        protocol: 6,
        checksum: 0,
        source: Ipv4Addr::new(172, 16, 10, 99),
        destination: Ipv4Addr::new(172, 16, 10, 12),
    };

    fn packet() -> [u8; 24] {
        let mut packet = [0xee; 24];
        packet[..20].copy_from_slice(&HEADER.emit());
        packet
    }

    #[test]
    fn round_trip() {
        let packet = packet();
        assert!(checksum_is_valid(&packet[..20]));
        let header = Header::parse(&packet).unwrap();
        assert_eq!(header, Header { checksum: header.checksum, ..HEADER });
        assert_eq!((header.payload_len(), header.ecn(), header.is_fragment()), (4, 2, false));
    }

    #[test]
    fn refuses() {
        let good = packet();
        for len in 0..20 {
            assert_eq!(Header::parse(&good[..len]), Err(Malformed::Truncated));
        }
        for len in 20..24 {
            assert_eq!(Header::parse(&good[..len]), Err(Malformed::Length));
            assert!(Header::parse_quoted(&good[..len]).is_ok());
        }
        let cases = [
            (0, 0x65, Malformed::Version),
            (0, 0x44, Malformed::HeaderLength),
            (0, 0x4f, Malformed::Truncated),
            (0, 0x46, Malformed::Truncated),
            (3, 19, Malformed::Length),
            (3, 25, Malformed::Length),
        ];
        for (at, value, expected) in cases {
            let mut bad = good;
            bad[at] = value;
            // 0x46 means 24 bytes: remove the last one.
            let len = if value == 0x46 { 23 } else { 24 };
            assert_eq!(Header::parse(&bad[..len]), Err(expected), "byte {at} = {value:#x}");
        }
    }

    #[test]
    fn options() {
        let check = |options: &[u8]| check_options(&[&HEADER.emit()[..], options].concat());
        let cases: &[(&[u8], Result<(), Malformed>)] = &[
            (&[], Ok(())),
            (&[1, 1, 1, 0], Ok(())),
            (&[7, 4, 4, 0], Ok(())),
            // Bytes behind the end are padding.
            (&[0, 131, 3, 4], Ok(())),
            (&[131, 3, 4, 0], Err(Malformed::SourceRoute)),
            (&[7, 3, 4, 137], Err(Malformed::SourceRoute)),
            (&[7, 1, 4, 0], Err(Malformed::Options)),
            (&[7, 0, 4, 0], Err(Malformed::Options)),
            (&[7, 5, 4, 0], Err(Malformed::Options)),
            (&[1, 1, 1, 7], Err(Malformed::Options)),
        ];
        for (options, expected) in cases {
            assert_eq!(check(options), *expected, "{options:?}");
        }
        assert_eq!(check_options(&[0x45; 19]), Ok(()), "none");
    }

    #[test]
    fn setters_keep_the_checksum() {
        let mut header = HEADER.emit();
        set_total_len(&mut header, 1400);
        set_identification(&mut header, 9);
        set_fragment(&mut header, false, true, 1480);
        set_ttl(&mut header, 1);
        set_ecn(&mut header, 3);
        set_source(&mut header, Ipv4Addr::new(1, 2, 3, 4));
        set_destination(&mut header, Ipv4Addr::BROADCAST);
        assert!(checksum_is_valid(&header));
        let parsed = Header::parse_quoted(&header).unwrap();
        let expected = Header {
            traffic_class: 0x03,
            total_len: 1400,
            identification: 9,
            dont_fragment: false,
            more_fragments: true,
            fragment_offset: 1480,
            ttl: 1,
            checksum: parsed.checksum,
            source: Ipv4Addr::new(1, 2, 3, 4),
            destination: Ipv4Addr::BROADCAST,
            ..HEADER
        };
        assert_eq!(parsed, expected);
        header[10] ^= 1;
        assert!(!checksum_is_valid(&header));
        fill_checksum(&mut header);
        assert!(checksum_is_valid(&header));
    }
}
