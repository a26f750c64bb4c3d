//! Batches that are checked by what they change, against checks of all objects.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::api::{ApplyItem, ApplyOp};
use crate::config::{Config, Kind};
use crate::diff::ConfigDiff;

const FILE: &str = r#"
[host]
name = "host-a"
[underlay]
addresses = ["192.0.2.1"]
[[peer]]
name = "host-b"
addresses = ["192.0.2.2"]
[[vpc]]
vni = 1
gateway = ["10.0.0.254"]
[[vpc]]
vni = 3
[[route]]
vni = 1
prefix = "10.0.0.7/32"
peer = "host-b"
mac = "02:00:00:00:00:07"
"#;

/// Numbers from which an item is made: kind, which object, and two values.
type Numbers = (u8, u8, u8, u8);

/// An item of few possible objects with few possible values, so that contradictions are frequent.
fn item((kind, n, a, b): Numbers) -> ApplyItem {
    let vni = [1, 1, 1, 2, 3][usize::from(n % 5)];
    let mac = |n: u8| format!("02:00:00:00:00:{:02x}", n % 5 + 4);
    let host = |n: u8| format!("10.0.0.{}", n % 5 + 4);
    let peer = ["host-b", "host-b", "host-c"][usize::from(b % 3)];
    let prefix = [format!("{}/32", host(a)), "10.0.0.0/24".to_owned(), "0.0.0.0/0".to_owned()];
    let prefix = &prefix[usize::from(n % 3)];
    let shared = |n: u8| if n.is_multiple_of(4) { json!([host(n / 4)]) } else { json!([]) };
    let groups = |n: u8| if n.is_multiple_of(5) { json!(["web"]) } else { json!([]) };
    let mtu = |n: u8| if n.is_multiple_of(3) { 1400 } else { 1600 };
    let (kind, key, spec) = match kind % 12 {
        0..=3 => {
            let mut spec = json!({"vni": vni, "prefix": prefix, "peer": peer, "mac": mac(b), "shared": shared(b)});
            spec["security_groups"] = groups(b);
            if b.is_multiple_of(2) {
                spec["mtu"] = json!(mtu(b));
            }
            (Kind::Route, format!("{vni}/{prefix}"), spec)
        }
        4 | 5 => {
            let mut spec = json!({"name": format!("port{}", n % 2), "vni": vni, "mac": mac(a), "addresses": [format!("{}/24", host(b))]});
            spec["shared"] = shared(a);
            spec["security_groups"] = groups(a);
            if a.is_multiple_of(3) {
                spec["routed"] = json!([format!("{}/32", host(a))]);
            }
            (Kind::Port, format!("port{}", n % 2), spec)
        }
        6 => {
            let address = if a.is_multiple_of(2) { "192.0.2.3" } else { "2001:db8::3" };
            (Kind::Peer, "host-c".to_owned(), json!({"name": "host-c", "addresses": [address]}))
        }
        7 => {
            let gateway = if a.is_multiple_of(2) { json!(["10.0.0.254"]) } else { json!([host(b)]) };
            (Kind::Vpc, "2".to_owned(), json!({"vni": 2, "gateway": gateway}))
        }
        8 => (Kind::SecurityGroup, "web".to_owned(), json!({"name": "web", "ingress": [{"protocol": "icmp"}]})),
        9 => {
            let to_vni = if vni == 2 { 1 } else { 2 };
            (Kind::Peering, format!("{vni}/{prefix}"), json!({"vni": vni, "prefix": prefix, "to_vni": to_vni}))
        }
        10 => {
            let backends = json!([{"address": host(a), "port": 80}]);
            let spec = json!({"name": "lb", "vni": vni, "address": host(b), "port": 80, "backends": backends});
            (Kind::LoadBalancer, "lb".to_owned(), spec)
        }
        _ if n.is_multiple_of(2) => (Kind::Uplink, "port0".to_owned(), json!({"port": "port0"})),
        _ => {
            let spec = json!({"vni": vni, "uplink": "port0", "addresses": ["203.0.113.1"]});
            (Kind::Nat, vni.to_string(), spec)
        }
    };
    let (op, spec): (_, Option<Value>) =
        if a.is_multiple_of(7) { (ApplyOp::Delete, None) } else { (ApplyOp::Set, Some(spec)) };
    ApplyItem { op, kind, key: Some(key), owner: "test".to_owned(), generation: None, spec }
}

fn composed(file: &Config, others: &Objects) -> Config {
    let mut config = file.clone();
    others.values().for_each(|entry| config.push(entry.object.clone()));
    config
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// A batch is refused if and only if the whole would contradict itself, and the result is what all objects make
    /// when they are put together at once.
    #[test]
    fn a_change_is_checked_and_composed_like_the_whole(
        batches in prop::collection::vec(prop::collection::vec(any::<Numbers>(), 1..4), 1..25),
    ) {
        let file = Arc::new(Config::parse(FILE, "test.toml").unwrap());
        let mut store = Store::new(Arc::clone(&file));
        for batch in batches {
            let items: Vec<ApplyItem> = batch.into_iter().map(item).collect();
            let plan = store.plan(&items, 1);
            // What the same items make of the objects without any check.
            let mut others = store.others().clone();
            let mut seen = BTreeMap::new();
            let mut is_sound = true;
            for item in &items {
                let id = Id { kind: item.kind, key: item.key.clone().unwrap_or_default() };
                is_sound &= seen.insert(id.clone(), ()).is_none() && !(id.kind == Kind::Route && id.key == "1/10.0.0.7/32");
                match &item.spec {
                    None => drop(others.remove(&id)),
                    Some(spec) => match crate::config::Object::parse(item.kind, spec, 1) {
                        Ok(object) => drop(others.insert(id, Entry { owner: "test".into(), generation: 1, changed_ms: 1, object })),
                        Err(_) => is_sound = false,
                    },
                }
            }
            let whole = composed(&file, &others);
            let is_sound = is_sound && whole.check_relations().is_ok();
            prop_assert_eq!(plan.is_ok(), is_sound, "{:?}: {:?} {:?}", items, plan.err(), whole.check_relations());
            if let Ok(plan) = plan {
                prop_assert_eq!(&**plan.config(), &whole);
                let diff = ConfigDiff::between(store.config(), plan.config()).unwrap();
                let routes = plan.changes().keys().filter(|id| id.kind == Kind::Route).count();
                prop_assert!(diff.routes.added.len() + diff.routes.removed.len() + diff.routes.changed.len() <= routes);
                store.commit(plan);
                prop_assert_eq!(&**store.config(), &whole);
            }
        }
    }
}
