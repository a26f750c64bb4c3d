//! The invariant CRC (IBTA 7.8.1, A17.3.3): the Ethernet polynomial over the packet, with the fields that routers
//! change set to ones.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Bth, ICRC_LEN};

/// Addresses and ports of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Route {
    /// Sender. Of the same family as `destination`.
    pub source: IpAddr,
    /// Receiver.
    pub destination: IpAddr,
    /// UDP source port: selects the path.
    pub source_port: u16,
    /// UDP destination port.
    pub destination_port: u16,
}

impl Route {
    /// The reverse direction.
    #[must_use]
    pub const fn reversed(&self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
        }
    }
}

/// An ICRC under construction.
#[derive(Clone, Debug)]
pub struct Icrc(crc32fast::Hasher);

impl Icrc {
    /// Starts with the IP and UDP headers of a datagram whose UDP payload, ICRC included, has `payload_len` bytes.
    ///
    /// IPv4 headers are assumed to have no options, identification 0 and "don't fragment". A receiver's socket does not
    /// show the identification, so senders must leave it 0 to be verified. IPv6 has no such field.
    #[must_use]
    pub fn new(route: &Route, payload_len: usize) -> Self {
        let mut head = [0xff; 8 + 40 + 8];
        let udp_len = (payload_len + 8) as u16;
        let start = match (route.source, route.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                put_v4(&mut head[28..48], source, destination, udp_len);
                20
            }
            (source, destination) => {
                put_v6(&mut head[8..48], v6(source), v6(destination), udp_len);
                0
            }
        };
        head[48..50].copy_from_slice(&route.source_port.to_be_bytes());
        head[50..52].copy_from_slice(&route.destination_port.to_be_bytes());
        head[52..54].copy_from_slice(&udp_len.to_be_bytes());
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&head[start..]);
        Self(hasher)
    }

    /// Adds the headers, which begin with a [`Bth`].
    pub fn header(&mut self, header: &[u8]) {
        match header.split_first_chunk::<{ Bth::LEN }>() {
            Some((bth, rest)) => {
                let mut masked = *bth;
                masked[Bth::VARIANT_BYTE] = 0xff;
                self.0.update(&masked);
                self.0.update(rest);
            }
            None => self.0.update(header),
        }
    }

    /// Adds payload or pad bytes.
    pub fn payload(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The ICRC, as it follows the packet.
    #[must_use]
    pub fn finish(self) -> [u8; ICRC_LEN] {
        self.0.finalize().to_le_bytes()
    }

    /// Whether the last four bytes of a UDP payload are its valid ICRC.
    #[must_use]
    pub fn is_valid(route: &Route, payload: &[u8]) -> bool {
        Self::new(route, payload.len()).fits(payload)
    }

    /// The identification in the IPv4 header for which the last four bytes of a UDP payload are a valid ICRC; at most
    /// one value fits. Sockets do not show it, and other implementations do not leave it 0. For a damaged packet one
    /// fits by chance in one of 65,536 cases.
    #[must_use]
    pub fn identification(route: &Route, payload: &[u8]) -> Option<u16> {
        if !route.source.is_ipv4() || !route.destination.is_ipv4() {
            return None;
        }
        let difference = Self::new(route, payload.len()).difference(payload)?;
        // A CRC is linear: the difference is that of the two bytes, shifted by all bytes behind them.
        let behind = payload.len() - ICRC_LEN + AFTER_IDENTIFICATION;
        let bytes = times(difference, back(behind + 2));
        u16::try_from(bytes).ok().map(u16::swap_bytes)
    }

    /// Whether the last four bytes of `payload`, whose IP and UDP headers are already added, are its valid ICRC.
    fn fits(self, payload: &[u8]) -> bool {
        self.difference(payload) == Some(0)
    }

    /// XOR of the ICRC in the last four bytes of `payload` and the computed one. The IP and UDP headers are already
    /// added.
    fn difference(mut self, payload: &[u8]) -> Option<u32> {
        let (covered, icrc) = payload.split_last_chunk::<ICRC_LEN>()?;
        let (bth, rest) = covered.split_first_chunk::<{ Bth::LEN }>()?;
        self.header(bth);
        self.payload(rest);
        Some(u32::from_le_bytes(self.finish()) ^ u32::from_le_bytes(*icrc))
    }
}

/// Bytes of an IPv4 header behind the identification, and of a UDP header.
const AFTER_IDENTIFICATION: usize = 14 + 8;

/// The polynomial of Ethernet, the highest power in the lowest bit.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// The product of two polynomials, modulo [`POLYNOMIAL`].
const fn times(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 1 << 31;
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = if b & 1 != 0 { b >> 1 ^ POLYNOMIAL } else { b >> 1 };
        bit >>= 1;
    }
    product
}

/// Multiplying by the n-th factor steps a CRC back by 2^n bytes.
const BACK: [u32; 17] = {
    // x to the power of -1, 8 times.
    let mut byte: u32 = 1 << 31;
    let mut n = 0;
    while n < 8 {
        byte = if byte >> 31 != 0 { (byte ^ POLYNOMIAL) << 1 | 1 } else { byte << 1 };
        n += 1;
    }
    let mut all = [byte; 17];
    n = 1;
    while n < all.len() {
        all[n] = times(all[n - 1], all[n - 1]);
        n += 1;
    }
    all
};

/// The factor that steps a CRC back by `bytes`, up to 131,071.
fn back(bytes: usize) -> u32 {
    let chosen = BACK.iter().enumerate().filter(|(n, _)| bytes >> n & 1 != 0);
    chosen.fold(1 << 31, |product, (_, factor)| times(product, *factor))
}

/// Caches the state after the IP and UDP headers for recent routes and lengths: it is the same for all packets of one
/// length from a peer. These headers are too short for carry-less multiplication, and payloads evict the tables of the
/// table-driven CRC from the CPU cache.
#[derive(Clone, Debug, Default)]
pub struct IcrcStarts {
    kept: [Option<(Route, usize, Icrc)>; 8],
}

impl IcrcStarts {
    /// The same as [`Icrc::new`].
    #[must_use]
    pub fn begin(&mut self, route: &Route, payload_len: usize) -> Icrc {
        // Lengths are multiples of 4. The packets of a long message have up to three different lengths.
        let kept = &mut self.kept[payload_len / 4 % 8];
        match kept {
            Some((of, len, icrc)) if *len == payload_len && of == route => icrc.clone(),
            _ => kept.insert((*route, payload_len, Icrc::new(route, payload_len))).2.clone(),
        }
    }

    /// The same as [`Icrc::is_valid`].
    #[must_use]
    pub fn is_valid(&mut self, route: &Route, payload: &[u8]) -> bool {
        self.begin(route, payload.len()).fits(payload)
    }
}

/// Mixed families do not occur on a socket; they are written as mapped addresses.
fn v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

/// An IPv4 header; type of service, TTL and checksum are set to ones.
fn put_v4(out: &mut [u8], source: Ipv4Addr, destination: Ipv4Addr, udp_len: u16) {
    out[0] = 0x45;
    out[2..4].copy_from_slice(&(udp_len + 20).to_be_bytes());
    out[4..8].copy_from_slice(&[0, 0, 0x40, 0]);
    out[9] = 17;
    out[12..16].copy_from_slice(&source.octets());
    out[16..20].copy_from_slice(&destination.octets());
}

/// An IPv6 header; traffic class, flow label and hop limit are set to ones.
fn put_v6(out: &mut [u8], source: Ipv6Addr, destination: Ipv6Addr, udp_len: u16) {
    out[0] = 0x6f;
    out[4..6].copy_from_slice(&udp_len.to_be_bytes());
    out[6] = 17;
    out[8..24].copy_from_slice(&source.octets());
    out[24..40].copy_from_slice(&destination.octets());
}
