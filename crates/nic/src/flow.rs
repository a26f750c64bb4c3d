//! Flow keys and their hash.

use std::net::IpAddr;

use bifrost_wire::Mac;

/// The five-tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Source port, 0 without ports.
    pub src_port: u16,
    /// Destination port, 0 without ports.
    pub dst_port: u16,
    /// Transport protocol number.
    pub protocol: u8,
}

impl FlowKey {
    /// A fast hash with well-mixed bits, different for the two directions. Not secure against an attacker who chooses
    /// keys and knows the seed.
    #[inline]
    pub fn hash(&self, seed: u64) -> u32 {
        hash((&self.src, &self.dst), (self.src_port, self.dst_port), self.protocol, seed)
    }
}

/// [`FlowKey::hash`] of a key that is not in memory as a whole. Addresses are borrowed: copying one that was just
/// written in two pieces, of one byte and four, stalls until the store buffer drains, which takes hundreds of
/// nanoseconds if other processors have the lines.
#[inline]
pub(crate) fn hash((src, dst): (&IpAddr, &IpAddr), (src_port, dst_port): (u16, u16), protocol: u8, seed: u64) -> u32 {
    let ports = u64::from(src_port) << 16 | u64::from(dst_port) | u64::from(protocol) << 32;
    let state = fold(seed ^ K[0], ports ^ K[1]);
    let state = match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let pair = u64::from(u32::from(*src)) << 32 | u64::from(u32::from(*dst));
            fold(state ^ pair, K[2])
        }
        (src, dst) => {
            let ((s1, s0), (d1, d0)) = (halves(src), halves(dst));
            fold(fold(state ^ s1, s0 ^ K[2]) ^ d1, d0 ^ K[3])
        }
    };
    finish(state)
}

/// Hash of a flow that is not IP.
pub(crate) fn hash_macs(src: Mac, dst: Mac, ethertype: u16) -> u32 {
    finish(fold(src.as_u64() << 16 ^ u64::from(ethertype) ^ K[0], dst.as_u64() ^ K[1]))
}

// Odd constants with about half of their bits set: the fractional digits of pi.
const K: [u64; 4] = [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7345, 0xa409_3822_299f_31d1, 0x082e_fa98_ec4e_6c89];

/// The 128-bit product folded to 64 bits.
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

fn finish(state: u64) -> u32 {
    let mixed = fold(state ^ K[3], K[0]);
    mixed as u32 ^ (mixed >> 32) as u32
}

fn halves(addr: &IpAddr) -> (u64, u64) {
    let bits = match addr {
        IpAddr::V4(a) => u128::from(u32::from(*a)),
        IpAddr::V6(a) => u128::from(*a),
    };
    ((bits >> 64) as u64, bits as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn key(n: u32) -> FlowKey {
        FlowKey {
            src: IpAddr::V4(Ipv4Addr::from(0x0a00_0001)),
            dst: IpAddr::V4(Ipv4Addr::from(0x0a00_0002 + n / 256)),
            src_port: 40_000 + (n % 256) as u16,
            dst_port: 6379,
            protocol: 6,
        }
    }

    #[test]
    fn similar_keys_spread_over_buckets() {
        // 64 buckets, 4096 keys: 64 each on average, standard deviation 8.
        for shift in [0, 26] {
            let mut buckets = [0u32; 64];
            for n in 0..4096 {
                buckets[(key(n).hash(7) >> shift & 63) as usize] += 1;
            }
            assert!(buckets.iter().all(|&b| (24..=112).contains(&b)), "{buckets:?}");
        }
    }

    #[test]
    fn direction_and_seed_change_the_hash() {
        let k = key(0);
        let back = FlowKey { src: k.dst, dst: k.src, src_port: k.dst_port, dst_port: k.src_port, ..k };
        assert_ne!(k.hash(0), back.hash(0));
        assert_ne!(k.hash(0), k.hash(1));
        assert_eq!(k.hash(3), key(0).hash(3));
    }
}
