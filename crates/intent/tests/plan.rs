//! Batches: what they come to, and why they are refused.

#![allow(clippy::unwrap_used, missing_docs)]

use bifrost_intent::{Batch, Change, Key, Model, Op, Plan, Spec, Stored};
use serde_json::{Value, json};

fn set(key: &str, spec: Value) -> Change {
    Change { op: Op::Set, key: key.parse().unwrap(), spec: Some(spec), if_generation: None }
}

fn delete(key: &str) -> Change {
    Change { op: Op::Delete, key: key.parse().unwrap(), spec: None, if_generation: None }
}

fn plan(model: &mut Model, changes: Vec<Change>) -> Result<Plan, String> {
    model.plan(&Batch { changes }, 7).map_err(|error| error.to_string())
}

fn make(model: &mut Model, changes: Vec<Change>) -> Plan {
    let plan = plan(model, changes).unwrap();
    for (key, stored) in &plan.writes {
        match stored {
            // As it comes back from the store.
            Some(stored) => {
                let again = Stored::decode(key.kind(), &stored.encode()).unwrap();
                assert_eq!(again, *stored);
                model.set(key.clone(), again);
            }
            None => drop(model.remove(key)),
        }
    }
    plan
}

fn base() -> Model {
    let mut model = Model::default();
    make(
        &mut model,
        vec![
            // What is referred to may come later in the batch.
            set("port/demo/web", json!({"subnets": ["a"], "host": "h1", "netns": "web"})),
            set("subnet/demo/a", json!({"vpc": "net", "prefix": "10.0.0.0/29"})),
            set("vpc/demo/net", json!({})),
            set("host/h1", json!({"addresses": ["192.0.2.1"]})),
            set("host/h2", json!({"addresses": ["192.0.2.2", "198.51.100.2"]})),
            set("security_group/demo/web", json!({"ingress": [{"protocol": "tcp", "ports": [80]}]})),
        ],
    );
    model
}

fn get<'m>(model: &'m Model, key: &str) -> &'m Stored {
    model.get(&key.parse::<Key>().unwrap()).unwrap()
}

fn port(spec: Value) -> Value {
    let mut whole = json!({"subnets": ["a"], "host": "h1", "netns": "x"});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    whole
}

#[test]
fn what_is_left_open_is_chosen_and_kept() {
    let mut model = base();
    assert_eq!(get(&model, "vpc/demo/net").spec.value(), json!({"vni": 4096}));
    assert_eq!(get(&model, "subnet/demo/a").spec.value()["gateway"], "10.0.0.1");
    let web = get(&model, "port/demo/web").clone();
    assert_eq!(
        (&web.spec.value()["addresses"], &web.spec.value()["mac"]),
        (&json!(["10.0.0.2"]), &json!("02:00:0a:00:00:02"))
    );
    assert_eq!((web.generation, web.committed_ms), (1, 7));
    // The same again changes nothing, and what was chosen stays with another change.
    let again = json!({"subnets": ["a"], "host": "h1", "netns": "web"});
    let plan = make(&mut model, vec![set("port/demo/web", again.clone())]);
    assert_eq!((plan.writes.len(), plan.unchanged), (0, 1));
    make(&mut model, vec![set("port/demo/web", json!({"subnets": ["a"], "host": "h2", "netns": "web"}))]);
    let Spec::Port(moved) = &get(&model, "port/demo/web").spec else { panic!() };
    assert_eq!((moved.addresses[0].to_string(), get(&model, "port/demo/web").generation), ("10.0.0.2".into(), 2));
}

#[test]
fn an_address_that_was_freed_rests_while_others_are_free() {
    let mut model = base();
    let mut given = Vec::new();
    for n in 3..8 {
        let name = format!("port/demo/p{n}");
        make(&mut model, vec![set(&name, port(json!({"netns": format!("n{n}")})))]);
        let Spec::Port(spec) = &get(&model, &name).spec else { panic!() };
        given.push(spec.addresses[0].to_string());
        if n < 6 {
            make(&mut model, vec![delete(&name)]);
        }
    }
    // .7 is the broadcast address; then the lowest free one.
    assert_eq!(given, ["10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.3"]);
    let more = |n: u32| set(&format!("port/demo/q{n}"), port(json!({"netns": format!("q{n}")})));
    let error = plan(&mut model, vec![more(1), more(2), more(3)]).unwrap_err();
    assert_eq!(error, "port/demo/q3: subnets[0]: no address of 10.0.0.0/29 is free; delete ports, or add a subnet");
    assert_eq!(plan(&mut model, vec![more(1), more(2)]).unwrap().writes.len(), 2);
}

#[test]
fn addresses_that_are_named_come_before_those_that_are_chosen() {
    let mut model = base();
    let named = port(json!({"addresses": ["10.0.0.3"], "netns": "b"}));
    make(&mut model, vec![set("port/demo/a", port(json!({"netns": "a"}))), set("port/demo/b", named)]);
    let Spec::Port(spec) = &get(&model, "port/demo/a").spec else { panic!() };
    assert_eq!(spec.addresses[0].to_string(), "10.0.0.4");
}

#[test]
fn bad_batches_are_refused_and_change_nothing() {
    let host = |address: &str| json!({"addresses": [address]});
    let cases: Vec<(Vec<Change>, &str)> = vec![
        (vec![set("host/h3", json!({"addresses": []}))], "host/h3: addresses: 0 given; there are 1 to 8"),
        (vec![set("host/h3", json!({"adresses": []}))], "host/h3: adresses: unknown field `adresses`"),
        (vec![set("host/h3", json!({"addresses": ["x"]}))], "host/h3: addresses[0]: invalid IP address syntax"),
        (vec![set("host/h3", host("192.0.2.1"))], "host/h3: addresses[0]: 192.0.2.1 is in use by host/h1"),
        (
            vec![set("host/h3", json!({"addresses": ["192.0.2.3", "192.0.2.3"]}))],
            "host/h3: addresses[1]: 192.0.2.3 is named twice; keep one",
        ),
        (vec![set("host/h3", host("0.0.0.0"))], "host/h3: addresses[0]: 0.0.0.0 is not a unicast address"),
        (vec![set("host/h3", host("ff02::1"))], "host/h3: addresses[0]: ff02::1 is not a unicast address"),
        (
            vec![set("host/h3", json!({"addresses": ["192.0.2.3", "2001:db8::3"]}))],
            "host/h3: addresses: a path would run from 2001:db8::3 to 192.0.2.1 of host/h1: name addresses of the same \
             families in the same order on all hosts",
        ),
        (
            vec![set("host/h2", host("2001:db8::2"))],
            "host/h2: addresses: a path would run from 2001:db8::2 to 192.0.2.1",
        ),
        (
            vec![set("port/demo/web", port(json!({"addresses": ["10.0.0.2", "10.0.0.2"]})))],
            "addresses[1]: 10.0.0.2 is named",
        ),
        (
            vec![set("port/demo/web", port(json!({"routed": ["172.16.0.0/16", "172.16.0.0/16"]})))],
            "port/demo/web: routed[1]: 172.16.0.0/16 is named twice; keep one",
        ),
        (vec![delete("host/h1")], "host/h1: is in use by port/demo/web; change or delete that first"),
        (vec![delete("subnet/demo/a")], "subnet/demo/a: is in use by port/demo/web; change or delete that first"),
        (vec![delete("vpc/demo/net")], "vpc/demo/net: is in use by subnet/demo/a; change or delete that first"),
        (vec![set("vpc/demo/two", json!({"vni": 4096}))], "vpc/demo/two: vni: 4096 is in use by vpc/demo/net"),
        (vec![set("vpc/demo/two", json!({"vni": 0}))], "vpc/demo/two: vni: 0 is not in 1..=16777215"),
        (
            vec![set("vpc/demo/two", json!({"gateway": []}))],
            "vpc/demo/two: gateway: follows from other objects; remove it",
        ),
        (vec![set("vpc/demo/two", json!({"colour": "red"}))], "vpc/demo/two: colour: unknown key"),
        (
            vec![set("vpc/demo/net", json!({"vni": 5}))],
            "vpc/demo/net: vni: does not change; delete the object and make another",
        ),
        (
            vec![set("subnet/demo/b", json!({"vpc": "nat", "prefix": "10.1.0.0/24"}))],
            "subnet/demo/b: vpc: there is no vpc/demo/nat; add it, in this batch or before",
        ),
        (
            vec![set("subnet/demo/b", json!({"vpc": "net", "prefix": "10.0.0.0/24"}))],
            "subnet/demo/b: prefix: 10.0.0.0/24 overlaps with subnet/demo/a",
        ),
        (
            vec![set("subnet/demo/b", json!({"vpc": "net", "prefix": "10.1.0.1/24"}))],
            "subnet/demo/b: prefix: 10.1.0.1/24 has host bits set; write 10.1.0.0/24",
        ),
        (
            vec![set("subnet/demo/b", json!({"vpc": "net", "prefix": "10.1.0.0/31"}))],
            "subnet/demo/b: prefix: 10.1.0.0/31 has no room for a router and a port",
        ),
        (
            vec![set("subnet/demo/b", json!({"vpc": "net", "prefix": "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128"}))],
            "/128 has no room for a router and a port",
        ),
        (
            vec![set("subnet/demo/b", json!({"vpc": "net", "prefix": "10.1.0.0/24", "gateway": "10.1.0.255"}))],
            "subnet/demo/b: gateway: 10.1.0.255 is not the address of a host in 10.1.0.0/24",
        ),
        (vec![set("port/demo/x", port(json!({"host": "h9"})))], "port/demo/x: host: there is no host/h9"),
        (vec![set("port/demo/x", port(json!({"host": "../h1"})))], "port/demo/x: host: there is no host/../h1"),
        (vec![set("port/demo/x", port(json!({"subnets": []})))], "port/demo/x: subnets: 0 given; there are 1 to 8"),
        (
            vec![set("port/demo/x", port(json!({"addresses": ["10.9.0.1"]})))],
            "port/demo/x: addresses[0]: 10.9.0.1 is in none of the port's subnets",
        ),
        (
            vec![set("port/demo/x", port(json!({"addresses": ["10.0.0.1"]})))],
            "port/demo/x: addresses[0]: 10.0.0.1 is in use by subnet/demo/a",
        ),
        (
            vec![set("port/demo/x", port(json!({"addresses": ["10.0.0.2"]})))],
            "port/demo/x: addresses[0]: 10.0.0.2 is in use by port/demo/web",
        ),
        (
            vec![set("port/demo/x", port(json!({"mac": "02:00:0a:00:00:02"})))],
            "port/demo/x: mac: 02:00:0a:00:00:02 is in use by port/demo/web",
        ),
        (vec![set("port/demo/x", port(json!({"mac": "x"})))], "\"x\" is not a MAC address"),
        (
            vec![set("port/demo/x", port(json!({"netns": "/run/netns/web"})))],
            "port/demo/x: netns: interface eth0 in /run/netns/web of host h1 is in use by port/demo/web",
        ),
        (vec![set("port/demo/x", port(json!({"mtu": 9})))], "port/demo/x: mtu: 9 is not in 68..=65535"),
        (vec![set("port/demo/x", port(json!({"security_groups": ["db"]})))], "there is no security_group/demo/db"),
        (vec![set("port/demo/x", port(json!({"vni": 7})))], "port/demo/x: vni: follows from other objects; remove it"),
        (
            vec![set("security_group/demo/x", json!({"ingress": [{"protocol": "http"}]}))],
            "security_group/demo/x: ingress[0].protocol: \"http\" is not one of",
        ),
        (
            vec![set("security_group/demo/x", json!({"ingress": [{"from": ["set:gone"]}]}))],
            "security_group/demo/x: ingress[0].from: there is no address_set/demo/gone",
        ),
        (
            vec![set("peering/demo/x", json!({"vpcs": ["net", "net"]}))],
            "a VPC cannot be peered with itself; name two VPCs",
        ),
        (vec![delete("vpc/demo/x"), delete("vpc/demo/x")], "vpc/demo/x: is in the batch twice; keep one"),
        (
            vec![Change { spec: None, ..set("vpc/demo/x", json!({})) }],
            "vpc/demo/x: spec: missing; say what the object is to be",
        ),
        (vec![Change { if_generation: Some(0), ..set("vpc/demo/net", json!({})) }], "vpc/demo/net: exists already"),
        (
            vec![Change { if_generation: Some(4), ..set("vpc/demo/net", json!({})) }],
            "vpc/demo/net: has generation 1, not 4: read it again, and repeat the change",
        ),
        (vec![Change { if_generation: Some(4), ..delete("vpc/demo/x") }], "vpc/demo/x: does not exist"),
    ];
    let mut model = base();
    let objects = |model: &Model| model.iter().map(|(k, s)| (k.clone(), s.clone())).collect::<Vec<_>>();
    let before = objects(&model);
    for (changes, expected) in cases {
        // Beside something that is right.
        let changes = [changes, vec![set("vpc/demo/good", json!({}))]].concat();
        let error = plan(&mut model, changes.clone()).unwrap_err();
        assert!(error.contains(expected), "{changes:?}:\n{error}\ninstead of\n{expected}");
        assert_eq!(objects(&model), before, "{changes:?}");
    }
    assert_eq!(plan(&mut model, vec![delete("vpc/demo/x")]).unwrap(), Plan { writes: vec![], unchanged: 1 });
}

#[test]
fn vpcs_that_are_connected_have_no_addresses_in_common() {
    let mut model = base();
    make(&mut model, vec![set("vpc/demo/two", json!({})), set("peering/demo/p", json!({"vpcs": ["net", "two"]}))]);
    let subnet = |prefix: &str| vec![set("subnet/demo/b", json!({"vpc": "two", "prefix": prefix}))];
    let error = plan(&mut model, subnet("10.0.0.0/24")).unwrap_err();
    assert_eq!(error, "peering/demo/p: vpcs: subnet/demo/a and subnet/demo/b have addresses in common");
    make(&mut model, subnet("10.0.1.0/24"));
    let error = plan(&mut model, vec![set("peering/demo/q", json!({"vpcs": ["two", "net"]}))]).unwrap_err();
    assert_eq!(error, "peering/demo/q: vpcs: peering/demo/p connects them already");
    let error = plan(&mut model, vec![delete("vpc/demo/two")]).unwrap_err();
    assert_eq!(error, "vpc/demo/two: is in use by subnet/demo/b and 1 more; change or delete them first");
    let all = ["vpc/demo/two", "subnet/demo/b", "peering/demo/p"];
    assert_eq!(make(&mut model, all.map(delete).to_vec()).writes.len(), 3, "in whatever order they are named");
}

#[test]
fn records_that_are_none_are_told() {
    let cases: [(&[u8], &str); 4] = [
        (b"", "is not a record"),
        (b"{\"generation\":1}", "is not a record"),
        (b"{\"generation\":1,\"committed_ms\":1,\"spec\":{\"addresses\":7}}", "addresses: invalid type"),
        (b"{\"generation\":-1,\"committed_ms\":1,\"spec\":{}}", "is not a record"),
    ];
    for (value, expected) in cases {
        let error = Stored::decode(bifrost_intent::Kind::Host, value).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}
