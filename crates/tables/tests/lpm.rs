//! Longest-prefix match against a linear search.
#![allow(clippy::unwrap_used)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_tables::{IpNet, Lpm};
use proptest::prelude::*;

/// Few distinct bits, so that prefixes nest and addresses hit them.
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
        steps in proptest::collection::vec((net(), any::<u32>(), prop::bool::weighted(0.25)), 0..60),
        addrs in proptest::collection::vec(prop_oneof![addr_v4(), addr_v6()], 30),
    ) {
        let mut lpm = Lpm::new();
        let mut all: Vec<(IpNet, u32)> = Vec::new();
        for (net, value, remove) in steps {
            let old = all.iter().position(|(n, _)| *n == net.trunc()).map(|i| all.remove(i).1);
            if remove {
                prop_assert_eq!(lpm.remove(net), old);
            } else {
                prop_assert_eq!(lpm.insert(net, value), old);
                all.push((net.trunc(), value));
            }
        }
        prop_assert_eq!(lpm.len(), all.len());
        prop_assert_eq!(lpm.is_empty(), all.is_empty());
        for addr in addrs {
            prop_assert_eq!(lpm.lookup(addr).copied(), naive(&all, addr), "{}", addr);
        }
        let mut listed: Vec<_> = lpm.iter().map(|(n, &v)| (n, v)).collect();
        listed.sort();
        all.sort();
        prop_assert_eq!(&listed, &all);
        for (net, value) in all {
            prop_assert_eq!(lpm.exact(net), Some(&value));
        }
    }
}

#[test]
fn families_do_not_mix() {
    let mut lpm = Lpm::new();
    lpm.insert("0.0.0.0/0".parse().unwrap(), 4);
    assert_eq!(lpm.lookup("::ffff:10.0.0.1".parse().unwrap()), None);
    lpm.insert("::/0".parse().unwrap(), 6);
    assert_eq!(lpm.lookup("10.0.0.1".parse().unwrap()), Some(&4));
    assert_eq!(lpm.lookup("fe80::1".parse().unwrap()), Some(&6));
}

#[test]
fn host_bits_are_ignored() {
    let mut lpm = Lpm::new();
    lpm.insert("10.0.0.1/24".parse().unwrap(), 1);
    assert_eq!(lpm.insert("10.0.0.2/24".parse().unwrap(), 2), Some(1));
    assert_eq!(lpm.lookup("10.0.0.200".parse().unwrap()), Some(&2));
    assert_eq!(lpm.exact("10.0.0.0/24".parse().unwrap()), Some(&2));
    assert_eq!(lpm.iter().next().unwrap().0.to_string(), "10.0.0.0/24");
}
