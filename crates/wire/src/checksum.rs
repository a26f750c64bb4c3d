//! The Internet checksum (RFC 1071), its incremental update (RFC 1624) and the pseudo headers (RFC 768, 8200 §8.1).
//!
//! A *partial sum* here is a `u32` that is congruent, modulo 65535, to the sum of the big-endian 16-bit words of some
//! bytes. Partial sums of up to 65536 even-length pieces add up with `+` as long as each comes from this module (they
//! are below 2^16); [`Sum`] also joins pieces of odd length.

use core::net::{Ipv4Addr, Ipv6Addr};

/// The partial sum of `bytes`, folded to 16 bits (0..=65535); an odd last byte counts as the high half of a word.
#[must_use]
pub fn sum(bytes: &[u8]) -> u32 {
    let (blocks, tail) = bytes.as_chunks::<BLOCK>();
    // Words of 64 bits in memory order: one's-complement sums do not depend on byte order until the very end (RFC 1071,
    // section 2 (B)). The halves are summed separately, so 2^32 blocks fit before anything can overflow.
    let (mut low, mut high) = ([0u64; LANES], [0u64; LANES]);
    for block in blocks {
        for (lane, word) in block.as_chunks::<8>().0.iter().enumerate() {
            let word = u64::from_ne_bytes(*word);
            low[lane] += word & 0xffff_ffff;
            high[lane] += word >> 32;
        }
    }
    let blocks_sum = low.iter().chain(&high).map(|&lane| u64::from(fold64(lane))).sum::<u64>();
    let (pairs, odd) = tail.as_chunks::<2>();
    let mut rest: u64 = pairs.iter().map(|pair| u64::from(u16::from_ne_bytes(*pair))).sum();
    if let [last] = odd {
        rest += u64::from(u16::from_ne_bytes([*last, 0]));
    }
    u32::from(u16::from_be(fold64(blocks_sum + rest)))
}

/// Copies `from` to the start of `to` and returns the partial sum of the copied bytes, in steps that fit the L1 cache.
/// Copies only what fits when `to` is shorter.
pub fn copy_and_sum(from: &[u8], to: &mut [u8]) -> u32 {
    let mut total = 0u64;
    // An even step keeps every piece but the last aligned to words.
    for (from, to) in from.chunks(COPY_STEP).zip(to.chunks_mut(COPY_STEP)) {
        let len = from.len().min(to.len());
        to[..len].copy_from_slice(&from[..len]);
        total += u64::from(sum(&to[..len]));
    }
    u32::from(fold64(total))
}

/// Folds a partial sum to 16 bits.
#[must_use]
pub const fn fold(sum: u32) -> u16 {
    fold64(sum as u64)
}

/// The checksum for a partial sum: its complement.
#[must_use]
pub const fn finish(sum: u32) -> u16 {
    !fold(sum)
}

/// The checksum of `bytes` (with their own checksum field zero).
#[must_use]
pub fn checksum(bytes: &[u8]) -> u16 {
    finish(sum(bytes))
}

/// Whether `bytes`, which include their checksum field, have a valid checksum.
#[must_use]
pub fn is_valid(bytes: &[u8]) -> bool {
    sum(bytes) == 0xffff
}

/// The checksum after one of its words changed from `old` to `new` (RFC 1624, equation 3).
#[must_use]
pub const fn update_u16(checksum: u16, old: u16, new: u16) -> u16 {
    !fold(!checksum as u32 + !old as u32 + new as u32)
}

/// The checksum after two adjacent words (at an even offset) changed from `old` to `new`.
#[must_use]
pub const fn update_u32(checksum: u16, old: u32, new: u32) -> u16 {
    update_u16(update_u16(checksum, (old >> 16) as u16, (new >> 16) as u16), old as u16, new as u16)
}

/// The checksum after some of the summed bytes, at an even offset, changed from `old` to `new` (of the same length).
#[must_use]
pub fn update(checksum: u16, old: &[u8], new: &[u8]) -> u16 {
    !fold(u32::from(!checksum) + u32::from(!fold(sum(old))) + sum(new))
}

/// Partial sum of the IPv4 pseudo header; `len` is the length of transport header and payload, bytes.
#[must_use]
pub fn pseudo_v4(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, len: u32) -> u32 {
    let (source, destination) = (source.to_bits(), destination.to_bits());
    u32::from(fold64(u64::from(source) + u64::from(destination) + u64::from(protocol) + u64::from(len)))
}

/// Partial sum of the IPv6 pseudo header; `len` is the length of transport header and payload, bytes.
#[must_use]
pub fn pseudo_v6(source: Ipv6Addr, destination: Ipv6Addr, protocol: u8, len: u32) -> u32 {
    let words = source.segments().into_iter().chain(destination.segments());
    u32::from(fold64(words.map(u64::from).sum::<u64>() + u64::from(protocol) + u64::from(len)))
}

/// The UDP checksum to send: zero would mean "none" (RFC 768).
#[must_use]
pub const fn udp_nonzero(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}

/// Sums the pieces of a packet one after the other; they may have any length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    // Below 2^16.
    total: u32,
    odd: bool,
}

impl Sum {
    /// The sum of nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self { total: 0, odd: false }
    }

    /// Starts with a partial sum, such as that of a pseudo header.
    #[must_use]
    pub const fn starting(partial: u32) -> Self {
        Self { total: fold(partial) as u32, odd: false }
    }

    /// Appends `bytes`.
    #[must_use]
    pub fn then(self, bytes: &[u8]) -> Self {
        self.then_sum(sum(bytes), bytes.len())
    }

    /// Appends a piece of `len` bytes whose partial sum is known.
    #[must_use]
    pub const fn then_sum(self, partial: u32, len: usize) -> Self {
        let piece = fold(partial);
        // After an odd number of bytes, every byte of the piece is in the other half of its word.
        let piece = if self.odd { piece.swap_bytes() } else { piece };
        Self { total: fold(self.total + piece as u32) as u32, odd: self.odd ^ (len % 2 == 1) }
    }

    /// The partial sum.
    #[must_use]
    pub const fn partial(self) -> u32 {
        self.total
    }

    /// The checksum.
    #[must_use]
    pub const fn finish(self) -> u16 {
        finish(self.total)
    }
}

const LANES: usize = 4;
const BLOCK: usize = 8 * LANES;
const COPY_STEP: usize = 4096;

const fn fold64(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn example_of_rfc_1071() {
        // Section 3: 00 01 f2 03 f4 f5 f6 f7 sums to ddf2.
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(sum(&bytes), 0xddf2);
        assert_eq!(checksum(&bytes), 0x220d);
    }

    #[test]
    fn example_of_rfc_1624() {
        // Section 4: checksum dd2f, word 5555 becomes 3285, and the result must be 0000, not ffff.
        assert_eq!(update_u16(0xdd2f, 0x5555, 0x3285), 0x0000);
    }

    #[test]
    fn folds_the_largest_sums() {
        assert_eq!(fold(u32::MAX), 0xffff);
        assert_eq!(fold64(u64::MAX), 0xffff);
        assert_eq!(fold64(0xffff_ffff_0000_0001), 1);
        assert_eq!(sum(&[0xff; 65_537]), u32::from(0xff00u16));
    }

    #[test]
    fn nothing() {
        assert_eq!(sum(&[]), 0);
        assert_eq!(checksum(&[]), 0xffff);
        assert_eq!(udp_nonzero(0), 0xffff);
        assert_eq!(udp_nonzero(1), 1);
    }
}
