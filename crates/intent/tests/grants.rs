//! Grants of outside addresses to projects.

#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use bifrost_intent::{Batch, Change, Key, Kind, Model, Op, Stored};
use ipnet::IpNet;
use proptest::prelude::*;
use serde_json::{Value, json};

fn set(key: &str, spec: Value) -> Change {
    Change { op: Op::Set, key: key.parse().unwrap(), spec: Some(spec), if_generation: None }
}

fn delete(key: &str) -> Change {
    Change { op: Op::Delete, key: key.parse().unwrap(), spec: None, if_generation: None }
}

fn make(model: &mut Model, changes: Vec<Change>) -> Result<(), String> {
    let plan = model.plan(&Batch { changes }, 7).map_err(|error| error.to_string())?;
    for (key, stored) in plan.writes {
        match stored {
            // As it comes back from the store.
            Some(stored) => drop(model.set(key.clone(), Stored::decode(key.kind(), &stored.encode()).unwrap())),
            None => drop(model.remove(&key)),
        }
    }
    Ok(())
}

fn grant(name: &str, prefixes: &[&str]) -> Change {
    set(&format!("outside_grant/{name}"), json!({ "prefixes": prefixes }))
}

/// Projects `a` and `b`, each with two networks and a guest on a host with an uplink.
fn base() -> Model {
    let mut model = Model::default();
    let uplink = json!({"addresses": ["203.0.113.1/24"], "device": "wan"});
    make(&mut model, vec![set("host/h1", json!({"addresses": ["192.0.2.1"], "uplink": uplink}))]).unwrap();
    for project in ["a", "b"] {
        for n in 0..2 {
            make(
                &mut model,
                vec![
                    set(&format!("vpc/{project}/n{n}"), json!({})),
                    set(&format!("subnet/{project}/s{n}"), json!({"vpc": format!("n{n}"), "prefix": "10.0.0.0/24"})),
                ],
            )
            .unwrap();
        }
        let netns = format!("g{project}");
        make(
            &mut model,
            vec![set(&format!("port/{project}/g"), json!({"subnets": ["s0"], "host": "h1", "netns": netns}))],
        )
        .unwrap();
    }
    model
}

fn gateway(project: &str, n: u32, addresses: &[&str]) -> Change {
    set(&format!("nat_gateway/{project}/{n}"), json!({"vpc": format!("n{n}"), "addresses": addresses}))
}

fn floating(project: &str, spec: Value) -> Change {
    let mut whole = json!({"guest": "g"});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    set(&format!("floating_ip/{project}/f"), whole)
}

#[track_caller]
fn assert_refused(model: &mut Model, changes: Vec<Change>, expected: &str) {
    let error = make(model, changes).unwrap_err();
    assert!(error.contains(expected), "{error}\ninstead of\n{expected}");
}

#[test]
fn projects_use_what_they_were_granted() {
    let mut model = base();
    make(
        &mut model,
        vec![grant("a/one", &["198.51.100.0/28", "2001:db8::/64"]), grant("b/one", &["198.51.100.16/28"])],
    )
    .unwrap();
    let refused = "198.51.100.16 is not granted to project \"a\"; name another, or have an administrator add \
                   outside_grant/a/NAME with its prefix";
    assert_refused(&mut model, vec![gateway("a", 0, &["198.51.100.1", "198.51.100.16"])], refused);
    assert_refused(
        &mut model,
        vec![floating("a", json!({"address": "198.51.100.99"}))],
        "198.51.100.99 is not granted to project \"a\"",
    );
    make(&mut model, vec![gateway("a", 0, &["198.51.100.1"]), gateway("b", 0, &["198.51.100.16"])]).unwrap();
    make(&mut model, vec![floating("a", json!({"address": "198.51.100.15"}))]).unwrap();
    // In one batch with its grant.
    make(&mut model, vec![floating("b", json!({"address": "192.0.2.77"})), grant("b/two", &["192.0.2.77/32"])])
        .unwrap();
    // Uplinks are hosts', and need no grant.
    let uplink = json!({"addresses": ["203.0.113.2/24"], "device": "wan"});
    make(&mut model, vec![set("host/h2", json!({"addresses": ["192.0.2.2"], "uplink": uplink}))]).unwrap();
}

#[test]
fn grants_that_are_not_right_are_refused() {
    let mut model = base();
    make(&mut model, vec![grant("a/one", &["198.51.100.0/28"])]).unwrap();
    let many: Vec<String> = (0..257).map(|n| format!("10.{}.{}.0/32", n / 256, n % 256)).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    for (prefixes, expected) in [
        (&["198.51.100.0/28"][..], "outside_grant/b/x: prefixes[0]: 198.51.100.0/28 overlaps with outside_grant/a/one"),
        (&["192.0.2.0/24", "198.51.100.4/30"], "prefixes[1]: 198.51.100.4/30 overlaps with outside_grant/a/one"),
        (&["198.51.0.0/16"], "prefixes[0]: 198.51.0.0/16 overlaps with outside_grant/a/one"),
        (&["0.0.0.0/0"], "overlaps with outside_grant/a/one"),
        (&["192.0.2.1/24"], "192.0.2.1/24 has host bits set; write 192.0.2.0/24"),
        (&["192.0.2.0/24", "192.0.2.8/29"], "prefixes[1]: 192.0.2.8/29 is within another prefix of it; remove it"),
        (&[], "prefixes: 0 given; there are 1 to 256"),
        (&many, "prefixes: 257 given"),
        (&["x"], "invalid IP address"),
    ] {
        assert_refused(&mut model, vec![grant("b/x", prefixes)], expected);
    }
    // Also of two that come together, and of the same project.
    assert_refused(
        &mut model,
        vec![grant("b/x", &["192.0.2.0/25"]), grant("b/y", &["192.0.2.0/24"])],
        "outside_grant/b/x: prefixes[0]: 192.0.2.0/25 overlaps with outside_grant/b/y",
    );
}

#[test]
fn what_is_in_use_stays_granted() {
    let mut model = base();
    make(&mut model, vec![gateway("a", 0, &["198.51.100.1"]), floating("b", json!({"address": "192.0.2.9"}))]).unwrap();
    // The first grant limits all projects.
    assert_refused(
        &mut model,
        vec![grant("a/one", &["198.51.100.0/28"])],
        "outside_grant/a/one: prefixes: 192.0.2.9 is in use by floating_ip/b/f and would not be granted to its project: \
         grant it in the same batch, or change or delete floating_ip/b/f first",
    );
    make(&mut model, vec![grant("a/one", &["198.51.100.0/28"]), grant("b/one", &["192.0.2.8/29"])]).unwrap();
    let in_use = "198.51.100.1 is in use by nat_gateway/a/0";
    assert_refused(&mut model, vec![delete("outside_grant/a/one")], in_use);
    assert_refused(&mut model, vec![grant("a/one", &["198.51.100.8/29"])], in_use);
    // Another project does not get what is in use.
    assert_refused(
        &mut model,
        vec![delete("outside_grant/a/one"), grant("b/two", &["198.51.100.0/28"])],
        "outside_grant/a/one: 198.51.100.1 is in use by nat_gateway/a/0",
    );
    // It may be granted in another way, or be given up in the same batch.
    make(&mut model, vec![delete("outside_grant/a/one"), grant("a/two", &["198.51.100.1/32"])]).unwrap();
    make(&mut model, vec![delete("outside_grant/a/two"), delete("nat_gateway/a/0")]).unwrap();
    // With the last grant the limits go.
    make(&mut model, vec![delete("outside_grant/b/one")]).unwrap();
    make(&mut model, vec![gateway("a", 0, &["198.51.100.200"])]).unwrap();
}

#[test]
fn addresses_that_are_chosen_are_granted() {
    let mut model = base();
    let pool = set("address_set/a/public", json!({"addresses": ["0.0.0.0/0"]}));
    make(&mut model, vec![pool, grant("b/one", &["10.0.0.0/8"]), grant("a/one", &["198.51.100.64/30"])]).unwrap();
    make(&mut model, vec![floating("a", json!({"pool": "public"}))]).unwrap();
    let key: Key = "floating_ip/a/f".parse().unwrap();
    assert_eq!(model.get(&key).unwrap().spec.value()["address"], "198.51.100.65");
    make(&mut model, vec![set("address_set/b/public", json!({"addresses": ["198.51.100.64/28"]}))]).unwrap();
    assert_refused(
        &mut model,
        vec![floating("b", json!({"pool": "public"}))],
        "pool: no address of address_set/b/public is free and granted to the project; add some",
    );
}

/// A prefix of 198.51.100.0/28.
fn prefix() -> impl Strategy<Value = String> {
    (0u32..16, 28u8..=32).prop_map(|(n, length)| {
        let prefix: IpNet = format!("198.51.100.{n}/{length}").parse().unwrap();
        prefix.trunc().to_string()
    })
}

fn change() -> impl Strategy<Value = Change> {
    let project = || prop::sample::select(vec!["a", "b"]);
    prop_oneof![
        4 => (project(), 0u32..2, prop::collection::btree_set(prefix(), 1..3)).prop_map(|(project, n, prefixes)| {
            set(&format!("outside_grant/{project}/{n}"), json!({"prefixes": prefixes}))
        }),
        2 => (project(), 0u32..2).prop_map(|(project, n)| delete(&format!("outside_grant/{project}/{n}"))),
        4 => (project(), 0u32..2, prop::collection::btree_set(0u32..16, 1..3)).prop_map(|(project, n, addresses)| {
            let addresses: Vec<String> = addresses.iter().map(|n| format!("198.51.100.{n}")).collect();
            gateway(project, n, &addresses.iter().map(String::as_str).collect::<Vec<_>>())
        }),
        2 => (project(), 0u32..2).prop_map(|(project, n)| delete(&format!("nat_gateway/{project}/{n}"))),
    ]
}

/// Whether all of this may be at the same time, by looking at everything.
fn is_right(all: &BTreeMap<Key, Value>) -> bool {
    let of_kind = |kind| all.iter().filter(move |(key, _)| key.kind() == kind);
    let mut grants: Vec<(&str, IpNet)> = Vec::new();
    for (key, spec) in of_kind(Kind::OutsideGrant) {
        let prefixes = spec["prefixes"].as_array().unwrap().iter();
        grants.extend(prefixes.map(|prefix| (key.project(), prefix.as_str().unwrap().parse::<IpNet>().unwrap())));
    }
    let overlap = grants
        .iter()
        .enumerate()
        .any(|(i, (_, one))| grants.iter().skip(i + 1).any(|(_, other)| one.contains(other) || other.contains(one)));
    let mut used: BTreeSet<IpAddr> = BTreeSet::new();
    let claims = of_kind(Kind::NatGateway).flat_map(|(key, spec)| {
        spec["addresses"].as_array().unwrap().iter().map(move |address| (key, address.as_str().unwrap()))
    });
    for (key, address) in claims {
        let address: IpAddr = address.parse().unwrap();
        let is_granted = |(project, prefix): &(&str, IpNet)| *project == key.project() && prefix.contains(&address);
        if !used.insert(address) || !grants.is_empty() && !grants.iter().any(is_granted) {
            return false;
        }
    }
    !overlap
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// A batch is made exactly if what there is then may be at the same time.
    #[test]
    fn batches_are_made_exactly_if_all_that_is_in_use_is_granted(
        batches in prop::collection::vec(prop::collection::vec(change(), 1..5), 1..20)
    ) {
        let mut model = base();
        for mut batch in batches {
            let mut seen = BTreeSet::new();
            batch.retain(|change| seen.insert(change.key.clone()));
            let mut all: BTreeMap<Key, Value> =
                model.iter().map(|(key, stored)| (key.clone(), stored.spec.value())).collect();
            for change in &batch {
                match &change.spec {
                    Some(spec) => drop(all.insert(change.key.clone(), spec.clone())),
                    None => drop(all.remove(&change.key)),
                }
            }
            let result = make(&mut model, batch.clone());
            prop_assert_eq!(result.is_ok(), is_right(&all), "{:?}: {:?}", batch, result);
        }
    }
}
