use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::api::{ApplyItem, ApplyOp, ErrorKind, ObjectsQuery};
use crate::config::{Config, Kind, Object};

const FILE: &str = r#"
[host]
name = "host-a"
[underlay]
addresses = ["192.0.2.1"]
[[peer]]
name = "host-b"
addresses = ["192.0.2.2"]
[[vpc]]
vni = 100
gateway = ["10.0.0.254"]
[[security_group]]
name = "web"
ingress = [{ protocol = "tcp", ports = [80, "8000-8099"], from = ["10.0.0.0/8", "group:web", "set:admins"] }, { protocol = "icmp" }]
egress = []
[[address_set]]
name = "admins"
addresses = ["10.9.0.0/16"]
[[port]]
name = "web1"
vni = 100
mac = "02:00:00:00:00:01"
addresses = ["10.0.0.1/24"]
security_groups = ["web"]
[[route]]
vni = 100
prefix = "10.0.0.2/32"
peer = "host-b"
mac = "02:00:00:00:00:02"
"#;

fn config(text: &str) -> Arc<Config> {
    Arc::new(Config::parse(text, "t").unwrap())
}

fn store() -> Store {
    Store::new(config(FILE))
}

fn set(kind: Kind, owner: &str, spec: serde_json::Value) -> ApplyItem {
    ApplyItem { op: ApplyOp::Set, kind, key: None, generation: None, owner: owner.to_owned(), spec: Some(spec) }
}

fn delete(kind: Kind, owner: &str, key: &str) -> ApplyItem {
    let key = Some(key.to_owned());
    ApplyItem { op: ApplyOp::Delete, kind, key, generation: None, owner: owner.to_owned(), spec: None }
}

fn route(owner: &str, n: u8) -> ApplyItem {
    let (prefix, mac) = (format!("10.1.0.{n}/32"), format!("02:00:00:00:01:{n:02x}"));
    set(Kind::Route, owner, json!({"vni": 100, "prefix": prefix, "peer": "host-b", "mac": mac}))
}

fn port(owner: &str, n: u8) -> ApplyItem {
    let (name, address) = (format!("p{n}"), format!("10.2.0.{n}/16"));
    let mac = format!("02:00:00:00:02:{n:02x}");
    set(Kind::Port, owner, json!({"name": name, "vni": 100, "mac": mac, "addresses": [address]}))
}

#[test]
fn a_large_batch_of_routes_to_one_vnic_compares_each_once() {
    let item = |n: u32| {
        let prefix = std::net::Ipv4Addr::from(0x0a10_0000 + n);
        let spec = json!({"vni": 100, "prefix": format!("{prefix}/32"), "peer": "host-b", "mac": "02:00:00:00:01:01"});
        set(Kind::Route, "agent", spec)
    };
    let items: Vec<ApplyItem> = (0..10_000).map(item).collect();
    let began = std::time::Instant::now();
    apply(&mut store(), &items).unwrap();
    // All with all are 50 million searches, which take longer.
    assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
}

fn apply(store: &mut Store, items: &[ApplyItem]) -> Result<(), String> {
    let plan = store.plan(items, 7).map_err(|e| e.to_string())?;
    store.commit(plan);
    Ok(())
}

#[test]
fn objects_are_added_and_removed_beside_those_of_the_file() {
    let mut store = store();
    let plan = store.plan(&[route("agent", 3), port("agent", 4)], 1234).unwrap();
    assert_eq!((plan.changes().len(), plan.unchanged()), (2, 0));
    assert_eq!(store.config().ports.len(), 1, "a plan changes nothing");
    store.commit(plan);
    assert_eq!((store.config().ports.len(), store.config().routes.len()), (2, 2));
    // The file's objects come first: indexes in tables follow from the order.
    assert_eq!(store.config().ports[0].name, "web1");
    let list = store.list(&ObjectsQuery { owner: Some("agent".into()), ..ObjectsQuery::default() }).unwrap();
    let listed: Vec<_> = list.objects.iter().map(|o| (o.kind, &*o.key, o.generation, o.changed_ms)).collect();
    assert_eq!(listed, [(Kind::Port, "p4", 1, 1234), (Kind::Route, "100/10.1.0.3/32", 1, 1234)]);
    apply(&mut store, &[delete(Kind::Port, "agent", "p4")]).unwrap();
    assert_eq!(store.config().ports.len(), 1);
    let again = store.plan(&[delete(Kind::Port, "agent", "p4"), route("agent", 3)], 9).unwrap();
    assert_eq!((again.changes().len(), again.unchanged()), (0, 2));
    apply(&mut store, &[delete(Kind::Route, "agent", "100/10.1.0.3/32")]).unwrap();
    assert!(Arc::ptr_eq(store.config(), &Store::new(Arc::clone(store.config())).config().clone()));
    assert_eq!(*store.config(), config(FILE));
}

#[test]
fn every_refusal_names_item_field_and_remedy() {
    let mut store = store();
    apply(&mut store, &[port("agent", 4), ApplyItem { generation: Some(5), ..route("agent", 3) }]).unwrap();
    let spec = |item: ApplyItem, spec: serde_json::Value| ApplyItem { spec: Some(spec), ..item };
    let cases = [
        (port("other", 4), "items[1]: port \"p4\": owner: the object belongs to \"agent\" (let its owner"),
        (delete(Kind::Port, "other", "p4"), "items[1]: port \"p4\": owner: the object belongs to \"agent\""),
        (
            delete(Kind::Port, "agent", "web1"),
            "items[1]: port \"web1\": owner: the object belongs to the configuration",
        ),
        (delete(Kind::Route, "agent", "100/10.0.0.2/32"), "belongs to the configuration file (change the file"),
        (ApplyItem { generation: Some(4), ..route("agent", 3) }, "generation: 4 is stale: the object has generation 5"),
        (
            ApplyItem { generation: Some(4), ..delete(Kind::Route, "agent", "100/10.1.0.3/32") },
            "items[1]: route \"100/10.1.0.3/32\": generation: 4 is stale",
        ),
        (
            ApplyItem {
                generation: Some(5),
                ..spec(
                    route("agent", 3),
                    json!({"vni": 100, "prefix": "10.1.0.3/32", "peer": "host-b", "mac": "02:00:00:00:09:09"}),
                )
            },
            "the object already has generation 5, with another spec (send a later",
        ),
        (ApplyItem { generation: Some(0), ..port("agent", 5) }, "generation: 0 is reserved for the file's objects"),
        (port("file", 5), "items[1]: owner: \"file\" is reserved for the configuration file"),
        (port("A B", 5), "owner: \"A B\" is not 1 to 63 of"),
        (
            ApplyItem { key: Some("p6".into()), ..port("agent", 5) },
            "items[1]: port \"p6\": key: the spec belongs to \"p5\"",
        ),
        (delete(Kind::Route, "agent", "10.0.0.0/8"), "key: \"10.0.0.0/8\" is not a key of a route (VNI/PREFIX"),
        (ApplyItem { key: None, ..delete(Kind::Port, "agent", "x") }, "items[1]: key: missing (its name)"),
        (ApplyItem { spec: None, ..port("agent", 5) }, "items[1]: spec: missing (describe"),
        (spec(delete(Kind::Port, "agent", "p4"), json!({})), "spec: not allowed in a deletion"),
        (
            spec(port("agent", 5), json!([])),
            "items[1]: spec: the spec of a port must be an object with the keys of [[port]]",
        ),
        (spec(port("agent", 5), json!({"name": "p5", "vni": null})), "items[1]: spec: "),
        (
            spec(
                port("agent", 5),
                json!({"name": "p5", "vni": 100, "mac": "02:00:00:00:02:05", "addresses": ["10.2.0.5"]}),
            ),
            "items[1]: addresses[0]: \"10.2.0.5\" lacks a prefix length",
        ),
        (spec(port("agent", 5), json!({"name": "p5", "vnii": 100})), "vnii: unknown key; did you mean \"vni\"?"),
        // Conflicts with other objects.
        (
            spec(
                port("agent", 5),
                json!({"name": "p5", "vni": 100, "mac": "02:00:00:00:00:01", "addresses": ["10.2.0.5/16"]}),
            ),
            "items[1]: port \"p5\": mac: 02:00:00:00:00:01 in VNI 100 is already mac of port \"web1\"",
        ),
        (
            spec(
                route("agent", 8),
                json!({"vni": 100, "prefix": "10.1.0.8/32", "peer": "host-c", "mac": "02:00:00:00:01:08"}),
            ),
            "items[1]: route \"100/10.1.0.8/32\": peer: no peer named \"host-c\"; did you mean \"host-b\"?",
        ),
        (
            set(Kind::Vpc, "agent", json!({"vni": 200, "gateway": ["10.0.0.254"], "dns": ["10.0.0.53"]})),
            "items[1]: vpc \"200\": dns: DNS servers are announced only with DHCP; add `dhcp = true`",
        ),
        (port("agent", 9), "items[1]: port \"p9\": is already in items[0] (name each object once"),
    ];
    let before = store.clone().list(&ObjectsQuery::default());
    for (item, message) in cases {
        let error = store.plan(&[port("agent", 9), item.clone()], 0).unwrap_err().to_string();
        assert!(error.contains(message), "{item:?}: {error}");
        assert_eq!(store.list(&ObjectsQuery::default()), before);
    }
    let many = vec![delete(Kind::Port, "agent", "x"); crate::api::MAX_APPLY_ITEMS + 1];
    assert!(store.plan(&many, 0).unwrap_err().to_string().contains("10001 items are more than 10000"));
    // Objects to which others refer cannot be deleted.
    apply(&mut store, &[set(Kind::Vpc, "agent", json!({"vni": 300}))]).unwrap();
    let guest = json!({"name": "g", "vni": 300, "mac": "02:00:00:00:03:01", "addresses": ["10.0.0.1/24"]});
    apply(&mut store, &[set(Kind::Port, "other", guest)]).unwrap();
    let error = store.plan(&[delete(Kind::Vpc, "agent", "300")], 0).unwrap_err().to_string();
    assert!(error.starts_with("port \"g\": vni: no [[vpc]] has VNI 300"), "{error}");
}

#[test]
fn another_file_keeps_the_objects_of_others() {
    let mut store = store();
    apply(&mut store, &[port("agent", 4), route("agent", 3)]).unwrap();
    let shorter = FILE.replace("10.0.0.2/32", "10.0.0.7/32");
    let plan = store.plan_file(config(&shorter)).unwrap();
    assert_eq!((plan.config().routes.len(), plan.config().ports.len()), (2, 2));
    store.commit(plan);
    assert_eq!(store.config().routes.iter().next().unwrap().prefix.to_string(), "10.0.0.7/32");
    let taken =
        format!("{FILE}[[port]]\nname = 'p4'\nvni = 100\nmac = '02:00:00:00:00:44'\naddresses = ['10.0.0.44/24']\n");
    let error = store.plan_file(config(&taken)).unwrap_err().to_string();
    assert!(error.contains("port \"p4\": is in the file, but already belongs to \"agent\" (remove it"), "{error}");
    let without = FILE.replace("host-b", "host-z");
    let error = store.plan_file(config(&without)).unwrap_err().to_string();
    assert!(error.contains("route \"100/10.1.0.3/32\": peer: no peer named \"host-b\""), "{error}");
    assert_eq!(store.others().len(), 2);
}

#[test]
fn restored_objects_that_conflict_are_left_out() {
    let mut before = store();
    apply(&mut before, &[port("agent", 4), route("agent", 3), set(Kind::Vpc, "agent", json!({"vni": 300}))]).unwrap();
    let guest = json!({"name": "g", "vni": 300, "mac": "02:00:00:00:03:01", "addresses": ["10.0.0.1/24"]});
    apply(&mut before, &[set(Kind::Port, "other", guest)]).unwrap();
    let (same, left_out) = Store::restore(config(FILE), before.others().clone());
    assert_eq!((left_out.len(), same.others(), same.config()), (0, before.others(), before.config()));
    // The file now defines the port, and no longer defines the peer.
    let taken = "[[port]]\nname = 'p4'\nvni = 100\nmac = '02:00:00:00:00:44'\naddresses = ['10.0.0.44/24']\n";
    let file = config(&format!("{}{taken}", FILE.replace("host-b", "host-z")));
    let (rest, left_out) = Store::restore(Arc::clone(&file), before.others().clone());
    let left_out: Vec<_> = left_out.iter().filter_map(|e| e.object.clone()).collect();
    assert_eq!(left_out, [(Kind::Port, "p4".to_owned()), (Kind::Route, "100/10.1.0.3/32".to_owned())]);
    assert_eq!(rest.others().len(), 2);
    assert!(rest.config().check_relations().is_ok());
    // The error belongs to the file's objects, so leaving out single objects does not help.
    let gateway = config(&FILE.replace("10.0.0.254", "10.2.0.4"));
    let (alone, left_out) = Store::restore(Arc::clone(&gateway), before.others().clone());
    assert!(left_out.iter().any(|e| e.object == Some((Kind::Port, "p4".to_owned()))), "{left_out:?}");
    assert!(alone.config().check_relations().is_ok());
}

#[test]
fn specs_parse_to_equal_objects() {
    let everything = include_str!("../../tests/objects.toml");
    let config = Config::parse(everything, "objects.toml").unwrap();
    let mut kinds = std::collections::BTreeSet::new();
    for object in config.objects() {
        let spec = object.spec();
        let read = Object::parse(object.kind(), &spec, config.workers.count);
        assert_eq!(read.as_ref(), Ok(&object), "{spec}");
        assert_eq!(object.kind().canonical(&object.key()), Some(object.key()));
        kinds.insert(object.kind());
    }
    assert_eq!(kinds.len(), Kind::ALL.len(), "there is one of each kind: {kinds:?}");
    for kind in Kind::ALL {
        assert_eq!(Kind::of_name(kind.name()), Some(kind));
        assert_eq!(serde_json::to_value(kind).unwrap(), json!(kind.name()));
    }
}

#[test]
fn digests_differ_if_objects_do() {
    let agents = ObjectsQuery { owner: Some("agent".into()), ..ObjectsQuery::default() };
    let (mut a, mut b) = (store(), store());
    apply(&mut a, &[route("agent", 1), route("agent", 2), port("agent", 3)]).unwrap();
    for item in [port("agent", 3), route("agent", 2)] {
        apply(&mut b, &[item]).unwrap();
    }
    assert_ne!(a.digests(&agents), b.digests(&agents));
    apply(&mut b, &[route("agent", 1)]).unwrap();
    assert_eq!(a.digests(&agents), b.digests(&agents));
    assert_eq!((a.digests(&agents)[0].objects, a.digests(&agents)[0].vni), (3, Some(100)));
    apply(&mut b, &[ApplyItem { generation: Some(2), ..route("agent", 1) }]).unwrap();
    assert_ne!(a.digests(&agents), b.digests(&agents), "a generation counts");
    let all = a.digests(&ObjectsQuery::default());
    let whose: Vec<_> = all.iter().map(|d| (&*d.owner, d.vni, d.objects)).collect();
    assert_eq!(whose, [("agent", Some(100), 3), ("file", None, 3), ("file", Some(100), 3)]);
}

#[test]
fn lists_have_pages() {
    let mut store = store();
    apply(&mut store, &(1..=9).map(|n| route("agent", n)).collect::<Vec<_>>()).unwrap();
    let mut query = ObjectsQuery { kind: Some(Kind::Route), limit: Some(4), ..ObjectsQuery::default() };
    let mut keys = Vec::new();
    loop {
        let list = store.list(&query).unwrap();
        assert!(list.objects.len() <= 4);
        keys.extend(list.objects.into_iter().map(|o| o.key));
        query.from = list.next;
        if query.from.is_none() {
            break;
        }
    }
    let mut wanted: Vec<_> = (1..=9).map(|n| format!("100/10.1.0.{n}/32")).collect();
    wanted.insert(0, "100/10.0.0.2/32".to_owned());
    assert_eq!(keys, wanted);
    let one = ObjectsQuery { kind: Some(Kind::Route), key: Some("100/10.1.0.3/32".into()), ..ObjectsQuery::default() };
    assert_eq!(store.list(&one).unwrap().objects.len(), 1);
}

#[test]
fn a_list_continues_despite_concurrent_changes() {
    let mut store = store();
    apply(&mut store, &(1..60).step_by(2).map(|n| route("agent", n)).collect::<Vec<_>>()).unwrap();
    let key = |n: u8| format!("100/10.1.0.{n}/32");
    let mut stays: Vec<_> = (1..60).step_by(2).map(key).collect();
    stays.push("100/10.0.0.2/32".to_owned());
    for limit in [1, 3, 7] {
        let mut query = ObjectsQuery { limit: Some(limit), ..ObjectsQuery::default() };
        let (mut keys, mut round) = (Vec::new(), 0);
        loop {
            let list = store.list(&query).unwrap();
            keys.extend(list.objects.into_iter().map(|o| (o.kind, o.key)));
            query.from = list.next;
            if query.from.is_none() {
                break;
            }
            round += 1;
            let change = |n| if round % 2 == 1 { route("agent", n) } else { delete(Kind::Route, "agent", &key(n)) };
            apply(&mut store, &(2..60).step_by(2).map(change).collect::<Vec<_>>()).unwrap();
        }
        let times = |key: &String| keys.iter().filter(|(kind, listed)| *kind == Kind::Route && listed == key).count();
        assert!(stays.iter().all(|key| times(key) == 1), "{limit} at a time: {keys:?}");
    }
}

#[test]
fn a_reload_invalidates_a_list() {
    let mut store = store();
    apply(&mut store, &[route("agent", 1)]).unwrap();
    let mut query = ObjectsQuery { limit: Some(1), ..ObjectsQuery::default() };
    query.from = store.list(&query).unwrap().next;
    assert!(store.list(&query).is_ok());
    let plan = store.plan_file(Arc::clone(&store.file)).unwrap();
    store.commit(plan);
    let refused = store.list(&query).unwrap_err();
    assert_eq!((refused.kind, &*refused.location), (ErrorKind::Conflict, "from"));
    for nonsense in ["", ".", "port", "port.", "port.1", "port.1.x", "port.x.1", "cat..x", "port.1.-1"] {
        query.from = Some(nonsense.to_owned());
        assert_eq!(store.list(&query).unwrap_err().kind, ErrorKind::BadRequest, "{nonsense:?}");
    }
    query.from = Some(format!("route.{}.{}", store.former_files, usize::MAX));
    assert_eq!(store.list(&query).unwrap().objects[0].owner, "agent", "after the file's");
}

#[test]
fn a_clone_of_the_store_does_not_see_later_changes() {
    let mut store = store();
    apply(&mut store, &[route("agent", 1)]).unwrap();
    let seen = store.clone();
    assert!(seen.others.ptr_eq(&store.others), "nothing is copied");
    apply(&mut store, &[route("agent", 2)]).unwrap();
    let routes = ObjectsQuery { kind: Some(Kind::Route), ..ObjectsQuery::default() };
    assert_eq!((seen.list(&routes).unwrap().objects.len(), store.list(&routes).unwrap().objects.len()), (2, 3));
}

fn lines(batches: &[BTreeMap<Id, Option<Entry>>]) -> Vec<u8> {
    let line = |batch: &BTreeMap<Id, Option<Entry>>| journal::line(batch.iter().map(|(id, e)| (id, e.as_ref())));
    let lines: Vec<String> = batches.iter().filter_map(line).collect();
    format!("{}{}", journal::HEADER, lines.concat()).into_bytes()
}

#[test]
fn truncated_and_damaged_journals() {
    let mut store = store();
    let mut batches = Vec::new();
    let mut after = vec![Objects::new()];
    for items in
        [vec![route("agent", 1), port("agent", 2)], vec![delete(Kind::Port, "agent", "p2")], vec![port("b", 3)]]
    {
        let plan = store.plan(&items, 5).unwrap();
        batches.push(plan.changes().clone());
        store.commit(plan);
        after.push(store.others().clone());
    }
    let bytes = lines(&batches);
    assert_eq!(journal::read(&bytes, 1).unwrap().objects, *store.others());
    let whole = journal::whole(store.others()).collect::<String>();
    assert_eq!(journal::read(whole.as_bytes(), 1).unwrap().objects, *store.others());
    // A truncated journal gives the complete lines.
    for len in 0..bytes.len() {
        let loaded = journal::read(&bytes[..len], 1).unwrap();
        let complete = bytes[..len].iter().filter(|b| **b == b'\n').count().saturating_sub(1);
        assert_eq!(loaded.objects, after[complete], "{len}");
        assert!(loaded.len <= len && bytes[..loaded.len].last().is_none_or(|b| *b == b'\n'));
    }
    // Each flipped bit is detected, except in the last line end, without which the line is incomplete.
    for index in 0..bytes.len() - 1 {
        let mut damaged = bytes.clone();
        damaged[index] ^= 1;
        assert!(journal::read(&damaged, 1).is_err(), "{index}");
    }
    let newer = String::from_utf8(bytes.clone()).unwrap().replace("objects 1", "objects 2");
    assert_eq!(journal::read(newer.as_bytes(), 1), Err(journal::JournalError::Version("2".to_owned())));
    assert_eq!(journal::read(b"hello\n", 1), Err(journal::JournalError::NotAJournal));
    // An unknown kind is left out and reported.
    let text = r#"[{"kind":"tunnel","key":"x","owner":"a","generation":1,"spec":{}}]"#;
    let strange = format!("{}{:08x} {text}\n", journal::HEADER, crc32fast::hash(text.as_bytes()));
    let loaded = journal::read(strange.as_bytes(), 1).unwrap();
    assert_eq!((loaded.objects.len(), &*loaded.not_understood), (0, &["tunnel \"x\": unknown kind".to_owned()][..]));
}

/// A model of the store: owner, generation and colour by key.
#[derive(Clone, Debug, Default, PartialEq)]
struct Model(BTreeMap<u8, (u8, u64, u8)>);

/// Owner, object, generation, colour (a value in the spec; none: delete).
type Step = (u8, u8, Option<u64>, Option<u8>);

impl Model {
    fn apply(&mut self, batch: &[Step]) -> bool {
        let mut next = self.clone();
        let mut seen = std::collections::BTreeSet::new();
        for (owner, n, generation, colour) in batch {
            let old = self.0.get(n).copied();
            let known = old.map_or(0, |old| old.1);
            let is_good = seen.insert(*n)
                && old.is_none_or(|old| old.0 == *owner)
                && generation.is_none_or(|g| g >= known)
                && !(generation.is_some()
                    && *generation == Some(known)
                    && colour.is_some_and(|c| Some(c) != old.map(|o| o.2)));
            if !is_good {
                return false;
            }
            let same = old.is_some_and(|old| Some(old.2) == *colour) && generation.is_none();
            match colour {
                None => drop(next.0.remove(n)),
                Some(_) if same => {}
                Some(colour) => drop(next.0.insert(*n, (*owner, generation.unwrap_or(known + 1), *colour))),
            }
        }
        *self = next;
        true
    }
}

fn item((owner, n, generation, colour): Step) -> ApplyItem {
    let owner = format!("agent-{owner}");
    let item = match colour {
        None => delete(Kind::Route, &owner, &format!("100/10.1.0.{n}/32")),
        Some(colour) => {
            let mac = format!("02:00:00:00:{n:02x}:{colour:02x}");
            let prefix = format!("10.1.0.{n}/32");
            set(Kind::Route, &owner, json!({"vni": 100, "prefix": prefix, "peer": "host-b", "mac": mac}))
        }
    };
    ApplyItem { generation, ..item }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn the_store_behaves_like_the_model(
        batches in prop::collection::vec(
            prop::collection::vec((0u8..2, 1u8..6, prop::option::of(1u64..6), prop::option::weighted(0.8, 0u8..3)), 1..4),
            1..20,
        )
    ) {
        let mut store = store();
        let mut model = Model::default();
        let mut journalled = Vec::new();
        for batch in batches {
            let items: Vec<ApplyItem> = batch.iter().copied().map(item).collect();
            let plan = store.plan(&items, 1);
            prop_assert_eq!(plan.is_ok(), model.apply(&batch), "{:?}: {:?}", batch, plan);
            if let Ok(plan) = plan {
                journalled.push(plan.changes().clone());
                store.commit(plan);
            }
            let is: BTreeMap<_, _> = store.others().iter().map(|(id, e)| (id.key.clone(), (e.owner.clone(), e.generation))).collect();
            let wanted: BTreeMap<_, _> = model.0.iter().map(|(n, (owner, generation, _))| {
                (format!("100/10.1.0.{n}/32"), (format!("agent-{owner}"), *generation))
            }).collect();
            prop_assert_eq!(is, wanted);
            prop_assert_eq!(store.config().routes.len(), 1 + model.0.len());
        }
        prop_assert_eq!(&journal::read(&lines(&journalled), 1).unwrap().objects, store.others());
    }
}
