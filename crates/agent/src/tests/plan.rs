//! Batches, each of which the model has to take.

use std::collections::BTreeSet;

use bifrost_control::config::Kind;
use bifrost_control::objects::{Id, Store};
use proptest::prelude::*;
use serde_json::json;

use super::world::{Objects, object, store, world};
use crate::plan::{BATCH_BYTES, Change, Limits, batches};

fn changes(from: &Objects, to: &Objects) -> Vec<Change> {
    let ids: BTreeSet<&Id> = from.keys().chain(to.keys()).collect();
    let change = |id: &Id| Change { id: id.clone(), old: from.get(id).cloned(), new: to.get(id).cloned() };
    ids.into_iter().map(change).filter(|change| change.old != change.new).collect()
}

fn of_store(store: &Store) -> Objects {
    store.others().iter().map(|(id, entry)| (id.clone(), entry.object.clone().into())).collect()
}

/// Applies batches of about so many items, each of which has to be taken.
fn apply_all(store: &mut Store, to: &Objects, items: usize) {
    let all = batches(changes(&of_store(store), to), Limits { items, bytes: BATCH_BYTES });
    for batch in all {
        let items: Vec<_> = batch.iter().map(Change::item).collect();
        let plan = store.plan(&items, 1).unwrap_or_else(|e| panic!("{e}\n{batch:#?}"));
        store.commit(plan);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A whole change, however large, leads to what is wanted.
    #[test]
    fn one_batch_leads_from_any_state_to_any_other(a in any::<u64>(), b in any::<u64>()) {
        let mut store = store();
        for to in [world(a), world(b), Objects::new()] {
            apply_all(&mut store, &to, usize::MAX);
            prop_assert_eq!(of_store(&store), to);
        }
    }

    /// What needs something comes after it and goes before it, and what hands something on stays together: batches are right each by
    /// itself, however small they are to be.
    #[test]
    fn every_batch_on_the_way_is_consistent(a in any::<u64>(), b in any::<u64>(), items in 1usize..24) {
        let mut store = store();
        for to in [world(a), world(b), world(a), Objects::new()] {
            apply_all(&mut store, &to, items);
            prop_assert_eq!(of_store(&store), to);
        }
    }
}

/// What stays together although it need not is no use: from nothing to a world every batch is as small as it is to be.
#[test]
fn what_need_not_stay_together_does_not() {
    let sizes = (0..100)
        .flat_map(|seed| batches(changes(&Objects::new(), &world(seed)), Limits { items: 1, bytes: BATCH_BYTES }));
    let mut sizes: Vec<_> = sizes.map(|batch| batch.len()).collect();
    sizes.sort_unstable();
    // Groups that name each other, and peerings, are more.
    assert_eq!((sizes[sizes.len() * 9 / 10], sizes[sizes.len() - 1] <= 4), (1, true), "{sizes:?}");
}

#[test]
fn two_ports_that_swap_addresses_are_one_batch() {
    let port = |name: &str, n: u8, device: &str| {
        let mac = format!("02:00:00:00:00:{n:02x}");
        object(
            Kind::Port,
            &json!({"name": name, "vni": 100, "mac": mac, "device": device, "netns": "n",
                                   "addresses": [format!("10.0.0.{n}/24")]}),
        )
    };
    let route = |n: u8| {
        let spec =
            json!({"vni": 100, "prefix": format!("10.1.0.{n}/32"), "peer": "host-b", "mac": "02:00:00:00:01:01"});
        object(Kind::Route, &spec)
    };
    let before: Objects =
        [port("a", 1, "x"), port("b", 2, "y"), port("c", 3, "z")].into_iter().chain((1..9).map(route)).collect();
    let after: Objects = [port("a", 2, "x"), port("b", 1, "y"), port("d", 3, "w")].into_iter().collect();
    let all = batches(changes(&before, &after), Limits { items: 2, bytes: BATCH_BYTES });
    let with = |key: &str| all.iter().position(|batch| batch.iter().any(|change| change.id.key == key));
    assert_eq!(with("a"), with("b"));
    assert_eq!(with("c"), with("d"));
    assert!(with("a") != with("c"));
    assert!(all.iter().all(|batch| batch.len() <= 2));
}

#[test]
fn a_hundred_thousand_routes_are_full_batches() {
    let peer = object(Kind::Peer, &json!({"name": "p", "addresses": ["192.0.2.9"]}));
    let mac = |n: u32| format!("02:00:00:{:02x}:{:02x}:{:02x}", n >> 16, n >> 8 & 255, n & 255);
    let route = |n: u32| {
        let prefix = format!("10.{}.{}.{}/32", n >> 16, n >> 8 & 255, n & 255);
        // A hundred behind each MAC address: the router of a container host.
        object(Kind::Route, &json!({"vni": 100, "prefix": prefix, "peer": "p", "mac": mac(n / 100)}))
    };
    let to: Objects = (0..25_000).map(route).chain([peer]).collect();
    let lengths: Vec<_> = batches(changes(&Objects::new(), &to), Limits::default()).iter().map(Vec::len).collect();
    assert_eq!(lengths, [10_000, 10_000, 5_001]);
    let first = &batches(changes(&Objects::new(), &to), Limits::default())[0][0];
    assert_eq!(first.id.kind, Kind::Peer);
    let gone = batches(changes(&to, &Objects::new()), Limits::default());
    assert_eq!(gone.last().unwrap().last().unwrap().id.kind, Kind::Peer);
}

#[test]
fn large_specs_end_a_batch() {
    let set = |n: u32| {
        let addresses: Vec<_> = (0..10_000u32).map(|k| format!("10.{n}.{}.{}/32", k >> 8, k & 255)).collect();
        object(Kind::AddressSet, &json!({"name": format!("s{n}"), "addresses": addresses}))
    };
    let to: Objects = (0..9).map(set).collect();
    let all = batches(changes(&Objects::new(), &to), Limits { items: 10_000, bytes: 500_000 });
    let largest =
        all.iter().map(|batch| serde_json::to_vec(&batch.iter().map(Change::item).collect::<Vec<_>>()).unwrap().len());
    assert!(largest.max().unwrap() < 510_000);
    assert!(all.len() < 9);
}
