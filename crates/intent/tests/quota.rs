//! Quotas of projects, against a count by hand.

#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;

use bifrost_intent::{Batch, Change, Key, Kind, Model, Op, Plan, Stored};
use proptest::prelude::*;
use serde_json::{Value, json};

const PROJECTS: [&str; 2] = ["a", "b"];
/// Kinds whose objects need no others, and what quotas call them.
const KINDS: [(&str, &str); 3] =
    [("vpc", "vpcs"), ("address_set", "address_sets"), ("security_group", "security_groups")];

fn set(key: &str, spec: Value) -> Change {
    Change { op: Op::Set, key: key.parse().unwrap(), spec: Some(spec), if_generation: None }
}

fn delete(key: &str) -> Change {
    Change { op: Op::Delete, key: key.parse().unwrap(), spec: None, if_generation: None }
}

fn write(model: &mut Model, plan: &Plan) {
    for (key, stored) in &plan.writes {
        match stored {
            // As it comes back from the store.
            Some(stored) => drop(model.set(key.clone(), Stored::decode(key.kind(), &stored.encode()).unwrap())),
            None => drop(model.remove(key)),
        }
    }
}

fn make(model: &mut Model, changes: Vec<Change>) -> Result<(), String> {
    let plan = model.plan(&Batch { changes }, 7).map_err(|error| error.to_string())?;
    write(model, &plan);
    Ok(())
}

fn network(ports: u32) -> Vec<Change> {
    let port = |n| {
        let spec = json!({"subnets": ["s"], "host": "h1", "netns": format!("n{n}")});
        set(&format!("port/demo/p{n}"), spec)
    };
    let mut changes = vec![
        set("host/h1", json!({"addresses": ["192.0.2.1"]})),
        set("vpc/demo/net", json!({})),
        set("subnet/demo/s", json!({"vpc": "net", "prefix": "10.0.0.0/24"})),
    ];
    changes.extend((0..ports).map(port));
    changes
}

#[test]
fn a_batch_that_goes_beyond_is_refused() {
    let mut model = Model::default();
    make(&mut model, network(2)).unwrap();
    make(&mut model, vec![set("project/demo", json!({"quota": {"ports": 3, "vpcs": 1}}))]).unwrap();
    let port = |n: u32| network(n + 1).pop().unwrap();
    make(&mut model, vec![port(2)]).unwrap();
    let error = make(&mut model, vec![port(3), port(4)]).unwrap_err();
    let expected = "there are 3, and would be 5 ports, which is more than 3: delete some, or raise the limit";
    assert_eq!(error, format!("project/demo: quota.ports: {expected}"));
    let error = make(&mut model, vec![set("project/demo", json!({"quota": {"ports": 2}}))]).unwrap_err();
    let expected = "there are 3 ports, which is more than 2: delete some, or raise the limit";
    assert_eq!(error, format!("project/demo: quota.ports: {expected}"));
    // One goes and another one comes; the limit is raised in the same batch; other kinds and projects have none.
    make(&mut model, vec![port(3), delete("port/demo/p0")]).unwrap();
    make(&mut model, vec![port(4), set("project/demo", json!({"quota": {"ports": 4, "vpcs": 1}}))]).unwrap();
    make(&mut model, vec![set("security_group/demo/g", json!({})), set("vpc/other/net", json!({}))]).unwrap();
    let error = make(&mut model, vec![set("vpc/demo/two", json!({})), set("vpc/other/two", json!({}))]).unwrap_err();
    assert!(error.contains("project/demo: quota.vpcs: there are 1, and would be 2 vpcs"), "{error}");
    // Without the object there are no limits.
    make(&mut model, vec![delete("project/demo"), port(5), set("vpc/demo/two", json!({}))]).unwrap();
}

/// What others have written does not have to fit; it may change, and become less.
#[test]
fn what_is_beyond_already_can_be_changed() {
    let mut model = Model::default();
    make(&mut model, network(3)).unwrap();
    let mut other = Model::default();
    make(&mut other, vec![set("project/demo", json!({"quota": {"ports": 1}}))]).unwrap();
    let key: Key = "project/demo".parse().unwrap();
    model.set(key.clone(), other.get(&key).unwrap().clone());
    make(&mut model, vec![delete("port/demo/p0")]).unwrap();
    make(&mut model, vec![set("port/demo/p1", json!({"subnets": ["s"], "host": "h1", "netns": "moved"}))]).unwrap();
    make(&mut model, vec![set("project/demo", json!({"quota": {"ports": 1, "vpcs": 5}}))]).unwrap();
    let error = make(&mut model, vec![network(6).pop().unwrap()]).unwrap_err();
    assert!(error.contains("there are 2, and would be 3 ports, which is more than 1"), "{error}");
}

#[test]
fn quotas_name_kinds_of_a_project() {
    let mut model = Model::default();
    let mut refused =
        |quota: Value| make(&mut model, vec![set("project/demo", json!({ "quota": quota }))]).unwrap_err();
    assert!(refused(json!({"hosts": 1})).contains("quota.hosts: unknown field `hosts`"));
    assert!(refused(json!({"ports": -1})).contains("project/demo: quota.ports: invalid value"));
    assert!("project/a/b".parse::<Key>().is_err() && "project/a.b".parse::<Key>().is_err());
    assert!(format!("project/{}", "a".repeat(32)).parse::<Key>().is_err());
    make(&mut model, vec![set("project/demo", json!({}))]).unwrap();
}

fn change() -> impl Strategy<Value = Change> {
    let object = (any::<bool>(), 0..2_usize, 0..3_usize, 0..4_u32);
    let object = object.prop_map(|(is_set, project, kind, n)| {
        let key = format!("{}/{}/n{n}", KINDS[kind].0, PROJECTS[project]);
        if is_set { set(&key, json!({})) } else { delete(&key) }
    });
    let quota = (0..2_usize, prop::collection::btree_map(0..3_usize, 0..5_u64, 0..3));
    let quota = quota.prop_map(|(project, limits)| {
        let limits: BTreeMap<_, _> = limits.into_iter().map(|(kind, limit)| (KINDS[kind].1, limit)).collect();
        set(&format!("project/{}", PROJECTS[project]), json!({ "quota": limits }))
    });
    let gone = (0..2_usize).prop_map(|project| delete(&format!("project/{}", PROJECTS[project])));
    prop_oneof![8 => object, 2 => quota, 1 => gone]
}

/// What there would be, from the batch alone.
fn after(model: &Model, batch: &[Change]) -> BTreeMap<Key, Value> {
    let mut all: BTreeMap<Key, Value> = model.iter().map(|(key, stored)| (key.clone(), stored.spec.value())).collect();
    for change in batch {
        match &change.spec {
            Some(spec) => drop(all.insert(change.key.clone(), spec.clone())),
            None => drop(all.remove(&change.key)),
        }
    }
    all
}

/// Whether a project would have more of a kind than its limit.
fn is_beyond(all: &BTreeMap<Key, Value>) -> bool {
    all.iter().filter(|(key, _)| key.kind() == Kind::Project).any(|(project, spec)| {
        KINDS.iter().any(|(kind, name)| {
            let is_one = |key: &&Key| key.kind().name() == *kind && key.project() == project.name();
            spec["quota"][name].as_u64().is_some_and(|limit| all.keys().filter(is_one).count() as u64 > limit)
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// From nothing, a batch is made exactly if nothing is beyond its limit then.
    #[test]
    fn batches_are_made_exactly_if_they_fit(batches in prop::collection::vec(prop::collection::vec(change(), 1..6), 1..30)) {
        let mut model = Model::default();
        for mut batch in batches {
            let mut seen = std::collections::BTreeSet::new();
            batch.retain(|change| seen.insert(change.key.clone()));
            let is_beyond = is_beyond(&after(&model, &batch));
            let result = model.plan(&Batch { changes: batch.clone() }, 7);
            prop_assert_eq!(result.is_err(), is_beyond, "{:?}: {:?}", batch, result);
            match result {
                Ok(plan) => write(&mut model, &plan),
                Err(error) => prop_assert!(error.0.iter().all(|p| p.is_conflict && p.field.starts_with("quota."))),
            }
        }
    }
}
