//! Which conversations a log with sampling has.

use std::net::IpAddr;

use super::table::Name;

/// Whether one of `one_in` conversations is this one.
///
/// Both ends of a conversation choose alike, and so does a daemon that takes over. So the choice depends neither on a
/// secret nor on which end is local; a guest that chooses its ports can know it.
pub(super) fn is_sampled(name: &Name, one_in: u32) -> bool {
    if one_in <= 1 {
        return true;
    }
    let (local, remote) = name.key.ends();
    let ends = [local, remote].map(|end| (bits(end.address), u64::from(end.port)));
    let (low, high) = (ends[0].min(ends[1]), ends[0].max(ends[1]));
    let number = |(address, port): (u128, u64)| [(address >> 64) as u64, address as u64, port];
    let [a, b, c] = number(low);
    let [d, e, f] = number(high);
    let rest = u64::from(name.key.protocol()) << 32 | u64::from(name.vni.get());
    let hash = [a, b, c, d, e, f, rest].into_iter().fold(0, |hash, word| mix(hash ^ word));
    // The upper half, scaled to the numbers below `one_in`.
    ((hash >> 32) * u64::from(one_in)) >> 32 == 0
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// A step of SplitMix64: every bit of the input changes half of the output's.
fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use bifrost_wire::Vni;

    use super::*;
    use crate::ids::PortId;
    use crate::rewrite::Endpoint;
    use crate::session::Key;

    fn name(port: u32, local: (IpAddr, u16), remote: (IpAddr, u16)) -> Name {
        let [local, remote] = [local, remote].map(|(address, port)| Endpoint { address, port });
        let key = Key::between(PortId(port), local, remote, 6);
        Name { key, vni: Vni::new(100).unwrap(), rejected: None }
    }

    #[test]
    fn one_of_so_many_is_sampled_at_both_ends() {
        for (a, b) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            let (a, b): (IpAddr, IpAddr) = (a.parse().unwrap(), b.parse().unwrap());
            for one_in in [0, 1, 2, 10, 100] {
                let mut sampled = 0;
                for port in 0..20_000 {
                    let here = name(1, (a, 1024 + port), (b, 443));
                    // Another port, another end, and rejected there.
                    let there = name(7, (b, 443), (a, 1024 + port));
                    let is_here = is_sampled(&here, one_in);
                    assert_eq!(is_here, is_sampled(&there, one_in));
                    sampled += u32::from(is_here);
                }
                // Five times the deviation of as many coins.
                let share = 1.0 / f64::from(one_in.max(1));
                let (expected, deviation) = (20_000.0 * share, (20_000.0 * share * (1.0 - share)).sqrt());
                assert!((f64::from(sampled) - expected).abs() <= 5.0 * deviation, "{one_in}: {sampled}");
            }
        }
    }
}
