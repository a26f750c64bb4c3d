//! DIR-24-8 against a linear search, with changes in any order.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use bifrost_tables::{Dir24, FIB_BATCH, FIB_VALUE_MAX, FibError, IpNet};

fn net(addr: u32, len: u8) -> ipnet::Ipv4Net {
    match IpNet::new(Ipv4Addr::from_bits(addr).into(), len).unwrap().trunc() {
        IpNet::V4(net) => net,
        IpNet::V6(_) => unreachable!(),
    }
}

fn naive(all: &BTreeMap<(u8, u32), u32>, addr: u32) -> Option<u32> {
    let holds = |len: u8, first: u32| u32::MAX.checked_shl(32 - u32::from(len)).unwrap_or(0) & addr == first;
    all.iter().rev().find(|((len, first), _)| holds(*len, *first)).map(|(_, value)| *value)
}

/// Few distinct bits, so that prefixes nest; lengths around /24.
fn random_net(random: &mut fastrand::Rng) -> ipnet::Ipv4Net {
    let mut addr = 0u32;
    for bit in [31, 24, 16, 9, 8, 7, 4, 1, 0] {
        addr |= random.u32(..2) << bit;
    }
    // Short prefixes take long: 65,536 steps for /8.
    let len = if random.u8(..8) == 0 { random.u8(8..=32) } else { random.u8(14..=32) };
    net(addr, len)
}

#[test]
fn agrees_with_a_linear_search_through_all_changes() {
    let mut random = fastrand::Rng::with_seed(3);
    let mut fib = Dir24::new(64, 1);
    let mut all: BTreeMap<(u8, u32), u32> = BTreeMap::new();
    for step in 0..if cfg!(miri) { 20 } else { 4_000 } {
        let net = random_net(&mut random);
        let key = (net.prefix_len(), net.network().to_bits());
        if random.u8(..5) < 2 {
            assert_eq!(fib.remove(net), all.remove(&key).is_some(), "{net}");
        } else {
            let value = random.u32(..=FIB_VALUE_MAX);
            fib.insert(net, value).unwrap();
            all.insert(key, value);
        }
        assert_eq!(fib.len(), all.len());
        let (first, last) = (net.network().to_bits(), net.broadcast().to_bits());
        let edges = [first, first.wrapping_sub(1), last, last.wrapping_add(1), first | 1, first ^ 0x100];
        let addrs: [Ipv4Addr; FIB_BATCH] = std::array::from_fn(|i| {
            Ipv4Addr::from_bits(*edges.get(i).unwrap_or(&random_net(&mut random).addr().to_bits()))
        });
        let batch = fib.lookup_batch(&addrs);
        for (addr, found) in addrs.iter().zip(batch) {
            assert_eq!(found, naive(&all, addr.to_bits()), "{addr} in step {step}");
            assert_eq!(found, fib.lookup(*addr));
        }
    }
    // Empty again, with all groups free.
    for (len, first) in all.into_keys() {
        assert!(fib.remove(net(first, len)));
    }
    assert!(fib.is_empty());
    for n in 0..64 {
        fib.insert(net(n << 8, 32), n).unwrap();
    }
}

#[test]
fn a_prefix_that_does_not_fit_changes_nothing() {
    let mut fib = Dir24::new(2, 1);
    let all = net(0, 0);
    fib.insert(all, 1).unwrap();
    assert_eq!(fib.insert(all, FIB_VALUE_MAX + 1), Err(FibError::Value(1 << 24)));
    fib.insert(net(0x0a00_0001, 32), 2).unwrap();
    fib.insert(net(0x0a00_0002, 31), 3).unwrap();
    fib.insert(net(0x0b00_0000, 25), 4).unwrap();
    let full = fib.insert(net(0x0c00_0000, 25), 5);
    assert_eq!(
        full.unwrap_err().to_string(),
        "no room for 12.0.0.0/25: 2 networks of length /24 have longer prefixes already"
    );
    let found = |fib: &Dir24, addr: [u8; 4]| fib.lookup(addr.into());
    assert_eq!(found(&fib, [12, 0, 0, 1]), Some(1));
    assert_eq!([1, 2, 3, 4].map(|n| found(&fib, [10, 0, 0, n])), [2, 3, 3, 1].map(Some));
    assert!(fib.remove(net(0x0b00_0000, 25)));
    fib.insert(net(0x0c00_0000, 25), 5).unwrap();
    assert_eq!(found(&fib, [12, 0, 0, 1]), Some(5));
    assert_eq!(found(&fib, [11, 0, 0, 1]), Some(1));
    assert!(fib.remove(all) && !fib.remove(all));
    assert_eq!(found(&fib, [255, 255, 255, 255]), None);
    assert!(fib.bytes() >= 64 << 20);
}
