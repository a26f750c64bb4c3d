//! Longest-prefix match against a linear search.
#![allow(clippy::unwrap_used)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_tables::{BATCH, IpNet, Lpm};
use proptest::prelude::*;

/// Few distinct bits, so that prefixes nest and contain the addresses.
fn net() -> impl Strategy<Value = IpNet> {
    prop_oneof![
        (addr_v4(), 0u8..=32).prop_map(|(a, len)| IpNet::new(a, len).unwrap()),
        (addr_v6(), 0u8..=128).prop_map(|(a, len)| IpNet::new(a, len).unwrap()),
    ]
}

fn addr_v4() -> impl Strategy<Value = IpAddr> {
    any::<[bool; 6]>().prop_map(|b| {
        let bits = b.iter().enumerate().fold(0u32, |acc, (i, &b)| acc | u32::from(b) << [31, 24, 16, 9, 8, 0][i]);
        IpAddr::V4(Ipv4Addr::from(bits))
    })
}

fn addr_v6() -> impl Strategy<Value = IpAddr> {
    any::<[bool; 6]>().prop_map(|b| {
        let bits = b.iter().enumerate().fold(0u128, |acc, (i, &b)| acc | u128::from(b) << [127, 64, 63, 33, 32, 0][i]);
        IpAddr::V6(Ipv6Addr::from(bits))
    })
}

fn naive(all: &[(IpNet, u32)], addr: IpAddr) -> Option<u32> {
    all.iter().filter(|(net, _)| net.contains(&addr)).max_by_key(|(net, _)| net.prefix_len()).map(|&(_, value)| value)
}

proptest! {
    #[test]
    fn agrees_with_a_linear_search(
        nets in proptest::collection::vec(net(), 0..if cfg!(miri) { 20 } else { 120 }),
        addrs in proptest::collection::vec(prop_oneof![addr_v4(), addr_v6()], 30),
    ) {
        let mut all: Vec<(IpNet, u32)> = Vec::new();
        let mut twice = None;
        for (net, value) in nets.into_iter().zip(0..) {
            if all.iter().any(|(n, _)| *n == net.trunc()) {
                twice = twice.into_iter().chain([net]).min();
            } else {
                all.push((net.trunc(), value));
            }
        }
        if let Some(net) = twice {
            prop_assert_eq!(Lpm::new(all.iter().copied().chain([(net, 0)])).err(), Some(net.trunc()));
        }
        let lpm = Lpm::new(all.iter().copied()).unwrap();
        prop_assert_eq!(lpm.len(), all.len());
        prop_assert_eq!(lpm.is_empty(), all.is_empty());
        // Those of the list, and the first and last address of each prefix with the adjacent ones.
        let edges = all.iter().flat_map(|(net, _)| around(net.network()).into_iter().chain(around(net.broadcast())));
        let addrs: Vec<IpAddr> = addrs.into_iter().chain(edges).collect();
        for &addr in &addrs {
            prop_assert_eq!(lpm.lookup(addr).copied(), naive(&all, addr), "{}", addr);
        }
        // Both families mixed, and each alone.
        let family = |v6| addrs.iter().copied().filter(|a| a.is_ipv6() == v6).collect::<Vec<_>>();
        let half = Lpm::new(all.iter().copied().take(all.len() / 2)).unwrap();
        for addrs in [family(false), family(true), addrs.clone()] {
            for chunk in addrs.as_chunks::<BATCH>().0 {
                let expected = chunk.map(|addr| lpm.lookup(addr));
                prop_assert_eq!(lpm.lookup_batch(chunk), expected);
                // In this table, in half of it, and in none.
                let mut turn = 0;
                let asked = chunk.map(|addr| {
                    turn += 1;
                    [Some((&lpm, addr)), None, Some((&half, addr))][turn % 3]
                });
                let expected = asked.map(|asked| asked.and_then(|(table, addr)| table.lookup(addr)));
                prop_assert_eq!(Lpm::lookup_several(&asked), expected);
            }
        }
    }
}

/// An address and the two adjacent ones.
fn around(addr: IpAddr) -> [IpAddr; 3] {
    [u128::MAX, 0, 1].map(|step| match addr {
        IpAddr::V4(a) => IpAddr::V4(Ipv4Addr::from_bits(a.to_bits().wrapping_add(step as u32))),
        IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits().wrapping_add(step))),
    })
}

/// Several levels of nodes, full and partly filled ones.
#[test]
fn agrees_with_a_linear_search_in_long_lists() {
    let mut random = fastrand::Rng::with_seed(1);
    // Miri takes minutes for more.
    let (counts, lookups) =
        if cfg!(miri) { (&[15, 16, 17][..], 5) } else { (&[15, 16, 17, 255, 256, 257, 2500][..], 200) };
    for &count in counts {
        let mut all: Vec<(IpNet, u32)> = Vec::new();
        for value in 0..count {
            let addr = if value % 2 == 0 {
                Ipv4Addr::from_bits(random.u32(..) & 0xffff_00ff).into()
            } else {
                v6(random.u128(..))
            };
            let net = IpNet::new(addr, random.u8(8..=32)).unwrap().trunc();
            if all.iter().all(|(n, _)| *n != net) {
                all.push((net, value));
            }
        }
        let lpm = Lpm::new(all.iter().copied()).unwrap();
        assert_eq!(lpm.len(), all.len());
        for _ in 0..lookups {
            let (net, _) = all[random.usize(..all.len())];
            for addr in around(net.network()).into_iter().chain(around(net.broadcast())) {
                assert_eq!(lpm.lookup(addr).copied(), naive(&all, addr), "{addr} of {count}");
            }
        }
    }
}

fn v6(bits: u128) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from_bits(bits))
}

fn nets<const N: usize>(nets: [&str; N]) -> impl Iterator<Item = (IpNet, usize)> {
    nets.into_iter().map(|net| net.parse().unwrap()).zip(0..)
}

fn lookup(lpm: &Lpm<usize>, addr: &str) -> Option<usize> {
    lpm.lookup(addr.parse().unwrap()).copied()
}

#[test]
fn families_do_not_mix() {
    let lpm = Lpm::new(nets(["0.0.0.0/0"])).unwrap();
    assert_eq!(lookup(&lpm, "::ffff:10.0.0.1"), None);
    let lpm = Lpm::new(nets(["0.0.0.0/0", "::/0"])).unwrap();
    assert_eq!(lookup(&lpm, "10.0.0.1"), Some(0));
    assert_eq!(lookup(&lpm, "fe80::1"), Some(1));
    assert_eq!(lookup(&Lpm::default(), "10.0.0.1"), None);
}

#[test]
fn host_bits_are_ignored() {
    let twice = Lpm::new(nets(["10.0.0.0/16", "10.0.0.1/24", "10.0.0.2/24"]));
    assert_eq!(twice.unwrap_err().to_string(), "10.0.0.0/24");
    let lpm = Lpm::new(nets(["10.0.0.1/24"])).unwrap();
    assert_eq!(lookup(&lpm, "10.0.0.200"), Some(0));
    assert_eq!(lookup(&lpm, "10.0.1.0"), None);
}

#[test]
fn the_ends_of_the_address_space() {
    let lpm = Lpm::new(nets(["0.0.0.0/32", "255.255.255.255/32", "255.255.255.252/30", "ffff::/16"])).unwrap();
    assert_eq!(lookup(&lpm, "0.0.0.0"), Some(0));
    assert_eq!(lookup(&lpm, "0.0.0.1"), None);
    assert_eq!(lookup(&lpm, "255.255.255.254"), Some(2));
    assert_eq!(lookup(&lpm, "255.255.255.255"), Some(1));
    assert_eq!(lookup(&lpm, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"), Some(3));
    assert_eq!(lookup(&lpm, "::"), None);
}
