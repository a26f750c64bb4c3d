//! Tables in two layers against tables built at once.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_tables::{ExactMap, IpNet, LayeredLpm, LayeredMap, Lpm, exact_map};
use proptest::prelude::*;

/// Few addresses, so that prefixes nest, repeat and meet at their borders.
fn net() -> impl Strategy<Value = IpNet> {
    let v4 =
        (0u32..64, 24u8..=32).prop_map(|(bits, len)| (IpAddr::from(Ipv4Addr::from_bits(0x0a00_0000 | bits << 2)), len));
    let wide_v4 = (any::<u32>(), 0u8..=8).prop_map(|(bits, len)| (IpAddr::from(Ipv4Addr::from_bits(bits)), len));
    let v6 = (0u128..64, 120u8..=128)
        .prop_map(|(bits, len)| (IpAddr::from(Ipv6Addr::from_bits(0xfd00 << 112 | bits << 2)), len));
    let wide_v6 = (any::<u128>(), 0u8..=8).prop_map(|(bits, len)| (IpAddr::from(Ipv6Addr::from_bits(bits)), len));
    prop_oneof![4 => v4, 1 => wide_v4, 4 => v6, 1 => wide_v6]
        .prop_map(|(addr, len)| IpNet::new(addr, len).unwrap().trunc())
}

/// Addresses of the same space, and the first and last of a prefix, and their neighbours.
fn asked(nets: impl Iterator<Item = IpNet>) -> Vec<IpAddr> {
    let mut all: Vec<IpAddr> = Vec::new();
    for net in nets {
        match net {
            IpNet::V4(net) => {
                let (first, last) = (net.network().to_bits(), net.broadcast().to_bits());
                let around = [first, first.wrapping_sub(1), last, last.wrapping_add(1), first / 2 + last / 2];
                all.extend(around.map(|bits| IpAddr::from(Ipv4Addr::from_bits(bits))));
            }
            IpNet::V6(net) => {
                let (first, last) = (net.network().to_bits(), net.broadcast().to_bits());
                let around = [first, first.wrapping_sub(1), last, last.wrapping_add(1), first / 2 + last / 2];
                all.extend(around.map(|bits| IpAddr::from(Ipv6Addr::from_bits(bits))));
            }
        }
    }
    all
}

#[derive(Clone, Debug)]
enum Act {
    Change(Vec<(IpNet, Option<u32>)>),
    /// Begins a merge of the table as it is.
    Begin,
    /// Ends it.
    End,
}

fn act() -> impl Strategy<Value = Act> {
    let change = (net(), prop_oneof![2 => any::<u32>().prop_map(Some), 1 => Just(None)]);
    prop_oneof![
        6 => proptest::collection::vec(change, 1..6).prop_map(Act::Change),
        1 => Just(Act::Begin),
        1 => Just(Act::End),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn both_layers_are_the_table_that_is_built_at_once(
        first in proptest::collection::vec((net(), any::<u32>()), 0..40),
        acts in proptest::collection::vec(act(), 1..30),
    ) {
        let mut model: BTreeMap<IpNet, u32> = first.into_iter().collect();
        let mut table = LayeredLpm::new(model.clone()).unwrap();
        let mut merge = None;
        let mut known: Vec<IpNet> = model.keys().copied().collect();
        for act in acts {
            match act {
                Act::Change(changes) => {
                    for &(net, value) in &changes {
                        known.push(net);
                        match value {
                            Some(value) => drop(model.insert(net, value)),
                            None => drop(model.remove(&net)),
                        }
                    }
                    table = table.changed(changes);
                }
                Act::Begin => merge = Some((table.clone(), table.merged())),
                Act::End => {
                    if let Some((former, merged)) = merge.take() {
                        let rebased = table.rebased(&former, &merged);
                        prop_assert_eq!(rebased.is_some(), table.has_base_of(&former));
                        table = rebased.unwrap_or(table);
                    }
                }
            }
            let whole = Lpm::new(model.clone()).unwrap();
            for addr in asked(known.iter().copied()) {
                prop_assert_eq!(table.lookup(addr), whole.lookup(addr), "{}", addr);
            }
            for net in &known {
                prop_assert_eq!(table.get(*net), model.get(net));
            }
        }
        let merged = table.merged();
        prop_assert_eq!((merged.changed_len(), merged.base_len()), (0, model.len()));
        for addr in asked(known.iter().copied()) {
            prop_assert_eq!(merged.lookup(addr), table.lookup(addr));
        }
    }

    #[test]
    fn both_layers_are_the_map_that_is_built_at_once(
        first in proptest::collection::vec((0u8..20, any::<u32>()), 0..20),
        acts in proptest::collection::vec((0u8..20, proptest::option::of(any::<u32>()), 0u8..8), 1..60),
    ) {
        let mut model: BTreeMap<u8, u32> = first.into_iter().collect();
        let mut base: ExactMap<u8, u32> = exact_map(0);
        base.extend(model.iter().map(|(key, value)| (*key, *value)));
        let mut table = LayeredMap::new(base);
        let mut merge = None;
        for (key, value, step) in acts {
            match value {
                Some(value) => drop(model.insert(key, value)),
                None => drop(model.remove(&key)),
            }
            table = table.changed([(key, value)]);
            if step == 0 {
                merge = Some((table.clone(), table.merged()));
            } else if step == 1 && let Some((former, merged)) = merge.take() {
                table = table.rebased(&former, &merged).unwrap_or(table);
            }
            for key in 0..20 {
                prop_assert_eq!(table.get(&key), model.get(&key).copied());
            }
        }
    }
}
